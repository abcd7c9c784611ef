//! A hypervisor's HTTP API: one request after another over its socket.
//!
//! Trust: a hypervisor that was taken over may answer anything. Heads and bodies have a maximum length, answers have
//! a deadline, and error texts are escaped before they are shown.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde_json::Value;
use tokio::{net::UnixStream, time::Instant};

/// Longest head of an answer.
const HEAD_LEN_MAX: usize = 16 << 10;
/// Longest body of an answer.
const BODY_LEN_MAX: usize = 1 << 20;
/// Most characters of an error text that are shown.
const REASON_LEN_MAX: usize = 400;
/// How long a hypervisor may take until it listens.
const LISTENS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// One request to a hypervisor.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiRequest {
    /// `PUT`, `PATCH` or `GET`.
    pub method: &'static str,
    /// The path of the resource.
    pub path: String,
    /// The JSON body.
    pub body: Option<Value>,
}

impl ApiRequest {
    /// A `PUT` with a body.
    pub fn put(path: impl Into<String>, body: &impl Serialize) -> io::Result<Self> {
        Ok(Self { method: "PUT", path: path.into(), body: Some(serde_json::to_value(body)?) })
    }

    /// A `PATCH` with a body.
    pub fn patch(path: impl Into<String>, body: &impl Serialize) -> io::Result<Self> {
        Ok(Self { method: "PATCH", ..Self::put(path, body)? })
    }

    /// A `GET`.
    pub fn get(path: impl Into<String>) -> Self {
        Self { method: "GET", path: path.into(), body: None }
    }

    /// A `PUT` without a body, for an action.
    pub fn act(path: impl Into<String>) -> Self {
        Self { method: "PUT", path: path.into(), body: None }
    }
}

/// The API of a hypervisor.
#[derive(Debug)]
pub struct HypervisorApi {
    socket: PathBuf,
    /// How long an answer may take: writing much memory takes a while.
    patience: Duration,
}

impl HypervisorApi {
    /// The API behind a socket.
    pub fn new(socket: impl Into<PathBuf>, patience: Duration) -> Self {
        Self { socket: socket.into(), patience }
    }

    /// Waits until the hypervisor listens; `ended` says whether it never will.
    pub async fn wait(&self, mut ended: impl FnMut() -> bool) -> io::Result<()> {
        let deadline = Instant::now() + LISTENS;
        while let Err(error) = UnixStream::connect(&self.socket).await {
            if ended() || Instant::now() > deadline {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Sends a request and waits until it is done.
    pub async fn send(&self, request: &ApiRequest) -> io::Result<()> {
        self.ask(request).await.map(drop)
    }

    /// Sends a request and returns the answer's body.
    pub async fn ask(&self, request: &ApiRequest) -> io::Result<Bytes> {
        let ApiRequest { method, path, body } = request;
        let body = body.as_ref().map(serde_json::to_vec).transpose()?;
        let asked = tokio::time::timeout(self.patience, exchange(&self.socket, method, path, body)).await;
        let done = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        done.map_err(|error| io::Error::new(error.kind(), format!("{method} {path}: {error}")))
    }
}

async fn exchange(socket: &Path, method: &str, path: &str, body: Option<Vec<u8>>) -> io::Result<Bytes> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_LEN_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    let driven = tokio::task::spawn_local(async move { drop(connection.await) });
    let mut request = hyper::Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .header(header::ACCEPT, "application/json");
    if body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let request = request.body(Full::new(Bytes::from(body.unwrap_or_default()))).map_err(io::Error::other)?;
    let answered = async {
        let answer = sender.send_request(request).await.map_err(io::Error::other)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), BODY_LEN_MAX)
            .collect()
            .await
            .map_err(|error| io::Error::other(error.to_string()))?
            .to_bytes();
        if status.is_success() {
            Ok(body)
        } else {
            Err(io::Error::other(format!("{}: {}", status.as_u16(), reason(&body))))
        }
    };
    let answered = answered.await;
    driven.abort();
    answered
}

