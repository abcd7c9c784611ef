//! Work in repositories: `up`, `prepare`, `diff`, `log`, `save` and `compare`.
//!
//! Invariant: only a key of scope `admin` names a path of the host, and only such a key changes a branch of a
//! repository. A key of scope `run` may save the work of a Body that it reaches, under the refs of that Body.
//! Trust: paths and addresses come from a client; a path must be absolute, and an address have a known scheme.

use std::path::{Path, PathBuf};

use axum::{
    Json,
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::Response,
};
use fleet::{
    DevcontainerChoice, DiffFormat, Fleet, PrepareChoice, PrepareRequest, ProgressLine, RepoSource,
    RepositoryNetwork, UncommittedFiles, UpRequest,
};
use proto::{BodyId, Failure, Kind};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::{NewBody, own, owned},
    error::{ErrorBody, V1Refusal},
    extract::{
        AdminAccess, BodyParam, JsonBody as Sent, QueryParams, ReadAccess, RunAccess, find_body,
        read_object_or_null,
    },
    long_work,
    models::Body,
    work_models::{CommitList, ComparedBodies, CreatedBodies, Diff, SavedRepositories, describe},
};
use crate::{App, Caller, limits};

/// Most Bodies of one request.
const COUNT_MAX: u32 = 100;
/// Most repositories of one Body.
const REPOSITORIES_MAX: usize = 16;
/// Addresses of repositories that a client may name.
const SCHEMES: [&str; 3] = ["https://", "http://", "ssh://"];

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(up))
        .routes(routes!(prepare))
        .routes(routes!(diff))
        .routes(routes!(patch))
        .routes(routes!(log))
        .routes(routes!(save))
        .routes(routes!(compare))
}

/// The repositories of new Bodies.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "repositories": ["/srv/app"], "ref": "main" }))]
pub struct UpBody {
    /// The repositories: absolute paths on the host, or addresses (https://, http://, ssh://). Commands run in the first.
    #[schema(min_items = 1, max_items = 16)]
    repositories: Vec<String>,
    /// The commit, branch or tag of the first repository; its current commit if left out.
    #[serde(rename = "ref")]
    reference: Option<String>,
    /// Include uncommitted and untracked files.
    #[serde(default)]
    uncommitted: bool,
    /// Ignored files and directories of the first repository to include, as absolute paths.
    #[serde(default)]
    include: Vec<String>,
    /// Whether to install what manifests, lockfiles, devcontainer.json and palisade.toml name; `yes` if left out.
    #[serde(default)]
    prepare: PrepareMode,
    /// The name of a home that outlives the Body.
    home: Option<String>,
    /// The number of Bodies; 1 if left out.
    #[schema(minimum = 1, maximum = 100)]
    pub count: Option<u32>,
    /// The other properties of the Bodies.
    #[serde(default, deserialize_with = "read_object_or_null")]
    body: Option<NewBody>,
}

/// Whether dependencies are installed.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PrepareMode {
    /// They are installed; the failure of a required step is the failure of the request.
    #[default]
    Yes,
    /// They are installed; after a failure the Body stays for examination.
    Keep,
    /// They are installed as far as possible.
    Anyway,
    /// They are not installed.
    No,
}

impl From<PrepareMode> for PrepareChoice {
    fn from(preparation: PrepareMode) -> Self {
        match preparation {
            PrepareMode::Yes => Self::Yes,
            PrepareMode::Keep => Self::Keep,
            PrepareMode::Anyway => Self::Anyway,
            PrepareMode::No => Self::No,
        }
    }
}

