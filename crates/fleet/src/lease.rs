//! Leases: how long, for which owner and on which terms a Body is kept. A lease is a record.
//!
//! A Body without a lease stays until it is removed. A lease has a deadline and the action to take then; the server
//! reads the deadlines and applies those actions.
//!
//! Invariant: the lease of a leased Body is created before the Body and removed after it. So `kill -9` at any moment
//! leaves no Body that outlives its terms, at most a lease without a Body, which `gc` removes.
//! Absent on purpose: a timer that ends Bodies. Deadlines have no effect while no server runs; the next server applies
//! them.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

pub use proto::lease::{OnTimeout as Then, PauseMode as Rest};
use proto::{
    BodyId, Failure, Kind,
    event_data::{BodyExpired, BodyLeased, LeaseTerms},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use store::{RecordKey, RecordTable};

use crate::{
    Fleet,
    records::{LEASES, key_of},
};

/// The timeout of a lease without a deadline.
const ENDLESS: u64 = u64::MAX;

/// The terms on which a Body is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The API key that created the Body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The name of the template in the request, if it differs from the one in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// The deadline, in milliseconds since 1970; `None` while the Body is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// The timeout that set the deadline last.
    pub timeout_ms: u64,
    /// The action at the deadline.
    pub then: Then,
    /// Whether a request to a port of the paused Body resumes it.
    #[serde(default)]
    pub auto_resume: bool,
    /// Whether such a request has resumed it; then the server does not end the Body while it is in use.
    #[serde(default)]
    pub resumed_by_traffic: bool,
    /// The way in which it is paused, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<Rest>,
    /// When the guest was last started or resumed, RFC 3339.
    pub since: String,
    /// The metadata that the owner gave.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The network options of the request, in the JSON of the API that received it.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub network: Value,
    /// The token that requests to its ports must carry; `None` if they need none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_token: Option<String>,
    /// The idempotency key of the request that created the Body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

impl Lease {
    /// Creates a lease with a deadline `timeout` from now.
    pub fn new(timeout: Duration, then: Then) -> Self {
        Self {
            owner: None,
            alias: None,
            deadline_ms: Some(after(timeout)),
            timeout_ms: timeout.as_millis() as u64,
            then,
            auto_resume: false,
            resumed_by_traffic: false,
            paused: None,
            since: store::clock::now(),
            metadata: BTreeMap::new(),
            network: Value::Null,
            traffic_token: None,
            request: None,
        }
    }

    /// Creates a lease that lasts until the Body is removed.
    pub fn endless() -> Self {
        Self { deadline_ms: None, timeout_ms: ENDLESS, ..Self::new(Duration::ZERO, Then::Kill) }
    }

    /// Moves the deadline to `timeout` from now.
    pub fn extend(&mut self, timeout: Duration) {
        self.deadline_ms = Some(after(timeout));
        self.timeout_ms = timeout.as_millis() as u64;
    }

    /// Whether the deadline has passed.
    pub fn is_due(&self) -> bool {
        self.deadline_ms.is_some_and(|deadline| deadline <= now_ms())
    }
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn after(timeout: Duration) -> u64 {
    now_ms().saturating_add(timeout.as_millis() as u64)
}

/// Reads and changes the leases of all Bodies.
#[derive(Debug, Clone, Copy)]
pub struct Leases<'a> {
    fleet: &'a Fleet,
}

impl Fleet {
    /// The leases of all Bodies.
    pub fn leases(&self) -> Leases<'_> {
        Leases { fleet: self }
    }
}

