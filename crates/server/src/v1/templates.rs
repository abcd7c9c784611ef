//! Templates: list, show, build, import and remove.
//!
//! Invariant: only a key of scope `admin` names a path of the host: the context of a build, or an archive to import.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use fleet::{
    BaseImage, BuildJob, BuildRequest, BuildStep, Dockerfile, Fleet, Image, Instruction, RegistryAccess,
    STEPS_MAX, TemplateView,
};
use proto::{
    Failure, Kind,
    template::{StartCommand, Template, TemplateSettings},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, NameParam, QueryParams, ReadAccess, RunAccess},
    long_work,
    page::{self, Page, PageQuery},
    work::existing_path,
    work_models::describe,
};
use crate::{App, Caller, Scope, authz};

/// How often the log of a build is read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(get, remove))
        .routes(routes!(build))
        .routes(routes!(import))
}

/// A template, or a snapshot that can be used as one.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Template)]
struct TemplateInfo {
    /// The name to send as `template`.
    name: String,
    /// Its kind: `host`, `template` or `snapshot`.
    kind: String,
}

/// List the templates that a Body can be created from.
#[utoipa::path(get, path = "/templates", operation_id = "list_templates", tag = "templates", params(PageQuery),
    responses((status = 200, description = "A page of templates", body = Page<TemplateInfo>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<Json<Page<TemplateInfo>>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| {
        let seen = |found: &fleet::TemplateView| authz::may_see_template(&caller, &found.template);
        Ok((
            fleet.templates().list()?.into_iter().filter(seen).collect::<Vec<_>>(),
            authz::snapshots(fleet, &caller)?,
        ))
    });
    let (templates, snapshots) = found.await?;
    let named = |name: String, kind: &str| TemplateInfo { name, kind: kind.into() };
    let templates = templates.into_iter().map(|found| named(found.template.name, "template"));
    let snapshots = snapshots
        .into_iter()
        .filter(|found| found.checkpoint_of.is_none())
        .map(|found| named(found.name.unwrap_or(found.id.to_string()), "snapshot"));
    let mut all: Vec<TemplateInfo> =
        templates.chain(snapshots).chain([named("host".into(), "host")]).collect();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Json(page::page(all, &query, |template: &TemplateInfo| template.name.clone())?))
}

/// A template with its tags and builds.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct TemplateDetail {
    /// The id of the template.
    id: String,
    /// The name of the template.
    name: String,
    /// When the template was created, RFC 3339.
    created_at: String,
    /// When the template was last changed, RFC 3339.
    updated_at: String,
    /// Its tags, and the build that each names.
    tags: BTreeMap<String, Value>,
    /// Its complete builds, newest first.
    builds: Vec<Map<String, Value>>,
    /// The size of its layers, including those that it shares with other templates.
    bytes: u64,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// Describes a template for a caller. The source of a build may be a path of the host, so only `admin` sees it.
fn detail(caller: &Caller, view: &TemplateView) -> Result<TemplateDetail, Failure> {
    let mut detail: TemplateDetail = describe(view)?;
    if caller.scope < Scope::Admin {
        detail.builds.iter_mut().for_each(|build| drop(build.remove("source")));
    }
    Ok(detail)
}

fn unknown(name: &str) -> Failure {
    Failure::new(Kind::NotFound, format!("there is no template {:?}", proto::text::visible(name)))
        .hint("list them: GET /v1/templates")
}

/// Finds a template that the caller may see.
fn find(fleet: &Fleet, caller: &Caller, name: &str) -> Result<Template, Failure> {
    let found = fleet.templates().find(name)?;
    found.filter(|template| authz::may_see_template(caller, template)).ok_or_else(|| unknown(name))
}

/// Show a template, by name or id.
#[utoipa::path(get, path = "/templates/{template}", operation_id = "get_template", tag = "templates", params(("template" = String, Path, description = "The name or id of the template")),
    responses((status = 200, description = "The template", body = TemplateDetail), (status = "default", description = "Refused", body = ErrorBody)))]
async fn get(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    NameParam(name): NameParam,
) -> Result<Json<TemplateDetail>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| {
        let template = find(fleet, &caller, &name)?;
        detail(&caller, &fleet.templates().view(template.id.as_str())?)
    });
    Ok(Json(found.await?))
}

