//! Accepts connections and routes requests to the services of the guest.
//!
//! Invariant: at most [`CONNECTIONS_MAX`] connections; one more is closed at once.
//! Trust: requests are parsed with limits; a caller that stalls holds its own connection and nothing else.

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    io,
    os::fd::OwnedFd,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::{
    Method, Request, StatusCode,
    body::{Body, Frame, Incoming, SizeHint},
    header::{self, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use proto::guest::{GENERATION, GuestConfig, GuestInfo, Shutdown};
use rustix::net::{SocketFlags, accept_with};
use sys::lazy_write_stream::LazyWriteStream;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest},
    net::TcpListener,
    sync::Notify,
};

use crate::{
    auth,
    config::{GuestOptions, Listener},
    connect, dial, drain, file_calls, files, init, metrics, process, process_list,
    query::UrlQuery,
    ready::ready,
    reply::{self, HttpReply, PlainRefusal, ReplyBody},
    resolver::Resolver,
    tree,
};

const CONNECTIONS_MAX: usize = 1024;
/// Longer than the SDKs keep idle connections, so that they close them first and never write into a closed one.
const HEAD_WAIT: Duration = Duration::from_secs(150);
const HEADERS_MAX: usize = 128;
/// As long as the head that `pal serve` accepts.
const BUFFER_LEN_MAX: usize = 256 * 1024;
const IDLE_WAIT: Duration = Duration::from_secs(1);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The state of the guest.
#[derive(Debug)]
pub struct GuestServer {
    config: RefCell<Arc<GuestConfig>>,
    pub processes: process::Processes,
    pub watchers: files::Watchers,
    pub file_calls: file_calls::FileCalls,
    pub reaper: init::Reaper,
    pub load: RefCell<metrics::CpuLoad>,
    /// The microVM in which the guest is init, if it is in one.
    pub machine: RefCell<Option<Rc<crate::vm::GuestMachine>>>,
    /// Answers name lookups of programs.
    pub resolver: Rc<Resolver>,
    started: Instant,
    connections: Cell<usize>,
    /// Requests that are being answered now.
    turns: Cell<usize>,
    /// Requests since the start.
    asked: Cell<u64>,
    /// The grace period of a requested shutdown.
    ending: Cell<Option<Duration>>,
    end: Notify,
    idle: Notify,
}

/// Serves until a request or signal asks the guest to end, and then ends all processes.
pub async fn serve(order: GuestOptions) -> io::Result<()> {
    let guest = Rc::new(GuestServer {
        config: RefCell::new(order.config),
        processes: process::Processes::default(),
        watchers: files::Watchers::default(),
        file_calls: file_calls::FileCalls::default(),
        reaper: init::Reaper::default(),
        load: RefCell::default(),
        machine: RefCell::default(),
        resolver: Rc::default(),
        started: Instant::now(),
        connections: Cell::new(0),
        turns: Cell::new(0),
        asked: Cell::new(0),
        ending: Cell::new(None),
        end: Notify::new(),
        idle: Notify::new(),
    });
    // Reads the user files now: the first request would otherwise wait until the kernel has read them from disk.
    drop(crate::users::find(&guest.config().user));
    // In a microVM the forwarded port comes with the channel.
    if let Some(forward) = guest.config().forward.clone().filter(|_| !crate::vm::is_machine()) {
        tokio::task::spawn_local(crate::forward::serve(forward));
    }
    if let Some(socket) = order.resolver {
        tokio::task::spawn_local(guest.resolver.clone().serve(socket));
    }
    if !order.followed.is_empty() {
        tokio::task::spawn_local(crate::fsmonitor::serve(order.followed));
    }
    // In a microVM the host reclaims memory, so trimming would gain nothing.
    if !crate::vm::is_machine() {
        tokio::task::spawn_local(trim_memory_when_idle(guest.clone()));
    }
    let signals = init::signals()?;
    let is_machine = matches!(order.listener, Listener::Machine(_));
    let mut accepting = Box::pin(accept(&guest, order.listener));
    let grace = tokio::select! {
        grace = init::keep_watch(guest.clone(), signals) => grace,
        () = guest.end.notified() => guest.ending.get().unwrap_or_default(),
        error = &mut accepting => return error,
    };
    guest.ending.set(Some(grace));
    let mut ending = Box::pin(init::end_all_processes(&guest, grace));
    if is_machine {
        // The host holds the listener of a microVM, so it cannot be closed here: further callers get an error that
        // the Body is ending.
        tokio::select! {
            () = &mut ending => return Ok(()),
            _ = accepting => {}
        }
    } else {
        drop(accepting);
    }
    ending.await;
    Ok(())
}

