//! The client of a Body's guest: envd's protocol and our own small service, over the socket in the Body's
//! directory.
//!
//! Trust: the guest is hostile until its messages are parsed. Every message has a size limit, every answer a
//! deadline.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited, combinators::BoxBody};
use hyper::{Method, Request, Response, body::Incoming, client::conn::http1::SendRequest, header};
use hyper_util::rt::TokioIo;
use prost::Message;
use proto::{
    connect::{self, SentError},
    envelope::{self, EnvelopeReader},
    file_call::{self, FileAnswer, FileCall},
    guest::{
        DIAL_UPGRADE, GuestInfo, KEPT_FOLLOW, KEPT_READ, KEPT_START, KeptRead, KeptState, ProcessList,
        Shutdown, StartRefusal,
    },
    wire::process::{ConnectRequest, ProcessEvent, StartRequest, StartResponse},
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Serialize, de::DeserializeOwned};
use sys::lazy_write_stream::LazyWriteStream;
use tokio::{net::UnixStream, runtime};

/// The largest message that is accepted from a guest.
const MESSAGE_LEN_MAX: usize = 16 << 20;
/// How long a guest may take to answer a short request.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a guest may take for an operation on files: it may remove a large tree.
const FILE_ANSWER: Duration = Duration::from_secs(120);

/// Why a request to the guest failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// No process listens on the guest's socket.
    #[error("the Body's guest cannot be reached")]
    Connect(#[source] io::Error),
    /// The connection broke.
    #[error("the connection to the Body's guest broke")]
    Broken(#[source] hyper::Error),
    /// The guest violates the protocol.
    #[error("the Body's guest does not keep to the protocol: {0}")]
    Protocol(String),
    /// The guest did not answer in time.
    #[error("the Body's guest did not answer in time")]
    Silent,
    /// The guest refused the request.
    #[error("{message}")]
    Refused {
        /// Connect's code, such as `not_found`.
        code: String,
        /// Its message, with control characters escaped.
        message: String,
        /// Why the guest did not start a command, if the request was for one.
        reason: Option<StartRefusal>,
    },
}

/// The body of a request.
pub type RequestBody = BoxBody<Bytes, io::Error>;

/// A request body that is complete.
pub fn whole_body(bytes: impl Into<Bytes>) -> RequestBody {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// The chunks of a request body that is sent as they arrive.
pub type BodyReceiver = tokio::sync::mpsc::Receiver<Result<Bytes, io::Error>>;

/// A request body that is sent as its chunks arrive, with its progress.
struct StreamedBody {
    arriving: BodyReceiver,
    progress: Arc<SendProgress>,
}

#[derive(Default)]
struct SendProgress {
    /// Chunks that the guest has taken.
    taken: AtomicU64,
    /// Whether the sender waits for our caller's next chunk, and not for the guest.
    ours: AtomicBool,
}

impl SendProgress {
    /// Returns when the guest has taken no chunk for the answer timeout.
    async fn wait_stalled(&self) {
        let mut seen = None;
        loop {
            let taken =
                Some(self.taken.load(Ordering::Relaxed)).filter(|_| !self.ours.load(Ordering::Relaxed));
            if taken.is_some() && taken == seen {
                return;
            }
            seen = taken;
            tokio::time::sleep(ANSWER).await;
        }
    }
}

impl hyper::body::Body for StreamedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, io::Error>>> {
        let piece = self.arriving.poll_recv(context);
        self.progress.taken.fetch_add(1, Ordering::Relaxed);
        self.progress.ours.store(piece.is_pending(), Ordering::Relaxed);
        piece.map(|piece| piece.map(|piece| piece.map(hyper::body::Frame::data)))
    }
}

/// The next chunk of a response body.
pub async fn next_chunk(body: &mut Incoming) -> Result<Option<Bytes>, GuestError> {
    loop {
        match with_timeout(body.frame()).await? {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => return Ok(Some(data)),
                Err(_) => continue,
            },
            Some(Err(error)) => return Err(GuestError::Broken(error)),
            None => return Ok(None),
        }
    }
}

/// Which output of a running command is sent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayFrom {
    /// Output that no client has received.
    Unheard,
    /// The newest output of a terminal.
    Recent,
}

