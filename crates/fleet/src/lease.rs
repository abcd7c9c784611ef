//! Leases: for how long, for whom and on which terms a Body is kept. A lease is a record.
//!
//! A Body without a lease stays until it is removed. A lease has a deadline and says what becomes of the Body then; the
//! server reads the deadlines and ends the Bodies that are due.
//!
//! Invariant: a leased Body has its lease before it is a Body and until it is none: `kill -9` at any moment leaves no
//! Body that stays forever against its terms, at most a lease without a Body, which `gc` removes.
//! Absent on purpose: a clock that ends Bodies. Nothing runs while no server does; the next one ends what fell due.

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

/// The timeout of a lease that has no end.
const ENDLESS: u64 = u64::MAX;

/// On which terms a Body is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The key that asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The template as it was asked for, where that is another word for what the spec says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// When it ends or is paused, in milliseconds since 1970; none while it is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// How far ahead the deadline was set last.
    pub timeout_ms: u64,
    /// What becomes of it then.
    pub then: Then,
    /// Whether a request to a port of it lets it go on.
    #[serde(default)]
    pub auto_resume: bool,
    /// Whether such a request did: then it is not ended while it is in use.
    #[serde(default)]
    pub resumed_by_traffic: bool,
    /// How it is paused, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<Rest>,
    /// When its guest was started or let go on last, RFC 3339.
    pub since: String,
    /// What its owner wrote on it.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The network as it was asked for, in the words of the surface that was asked.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub network: Value,
    /// What callers of its ports must send; none lets everybody in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_token: Option<String>,
    /// What tells two requests for the same Body from two for two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

impl Lease {
    /// A lease that ends in `timeout`.
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

    /// A lease that ends when its Body is removed.
    pub fn endless() -> Self {
        Self { deadline_ms: None, timeout_ms: ENDLESS, ..Self::new(Duration::ZERO, Then::Kill) }
    }

    /// Moves the deadline to `timeout` from now.
    pub fn extend(&mut self, timeout: Duration) {
        self.deadline_ms = Some(after(timeout));
        self.timeout_ms = timeout.as_millis() as u64;
    }

    /// Whether its deadline is over.
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

/// The leases of all Bodies.
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

    /// The terms on which a Body is kept; none for one that stays until it is removed.
    pub fn get(&self, id: &BodyId) -> Result<Option<Lease>, Failure> {
        Ok(self.table().get(&key(id)?)?.map(|record| record.value))
    }

    /// All Bodies that have a lease, by id.
    pub fn all(&self) -> Result<Vec<(BodyId, Lease)>, Failure> {
        let records = self.table().list(None)?.records;
        // A Body that is being made has a lease already, and one that is being removed has it still.
        let leases = records.into_iter().filter_map(|record| {
            let id: BodyId = record.key.as_str().parse().ok()?;
            self.fleet.body_path(&id).join("spec.json").exists().then_some((id, record.value))
        });
        Ok(leases.collect())
    }

    /// Changes the terms of a Body that has some, and returns the new ones. The change is an event first; where another
    /// process changes the same lease meanwhile, `change` runs again on the newer terms, with an event of its own.
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

    /// Appends the event that a Body's time is over; what follows has events of its own.
    pub fn note_expired(&self, id: &BodyId, lease: &Lease) -> Result<(), Failure> {
        self.fleet.write(id, BodyExpired { deadline_ms: lease.deadline_ms, then: lease.then })
    }

    /// Stores the lease of a Body that is being made.
    pub(crate) fn create(&self, id: &BodyId, lease: &Lease) -> Result<(), Failure> {
        self.table().create(&key(id)?, lease)?;
        Ok(())
    }

    /// A Body is gone. A lease that cannot be removed now is removed by `gc`.
    pub(crate) fn forget(&self, id: &BodyId) {
        let _ = key(id).map(|key| self.table().remove(&key));
    }

    /// A Body is about to be paused or stopped: it has no deadline until it goes on. This comes first, so that a `pal`
    /// that is killed in between leaves a Body that is paused later, and never one that is removed at a deadline it
    /// should not have.
    pub(crate) fn note_paused(&self, id: &BodyId, how: Rest) -> Result<(), Failure> {
        self.change_if_leased(id, |lease| {
            lease.paused = Some(how);
            lease.deadline_ms = None;
            lease.resumed_by_traffic = false;
        })
    }

    /// A Body is about to go on: its time begins anew.
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

    /// Bodies that have a lease and no directory: whoever removed or made them was killed.
    pub(crate) fn orphans(&self) -> Result<Vec<BodyId>, Failure> {
        let records = self.table().list(None)?.records;
        let ids = records.into_iter().filter_map(|record| record.key.as_str().parse().ok());
        Ok(ids.filter(|id| !self.fleet.body_path(id).exists()).collect())
    }
}

fn key(id: &BodyId) -> Result<RecordKey, Failure> {
    key_of([id.as_str()])
}

/// What events say of a lease: no token, and no network object, which may hold a proxy's password.
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
