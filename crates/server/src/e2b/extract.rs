//! Extractors and the authentication layer of the E2B API.

use std::time::Duration;

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Request, State},
    http::{StatusCode, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use fleet::{BodyView, Fleet, Lease};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use proto::BodyId;
use serde::de::DeserializeOwned;

use super::E2bRefusal;
use crate::{App, Caller, Scope, audit, authz, keys, route::without_client, v1::read_object};

const BODY_LEN_MAX: usize = 1 << 20;
const BODY_WAIT: Duration = Duration::from_secs(30);

/// Lets a request pass if its key has the scope for it, and records requests that change something.
pub async fn admit(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let caller = keys::sent(request.headers()).and_then(|key| app.keys().caller(key));
    let needed = if audit::only_looks(&method) { Scope::Read } else { Scope::Run };
    let caller = match caller {
        Some(caller) if caller.scope >= needed => caller,
        Some(caller) => {
            audit::denied(&app, Some(&caller), &method, &uri, "scope").await;
            return E2bRefusal::new(StatusCode::FORBIDDEN, "this key is read-only").into_response();
        }
        None => {
            audit::denied(&app, None, &method, &uri, "no valid key").await;
            return E2bRefusal::new(StatusCode::UNAUTHORIZED, "send a valid API key as X-API-KEY")
                .into_response();
        }
    };
    if needed > Scope::Read
        && let Err(failure) = audit::accepted(&app, &caller, &method, &uri).await
    {
        return E2bRefusal::from(failure).into_response();
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = E2bRefusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, E2bRefusal> {
        let known = parts.extensions.get::<Caller>().cloned();
        known.ok_or_else(|| E2bRefusal::new(StatusCode::UNAUTHORIZED, "send a valid API key as X-API-KEY"))
    }
}

/// The JSON body of a request, which is an object; an empty body counts as an empty one.
#[derive(Debug)]
pub struct JsonRequest<T> {
    /// The parsed value.
    pub value: T,
    /// The bytes as they arrived.
    pub bytes: Bytes,
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonRequest<T> {
    type Rejection = E2bRefusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, E2bRefusal> {
        let read =
            tokio::time::timeout(BODY_WAIT, Limited::new(request.into_body(), BODY_LEN_MAX).collect()).await;
        let collected = read
            .map_err(|_| {
                E2bRefusal::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "the request's body did not arrive in 30 seconds",
                )
            })?
            .map_err(|error| match error.is::<LengthLimitError>() {
                true => {
                    E2bRefusal::new(StatusCode::PAYLOAD_TOO_LARGE, "the request's body is longer than 1 MiB")
                }
                false => E2bRefusal::bad("the request's body broke off"),
            })?;
        let bytes = collected.to_bytes();
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let mut reader = serde_json::Deserializer::from_slice(text);
        let value = read_object(&mut reader).and_then(|value| reader.end().map(|()| value));
        let value =
            value.map_err(|error| E2bRefusal::bad(format!("the request's body is invalid: {error}")))?;
        Ok(Self { value, bytes })
    }
}

/// The parameters of a query.
#[derive(Debug, Clone, Default)]
pub struct QueryPairs(Vec<(String, String)>);

impl QueryPairs {
    /// The first value with this name; an empty value counts as absent.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }

    /// All values with this name, including those joined by commas.
    pub fn texts<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(key, _)| key == name)
            .flat_map(|(_, value)| value.split(','))
            .filter(|value| !value.is_empty())
    }

    /// A whole number, 0 or greater.
    pub fn number(&self, name: &str) -> Result<Option<u64>, E2bRefusal> {
        let wrong = |_| E2bRefusal::bad(format!("{name} is not a whole number"));
        self.text(name).map(|text| text.parse().map_err(wrong)).transpose()
    }

    /// The number of items on a page.
    pub fn limit(&self) -> Result<usize, E2bRefusal> {
        match self.number("limit")? {
            None => Ok(100),
            Some(limit @ 1..=1000) => Ok(limit.min(100) as usize),
            Some(_) => Err(E2bRefusal::bad("limit is not a number from 1 to 100")),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for QueryPairs {
    type Rejection = E2bRefusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, E2bRefusal> {
        Ok(Self(
            form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).into_owned().collect(),
        ))
    }
}

/// Finds a Body that exists and that the caller reaches, by its id or a name that begins with it.
pub async fn find(app: &App, caller: &Caller, named: &str) -> Result<(BodyView, Option<Lease>), E2bRefusal> {
    let unknown = || E2bRefusal::no_sandbox(named);
    let id: BodyId = without_client(named).parse().map_err(|_| unknown())?;
    let found =
        app.blocking(async move |fleet: &Fleet| Ok((fleet.view(&id)?, fleet.leases().get(&id)?))).await;
    match found {
        Ok((view, lease)) if authz::may_reach(caller, lease.as_ref()) => Ok((view, lease)),
        Ok(_) => Err(unknown()),
        Err(failure) if failure.kind == proto::Kind::NotFound => Err(unknown()),
        Err(failure) => Err(failure.into()),
    }
}
