//! Commands that envd's clients start: in the log before they run, and when they end.
//!
//! Invariant: a command that cannot be written down does not start.
//! Invariant: the guest gets the one message that was read here, and reads it by the same rules.
//! Invariant: an answer is looked at on its way, not held: large messages pass unread.
//! Trust: the guest is hostile. What it says of an end is taken for its word, with limits.

use std::time::{Duration, Instant};

use axum::{
    Json,
    body::Body,
    extract::Request,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use fleet::{ExecReport, Fleet};
use http_body_util::{BodyExt, Limited};
use prost::Message;
use proto::{
    BodyId,
    envelope::{self, EnvelopeReader},
    wire::process::{StartRequest, StartResponse, process_event::Event},
};
use serde_json::{Value, json};

use crate::{App, keys};

/// The call that starts a command.
pub const START: &str = "/process.Process/Start";
/// An event holds no more than half of that.
const REQUEST_LEN_MAX: usize = 2 << 20;
const REQUEST_WAIT: Duration = Duration::from_secs(60);
/// Longest message that is looked at; an end is far shorter.
const LOOK_LEN_MAX: usize = 4096;
const HEAD_LEN: usize = 5;

/// How messages are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SniffedCodec {
    Json,
    Binary,
}

/// A command that was started, until nobody listens to it through here.
pub struct ObservedExec {
    app: App,
    body: BodyId,
    exec: u64,
    began: Instant,
    spelling: SniffedCodec,
    skim: FrameSniffer,
    started: bool,
    heard: ExecReport,
}

/// Writes a command down that a request is about to start, and passes on just what was written down.
pub async fn begin(
    app: &App,
    id: &BodyId,
    request: Request,
) -> Result<(Request, Option<ObservedExec>), Response> {
    let token = request.headers().get("x-access-token").map(|token| token.as_bytes());
    // The guest refuses it, and says so in its own words.
    if !token.is_some_and(|token| keys::same(token, app.fleet().token(id).as_bytes())) {
        return Ok((request, None));
    }
    let Some(spelling) = spelling(request.headers()) else {
        return Err(refused(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_argument",
            "the request is neither application/connect+json nor application/connect+proto",
        ));
    };
    let (mut parts, body) = request.into_parts();
    let collected = tokio::time::timeout(REQUEST_WAIT, Limited::new(body, REQUEST_LEN_MAX).collect()).await;
    let bytes = match collected {
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(refused(
                StatusCode::TOO_MANY_REQUESTS,
                "resource_exhausted",
                "the request is too long",
            ));
        }
        Ok(Err(_)) => {
            return Err(refused(StatusCode::BAD_REQUEST, "invalid_argument", "the request broke off"));
        }
        Err(_) => {
            return Err(refused(
                StatusCode::GATEWAY_TIMEOUT,
                "deadline_exceeded",
                "the request did not come to its end in time",
            ));
        }
    };
    let Some((start, message)) = read(&bytes, spelling) else {
        return Err(refused(
            StatusCode::BAD_REQUEST,
            "invalid_argument",
            "the request holds no message that starts a command",
        ));
    };
    let (user, timeout) = (user(&parts.headers), timeout(&parts.headers));
    parts.headers.remove(header::CONTENT_LENGTH);
    let request = Request::from_parts(parts, Body::from(envelope::seal(0, &message)));
    let body = id.clone();
    let noted = app
        .blocking(async move |fleet: &Fleet| fleet.note_started(&body, &start, user.as_deref(), timeout))
        .await;
    let exec = noted
        .map_err(|failure| refused(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &failure.to_string()))?;
    let skim = FrameSniffer::default();
    Ok((
        request,
        Some(ObservedExec {
            app: app.clone(),
            body: id.clone(),
            exec,
            began: Instant::now(),
            spelling,
            skim,
            started: false,
            heard: ExecReport::Nothing,
        }),
    ))
}

impl ObservedExec {
    /// The guest refused before it began to answer.
    pub fn refused(&mut self, status: StatusCode) {
        if !self.started {
            self.heard = ExecReport::Refused(format!("the guest answered {status}"));
        }
    }

    /// Looks at what passes.
    pub fn see(&mut self, bytes: &[u8]) {
        let mut skim = std::mem::take(&mut self.skim);
        skim.push(bytes, &mut |flags, message| self.message(flags, message));
        self.skim = skim;
    }

    fn message(&mut self, flags: u8, message: &[u8]) {
        if flags & envelope::END != 0 {
            return self.trailer(message);
        }
        let event = match self.spelling {
            SniffedCodec::Json => serde_json::from_slice::<StartResponse>(message).ok(),
            SniffedCodec::Binary => StartResponse::decode(message).ok(),
        };
        match event.and_then(|response| response.event).and_then(|event| event.event) {
            Some(Event::Start(_)) => self.started = true,
            Some(Event::End(end)) => self.heard = ExecReport::End(end),
            _ => {}
        }
    }

    /// The last word of a stream, which is JSON however the others are spelled.
    fn trailer(&mut self, message: &[u8]) {
        let said: Value = serde_json::from_slice(message).unwrap_or_default();
        let code = said["error"]["code"].as_str();
        match (&self.heard, code) {
            (ExecReport::Nothing, Some("deadline_exceeded")) if self.started => {
                self.heard = ExecReport::TimedOut
            }
            (ExecReport::Nothing, Some(_)) if !self.started => {
                self.heard = ExecReport::Refused(proto::text::visible(
                    said["error"]["message"].as_str().unwrap_or_default(),
                ));
            }
            _ => {}
        }
    }
}

