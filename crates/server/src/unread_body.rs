//! The rest of a request that its handler did not read.
//!
//! Invariant: a connection of HTTP/1 that goes on after a response has nothing of the request left in it; a caller
//! whose connection ends instead learns that from the response.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::header,
};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};

/// As long as the longest JSON body.
const LEN_MAX: usize = 1 << 20;
const WAIT: Duration = Duration::from_secs(1);

/// The handle on the body of a request whose handler has the body itself.
#[derive(Debug)]
pub struct UnreadBody {
    body: Arc<Mutex<Incoming>>,
    expects_continue: bool,
}

/// The part of a request that is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remainder {
    /// Nothing, or a task of the server still reads it.
    None,
    /// Bytes that the caller sends or would send.
    Unread,
}

impl UnreadBody {
    /// Shares the body of a request with its handler. A request without a body has nothing to share.
    pub fn split(request: Request<Incoming>) -> (Request, Option<Self>) {
        if hyper::body::Body::is_end_stream(request.body()) {
            return (request.map(Body::new), None);
        }
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let (parts, body) = request.into_parts();
        let body = Arc::new(Mutex::new(body));
        let shared = Body::new(SharedBody(body.clone()));
        (Request::from_parts(parts, shared), Some(Self { body, expects_continue }))
    }

    /// Discards a short rest, after the handler returned its response.
    pub async fn finish(self) -> Remainder {
        // A proxied request may still be on its way into a Body.
        let Some(body) = Arc::into_inner(self.body) else { return Remainder::None };
        let body = body.into_inner().unwrap_or_else(PoisonError::into_inner);
        if hyper::body::Body::is_end_stream(&body) {
            return Remainder::None;
        }
        if self.expects_continue {
            // Reading would ask the caller to send a body that nothing needs.
            return Remainder::Unread;
        }
        tokio::time::timeout(WAIT, discard(body)).await.unwrap_or(Remainder::Unread)
    }
}

async fn discard(mut body: Incoming) -> Remainder {
    let mut left = LEN_MAX;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Remainder::Unread };
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return Remainder::Unread;
        }
    }
    Remainder::None
}

/// The handler's side of a shared body.
struct SharedBody(Arc<Mutex<Incoming>>);

impl SharedBody {
    fn held(&self) -> MutexGuard<'_, Incoming> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl hyper::body::Body for SharedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut *self.held()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.held().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.held().size_hint()
    }
}
