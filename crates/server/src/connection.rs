//! One connection: the server answers its requests in HTTP/1.1 or HTTP/2.
//!
//! Invariant: a request is answered in the same way over both protocols, and with the same limits.
//! Trust: the server disconnects a caller that sends its request head slowly or never.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};
use tower::ServiceExt;
use tracing::Instrument;

use crate::{
    App,
    abort::AbortHandle,
    audit,
    e2b::E2bRefusal,
    explained_stream::{self, ConnectionTurns, ExplainedStream},
    metrics, proxy, route,
    route::{ENVD_PORT, Route},
    telemetry,
    unread_body::{Remainder, UnreadBody},
};

const HEADERS_MAX: usize = 128;
const HEAD_LEN_MAX: u32 = 256 * 1024;
const HEAD_WAIT: Duration = Duration::from_secs(30);
/// Requests at the same time on one connection of HTTP/2.
const STREAMS_MAX: u32 = 200;
/// How often the server asks a connection of HTTP/2 for a sign of life, and how long it waits for one.
const PING_PAUSE: Duration = Duration::from_secs(30);
const PING_WAIT: Duration = Duration::from_secs(20);

/// The requests of one connection, and the state that answers them.
pub struct ConnectionService {
    /// The shared state of the request handlers.
    pub app: App,
    /// The routes of the control plane.
    pub router: Router,
    /// Changes when the server stops.
    pub stopping: watch::Receiver<()>,
}

impl ConnectionService {
    /// Serves HTTP/1.1, until the caller or the server closes the connection.
    pub async fn serve_http1<S>(self, stream: S, abort: AbortHandle)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { app, router, mut stopping } = self;
        let turns = ConnectionTurns::default();
        let stream = ExplainedStream::new(stream, turns.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let (app, router, turns) = (app.clone(), router.clone(), turns.clone());
            request.extensions_mut().insert(abort.clone());
            async move {
                let answer = answer_whole(app, router, request, &turns);
                Ok::<Response, Infallible>(turns.answer(answer).await)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WAIT)
            .max_headers(HEADERS_MAX)
            .max_buf_size(2 * HEAD_LEN_MAX as usize)
            .preserve_header_case(true)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        // Hyper has already answered a malformed request; other errors mean that the caller disconnected.
        tokio::select! {
            _ = &mut connection => return,
            _ = stopping.changed() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }

    /// Serves HTTP/2, until the caller or the server closes the connection. A response that breaks off resets its
    /// own stream, so the connection is never reset.
    pub async fn serve_http2<S>(self, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { app, router, mut stopping } = self;
        let service = service_fn(move |request: Request<Incoming>| {
            let (app, router) = (app.clone(), router.clone());
            async move { Ok::<Response, Infallible>(answer(app, router, request.map(Body::new)).await) }
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_header_list_size(2 * HEAD_LEN_MAX)
            .max_concurrent_streams(STREAMS_MAX)
            .adaptive_window(true)
            .keep_alive_interval(PING_PAUSE)
            .keep_alive_timeout(PING_WAIT)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            _ = &mut connection => return,
            _ = stopping.changed() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

/// Answers a request of HTTP/1, and leaves nothing of it in the connection.
async fn answer_whole(
    app: App,
    router: Router,
    request: Request<Incoming>,
    turns: &ConnectionTurns,
) -> Response {
    let (request, unread) = UnreadBody::split(request);
    let mut response = answer(app, router, request).await;
    if let Some(unread) = unread
        && unread.finish().await == Remainder::Unread
    {
        turns.linger();
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Answers a request, counts the response, and adds `Retry-After` if the refusal is temporary.
async fn answer(app: App, router: Router, request: Request) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let route = route::of(&app, &request);
    let surface = match &route {
        Route::Body(_) | Route::Signed => "body",
        Route::Control => "control",
        Route::Foreign(_) | Route::Ambiguous(_) => "foreign",
    };
    // Paths inside of Bodies belong to the programs there and are not recorded.
    let (path, body) = match &route {
        Route::Body(target) => {
            (if target.port == ENVD_PORT { request.uri().path() } else { "" }, Some(target.body.as_str()))
        }
        _ => (request.uri().path(), None),
    };
    let span = telemetry::span(surface, &method, path, body, request.headers());
    let mut response = answer_by(route, &app, router, request).instrument(span.clone()).await;
    span.record("http.response.status_code", response.status().as_u16());
    app.services().metrics().answered(surface, &method, response.status(), began.elapsed());
    if let Some(telemetry) = &app.config().telemetry {
        telemetry.answered(surface, metrics::known(&method), response.status(), began.elapsed());
    }
    let later = match response.status() {
        StatusCode::TOO_MANY_REQUESTS => Some("1"),
        StatusCode::SERVICE_UNAVAILABLE => Some("5"),
        _ => None,
    };
    if let (Some(seconds), true) = (later, surface == "control") {
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static(seconds));
    }
    response
}

/// Refuses a head that is too long. Hyper's own limits are those of a buffer, and count headers of HTTP/1 alone.
fn refuse_head(request: &Request) -> Option<Response> {
    let line = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + 4;
    let len = request.headers().iter().map(line).sum::<usize>() + request.uri().to_string().len();
    let is_refused = request.headers().len() > HEADERS_MAX || len > HEAD_LEN_MAX as usize;
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    is_refused.then(|| explained_stream::refusal(status).into_response())
}

async fn answer_by(route: Route, app: &App, router: Router, request: Request) -> Response {
    if let Some(refusal) = refuse_head(&request) {
        return refusal;
    }
    match route {
        Route::Body(target) => proxy::forward(app.clone(), target, request).await,
        Route::Signed => proxy::pass_signed(app.clone(), request).await,
        Route::Foreign(why) => {
            audit::denied(app, None, request.method(), request.uri(), why).await;
            E2bRefusal::new(StatusCode::FORBIDDEN, why).into_response()
        }
        Route::Ambiguous(why) => E2bRefusal::bad(why).into_response(),
        Route::Control => match router.oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
    }
}
