//! The stream to a Body's guest: envd's protocol and our own small service, over the socket in its directory.
//!
//! Trust: the guest is hostile until parsed. Every message has a size, every answer a deadline.

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
    envelope::{self, EnvelopeReader},
    guest::{DIAL_UPGRADE, GuestInfo, Shutdown, StartRefusal},
    wire::process::{ConnectRequest, ProcessEvent, StartRequest, StartResponse},
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Deserialize;
use sys::lazy_write_stream::LazyWriteStream;
use tokio::{net::UnixStream, runtime};

/// Largest message taken from a guest.
const MESSAGE_LEN_MAX: usize = 16 << 20;
/// How long a guest may think about a short question.
const ANSWER: Duration = Duration::from_secs(30);

/// Why the guest could not be asked, or what it said.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// Nobody listens.
    #[error("the Body's guest cannot be reached")]
    Connect(#[source] io::Error),
    /// The connection broke.
    #[error("the connection to the Body's guest broke")]
    Broken(#[source] hyper::Error),
    /// It does not speak the protocol.
    #[error("the Body's guest does not keep to the protocol: {0}")]
    Protocol(String),
    /// It takes too long.
    #[error("the Body's guest did not answer within {} seconds", ANSWER.as_secs())]
    Silent,
    /// It said no.
    #[error("{message}")]
    Refused {
        /// Connect's code, such as `not_found`.
        code: String,
        /// Its words, made fit for a terminal.
        message: String,
        /// Why it did not start a command, if it was that.
        reason: Option<StartRefusal>,
    },
}

/// Contents of a request.
pub type RequestBody = BoxBody<Bytes, io::Error>;

/// Whole contents of a request.
pub fn whole_body(bytes: impl Into<Bytes>) -> RequestBody {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// What is sent as it arrives.
pub type BodyReceiver = tokio::sync::mpsc::Receiver<Result<Bytes, io::Error>>;

/// Contents of a request that are sent as they arrive, and how far that is.
struct StreamedBody {
    arriving: BodyReceiver,
    progress: Arc<SendProgress>,
}

#[derive(Default)]
struct SendProgress {
    /// Pieces the guest's side has taken.
    taken: AtomicU64,
    /// The next one is our own to bring.
    ours: AtomicBool,
}

impl SendProgress {
    /// Returns when the guest has taken nothing for as long as an answer may take.
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

/// The next piece of an answer that comes in pieces.
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

/// What is heard first of a command that runs already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayFrom {
    /// What nobody has heard.
    Unheard,
    /// Of a terminal, its newest output.
    Recent,
}

/// A Body's guest.
#[derive(Debug, Clone)]
pub struct GuestClient {
    dir: PathBuf,
    token: String,
}

/// A stream to a port inside a Body.
pub type PortStream = TokioIo<hyper::upgrade::Upgraded>;

/// Has a future do what it can do at once.
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
    /// What carries it.
    runtime: runtime::Id,
    /// Since when it is there, or was last used.
    since: Instant,
}

/// How often it is looked whether the end of an answer is there.
const LAST_LOOKS: usize = 6;
/// A guest closes what nobody has used for longer than this.
const LINE_KEPT: Duration = Duration::from_secs(60);

impl GuestClient {
    /// The guest of the Body in `dir`.
    pub fn new(dir: &Path, token: String) -> Self {
        Self { dir: dir.to_owned(), token }
    }

    /// Connects, for a caller who speaks the protocol itself.
    pub async fn connect_raw(&self) -> Result<UnixStream, GuestError> {
        self.connect_now().and_then(UnixStream::from_std).map_err(GuestError::Connect)
    }

    /// Connects without waiting: the kernel answers for a guest that listens, and refuses where too many wait already.
    fn connect_now(&self) -> io::Result<std::os::unix::net::UnixStream> {
        // By descriptor, because a socket's path may have no more than 107 bytes.
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

    /// Connects to a port inside the Body.
    pub async fn dial(&self, port: u16) -> Result<PortStream, GuestError> {
        let mut line = self.connect_http().await?;
        let asked = line.request(Method::GET, &format!("/v1/dial?port={port}"));
        let asked = asked.header(header::CONNECTION, "upgrade").header(header::UPGRADE, DIAL_UPGRADE);
        let response = line.send(asked, whole_body(Bytes::new())).await?;
        if response.status() != hyper::StatusCode::SWITCHING_PROTOCOLS {
            return Err(check_status(response)
                .await
                .err()
                .unwrap_or_else(|| GuestError::Protocol("it did not dial".into())));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(GuestError::Broken)
    }

    /// Connects.
    pub async fn connect_http(&self) -> Result<GuestConnection, GuestError> {
        let stream = self.connect_now().and_then(LazyWriteStream::new).map_err(GuestError::Connect)?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(GuestError::Broken)?;
        tokio::spawn(async move {
            // Whoever waits for an answer hears of a broken connection there.
            let _ = connection.with_upgrades().await;
        });
        let (runtime, since) = (runtime::Handle::current().id(), Instant::now());
        Ok(GuestConnection { sender, token: self.token.clone(), runtime, since })
    }

    /// Asks one short question of envd's protocol.
    pub async fn ask<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: &Q,
    ) -> Result<A, GuestError> {
        with_timeout(self.connect_http().await?.ask(method, question)).await?
    }

    /// Who answers, and since when.
    pub async fn info(&self) -> Result<GuestInfo, GuestError> {
        let body = self
            .connect_http()
            .await?
            .request_bytes(Method::GET, "/v1/guest", whole_body(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Has the guest of a machine set its clock and prove itself.
    pub async fn receipt(&self, now_ns: u64) -> Result<proto::vm::GuestReceipt, GuestError> {
        let body = self
            .connect_http()
            .await?
            .request_bytes(Method::GET, &format!("/v1/receipt?now_ns={now_ns}"), whole_body(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Tells the guest to end everything and itself.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), GuestError> {
        let body = serde_json::to_vec(&Shutdown { grace_ms: grace.as_millis() as u64 }).unwrap_or_default();
        self.connect_http()
            .await?
            .request_bytes(Method::POST, "/v1/shutdown", whole_body(body))
            .await
            .map(drop)
    }

    /// Connects to a command that runs.
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

    /// Reads a tree of files; the answer's body is in the words of `proto::tree`.
    pub async fn read_tree(&self, path: &str, user: Option<&str>) -> Result<Incoming, GuestError> {
        let mut line = self.connect_http().await?;
        let asked = line.request(Method::GET, &tree_path(path, user));
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

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for place in 0..4 {
            let digit = (bits >> (18 - 6 * place)) & 63;
            text.push(if place <= three.len() { char::from(ALPHABET[digit as usize]) } else { '=' });
        }
    }
    text
}

impl GuestConnection {
    /// Starts a command.
    pub async fn start(
        mut self,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<ExecStream, GuestError> {
        let request = self.start_request(start, user, timeout)?;
        with_timeout(self.sender.ready()).await?.map_err(GuestError::Broken)?;
        let answer = with_timeout(self.sender.send_request(request)).await?.map_err(GuestError::Broken)?;
        open_stream(answer, Some(self)).await
    }

    /// Whether another request can be sent over it, from here and now.
    pub fn can_be_used(&self) -> bool {
        let here = runtime::Handle::try_current().is_ok_and(|here| here.id() == self.runtime);
        here && self.since.elapsed() < LINE_KEPT && !self.sender.is_closed()
    }

    fn start_request(
        &self,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<Request<RequestBody>, GuestError> {
        let mut asked = self.request(Method::POST, "/process.Process/Start");
        if let Some(user) = user {
            asked = asked
                .header(header::AUTHORIZATION, format!("Basic {}", base64(format!("{user}:").as_bytes())));
        }
        if let Some(timeout) = timeout {
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

    /// Asks one short question of envd's protocol; the line can be used again after it.
    pub async fn ask<Q: Message, A: Message + Default>(
        &mut self,
        method: &str,
        question: &Q,
    ) -> Result<A, GuestError> {
        let asked = self.request(Method::POST, method).header(header::CONTENT_TYPE, "application/proto");
        // The guest answers input only when the command has taken it, so this may last.
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

/// A question that is answered by a stream.
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

/// What a guest that keeps us waiting is not given longer for.
pub async fn with_timeout<T>(act: impl Future<Output = T>) -> Result<T, GuestError> {
    tokio::time::timeout(ANSWER, act).await.map_err(|_| GuestError::Silent)
}

async fn read_body(body: Incoming) -> Result<Bytes, GuestError> {
    let limited = with_timeout(Limited::new(body, MESSAGE_LEN_MAX).collect()).await?;
    limited.map(http_body_util::Collected::to_bytes).map_err(|error| GuestError::Protocol(error.to_string()))
}

/// The answer, unless it is an error in Connect's words or in HTTP's.
async fn check_status(response: Response<Incoming>) -> Result<Response<Incoming>, GuestError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = read_body(response.into_body()).await?;
    Err(parse_refusal(&body).unwrap_or_else(|| GuestError::Protocol(format!("it answered {status}"))))
}

fn parse_refusal(body: &[u8]) -> Option<GuestError> {
    let said: serde_json::Value = serde_json::from_slice(body).ok()?;
    let code = match said.get("code")? {
        serde_json::Value::String(code) => code.clone(),
        code => code.to_string(),
    };
    let message = said.get("message").and_then(serde_json::Value::as_str).unwrap_or_default();
    // A reason that this version does not know is none.
    let reason = said.get("reason").and_then(|reason| StartRefusal::deserialize(reason).ok());
    Some(GuestError::Refused { code, message: proto::text::visible(message), reason })
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
    /// The line that it came over, for the next request, if the last byte of this one is there: nobody is waited for.
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
                // What carries the line may have it, and hands out one piece at a time.
                None => tokio::task::yield_now().await,
            }
        }
        None
    }

    /// The next event; none when the stream has ended in order.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>, GuestError> {
        loop {
            if let Some(sealed) =
                self.opener.next().map_err(|error| GuestError::Protocol(error.to_string()))?
            {
                if sealed.flags & envelope::END != 0 {
                    self.ended = true;
                    return match end_error(&sealed.message) {
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
                None => return Err(GuestError::Protocol("the stream ended without its end".into())),
            }
        }
    }
}

fn end_error(message: &[u8]) -> Option<GuestError> {
    let said: serde_json::Value = serde_json::from_slice(message).ok()?;
    parse_refusal(said.get("error")?.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn basic_credentials_and_queries_are_spelled_right() {
        for (plain, spelled) in [("user:", "dXNlcjo="), ("root:", "cm9vdDo="), ("a", "YQ=="), ("abc", "YWJj")]
        {
            assert_eq!(base64(plain.as_bytes()), spelled);
        }
        assert_eq!(tree_path("/a b/ž&x", Some("u")), "/v1/tree?path=/a%20b/%C5%BE%26x&username=u");
    }

    #[test]
    fn refusals_are_read_in_both_dialects() {
        let code = |body: &str| match parse_refusal(body.as_bytes()) {
            Some(GuestError::Refused { code, reason, .. }) => {
                reason.map_or(code, |reason| format!("{reason:?}"))
            }
            other => format!("{other:?}"),
        };
        assert_eq!(code(r#"{"code":"not_found","message":"x"}"#), "not_found");
        assert_eq!(code(r#"{"code":404,"message":"x"}"#), "404");
        let missing = r#"{"code":"not_found","message":"x","reason":"command_not_found"}"#;
        assert_eq!(code(missing), "CommandNotFound");
        assert_eq!(code(&missing.replace("command_", "unheard_of_")), "not_found");
        assert!(parse_refusal(b"garbage").is_none());
    }
}
