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
    envelope::{self, Opener},
    guest::{DIAL_UPGRADE, GuestInfo, Shutdown},
    wire::process::{ConnectRequest, ProcessEvent, StartRequest, StartResponse},
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sys::quiet::QuietStream;
use tokio::{net::UnixStream, runtime, sync::oneshot};

/// Largest message taken from a guest.
const MESSAGE_LEN_MAX: usize = 16 << 20;
/// Longest command that a guest is asked for ahead: a socket has room for a request of that size.
const AHEAD_LEN_MAX: usize = 64 << 10;
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
    },
}

/// Contents of a request.
pub type Sent = BoxBody<Bytes, io::Error>;

/// Whole contents of a request.
pub fn whole(bytes: impl Into<Bytes>) -> Sent {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// What is sent as it arrives.
pub type Arriving = tokio::sync::mpsc::Receiver<Result<Bytes, io::Error>>;

/// Contents of a request that are sent as they arrive, and how far that is.
struct Pieces {
    arriving: Arriving,
    progress: Arc<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Pieces the guest's side has taken.
    taken: AtomicU64,
    /// The next one is our own to bring.
    ours: AtomicBool,
}

impl Progress {
    /// Returns when the guest has taken nothing for as long as an answer may take.
    async fn stalled(&self) {
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

impl hyper::body::Body for Pieces {
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
pub async fn piece(body: &mut Incoming) -> Result<Option<Bytes>, GuestError> {
    loop {
        match in_time(body.frame()).await? {
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
pub enum Hear {
    /// What nobody has heard.
    Unheard,
    /// Of a terminal, its newest output.
    Recent,
}

/// A Body's guest.
#[derive(Debug, Clone)]
pub struct Guest {
    dir: PathBuf,
    token: String,
}

/// A stream to a port inside a Body.
pub type Dialled = TokioIo<hyper::upgrade::Upgraded>;

/// A command that a guest was asked for but for the last byte: it has understood nearly all of it, and does nothing yet.
pub struct Unsaid {
    asked: Asked,
    connection: Pin<Box<Connection>>,
    word: oneshot::Sender<()>,
}

impl Unsaid {
    /// Says the last byte, at once. One that is dropped instead was never asked for.
    pub fn say(self) -> Asked {
        let Self { asked, mut connection, word } = self;
        // Whoever waits for the answer hears of a connection that broke meanwhile.
        if word.send(()).is_ok() && poll_once(connection.as_mut()).is_none() {
            tokio::spawn(connection);
        }
        asked
    }
}

/// Contents of a request of which the last byte is held back until somebody gives the word.
struct HeldBack {
    first: Bytes,
    last: Bytes,
    word: oneshot::Receiver<()>,
}

impl hyper::body::Body for HeldBack {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, io::Error>>> {
        let piece = if !self.first.is_empty() {
            std::mem::take(&mut self.first)
        } else if !self.last.is_empty() {
            match std::task::ready!(Pin::new(&mut self.word).poll(context)) {
                Ok(()) => std::mem::take(&mut self.last),
                Err(_) => return Poll::Ready(Some(Err(io::ErrorKind::Interrupted.into()))),
            }
        } else {
            return Poll::Ready(None);
        };
        Poll::Ready(Some(Ok(hyper::body::Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && self.last.is_empty()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact((self.first.len() + self.last.len()) as u64)
    }
}

/// A command that a guest was asked to start before it could answer.
pub struct Asked(Pin<Box<dyn Future<Output = Result<Stream, GuestError>> + Send>>);

impl Asked {
    /// Waits for its answer.
    pub async fn answer(self) -> Result<Stream, GuestError> {
        self.0.await
    }
}

impl std::fmt::Debug for Asked {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Asked")
    }
}

/// Has a future do what it can do at once.
fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

type Connection = hyper::client::conn::http1::Connection<TokioIo<QuietStream>, Sent>;

/// One connection to a guest, for one request after another.
#[derive(Debug)]
pub struct Line {
    sender: SendRequest<Sent>,
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

impl Guest {
    /// The guest of the Body in `dir`.
    pub fn new(dir: &Path, token: String) -> Self {
        Self { dir: dir.to_owned(), token }
    }

    /// Connects, for a caller who speaks the protocol itself.
    pub async fn connect_raw(&self) -> Result<UnixStream, GuestError> {
        self.knock().and_then(UnixStream::from_std).map_err(GuestError::Connect)
    }

    /// Connects without waiting: the kernel answers for a guest that listens, and refuses where too many wait already.
    pub fn knock(&self) -> io::Result<std::os::unix::net::UnixStream> {
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
    pub async fn dial(&self, port: u16) -> Result<Dialled, GuestError> {
        let mut line = self.line().await?;
        let asked = line.request(Method::GET, &format!("/v1/dial?port={port}"));
        let asked = asked.header(header::CONNECTION, "upgrade").header(header::UPGRADE, DIAL_UPGRADE);
        let response = line.send(asked, whole(Bytes::new())).await?;
        if response.status() != hyper::StatusCode::SWITCHING_PROTOCOLS {
            return Err(accepted(response)
                .await
                .err()
                .unwrap_or_else(|| GuestError::Protocol("it did not dial".into())));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(GuestError::Broken)
    }

    /// Connects.
    pub async fn line(&self) -> Result<Line, GuestError> {
        self.line_over(self.knock().map_err(GuestError::Connect)?).await
    }

    /// The same over a connection that was made before.
    pub async fn line_over(&self, stream: std::os::unix::net::UnixStream) -> Result<Line, GuestError> {
        let stream = QuietStream::new(stream).map_err(GuestError::Connect)?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(GuestError::Broken)?;
        tokio::spawn(async move {
            // Whoever waits for an answer hears of a broken connection there.
            let _ = connection.with_upgrades().await;
        });
        Ok(self.over(sender))
    }

    /// Asks a guest that is still coming up to start a command: what is asked waits for it in the socket.
    ///
    /// The caller may block its thread afterwards, and hears the answer when it does not. None if nobody listens yet,
    /// or the socket has no room for all of it; then nothing was asked.
    pub fn ask_ahead(
        &self,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Option<Asked> {
        if start.encoded_len() > AHEAD_LEN_MAX {
            return None;
        }
        let (asked, connection) = self.ask_over(self.knock().ok()?, start, user, timeout, whole)?;
        tokio::spawn(connection);
        Some(asked)
    }

    /// Asks a guest for a command but for the last byte, over a connection that was made before: it prepares itself while
    /// its caller finds out whether the command may be asked for.
    ///
    /// None if that cannot be said at once; then nothing was asked.
    pub fn ask_nearly(
        &self,
        stream: std::os::unix::net::UnixStream,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Option<Unsaid> {
        if start.encoded_len() > AHEAD_LEN_MAX {
            return None;
        }
        let (word, heard) = oneshot::channel();
        let held_back = |mut bytes: Bytes| {
            let last = bytes.split_off(bytes.len().saturating_sub(1));
            BodyExt::boxed(HeldBack { first: bytes, last, word: heard })
        };
        let (asked, connection) = self.ask_over(stream, start, user, timeout, held_back)?;
        Some(Unsaid { asked, connection, word })
    }

    fn over(&self, sender: SendRequest<Sent>) -> Line {
        let (runtime, since) = (runtime::Handle::current().id(), Instant::now());
        Line { sender, token: self.token.clone(), runtime, since }
    }

    fn ask_over(
        &self,
        stream: std::os::unix::net::UnixStream,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
        contents: impl FnOnce(Bytes) -> Sent,
    ) -> Option<(Asked, Pin<Box<Connection>>)> {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(QuietStream::new(stream).ok()?));
        let (sender, connection) = poll_once(pin!(handshake))?.ok()?;
        let mut line = self.over(sender);
        let request = line.start_request(start, user, timeout, contents).ok()?;
        let answer = line.sender.send_request(request);
        let mut connection = Box::pin(connection);
        // Writes what there is to be written; there is nothing to be read yet.
        if poll_once(connection.as_mut()).is_some() {
            return None;
        }
        let asked = Asked(Box::pin(async move {
            let answer = in_time(answer).await?.map_err(GuestError::Broken)?;
            stream_of(answer, Some(line)).await
        }));
        Some((asked, connection))
    }

    /// Asks one short question of envd's protocol.
    pub async fn ask<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        question: &Q,
    ) -> Result<A, GuestError> {
        in_time(self.line().await?.ask(method, question)).await?
    }

    /// Who answers, and since when.
    pub async fn info(&self) -> Result<GuestInfo, GuestError> {
        let body = self.line().await?.short(Method::GET, "/v1/guest", whole(Bytes::new())).await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Has the guest of a machine set its clock and prove itself.
    pub async fn receipt(&self, now_ns: u64) -> Result<proto::vm::Receipt, GuestError> {
        let body = self
            .line()
            .await?
            .short(Method::GET, &format!("/v1/receipt?now_ns={now_ns}"), whole(Bytes::new()))
            .await?;
        serde_json::from_slice(&body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    /// Tells the guest to end everything and itself.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), GuestError> {
        let body = serde_json::to_vec(&Shutdown { grace_ms: grace.as_millis() as u64 }).unwrap_or_default();
        self.line().await?.short(Method::POST, "/v1/shutdown", whole(body)).await.map(drop)
    }

    /// Connects to a command that runs.
    pub async fn connect(&self, request: &ConnectRequest, hear: Hear) -> Result<Stream, GuestError> {
        let mut line = self.line().await?;
        let mut asked = line.request(Method::POST, "/process.Process/Connect");
        if hear == Hear::Recent {
            asked = asked.header(proto::guest::REPLAY, "1");
        }
        line.stream(asked, request).await
    }

    /// Reads a tree of files; the answer's body is in the words of `proto::tree`.
    pub async fn read_tree(&self, path: &str, user: Option<&str>) -> Result<Incoming, GuestError> {
        let mut line = self.line().await?;
        let asked = line.request(Method::GET, &tree_path(path, user));
        let response = line.send(asked, whole(Bytes::new())).await?;
        Ok(accepted(response).await?.into_body())
    }

    /// Writes a tree of files.
    pub async fn write_tree(
        &self,
        path: &str,
        user: Option<&str>,
        arriving: Arriving,
    ) -> Result<(), GuestError> {
        let mut line = self.line().await?;
        let asked = line.request(Method::PUT, &tree_path(path, user));
        let progress = Arc::new(Progress::default());
        let contents = BodyExt::boxed(Pieces { arriving, progress: progress.clone() });
        let answer = line.sender.send_request(built(asked, contents)?);
        let response = tokio::select! {
            response = answer => response.map_err(GuestError::Broken)?,
            () = progress.stalled() => return Err(GuestError::Silent),
        };
        accepted(response).await.map(drop)
    }
}

fn tree_path(path: &str, user: Option<&str>) -> String {
    let user = user.map(|user| format!("&username={}", percent(user))).unwrap_or_default();
    format!("/v1/tree?path={}{user}", percent(path))
}

fn percent(text: &str) -> String {
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

impl Line {
    /// Starts a command.
    pub async fn start(
        mut self,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<Stream, GuestError> {
        let request = self.start_request(start, user, timeout, whole)?;
        in_time(self.sender.ready()).await?.map_err(GuestError::Broken)?;
        let answer = in_time(self.sender.send_request(request)).await?.map_err(GuestError::Broken)?;
        stream_of(answer, Some(self)).await
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
        contents: impl FnOnce(Bytes) -> Sent,
    ) -> Result<Request<Sent>, GuestError> {
        let mut asked = self.request(Method::POST, "/process.Process/Start");
        if let Some(user) = user {
            asked = asked
                .header(header::AUTHORIZATION, format!("Basic {}", base64(format!("{user}:").as_bytes())));
        }
        if let Some(timeout) = timeout {
            asked = asked.header("connect-timeout-ms", timeout.as_millis().to_string());
        }
        streamed(asked, start, contents)
    }

    fn request(&self, method: Method, path: &str) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "guest");
        request.header("x-access-token", &self.token)
    }

    async fn send(
        &mut self,
        asked: hyper::http::request::Builder,
        body: Sent,
    ) -> Result<Response<Incoming>, GuestError> {
        in_time(self.sender.send_request(built(asked, body)?)).await?.map_err(GuestError::Broken)
    }

    async fn short(&mut self, method: Method, path: &str, body: Sent) -> Result<Bytes, GuestError> {
        let asked = self.request(method, path);
        let response = accepted(self.send(asked, body).await?).await?;
        collect(response.into_body()).await
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
            .send_request(built(asked, whole(question.encode_to_vec()))?)
            .await
            .map_err(GuestError::Broken)?;
        let body = collect(accepted(response).await?.into_body()).await?;
        A::decode(body).map_err(|error| GuestError::Protocol(error.to_string()))
    }

    async fn stream<Q: Message>(
        &mut self,
        asked: hyper::http::request::Builder,
        question: &Q,
    ) -> Result<Stream, GuestError> {
        let answer = in_time(self.sender.send_request(streamed(asked, question, whole)?)).await?;
        stream_of(answer.map_err(GuestError::Broken)?, None).await
    }
}

/// A question that is answered by a stream.
fn streamed<Q: Message>(
    asked: hyper::http::request::Builder,
    question: &Q,
    contents: impl FnOnce(Bytes) -> Sent,
) -> Result<Request<Sent>, GuestError> {
    let asked = asked
        .header(header::CONTENT_TYPE, "application/connect+proto")
        .header("connect-protocol-version", "1");
    built(asked, contents(envelope::seal(0, &question.encode_to_vec())))
}

async fn stream_of(answer: Response<Incoming>, line: Option<Line>) -> Result<Stream, GuestError> {
    let body = accepted(answer).await?.into_body();
    Ok(Stream { body, opener: Opener::new(MESSAGE_LEN_MAX), ended: false, line })
}

fn built(asked: hyper::http::request::Builder, body: Sent) -> Result<Request<Sent>, GuestError> {
    asked.body(body).map_err(|error| GuestError::Protocol(error.to_string()))
}

/// What a guest that keeps us waiting is not given longer for.
pub async fn in_time<T>(act: impl Future<Output = T>) -> Result<T, GuestError> {
    tokio::time::timeout(ANSWER, act).await.map_err(|_| GuestError::Silent)
}

async fn collect(body: Incoming) -> Result<Bytes, GuestError> {
    let limited = in_time(Limited::new(body, MESSAGE_LEN_MAX).collect()).await?;
    limited.map(http_body_util::Collected::to_bytes).map_err(|error| GuestError::Protocol(error.to_string()))
}

/// The answer, unless it is an error in Connect's words or in HTTP's.
async fn accepted(response: Response<Incoming>) -> Result<Response<Incoming>, GuestError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = collect(response.into_body()).await?;
    Err(refusal(&body).unwrap_or_else(|| GuestError::Protocol(format!("it answered {status}"))))
}

fn refusal(body: &[u8]) -> Option<GuestError> {
    let said: serde_json::Value = serde_json::from_slice(body).ok()?;
    let code = match said.get("code")? {
        serde_json::Value::String(code) => code.clone(),
        code => code.to_string(),
    };
    let message = said.get("message").and_then(serde_json::Value::as_str).unwrap_or_default();
    Some(GuestError::Refused { code, message: proto::text::visible(message) })
}

/// The events of one command.
#[derive(Debug)]
pub struct Stream {
    body: Incoming,
    opener: Opener,
    ended: bool,
    line: Option<Line>,
}

impl Stream {
    /// The line that it came over, for the next request, if the last byte of this one is there: nobody is waited for.
    pub async fn into_line(mut self) -> Option<Line> {
        for _ in 0..LAST_LOOKS {
            let looked = if self.ended {
                match poll_once(pin!(self.body.frame())) {
                    Some(None) => return self.line.map(|line| Line { since: Instant::now(), ..line }),
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
    refusal(said.get("error")?.to_string().as_bytes())
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
        let code = |body: &str| match refusal(body.as_bytes()) {
            Some(GuestError::Refused { code, .. }) => code,
            other => format!("{other:?}"),
        };
        assert_eq!(code(r#"{"code":"not_found","message":"x"}"#), "not_found");
        assert_eq!(code(r#"{"code":404,"message":"x"}"#), "404");
        assert!(refusal(b"garbage").is_none());
    }
}
