//! Forwards a port on the Body's loopback interface to a socket of the host. Programs reach a proxy outside through
//! it.
//!
//! The listener behind that socket decides what is allowed; this module decides nothing.

use std::net::Ipv4Addr;

use proto::guest::Forward;
use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
};

/// Connections at once; further ones wait.
const CONNECTIONS_MAX: usize = 128;
const BUFFER_LEN: usize = 16 * 1024;

/// Listens for as long as the guest runs. If the port cannot be bound, programs find it closed.
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
