//! The first command of a Body that is made for it, started before anything else is ready.
//!
//! Who makes such a Body asks for the command while the guest still comes up: the question waits in the socket. The guest
//! looks there once, before it has a runtime, and starts the command; then, while that runs on another processor, it
//! gets ready and answers as it answers everybody.
//!
//! Invariant: what is started here is what the same question would have started later: the same token, the same message,
//! the same user, by the same function. Whatever is not plainly that is left to the server, which reads all of it again.
//! Invariant: what was started and is then not asked for is killed.
//! Trust: as in `server`; at most [`ASKED_LEN_MAX`] bytes are looked at, and nobody is waited for.

use std::{
    io::Read,
    os::unix::net::{UnixListener, UnixStream},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes};
use hyper::{
    HeaderMap, Method,
    header::{self, HeaderName, HeaderValue},
};
use proto::{envelope::Opener, guest::GuestConfig, wire::process::StartRequest};
use sys::quiet::QuietStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    auth,
    connect::{self, Fault, Shape},
    process::{self, Spawned},
};

const ASKED_LEN_MAX: usize = 4 << 10;
const PATH: &str = "/process.Process/Start";
const HEADERS_MAX: usize = 32;

/// Who came first, what it has said so far and what was done about that.
#[derive(Debug)]
pub struct First {
    pub stream: UnixStream,
    pub said: Bytes,
    pub begun: Option<Begun>,
}

/// A command that was started.
#[derive(Debug)]
pub struct Begun {
    asked: Asked,
    /// Since when.
    pub since: Instant,
    /// How that went.
    pub spawned: Result<Spawned, Fault>,
}

/// What decides about a command.
#[derive(Debug, PartialEq)]
struct Asked {
    request: StartRequest,
    user: String,
}

impl Begun {
    /// Whether it is what is asked for now.
    pub fn is(&self, request: &StartRequest, user: &str) -> bool {
        self.asked.request == *request && self.asked.user == user
    }
}

/// Looks once who is there.
pub fn look(listener: &UnixListener, config: &Arc<GuestConfig>) -> Option<First> {
    let (mut stream, _) = listener.accept().ok()?;
    stream.set_nonblocking(true).ok()?;
    let mut room = [0; ASKED_LEN_MAX];
    let len = stream.read(&mut room).unwrap_or(0);
    let said = Bytes::copy_from_slice(&room[..len]);
    let begun = read(&said, config).map(|asked| {
        let since = Instant::now();
        let spawned = process::spawn(&asked.request, &asked.user, config);
        Begun { asked, since, spawned }
    });
    Some(First { stream, said, begun })
}

/// The one question that is answered here, if it is there from its first byte to its last and nothing is odd about it.
fn read(said: &[u8], config: &GuestConfig) -> Option<Asked> {
    let end = said.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (head, body) = (std::str::from_utf8(&said[..end]).ok()?, &said[end + 4..]);
    let mut lines = head.split("\r\n");
    let mut words = lines.next()?.split(' ');
    if [words.next(), words.next(), words.next(), words.next()]
        != [Some("POST"), Some(PATH), Some("HTTP/1.1"), None]
    {
        return None;
    }
    let headers = headers(lines)?;
    let len: usize = headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()?;
    if len != body.len()
        || headers.contains_key(header::TRANSFER_ENCODING)
        || headers.contains_key(header::EXPECT)
    {
        return None;
    }
    auth::check_token(config.token.as_deref(), &Method::POST, PATH, &headers).ok()?;
    let (codec, shape) = connect::kind_of(&headers)?;
    connect::check_encoding(&headers).ok()?;
    let _: Option<Duration> = connect::timeout_of(&headers).ok()?;
    let mut opener = Opener::new(ASKED_LEN_MAX);
    opener.push(body);
    let message = opener.next().ok()?.filter(|sealed| sealed.flags == 0)?.message;
    opener.finish().ok()?;
    let request: StartRequest = codec.decode(&message).ok()?;
    let fits = shape == Shape::Stream && process::check(&request).is_ok();
    let user = || auth::basic_user(&headers).unwrap_or_else(|| config.user.clone());
    fits.then(|| Asked { user: user(), request })
}