async fn accept(guest: &Rc<GuestServer>, listener: Listener) -> io::Result<()> {
    match listener {
        Listener::Machine(machine) => crate::vm::serve(guest, &machine).await,
        Listener::Unix(listener) => {
            listener.set_nonblocking(true)?;
            let listener = ready(listener.into())?;
            let come = |listener: &OwnedFd| Ok(accept_with(listener, SocketFlags::CLOEXEC)?);
            loop {
                let come = listener.async_io(Interest::READABLE, come).await;
                match come.and_then(|stream| LazyWriteStream::new(stream.into())) {
                    Ok(stream) => accept_stream(guest, stream),
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
        }
        Listener::Tcp(listener) => {
            let listener = TcpListener::from_std(listener)?;
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let _ = stream.set_nodelay(true);
                        accept_stream(guest, stream);
                    }
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
        }
    }
}

impl GuestServer {
    /// The current configuration.
    pub fn config(&self) -> Arc<GuestConfig> {
        self.config.borrow().clone()
    }

    /// Replaces the configuration after a restore: the guest now belongs to another Body.
    pub fn set_identity(&self, config: GuestConfig) {
        *self.config.borrow_mut() = Arc::new(config);
    }

    /// Whether the guest is shutting down and refuses new processes.
    pub fn is_ending(&self) -> bool {
        self.ending.get().is_some()
    }

    /// Requests a trim of freed memory, unless a request in progress will use that memory again.
    pub fn schedule_trim(&self) {
        if self.turns.get() == 0 {
            self.idle.notify_one();
        }
    }
}

/// A request in progress, up to the last byte of its answer.
struct RequestTurn(Rc<GuestServer>);

impl RequestTurn {
    fn begin(guest: &Rc<GuestServer>) -> Self {
        guest.turns.set(guest.turns.get() + 1);
        guest.asked.set(guest.asked.get() + 1);
        Self(guest.clone())
    }
}

impl Drop for RequestTurn {
    fn drop(&mut self) {
        self.0.turns.set(self.0.turns.get().saturating_sub(1));
        self.0.schedule_trim();
    }
}

/// The body of an answer; it holds the turn of its request.
struct ResponseBody {
    payload: ReplyBody,
    _turn: RequestTurn,
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Pin::new(&mut self.payload).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.payload.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.payload.size_hint()
    }
}

pub fn accept_stream(guest: &Rc<GuestServer>, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
    if guest.connections.get() < CONNECTIONS_MAX {
        tokio::task::spawn_local(serve_connection(guest.clone(), stream));
    }
}

fn serve_connection(
    guest: Rc<GuestServer>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> impl Future<Output = ()> {
    guest.connections.set(guest.connections.get() + 1);
    async move {
        let answering = guest.clone();
        let service = service_fn(move |request| {
            let (guest, turn) = (answering.clone(), RequestTurn::begin(&answering));
            async move {
                let reply = answer(guest, request).await;
                Ok::<_, Infallible>(reply.map(|payload| ResponseBody { payload, _turn: turn }))
            }
        });
        // An error of the connection concerns only its caller.
        let _ = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WAIT)
            .max_headers(HEADERS_MAX)
            .max_buf_size(BUFFER_LEN_MAX)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
            .await;
        guest.connections.set(guest.connections.get().saturating_sub(1));
        // The answer to the shutdown request was sent; now the shutdown may begin.
        if guest.is_ending() {
            guest.end.notify_one();
        }
    }
}

/// Returns memory to the kernel once no request has come for a while: most Bodies are idle most of the time.
async fn trim_memory_when_idle(guest: Rc<GuestServer>) {
    loop {
        let before = guest.asked.get();
        tokio::time::sleep(IDLE_WAIT).await;
        if guest.asked.get() != before {
            // A busy guest keeps its memory.
            continue;
        }
        if guest.turns.get() == 0 {
            sys::spawn::trim_heap();
        }
        guest.idle.notified().await;
    }
}

