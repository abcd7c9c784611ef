//! The host's ends of an inspected connection: most often one, and more where rules send requests to other hosts.

use std::rc::Rc;

use hyper::{
    Request, Response, Version,
    body::Incoming,
    client::conn::{http1, http2},
    header::{self, HeaderValue},
    http::uri::PathAndQuery,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Mutex, Notify};
use tokio_rustls::client::TlsStream;

use super::{H2, body::AnyBody, tasks::ConnectionTasks};
use crate::{peers::HostStream, refusal::Denial};

/// Sends requests to the host on one connection.
pub enum Upstream {
    /// One request after the other.
    Http1(Mutex<http1::SendRequest<AnyBody>>),
    Http2(http2::SendRequest<AnyBody>),
}

impl Upstream {
    /// Speaks HTTP on a connection. `gone` is told when the host ends it.
    pub async fn open(
        stream: TlsStream<HostStream>,
        tasks: &ConnectionTasks,
        gone: Rc<Notify>,
    ) -> Result<Self, Denial> {
        let no_http = |error: hyper::Error| Denial::unreachable(format!("its host speaks no HTTP: {error}"));
        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
        let stream = TokioIo::new(stream);
        if is_h2 {
            let mut builder = http2::Builder::new(tasks.clone());
            let opened = builder.timer(TokioTimer::new()).handshake(stream).await;
            let (sender, connection) = opened.map_err(no_http)?;
            tasks.spawn(async move {
                let _ = connection.await;
                gone.notify_one();
            });
            return Ok(Self::Http2(sender));
        }
        let (sender, connection) = http1::handshake(stream).await.map_err(no_http)?;
        tasks.spawn(async move {
            let _ = connection.with_upgrades().await;
            gone.notify_one();
        });
        Ok(Self::Http1(Mutex::new(sender)))
    }

    /// Whether the host speaks HTTP/2.
    pub fn is_h2(&self) -> bool {
        matches!(self, Self::Http2(_))
    }

    /// Whether the host has ended the connection.
    pub fn is_closed(&self) -> bool {
        match self {
            // One that is in use is open.
            Self::Http1(sender) => sender.try_lock().is_ok_and(|sender| sender.is_closed()),
            Self::Http2(sender) => sender.is_closed(),
        }
    }

    /// Sends a request, and returns the head of the answer.
    pub async fn send(&self, request: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                let request = for_http1(request);
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

/// The request as HTTP/1.1 writes it, where the program speaks HTTP/2 and its host does not.
fn for_http1(request: Request<AnyBody>) -> Request<AnyBody> {
    if request.version() < Version::HTTP_2 {
        return request;
    }
    let (mut parts, body) = request.into_parts();
    parts.version = Version::HTTP_11;
    if let Some(host) = parts.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        parts.headers.insert(header::HOST, host);
    }
    let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    parts.uri = path.parse().unwrap_or_default();
    parts.headers.remove(header::TE);
    // RFC 9113 8.2.3: HTTP/2 may split them.
    let cookies: Vec<&[u8]> =
        parts.headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let (true, Ok(cookies)) = (cookies.len() > 1, HeaderValue::from_bytes(&cookies.join(&b"; "[..]))) {
        parts.headers.insert(header::COOKIE, cookies);
    }
    Request::from_parts(parts, body)
}