fn headers<'a>(lines: impl Iterator<Item = &'a str>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(':')?;
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let value = HeaderValue::from_str(value.trim_matches([' ', '\t'])).ok()?;
        // A header that is there twice is for the server to judge.
        if headers.len() == HEADERS_MAX || headers.insert(name, value).is_some() {
            return None;
        }
    }
    Some(headers)
}

/// A connection of which something was read already.
#[derive(Debug)]
pub struct Again {
    pub said: Bytes,
    pub stream: QuietStream,
}

impl AsyncRead for Again {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.said.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, into);
        }
        let len = self.said.len().min(into.remaining());
        into.put_slice(&self.said[..len]);
        self.said.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Again {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use proto::{envelope, wire::process::ProcessConfig};

    use super::*;

    fn config() -> GuestConfig {
        GuestConfig {
            body: "abc".parse().unwrap(),
            template: "host".into(),
            token: Some("tok".into()),
            envs: Default::default(),
            user: "user".into(),
            workdir: None,
            ring_bytes: 1024,
            forward: None,
        }
    }

    fn request() -> StartRequest {
        let process = ProcessConfig { cmd: "true".into(), ..Default::default() };
        StartRequest { process: Some(process), stdin: Some(false), ..Default::default() }
    }

    fn asked(headers: &str, body: &[u8]) -> Option<Asked> {
        let head = format!(
            "POST /process.Process/Start HTTP/1.1\r\nhost: guest\r\ncontent-length: {}\r\n{headers}\r\n",
            body.len()
        );
        read(&[head.as_bytes(), body].concat(), &config())
    }

    const USUAL: &str = "x-access-token: tok\r\ncontent-type: application/connect+proto\r\n";

    #[test]
    fn a_plain_question_is_understood() {
        let body = envelope::seal(0, &request().encode_to_vec());
        let user = |user: &str| Some(Asked { request: request(), user: user.into() });
        assert_eq!(asked(USUAL, &body), user("user"));
        assert_eq!(asked(&format!("{USUAL}authorization: Basic cm9vdDo=\r\n"), &body), user("root"));
        let text = envelope::seal(0, br#"{"process":{"cmd":"true"},"stdin":false}"#);
        assert_eq!(asked(&USUAL.replace("proto", "json"), &text), user("user"));
    }

    #[test]
    fn whatever_is_odd_is_left_to_the_server() {
        let body = envelope::seal(0, &request().encode_to_vec());
        let refused = [
            USUAL.replace("tok", "tik"),
            "content-type: application/connect+proto\r\n".into(),
            USUAL.replace("connect+proto", "proto"),
            format!("{USUAL}x-access-token: tok\r\n"),
            format!("{USUAL}transfer-encoding: chunked\r\n"),
            format!("{USUAL}expect: 100-continue\r\n"),
            format!("{USUAL}connect-content-encoding: gzip\r\n"),
            format!("{USUAL}connect-timeout-ms: soon\r\n"),
            format!("{USUAL}no colon\r\n"),
            format!("{USUAL} folded: x\r\n"),
        ];
        for headers in refused {
            assert_eq!(asked(&headers, &body), None, "{headers:?}");
        }
        let twice = [body.clone(), body.clone()].concat();
        let nothing = envelope::seal(0, &StartRequest::default().encode_to_vec());
        for body in [&body[..body.len() - 1], &twice, &nothing, b"", b"\0\0\0\0\x09x"] {
            assert_eq!(asked(USUAL, body), None, "{body:?}");
        }
        let whole = format!("POST {PATH} HTTP/1.1\r\ncontent-length: {}\r\n{USUAL}\r\n", body.len());
        let whole = [whole.as_bytes(), &body].concat();
        assert!(read(&whole, &config()).is_some());
        for len in 0..whole.len() {
            assert_eq!(read(&whole[..len], &config()), None, "cut after {len} bytes");
        }
        for other in
            ["GET /process.Process/Start", "POST /process.Process/List", "POST  /process.Process/Start"]
        {
            let other = [other.as_bytes(), &whole[26..]].concat();
            assert_eq!(read(&other, &config()), None);
        }
    }
}
