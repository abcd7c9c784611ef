//! The events of an agent as they happen: as server-sent events, and over a WebSocket.
//!
//! Invariant: a client that resumes at a position misses no event of the log. Live updates come before their events, and
//! a client that reads slowly or comes late misses them.

use std::convert::Infallible;

use axum::{
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
use proto::{
    AgentId, Event,
    event_data::{AgentRemoved, EventKind},
};
use serde::Deserialize;
use tokio::sync::watch;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    agent_log::AgentLog,
    agents::{AgentParam, reached},
    error::{ErrorBody, V1Refusal},
    events::{EventBody, PING_EVERY, SEND_WAIT, last_id, place},
    extract::{QueryParams, ReadAccess},
};
use crate::{App, agents::LiveUpdates, limits};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(follow))
}

/// Which events to follow.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FollowQuery {
    /// Only events after this position; if left out, all events from the agent's first one.
    #[param(minimum = 0)]
    after: Option<u64>,
}

/// Follow an agent as server-sent events, or over a WebSocket.
///
/// Each message without a name holds one event of the log as JSON; its `id` is the `pos`. A client that was disconnected
/// resumes with `Last-Event-ID` or `after`, and misses no event. Messages with a name are live updates, which come before
/// their events and are not repeated: `asking` (a request went to the model; pieces of an earlier answer are void),
/// `delta` (a piece of an answer) and `output` (output of a running call). Over a WebSocket a live update is
/// `{"live": …}`. The stream ends when the agent is removed.
#[utoipa::path(get, path = "/agents/{agent}/events", operation_id = "follow_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent"), FollowQuery, ("Last-Event-ID" = Option<u64>, Header, description = "Only events after this position")),
    responses((status = 200, description = "Events as they happen", body = String, content_type = "text/event-stream"), (status = 101, description = "A WebSocket"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn follow(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    AgentParam(id): AgentParam,
    QueryParams(query): QueryParams<FollowQuery>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let after = place(last_id(&headers)?.or(query.after).unwrap_or(0))?;
    let record = reached(&app, &caller, &id).await?;
    let permit = app.services().limits().stream(&caller.key)?;
    let service = app.agents().clone();
    let log = app.blocking(async move |_: &Fleet| AgentLog::open(service.agents(), &record, after)).await?;
    let follower = AgentEventFeed {
        seen: app.services().follow().watch(&app),
        live: app.agents().watch(&id),
        app,
        id,
        log,
        ready: Vec::new().into_iter(),
        is_removed: false,
        _permit: permit,
    };
    Ok(match upgrade {
        Ok(upgrade) => {
            upgrade.protocols(["palisade"]).on_upgrade(|socket| over_socket(socket, follower)).into_response()
        }
        Err(_) => Sse::new(stream::unfold(follower, async |mut follower| {
            let item = follower.next().await?;
            Some((Ok::<_, Infallible>(item.into_sse()), follower))
        }))
        .keep_alive(KeepAlive::default())
        .into_response(),
    })
}

/// One thing that a follower sees.
enum StreamItem {
    Event(Box<Event>),
    /// A live update, as JSON.
    Live(String),
}

impl StreamItem {
    fn into_sse(self) -> Said {
        match self {
            Self::Event(event) => {
                let id = event.pos.to_string();
                Said::default().id(id).data(serde_json::json!(EventBody::from(*event)).to_string())
            }
            Self::Live(update) => Said::default().event(update_name(&update)).data(update),
        }
    }

    fn into_message(self) -> Message {
        match self {
            Self::Event(event) => Message::text(serde_json::json!(EventBody::from(*event)).to_string()),
            Self::Live(update) => Message::text(format!("{{\"live\":{update}}}")),
        }
    }
}

/// The name of a live update. Another process may have written it.
fn update_name(update: &str) -> &'static str {
    #[derive(Deserialize)]
    struct UpdateKind<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
    }
    match serde_json::from_str::<UpdateKind<'_>>(update).map(|typed| typed.kind) {
        Ok("asking") => "asking",
        Ok("delta") => "delta",
        Ok("output") => "output",
        _ => "update",
    }
}

/// One client that follows an agent.
struct AgentEventFeed {
    app: App,
    id: AgentId,
    seen: watch::Receiver<u64>,
    log: AgentLog,
    ready: std::vec::IntoIter<Event>,
    live: LiveUpdates,
    is_removed: bool,
    _permit: limits::StreamPermit,
}

impl AgentEventFeed {
    /// Waits for the next event or live update; none when the agent is removed, the log cannot be read or the server
    /// stops. It may be cancelled at any time.
    async fn next(&mut self) -> Option<StreamItem> {
        loop {
            if let Some(event) = self.ready.next() {
                self.is_removed = AgentRemoved::NAMES.contains(&event.kind.as_str())
                    && event.chain == proto::ChainId::Agent(self.id.clone());
                return Some(StreamItem::Event(Box::new(event)));
            }
            if self.is_removed {
                return None;
            }
            let newest = *self.seen.borrow_and_update();
            if newest > self.log.after() {
                let mut log = self.log.clone();
                let (events, mut log) = self
                    .app
                    .blocking(async move |fleet: &Fleet| Ok((log.next_page(fleet)?, log)))
                    .await
                    .ok()?;
                if events.is_empty() {
                    log.skip_to(newest);
                }
                self.log = log;
                self.ready = events.into_iter();
                continue;
            }
            self.live.look_elsewhere();
            tokio::select! {
                changed = self.seen.changed() => changed.ok()?,
                update = self.live.next() => return Some(StreamItem::Live(update)),
            }
        }
    }
}

async fn over_socket(socket: WebSocket, mut follower: AgentEventFeed) {
    let (mut send, mut receive) = socket.split();
    let mut ping = tokio::time::interval(PING_EVERY);
    loop {
        let message = tokio::select! {
            item = follower.next() => match item {
                Some(item) => item.into_message(),
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
