//! Terminals over WebSocket.
//!
//! Binary frames are bytes of the terminal, in both directions. Text frames are JSON: from the server
//! `hello`, `screen` (the next binary frame replaces everything shown), `size`, `ended`, `lost`; from the
//! client `resize`.
//!
//! Invariant: the server closes a connection that sends nothing for [`SILENCE_MAX`], and the terminal stops
//! waiting for it.

use std::time::Duration;

use axum::{
    Json,
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
    },
    http::StatusCode,
    response::Response,
};
use fleet::{ExecControl, ExecRequest, Fleet, Stdin, TtySize};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{sync::watch, time::Instant};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::owned,
    error::{ErrorBody, V1Refusal},
    extract::{BodyParam, QueryParams, ReadAccess},
};
use crate::{
    App, Scope, audit, limits,
    terminal::{self, TerminalOrder, TerminalOrders, ViewerFrame, ViewerRight, ViewerSeat},
};

const MESSAGE_LEN_MAX: usize = 1 << 20;
const PING_EVERY: Duration = Duration::from_secs(15);
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a command may leave input unread before the server closes the connection.
const INPUT_WAIT: Duration = Duration::from_secs(60);
const NAME_DEFAULT: &str = "main";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(pty)).routes(routes!(list))
}

/// Which terminal to open.
#[derive(Debug, Clone, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PtyQuery {
    /// The name of the terminal; `main` if left out. The client joins a terminal that runs already.
    #[param(pattern = "^[A-Za-z0-9_-]{1,64}$")]
    name: Option<String>,
    /// Columns; a new terminal has 80 if left out.
    #[param(minimum = 1, maximum = 1000)]
    cols: Option<i64>,
    /// Rows; a new terminal has 24 if left out.
    #[param(minimum = 1, maximum = 500)]
    rows: Option<i64>,
    /// `type` to type in the terminal, `watch` to watch it only.
    #[param(inline)]
    mode: Option<PtyMode>,
    /// The command of a new terminal; a login shell if left out.
    command: Option<String>,
    /// The user that runs the command.
    user: Option<String>,
    /// The working directory of the command.
    workdir: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum PtyMode {
    Type,
    Watch,
}

