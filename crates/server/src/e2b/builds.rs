//! Template builds: E2B's clients request a build, upload its files, start it, and follow its state and log.

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
};
use bytes::Bytes;
use fleet::{
    BaseImage as Origin, BuildJob, BuildRequest, BuildState, BuildStep, Fleet, Image, ImageProfile,
    Instruction, LogLine, RegistryCredentials, STEPS_MAX, TemplateView,
};
use http_body_util::BodyExt;
use proto::{
    Failure, Kind, Size, TemplateId,
    template::{BuildId, StartCommand},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncWriteExt};

use super::{
    E2bRefusal,
    extract::{JsonRequest, QueryPairs},
    templates::{find, names_of, template_json},
};
use crate::{
    App, Caller,
    v1::{read_object_or_null, read_objects},
};

/// The largest archive of one COPY step, as it is sent.
const UPLOAD_MAX: u64 = 2 << 30;
/// How long an upload may stall.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(60);
const MEMORY_MB_MAX: u64 = 1 << 20;

/// The body of `POST /v3/templates` and of its v2.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewTemplate {
    name: Option<String>,
    alias: Option<String>,
    tags: Option<Vec<String>>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
}

/// `POST /v3/templates`.
pub async fn ask(
    State(app): State<App>,
    caller: Caller,
    asked: JsonRequest<NewTemplate>,
) -> Result<(StatusCode, Json<Value>), E2bRefusal> {
    let (job, TemplateView { template, .. }) = request_build(&app, &caller, asked.value).await?;
    Ok((
        StatusCode::ACCEPTED,
        Json(json!({
            "templateID": template.id, "buildID": job.id, "public": template.public, "tags": job.tags,
            "names": names_of(&template), "aliases": names_of(&template),
        })),
    ))
}

/// `POST /v2/templates`: clients of that version expect the whole template.
pub async fn ask_v2(
    State(app): State<App>,
    caller: Caller,
    asked: JsonRequest<NewTemplate>,
) -> Result<(StatusCode, Json<Value>), E2bRefusal> {
    let (job, view) = request_build(&app, &caller, asked.value).await?;
    let mut template = template_json(&view);
    template["buildID"] = job.id.as_str().into();
    Ok((StatusCode::ACCEPTED, Json(template)))
}

/// Requests a build of a template, which is created if it does not exist.
async fn request_build(
    app: &App,
    caller: &Caller,
    asked: NewTemplate,
) -> Result<(Arc<BuildJob>, TemplateView), E2bRefusal> {
    let NewTemplate { name, alias, tags, cpu_count, memory_mb } = asked;
    let name = name.or(alias).ok_or_else(|| E2bRefusal::bad("a template needs a name"))?;
    if memory_mb.is_some_and(|mb| mb > MEMORY_MB_MAX) || cpu_count == Some(0) {
        return Err(E2bRefusal::bad("cpuCount or memoryMB is out of range"));
    }
    if let Some(taken) = find(app, &name).await? {
        super::templates::owned(caller, &taken, &name)?;
    }
    let key = caller.key.clone();
    let requested = app
        .blocking(async move |fleet: &Fleet| {
            let memory = memory_mb.map(Size::mib);
            let job = fleet.builds().request(
                &name,
                &tags.unwrap_or_default(),
                cpu_count.map(|count| count.saturating_mul(1000)),
                memory,
            )?;
            fleet.templates().assign_owner(job.template.as_str(), &key)?;
            let view = fleet.templates().view(job.template.as_str())?;
            Ok((job, view))
        })
        .await?;
    Ok(requested)
}

