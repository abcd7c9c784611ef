//! Proxies requests to ports of Bodies: envd's port through the guest's socket, every other port through a
//! connection that the guest opens inside.
//!
//! Invariant: the server opens no port on the host for a port of a Body.
//! Invariant: bytes are passed on as they arrive; no response is buffered, compressed or shortened.
//! Invariant: when a Body dies or is paused, the server resets its streams, so that no incomplete response
//! looks complete.
//! Invariant: the server never passes a key of the control plane into a Body, whichever header holds it.
//! Invariant: names of headers keep their case in both directions; those of HTTP/2, which has no case, become
//! `Title-Case`.
//! Trust: both sides are hostile. Only envd's own paths reach the guest; callers cannot reach the guest's
//! control service.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header},
    response::{IntoResponse, Response},
};
use fleet::{Fleet, Lease, Status};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    client::conn::http1,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use proto::{BodyId, Failure, Kind};
use serde_json::json;

use crate::{
    App,
    abort::AbortHandle,
    audit, envd_exec, keys,
    route::{ENVD_PORT, PortTarget},
    signed,
    streams::OpenStream,
};

/// How long a connection to a port inside a Body may take.
const DIAL_WAIT: Duration = Duration::from_secs(30);
const BUFFER_LEN: usize = 64 << 10;
const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";
/// The beginning of every key of a server.
const KEY_PREFIX: &str = "e2b_";
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
];

/// Proxies a request to its target.
pub async fn forward(app: App, target: PortTarget, request: Request) -> Response {
    let Some(id) = target.id() else { return not_found(&target.body) };
    let passed = match target.port {
        ENVD_PORT => to_guest(&app, &id, request).await,
        port => to_port(&app, &id, port, request).await,
    };
    passed.unwrap_or_else(|refusal| refusal)
}

/// Proxies a request with a signed URL to the guest whose token made the signature.
pub async fn pass_signed(app: App, request: Request) -> Response {
    let signature = signed::UrlSignature::of(request.method(), request.uri());
    let found = app
        .blocking(async move |fleet: &Fleet| {
            Ok(fleet.ids()?.into_iter().find(|id| signature.is_by(&fleet.token(id))))
        })
        .await;
    match found {
        Ok(Some(id)) => to_guest(&app, &id, request).await.unwrap_or_else(|refusal| refusal),
        _ => refusal(StatusCode::UNAUTHORIZED, "invalid signature"),
    }
}

async fn to_guest(app: &App, id: &BodyId, request: Request) -> Result<Response, Response> {
    if !is_envds(request.uri().path()) {
        return Err(refusal(StatusCode::NOT_FOUND, "not found"));
    }
    ensure_running(app, id).await?;
    let open = app.streams().open(id);
    let starts = request.method() == Method::POST && request.uri().path() == envd_exec::START;
    if starts && envd_exec::has_token(app, id, request.headers()) {
        return envd_exec::start(app, id, request, open).await;
    }
    let stream = app.fleet().access().connect(id).await.map_err(|_| not_found(id.as_str()))?;
    exchange(TokioIo::new(stream), request, open, app, id).await
}

/// Whether callers may send this path to a guest; `/init` and similar paths are only for the process that
/// created the Body.
fn is_envds(path: &str) -> bool {
    let service = |name: &str| path.strip_prefix(name).is_some_and(|method| !method.contains('/'));
    matches!(path, "/health" | "/envs" | "/metrics" | "/files")
        || service("/process.Process/")
        || service("/filesystem.Filesystem/")
}

async fn to_port(app: &App, id: &BodyId, port: u16, mut request: Request) -> Result<Response, Response> {
    let owner = id.clone();
    // Report "not found" before checking the traffic token.
    let found = app
        .blocking(async move |fleet: &Fleet| fleet.status(&owner).and_then(|_| fleet.leases().get(&owner)))
        .await;
    let lease = found.map_err(|_| not_found(id.as_str()))?;
    if !may_enter(app, id, lease.as_ref(), request.headers()) {
        audit::denied(app, None, request.method(), request.uri(), "traffic token").await;
        return Err(refusal(
            StatusCode::FORBIDDEN,
            "this port is private: send its token as e2b-traffic-access-token",
        ));
    }
    ensure_running(app, id).await?;
    let open = app.streams().open(id);
    let dialled = tokio::time::timeout(DIAL_WAIT, app.fleet().access().dial(id, port)).await;
    let dialled = match dialled {
        Ok(Ok(dialled)) => dialled,
        Ok(Err(failure)) if failure.kind == Kind::Host => return Err(not_found(id.as_str())),
        _ => return Err(port_closed(id, port)),
    };
    if let Some(host) = lease.as_ref().and_then(|lease| masked_host(lease, port)) {
        request.headers_mut().insert(header::HOST, host);
        request.extensions_mut().insert(MaskedHost);
    }
    exchange(dialled.into_inner(), request, open, app, id).await
}