impl Leases<'_> {
    fn table(&self) -> RecordTable<'_, Lease> {
        self.fleet.table(LEASES)
    }

    /// The lease of a Body; `None` for a Body that stays until it is removed.
    pub fn get(&self, id: &BodyId) -> Result<Option<Lease>, Failure> {
        Ok(self.table().get(&key(id)?)?.map(|record| record.value))
    }

    /// The lease of a fork of this Body: that of the Body, but with a token of its own. A fork belongs to the owner of the
    /// Body and counts for the owner's quota.
    pub fn terms_of_fork(&self, id: &BodyId) -> Result<Option<Lease>, Failure> {
        let Some(parent) = self.get(id)? else { return Ok(None) };
        let token = parent.traffic_token.as_ref().map(|_| new_traffic_token()).transpose()?;
        Ok(Some(Lease { request: None, paused: None, traffic_token: token, ..parent }))
    }

    /// The leases of all Bodies that exist, by id.
    pub fn all(&self) -> Result<Vec<(BodyId, Lease)>, Failure> {
        let records = self.table().list(None)?.records;
        // A Body that is being created already has a lease, and a Body that is being removed still has one.
        let leases = records.into_iter().filter_map(|record| {
            let id: BodyId = record.key.as_str().parse().ok()?;
            self.fleet.body_path(&id).join("spec.json").exists().then_some((id, record.value))
        });
        Ok(leases.collect())
    }

    /// Changes the lease of a Body and returns the new one. The event comes before the change. If another process
    /// changes the lease meanwhile, `change` runs again on the newer lease, with an event of its own.
    pub fn change(&self, id: &BodyId, mut change: impl FnMut(&mut Lease)) -> Result<Lease, Failure> {
        let changed = self.table().change(&key(id)?, |found| {
            let Some(before) = found else { return Ok(None) };
            let mut lease = before.clone();
            change(&mut lease);
            if lease == *before {
                return Ok(None);
            }
            self.fleet.write(id, BodyLeased { lease: (&lease).into() })?;
            Ok::<_, Failure>(Some(lease))
        })?;
        changed.ok_or_else(|| match self.fleet.body_path(id).join("spec.json").exists() {
            true => {
                Failure::new(Kind::Conflict, format!("Body {id} has no lease: it stays until it is removed"))
                    .hint(format!("remove it: pal rm {id}"))
            }
            false => crate::lifecycle::no_such_body(id),
        })
    }

    /// Appends the event that a Body's deadline has passed. The action that follows has its own events.
    pub fn note_expired(&self, id: &BodyId, lease: &Lease) -> Result<(), Failure> {
        self.fleet.write(id, BodyExpired { deadline_ms: lease.deadline_ms, then: lease.then })
    }

    /// Stores the lease of a Body that is being created.
    pub(crate) fn create(&self, id: &BodyId, lease: &Lease) -> Result<(), Failure> {
        self.table().create(&key(id)?, lease)?;
        Ok(())
    }

    /// Removes the lease of a removed Body. If that fails, `gc` removes it later.
    pub(crate) fn forget(&self, id: &BodyId) {
        let _ = key(id).map(|key| self.table().remove(&key));
    }

    /// Clears the deadline of a Body that is about to be paused or stopped. This comes first: a `pal` that is killed
    /// in between leaves a Body that the next server pauses, never a paused Body that a server removes at its old
    /// deadline.
    pub(crate) fn note_paused(&self, id: &BodyId, how: Rest) -> Result<(), Failure> {
        self.change_if_leased(id, |lease| {
            lease.paused = Some(how);
            lease.deadline_ms = None;
            lease.resumed_by_traffic = false;
        })
    }

    /// Sets a new deadline for a Body that is about to continue.
    pub(crate) fn note_resumed(&self, id: &BodyId) -> Result<(), Failure> {
        self.change_if_leased(id, |lease| {
            lease.paused = None;
            if lease.timeout_ms != ENDLESS {
                lease.extend(Duration::from_millis(lease.timeout_ms));
            }
            lease.since = store::clock::now();
        })
    }

    fn change_if_leased(&self, id: &BodyId, change: impl FnMut(&mut Lease)) -> Result<(), Failure> {
        match self.get(id)? {
            Some(_) => self.change(id, change).map(drop),
            None => Ok(()),
        }
    }

    /// Bodies that have a lease and no directory: the process that created or removed them was killed.
    pub(crate) fn orphans(&self) -> Result<Vec<BodyId>, Failure> {
        let records = self.table().list(None)?.records;
        let ids = records.into_iter().filter_map(|record| record.key.as_str().parse().ok());
        Ok(ids.filter(|id| !self.fleet.body_path(id).exists()).collect())
    }
}

/// A new token for requests to the ports of a Body.
pub fn new_traffic_token() -> Result<String, Failure> {
    let drawn = sys::random::bytes::<20>().map_err(|error| {
        Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
    })?;
    Ok(proto::event::hex(&drawn))
}

fn key(id: &BodyId) -> Result<RecordKey, Failure> {
    key_of([id.as_str()])
}

/// The public part of a lease for events: without the token, and without the network options, which may contain a
/// proxy's password.
impl From<&Lease> for LeaseTerms {
    fn from(lease: &Lease) -> Self {
        let Lease {
            owner,
            alias,
            deadline_ms,
            timeout_ms,
            then,
            auto_resume,
            resumed_by_traffic,
            paused,
            since,
            metadata,
            network: _,
            traffic_token: _,
            request,
        } = lease.clone();
        Self {
            owner,
            alias,
            deadline_ms,
            timeout_ms,
            then,
            auto_resume,
            resumed_by_traffic,
            paused,
            since,
            metadata,
            request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_due_at_its_deadline_and_not_before() {
        let mut lease = Lease::new(Duration::from_secs(60), Then::Kill);
        assert!(!lease.is_due());
        lease.extend(Duration::ZERO);
        assert!(lease.is_due());
        lease.deadline_ms = None;
        assert!(!lease.is_due());
    }

    #[test]
    fn an_event_says_nothing_that_opens_a_door() {
        let mut lease = Lease::new(Duration::from_secs(1), Then::Pause(Rest::Memory));
        lease.traffic_token = Some("secret".into());
        lease.network = serde_json::json!({ "egressProxy": { "password": "secret" } });
        let event = proto::Draft::new(BodyLeased { lease: (&lease).into() });
        assert!(!event.data.to_string().contains("secret"));
        let back: Lease = serde_json::from_value(serde_json::json!(lease)).unwrap();
        assert_eq!(back, lease);
    }
}