/// Open a terminal of a Body over a WebSocket, or join one that runs.
///
/// Binary frames are bytes of the terminal, in both directions. Text frames are JSON: the server sends
/// `{"type":"hello","name","pid","mode"}`, `{"type":"screen","cols","rows"}` (clear the screen, then show the
/// next binary frame), `{"type":"size","cols","rows"}`, and at the end `{"type":"ended","code",…}` or
/// `{"type":"lost","message"}`; the client may send `{"type":"resize","cols","rows"}`. A browser sends its
/// key by offering the subprotocols `palisade` and `key.SECRET`.
#[utoipa::path(get, path = "/bodies/{id}/pty", operation_id = "open_terminal", tag = "terminals", params(("id" = String, Path, description = "The id or the name of the Body"), PtyQuery),
    responses((status = 101, description = "A WebSocket"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn pty(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<PtyQuery>,
    method: axum::http::Method,
    uri: axum::http::Uri,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let right = if query.mode == Some(PtyMode::Watch) { ViewerRight::Watch } else { ViewerRight::Type };
    if right == ViewerRight::Type && caller.scope < Scope::Run {
        audit::denied(&app, Some(&caller), &method, &uri, "scope").await;
        return Err(Failure::new(Kind::Denied, "this key is read-only")
            .hint("connect with `mode=watch`")
            .into());
    }
    owned(&app, &caller, &id).await?;
    let name = query.name.unwrap_or_else(|| NAME_DEFAULT.into());
    terminal::check_name(&name)?;
    let size = match (query.cols, query.rows) {
        (None, None) => None,
        (cols, rows) => Some(terminal::check_size(cols.unwrap_or(80), rows.unwrap_or(24))?),
    };
    let upgrade = upgrade.map_err(|_| {
        let failure = Failure::new(Kind::Usage, "a terminal needs a WebSocket")
            .hint("send `Connection: upgrade` and `Upgrade: websocket`");
        V1Refusal::with(StatusCode::UPGRADE_REQUIRED, failure)
    })?;
    if right == ViewerRight::Type {
        audit::accepted(&app, &caller, &method, &uri).await?;
    }
    let permit = app.services().limits().stream(&caller.key)?;
    let open = app.streams().open(&id);
    let argv = match &query.command {
        Some(command) => vec!["/bin/sh".to_owned(), "-c".into(), command.clone()],
        None => ["/bin/sh", "-c", "exec \"$(command -v bash || echo sh)\" -il"].map(str::to_owned).to_vec(),
    };
    let command = ExecRequest {
        user: query.user,
        workdir: query.workdir,
        env: [("TERM".to_owned(), "xterm-256color".to_owned())].into(),
        tty: Some(size.unwrap_or(TtySize { cols: 80, rows: 24 })),
        stdin: Stdin::Open,
        ..ExecRequest::new(argv)
    };
    let asked = terminal::TerminalRequest { body: id, name: name.clone(), right, size, command };
    let (seat, orders) = app.services().terminals().join(&app, &asked).await?;
    let hello = json!({ "type": "hello", "name": name, "pid": seat.pid, "mode": if right == ViewerRight::Type { "type" } else { "watch" } });
    let connection =
        PtyConnection { right, orders, control: seat.control.0.clone(), _permit: permit, _open: open };
    Ok(upgrade
        .max_message_size(MESSAGE_LEN_MAX)
        .max_frame_size(MESSAGE_LEN_MAX)
        .protocols(["palisade"])
        .on_upgrade(move |socket| async move {
            connection.run(socket, seat, hello.to_string()).await;
        }))
}

/// The WebSocket of one viewer.
struct PtyConnection {
    right: ViewerRight,
    orders: TerminalOrders,
    control: ExecControl,
    _permit: limits::StreamPermit,
    _open: crate::streams::OpenStream,
}

/// A text message of a client.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum ClientMessage {
    Resize { cols: i64, rows: i64 },
}

impl PtyConnection {
    async fn run(self, socket: WebSocket, seat: ViewerSeat, hello: String) {
        let (send, mut receive) = socket.split();
        let (heard, silence) = watch::channel(Instant::now());
        // When either direction ends, the connection ends.
        tokio::select! {
            () = tell(send, seat, hello, silence) => {}
            () = self.listen(&mut receive, heard) => return,
        }
        // If the server closes the socket with unread input, the kernel resets the connection, and frames on
        // their way to the client are lost.
        let drained = async { while let Some(Ok(_)) = receive.next().await {} };
        let _ = tokio::time::timeout(SILENCE_MAX, drained).await;
    }

    async fn listen(&self, receive: &mut SplitStream<WebSocket>, heard: watch::Sender<Instant>) {
        while let Some(Ok(message)) = receive.next().await {
            heard.send_replace(Instant::now());
            let done = match message {
                Message::Binary(bytes) if self.right == ViewerRight::Type => {
                    // Reads no more input than the command takes, so that the client waits and no queue grows
                    // here.
                    matches!(tokio::time::timeout(INPUT_WAIT, self.control.send(bytes)).await, Ok(Ok(())))
                }
                Message::Text(text) if self.right == ViewerRight::Type => self.obey(&text).await,
                Message::Close(_) => false,
                _ => true,
            };
            if !done {
                return;
            }
        }
    }

    /// Carries out a text message; false when the message is invalid.
    async fn obey(&self, text: &str) -> bool {
        let Ok(ClientMessage::Resize { cols, rows }) = serde_json::from_str(text) else { return false };
        let Ok(size) = terminal::check_size(cols, rows) else { return false };
        let resized = self.control.resize(size).await.is_ok();
        resized && self.orders.send(TerminalOrder::Resized(size)).await.is_ok()
    }
}

async fn tell(
    mut send: SplitSink<WebSocket, Message>,
    mut seat: ViewerSeat,
    hello: String,
    silence: watch::Receiver<Instant>,
) {
    if send.send(Message::text(hello)).await.is_err() {
        return;
    }
    let mut ping = tokio::time::interval(PING_EVERY);
    loop {
        let frame = tokio::select! {
            frame = seat.next() => frame,
            _ = ping.tick() => {
                if silence.borrow().elapsed() > SILENCE_MAX || !in_time(send.send(Message::Ping(Default::default()))).await {
                    return;
                }
                continue;
            }
        };
        let Some(frame) = frame else { break };
        let last = matches!(frame, ViewerFrame::Ended(_) | ViewerFrame::Lost(_));
        for message in messages(frame) {
            if !in_time(send.send(message)).await {
                return;
            }
        }
        if last {
            break;
        }
    }
    let bye = CloseFrame { code: close_code::NORMAL, reason: "".into() };
    let _ = in_time(send.send(Message::Close(Some(bye)))).await;
}

/// Sends within the time limit; a client that does not read for that long counts as disconnected.
async fn in_time<E>(sent: impl Future<Output = Result<(), E>>) -> bool {
    matches!(tokio::time::timeout(SILENCE_MAX, sent).await, Ok(Ok(())))
}

fn messages(frame: ViewerFrame) -> Vec<Message> {
    let text = |value: serde_json::Value| Message::text(value.to_string());
    match frame {
        ViewerFrame::Output(bytes) => vec![Message::Binary(bytes)],
        ViewerFrame::Screen(size, shown) => vec![
            text(json!({ "type": "screen", "cols": size.cols, "rows": size.rows })),
            Message::Binary(shown),
        ],
        ViewerFrame::Size(size) => {
            vec![text(json!({ "type": "size", "cols": size.cols, "rows": size.rows }))]
        }
        ViewerFrame::Ended(ended) => {
            let mut said = json!(super::exec::CommandEnd::from(ended));
            said["type"] = "ended".into();
            vec![text(said)]
        }
        ViewerFrame::Lost(message) => vec![text(json!({ "type": "lost", "message": message }))],
    }
}

/// A terminal that runs.
#[derive(Debug, Serialize, ToSchema)]
struct Terminal {
    /// Its name.
    name: String,
    /// The pid of its command, inside the Body.
    pid: u32,
}

/// The terminals of a Body.
#[derive(Debug, Serialize, ToSchema)]
struct TerminalList {
    /// The terminals, sorted by name.
    items: Vec<Terminal>,
}

/// List the terminals that run in a Body, including those that another server started.
#[utoipa::path(get, path = "/bodies/{id}/terminals", operation_id = "list_terminals", tag = "terminals", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The terminals of the Body", body = TerminalList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<TerminalList>, V1Refusal> {
    owned(&state.0, &caller, &id).await?;
    let tagged = state.0.blocking(async move |fleet: &Fleet| fleet.execs().tagged(&id).await).await?;
    let named = |(tag, pid): (String, u32)| {
        terminal::name_of(&tag).map(|name| Terminal { name: name.to_owned(), pid })
    };
    let mut items: Vec<Terminal> = tagged.into_iter().filter_map(named).collect();
    items.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Json(TerminalList { items }))
}