/// `GET /templates/{id}/files/{hash}`: whether the server has these files, and the URL for their upload if
/// not.
pub async fn files(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    Path((id, hash)): Path<(String, String)>,
) -> Result<(StatusCode, Json<Value>), E2bRefusal> {
    let template = super::templates::known(&app, &caller, &id).await?;
    // Uploaded files become part of the next build, so only the owner may send them.
    super::templates::owned(&caller, &template, &id)?;
    let place = place(&app, &template.id, &hash)?;
    if tokio::fs::try_exists(&place).await.unwrap_or(false) {
        return Ok((StatusCode::CREATED, Json(json!({ "present": true }))));
    }
    let token = app.fleet().templates().upload_token(&template.id, &hash);
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .map_or_else(|| app.address().to_string(), str::to_owned);
    let url = format!("{}://{host}/templates/{}/files/{hash}?token={token}", app.scheme(), template.id);
    Ok((StatusCode::CREATED, Json(json!({ "present": false, "url": url }))))
}

fn place(app: &App, template: &TemplateId, hash: &str) -> Result<PathBuf, E2bRefusal> {
    let plain = (32..=128).contains(&hash.len()) && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !plain {
        return Err(E2bRefusal::bad("the hash of the files is not 32 to 128 hexadecimal digits"));
    }
    Ok(app.fleet().templates().files_dir(template).join(format!("{}.tar", hash.to_ascii_lowercase())))
}

/// `PUT /templates/{id}/files/{hash}?token=…`: uploads files. The token in the URL is the permission, and is
/// valid once.
pub async fn upload(
    State(app): State<App>,
    Path((id, hash)): Path<(String, String)>,
    query: QueryPairs,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, E2bRefusal> {
    let template: TemplateId =
        id.parse().map_err(|_| E2bRefusal::new(StatusCode::FORBIDDEN, "the upload URL is invalid"))?;
    let place = place(&app, &template, &hash)?;
    let token = app.fleet().templates().upload_token(&template, &hash);
    if !same(query.text("token").unwrap_or_default().as_bytes(), token.as_bytes()) {
        return Err(E2bRefusal::new(StatusCode::FORBIDDEN, "the upload URL is invalid"));
    }
    let told = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|len| len.to_str().ok())
        .and_then(|len| len.parse::<u64>().ok());
    if told.is_some_and(|len| len > UPLOAD_MAX) {
        return Err(too_long());
    }
    let cannot = |error: std::io::Error| {
        E2bRefusal::from(Failure::new(Kind::Host, "cannot store the uploaded files").because(error))
    };
    let dir = app.fleet().templates().files_dir(&template);
    if app.fleet().templates().find(template.as_str())?.is_none() {
        return Err(E2bRefusal::new(StatusCode::NOT_FOUND, "the template was removed"));
    }
    tokio::fs::create_dir_all(&dir).await.map_err(cannot)?;
    let drawn = sys::random::bytes::<8>().map_err(cannot)?;
    let part = UploadFile(place.with_extension(format!("part-{}", proto::event::hex(&drawn))));
    receive(body, &part.0).await?;
    tokio::fs::rename(&part.0, &place).await.map_err(cannot)?;
    Ok(StatusCode::OK)
}

/// An upload in progress; dropping it deletes the file unless it was renamed.
struct UploadFile(PathBuf);

impl Drop for UploadFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn receive(mut body: Body, to: &std::path::Path) -> Result<(), E2bRefusal> {
    let cannot = |error: std::io::Error| {
        E2bRefusal::from(Failure::new(Kind::Host, "cannot store the uploaded files").because(error))
    };
    let mut file = File::create(to).await.map_err(cannot)?;
    let mut seen = 0u64;
    loop {
        let frame = tokio::time::timeout(UPLOAD_PATIENCE, body.frame()).await;
        let Some(frame) = frame
            .map_err(|_| E2bRefusal::new(StatusCode::REQUEST_TIMEOUT, "the upload stalled for a minute"))?
        else {
            break;
        };
        let Ok(bytes) = frame.map_err(|_| E2bRefusal::bad("the upload broke off"))?.into_data() else {
            continue;
        };
        let bytes: Bytes = bytes;
        seen += bytes.len() as u64;
        if seen > UPLOAD_MAX {
            return Err(too_long());
        }
        file.write_all(&bytes).await.map_err(cannot)?;
    }
    file.flush().await.map_err(cannot)
}