impl Drop for ObservedExec {
    fn drop(&mut self) {
        let (app, body, exec) = (self.app.clone(), self.body.clone(), self.exec);
        let (heard, took) = (std::mem::replace(&mut self.heard, ExecReport::Nothing), self.began.elapsed());
        // A runtime that is gone writes nothing down: then the command is as one whose watcher was killed.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = app
                    .blocking(async move |fleet: &Fleet| fleet.note_ended(&body, exec, &heard, took))
                    .await;
            });
        }
    }
}

/// Finds the messages of a stream that are short enough to be looked at.
#[derive(Debug, Default)]
struct FrameSniffer {
    head: Vec<u8>,
    message: Vec<u8>,
    left: usize,
    kept: bool,
}

impl FrameSniffer {
    fn push(&mut self, mut bytes: &[u8], found: &mut dyn FnMut(u8, &[u8])) {
        while !bytes.is_empty() {
            if self.head.len() < HEAD_LEN {
                let (head, rest) = bytes.split_at(bytes.len().min(HEAD_LEN - self.head.len()));
                self.head.extend_from_slice(head);
                bytes = rest;
                if let [_, a, b, c, d] = self.head[..] {
                    self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                    self.kept = self.left <= LOOK_LEN_MAX;
                }
            }
            let (part, rest) = bytes.split_at(bytes.len().min(self.left));
            if self.kept {
                self.message.extend_from_slice(part);
            }
            self.left -= part.len();
            bytes = rest;
            if self.head.len() == HEAD_LEN && self.left == 0 {
                if self.kept {
                    found(self.head[0], &self.message);
                }
                self.head.clear();
                self.message.clear();
            }
        }
    }
}

fn spelling(headers: &HeaderMap) -> Option<SniffedCodec> {
    match headers
        .get(header::CONTENT_TYPE)?
        .to_str()
        .ok()?
        .split(';')
        .next()?
        .trim()
        .to_ascii_lowercase()
        .as_str()
    {
        "application/connect+json" => Some(SniffedCodec::Json),
        "application/connect+proto" => Some(SniffedCodec::Binary),
        _ => None,
    }
}

/// What a request asks for, and the message that says so; none where the guest would refuse it.
fn read(bytes: &Bytes, spelling: SniffedCodec) -> Option<(StartRequest, Bytes)> {
    let mut opener = EnvelopeReader::new(REQUEST_LEN_MAX);
    opener.push(bytes);
    // As the guest does: what is marked as a stream's last word is no message.
    let message = loop {
        let envelope = opener.next().ok()??;
        if envelope.flags & envelope::END == 0 {
            break envelope.message;
        }
    };
    let start = match spelling {
        SniffedCodec::Json => serde_json::from_slice(&message).ok()?,
        SniffedCodec::Binary => StartRequest::decode(message.clone()).ok()?,
    };
    Some((start, message))
}

/// Who is to run it: the name before the colon.
fn user(headers: &HeaderMap) -> Option<String> {
    let (scheme, said) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let said = said.trim();
    let text = scheme
        .eq_ignore_ascii_case("basic")
        .then(|| STANDARD.decode(said).ok())
        .flatten()
        .and_then(|text| String::from_utf8(text).ok())?;
    text.split(':').next().filter(|name| !name.is_empty()).map(str::to_owned)
}

fn timeout(headers: &HeaderMap) -> Option<Duration> {
    headers
        .get("connect-timeout-ms")?
        .to_str()
        .ok()?
        .parse()
        .ok()
        .filter(|ms| *ms > 0)
        .map(Duration::from_millis)
}

fn refused(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({ "code": code, "message": message }))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_however_the_stream_is_cut() {
        let long = vec![b'x'; LOOK_LEN_MAX + 1];
        let sent = [
            envelope::seal(0, b"one"),
            envelope::seal(0, &long),
            envelope::seal(0, b""),
            envelope::seal(envelope::END, b"{}"),
        ]
        .concat();
        for cut in [1, 2, 3, 7, 100, sent.len()] {
            let (mut skim, mut found) = (FrameSniffer::default(), Vec::new());
            sent.chunks(cut).for_each(|piece| {
                skim.push(piece, &mut |flags, message| found.push((flags, message.to_vec())))
            });
            assert_eq!(
                found,
                [(0, b"one".to_vec()), (0, Vec::new()), (envelope::END, b"{}".to_vec())],
                "{cut}"
            );
        }
    }

    #[test]
    fn what_is_written_down_is_what_the_guest_reads() {
        let real = br#"{"process":{"cmd":"real"}}"#;
        let feint = envelope::seal(envelope::END, br#"{"process":{"cmd":"feint"}}"#);
        let sent = Bytes::from([feint, envelope::seal(0, real)].concat());
        let (start, message) = read(&sent, SniffedCodec::Json).unwrap();
        assert_eq!((start.process.unwrap().cmd.as_str(), &message[..]), ("real", &real[..]));
        assert!(read(&Bytes::from_static(b"garbage"), SniffedCodec::Json).is_none());
        let headers = |name, value: &'static str| {
            HeaderMap::from_iter([(name, header::HeaderValue::from_static(value))])
        };
        assert_eq!(
            spelling(&headers(header::CONTENT_TYPE, "Application/Connect+JSON; charset=utf-8")),
            Some(SniffedCodec::Json)
        );
        assert_eq!(spelling(&headers(header::CONTENT_TYPE, "text/plain")), None);
        assert_eq!(user(&headers(header::AUTHORIZATION, "basic cm9vdDo=")), Some("root".into()));
        assert_eq!(user(&headers(header::AUTHORIZATION, "Bearer cm9vdDo=")), None);
    }
}
