//! Incoming connections: the server accepts them, limits their number, and lets responses finish when it stops.
//!
//! Invariant: a server has at most [`CONNECTIONS_MAX`] connections, and fewer if it may open few files; further ones
//! wait in the kernel's queue until one ends.
//! Invariant: one peer has at most its share of them; a further connection is refused with the time to retry.

use std::{sync::Arc, time::Duration};

use axum::Router;
use rustix::process::{Resource, getrlimit};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};

use crate::{
    App,
    abort::{AbortHandle, AbortableConnection},
    connection::ConnectionService,
    peers::PeerConnections,
    tls::{self, Acceptor},
};

const CONNECTIONS_MAX: u64 = 8192;
/// Files that a connection may need: its socket, one into a Body, and files that the request opens.
const FILES_PER_CONNECTION: u64 = 4;
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long responses in progress have to finish when the server stops.
const STOP_WAIT: Duration = Duration::from_secs(5);
/// Refusals that are sent at the same time; further ones are connections that just end.
const REFUSALS_MAX: usize = 32;
const REFUSAL_WAIT: Duration = Duration::from_secs(1);
const REFUSAL: &str = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 146\r\n\r\n\
    {\"code\":429,\"status\":429,\"kind\":\"limit\",\"message\":\"this address has too many connections\",\
    \"hints\":[\"use connections again, or close unused ones\"]}";

/// Serves until `stop` completes, then lets responses in progress finish for a while.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Acceptor>,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let places = connections_max();
    let slots = Arc::new(Semaphore::new(places as usize));
    let peers = PeerConnections::new(app.config().bounds.peer_connections_max);
    let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
    let (stopping, heard) = watch::channel(());
    let mut stop = std::pin::pin!(stop);
    loop {
        let slot = tokio::select! {
            slot = slots.clone().acquire_owned() => slot,
            () = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, from)) = accepted else {
            // Too many open files, or a caller that disconnected before the accept: both are temporary.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Some(place) = peers.take(from.ip()) else {
            app.services().limits().note_refusal("connections");
            if let (Ok(permit), None) = (refusals.clone().try_acquire_owned(), &tls) {
                tokio::spawn(async move {
                    let _permit = permit;
                    let _ = tokio::time::timeout(REFUSAL_WAIT, refuse(stream)).await;
                });
            }
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (stream, abort) = AbortableConnection::new(stream);
        let service = ConnectionService { app: app.clone(), router: router.clone(), stopping: heard.clone() };
        let tls = tls.clone();
        tokio::spawn(async move {
            let _held = (slot, place);
            match tls {
                None => service.serve_http1(stream, abort).await,
                Some(tls) => serve_encrypted(service, stream, abort, tls).await,
            }
        });
    }
    drop((listener, stopping));
    let _ = tokio::time::timeout(STOP_WAIT, slots.acquire_many(places)).await;
}

async fn serve_encrypted(
    service: ConnectionService,
    stream: AbortableConnection,
    abort: AbortHandle,
    tls: Acceptor,
) {
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_WAIT, tls.0.accept(stream)).await else { return };
    if stream.get_ref().1.alpn_protocol() == Some(tls::HTTP_2) {
        service.serve_http2(stream).await;
    } else {
        service.serve_http1(stream, abort).await;
    }
}

/// The number of connections that this process can hold with the files that it may open.
fn connections_max() -> u32 {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    CONNECTIONS_MAX.min(files / FILES_PER_CONNECTION).max(1) as u32
}

/// Tells a caller why its connection ends, and reads on until it has heard that.
async fn refuse(mut stream: TcpStream) -> std::io::Result<()> {
    stream.write_all(REFUSAL.as_bytes()).await?;
    stream.shutdown().await?;
    let mut space = [0; 4096];
    while stream.read(&mut space).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_is_whole() {
        let (head, body) = REFUSAL.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap()["code"], 429);
    }
}