/// Marks a request whose `Host` header the lease sets.
#[derive(Debug, Clone, Copy)]
struct MaskedHost;

/// The ports of a Body without a lease are private: callers need the Body's own token, or a key.
fn may_enter(app: &App, id: &BodyId, lease: Option<&Lease>, headers: &HeaderMap) -> bool {
    let sent = headers.get(TRAFFIC_TOKEN).map(|token| token.as_bytes());
    let is = |token: &str| sent.is_some_and(|sent| keys::same(sent, token.as_bytes()));
    match lease {
        Some(lease) => lease.traffic_token.as_deref().is_none_or(is),
        None => {
            is(&app.fleet().token(id))
                || keys::sent(headers).is_some_and(|key| app.keys().caller(key).is_some())
        }
    }
}

/// The host name that programs in the Body see in requests, if the lease sets one.
fn masked_host(lease: &Lease, port: u16) -> Option<HeaderValue> {
    let mask = lease.network.get("maskRequestHost")?.as_str()?;
    HeaderValue::from_str(&mask.replace("${PORT}", &port.to_string())).ok()
}

/// Checks that a Body runs, or resumes one that may resume on a request.
async fn ensure_running(app: &App, id: &BodyId) -> Result<(), Response> {
    let body = id.clone();
    let woken = app.blocking(async move |fleet: &Fleet| resume_leased(fleet, &body).await).await;
    match woken {
        Ok(None) => Ok(()),
        Ok(Some(lease)) => {
            app.timer().note(id, &lease);
            Ok(())
        }
        Err(_) => Err(not_found(id.as_str())),
    }
}

async fn resume_leased(fleet: &Fleet, id: &BodyId) -> Result<Option<Lease>, Failure> {
    let asleep = || Failure::new(Kind::Conflict, format!("Body {id} does not run"));
    match fleet.status(id)? {
        Status::Running => Ok(None),
        Status::Paused if fleet.leases().get(id)?.is_some_and(|lease| lease.auto_resume) => {
            fleet.resume(id).await?;
            fleet.leases().change(id, |lease| lease.resumed_by_traffic = true).map(Some)
        }
        _ => Err(asleep()),
    }
}

/// Sends the request over a connection of its own, and returns the response.
async fn exchange<S>(
    stream: S,
    request: Request,
    open: OpenStream,
    app: &App,
    id: &BodyId,
) -> Result<Response, Response>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let broken = || not_found(id.as_str());
    let mut protocol = http1::Builder::new();
    protocol.preserve_header_case(true).title_case_headers(true);
    let (mut sender, connection) = protocol.handshake(stream).await.map_err(|_| broken())?;
    let mut line = ProxiedConnection(Some(Box::pin(async move {
        // The code that waits for the response sees a broken connection there.
        let _ = connection.with_upgrades().await;
    })));
    if !hyper::body::Body::is_end_stream(request.body()) {
        // The request body continues to be sent even if the caller does not read the response.
        line.detach();
    }
    let abort = request.extensions().get::<AbortHandle>().cloned().unwrap_or_default();
    let (request, upgrade) = prepare_request(request, |text| app.keys().caller(text).is_some());
    let answered = tokio::select! {
        answered = line.drive_while(sender.send_request(request)) => answered,
        () = open.cut() => return Err(broken()),
    };
    let response = match answered {
        Ok(response) => response,
        Err(_) => return Err(no_answer(app, id).await),
    };
    Ok(forward_response(response, line, upgrade, open, abort))
}

/// The response for a Body that did not answer.
pub async fn no_answer(app: &App, id: &BodyId) -> Response {
    let body = id.clone();
    match app.blocking(async move |fleet: &Fleet| fleet.status(&body)).await {
        Ok(Status::Running) => {
            refusal(StatusCode::BAD_GATEWAY, "the sandbox closed the connection without an answer")
        }
        _ => not_found(id.as_str()),
    }
}

