//! Guests that were told to end by a `pal` that was killed before they had.

use std::{
    io::ErrorKind,
    time::{Duration, Instant},
};

use body::guest::GuestError;
use proto::{BodyId, Failure, Kind, launch::RunRecord};

use crate::Fleet;

/// How long a guest may think about whether it is ending; one that is stuck is not.
const ANSWER: Duration = Duration::from_secs(2);
/// How long its processes may take to end: longer than the grace that `stop` gives them where nothing else is asked for.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Whether a guest that is there was told to end; that is waited for. The caller has the lock, so nobody tells it now.
pub(crate) async fn has_ended(fleet: &Fleet, id: &BodyId, running: &RunRecord) -> Result<bool, Failure> {
    let begun = Instant::now();
    let is_there = || body::dir::alive(running.pid, running.ticks).is_some();
    let mut said_so = false;
    while is_there() {
        // Once it has said so, what else it says is only how it ends.
        if !said_so {
            match is_ending(fleet, id).await {
                Some(true) => said_so = true,
                Some(false) => return Ok(!is_there()),
                None if begun.elapsed() > ANSWER => return Ok(!is_there()),
                None => {}
            }
        }
        if begun.elapsed() > PATIENCE {
            return Err(Failure::new(Kind::Conflict, format!("Body {id} is still being stopped"))
                .hint(format!("end it now: pal stop --grace 0s {id}")));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(true)
}

/// What its guest says to that; nothing where it was cut short.
async fn is_ending(fleet: &Fleet, id: &BodyId) -> Option<bool> {
    match tokio::time::timeout(ANSWER, fleet.guest(id).info()).await {
        Ok(Ok(info)) => Some(info.ending),
        // One that ends listens no more; others refuse only where too many wait already.
        Ok(Err(GuestError::Connect(error))) => Some(error.kind() == ErrorKind::ConnectionRefused),
        Ok(Err(GuestError::Broken(_))) => None,
        Ok(Err(_)) | Err(_) => Some(false),
    }
}