/// Create Bodies with repositories of the host in them.
///
/// Preparing a new repository may take minutes. With `Accept: text/event-stream` the response is a stream: events
/// `progress` (`{"text"}`), then `done` (the fields of the single response) or `failed` (an error). If the client
/// disconnects, the server carries the request out to its end.
#[utoipa::path(post, path = "/up", operation_id = "up", tag = "work", request_body = UpBody,
    responses((status = 201, description = "The new Bodies", body = CreatedBodies),
        (status = 200, description = "A stream of the progress", body = String, content_type = "text/event-stream"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn up(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    headers: HeaderMap,
    Sent(asked): Sent<UpBody>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let request = asked.into_request(&app, &caller)?;
    let admitted = limits::admit_many(&app, &caller, &request.create, request.count).await?;
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        let mut say = |line: ProgressLine<'_>| report(&line.to_string());
        let views = fleet.workspaces().up_with_progress(request, &mut say).await?;
        drop(admitted);
        let body = |view: fleet::BodyView| Ok(Body::new(view.clone(), fleet.leases().get(view.id())?));
        Ok(CreatedBodies { items: views.into_iter().map(body).collect::<Result<_, Failure>>()? })
    };
    long_work::answer(&app, &caller, &headers, StatusCode::CREATED, act).await
}

impl UpBody {
    /// The request to the fleet, for a caller of scope `admin`.
    pub fn into_request(self, app: &App, caller: &Caller) -> Result<UpRequest, Failure> {
        let count = self.count.unwrap_or(1);
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(Failure::new(Kind::Usage, format!("cannot create {count} Bodies in one request"))
                .hint(format!("ask for 1 to {COUNT_MAX}")));
        }
        if !(1..=REPOSITORIES_MAX).contains(&self.repositories.len()) {
            return Err(Failure::new(Kind::Usage, "`repositories` has too few or too many items")
                .hint(format!("name 1 to {REPOSITORIES_MAX}")));
        }
        if self.reference.is_some() && (self.uncommitted || !self.include.is_empty()) {
            return Err(Failure::new(Kind::Usage, "a commit has no uncommitted and no ignored files")
                .hint("leave out either `ref`, or `uncommitted` and `include`"));
        }
        let mut body = self.body.unwrap_or_default();
        let network = body.network.take().unwrap_or_default().into_request(app, caller)?;
        let devcontainer =
            if body.template.is_some() { DevcontainerChoice::Ignore } else { DevcontainerChoice::Use };
        Ok(UpRequest {
            repositories: self.repositories.iter().map(|name| repository(name)).collect::<Result<_, _>>()?,
            reference: self.reference,
            dirty: if self.uncommitted { UncommittedFiles::With } else { UncommittedFiles::Without },
            include: self.include.iter().map(|path| existing_path(path)).collect::<Result<_, _>>()?,
            prepare: self.prepare.into(),
            devcontainer,
            person: app.config().git_identity.clone(),
            images: app.config().images_of_repositories,
            home: self.home,
            network,
            repository_network: RepositoryNetwork::Use,
            create: body.into_create(app, caller, None)?,
            count,
        })
    }
}

fn repository(name: &str) -> Result<RepoSource, Failure> {
    if SCHEMES.iter().any(|scheme| name.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())) {
        return Ok(RepoSource::Url(name.to_owned()));
    }
    existing_path(name).map(RepoSource::Path)
}

/// An absolute path of the host that exists.
pub fn existing_path(text: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err(Failure::new(
            Kind::Usage,
            format!("{:?} is not an absolute path of the host", proto::text::visible(text)),
        )
        .hint("name it from `/`"));
    }
    match path.symlink_metadata() {
        Ok(_) => Ok(path.to_owned()),
        Err(_) => Err(Failure::new(
            Kind::NotFound,
            format!("the host has no {}, or the server may not see it", proto::text::visible(text)),
        )
        .hint("name a path that exists")),
    }
}

/// The prepare steps to run.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "all": true }))]
struct PrepareBody {
    /// Run all steps again, and not only those that the Body lacks.
    #[serde(default)]
    all: bool,
}

/// Run prepare steps in an existing Body, which is restarted for it.
///
/// With `Accept: text/event-stream` the response is a stream: events `progress` (`{"text"}`), then `done` or `failed`.
#[utoipa::path(post, path = "/bodies/{id}/prepare", operation_id = "prepare_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<PrepareBody>,
    responses((status = 200, description = "The Body, or a stream", content((Body = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn prepare(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    BodyParam(id): BodyParam,
    headers: HeaderMap,
    asked: Option<Sent<PrepareBody>>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    owned(&app, &caller, &id).await?;
    let all = asked.is_some_and(|Sent(asked)| asked.all);
    let request = if all { PrepareRequest::All } else { PrepareRequest::Missing };
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        let mut say = |line: ProgressLine<'_>| report(&line.to_string());
        let view = fleet.workspaces().prepare_again(&id, request, &mut say).await?;
        Ok(Body::new(view, fleet.leases().get(&id)?))
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}

/// Which repository of a Body.
#[derive(Debug, Clone, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WorkspaceQuery {
    /// The name of the repository, for a Body that has several; the first if left out.
    pub workspace: Option<String>,
}

/// List what a Body changed in a repository: committed, uncommitted and untracked.
#[utoipa::path(get, path = "/bodies/{id}/diff", operation_id = "diff_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body"), WorkspaceQuery),
    responses((status = 200, description = "The changes", body = Diff), (status = "default", description = "Refused", body = ErrorBody)))]
async fn diff(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<WorkspaceQuery>,
) -> Result<Json<Diff>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        describe(&fleet.workspaces().review_files(&id, query.workspace.as_deref())?.diff)
    });
    Ok(Json(found.await?))
}

