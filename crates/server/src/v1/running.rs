//! Routes for a Body that runs: its processes, other limits, and memory that goes to disk.

use std::time::Duration;

use axum::{Json, extract::State};
use fleet::{Fleet, LimitChanger, LimitRequest};
use proto::{Failure, Kind, Size};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::{change, own},
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, BodyParam, JsonBody as Sent, ReadAccess, RunAccess},
    models::Body,
};
use crate::App;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(processes)).routes(routes!(limits)).routes(routes!(suspend))
}

/// The processes of a Body.
#[derive(Debug, Serialize, ToSchema)]
struct BodyProcesses {
    /// The processes, by pid.
    items: Vec<Process>,
    /// How many more there are.
    left_out: u64,
}

/// A process in a Body.
#[derive(Debug, Serialize, ToSchema)]
struct Process {
    /// Its pid in the Body.
    pid: i32,
    /// The pid of its parent.
    parent: i32,
    /// The name of its user, or the number of one without a name.
    user: String,
    /// Its CPU time over all threads.
    cpu_ms: u64,
    /// Its resident memory.
    memory_bytes: u64,
    /// How long ago it started.
    age_ms: u64,
    /// Its arguments, beginning with the program.
    command: Vec<String>,
}

impl From<proto::guest::BodyProcess> for Process {
    fn from(found: proto::guest::BodyProcess) -> Self {
        let proto::guest::BodyProcess { pid, parent, user, cpu_ms, memory_bytes, age_ms, command } = found;
        Self { pid, parent, user, cpu_ms, memory_bytes, age_ms, command }
    }
}

/// List the processes in a running Body.
#[utoipa::path(get, path = "/bodies/{id}/processes", operation_id = "list_processes", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The processes", body = BodyProcesses), (status = "default", description = "Refused", body = ErrorBody)))]
async fn processes(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<BodyProcesses>, V1Refusal> {
    let list = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.access().processes(&id).await
    });
    let list = list.await?;
    let items = list.processes.into_iter().map(Process::from).collect();
    Ok(Json(BodyProcesses { items, left_out: list.left_out }))
}

/// New limits of a Body; a limit that is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "memory_bytes": 4294967296u64 }))]
struct NewLimits {
    /// Memory of all processes together.
    #[schema(minimum = 8388608)]
    memory_bytes: Option<u64>,
    /// CPU time, in thousandths of one CPU.
    #[schema(minimum = 10)]
    cpu_milli: Option<u32>,
    /// Processes and threads.
    #[schema(minimum = 4, maximum = 4194304)]
    pids: Option<u32>,
    /// Bytes that the Body may write to its file system.
    #[schema(minimum = 1048576)]
    disk_bytes: Option<u64>,
    /// Number of files and directories that the Body may create.
    #[schema(minimum = 64)]
    inodes: Option<u64>,
    /// Milliseconds that the Body may run after its start.
    #[schema(minimum = 1)]
    wall_ms: Option<u64>,
}

impl From<NewLimits> for LimitRequest {
    fn from(wanted: NewLimits) -> Self {
        Self {
            memory: wanted.memory_bytes.map(Size),
            cpu_milli: wanted.cpu_milli,
            pids: wanted.pids,
            disk: wanted.disk_bytes.map(Size),
            inodes: wanted.inodes,
            wall: wanted.wall_ms.map(Duration::from_millis),
            ..Self::default()
        }
    }
}

/// A Body whose limits changed.
#[derive(Debug, Serialize, ToSchema)]
struct LimitedBody {
    /// The Body, with its new limits.
    body: Body,
    /// The limits that count from its next start on.
    at_next_start: Vec<LaterLimit>,
}

/// A limit that does not count at once.
#[derive(Debug, Serialize, ToSchema)]
struct LaterLimit {
    /// The name of the limit.
    limit: String,
    /// The reason.
    why: String,
}

/// Change limits of a Body. It takes an admin key, because a quota of a key counts the limits that its Bodies began with.
#[utoipa::path(patch, path = "/bodies/{id}/limits", operation_id = "change_limits", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    request_body = NewLimits,
    responses((status = 200, description = "The Body and the limits that count later", body = LimitedBody), (status = "default", description = "Refused", body = ErrorBody)))]
async fn limits(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    BodyParam(id): BodyParam,
    Sent(wanted): Sent<NewLimits>,
) -> Result<Json<LimitedBody>, V1Refusal> {
    if wanted == NewLimits::default() {
        return Err(Failure::new(Kind::Usage, "the request names no limit").into());
    }
    let wanted = LimitRequest::from(wanted);
    let changed = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        let changed = LimitChanger::of(fleet).change(&id, &wanted).await?;
        let (view, lease) = own(fleet, &caller, &id)?;
        Ok::<_, Failure>((Body::new(view, lease), changed.at_next_start))
    });
    let (body, later) = changed.await?;
    let later =
        later.into_iter().map(|later| LaterLimit { limit: later.limit.to_owned(), why: later.why }).collect();
    Ok(Json(LimitedBody { body, at_next_start: later }))
}

/// Write the memory of a microVM to disk and end its hypervisor; resuming the Body continues it.
#[utoipa::path(post, path = "/bodies/{id}/suspend", operation_id = "suspend_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The suspended Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn suspend(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<Body>, V1Refusal> {
    change(&state.0, caller, id, async |fleet, id| fleet.pause_to_disk(id).await).await
}
