//! The guests that this process has observed, and the idle connections that earlier commands left open.

use std::{collections::HashMap, sync::Mutex};

use body::{BodyDir, dir::ObservedGuest, guest::GuestConnection};
use proto::{BodyId, Failure, launch::RunRecord};

use crate::lock_mutex;

/// Most guests that are remembered between commands; each takes two descriptors.
const OBSERVED_MAX: usize = 64;
/// Most idle connections that are kept between commands; each takes a descriptor here and a little memory in the
/// guest.
const CONNECTIONS_MAX: usize = 64;

/// Guests and connections to them, kept from one command to the next.
#[derive(Debug, Default)]
pub(crate) struct GuestConnections {
    observed: Mutex<HashMap<BodyId, ObservedGuest>>,
    idle: Mutex<HashMap<BodyId, GuestConnection>>,
}

/// Whether a guest is the one that this process observed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuestIdentity {
    /// It is the observed guest.
    Same,
    /// It may be another guest.
    Other,
}

impl GuestConnections {
    /// Takes the idle connection that an earlier command left.
    pub(super) fn take(&self, id: &BodyId) -> Option<GuestConnection> {
        lock_mutex(&self.idle).remove(id).filter(GuestConnection::can_be_used)
    }

    /// Keeps a connection for the next command if there is room.
    pub(crate) fn keep(&self, id: &BodyId, connection: GuestConnection) {
        let mut idle = lock_mutex(&self.idle);
        idle.retain(|_, connection| connection.can_be_used());
        if idle.len() < CONNECTIONS_MAX {
            idle.insert(id.clone(), connection);
        }
    }

    /// The guest of the Body in `dir`. Calls `look` unless this guest was observed before. Does not check whether an
    /// observed guest still runs: a connection to it would fail.
    pub(super) fn observe(
        &self,
        id: &BodyId,
        dir: &BodyDir,
        look: impl FnOnce() -> Result<RunRecord, Failure>,
    ) -> Result<(ObservedGuest, GuestIdentity), Failure> {
        let before = lock_mutex(&self.observed).get(id).cloned();
        if let Some(guest) = before.filter(|guest| guest.still_runs(dir)) {
            return Ok((guest, GuestIdentity::Same));
        }
        // The stamp is read first: a guest that starts meanwhile has another stamp, and the next call looks it up
        // again.
        let stamp = dir.run_stamp();
        let guest = ObservedGuest::new(stamp, look()?);
        let mut observed = lock_mutex(&self.observed);
        if observed.len() >= OBSERVED_MAX {
            observed.clear();
        }
        observed.insert(id.clone(), guest.clone());
        Ok((guest, GuestIdentity::Other))
    }

    /// Forgets a guest that is about to end.
    pub(crate) fn forget(&self, id: &BodyId) {
        lock_mutex(&self.observed).remove(id);
        lock_mutex(&self.idle).remove(id);
    }
}
