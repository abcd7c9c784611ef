//! Waits for a guest that a killed `pal` had asked to shut down.

use std::{
    io::ErrorKind,
    time::{Duration, Instant},
};

use body::guest::GuestError;
use proto::{BodyId, Failure, Kind, launch::RunRecord};

use crate::Fleet;

/// How long to wait for the guest's answer; a guest that does not answer counts as not shutting down.
const ANSWER: Duration = Duration::from_secs(2);
/// How long its processes may take to end: longer than the default grace period of `stop`.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Whether the guest has ended. Waits for a guest that is shutting down. The caller holds the Body's lock, so no other
/// process asks the guest to shut down meanwhile.
pub(crate) async fn has_ended(fleet: &Fleet, id: &BodyId, running: &RunRecord) -> Result<bool, Failure> {
    let begun = Instant::now();
    let is_there = || body::dir::alive(running.pid, running.ticks).is_some();
    let mut said_so = false;
    while is_there() {
        // A guest that has confirmed its shutdown is not asked again: it may stop answering.
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

/// Whether the guest says that it is shutting down; `None` if the connection broke before it answered.
async fn is_ending(fleet: &Fleet, id: &BodyId) -> Option<bool> {
    match tokio::time::timeout(ANSWER, fleet.guest(id).info()).await {
        Ok(Ok(info)) => Some(info.ending),
        // A guest that shuts down has closed its socket. A live guest refuses a connection only if its backlog is full.
        Ok(Err(GuestError::Connect(error))) => Some(error.kind() == ErrorKind::ConnectionRefused),
        Ok(Err(GuestError::Broken(_))) => None,
        Ok(Err(_)) | Err(_) => Some(false),
    }
}