/// Remove a template. Bodies and snapshots made from it stay.
#[utoipa::path(delete, path = "/templates/{template}", operation_id = "remove_template", tag = "templates", params(("template" = String, Path, description = "The name or id of the template")),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove(
    state: State<App>,
    RunAccess(caller): RunAccess,
    NameParam(name): NameParam,
) -> Result<StatusCode, V1Refusal> {
    let removed = state.0.blocking(async move |fleet: &Fleet| {
        let template = find(fleet, &caller, &name)?;
        check_owner(&caller, &template)?;
        fleet.templates().remove(template.id.as_str()).map(drop)
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

fn check_owner(caller: &Caller, template: &Template) -> Result<(), Failure> {
    if authz::may_change_template(caller, template) {
        return Ok(());
    }
    Err(Failure::new(Kind::Denied, format!("the template {} belongs to another key", template.name))
        .hint("choose another name"))
}

/// Checks that a caller may build a template of this name. The name of a template that the caller may not see
/// is taken all the same.
fn check_name(fleet: &Fleet, caller: &Caller, name: &str) -> Result<(), Failure> {
    fleet.templates().find(name)?.map_or(Ok(()), |taken| check_owner(caller, &taken))
}

/// A path of the host, which only a key of scope `admin` may name.
fn host_path(caller: &Caller, text: &str) -> Result<PathBuf, Failure> {
    if caller.scope < Scope::Admin {
        return Err(Failure::new(Kind::Denied, "only a key of scope admin may name a path of the host")
            .hint("name an image of a registry, or a Dockerfile without COPY"));
    }
    existing_path(text)
}

/// The template to build.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "my-app", "dockerfile": "FROM base\nRUN pip install flask\n" }))]
struct BuildTemplate {
    /// The name of the template: NAME or NAME:TAG.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// The text of a Dockerfile: FROM (the name of a template, or an image of a registry), RUN, COPY, ENV, WORKDIR, USER.
    #[schema(min_length = 1)]
    dockerfile: String,
    /// The absolute path of the directory on the host that COPY takes files from. Only a key of scope `admin` may name one.
    context: Option<String>,
    /// A command that runs in the background of each Body from its start.
    start: Option<String>,
    /// A command that must succeed before a Body counts as ready.
    ready: Option<String>,
    /// Repeat every step.
    #[serde(default)]
    force: bool,
}

/// Build a template from a Dockerfile.
///
/// With `Accept: text/event-stream` the response is a stream: events `progress` (`{"text"}`, the lines of the build's log),
/// then `done` (the fields of the single response) or `failed` (an error). If the client disconnects, the build goes on.
#[utoipa::path(post, path = "/templates/build", operation_id = "build_template", tag = "templates", request_body = BuildTemplate,
    responses((status = 201, description = "The template", body = TemplateDetail),
        (status = 200, description = "A stream of the progress", body = String, content_type = "text/event-stream"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn build(
    state: State<App>,
    RunAccess(caller): RunAccess,
    headers: HeaderMap,
    Sent(asked): Sent<BuildTemplate>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let context = asked.context.as_deref().map(|path| host_path(&caller, path)).transpose()?;
    let file = fleet::read_recipe(&asked.dockerfile, &Default::default(), None)?;
    check_steps(&file, context.as_deref())?;
    let (checking, name, from) = (caller.clone(), asked.name.clone(), file.from.clone());
    let reach = app.config().registries.clone();
    let base = app.blocking(async move |fleet: &Fleet| {
        check_name(fleet, &checking, &name)?;
        base_of(fleet, &checking, from, reach)
    });
    let plan = BuildPlan {
        owner: caller.key.clone(),
        base: base.await?,
        allow: app.config().build_allow.clone(),
        asked,
        file,
        context,
    };
    let asking = caller.clone();
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        detail(&asking, &plan.run(fleet, report).await?)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::CREATED, act).await
}

fn check_steps(file: &Dockerfile, context: Option<&Path>) -> Result<(), Failure> {
    if file.acts.len() > STEPS_MAX {
        return Err(Failure::new(Kind::Usage, format!("a build has at most {STEPS_MAX} steps")));
    }
    if context.is_none() && file.acts.iter().any(|act| matches!(act, Instruction::Copy { .. })) {
        return Err(Failure::new(Kind::Usage, "COPY needs a `context`")
            .hint("name the directory that holds the files, or upload them through the E2B API"));
    }
    Ok(())
}

/// Resolves FROM: a template of that name if there is one, else an image.
fn base_of(
    fleet: &Fleet,
    caller: &Caller,
    from: String,
    reach: RegistryAccess,
) -> Result<BaseImage, Failure> {
    let is_own = from == fleet::BASE || from == fleet::INTERPRETER;
    if !is_own && fleet.templates().find(&from)?.is_none() {
        return Ok(BaseImage::Image(Image { reach, ..Image::new(from) }));
    }
    authz::usable(fleet, caller, &from)?;
    Ok(BaseImage::Template(from))
}

/// A build that was checked.
struct BuildPlan {
    owner: String,
    asked: BuildTemplate,
    file: Dockerfile,
    base: BaseImage,
    context: Option<PathBuf>,
    allow: Vec<String>,
}

impl BuildPlan {
    async fn run(self, fleet: &Fleet, report: long_work::Report<'_>) -> Result<TemplateView, Failure> {
        let Self { owner, asked, file, base, context, allow } = self;
        file.notes.iter().for_each(|note| report(note));
        let builds = fleet.builds();
        let requested = builds.request(&asked.name, &[], None, None)?;
        fleet.templates().assign_owner(requested.template.as_str(), &owner)?;
        let files = fleet.templates().files_dir(&requested.template);
        let pack = |act| match &context {
            Some(context) => fleet::pack_context(act, context, &files),
            None => Ok(act),
        };
        let step = |act| Ok(BuildStep { act: pack(act)?, force: false });
        let steps = file.acts.into_iter().map(step).collect::<Result<_, Failure>>()?;
        let start = (asked.start.is_some() || asked.ready.is_some())
            .then_some(StartCommand { command: asked.start, ready: asked.ready });
        let _turn = builds.wait_turn().await;
        let job = builds.begin(&requested.template, &requested.id)?;
        let request = BuildRequest { from: base, steps, start, force: asked.force, allow };
        follow(&job, builds.build(&job, request), report).await?;
        fleet.templates().view(job.template.as_str())
    }
}

/// Waits for a build, and reports the lines of its log.
async fn follow<T>(
    job: &BuildJob,
    build: impl Future<Output = Result<T, Failure>>,
    report: long_work::Report<'_>,
) -> Result<T, Failure> {
    let mut build = std::pin::pin!(build);
    let mut seen = 0;
    loop {
        let ended = tokio::time::timeout(LOOK_EVERY, build.as_mut()).await;
        let (_, lines) = job.log_lines(seen, usize::MAX);
        lines.iter().for_each(|line| report(&line.message));
        seen += lines.len();
        if let Ok(ended) = ended {
            return ended;
        }
    }
}

/// The template to import.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "alpine", "source": "/srv/images/alpine.tar.gz", "user": "root" }))]
struct ImportTemplate {
    /// The name of the template.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// An image, named as for `docker pull`; or the absolute path of an archive (tar, tar.gz, tar.zst) on the host.
    #[schema(min_length = 1)]
    source: String,
    /// The user that runs commands; the image's, or `user`, if left out.
    user: Option<String>,
    /// Let setuid programs work in its Bodies.
    #[serde(default)]
    sudo: bool,
}

/// Create a template for every key, from an image of a registry or from an archive of a root file system.
///
/// With `Accept: text/event-stream` the response is a stream: events `progress` (`{"text"}`), then `done` (the fields of
/// the single response) or `failed` (an error). Repeat the request to continue an interrupted download.
#[utoipa::path(post, path = "/templates/import", operation_id = "import_template", tag = "templates", request_body = ImportTemplate,
    responses((status = 201, description = "The template", body = TemplateDetail),
        (status = 200, description = "A stream of the progress", body = String, content_type = "text/event-stream"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn import(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    headers: HeaderMap,
    Sent(asked): Sent<ImportTemplate>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let archive = asked.source.starts_with('/').then(|| existing_path(&asked.source)).transpose()?;
    let image = Image { reach: app.config().registries.clone(), ..Image::new(asked.source.clone()) };
    if archive.is_none() {
        image.registry()?;
    }
    let asking = caller.clone();
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        let settings = TemplateSettings { user: asked.user, sudo: asked.sudo, ..TemplateSettings::default() };
        let built = match archive {
            Some(path) => {
                let source = format!("the archive {}", path.display());
                fleet.builds().import_template(&asked.name, &source, settings, open_archive(&path)?)?
            }
            None => fleet.builds().import_image(&asked.name, &image, settings, report).await?,
        };
        detail(&asking, &fleet.templates().view(built.template.as_str())?)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::CREATED, act).await
}

fn open_archive(path: &Path) -> Result<File, Failure> {
    // Opening a pipe would wait for its writer, for as long as there is none.
    match path.metadata() {
        Ok(found) if found.is_file() => {}
        _ => {
            return Err(Failure::new(Kind::Usage, format!("{} is not a file", path.display()))
                .hint("name an archive: tar, tar.gz or tar.zst"));
        }
    }
    File::open(path).map_err(|error| {
        Failure::new(Kind::NotFound, format!("cannot read {}", path.display())).because(error)
    })
}
