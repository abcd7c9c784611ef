//! A model endpoint on loopback that answers from a script, in all three wire formats.
//!
//! Invariant: it refuses what the real endpoints refuse: calls without results, results without calls, changed
//! thoughts. A client that passes here does not fail there for these reasons.
//! Invariant: it listens on loopback only.

mod read;
mod write;

use std::{
    collections::HashMap,
    convert::Infallible,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::{StreamExt, stream};
use tokio::net::TcpListener;

use crate::model::{ApiKey, Wire};

use self::{
    read::WireRequest,
    write::{ErrorLabel, WireAnswer},
};
use super::{
    in_process::RETRY_AFTER,
    script::{Script, ScriptFault},
    track::PlannedAnswer,
};

const BODY_BYTES_MAX: usize = 64 << 20;
/// The most requests whose attempts are counted; beyond it the counts begin anew.
const COUNTS_MAX: usize = 10_000;

/// Settings of the server.
#[derive(Debug, Clone, Default)]
pub struct ServerOptions {
    /// The most bytes in one piece of a body; whole events if absent.
    pub chunk_bytes: Option<usize>,
    /// The key that a client must show; none is needed if absent.
    pub key: Option<ApiKey>,
}

/// Why the server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ModelServerError {
    /// The address is not on loopback.
    #[error("{0} is not on loopback; a scripted model serves this host only")]
    NotLoopback(SocketAddr),
    /// The kernel refuses the address.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The server stopped.
    #[error("the scripted model server stopped")]
    Stopped(#[source] io::Error),
}

/// A server that listens and does not answer yet.
pub struct ModelServer {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<ServerState>,
}

struct ServerState {
    script: Script,
    options: ServerOptions,
    /// How often each request came, by its hash: a fault hits the first attempts only.
    attempts: Mutex<HashMap<u64, usize>>,
}

impl ModelServer {
    /// Listens on a loopback address; port 0 takes a free port.
    pub async fn bind(
        script: Script,
        address: SocketAddr,
        options: ServerOptions,
    ) -> Result<Self, ModelServerError> {
        if !address.ip().is_loopback() {
            return Err(ModelServerError::NotLoopback(address));
        }
        let failed = |source| ModelServerError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let state = ServerState { script, options, attempts: Mutex::default() };
        Ok(Self { listener, address, state: Arc::new(state) })
    }

    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until the future is dropped.
    pub async fn run(self) -> Result<Infallible, ModelServerError> {
        let app = Router::new()
            .route("/v1/messages", post(answer_anthropic))
            .route("/v1/chat/completions", post(answer_chat))
            .route("/v1/responses", post(answer_responses))
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(self.state);
        match axum::serve(self.listener, app).await {
            Ok(()) => Err(ModelServerError::Stopped(io::Error::other("the listener is closed"))),
            Err(source) => Err(ModelServerError::Stopped(source)),
        }
    }
}

async fn answer_anthropic(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    state.answer(Wire::Anthropic, &headers, &body)
}

async fn answer_chat(State(state): State<Arc<ServerState>>, headers: HeaderMap, body: Bytes) -> Response {
    state.answer(Wire::Chat, &headers, &body)
}

async fn answer_responses(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    state.answer(Wire::Responses, &headers, &body)
}

impl ServerState {
    fn answer(&self, wire: Wire, headers: &HeaderMap, body: &[u8]) -> Response {
        if !self.is_authorized(wire, headers) {
            return refuse(wire, ErrorLabel::Authentication, "the key is wrong");
        }
        if wire == Wire::Anthropic && !headers.contains_key("anthropic-version") {
            return refuse(wire, ErrorLabel::Invalid, "the header anthropic-version is missing");
        }
        let request = match WireRequest::read(wire, body) {
            Ok(request) => request,
            Err(message) => return refuse(wire, ErrorLabel::Invalid, &message),
        };
        let planned = match self.script.plan(&request.conversation) {
            Ok(planned) => planned,
            Err(message) => return refuse(wire, ErrorLabel::Invalid, &format!("script: {message}")),
        };
        let fault = match planned.fault {
            Some(_) => planned.fault_at(self.count_attempt(wire, &request)),
            None => None,
        };
        self.write(wire, &request, &planned, fault)
    }

    fn is_authorized(&self, wire: Wire, headers: &HeaderMap) -> bool {
        let Some(key) = &self.options.key else { return true };
        let shown = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let bearer = shown("authorization").strip_prefix("Bearer ");
        // Anthropic's own SDK changed from the first header to the second.
        (wire == Wire::Anthropic && shown("x-api-key") == key.expose()) || bearer == Some(key.expose())
    }

    fn count_attempt(&self, wire: Wire, request: &WireRequest) -> usize {
        let mut hasher = DefaultHasher::new();
        (wire, request.is_stream, &request.model, &request.conversation).hash(&mut hasher);
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if attempts.len() >= COUNTS_MAX {
            attempts.clear();
        }
        let count = attempts.entry(hasher.finish()).or_default();
        *count += 1;
        *count
    }

    fn write(
        &self,
        wire: Wire,
        request: &WireRequest,
        planned: &PlannedAnswer,
        fault: Option<ScriptFault>,
    ) -> Response {
        let label = match fault {
            Some(ScriptFault::RateLimit) => Some(ErrorLabel::RateLimit),
            Some(ScriptFault::Overload) => Some(ErrorLabel::Overload),
            Some(ScriptFault::Server) => Some(ErrorLabel::Server),
            Some(ScriptFault::Overflow) => Some(ErrorLabel::Overflow),
            _ => None,
        };
        if let Some(label) = label {
            return refuse(wire, label, "the script says so");
        }
        let answer = WireAnswer::write(wire, &request.model, planned, fault == Some(ScriptFault::Refusal));
        if request.is_stream {
            self.send_events(wire, answer.events, planned.pause_ms, fault)
        } else {
            self.send_document(answer.document, fault)
        }
    }

    fn send_events(
        &self,
        wire: Wire,
        mut events: Vec<String>,
        pause_ms: u64,
        fault: Option<ScriptFault>,
    ) -> Response {
        let half = events.len() / 2;
        match fault {
            Some(ScriptFault::Cut | ScriptFault::Drop) => events.truncate(half),
            Some(ScriptFault::Malformed) => {
                events.truncate(half);
                events.push("data: {\"type\": \"mal\n\n".to_owned());
            }
            Some(ScriptFault::Error) => {
                events.truncate(half);
                events.push(write::error_event(wire, "the script says so"));
            }
            _ => {}
        }
        let mut pieces: Vec<Result<Bytes, io::Error>> = match self.options.chunk_bytes {
            None => events.into_iter().map(|event| Ok(Bytes::from(event))).collect(),
            Some(size) => {
                let all = Bytes::from(events.concat());
                let size = size.max(1);
                (0..all.len()).step_by(size).map(|at| Ok(all.slice(at..all.len().min(at + size)))).collect()
            }
        };
        if fault == Some(ScriptFault::Drop) {
            pieces.push(Err(io::Error::other("the script drops the connection")));
        }
        // A pause without a length still sends each piece on its own.
        let pause = Duration::from_millis(pause_ms);
        let body = stream::iter(pieces).then(move |piece| async move {
            if pause.is_zero() {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(pause).await;
            }
            piece
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
    }

    fn send_document(&self, mut document: String, fault: Option<ScriptFault>) -> Response {
        if matches!(
            fault,
            Some(ScriptFault::Cut | ScriptFault::Drop | ScriptFault::Malformed | ScriptFault::Error)
        ) {
            let half = (0..=document.len() / 2).rev().find(|at| document.is_char_boundary(*at));
            document.truncate(half.unwrap_or(0));
        }
        ([(header::CONTENT_TYPE, "application/json")], document).into_response()
    }
}

fn refuse(wire: Wire, label: ErrorLabel, message: &str) -> Response {
    let status = StatusCode::from_u16(label.status(wire)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = write::error_document(wire, label, message);
    let head = [(header::CONTENT_TYPE, "application/json")];
    if label.is_retryable() {
        let wait = [("retry-after-ms", RETRY_AFTER.as_millis().to_string())];
        return (status, head, wait, body).into_response();
    }
    (status, head, body).into_response()
}

#[cfg(test)]
mod tests;
