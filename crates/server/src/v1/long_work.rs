//! Long work: one answer when it is done, or a stream of its progress.
//!
//! Invariant: long work runs to its end, also after its client has left.
//! Invariant: a client that reads slowly misses lines of progress, and never the end.

use std::convert::Infallible;

use axum::{
    Json,
    http::{HeaderMap, StatusCode},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use fleet::Fleet;
use proto::{Failure, Kind};
use serde::Serialize;
use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::wants_stream,
};
use crate::{App, Caller};

/// Lines of progress that wait for a client.
const LINES_MAX: usize = 64;

/// Reports one line of progress.
pub type Report<'a> = &'a mut (dyn FnMut(&str) + Send);

/// Runs long work of a caller. With `Accept: text/event-stream` the answer is a stream: events `progress` (`{"text"}`),
/// then `done` (the answer) or `failed` (an error); otherwise it is the answer itself, with this status.
pub async fn answer<T, F>(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    status: StatusCode,
    act: F,
) -> Result<Response, V1Refusal>
where
    T: Serialize + Send + 'static,
    F: AsyncFnOnce(&Fleet, Report<'_>) -> Result<T, Failure> + Send + 'static,
{
    let permit = app.services().limits().stream(&caller.key)?;
    let (lines, heard) = mpsc::channel(LINES_MAX);
    let running = app.clone();
    let work = tokio::spawn(async move {
        let done = running.blocking(async move |fleet: &Fleet| {
            let mut report = |line: &str| drop(lines.try_send(line.to_owned()));
            act(fleet, &mut report).await
        });
        let done = done.await;
        drop(permit);
        done
    });
    if wants_stream(headers) {
        return Ok(stream(heard, work).into_response());
    }
    Ok((status, Json(end(work).await?)).into_response())
}

async fn end<T>(work: JoinHandle<Result<T, Failure>>) -> Result<T, Failure> {
    let broken = |error| Failure::new(Kind::Internal, "the work ended unexpectedly").because(error);
    work.await.map_err(broken)?
}

fn stream<T: Serialize + Send + 'static>(
    heard: mpsc::Receiver<String>,
    work: JoinHandle<Result<T, Failure>>,
) -> impl IntoResponse {
    let events = futures_util::stream::unfold((heard, Some(work)), |(mut heard, work)| async move {
        let work = work?;
        let named = |name: &str, data: serde_json::Value| Event::default().event(name).data(data.to_string());
        let (event, work) = match heard.recv().await {
            Some(text) => (named("progress", serde_json::json!({ "text": text })), Some(work)),
            None => match end(work).await {
                Ok(done) => (named("done", serde_json::json!(done)), None),
                Err(failure) => (named("failed", serde_json::json!(ErrorBody::from(failure))), None),
            },
        };
        Some((Ok::<_, Infallible>(event), (heard, work)))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}
