//! Templates of sandboxes.
//!
//! To E2B's clients, templates and snapshots are the same. A template is visible to its owner and to an
//! admin; a public template, or one of the server's operator, is visible to every key.

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use fleet::{BASE, Fleet, INTERPRETER, SnapshotView, TemplateView};
use proto::{Failure, Kind, template::Template};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{E2bRefusal, create::template, extract::JsonRequest, sandbox::ENVD_VERSION};
use crate::{App, Caller, authz};

/// Templates that always exist.
const BUILT_IN: [&str; 1] = ["host"];
/// Templates of E2B that do not exist here.
const ABSENT: [&str; 2] = ["desktop", "mcp-gateway"];
/// The build of a template that has none yet: E2B's clients expect text.
const NO_BUILD: &str = "00000000-0000-0000-0000-000000000000";

/// `GET /templates`.
pub async fn list(State(app): State<App>, caller: Caller) -> Result<Json<Vec<Value>>, E2bRefusal> {
    let asking = caller.clone();
    let (templates, snapshots) = app
        .blocking(async move |fleet: &Fleet| {
            Ok((fleet.templates().list()?, authz::snapshots(fleet, &asking)?))
        })
        .await?;
    let built_in = BUILT_IN.iter().map(|name| base_json(name, Some(name), "1970-01-01T00:00:00Z"));
    let seen =
        templates.iter().filter(|view| authz::may_see_template(&caller, &view.template)).map(template_json);
    let snapshots = snapshots
        .iter()
        .filter(|snapshot| !snapshot.for_forks && snapshot.checkpoint_of.is_none())
        .map(|snapshot| base_json(snapshot.id.as_str(), snapshot.name.as_deref(), &snapshot.created_at));
    Ok(Json(built_in.chain(seen).chain(snapshots).collect()))
}

fn base_json(id: &str, name: Option<&str>, created_at: &str) -> Value {
    let names: Vec<&str> = name.into_iter().collect();
    json!({
        "templateID": id, "buildID": id, "cpuCount": 1, "memoryMB": 512, "diskSizeMB": 1024, "public": false, "aliases": names, "names": names,
        "createdAt": created_at, "updatedAt": created_at, "createdBy": null, "lastSpawnedAt": null, "spawnCount": 0, "buildCount": 1,
        "envdVersion": ENVD_VERSION, "buildStatus": "ready",
    })
}

/// A template in the form of lists.
pub fn template_json(view: &TemplateView) -> Value {
    let template = &view.template;
    let build = view.default_build().or_else(|| view.builds.first());
    let names = names_of(template);
    let mut told = base_json(template.id.as_str(), None, &template.created_at);
    told["buildID"] = json!(build.map_or(NO_BUILD, |build| build.id.as_str()));
    told["buildStatus"] = json!(if build.is_some() { "ready" } else { "waiting" });
    told["buildCount"] = json!(view.builds.len());
    told["public"] = template.public.into();
    told["updatedAt"] = template.updated_at.as_str().into();
    (told["names"], told["aliases"]) = (json!(names), json!(names));
    told["diskSizeMB"] = json!(view.bytes >> 20);
    if let Some(cpu) = build.and_then(|build| build.settings.cpu_milli) {
        told["cpuCount"] = json!(cpu.div_ceil(1000));
    }
    if let Some(memory) = build.and_then(|build| build.settings.memory) {
        told["memoryMB"] = json!(memory.0 >> 20);
    }
    told
}

/// All names of a template.
pub fn names_of(template: &Template) -> Vec<&str> {
    std::iter::once(template.name.as_str()).chain(template.aliases.iter().map(String::as_str)).collect()
}