/// Rewrites the request for the other side; also returns the caller's half of an upgrade, if the request asks
/// for one.
fn prepare_request(mut request: Request, is_key: impl Fn(&str) -> bool) -> (Request, Option<OnUpgrade>) {
    let upgrade = is_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
    name_host(&mut request);
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse::<Uri>().unwrap_or_default();
    *request.version_mut() = Version::HTTP_11;
    let headers = request.headers_mut();
    let wanted = upgrade.as_ref().and_then(|_| headers.get(header::UPGRADE).cloned());
    strip_connection_headers(headers);
    join_cookies(headers);
    strip_keys(headers, is_key);
    headers.remove(header::EXPECT);
    headers.remove(TRAFFIC_TOKEN);
    if let Some(wanted) = wanted {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, wanted);
    }
    (request, upgrade)
}

/// Moves the host from the request's target, where HTTP/2 and clients of proxies have it, to the `Host` header. A
/// masked host is already there.
fn name_host(request: &mut Request) {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    if let Some(Ok(host)) = authority.map(HeaderValue::from_str)
        && request.extensions().get::<MaskedHost>().is_none()
    {
        request.headers_mut().insert(header::HOST, host);
    }
}

/// Joins cookies to one header: HTTP/2 may send each in a header of its own, HTTP/1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(header::COOKIE).iter().nth(1).is_none() {
        return;
    }
    let cookies: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(cookies) = HeaderValue::from_bytes(&cookies.join(&b"; "[..])) {
        headers.insert(header::COOKIE, cookies);
    }
}

/// Removes every header that holds a key of this server.
fn strip_keys(headers: &mut HeaderMap, is_key: impl Fn(&str) -> bool) {
    let holds_key = |value: &HeaderValue| {
        let text = String::from_utf8_lossy(value.as_bytes());
        let mut words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        words.any(|word| word.starts_with(KEY_PREFIX) && is_key(word))
    };
    let held: Vec<HeaderName> =
        headers.iter().filter(|(_, value)| holds_key(value)).map(|(name, _)| name.clone()).collect();
    for name in held {
        headers.remove(name);
    }
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    let named = |value: &HeaderValue| {
        value
            .to_str()
            .is_ok_and(|value| value.split(',').any(|part| part.trim().eq_ignore_ascii_case("upgrade")))
    };
    headers.contains_key(header::UPGRADE) && headers.get_all(header::CONNECTION).iter().any(named)
}

/// Removes hop-by-hop headers.
fn strip_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').filter_map(|name| name.trim().parse().ok()))
        .collect();
    for name in HOP_BY_HOP.into_iter().chain(named) {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove(header::UPGRADE);
}

/// A connection into a Body that is polled by the task that waits for its response, which saves a task switch
/// for each chunk.
struct ProxiedConnection(Option<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl ProxiedConnection {
    fn poll(&mut self, context: &mut Context<'_>) {
        if let Some(line) = &mut self.0
            && line.as_mut().poll(context).is_ready()
        {
            self.0 = None;
        }
    }

    /// Polls the connection while it waits for a future.
    async fn drive_while<T>(&mut self, waited: impl Future<Output = T>) -> T {
        let mut waited = std::pin::pin!(waited);
        std::future::poll_fn(|context| {
            self.poll(context);
            waited.as_mut().poll(context)
        })
        .await
    }

    /// Moves the connection to a task of its own.
    fn detach(&mut self) {
        if let Some(line) = self.0.take() {
            tokio::spawn(line);
        }
    }
}

fn forward_response(
    mut response: hyper::Response<Incoming>,
    mut line: ProxiedConnection,
    upgrade: Option<OnUpgrade>,
    open: OpenStream,
    abort: AbortHandle,
) -> Response {
    match upgrade {
        Some(caller) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
            let inside = hyper::upgrade::on(&mut response);
            line.detach();
            tokio::spawn(join(caller, inside, open));
            response.map(|_| Body::empty())
        }
        _ => {
            strip_connection_headers(response.headers_mut());
            let cut = Box::pin(open.cut());
            response.map(|body| Body::new(ProxiedBody { body, line, cut, abort, _open: open }))
        }
    }
}

/// Copies between both sides of an upgraded connection, until one of them ends or the Body is paused.
async fn join(caller: OnUpgrade, inside: OnUpgrade, open: OpenStream) {
    let (Ok(caller), Ok(inside)) = tokio::join!(caller, inside) else { return };
    let (mut caller, mut inside) = (TokioIo::new(caller), TokioIo::new(inside));
    tokio::select! {
        _ = tokio::io::copy_bidirectional_with_sizes(&mut caller, &mut inside, BUFFER_LEN, BUFFER_LEN) => {}
        () = open.cut() => {}
    }
}