/// The hypervisor's error text: Firecracker sends it in a field, Cloud Hypervisor as a list of causes or as plain
/// text.
fn reason(body: &[u8]) -> String {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let field = value
        .as_ref()
        .and_then(|value| value.get("fault_message").and_then(|field| field.as_str()).map(str::to_owned));
    let list = value.as_ref().and_then(|value| value.as_array()).map(|causes| {
        let causes: Vec<&str> = causes.iter().filter_map(|cause| cause.as_str()).collect();
        causes.join(": ")
    });
    let text = field.or(list).unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let short: String = text.trim().chars().take(REASON_LEN_MAX).collect();
    if short.is_empty() { "it gave no reason".to_owned() } else { proto::text::visible(&short) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixListener,
        task::LocalSet,
    };

    use super::*;

    /// The result of a request to a hypervisor that answers with these bytes, and then closes the connection or stays
    /// silent.
    fn check(name: &str, answer: Vec<u8>, goes: bool) -> (io::Result<()>, String) {
        let path = std::env::temp_dir().join(format!("pal-http-{}-{name}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let outcome = LocalSet::new().block_on(&runtime, async {
            let listener = UnixListener::bind(&path).unwrap();
            let serving = tokio::task::spawn_local(async move {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut asked = vec![0; 4096];
                let len = socket.read(&mut asked).await.unwrap();
                let _ = socket.write_all(&answer).await;
                if !goes {
                    std::future::pending::<()>().await;
                }
                String::from_utf8_lossy(&asked[..len]).into_owned()
            });
            let api = HypervisorApi::new(&path, Duration::from_millis(500));
            let done = api.send(&ApiRequest::put("/vm", &json!({ "state": "Paused" })).unwrap()).await;
            let asked = if goes { serving.await.unwrap() } else { String::new() };
            (done, asked)
        });
        std::fs::remove_file(path).unwrap();
        outcome
    }

    #[test]
    fn a_request_is_what_its_description_asks_for() {
        let (done, asked) = check("plain", b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n".to_vec(), true);
        done.unwrap();
        let (head, body) = asked.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("PUT /vm HTTP/1.1\r\n"), "{head}");
        let head = head.to_ascii_lowercase();
        for line in [
            "host: localhost",
            "accept: application/json",
            "content-type: application/json",
            "content-length: 18",
        ] {
            assert!(head.contains(line), "{line}: {head}");
        }
        assert_eq!(body, r#"{"state":"Paused"}"#);
    }

    #[test]
    fn a_refusal_is_told_with_its_reason() {
        let refuse = |body: &str| {
            format!("HTTP/1.1 400 Bad Request\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
        };
        let error_for = |name, body| check(name, refuse(body), true).0.unwrap_err().to_string();
        assert_eq!(
            error_for("fault", r#"{"fault_message":"no\u001b[2J kernel"}"#),
            r"PUT /vm: 400: no\u{1b}[2J kernel"
        );
        assert_eq!(
            error_for("chain", r#"["cannot boot","no kernel"]"#),
            "PUT /vm: 400: cannot boot: no kernel"
        );
        assert_eq!(error_for("plainly", "no kernel\n"), "PUT /vm: 400: no kernel");
        assert_eq!(error_for("nothing", ""), "PUT /vm: 400: it gave no reason");
        assert!(error_for("much", &"x".repeat(10_000)).len() < 500);
    }

    #[test]
    fn an_answer_that_is_none_ends_in_an_error() {
        for (name, answer) in [
            ("garbage", b"\0\xff\xfeSSH-2.0-hello\r\n\r\n".to_vec()),
            ("nothing-at-all", Vec::new()),
            ("cut", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort".to_vec()),
            ("long-head", [b"HTTP/1.1 200 OK\r\nX: ".to_vec(), vec![b'x'; 1 << 20]].concat()),
            (
                "long-body",
                [b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n".to_vec(), vec![b'x'; 4_000_000]]
                    .concat(),
            ),
            (
                "endless-chunks",
                [
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
                    b"8\r\nxxxxxxxx\r\n".repeat(300_000),
                ]
                .concat(),
            ),
        ] {
            let error = check(name, answer, true).0.unwrap_err();
            assert!(error.to_string().starts_with("PUT /vm: "), "{name}: {error}");
        }
    }

    #[test]
    fn a_hypervisor_that_hangs_is_given_up() {
        for (name, answer) in
            [("silent", Vec::new()), ("half", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec())]
        {
            assert_eq!(check(name, answer, false).0.unwrap_err().kind(), io::ErrorKind::TimedOut, "{name}");
        }
    }
}
