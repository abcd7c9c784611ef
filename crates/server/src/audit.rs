//! The audit of requests: the log gets an event for every request that changes something, and for every
//! request that was refused for lack of a right.
//!
//! Invariant: a change that cannot be recorded does not happen.
//! Invariant: callers without a key cannot fill the log: a few refusals per second are recorded, with the
//! number of those that were not.

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

/// Counts the refusals that were recorded recently.
#[derive(Debug, Clone, Default)]
pub struct AuditCounter(Arc<Mutex<RecentRefusals>>);

#[derive(Debug, Default)]
struct RecentRefusals {
    since: Option<Instant>,
    written: u32,
    unwritten: u64,
}

impl AuditCounter {
    /// Decides whether to record this refusal: returns the number of refusals since the last recorded one, or
    /// none if this one is over the rate.
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

/// Whether a request with this method is read-only.
pub fn only_looks(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Records a request that is about to change something.
pub async fn accepted(app: &App, caller: &Caller, method: &Method, uri: &Uri) -> Result<(), Failure> {
    let data =
        RequestAccepted { key: caller.key.clone(), method: method.as_str().to_owned(), path: path(uri) };
    app.blocking(async move |fleet: &Fleet| fleet.log().note(data)).await
}

/// Records a request that was refused, and why.
pub async fn denied(app: &App, caller: Option<&Caller>, method: &Method, uri: &Uri, why: &str) {
    let Some(unwritten) = app.audit().admit(Instant::now()) else { return };
    let data = RequestDenied {
        key: caller.map(|caller| caller.key.clone()),
        method: method.as_str().to_owned(),
        path: path(uri),
        why: why.to_owned(),
        unwritten_before: unwritten,
    };
    // The request stays refused even if the event cannot be written.
    let _ = app.blocking(async move |fleet: &Fleet| fleet.log().note(data)).await;
}

/// The path without the query, which may hold a token.
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