fn too_long() -> E2bRefusal {
    E2bRefusal::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the files of one COPY may take {} at most", Size(UPLOAD_MAX)),
    )
}

/// Compares in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// The body of `POST /v2/templates/{id}/builds/{build}`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartBuildRequest {
    from_image: Option<String>,
    from_template: Option<String>,
    #[serde(default, deserialize_with = "read_object_or_null")]
    from_image_registry: Option<RegistryAuth>,
    #[serde(default)]
    force: Option<bool>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
    #[serde(default, deserialize_with = "read_objects")]
    steps: Vec<BuildInstruction>,
}

/// Registry credentials in E2B's format.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum RegistryAuth {
    Registry { username: String, password: String },
    Gcp { service_account_json: String },
    Aws {},
}

impl std::fmt::Debug for RegistryAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Door")
    }
}

impl RegistryAuth {
    fn credentials(self) -> Result<RegistryCredentials, E2bRefusal> {
        match self {
            Self::Registry { username, password } => Ok(RegistryCredentials { username, password }),
            // Google's registries expect this user name for a service account key.
            Self::Gcp { service_account_json } => {
                Ok(RegistryCredentials { username: "_json_key".into(), password: service_account_json })
            }
            Self::Aws {} => Err(E2bRefusal::absent(
                "sign-in to registries of AWS: get a password with `aws ecr get-login-password`, and send it as type `registry` with the name AWS",
            )),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BuildInstruction {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    #[serde(default)]
    force: Option<bool>,
}

/// `POST /v2/templates/{id}/builds/{build}`.
pub async fn begin(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    asked: JsonRequest<StartBuildRequest>,
) -> Result<StatusCode, E2bRefusal> {
    let template = super::templates::known(&app, &caller, &id).await?;
    super::templates::owned(&caller, &template, &id)?;
    let build: BuildId =
        build.parse().map_err(|_| E2bRefusal::new(StatusCode::NOT_FOUND, "there is no such build"))?;
    let request = request_of(&app, &template.id, asked.value)?;
    if let Origin::Template(name) = &request.from {
        super::templates::usable(&app, &caller, name).await?;
    }
    let job = app.fleet().builds().begin(&template.id, &build)?;
    tokio::spawn(async move {
        let turn = app.fleet().builds().wait_turn().await;
        let _ = app
            .blocking(async move |fleet: &Fleet| fleet.builds().build(&job, request).await.map(drop))
            .await;
        drop(turn);
    });
    Ok(StatusCode::ACCEPTED)
}

fn request_of(
    app: &App,
    template: &TemplateId,
    asked: StartBuildRequest,
) -> Result<BuildRequest, E2bRefusal> {
    let from = match (asked.from_template, asked.from_image) {
        (Some(name), None) => Origin::Template(name),
        (None, Some(reference)) => {
            let credentials = asked.from_image_registry.map(RegistryAuth::credentials).transpose()?;
            Origin::Image(Image {
                credentials,
                reach: app.config().registries.clone(),
                dress: ImageProfile::ForE2b,
                ..Image::new(reference)
            })
        }
        _ => return Err(E2bRefusal::bad("send either fromTemplate or fromImage")),
    };
    if asked.steps.len() > STEPS_MAX {
        return Err(E2bRefusal::bad(format!("a build has at most {STEPS_MAX} steps")));
    }
    let steps = asked.steps.into_iter().map(|step| step_of(app, template, step)).collect::<Result<_, _>>()?;
    let text = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (command, ready) = (text(asked.start_cmd), text(asked.ready_cmd));
    let start = (command.is_some() || ready.is_some()).then_some(StartCommand { command, ready });
    Ok(BuildRequest {
        from,
        steps,
        start,
        force: asked.force.unwrap_or(false),
        allow: app.config().build_allow.clone(),
    })
}

fn step_of(app: &App, template: &TemplateId, step: BuildInstruction) -> Result<BuildStep, E2bRefusal> {
    let wrong = || {
        E2bRefusal::bad(format!("invalid arguments for a step of type {}", proto::text::visible(&step.kind)))
    };
    let mut args = step.args.clone().into_iter();
    let mut next = || args.next().filter(|text| !text.is_empty());
    let act = match step.kind.as_str() {
        "COPY" => {
            let hash =
                step.files_hash.clone().ok_or_else(|| E2bRefusal::bad("a COPY step needs filesHash"))?;
            let archive = place(app, template, &hash)?;
            Instruction::Copy {
                source: next().ok_or_else(wrong)?,
                target: next().ok_or_else(wrong)?,
                owner: args.next().filter(|text| !text.is_empty()),
                mode: args.next().filter(|text| !text.is_empty()),
                hash,
                archive,
            }
        }
        "RUN" => Instruction::Run { command: next().ok_or_else(wrong)?, user: next() },
        "ENV" if !step.args.is_empty() && step.args.len().is_multiple_of(2) => Instruction::Env(
            step.args.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect(),
        ),
        "WORKDIR" => Instruction::Workdir(next().ok_or_else(wrong)?),
        "USER" => Instruction::User(next().ok_or_else(wrong)?),
        "ENV" => return Err(wrong()),
        other => {
            return Err(E2bRefusal::bad(format!(
                "unknown step type {}",
                proto::text::visible(&other.chars().take(64).collect::<String>())
            )));
        }
    };
    Ok(BuildStep { act, force: step.force.unwrap_or(false) })
}

/// `GET /templates/{id}/builds/{build}/status`.
pub async fn status(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: QueryPairs,
) -> Result<Json<Value>, E2bRefusal> {
    let template = super::templates::known(&app, &caller, &id).await?;
    let build: BuildId =
        build.parse().map_err(|_| E2bRefusal::new(StatusCode::NOT_FOUND, "there is no such build"))?;
    let offset = usize::try_from(query.number("logsOffset")?.unwrap_or(0)).unwrap_or(usize::MAX);
    let (state, said) = look(&app, &template.id, &build, offset, query.limit()?).await?;
    let mut answer = json!({
        "templateID": template.id, "buildID": build, "status": word(&state),
        "logs": said.iter().map(|said| said.message.as_str()).collect::<Vec<_>>(),
        "logEntries": said.iter().map(entry).collect::<Vec<_>>(),
    });
    if let BuildState::Error { step, message } = state {
        answer["reason"] = json!({ "message": message, "step": step, "logEntries": [] });
    }
    Ok(Json(answer))
}

/// `GET /templates/{id}/builds/{build}/logs`.
pub async fn logs(
    State(app): State<App>,
    caller: Caller,
    Path((id, build)): Path<(String, String)>,
    query: QueryPairs,
) -> Result<Json<Value>, E2bRefusal> {
    let template = super::templates::known(&app, &caller, &id).await?;
    let build: BuildId =
        build.parse().map_err(|_| E2bRefusal::new(StatusCode::NOT_FOUND, "there is no such build"))?;
    let (_, said) = look(&app, &template.id, &build, 0, query.limit()?).await?;
    Ok(Json(json!({ "logs": said.iter().map(entry).collect::<Vec<_>>() })))
}

/// Runs on a blocking thread, because the build log may have to be read from its file.
async fn look(
    app: &App,
    template: &TemplateId,
    build: &BuildId,
    offset: usize,
    limit: usize,
) -> Result<(BuildState, Vec<LogLine>), E2bRefusal> {
    let (template, build) = (template.clone(), build.clone());
    Ok(app
        .blocking(async move |fleet: &Fleet| fleet.builds().status(&template, &build, offset, limit))
        .await?)
}

fn entry(said: &LogLine) -> Value {
    json!({ "timestamp": said.at, "message": said.message, "level": said.level })
}

fn word(state: &BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "waiting",
        BuildState::Building => "building",
        BuildState::Ready => "ready",
        BuildState::Error { .. } => "error",
    }
}
