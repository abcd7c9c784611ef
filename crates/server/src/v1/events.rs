//! The event log: in pages, as server-sent events, and over a WebSocket. A client can resume both streams at
//! any position.

use std::{convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, WebSocket, rejection::WebSocketUpgradeRejection},
    },
    http::HeaderMap,
    response::{
        IntoResponse, Response,
        sse::{Event as Said, KeepAlive, Sse},
    },
};
use fleet::Fleet;
use futures_util::{SinkExt, StreamExt, stream};
use proto::{BodyId, Event, Failure, Kind};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::owned,
    error::{ErrorBody, V1Refusal},
    extract::{QueryParams, ReadAccess, find_body},
    page,
};
use crate::{App, Caller, KeyReach, Scope, limits};

/// Events that one query reads.
const READ_MAX: usize = 256;
/// A client that takes longer to receive one event is disconnected.
pub const SEND_WAIT: Duration = Duration::from_secs(30);
pub const PING_EVERY: Duration = Duration::from_secs(20);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(follow)).routes(routes!(verify))
}

/// One event of the log.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Event)]
pub struct EventBody {
    /// Version of the envelope.
    v: u32,
    /// Position among all events of the log, in the order of storing; `after` takes it.
    pos: u64,
    /// The chain that the event is in: `body/ID`, `agent/ID`, `node/ID`, or `log` for events of earlier versions.
    chain: String,
    /// Sequence number in its chain, without gaps.
    seq: u64,
    /// The time of the event, RFC 3339 in UTC.
    at: String,
    /// A noun and a verb in the past tense, such as `body.started`.
    #[serde(rename = "type")]
    kind: String,
    /// The Body that the event is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    body: Option<String>,
    /// The Brain that the event is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    brain: Option<String>,
    /// Details of the event; their fields depend on the type.
    #[schema(value_type = Object)]
    data: serde_json::Value,
    /// Hash of the event before this one in its chain.
    prev: String,
    /// Hash of this event.
    hash: String,
}

impl From<Event> for EventBody {
    fn from(event: Event) -> Self {
        let Event { v, pos, chain, seq, at, kind, body, brain, data, prev, hash } = event;
        let (chain, body) = (chain.to_string(), body.map(|body| body.to_string()));
        Self { v, pos, chain, seq, at, kind, body, brain, data, prev, hash }
    }
}

/// Which events to list.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventsQuery {
    /// Only events after this position; 0 is before the first.
    #[param(minimum = 0)]
    after: Option<u64>,
    /// Only events of this Body, by id or name. A key that does not reach every Body must name one that it reaches.
    #[param(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    body: Option<String>,
    /// The largest number of events on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u16>,
}

/// Which events to follow.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FollowQuery {
    /// Only events after this position; if left out, only new events.
    #[param(minimum = 0)]
    after: Option<u64>,
    /// Only events of this Body, by id or name. A key that does not reach every Body must name one that it reaches.
    #[param(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    body: Option<String>,
}

/// A page of events.
#[derive(Debug, Serialize, ToSchema)]
struct Events {
    /// The events, oldest first.
    items: Vec<EventBody>,
    /// `after` for the next page: the position of the last event here, or the requested `after` if there is
    /// none.
    next: u64,
}

