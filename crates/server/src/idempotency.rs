//! Requests that may be sent twice and must be done once: the header `Idempotency-Key`, for every API alike.
//!
//! The Body that a request made carries the request's mark in its lease, so a restart of the server forgets nothing. A
//! key belongs to its caller: two callers may use the same one, and one caller uses it for one request of any API.
//!
//! Invariant: at most [`TURNS_MAX`] requests are remembered in memory; the marks on disk go with their Bodies.

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

/// Why a request with a key is not done.
#[derive(Debug, thiserror::Error)]
pub enum IdempotencyError {
    /// The key does not keep to the grammar.
    #[error("Idempotency-Key is not 1 to 255 letters, digits, `-`, `_`, `.` or `:`")]
    Key,
    /// The caller used the key for a request that says something else.
    #[error("this Idempotency-Key was used for another request")]
    OtherRequest,
    /// The server cannot look for the Body that the request made.
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

/// A request that has a key.
#[derive(Debug, Clone)]
pub struct KeyedRequest {
    /// The caller and the key, hashed.
    name: String,
    /// What the request says, hashed.
    says: String,
}

/// The Body that a request made; locked while it is made.
type RequestSlot = OwnedMutexGuard<Option<BodyId>>;

/// Requests that are being done, or were lately; a clone is the same one.
#[derive(Debug, Clone, Default)]
pub struct RequestSlots(Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<Option<BodyId>>>>>>);

impl KeyedRequest {
    /// The request of `caller` that says `said`, if it has a key.
    pub fn of(headers: &HeaderMap, caller: &Caller, said: &[u8]) -> Result<Option<Self>, IdempotencyError> {
        let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
        if !is_key(key.as_bytes()) {
            return Err(IdempotencyError::Key);
        }
        let hash = |bytes: &[u8]| hex(&Sha256::digest(bytes)[..16]);
        let name = hash(&[caller.key.as_bytes(), b":", key.as_bytes()].concat());
        Ok(Some(Self { name, says: hash(said) }))
    }

    /// What the Body that it makes carries.
    pub fn mark(&self) -> String {
        format!("{}:{}", self.name, self.says)
    }

    fn has_made(&self, lease: &Lease) -> bool {
        let name = lease.request.as_deref().and_then(|mark| mark.split_once(':')).map(|(name, _)| name);
        name == Some(self.name.as_str())
    }

    /// The Body that the request made before. The caller has the turn.
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
            // It was removed in between.
            Err(failure) if failure.kind == Kind::NotFound => Ok(None),
            Err(failure) => Err(IdempotencyError::Lookup(failure)),
        }
    }
}

impl RequestSlots {
    /// Waits for the turn of a request: a repetition waits until the first is done.
    pub async fn take(&self, request: &KeyedRequest) -> RequestSlot {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if turns.len() >= TURNS_MAX {
                // Those that are not being done can be read from the leases again.
                turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            }
            turns.entry(request.name.clone()).or_default().clone()
        };
        turn.lock_owned().await
    }
}

/// The one grammar of a key: `^[A-Za-z0-9_.:-]{1,255}$`.
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