/// `GET /templates/{id}`.
pub async fn info(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, E2bRefusal> {
    let found = known(&app, &caller, &id).await?;
    let view = app.blocking(async move |fleet: &Fleet| fleet.templates().view(found.id.as_str())).await?;
    let mut told = template_json(&view);
    told["builds"] = view.builds.iter().map(|build| json!({
        "buildID": build.id, "status": "ready", "createdAt": build.created_at, "updatedAt": build.created_at, "finishedAt": build.created_at,
        "cpuCount": told["cpuCount"], "memoryMB": told["memoryMB"], "diskSizeMB": build.bytes >> 20, "envdVersion": ENVD_VERSION,
    })).collect();
    Ok(Json(told))
}

/// `GET /templates/aliases/{alias}`.
pub async fn alias(
    State(app): State<App>,
    caller: Caller,
    Path(alias): Path<String>,
) -> Result<Json<Value>, E2bRefusal> {
    if let Some(found) = find(&app, &alias).await? {
        owned_or_public(&caller, &found, &alias)?;
        return Ok(Json(json!({ "templateID": found.id, "public": found.public })));
    }
    // The server creates these templates at their first use.
    if alias == BASE || alias == INTERPRETER {
        return Ok(Json(json!({ "templateID": alias, "public": true })));
    }
    let found = snapshot(&app, &caller, &alias).await?;
    Ok(Json(json!({ "templateID": found, "public": false })))
}

/// `DELETE /templates/{id}`: removes a template or a snapshot.
pub async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, E2bRefusal> {
    if let Some(found) = find(&app, &id).await? {
        owned(&caller, &found, &id)?;
        app.blocking(async move |fleet: &Fleet| fleet.templates().remove(found.id.as_str())).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    let key = snapshot(&app, &caller, &id).await?;
    let removed = app.blocking(async move |fleet: &Fleet| fleet.snapshots().remove(&key)).await;
    match removed {
        Ok(_) => Ok(StatusCode::NO_CONTENT),
        Err(failure) if failure.kind == Kind::NotFound => Err(unknown(&id)),
        Err(failure) => Err(failure.into()),
    }
}

/// The body of `PATCH /v2/templates/{id}`.
#[derive(Debug, Deserialize)]
pub struct TemplateUpdate {
    public: Option<bool>,
}

/// `PATCH /v2/templates/{id}`.
pub async fn change(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<TemplateUpdate>,
) -> Result<Json<Value>, E2bRefusal> {
    let found = known(&app, &caller, &id).await?;
    owned(&caller, &found, &id)?;
    let public = asked.value.public.unwrap_or(found.public);
    let template =
        app.blocking(async move |fleet: &Fleet| fleet.templates().publish(found.id.as_str(), public)).await?;
    Ok(Json(json!({ "names": names_of(&template) })))
}

/// `GET /templates/{id}/tags`.
pub async fn tags(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, E2bRefusal> {
    let found = known(&app, &caller, &id).await?;
    let tags = found
        .tags
        .iter()
        .map(|(tag, meant)| json!({ "tag": tag, "buildID": meant.build, "createdAt": meant.since }));
    Ok(Json(tags.collect()))
}

/// The body of `POST /templates/tags`.
#[derive(Debug, Deserialize)]
pub struct AddTagsRequest {
    target: String,
    tags: Vec<String>,
}

/// `POST /templates/tags`.
pub async fn tag(
    State(app): State<App>,
    caller: Caller,
    asked: JsonRequest<AddTagsRequest>,
) -> Result<(StatusCode, Json<Value>), E2bRefusal> {
    let AddTagsRequest { target, tags } = asked.value;
    let found = known(&app, &caller, &target).await?;
    owned(&caller, &found, &target)?;
    let told = tags.clone();
    let build = app.blocking(async move |fleet: &Fleet| fleet.templates().tag(&target, &tags)).await?;
    Ok((StatusCode::CREATED, Json(json!({ "tags": told, "buildID": build }))))
}

/// The body of `DELETE /templates/tags`.
#[derive(Debug, Deserialize)]
pub struct RemoveTagsRequest {
    name: String,
    tags: Vec<String>,
}

/// `DELETE /templates/tags`.
pub async fn untag(
    State(app): State<App>,
    caller: Caller,
    asked: JsonRequest<RemoveTagsRequest>,
) -> Result<StatusCode, E2bRefusal> {
    let RemoveTagsRequest { name, tags } = asked.value;
    let found = known(&app, &caller, &name).await?;
    owned(&caller, &found, &name)?;
    app.blocking(async move |fleet: &Fleet| fleet.templates().untag(found.id.as_str(), &tags)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /teams`: the one team that all keys belong to.
pub async fn teams(_: Caller) -> Json<Value> {
    Json(json!([{ "teamID": "palisade", "name": "palisade", "apiKey": "", "isDefault": true }]))
}

/// Finds a template by name or id, whatever its owner.
pub async fn find(app: &App, asked: &str) -> Result<Option<Template>, E2bRefusal> {
    // This reads a few small files, which is not worth a thread.
    if BUILT_IN.contains(&asked) { Ok(None) } else { Ok(app.fleet().templates().find(asked)?) }
}

/// Finds a template that exists and that the caller may see.
pub async fn known(app: &App, caller: &Caller, asked: &str) -> Result<Template, E2bRefusal> {
    let found = find(app, asked).await?.filter(|found| authz::may_see_template(caller, found));
    found.ok_or_else(|| unknown(asked))
}

/// Checks that a caller may create sandboxes from a template: its own, or a public one. A name that is no
/// template passes; later checks report it. Creates a built-in template if it does not exist yet.
pub async fn usable(app: &App, caller: &Caller, asked: &str) -> Result<(), E2bRefusal> {
    let bare = template(asked);
    match find(app, asked).await? {
        Some(found) => owned_or_public(caller, &found, asked),
        None if bare == BASE || bare == INTERPRETER => {
            // The build continues even if this caller stops waiting, and the next caller finds it done.
            app.blocking(async move |fleet: &Fleet| fleet.builds().setup(&bare, &mut |_| ()).map(drop))
                .await?;
            Ok(())
        }
        None => {
            check_absent(app, caller, asked).await?;
            let (caller, asked) = (caller.clone(), asked.to_owned());
            Ok(app.blocking(async move |fleet: &Fleet| authz::usable(fleet, &caller, &asked)).await?)
        }
    }
}

fn owned_or_public(caller: &Caller, template: &Template, asked: &str) -> Result<(), E2bRefusal> {
    if authz::may_see_template(caller, template) { Ok(()) } else { Err(forbidden(asked)) }
}

/// Refuses a caller that is neither the template's owner nor an admin.
pub fn owned(caller: &Caller, template: &Template, asked: &str) -> Result<(), E2bRefusal> {
    if authz::may_change_template(caller, template) { Ok(()) } else { Err(forbidden(asked)) }
}

fn forbidden(asked: &str) -> E2bRefusal {
    E2bRefusal::new(
        StatusCode::FORBIDDEN,
        format!("template \"{}\" is not yours", proto::text::visible(asked)),
    )
}

/// The id of a snapshot that this caller may see, or of a built-in template.
async fn snapshot(app: &App, caller: &Caller, asked: &str) -> Result<String, E2bRefusal> {
    let key = template(asked);
    if BUILT_IN.contains(&key.as_str()) {
        return Ok(key);
    }
    let is =
        move |snapshot: &SnapshotView| snapshot.id.as_str() == key || snapshot.name.as_deref() == Some(&key);
    let caller = caller.clone();
    let found = app
        .blocking(async move |fleet: &Fleet| {
            Ok::<_, Failure>(authz::snapshots(fleet, &caller)?.into_iter().find(is))
        })
        .await?;
    found.map(|snapshot| snapshot.id.to_string()).ok_or_else(|| unknown(asked))
}

/// Refuses a template that E2B has and this server lacks, unless a snapshot has its name.
async fn check_absent(app: &App, caller: &Caller, asked: &str) -> Result<(), E2bRefusal> {
    if ABSENT.contains(&template(asked).as_str()) {
        snapshot(app, caller, asked).await.map(drop)
    } else {
        Ok(())
    }
}

fn unknown(asked: &str) -> E2bRefusal {
    let name = proto::text::visible(asked);
    let message = if ABSENT.contains(&template(asked).as_str()) {
        format!(
            "E2B's template \"{name}\" does not exist on this server yet; build one with that name, or use \"base\""
        )
    } else {
        format!("template \"{name}\" was not found")
    };
    E2bRefusal::new(StatusCode::NOT_FOUND, message)
}