/// A response body that is cut off when its stream is cut.
struct ProxiedBody<C> {
    body: Incoming,
    line: ProxiedConnection,
    cut: Pin<Box<C>>,
    abort: AbortHandle,
    _open: OpenStream,
}

/// The Body was paused.
#[derive(Debug, thiserror::Error)]
#[error("the stream was cut")]
struct BodyPaused;

impl<C: Future<Output = ()>> hyper::body::Body for ProxiedBody<C> {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.cut.as_mut().poll(context).is_ready() {
            self.abort.say();
            return Poll::Ready(Some(Err(BodyPaused.into())));
        }
        self.line.poll(context);
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Err(_))) = &frame {
            self.abort.say();
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The response that E2B's clients read as "not running". They do not distinguish unknown, ended, expired and
/// paused sandboxes.
pub fn not_found(body: &str) -> Response {
    let said = json!({ "sandboxId": proto::text::visible(body), "message": "The sandbox was not found", "code": 502 });
    (StatusCode::BAD_GATEWAY, Json(said)).into_response()
}

fn port_closed(id: &BodyId, port: u16) -> Response {
    let said = json!({ "sandboxId": id, "message": "The sandbox is running but port is not open", "port": port, "code": 502 });
    (StatusCode::BAD_GATEWAY, Json(said)).into_response()
}

fn refusal(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "code": status.as_u16(), "message": message }))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_envds_own_paths_reach_a_guest() {
        for path in [
            "/health",
            "/files",
            "/envs",
            "/metrics",
            "/process.Process/Start",
            "/filesystem.Filesystem/Stat",
        ] {
            assert!(is_envds(path), "{path}");
        }
        for path in [
            "/",
            "/init",
            "/freeze",
            "/v1/dial",
            "/v1/tree",
            "/v1/shutdown",
            "/process.Process/../v1/dial",
            "//health",
            "/health/",
        ] {
            assert!(!is_envds(path), "{path}");
        }
    }

    #[test]
    fn what_speaks_of_the_connection_or_opens_the_control_plane_is_not_passed_on() {
        let mut request =
            Request::builder().method(Method::POST).uri("http://h/a?b=c").version(Version::HTTP_10);
        for (name, value) in [("connection", "close, x-hop"), ("x-hop", "1"), ("te", "gzip"), ("x-kept", "1")]
        {
            request = request.header(name, value);
        }
        let (request, upgrade) = prepare_request(request.body(Body::empty()).unwrap(), |_| false);
        assert!(upgrade.is_none());
        assert_eq!(request.uri(), "/a?b=c");
        let headers: Vec<(&str, &[u8])> =
            request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(headers, [("host", &b"h"[..]), ("x-kept", b"1")]);
    }

    #[test]
    fn no_header_takes_a_key_along() {
        let key = "e2b_00ff";
        let ours = [
            ("x-api-key", key.to_owned()),
            ("authorization", format!("Bearer {key}")),
            ("authorization", format!("bearer  {key}")),
            ("sec-websocket-protocol", format!("palisade, key.{key}")),
            ("cookie", format!("a=b; key=\"{key}\"")),
            ("x-of-a-program", format!("{{\"key\":\"{key}\"}}")),
        ];
        let others =
            [("x-api-key", "e2b_00fe"), ("authorization", "Bearer secret"), ("x-note", "e2b_00ff0 e2b_")];
        for (name, value) in ours {
            let mut headers =
                HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(&value).unwrap())]);
            strip_keys(&mut headers, |word| word == key);
            assert!(headers.is_empty(), "{name}: {value}");
        }
        for (name, value) in others {
            let mut headers =
                HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))]);
            strip_keys(&mut headers, |word| word == key);
            assert_eq!(headers[name], value);
        }
    }

    #[test]
    fn requests_of_http_2_become_requests_of_http_1() {
        let request = Request::builder().version(Version::HTTP_2).uri("https://80-abc.pal.test:3900/a");
        let request = request.header("cookie", "a=1").header("cookie", "b=2").body(Body::empty()).unwrap();
        let (request, _) = prepare_request(request, |_| false);
        assert_eq!((request.version(), request.uri().to_string()), (Version::HTTP_11, "/a".to_owned()));
        assert_eq!(request.headers()["host"], "80-abc.pal.test:3900");
        assert_eq!(request.headers().get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }
}
