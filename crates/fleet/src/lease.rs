//! Leases: for how long, for whom and on which terms a Body is kept, as `lease.json` in its directory.
//!
//! A Body without one stays until somebody removes it. A lease has a deadline, and says what becomes of the Body then;
//! whoever serves the fleet looks at the deadlines and ends what is due.
//!
//! Invariant: a leased Body has its lease before it is a Body: a `kill -9` leaves none that nobody will ever end.
//! Invariant: the file is written beside and renamed, so a reader sees a whole lease or the one before it.
//! Absent on purpose: a clock that ends Bodies. Nothing runs when nobody serves; what fell due is ended by the next.

use std::{
    collections::BTreeMap,
    fs, io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use body::BodyDir;
pub use proto::lease::{OnTimeout as Then, PauseMode as Rest};
use proto::{
    BodyId, Failure, Kind,
    event_data::{BodyExpired, BodyLeased, LeaseTerms},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Fleet, lock_mutex};

/// The timeout of a lease that has no end.
const ENDLESS: u64 = u64::MAX;
const FILE: &str = "lease.json";
const FILE_LEN_MAX: u64 = 1 << 20;

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

impl Fleet {
    /// On which terms a Body is kept; none for one that stays until it is removed.
    pub fn lease(&self, id: &BodyId) -> Result<Option<Lease>, Failure> {
        let text = match sys::fd::read_small(&self.body_path(id).join(FILE), FILE_LEN_MAX) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unusable(id, error)),
        };
        serde_json::from_str(&text).map(Some).map_err(|error| unusable(id, error.into()))
    }

    /// Changes the terms of a Body that has some; gives them as they are then. What changed is written down first.
    pub fn change_lease(&self, id: &BodyId, change: impl FnOnce(&mut Lease)) -> Result<Lease, Failure> {
        // One at a time: each begins with what the one before has written.
        let _turn = lock_mutex(&self.leases);
        let before = self.lease(id)?.ok_or_else(|| {
            Failure::new(Kind::Conflict, format!("Body {id} has no lease: it stays until it is removed"))
        })?;
        let mut lease = before.clone();
        change(&mut lease);
        if lease != before {
            self.write(id, BodyLeased { lease: (&lease).into() })?;
            let dir = BodyDir::at(self.body_path(id));
            write(&dir, &lease).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => crate::lifecycle::no_such_body(id),
                _ => unusable(id, error),
            })?;
        }
        Ok(lease)
    }

    /// A Body is about to be paused or stopped: it has no deadline until it goes on. First, so that whoever is killed in
    /// between leaves one that is paused later, and never one that is removed at a deadline it should not have.
    pub(crate) fn note_lease_paused(&self, id: &BodyId, how: Rest) -> Result<(), Failure> {
        self.change_if_leased(id, |lease| {
            lease.paused = Some(how);
            lease.deadline_ms = None;
            lease.resumed_by_traffic = false;
        })
    }

    /// A Body is about to go on: its time begins anew.
    pub(crate) fn note_lease_resumed(&self, id: &BodyId) -> Result<(), Failure> {
        self.change_if_leased(id, |lease| {
            lease.paused = None;
            if lease.timeout_ms != ENDLESS {
                lease.extend(Duration::from_millis(lease.timeout_ms));
            }
            lease.since = store::clock::now();
        })
    }

    fn change_if_leased(&self, id: &BodyId, change: impl FnOnce(&mut Lease)) -> Result<(), Failure> {
        match self.lease(id)? {
            Some(_) => self.change_lease(id, change).map(drop),
            None => Ok(()),
        }
    }

    /// Bodies that have a lease, in no order.
    pub fn leased(&self) -> Result<Vec<(BodyId, Lease)>, Failure> {
        let with_lease = |id: BodyId| {
            self.body_path(&id)
                .join("spec.json")
                .exists()
                .then(|| self.lease(&id).ok().flatten())
                .flatten()
                .map(|lease| (id, lease))
        };
        Ok(self.ids()?.into_iter().filter_map(with_lease).collect())
    }

    /// Says in the log that a Body's time is over; what follows has events of its own.
    pub fn expire(&self, id: &BodyId, lease: &Lease) -> Result<(), Failure> {
        self.write(id, BodyExpired { deadline_ms: lease.deadline_ms, then: lease.then })
    }
}

/// Writes the lease of a Body that is being made.
pub(crate) fn write(dir: &BodyDir, lease: &Lease) -> io::Result<()> {
    // A Body that is being removed has lost its directory, and gets no new one.
    fs::metadata(dir.path())?;
    sys::fd::write_whole(&dir.path().join(FILE), &serde_json::to_vec(lease)?)
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

fn unusable(id: &BodyId, error: io::Error) -> Failure {
    Failure::new(Kind::Host, format!("the lease of Body {id} cannot be used")).because(error)
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
