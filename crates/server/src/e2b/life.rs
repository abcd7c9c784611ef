//! The lifecycle of a sandbox: show, connect, pause, fork, end.

use std::time::Duration;

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use fleet::{BodyView, Fleet, Force, Lease, Rest, Status, Then};
use proto::{BodyId, Failure, Kind};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    E2bRefusal,
    create::{timeout as seconds, traffic_token},
    extract::{JsonRequest, find},
    sandbox,
};
use crate::{App, Caller, Scope, limits};

const FORKS_MAX: u32 = 20;
/// The default time to live, in seconds.
const TIMEOUT_S: i64 = 300;
/// How long processes have to exit when only the files are kept.
const GRACE: Duration = Duration::from_secs(2);

/// `GET /sandboxes/{id}`.
pub async fn info(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, E2bRefusal> {
    let (view, lease) = find(&app, &caller, &id).await?;
    let mut detail = sandbox::detail(&app, &view, lease.as_ref());
    // With the token, a key that only reads could run commands.
    if let Some(detail) = detail.as_object_mut().filter(|_| caller.scope < Scope::Run) {
        detail.remove("envdAccessToken");
    }
    Ok(Json(detail))
}

/// `DELETE /sandboxes/{id}`.
pub async fn kill(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, E2bRefusal> {
    let (view, _) = find(&app, &caller, &id).await?;
    let body = view.id().clone();
    let removed = app.blocking(async move |fleet: &Fleet| fleet.remove(&body, Force::Yes).await).await;
    app.timer().forget(view.id());
    match removed {
        Err(failure) if failure.kind == Kind::NotFound => Err(E2bRefusal::no_sandbox(&id)),
        removed => Ok(removed.map(|()| StatusCode::NO_CONTENT)?),
    }
}

#[derive(Debug, Deserialize)]
pub struct ConnectRequest {
    timeout: Option<i64>,
    /// False discards the memory of a paused sandbox and starts it from its files.
    memory: Option<bool>,
}

/// `POST /v2/sandboxes/{id}/connect`, and its v1 form.
pub async fn connect(
    state: State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<ConnectRequest>,
) -> Result<Response, E2bRefusal> {
    let (view, _) = find(&state.0, &caller, &id).await?;
    let woken = wake(&state.0, &view, asked.value).await?;
    Ok(answered(&state.0, woken))
}

/// `POST /sandboxes/{id}/resume`, for older clients. They expect an error for a sandbox that already runs.
pub async fn resume(
    state: State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<ConnectRequest>,
) -> Result<Response, E2bRefusal> {
    let (view, _) = find(&state.0, &caller, &id).await?;
    if view.status == Status::Running {
        return Err(E2bRefusal::new(StatusCode::CONFLICT, format!("sandbox {id} is running already")));
    }
    let woken = wake(&state.0, &view, asked.value).await?;
    Ok(answered(&state.0, woken))
}

fn answered(app: &App, (view, lease, was): (BodyView, Option<Lease>, Status)) -> Response {
    let status = if was == Status::Running { StatusCode::OK } else { StatusCode::CREATED };
    (status, Json(sandbox::sandbox(app, &view, lease.as_ref()))).into_response()
}

/// Resumes or starts a Body that does not run, and extends its deadline; the deadline of a running Body is
/// never shortened.
async fn wake(
    app: &App,
    view: &BodyView,
    asked: ConnectRequest,
) -> Result<(BodyView, Option<Lease>, Status), E2bRefusal> {
    let (timeout, memory) = (seconds(asked.timeout.unwrap_or(TIMEOUT_S))?, asked.memory.unwrap_or(true));
    let body = view.id().clone();
    let woken = app.blocking(async move |fleet: &Fleet| wake_now(fleet, &body, timeout, memory).await).await;
    let (view, lease, was) = woken.map_err(|failure| {
        if failure.kind == Kind::NotFound {
            E2bRefusal::no_sandbox(view.id().as_str())
        } else {
            failure.into()
        }
    })?;
    if let Some(lease) = &lease {
        app.timer().note(view.id(), lease);
    }
    Ok((view, lease, was))
}

async fn wake_now(
    fleet: &Fleet,
    id: &BodyId,
    timeout: Duration,
    memory: bool,
) -> Result<(BodyView, Option<Lease>, Status), Failure> {
    let was = fleet.status(id)?;
    let leased = fleet.leases().get(id)?.is_some();
    if leased {
        fleet.leases().change(id, |lease| {
            if was != Status::Running {
                // The deadline is set when the Body resumes.
                lease.timeout_ms = timeout.as_millis() as u64;
            } else if lease
                .deadline_ms
                .is_none_or(|deadline| deadline < fleet::lease::now_ms() + timeout.as_millis() as u64)
            {
                lease.extend(timeout);
            }
        })?;
    }
    let view = match was {
        Status::Running => fleet.view(id)?,
        Status::Paused if memory => fleet.resume(id).await?,
        Status::Paused => {
            fleet.stop(id, Duration::ZERO).await?;
            fleet.start(id).await?
        }
        Status::Stopped | Status::Dead | Status::Interrupted => fleet.start(id).await?,
    };
    Ok((view, fleet.leases().get(id)?, was))
}

#[derive(Debug, Deserialize)]
pub struct TimeoutRequest {
    timeout: i64,
}

/// `POST /sandboxes/{id}/timeout`.
pub async fn timeout(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<TimeoutRequest>,
) -> Result<StatusCode, E2bRefusal> {
    let to = seconds(asked.value.timeout)?;
    change(&app, &caller, &id, move |lease| lease.extend(to)).await
}

#[derive(Debug, Deserialize)]
pub struct RefreshRequest {
    duration: Option<i64>,
}

/// `POST /sandboxes/{id}/refreshes`: extends the deadline, never shortens it.
pub async fn refresh(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<RefreshRequest>,
) -> Result<StatusCode, E2bRefusal> {
    let to = seconds(asked.value.duration.unwrap_or(15))?;
    let later = move |lease: &mut Lease| {
        let mut moved = lease.clone();
        moved.extend(to);
        lease.deadline_ms = lease.deadline_ms.max(moved.deadline_ms);
    };
    change(&app, &caller, &id, later).await
}

/// Changes the deadline of a running sandbox.
async fn change(
    app: &App,
    caller: &Caller,
    id: &str,
    change: impl FnMut(&mut Lease) + Send + 'static,
) -> Result<StatusCode, E2bRefusal> {
    let (view, lease) = find(app, caller, id).await?;
    if view.status != Status::Running {
        return Err(E2bRefusal::no_sandbox(id));
    }
    if lease.is_none() {
        return Err(E2bRefusal::new(
            StatusCode::CONFLICT,
            "this sandbox was not created through this API and has no deadline",
        ));
    }
    let body = view.id().clone();
    let lease = app.blocking(async move |fleet: &Fleet| fleet.leases().change(&body, change)).await?;
    app.timer().note(view.id(), &lease);
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
pub struct PauseRequest {
    memory: Option<bool>,
}

/// `POST /sandboxes/{id}/pause`.
pub async fn pause(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<PauseRequest>,
) -> Result<StatusCode, E2bRefusal> {
    let (view, _) = find(&app, &caller, &id).await?;
    if view.status != Status::Running {
        return Err(E2bRefusal::new(StatusCode::CONFLICT, format!("sandbox {id} is paused already")));
    }
    let body = view.id().clone();
    let how = if asked.value.memory.unwrap_or(true) { Rest::Memory } else { Rest::Files };
    app.blocking(async move |fleet: &Fleet| match how {
        Rest::Memory => fleet.pause(&body).await.map(drop),
        Rest::Files => fleet.stop(&body, GRACE).await.map(drop),
    })
    .await?;
    app.timer().forget(view.id());
    app.streams().cut(view.id());
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
pub struct ForkSandboxRequest {
    timeout: Option<i64>,
    count: Option<u32>,
}

/// `POST /sandboxes/{id}/fork`: creates all forks or none.
pub async fn fork(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<ForkSandboxRequest>,
) -> Result<Response, E2bRefusal> {
    let (view, lease) = find(&app, &caller, &id).await?;
    let count = asked.value.count.unwrap_or(1);
    if !(1..=FORKS_MAX).contains(&count) {
        return Err(E2bRefusal::bad(format!("count is not a number from 1 to {FORKS_MAX}")));
    }
    let timeout = seconds(asked.value.timeout.unwrap_or(TIMEOUT_S))?;
    let lease = fork_lease(lease, timeout, &caller)?;
    let admitted = limits::admit_forks(&app, &caller, &view.spec, count).await?;
    let (body, terms) = (view.id().clone(), lease.clone());
    let making = async move |fleet: &Fleet| {
        let made = fleet.snapshots().fork_leased(&body, count, None, Some(terms)).await;
        // The permit is released here and not earlier: the forks are created even if the caller has
        // disconnected.
        drop(admitted);
        made
    };
    let views = app.blocking(making).await?;
    views.iter().for_each(|view| app.timer().note(view.id(), &lease));
    let forks: Vec<Value> =
        views.iter().map(|view| json!({ "sandbox": sandbox::sandbox(&app, view, Some(&lease)) })).collect();
    Ok((StatusCode::CREATED, Json(forks)).into_response())
}

/// A fork gets the lease of its parent, with a deadline of its own.
fn fork_lease(parent: Option<Lease>, timeout: Duration, caller: &Caller) -> Result<Lease, E2bRefusal> {
    let mut lease = parent.unwrap_or_else(|| Lease::new(timeout, Then::Kill));
    let token = lease.traffic_token.is_some().then(traffic_token).transpose()?;
    lease = Lease {
        paused: None,
        request: None,
        resumed_by_traffic: false,
        traffic_token: token,
        since: fleet::clock::now(),
        ..lease
    };
    lease.owner = Some(caller.key.clone());
    lease.extend(timeout);
    Ok(lease)
}
