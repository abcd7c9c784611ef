//! Drains the rest of a request that was refused.
//!
//! Invariant: a refused caller receives the reason even if it sends its whole request before it reads. The kernel
//! resets a connection that is closed with unread bytes, and the answer would be lost.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::{
    Request,
    body::{Body, Bytes, Incoming},
};

use crate::reply::HttpReply;

/// Most bytes that are drained, and how long the next chunk and all of them may take.
const LEN_MAX: usize = 1 << 30;
const PIECE_WAIT: Duration = Duration::from_secs(10);
const WAIT: Duration = Duration::from_secs(60);

/// Refuses a request whose body no service reads.
pub fn refuse(request: Request<Incoming>, reply: HttpReply) -> HttpReply {
    if !request.body().is_end_stream() {
        read_on(request.into_body());
    }
    reply
}

/// Reads the rest of the request and discards it, in parallel with the answer.
pub fn read_on(mut body: Incoming) {
    tokio::task::spawn_local(tokio::time::timeout(WAIT, async move {
        let mut left = LEN_MAX;
        while let Ok(Some(Ok(frame))) = tokio::time::timeout(PIECE_WAIT, body.frame()).await {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
            if left == 0 {
                return;
            }
        }
    }));
}
