//! Between a Body and a branch of the repository that it came from: `land`, the queue, and `sync`.
//!
//! Invariant: only a key of scope `admin` changes or reads a branch of a repository of the host.

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use fleet::{Fleet, LandSelection, LandTarget, ProgressLine, SyncMode};
use proto::{BodyId, Failure, Kind};
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::owned,
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, BodyParam, JsonBody as Sent},
    long_work,
    work::reached,
    work_models::{LandedBranch, QueuedLandings, SyncedBranch, describe},
};
use crate::App;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(land)).routes(routes!(land_queue)).routes(routes!(sync))
}

/// Where and how the work of a Body lands.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "onto": "main" }))]
struct LandBody {
    /// The branch to create or to move forward; `pal/BODY` if left out.
    #[schema(min_length = 1)]
    branch: Option<String>,
    /// The branch to put the work on top of, instead of `branch`.
    #[schema(min_length = 1)]
    onto: Option<String>,
    /// Land everything as one commit.
    #[serde(default)]
    squash: bool,
    /// The message of that one commit, or of the commit for uncommitted work.
    message: Option<String>,
    /// Land only these commits.
    #[serde(default)]
    pick: Vec<String>,
    /// Leave out uncommitted work.
    #[serde(default)]
    committed: bool,
    /// The name of the repository, for a Body that has several.
    workspace: Option<String>,
}

impl LandBody {
    fn target(&self, id: &BodyId) -> Result<LandTarget, Failure> {
        self.branch.as_deref().map_or(Ok(()), check_branch)?;
        self.onto.as_deref().map_or(Ok(()), check_branch)?;
        match (self.branch.clone(), self.onto.clone()) {
            (Some(_), Some(_)) => {
                Err(Failure::new(Kind::Usage, "work lands either as `branch` or `onto` one")
                    .hint("leave out one of them"))
            }
            (_, Some(onto)) => Ok(LandTarget::Onto(onto)),
            (Some(branch), None) => Ok(LandTarget::Branch(branch)),
            (None, None) => Ok(LandTarget::Branch(format!("pal/{id}"))),
        }
    }

    fn selection(self) -> Result<LandSelection, Failure> {
        let chosen = [self.squash, !self.pick.is_empty(), self.committed].iter().filter(|is| **is).count();
        if chosen > 1 || (self.message.is_some() && chosen == 1 && !self.squash) {
            return Err(Failure::new(Kind::Usage, "these options of a landing exclude each other")
                .hint("choose one of `squash`, `pick` and `committed`; the last two have no `message`"));
        }
        Ok(match (self.squash, self.pick.is_empty(), self.committed, self.message) {
            (true, _, _, message) => LandSelection::Squash { message },
            (_, false, ..) => LandSelection::Pick(self.pick),
            (_, _, true, _) => LandSelection::Committed,
            (.., Some(message)) => LandSelection::AllWithMessage(message),
            (.., None) => LandSelection::All,
        })
    }
}

fn check_branch(name: &str) -> Result<(), Failure> {
    match name {
        "" => Err(Failure::new(Kind::Usage, "a branch has a name").hint("name one, such as main")),
        _ => Ok(()),
    }
}

/// Put the work of a Body onto a branch of the repository that it came from.
///
/// The server's operator becomes the committer. With `Accept: text/event-stream` the response is a stream that ends with
/// `done` or `failed`.
#[utoipa::path(post, path = "/bodies/{id}/land", operation_id = "land_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<LandBody>,
    responses((status = 200, description = "The landing, or a stream", content((LandedBranch = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn land(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    BodyParam(id): BodyParam,
    headers: HeaderMap,
    asked: Option<Sent<LandBody>>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let asked = asked.map(|Sent(asked)| asked).unwrap_or_default();
    let (target, workspace) = (asked.target(&id)?, asked.workspace.clone());
    let selection = asked.selection()?;
    owned(&app, &caller, &id).await?;
    let person = app.config().git_identity.clone();
    let act = async move |fleet: &Fleet, _: long_work::Report<'_>| {
        let landed = fleet.workspaces().land(&id, workspace.as_deref(), target, selection, &person).await?;
        describe::<LandedBranch>(&landed)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}

/// The Bodies that land, in their order.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "bodies": ["k3v9", "m2hf"], "onto": "main", "test": "make test" }))]
struct QueueRequest {
    /// The Bodies, by id or name.
    #[schema(min_items = 1, max_items = 100)]
    bodies: Vec<String>,
    /// The branch that the work is put on top of.
    #[schema(min_length = 1)]
    onto: String,
    /// A shell command that tests each; the project's own test if left out.
    test: Option<String>,
}

/// Land several Bodies in order: each is put on top of the branch and tested in a new Body, and lands only if the test
/// passes.
///
/// With `Accept: text/event-stream` the response is a stream: events `progress` (`{"text"}`), then `done` or `failed`.
#[utoipa::path(post, path = "/land", operation_id = "land_queue", tag = "work", request_body = QueueRequest,
    responses((status = 200, description = "The result of each Body, or a stream", content((QueuedLandings = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn land_queue(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    headers: HeaderMap,
    Sent(asked): Sent<QueueRequest>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    check_branch(&asked.onto)?;
    let ids = reached(&app, &caller, &asked.bodies, 1).await?;
    let person = app.config().git_identity.clone();
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        let mut say = |line: ProgressLine<'_>| report(&line.to_string());
        let test = asked.test.as_deref();
        let queued = fleet.workspaces().land_queue(&ids, &asked.onto, test, &person, &mut say).await?;
        Ok(QueuedLandings { items: describe(&queued)? })
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}

/// The branch whose commits come into a Body.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "branch": "main", "mode": "merge" }))]
struct SyncBody {
    /// The branch of the repository; the one that the Body began on if left out.
    #[schema(min_length = 1)]
    branch: Option<String>,
    /// The use that the Body makes of the commits; `fetch` if left out.
    #[serde(default)]
    mode: SyncAction,
    /// The name of the repository, for a Body that has several.
    workspace: Option<String>,
}

/// The use that a Body makes of new commits.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum SyncAction {
    /// It keeps them as a remote branch; no file changes.
    #[default]
    Fetch,
    /// It merges them into the current branch.
    Merge,
    /// It rebases the current branch onto them.
    Rebase,
}

impl From<SyncAction> for SyncMode {
    fn from(action: SyncAction) -> Self {
        match action {
            SyncAction::Fetch => Self::Fetch,
            SyncAction::Merge => Self::Merge,
            SyncAction::Rebase => Self::Rebase,
        }
    }
}

/// Bring the commits of a branch of the repository into a running Body.
///
/// With `Accept: text/event-stream` the response is a stream that ends with `done` or `failed`.
#[utoipa::path(post, path = "/bodies/{id}/sync", operation_id = "sync_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<SyncBody>,
    responses((status = 200, description = "The commits, or a stream", content((SyncedBranch = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn sync(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    BodyParam(id): BodyParam,
    headers: HeaderMap,
    asked: Option<Sent<SyncBody>>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let SyncBody { branch, mode, workspace } = asked.map(|Sent(asked)| asked).unwrap_or_default();
    branch.as_deref().map_or(Ok(()), check_branch)?;
    owned(&app, &caller, &id).await?;
    let person = app.config().git_identity.clone();
    let act = async move |fleet: &Fleet, _: long_work::Report<'_>| {
        let workspaces = fleet.workspaces();
        let sync = workspaces.sync(&id, workspace.as_deref(), branch.as_deref(), mode.into(), &person);
        describe::<SyncedBranch>(&sync.await?)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}