/// The client of a Body's guest.
#[derive(Debug, Clone)]
pub struct GuestClient {
    dir: PathBuf,
    token: String,
}

/// A stream to a port inside a Body.
pub type PortStream = TokioIo<hyper::upgrade::Upgraded>;

/// Polls a future once.
fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// One connection to a guest, for one request after another.
#[derive(Debug)]
pub struct GuestConnection {
    sender: SendRequest<RequestBody>,
    token: String,
    /// The runtime that drives the connection.
    runtime: runtime::Id,
    /// When the connection was opened or last used.
    since: Instant,
}

/// How many times to check whether the end of a response has arrived.
const LAST_LOOKS: usize = 6;
/// A guest closes a connection that was idle for longer than this.
const LINE_KEPT: Duration = Duration::from_secs(60);

impl GuestClient {
    /// The client for the guest of the Body in `dir`.
    pub fn new(dir: &Path, token: String) -> Self {
        Self { dir: dir.to_owned(), token }
    }

    /// Connects, for a caller that implements the protocol itself.
    pub async fn connect_raw(&self) -> Result<UnixStream, GuestError> {
        self.connect_now().and_then(UnixStream::from_std).map_err(GuestError::Connect)
    }

    /// Connects without waiting: the kernel completes the connection for a guest that listens, and refuses it
    /// if the backlog is full.
    fn connect_now(&self) -> io::Result<std::os::unix::net::UnixStream> {
        // Connects by descriptor, because the path of a socket may have at most 107 bytes.
        let dir = sys::fd::open_path(&self.dir)?;
        let address =
            SocketAddrUnix::new(sys::fd::path_of(std::os::fd::AsFd::as_fd(&dir)).join("guest.sock"))?;
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    }

    /// Opens a connection to a port inside the Body.
    pub async fn dial(&self, port: u16) -> Result<PortStream, GuestError> {
        let mut line = self.connect_http().await?;
        let asked = line.request(Method::GET, &format!("/v1/dial?port={port}"));
        let asked = asked.header(header::CONNECTION, "upgrade").header(header::UPGRADE, DIAL_UPGRADE);
        let response = line.send(asked, whole_body(Bytes::new())).await?;
        if response.status() != hyper::StatusCode::SWITCHING_PROTOCOLS {
            return Err(check_status(response)
                .await
                .err()
                .unwrap_or_else(|| GuestError::Protocol("it did not connect to the port".into())));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(GuestError::Broken)
    }

    /// Connects for HTTP requests.
    pub async fn connect_http(&self) -> Result<GuestConnection, GuestError> {
        let stream = self.connect_now().and_then(LazyWriteStream::new).map_err(GuestError::Connect)?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(GuestError::Broken)?;
        tokio::spawn(async move {
            // The code that waits for the response sees a broken connection there.
            let _ = connection.with_upgrades().await;
        });
        let (runtime, since) = (runtime::Handle::current().id(), Instant::now());
        Ok(GuestConnection { sender, token: self.token.clone(), runtime, since })
    }

    /// Sends one short request of envd's protocol.
    pub async fn ask<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: &Q,
    ) -> Result<A, GuestError> {
        with_timeout(self.connect_http().await?.ask(method, question)).await?
    }

