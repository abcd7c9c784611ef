//! Requests that may be sent twice and must be done once: `Idempotency-Key`.
//!
//! The Body that a request made carries the request's mark in its lease, so a restart of the server forgets nothing.
//!
//! Invariant: at most [`TURNS_MAX`] requests are remembered in memory; the marks on disk go with their Bodies.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::http::{HeaderMap, StatusCode};
use fleet::{Fleet, Lease, View};
use proto::{BodyId, event::hex};
use sha2::{Digest, Sha256};

use super::Refusal;
use crate::{App, Caller};

const TURNS_MAX: usize = 4096;

/// A request that names itself.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whose it is and what it is called, hashed.
    name: String,
    /// What it says, hashed.
    says: String,
}

/// The Body that a request made; locked while it is made.
type Turn = Arc<tokio::sync::Mutex<Option<BodyId>>>;

/// Requests that are being done, or were lately.
#[derive(Debug, Clone, Default)]
pub struct Once(Arc<Mutex<HashMap<String, Turn>>>);

impl Request {
    /// The request, if it names itself.
    pub fn of(headers: &HeaderMap, caller: &Caller, body: &[u8]) -> Result<Option<Self>, Refusal> {
        let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
        if !(1..=255).contains(&key.len()) || !key.as_bytes().iter().all(plain) {
            return Err(Refusal::bad("Idempotency-Key is not 1 to 255 of a-z, 0-9 and -"));
        }
        let hash = |bytes: &[u8]| hex(&Sha256::digest(bytes)[..16]);
        Ok(Some(Self {
            name: hash(&[caller.key.as_bytes(), b":", key.as_bytes()].concat()),
            says: hash(body),
        }))
    }

    /// What the Body it makes carries.
    pub fn mark(&self) -> String {
        format!("{}:{}", self.name, self.says)
    }

    fn made(&self, lease: &Lease) -> bool {
        lease
            .request
            .as_ref()
            .is_some_and(|mark| mark.split_once(':').is_some_and(|(name, _)| name == self.name))
    }
}

impl Once {
    /// The turn of a request: whoever has it does it.
    pub fn turn(&self, request: &Request) -> Turn {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.len() >= TURNS_MAX {
            // Those that are not being done can be read from the leases again.
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        turns.entry(request.name.clone()).or_default().clone()
    }
}

/// The Body that the request has made before.
pub async fn find(
    app: &App,
    request: &Request,
    lately: Option<&BodyId>,
) -> Result<Option<(View, Option<Lease>)>, Refusal> {
    let (asked, lately) = (request.clone(), lately.cloned());
    let found = app
        .blocking(async move |fleet: &Fleet| {
            let known = lately.and_then(|id| Some((id.clone(), fleet.lease(&id).ok()??)));
            let known = match known {
                Some(known) => Some(known),
                None => fleet.leased()?.into_iter().find(|(_, lease)| asked.made(lease)),
            };
            known.map(|(id, lease)| Ok((fleet.view(&id)?, Some(lease)))).transpose()
        })
        .await?;
    match &found {
        Some((_, Some(lease))) if lease.request != Some(request.mark()) => Err(Refusal::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "this Idempotency-Key was used for another request",
        )),
        _ => Ok(found),
    }
}