async fn answer(guest: Rc<GuestServer>, request: Request<Incoming>) -> HttpReply {
    let mut reply = if request.method() == Method::OPTIONS {
        reply::preflight()
    } else {
        let config = guest.config();
        let token = config.token.as_deref();
        match auth::check_token(token, request.method(), request.uri().path(), request.headers()) {
            Ok(()) => route(guest, request).await,
            Err(refusal) => drain::refuse(request, refusal.reply()),
        }
    };
    reply::allow_browsers(&mut reply);
    reply
}

async fn route(guest: Rc<GuestServer>, request: Request<Incoming>) -> HttpReply {
    let path = request.uri().path().to_owned();
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match (request.method(), &parts[..]) {
        (&Method::POST, ["process.Process", method]) => process::call(guest, method, request).await,
        (&Method::POST, ["filesystem.Filesystem", method]) => files::call(guest, method, request).await,
        (_, ["process.Process" | "filesystem.Filesystem", _]) => {
            drain::refuse(request, reply::empty(StatusCode::METHOD_NOT_ALLOWED))
        }
        (&Method::GET, ["health"]) => reply::empty(StatusCode::NO_CONTENT),
        (&Method::GET, ["envs"]) => reply::json(&process::body_environment(&guest.config())),
        (&Method::GET, ["metrics"]) => metrics::answer(&guest).await,
        (&Method::GET, ["files"]) => files::download(&guest, request).await,
        (&Method::POST, ["files"]) => files::upload(&guest, request).await,
        (_, ["v1", rest @ ..]) => route_own_service(guest, rest, request).await,
        _ => drain::refuse(request, PlainRefusal::new(StatusCode::NOT_FOUND, "not found").reply()),
    }
}

/// Routes requests to our own service beside envd's.
async fn route_own_service(guest: Rc<GuestServer>, path: &[&str], request: Request<Incoming>) -> HttpReply {
    let query = UrlQuery::parse(request.uri().query());
    match (request.method(), path) {
        (&Method::GET, ["guest"]) => reply::json(&info(&guest)),
        (&Method::GET, ["receipt"]) => match guest.machine.borrow().as_ref() {
            Some(machine) => reply::json(&crate::vm::prove_tree(
                &guest,
                machine,
                query.text("now_ns").and_then(|now| now.parse().ok()),
            )),
            None => PlainRefusal::new(StatusCode::NOT_FOUND, "this Body is not a microVM").reply(),
        },
        (&Method::POST, ["files", "call"]) => file_calls::answer(guest, request).await,
        (&Method::POST, ["kept", method]) => process::call_kept(guest, method, request).await,
        (&Method::GET, ["processes"]) => process_list::answer().await,
        (&Method::POST, ["shutdown"]) => shutdown(&guest, request.into_body()).await,
        (&Method::GET, ["dial"]) => dial::answer(&query, request).await,
        (&Method::GET, ["tree"]) => tree::send(&guest, &query).await,
        (&Method::PUT, ["tree"]) => tree::receive(&guest, &query, request.into_body()).await,
        _ => PlainRefusal::new(StatusCode::NOT_FOUND, "not found").reply(),
    }
}

fn info(guest: &GuestServer) -> GuestInfo {
    GuestInfo {
        generation: GENERATION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        body: guest.config().body.clone(),
        uptime_ms: u64::try_from(guest.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        processes: u32::try_from(guest.processes.count()).unwrap_or(u32::MAX),
        ending: guest.is_ending(),
    }
}

async fn shutdown(guest: &GuestServer, body: Incoming) -> HttpReply {
    let asked: Result<Shutdown, String> = match connect::whole(body).await {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        Err(fault) => Err(fault.message),
    };
    match asked {
        Err(message) => PlainRefusal::bad(message).reply(),
        Ok(asked) => {
            guest.ending.set(Some(Duration::from_millis(asked.grace_ms).min(init::GRACE_MAX)));
            let mut reply = reply::json(&serde_json::json!({}));
            reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            reply
        }
    }
}