    /// The guest's version and start time.
    pub async fn info(&self) -> Result<GuestInfo, GuestError> {
        let body = self
            .connect_http()
            .await?
            .request_bytes(Method::GET, "/v1/guest", whole_body(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// The processes in the Body.
    pub async fn processes(&self) -> Result<ProcessList, GuestError> {
        let body = self
            .connect_http()
            .await?
            .request_bytes(Method::GET, "/v1/processes", whole_body(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Makes the guest of a microVM set its clock and prove its identity.
    pub async fn receipt(&self, now_ns: u64) -> Result<proto::vm::GuestReceipt, GuestError> {
        let body = self
            .connect_http()
            .await?
            .request_bytes(Method::GET, &format!("/v1/receipt?now_ns={now_ns}"), whole_body(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Tells the guest to end all processes and exit.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), GuestError> {
        let body = serde_json::to_vec(&Shutdown { grace_ms: grace.as_millis() as u64 }).unwrap_or_default();
        self.connect_http()
            .await?
            .request_bytes(Method::POST, "/v1/shutdown", whole_body(body))
            .await
            .map(drop)
    }

    /// Connects to a running command.
    pub async fn connect(
        &self,
        request: &ConnectRequest,
        hear: ReplayFrom,
    ) -> Result<ExecStream, GuestError> {
        let mut line = self.connect_http().await?;
        let mut asked = line.request(Method::POST, "/process.Process/Connect");
        if hear == ReplayFrom::Recent {
            asked = asked.header(proto::guest::REPLAY, "1");
        }
        line.stream(asked, request).await
    }

    /// Follows a kept command, which may have ended, from its first kept byte.
    pub async fn follow_kept(&self, request: &ConnectRequest) -> Result<ExecStream, GuestError> {
        let mut line = self.connect_http().await?;
        let asked = line.request(Method::POST, KEPT_FOLLOW);
        line.stream(asked, request).await
    }

    /// Reads output of a kept command; `None` if the guest does not know it.
    pub async fn read_kept(&self, request: &KeptRead) -> Result<Option<KeptState>, GuestError> {
        self.connect_http().await?.ask_json(KEPT_READ, request, ANSWER).await
    }

    /// Carries out an operation on files.
    pub async fn file_call(&self, call: &FileCall) -> Result<FileAnswer, GuestError> {
        self.connect_http().await?.file_call(call).await
    }

    /// Reads a tree of files; the response body has the format of `proto::tree`, in the newest form that the guest
    /// knows. Only guests that know the second form leave out git directories.
    pub async fn read_tree(&self, path: &str, query: TreeQuery<'_>) -> Result<Incoming, GuestError> {
        let mut line = self.connect_http().await?;
        let git = if query.leave_out_git { "&git=omit" } else { "" };
        let path = format!("{}&form=2{git}", tree_path(path, query.user));
        let asked = line.request(Method::GET, &path);
        let response = line.send(asked, whole_body(Bytes::new())).await?;
        Ok(check_status(response).await?.into_body())
    }

    /// Writes a tree of files.
    pub async fn write_tree(
        &self,
        path: &str,
        user: Option<&str>,
        arriving: BodyReceiver,
    ) -> Result<(), GuestError> {
        let mut line = self.connect_http().await?;
        let asked = line.request(Method::PUT, &tree_path(path, user));
        let progress = Arc::new(SendProgress::default());
        let contents = BodyExt::boxed(StreamedBody { arriving, progress: progress.clone() });
        let answer = line.sender.send_request(build_request(asked, contents)?);
        let response = tokio::select! {
            response = answer => response.map_err(GuestError::Broken)?,
            () = progress.wait_stalled() => return Err(GuestError::Silent),
        };
        check_status(response).await.map(drop)
    }
}

/// The options of a command that is started.
#[derive(Debug, Clone, Copy, Default)]
pub struct StartOptions<'a> {
    /// The user; without it, the Body's.
    pub user: Option<&'a str>,
    /// The time after which the guest kills the command.
    pub timeout: Option<Duration>,
    /// Whether the guest hangs the command up if the connection breaks. Guests of generation 1 never do.
    pub hang_up: bool,
    /// Whether the guest keeps the command by its tag. Guests before generation 3 refuse it.
    pub keep: bool,
}

/// The options of a tree that is read.
#[derive(Debug, Clone, Copy, Default)]
pub struct TreeQuery<'a> {
    /// The user who reads it; without it, the Body's.
    pub user: Option<&'a str>,
    /// Whether git directories are left out.
    pub leave_out_git: bool,
}

fn tree_path(path: &str, user: Option<&str>) -> String {
    let user = user.map(|user| format!("&username={}", percent_encode(user))).unwrap_or_default();
    format!("/v1/tree?path={}{user}", percent_encode(path))
}

fn percent_encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

impl GuestConnection {
    /// Starts a command.
    pub async fn start(
        mut self,
        start: &StartRequest,
        options: StartOptions<'_>,
    ) -> Result<ExecStream, GuestError> {
        let request = self.start_request(start, options)?;
        with_timeout(self.sender.ready()).await?.map_err(GuestError::Broken)?;
        let answer = with_timeout(self.sender.send_request(request)).await?.map_err(GuestError::Broken)?;
        open_stream(answer, Some(self)).await
    }

    /// Whether another request can be sent over this connection from this runtime.
    pub fn can_be_used(&self) -> bool {
        let here = runtime::Handle::try_current().is_ok_and(|here| here.id() == self.runtime);
        here && self.since.elapsed() < LINE_KEPT && !self.sender.is_closed()
    }

    fn start_request(
        &self,
        start: &StartRequest,
        options: StartOptions<'_>,
    ) -> Result<Request<RequestBody>, GuestError> {
        let path = if options.keep { KEPT_START } else { "/process.Process/Start" };
        let mut asked = self.request(Method::POST, path);
        if let Some(user) = options.user {
            asked = asked.header(header::AUTHORIZATION, connect::basic_authorization(user));
        }
        if options.hang_up {
            asked = asked.header(proto::guest::HANG_UP, "1");
        }
        if let Some(timeout) = options.timeout {
            asked = asked.header("connect-timeout-ms", timeout.as_millis().to_string());
        }
        stream_request(asked, start)
    }

    fn request(&self, method: Method, path: &str) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "guest");
        request.header("x-access-token", &self.token)
    }

    async fn send(
        &mut self,
        asked: hyper::http::request::Builder,
        body: RequestBody,
    ) -> Result<Response<Incoming>, GuestError> {
        with_timeout(self.sender.send_request(build_request(asked, body)?)).await?.map_err(GuestError::Broken)
    }

    async fn request_bytes(
        &mut self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<Bytes, GuestError> {
        let asked = self.request(method, path);
        let response = check_status(self.send(asked, body).await?).await?;
        read_body(response.into_body()).await
    }

    /// Carries out an operation on files; the connection can be used again afterwards.
    pub async fn file_call(&mut self, call: &FileCall) -> Result<FileAnswer, GuestError> {
        self.ask_json(file_call::PATH, call, FILE_ANSWER).await
    }

    /// Sends one request of our own service and reads its answer.
    async fn ask_json<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        path: &str,
        question: &Q,
        patience: Duration,
    ) -> Result<A, GuestError> {
        let unreadable = |error: serde_json::Error| GuestError::Protocol(error.to_string());
        let question = serde_json::to_vec(question).map_err(unreadable)?;
        let asked = self.request(Method::POST, path).header(header::CONTENT_TYPE, "application/json");
        let answering = async {
            let request = build_request(asked, whole_body(question))?;
            self.sender.ready().await.map_err(GuestError::Broken)?;
            let response = self.sender.send_request(request).await.map_err(GuestError::Broken)?;
            let body = Limited::new(check_status(response).await?.into_body(), file_call::MESSAGE_LEN_MAX);
            let whole = body.collect().await.map_err(|error| GuestError::Protocol(error.to_string()))?;
            Ok(whole.to_bytes())
        };
        let answer = tokio::time::timeout(patience, answering).await.map_err(|_| GuestError::Silent)??;
        self.since = Instant::now();
        serde_json::from_slice(&answer).map_err(unreadable)
    }

    /// Sends one short request of envd's protocol; the connection can be used again afterwards.
    pub async fn ask<Q: Message, A: Message + Default>(
        &mut self,
        method: &str,
        question: &Q,
    ) -> Result<A, GuestError> {
        let asked = self.request(Method::POST, method).header(header::CONTENT_TYPE, "application/proto");
        // The guest answers a request with input only when the command has read it, so this may take long.
        let response = self
            .sender
            .send_request(build_request(asked, whole_body(question.encode_to_vec()))?)
            .await
            .map_err(GuestError::Broken)?;
        let body = read_body(check_status(response).await?.into_body()).await?;
        A::decode(body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    async fn stream<Q: Message>(
        &mut self,
        asked: hyper::http::request::Builder,
        question: &Q,
    ) -> Result<ExecStream, GuestError> {
        let answer = with_timeout(self.sender.send_request(stream_request(asked, question)?)).await?;
        open_stream(answer.map_err(GuestError::Broken)?, None).await
    }
}

/// Builds a request that is answered by a stream.
fn stream_request<Q: Message>(
    asked: hyper::http::request::Builder,
    question: &Q,
) -> Result<Request<RequestBody>, GuestError> {
    let asked = asked
        .header(header::CONTENT_TYPE, "application/connect+proto")
        .header("connect-protocol-version", "1");
    build_request(asked, whole_body(envelope::seal(0, &question.encode_to_vec())))
}

async fn open_stream(
    answer: Response<Incoming>,
    line: Option<GuestConnection>,
) -> Result<ExecStream, GuestError> {
    let body = check_status(answer).await?.into_body();
    Ok(ExecStream { body, opener: EnvelopeReader::new(MESSAGE_LEN_MAX), ended: false, line })
}

fn build_request(
    asked: hyper::http::request::Builder,
    body: RequestBody,
) -> Result<Request<RequestBody>, GuestError> {
    asked.body(body).map_err(|error| GuestError::Protocol(error.to_string()))
}

/// Applies the guest answer timeout.
pub async fn with_timeout<T>(act: impl Future<Output = T>) -> Result<T, GuestError> {
    tokio::time::timeout(ANSWER, act).await.map_err(|_| GuestError::Silent)
}

async fn read_body(body: Incoming) -> Result<Bytes, GuestError> {
    let limited = with_timeout(Limited::new(body, MESSAGE_LEN_MAX).collect()).await?;
    limited.map(http_body_util::Collected::to_bytes).map_err(|error| GuestError::Protocol(error.to_string()))
}

/// Returns the response, unless it is an error of Connect or of HTTP.
async fn check_status(response: Response<Incoming>) -> Result<Response<Incoming>, GuestError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = read_body(response.into_body()).await?;
    let sent = SentError::parse(&body).map(refusal);
    Err(sent.unwrap_or_else(|| GuestError::Protocol(format!("it answered {status}"))))
}

fn refusal(sent: SentError) -> GuestError {
    GuestError::Refused { code: sent.code, message: proto::text::visible(&sent.message), reason: sent.reason }
}

/// The events of one command.
#[derive(Debug)]
pub struct ExecStream {
    body: Incoming,
    opener: EnvelopeReader,
    ended: bool,
    line: Option<GuestConnection>,
}

impl ExecStream {
    /// Returns the connection for the next request, if the last byte of this response has arrived; does not
    /// wait for the guest.
    pub async fn into_connection(mut self) -> Option<GuestConnection> {
        for _ in 0..LAST_LOOKS {
            let looked = if self.ended {
                match poll_once(pin!(self.body.frame())) {
                    Some(None) => {
                        return self.line.map(|line| GuestConnection { since: Instant::now(), ..line });
                    }
                    Some(Some(_)) => return None,
                    None => None,
                }
            } else {
                poll_once(pin!(self.next()))
            };
            match looked {
                Some(Ok(_)) => {}
                Some(Err(_)) => return None,
                // The connection's task may have received it; it passes on one chunk at a time.
                None => tokio::task::yield_now().await,
            }
        }
        None
    }

    /// The next event; none when the stream has ended properly.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>, GuestError> {
        loop {
            if let Some(sealed) =
                self.opener.next().map_err(|error| GuestError::Protocol(error.to_string()))?
            {
                if sealed.flags & envelope::END != 0 {
                    self.ended = true;
                    return match SentError::parse_end(&sealed.message).map(refusal) {
                        Some(error) => Err(error),
                        None => Ok(None),
                    };
                }
                let response = StartResponse::decode(sealed.message);
                let response = response.map_err(|error| GuestError::Protocol(error.to_string()))?;
                if response.event.is_some() {
                    return Ok(response.event);
                }
                continue;
            }
            if self.ended {
                return Ok(None);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => frame.data_ref().into_iter().for_each(|data| self.opener.push(data)),
                Some(Err(error)) => return Err(GuestError::Broken(error)),
                None => {
                    return Err(GuestError::Protocol(
                        "the stream ended without its end-of-stream message".into(),
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_escaped() {
        assert_eq!(tree_path("/a b/ž&x", Some("u")), "/v1/tree?path=/a%20b/%C5%BE%26x&username=u");
    }
}
