//! Idempotency of requests: the header `Idempotency-Key`, for all APIs.
//!
//! The lease of a Body holds the mark of the request that created it, so the mark survives a restart of the
//! server. A key belongs to its caller: two callers may use the same key, and one caller uses a key for one
//! request, whatever the API.
//!
//! Invariant: at most [`TURNS_MAX`] requests are kept in memory; the marks on disk are removed with their
//! Bodies.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::http::HeaderMap;
use fleet::{BodyView, Fleet, Lease};
use proto::{BodyId, Failure, Kind, event::hex};
use sha2::{Digest, Sha256};
use tokio::sync::OwnedMutexGuard;

use crate::{App, Caller};

const KEY_LEN_MAX: usize = 255;
const TURNS_MAX: usize = 4096;

/// Why a request with an idempotency key is refused.
#[derive(Debug, thiserror::Error)]
pub enum IdempotencyError {
    /// The key has an invalid format.
    #[error("Idempotency-Key is not 1 to 255 letters, digits, `-`, `_`, `.` or `:`")]
    Key,
    /// The caller used the key for a different request.
    #[error("this Idempotency-Key was used for another request")]
    OtherRequest,
    /// The server cannot look up the Body that the request created.
    #[error(transparent)]
    Lookup(Failure),
}

impl From<IdempotencyError> for Failure {
    fn from(error: IdempotencyError) -> Self {
        match error {
            IdempotencyError::Key => Failure::new(Kind::Usage, error.to_string())
                .hint("use 1 to 255 letters, digits, `-`, `_`, `.` or `:`"),
            IdempotencyError::OtherRequest => {
                Failure::new(Kind::Conflict, error.to_string()).hint("use a new key for each new request")
            }
            IdempotencyError::Lookup(failure) => failure,
        }
    }
}

/// A request that has an idempotency key.
#[derive(Debug, Clone)]
pub struct KeyedRequest {
    /// The caller and the key, hashed.
    name: String,
    /// The hash of the request's contents.
    says: String,
}

/// The Body that a request created; locked while the request is in progress.
pub type RequestSlot = OwnedMutexGuard<Option<BodyId>>;

/// The slot of a request that several tasks may wait for.
type SharedSlot = Arc<tokio::sync::Mutex<Option<BodyId>>>;

/// Requests that are in progress or ended recently. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RequestSlots(Arc<Mutex<HashMap<String, SharedSlot>>>);

impl KeyedRequest {
    /// The request of `caller` with the contents `said`, if it has a key.
    pub fn of(headers: &HeaderMap, caller: &Caller, said: &[u8]) -> Result<Option<Self>, IdempotencyError> {
        let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
        if !is_key(key.as_bytes()) {
            return Err(IdempotencyError::Key);
        }
        let hash = |bytes: &[u8]| hex(&Sha256::digest(bytes)[..16]);
        let name = hash(&[caller.key.as_bytes(), b":", key.as_bytes()].concat());
        Ok(Some(Self { name, says: hash(said) }))
    }

    /// The mark that the created Body's lease holds.
    pub fn mark(&self) -> String {
        format!("{}:{}", self.name, self.says)
    }

    /// Whether a mark is that of this request. It is an error if the caller used the key for another one.
    pub fn is_marked(&self, mark: Option<&str>) -> Result<bool, IdempotencyError> {
        match mark.and_then(|mark| mark.split_once(':')) {
            Some((name, says)) if name == self.name && says != self.says => {
                Err(IdempotencyError::OtherRequest)
            }
            Some((name, _)) => Ok(name == self.name),
            None => Ok(false),
        }
    }

    /// The Bodies that earlier repetitions of the request created. The caller holds the request's slot.
    pub fn made_bodies(&self, fleet: &Fleet) -> Result<Vec<BodyId>, IdempotencyError> {
        let mut made = Vec::new();
        for (id, lease) in fleet.leases().all().map_err(IdempotencyError::Lookup)? {
            if self.is_marked(lease.request.as_deref())? {
                made.push(id);
            }
        }
        Ok(made)
    }

    fn has_made(&self, lease: &Lease) -> bool {
        let name = lease.request.as_deref().and_then(|mark| mark.split_once(':')).map(|(name, _)| name);
        name == Some(self.name.as_str())
    }

    /// Finds the Body that an earlier repetition of the request created. The caller holds the request's slot.
    pub async fn find_made(
        &self,
        app: &App,
        turn: &RequestSlot,
    ) -> Result<Option<(BodyView, Option<Lease>)>, IdempotencyError> {
        let (request, lately) = (self.clone(), (**turn).clone());
        let looked = app.blocking(async move |fleet: &Fleet| {
            let known = lately.and_then(|id| Some((id.clone(), fleet.leases().get(&id).ok()??)));
            let known = match known {
                Some(known) => Some(known),
                None => fleet.leases().all()?.into_iter().find(|(_, lease)| request.has_made(lease)),
            };
            known.map(|(id, lease)| Ok((fleet.view(&id)?, Some(lease)))).transpose()
        });
        match looked.await {
            Ok(Some((_, Some(lease)))) if lease.request != Some(self.mark()) => {
                Err(IdempotencyError::OtherRequest)
            }
            Ok(found) => Ok(found),
            // The Body was removed since.
            Err(failure) if failure.kind == Kind::NotFound => Ok(None),
            Err(failure) => Err(IdempotencyError::Lookup(failure)),
        }
    }
}

impl RequestSlots {
    /// Waits for the slot of a request: a repetition waits until the first one is done.
    pub async fn take(&self, request: &KeyedRequest) -> RequestSlot {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if turns.len() >= TURNS_MAX {
                // Requests that are not in progress can be found in the leases again.
                turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            }
            turns.entry(request.name.clone()).or_default().clone()
        };
        turn.lock_owned().await
    }
}

/// The format of a key: `^[A-Za-z0-9_.:-]{1,255}$`.
fn is_key(key: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
    (1..=KEY_LEN_MAX).contains(&key.len()) && key.iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_to_the_grammar() {
        let long = "x".repeat(255);
        for key in ["a", "once-1", "Order_7:v1.2", &long] {
            assert!(is_key(key.as_bytes()), "{key}");
        }
        let longer = "x".repeat(256);
        for key in ["", "two words", "a/b", "ž", "a#b", &longer] {
            assert!(!is_key(key.as_bytes()), "{key}");
        }
    }
}
