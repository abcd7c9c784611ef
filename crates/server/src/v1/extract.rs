//! Extractors: they authenticate the caller and read the body, query and path of a request, and refuse it in
//! the error format of the native API.

use std::time::Duration;

use axum::{
    extract::{
        FromRequest, FromRequestParts, OptionalFromRequest, Path, Query, Request,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use fleet::{Fleet, Names};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use proto::{BodyId, BodyName, Failure, Kind};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};

use super::error::V1Refusal;
use crate::{App, Caller, Scope, audit, authz, keys, limits::BODY_LEN_MAX};

/// How long a caller may take to send a small request body.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// A caller whose key has at least the scope `read`.
pub struct ReadAccess(pub Caller);
/// A caller whose key has at least the scope `run`: it may create, use and remove Bodies.
pub struct RunAccess(pub Caller);
/// A caller whose key has the scope `admin`.
pub struct AdminAccess(pub Caller);

/// Authenticates the caller and checks its scope. Records refused requests, and those that are about to
/// change something.
async fn caller(parts: &Parts, app: &App, least: Scope) -> Result<Caller, V1Refusal> {
    let secret = keys::sent(&parts.headers).or_else(|| bearer_token(parts));
    let Some(caller) = secret.and_then(|secret| app.keys().caller(secret)) else {
        audit::denied(app, None, &parts.method, &parts.uri, "no valid key").await;
        return Err(V1Refusal::unknown_caller());
    };
    if caller.scope < least {
        audit::denied(app, Some(&caller), &parts.method, &parts.uri, "scope").await;
        let failure = Failure::new(
            Kind::Denied,
            format!("this key may not do that: it needs the scope {}", name(least)),
        );
        return Err(failure
            .hint(format!("make one that may: pal keys create --scope {} NAME", name(least)))
            .into());
    }
    if !audit::only_looks(&parts.method) {
        audit::accepted(app, &caller, &parts.method, &parts.uri).await?;
    }
    Ok(caller)
}

fn name(scope: Scope) -> &'static str {
    match scope {
        Scope::Read => "read",
        Scope::Run => "run",
        Scope::Admin => "admin",
    }
}

/// Whether the client asks for a stream of server-sent events instead of one answer.
pub fn wants_stream(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/event-stream"))
}

/// A browser cannot set headers of a WebSocket, but it can offer subprotocols: `palisade` and `key.SECRET`.
fn bearer_token(parts: &Parts) -> Option<&str> {
    let offered = parts.headers.get(header::SEC_WEBSOCKET_PROTOCOL)?.to_str().ok()?;
    offered.split(',').find_map(|protocol| protocol.trim().strip_prefix("key."))
}

/// A caller that may read the API's description: any caller where only this host reaches the server, elsewhere a caller
/// with a key.
pub struct DocumentAccess;

impl FromRequestParts<App> for DocumentAccess {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        if !app.address().ip().is_loopback() {
            caller(parts, app, Scope::Read).await?;
        }
        Ok(Self)
    }
}

macro_rules! who {
    ($name:ident, $scope:expr) => {
        impl FromRequestParts<App> for $name {
            type Rejection = V1Refusal;
            async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
                caller(parts, app, $scope).await.map(Self)
            }
        }
    };
}
who!(ReadAccess, Scope::Read);
who!(RunAccess, Scope::Run);
who!(AdminAccess, Scope::Admin);

/// A JSON request body of at most [`BODY_LEN_MAX`] bytes.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for JsonBody<T> {
    type Rejection = V1Refusal;
    async fn from_request(request: Request, _app: &App) -> Result<Self, V1Refusal> {
        let bytes = read(request).await?;
        parse(&bytes)
    }
}

impl<T: DeserializeOwned> OptionalFromRequest<App> for JsonBody<T> {
    type Rejection = V1Refusal;
    async fn from_request(request: Request, _app: &App) -> Result<Option<Self>, V1Refusal> {
        let typed = request.headers().contains_key(header::CONTENT_TYPE);
        let empty = hyper::body::Body::size_hint(request.body()).exact() == Some(0);
        if !typed && empty {
            return Ok(None);
        }
        let bytes = read(request).await?;
        if bytes.is_empty() { Ok(None) } else { parse(&bytes).map(Some) }
    }
}

async fn read(request: Request) -> Result<bytes::Bytes, V1Refusal> {
    let kind =
        request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let failure =
            Failure::new(Kind::Usage, "the body must be JSON").hint("send `Content-Type: application/json`");
        return Err(V1Refusal::with(StatusCode::UNSUPPORTED_MEDIA_TYPE, failure));
    }
    let slow = || {
        V1Refusal::with(
            StatusCode::REQUEST_TIMEOUT,
            Failure::new(Kind::Usage, "the body did not arrive in time"),
        )
    };
    let collected =
        tokio::time::timeout(BODY_WAIT, Limited::new(request.into_body(), BODY_LEN_MAX).collect())
            .await
            .map_err(|_| slow())?;
    collected.map(http_body_util::Collected::to_bytes).map_err(|error| {
        if error.is::<LengthLimitError>() {
            let failure = Failure::new(Kind::Usage, format!("the body is longer than {BODY_LEN_MAX} bytes"));
            V1Refusal::with(
                StatusCode::PAYLOAD_TOO_LARGE,
                failure.hint("files go through /v1/bodies/{id}/files"),
            )
        } else {
            Failure::new(Kind::Usage, "the body could not be read").into()
        }
    })
}

