//! The host's end of an inspected connection.

use std::rc::Rc;

use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Mutex, Notify};
use tokio_rustls::client::TlsStream;

use super::{body::AnyBody, tasks::ConnectionTasks};
use crate::peers::HostStream;

/// Sends requests to the host on one connection.
pub enum Upstream {
    /// One request after the other.
    Http1(Mutex<http1::SendRequest<AnyBody>>),
    Http2(http2::SendRequest<AnyBody>),
}

impl Upstream {
    /// Speaks HTTP on a connection. `gone` is told when the host ends it.
    pub async fn open(
        stream: TokioIo<TlsStream<HostStream>>,
        is_h2: bool,
        tasks: &ConnectionTasks,
        gone: Rc<Notify>,
    ) -> hyper::Result<Self> {
        if is_h2 {
            let mut builder = http2::Builder::new(tasks.clone());
            let (sender, connection) = builder.timer(TokioTimer::new()).handshake(stream).await?;
            tasks.spawn(async move {
                let _ = connection.await;
                gone.notify_one();
            });
            return Ok(Self::Http2(sender));
        }
        let (sender, connection) = http1::handshake(stream).await?;
        tasks.spawn(async move {
            let _ = connection.with_upgrades().await;
            gone.notify_one();
        });
        Ok(Self::Http1(Mutex::new(sender)))
    }

    /// Sends a request, and returns the head of the answer.
    pub async fn send(&self, request: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                let mut sender = sender.lock().await;
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }
}