/// The events that a caller asks for and may see.
#[derive(Debug, Clone)]
struct EventSelection {
    /// Only events of this Body.
    body: Option<BodyId>,
    /// Whether events that concern no Body are shown: requests, keys, settings.
    node: NodeEvents,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeEvents {
    Shown,
    Hidden,
}

impl EventSelection {
    /// Reads the next events; also returns the position up to which the log was read.
    fn read(&self, fleet: &Fleet, after: u64, limit: usize) -> Result<(Vec<Event>, u64), Failure> {
        let mut events = fleet.log().events(after, self.body.as_ref(), limit)?;
        let next = events.last().map_or(after, |event| event.pos);
        events.retain(|event| event.body.is_some() || self.node == NodeEvents::Shown);
        Ok((events, next))
    }
}

/// The events that the caller asks for, if the caller may see them. Events of a Body that was removed are for keys that
/// reach every Body: its lease, which says who else did, is gone.
async fn select(app: &App, caller: &Caller, body: Option<String>) -> Result<EventSelection, Failure> {
    let node = if caller.scope == Scope::Admin { NodeEvents::Shown } else { NodeEvents::Hidden };
    let reaches_all = caller.scope == Scope::Admin || caller.reach == KeyReach::All;
    let body = match body {
        Some(name) => {
            let id = find_body(app, caller, &name).await?;
            if !reaches_all {
                owned(app, caller, &id).await?;
            }
            Some(id)
        }
        None if reaches_all => None,
        None => {
            return Err(Failure::new(Kind::Denied, "this key may not read the events of every Body")
                .hint("name a Body that it reaches: ?body=ID")
                .hint("or create a key that reaches all: pal keys create --scope read --reach all NAME"));
        }
    };
    Ok(EventSelection { body, node })
}

/// List events, oldest first.
#[utoipa::path(get, path = "/events", operation_id = "list_events", tag = "events", params(EventsQuery),
    responses((status = 200, description = "A page of events", body = Events), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<EventsQuery>,
) -> Result<Json<Events>, V1Refusal> {
    let app = state.0;
    let limit = page::limit(query.limit.map(u64::from))?;
    let after = place(query.after.unwrap_or(0))?;
    let selection = select(&app, &caller, query.body).await?;
    let (events, next) = app.blocking(async move |fleet: &Fleet| selection.read(fleet, after, limit)).await?;
    Ok(Json(Events { items: events.into_iter().map(Into::into).collect(), next }))
}

/// Checks a position in the log.
pub fn place(after: u64) -> Result<u64, Failure> {
    if i64::try_from(after).is_ok() {
        Ok(after)
    } else {
        Err(Failure::new(Kind::Usage, "`after` is beyond the largest position")
            .hint("take `after` from the `pos` of an event"))
    }
}

/// Follow the log as server-sent events, or over a WebSocket.
///
/// Each message holds one event as JSON; the `id` of a server-sent event is its `pos`. A client that was
/// disconnected resumes with `Last-Event-ID` or `after`, and misses no event. A browser authenticates a
/// WebSocket by offering the subprotocols `palisade` and `key.SECRET`.
#[utoipa::path(get, path = "/events/stream", operation_id = "follow_events", tag = "events", params(FollowQuery, ("Last-Event-ID" = Option<u64>, Header, description = "Only events after this position")),
    responses((status = 200, description = "Events as they happen", body = String, content_type = "text/event-stream"), (status = 101, description = "A WebSocket"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn follow(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<FollowQuery>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let selection = select(&app, &caller, query.body).await?;
    let after = match last_id(&headers)?.or(query.after) {
        Some(after) => place(after)?,
        None => app.blocking(async |fleet: &Fleet| fleet.log().last_pos()).await?,
    };
    let permit = app.services().limits().stream(&caller.key)?;
    let follower = Follower {
        seen: app.services().follow().watch(&app),
        app,
        selection,
        after,
        ready: Vec::new().into_iter(),
        _permit: permit,
    };
    Ok(match upgrade {
        Ok(upgrade) => {
            upgrade.protocols(["palisade"]).on_upgrade(|socket| over_socket(socket, follower)).into_response()
        }
        Err(_) => Sse::new(stream::unfold(follower, async |mut follower| {
            let event = follower.next().await?;
            let said = Said::default()
                .id(event.pos.to_string())
                .data(serde_json::json!(EventBody::from(event)).to_string());
            Some((Ok::<_, Infallible>(said), follower))
        }))
        .keep_alive(KeepAlive::default())
        .into_response(),
    })
}

/// The position after which a client that was disconnected resumes.
pub fn last_id(headers: &HeaderMap) -> Result<Option<u64>, Failure> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.parse().ok());
    id.map(Some).ok_or_else(|| Failure::new(Kind::Usage, "Last-Event-ID is not a position in the log"))
}

/// One client that follows the log.
struct Follower {
    app: App,
    seen: tokio::sync::watch::Receiver<u64>,
    selection: EventSelection,
    /// The position up to which the log was read.
    after: u64,
    ready: std::vec::IntoIter<Event>,
    _permit: limits::StreamPermit,
}

impl Follower {
    /// Waits for the next event; returns none when the log cannot be read or the server stops.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.next() {
                return Some(event);
            }
            let newest = *self.seen.borrow_and_update();
            if newest > self.after {
                let (after, selection) = (self.after, self.selection.clone());
                let (read, next) = self
                    .app
                    .blocking(async move |fleet: &Fleet| selection.read(fleet, after, READ_MAX))
                    .await
                    .ok()?;
                // Where nothing was read, the log has no event of this Body up to the newest position.
                self.after = if next == after { newest } else { next };
                self.ready = read.into_iter();
                continue;
            }
            self.seen.changed().await.ok()?;
        }
    }
}

async fn over_socket(socket: WebSocket, mut follower: Follower) {
    let (mut send, mut receive) = socket.split();
    let mut ping = tokio::time::interval(PING_EVERY);
    loop {
        let message = tokio::select! {
            event = follower.next() => match event {
                Some(event) => Message::text(serde_json::json!(EventBody::from(event)).to_string()),
                None => break,
            },
            heard = receive.next() => match heard {
                Some(Ok(Message::Close(_)) | Err(_)) | None => break,
                Some(Ok(_)) => continue,
            },
            _ = ping.tick() => Message::Ping(Default::default()),
        };
        if !matches!(tokio::time::timeout(SEND_WAIT, send.send(message)).await, Ok(Ok(()))) {
            break;
        }
    }
    let _ = send.close().await;
}

/// The result of verifying the whole log.
#[derive(Debug, Default, Serialize, ToSchema)]
struct Verdict {
    /// Whether every event is as it was stored.
    whole: bool,
    /// The number of events.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    events: Option<u64>,
    /// The number of chains.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    chains: Option<u64>,
    /// Hash of the last event of the node's chain, whose seals name the heads of the other chains.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    head: Option<String>,
    /// The broken chain, where the damage belongs to one chain.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    chain: Option<String>,
    /// The first wrong sequence number in that chain.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    seq: Option<u64>,
    /// A description of the damage.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    why: Option<String>,
}

/// Verify that the log is as it was stored.
#[utoipa::path(post, path = "/events/verify", operation_id = "verify_events", tag = "events",
    responses((status = 200, description = "The result of the verification", body = Verdict), (status = "default", description = "Refused", body = ErrorBody)))]
async fn verify(state: State<App>, _: super::extract::AdminAccess) -> Result<Json<Verdict>, V1Refusal> {
    let found = state.0.blocking(async |fleet: &Fleet| fleet.log().verify()).await?;
    Ok(Json(match found {
        fleet::LogVerdict::Whole { events, chains, head } => Verdict {
            whole: true,
            events: Some(events),
            chains: Some(chains),
            head: Some(head),
            ..Verdict::default()
        },
        fleet::LogVerdict::Broken { chain, seq, why } => {
            Verdict { chain, seq, why: Some(why.to_string()), ..Verdict::default() }
        }
    }))
}
