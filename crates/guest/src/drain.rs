//! What a caller still sends after it was refused.
//!
//! Invariant: whoever is refused hears why, also when it sends all it has before it listens: a connection that is closed
//! with something unread is reset, and takes the answer with it.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};

/// Most that is read on, and how long the next piece and all of them may take.
const LEN_MAX: usize = 1 << 30;
const PIECE_WAIT: Duration = Duration::from_secs(10);
const WAIT: Duration = Duration::from_secs(60);

/// Reads the rest beside the answer, and throws it away.
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
