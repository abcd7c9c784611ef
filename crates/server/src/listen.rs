//! Incoming connections: the server accepts them, limits their number, answers their requests, and lets
//! responses finish when it stops.
//!
//! Invariant: at most [`CONNECTIONS_MAX`] connections; further ones wait in the kernel's queue until one
//! ends.
//! Trust: the server disconnects a caller that sends its request head slowly or never.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{Semaphore, watch},
};
use tower::ServiceExt;
use tracing::Instrument;

use crate::{
    App,
    abort::{AbortHandle, AbortableConnection},
    audit,
    e2b::E2bRefusal,
    metrics, proxy, route,
    route::{ENVD_PORT, Route},
    telemetry,
    tls::Acceptor,
};

const CONNECTIONS_MAX: usize = 8192;
const HEADERS_MAX: usize = 128;
const BUFFER_LEN_MAX: usize = 256 * 1024;
const HEAD_WAIT: Duration = Duration::from_secs(30);
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long responses in progress have to finish when the server stops.
const STOP_WAIT: Duration = Duration::from_secs(5);

/// Serves until `stop` completes, then lets responses in progress finish for a while.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Acceptor>,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (stopping, heard) = watch::channel(());
    let mut stop = std::pin::pin!(stop);
    loop {
        let slot = tokio::select! {
            slot = slots.clone().acquire_owned() => slot,
            () = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _)) = accepted else {
            // Too many open files, or a caller that disconnected before the accept: both are temporary.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (stream, abort) = AbortableConnection::new(stream);
        let (app, router, heard, tls) = (app.clone(), router.clone(), heard.clone(), tls.clone());
        tokio::spawn(async move {
            let _slot = slot;
            match tls {
                None => connection(stream, abort, app, router, heard).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_WAIT, tls.0.accept(stream)).await {
                        connection(stream, abort, app, router, heard).await;
                    }
                }
            }
        });
    }
    drop((listener, stopping));
    let _ = tokio::time::timeout(STOP_WAIT, slots.acquire_many(CONNECTIONS_MAX as u32)).await;
}

/// Serves the requests of one connection, until the caller or the server closes it.
async fn connection<S>(
    stream: S,
    abort: AbortHandle,
    app: App,
    router: Router,
    mut stopping: watch::Receiver<()>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (app, router) = (app.clone(), router.clone());
        request.extensions_mut().insert(abort.clone());
        async move { Ok::<Response, Infallible>(answer(app, router, request.map(Body::new)).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(BUFFER_LEN_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    // Hyper has already answered a malformed request as far as possible; other errors mean that the caller
    // disconnected.
    tokio::select! {
        _ = &mut connection => return,
        _ = stopping.changed() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// Answers a request, counts the response, and adds `Retry-After` if the refusal is temporary.
async fn answer(app: App, router: Router, request: Request) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let route = route::of(&app, &request);
    let surface = match &route {
        Route::Body(_) | Route::Signed => "body",
        Route::Control => "control",
        Route::Foreign(_) => "foreign",
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

async fn answer_by(route: Route, app: &App, router: Router, request: Request) -> Response {
    match route {
        Route::Body(target) => proxy::forward(app.clone(), target, request).await,
        Route::Signed => proxy::pass_signed(app.clone(), request).await,
        Route::Foreign(why) => {
            audit::denied(app, None, request.method(), request.uri(), why).await;
            E2bRefusal::new(StatusCode::FORBIDDEN, why).into_response()
        }
        Route::Control => match router.oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
    }
}