/// Show what a Body changed in a repository, as a patch of git. It may hold arbitrary bytes of the files.
#[utoipa::path(get, path = "/bodies/{id}/patch", operation_id = "patch_of_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body"), WorkspaceQuery),
    responses((status = 200, description = "The patch", body = Vec<u8>, content_type = "application/octet-stream"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn patch(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<WorkspaceQuery>,
) -> Result<([(header::HeaderName, &'static str); 1], HttpBody), V1Refusal> {
    let text = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.workspaces().review(&id, query.workspace.as_deref())?.text(DiffFormat::Patch, &[])
    });
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], HttpBody::from(text.await?)))
}

/// Save the work of a Body, and list its commits, newest first.
#[utoipa::path(post, path = "/bodies/{id}/log", operation_id = "log_of_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body"), WorkspaceQuery),
    responses((status = 200, description = "The commits", body = CommitList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn log(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<WorkspaceQuery>,
) -> Result<Json<CommitList>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        let (saved, commits) = fleet.workspaces().log(&id, query.workspace.as_deref()).await?;
        Ok(CommitList { saved: describe(&saved)?, commits: describe(&commits)? })
    });
    Ok(Json(found.await?))
}

/// Save the work of a Body in the repositories that it came from, under `refs/palisade/BODY`.
#[utoipa::path(post, path = "/bodies/{id}/save", operation_id = "save_body", tag = "work", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The saved work", body = SavedRepositories), (status = "default", description = "Refused", body = ErrorBody)))]
async fn save(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<SavedRepositories>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        Ok(SavedRepositories { items: describe(&fleet.workspaces().save(&id).await?)? })
    });
    Ok(Json(found.await?))
}

/// The Bodies to compare.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "bodies": ["k3v9", "m2hf"], "test": "make test" }))]
struct CompareRequest {
    /// The Bodies, by id or name.
    #[schema(min_items = 2, max_items = 100)]
    bodies: Vec<String>,
    /// A shell command to run in each; its exit code becomes part of the comparison.
    test: Option<String>,
}

/// Compare the work of several Bodies: files, lines, overlaps and conflicts.
///
/// With `Accept: text/event-stream` the response is a stream that ends with `done` or `failed`.
#[utoipa::path(post, path = "/compare", operation_id = "compare_bodies", tag = "work", request_body = CompareRequest,
    responses((status = 200, description = "The comparison, or a stream", content((ComparedBodies = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn compare(
    state: State<App>,
    RunAccess(caller): RunAccess,
    headers: HeaderMap,
    Sent(asked): Sent<CompareRequest>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let ids = reached(&app, &caller, &asked.bodies, 2).await?;
    let act = async move |fleet: &Fleet, _: long_work::Report<'_>| {
        let compared = fleet.workspaces().compare(&ids, asked.test.as_deref()).await?;
        describe::<ComparedBodies>(&compared)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}

/// Finds Bodies by id or name, and checks that the caller reaches each.
pub async fn reached(
    app: &App,
    caller: &Caller,
    names: &[String],
    least: usize,
) -> Result<Vec<BodyId>, Failure> {
    if !(least..=COUNT_MAX as usize).contains(&names.len()) {
        return Err(Failure::new(Kind::Usage, "`bodies` has too few or too many items")
            .hint(format!("name {least} to {COUNT_MAX}")));
    }
    let mut ids = Vec::new();
    for name in names {
        ids.push(find_body(app, caller, name).await?);
    }
    let (caller, asked) = (caller.clone(), ids.clone());
    app.blocking(async move |fleet: &Fleet| {
        asked.iter().try_for_each(|id| own(fleet, &caller, id).map(drop))
    })
    .await?;
    Ok(ids)
}
