//! Waits for a condition, with a time limit.

use std::time::{Duration, Instant};

/// Polls until `look` returns a value; panics with `what` after ten seconds.
pub async fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(Duration::from_secs(10), what, look).await
}

/// Polls with another time limit.
pub async fn within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Polls without a runtime, with a time limit.
pub fn blocking<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
