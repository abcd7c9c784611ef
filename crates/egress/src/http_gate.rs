//! HTTP through the proxy: one request on each connection, written anew, and its answer as it comes.
//!
//! Invariant: bytes after the request are discarded, so a second request goes nowhere.

use std::{cell::Cell, io, time::Duration};

use proto::egress::RuleResponse;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use crate::{
    budgets::Meter,
    client::{ClientStream, ProxyClient},
    http_body::{BodyLength, BodyReader},
    idle::IdleClock,
    refusal::Denial,
};

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// How long a program may take to read the end of an answer.
const LINGER: Duration = Duration::from_secs(5);
const PIECE_LEN: usize = 32 << 10;

/// A request that may go out.
pub struct OutgoingRequest {
    pub head: String,
    pub body: BodyLength,
    /// Whether the program sends the body only after an answer of 100.
    pub expects_continue: bool,
    /// Counts the bytes of the request and of its answer.
    pub meter: Meter,
}

/// Sends a request and its body, and forwards the answer until the host has sent all.
pub async fn exchange<S: ClientStream>(
    client: &mut ProxyClient<S>,
    mut upstream: impl AsyncRead + AsyncWrite + Unpin,
    request: &OutgoingRequest,
) -> io::Result<Result<(), Denial>> {
    let meter = &request.meter;
    meter.spend(request.head.len())?;
    upstream.write_all(request.head.as_bytes()).await?;
    let mut body = BodyReader::new(request.body);
    if request.expects_continue && !body.is_done() && client.ahead.is_empty() {
        // The proxy takes the body itself, so that the request has one form for the host.
        client.stream.write_all(CONTINUE).await?;
    }
    let ahead = std::mem::take(&mut client.ahead);
    let (mut from_client, to_client) = tokio::io::split(&mut client.stream);
    let (from_host, to_host) = tokio::io::split(upstream);
    let (clock, answered) = (IdleClock::new(), Cell::new(false));
    let sent = async {
        match send_body(&ahead, &mut from_client, to_host, &mut body, (&clock, meter)).await? {
            Err(denial) => Ok(Err(denial)),
            Ok(_keep_open) => {
                // A program that has closed its end may still read.
                let _ = tokio::io::copy(&mut from_client, &mut tokio::io::sink()).await;
                clock.half_closed();
                std::future::pending::<io::Result<Result<(), Denial>>>().await
            }
        }
    };
    let answer = forward_answer(from_host, to_client, (&clock, meter), &answered);
    let done = tokio::select! {
        done = answer => done.map(Ok),
        done = sent => done,
        error = clock.expired() => Err(error),
    };
    match done {
        Ok(Ok(())) => {
            let _ = timeout(LINGER, client.drain()).await;
            Ok(Ok(()))
        }
        // After the beginning of an answer another one would be read as a part of it.
        Ok(Err(_)) if answered.get() => {
            client.stream.reset();
            Ok(Ok(()))
        }
        other => other,
    }
}

/// Answers a request in the place of its host.
pub async fn respond<S: ClientStream>(
    client: &mut ProxyClient<S>,
    response: &RuleResponse,
    is_head: bool,
) -> io::Result<()> {
    let RuleResponse { status, headers, body } = response;
    let reason = hyper::StatusCode::from_u16(*status).ok().and_then(|status| status.canonical_reason());
    let mut text = format!("HTTP/1.1 {status} {}\r\n", reason.unwrap_or("Answered"));
    headers.iter().for_each(|(name, value)| text.push_str(&format!("{name}: {value}\r\n")));
    // These have no body, and some clients take a length for the announcement of one.
    if !matches!(status, 204 | 304) {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    text.push_str("connection: close\r\n\r\n");
    if !is_head {
        text.push_str(body);
    }
    client.stream.write_all(text.as_bytes()).await?;
    client.stream.shutdown().await?;
    // Closing a socket with unread bytes would reset it, and the program would lose the answer.
    let _ = timeout(LINGER, client.drain()).await;
    Ok(())
}

/// Sends the body. Returns the host's end, because some servers take its close for the end of the whole exchange.
async fn send_body<W: AsyncWrite + Unpin>(
    ahead: &[u8],
    from: &mut (impl AsyncRead + Unpin),
    mut to: W,
    body: &mut BodyReader,
    (clock, meter): (&IdleClock, &Meter),
) -> io::Result<Result<W, Denial>> {
    let mut piece = ahead.to_vec();
    loop {
        let Ok(len) = body.push(&piece) else {
            return Ok(Err(Denial::bad("the chunks of its body are malformed")));
        };
        meter.spend(len)?;
        to.write_all(&piece[..len]).await?;
        clock.touch();
        if body.is_done() {
            return Ok(Ok(to));
        }
        piece.resize(PIECE_LEN, 0);
        let len = from.read(&mut piece).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        piece.truncate(len);
    }
}

async fn forward_answer(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    (clock, meter): (&IdleClock, &Meter),
    answered: &Cell<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; PIECE_LEN];
    loop {
        let len = from.read(&mut buffer).await?;
        if len == 0 {
            return to.shutdown().await;
        }
        meter.spend(len)?;
        answered.set(true);
        to.write_all(&buffer[..len]).await?;
        clock.touch();
    }
}
