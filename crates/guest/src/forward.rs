//! A port on the Body's own loopback that leads to a socket of the host: how programs reach a proxy outside.
//!
//! Whoever listens on that socket decides; nothing is decided here.

use std::net::Ipv4Addr;

use proto::guest::Forward;
use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
};

/// Connections at once; more wait.
const CONNECTIONS_MAX: usize = 128;
const BUFFER_LEN: usize = 16 * 1024;

/// Listens for as long as the guest lives. Where that cannot be, programs find the port closed.
pub async fn serve(forward: Forward) {
    let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, forward.port)).await else { return };
    let free = std::sync::Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(turn) = free.clone().acquire_owned().await else { return };
        if let Ok((inside, _)) = listener.accept().await {
            let socket = forward.socket.clone();
            tokio::task::spawn_local(async move {
                carry(inside, &socket).await;
                drop(turn);
            });
        }
    }
}

async fn carry(mut inside: TcpStream, socket: &str) {
    let Ok(mut outside) = UnixStream::connect(socket).await else { return };
    let _ = tokio::io::copy_bidirectional_with_sizes(&mut inside, &mut outside, BUFFER_LEN, BUFFER_LEN).await;
}