/// Reads a body that must be a JSON object. serde would also take the fields of a struct from an array, in the order of
/// their declaration, and larger integers; the API's description allows objects alone, and integers of 64 bits with a
/// sign.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<JsonBody<T>, V1Refusal> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let read = |reader: &mut serde_json::Deserializer<_>| {
        let fields: serde_json::Map<String, serde_json::Value> = read_object(&mut *reader)?;
        reader.end()?;
        if let Some((name, _)) = fields.iter().find(|(_, value)| has_large_integer(value)) {
            return Err(serde_json::Error::custom(format!(
                "an integer in `{name}` is larger than {}",
                i64::MAX
            )));
        }
        serde_json::from_value(serde_json::Value::Object(fields)).map(JsonBody)
    };
    read(&mut reader)
        .map_err(|error| Failure::new(Kind::Usage, format!("cannot read the request body: {error}")).into())
}

fn has_large_integer(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Number(number) => {
            number.as_u64().is_some_and(|number| i64::try_from(number).is_err())
        }
        serde_json::Value::Array(items) => items.iter().any(has_large_integer),
        serde_json::Value::Object(fields) => fields.values().any(has_large_integer),
        _ => false,
    }
}

/// For fields that are objects: refuses the array form that serde offers for structs.
pub fn read_object<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<T, D::Error> {
    let fields = serde_json::Map::deserialize(deserializer)?;
    serde_json::from_value(serde_json::Value::Object(fields)).map_err(D::Error::custom)
}

/// [`read_object`] for a field that may be absent or null.
pub fn read_object_or_null<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let fields = Option::<serde_json::Map<String, serde_json::Value>>::deserialize(deserializer)?;
    fields.map(|fields| serde_json::from_value(fields.into()).map_err(D::Error::custom)).transpose()
}

/// [`read_object`] for a list of objects.
pub fn read_objects<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let items = Vec::<serde_json::Map<String, serde_json::Value>>::deserialize(deserializer)?;
    items.into_iter().map(|item| serde_json::from_value(item.into()).map_err(D::Error::custom)).collect()
}

/// The query parameters.
pub struct QueryParams<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for QueryParams<T> {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let read: Result<Query<T>, QueryRejection> = Query::from_request_parts(parts, app).await;
        read.map(|Query(asked)| Self(asked))
            .map_err(|error| Failure::new(Kind::Usage, error.body_text()).into())
    }
}

/// A name in the path.
pub struct NameParam(pub String);

impl FromRequestParts<App> for NameParam {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let read: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, app).await;
        read.map(|Path(name)| Self(name)).map_err(|_| Failure::new(Kind::NotFound, "no such resource").into())
    }
}

/// Two names in the path.
pub struct PairParam(pub String, pub String);

impl FromRequestParts<App> for PairParam {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let read: Result<Path<(String, String)>, PathRejection> = Path::from_request_parts(parts, app).await;
        read.map(|Path((first, second))| Self(first, second))
            .map_err(|_| Failure::new(Kind::NotFound, "no such resource").into())
    }
}

/// The Body in the path, by its full id or its name.
pub struct BodyParam(pub BodyId);

impl FromRequestParts<App> for BodyParam {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let NameParam(name) = NameParam::from_request_parts(parts, app).await?;
        let secret = keys::sent(&parts.headers).or_else(|| bearer_token(parts));
        let caller =
            secret.and_then(|secret| app.keys().caller(secret)).ok_or_else(V1Refusal::unknown_caller)?;
        Ok(Self(find_body(app, &caller, &name).await?))
    }
}

/// Finds the id of the Body that a caller names by its id or its name. A name means nothing to a caller that may not see
/// its Body; an id is returned as it is, because the log has events of removed Bodies.
pub async fn find_body(app: &App, caller: &Caller, key: &str) -> Result<BodyId, Failure> {
    let name: BodyName = key.parse().map_err(|_| no_body(key))?;
    let caller = caller.clone();
    let found = app.blocking(async move |fleet: &Fleet| match Names::of(fleet).find_exact(&name)? {
        Some(id) if id.as_str() != name.as_str() => {
            Ok(authz::may_reach(&caller, fleet.leases().get(&id)?.as_ref()).then_some(id))
        }
        found => Ok(found),
    });
    found.await?.map_or_else(|| key.parse().map_err(|_| no_body(key)), Ok)
}

/// The Body does not exist, or this caller may not see it.
pub fn no_body(name: &str) -> Failure {
    Failure::new(Kind::NotFound, format!("there is no Body {}", proto::text::visible(name)))
        .hint("list them: GET /v1/bodies")
}
