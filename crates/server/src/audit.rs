//! Who asked for what: every request that changes something, and every one that was refused for want of a right.
//!
//! Invariant: a change that cannot be written down does not happen.
//! Invariant: whoever knocks without a key fills no log: of refusals a few each second are written, and how many more
//! there were.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{Method, Uri};
use fleet::Fleet;
use proto::{
    Failure,
    event_data::{RequestAccepted, RequestDenied},
};

use crate::{App, Caller};

const WINDOW: Duration = Duration::from_secs(1);
const DENIALS_MAX: u32 = 5;
const PATH_LEN_MAX: usize = 512;

/// How many refusals were written lately.
#[derive(Debug, Clone, Default)]
pub struct AuditCounter(Arc<Mutex<RecentRefusals>>);

#[derive(Debug, Default)]
struct RecentRefusals {
    since: Option<Instant>,
    written: u32,
    unwritten: u64,
}

impl AuditCounter {
    /// How many refusals were not written since the last that was; none if this one is not to be written either.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lately.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            lately.since = Some(now);
            lately.written = 0;
        }
        if lately.written >= DENIALS_MAX {
            lately.unwritten += 1;
            return None;
        }
        lately.written += 1;
        Some(std::mem::take(&mut lately.unwritten))
    }
}

/// Whether a request of that method changes nothing.
pub fn only_looks(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Writes down a request that is about to change something.
pub async fn accepted(app: &App, caller: &Caller, method: &Method, uri: &Uri) -> Result<(), Failure> {
    let data =
        RequestAccepted { key: caller.key.clone(), method: method.as_str().to_owned(), path: path(uri) };
    app.blocking(async move |fleet: &Fleet| fleet.log().note(data)).await
}

/// Writes down a request that was refused, and why.
pub async fn denied(app: &App, caller: Option<&Caller>, method: &Method, uri: &Uri, why: &str) {
    let Some(unwritten) = app.audit().admit(Instant::now()) else { return };
    let data = RequestDenied {
        key: caller.map(|caller| caller.key.clone()),
        method: method.as_str().to_owned(),
        path: path(uri),
        why: why.to_owned(),
        unwritten_before: unwritten,
    };
    // Refused it is, written or not.
    let _ = app.blocking(async move |fleet: &Fleet| fleet.log().note(data)).await;
}

/// Without the query, which may hold a token.
fn path(uri: &Uri) -> String {
    uri.path().chars().take(PATH_LEN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_written_a_few_each_second_and_the_rest_counted() {
        let (audit, start) = (AuditCounter::default(), Instant::now());
        let written = (0..100).filter(|_| audit.admit(start).is_some()).count();
        assert_eq!(written, DENIALS_MAX as usize);
        assert_eq!(audit.admit(start + WINDOW), Some(95));
        assert_eq!(audit.admit(start + WINDOW), Some(0));
    }
}
