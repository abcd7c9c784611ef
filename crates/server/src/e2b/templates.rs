//! What sandboxes can be made from.

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use fleet::{Fleet, SnapshotView};
use proto::{Failure, Kind};
use serde_json::{Value, json};

use super::{Refusal, create::template, sandbox::ENVD_VERSION};
use crate::{App, Caller};

/// Templates that are there without anybody having made them.
const BUILT_IN: [&str; 1] = ["host"];

/// `GET /templates`.
pub async fn list(State(app): State<App>, _: Caller) -> Result<Json<Vec<Value>>, Refusal> {
    let snapshots = app.blocking(async |fleet: &Fleet| fleet.snapshots()).await?;
    let built_in = BUILT_IN.iter().map(|name| told(name, Some(name), "1970-01-01T00:00:00Z"));
    Ok(Json(built_in.chain(snapshots.iter().map(|snapshot| told(snapshot.id.as_str(), snapshot.name.as_deref(), &snapshot.created_at))).collect()))
}

fn told(id: &str, name: Option<&str>, created_at: &str) -> Value {
    let names: Vec<&str> = name.into_iter().collect();
    json!({
        "templateID": id, "buildID": id, "cpuCount": 1, "memoryMB": 512, "diskSizeMB": 1024, "public": false, "aliases": names, "names": names,
        "createdAt": created_at, "updatedAt": created_at, "createdBy": null, "lastSpawnedAt": null, "spawnCount": 0, "buildCount": 1,
        "envdVersion": ENVD_VERSION, "buildStatus": "ready",
    })
}

/// `GET /templates/aliases/{alias}`.
pub async fn alias(State(app): State<App>, _: Caller, Path(alias): Path<String>) -> Result<Json<Value>, Refusal> {
    let found = identify(&app, &alias).await?;
    Ok(Json(json!({ "templateID": found, "public": false })))
}

/// `DELETE /templates/{id}`: only snapshots can go.
pub async fn remove(State(app): State<App>, _: Caller, Path(id): Path<String>) -> Result<StatusCode, Refusal> {
    let key = template(&id);
    let removed = app.blocking(async move |fleet: &Fleet| fleet.remove_snapshot(&key)).await;
    match removed {
        Ok(_) => Ok(StatusCode::NO_CONTENT),
        Err(failure) if failure.kind == Kind::NotFound => Err(unknown(&id)),
        Err(failure) => Err(failure.into()),
    }
}

/// `GET /templates/{id}/tags`: each has the one.
pub async fn tags(State(app): State<App>, _: Caller, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    let found = identify(&app, &id).await?;
    Ok(Json(json!([{ "tag": "default", "buildID": found, "createdAt": "1970-01-01T00:00:00Z" }])))
}

/// `POST /templates/tags`.
pub async fn tag(_: Caller) -> Refusal {
    Refusal::absent("tags beside `default`")
}

/// `DELETE /templates/tags`.
pub async fn untag(_: Caller) -> Refusal {
    Refusal::absent("tags beside `default`")
}

/// `GET /teams`: the one that everybody here is in.
pub async fn teams(_: Caller) -> Json<Value> {
    Json(json!([{ "teamID": "palisade", "name": "palisade", "apiKey": "", "isDefault": true }]))
}

/// The id of a template that is there.
async fn identify(app: &App, asked: &str) -> Result<String, Refusal> {
    let key = template(asked);
    if BUILT_IN.contains(&key.as_str()) {
        return Ok(key);
    }
    let is = move |snapshot: &SnapshotView| snapshot.id.as_str() == key || snapshot.name.as_deref() == Some(&key);
    let found = app.blocking(async move |fleet: &Fleet| Ok::<_, Failure>(fleet.snapshots()?.into_iter().find(is))).await?;
    found.map(|snapshot| snapshot.id.to_string()).ok_or_else(|| unknown(asked))
}

fn unknown(asked: &str) -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, format!("template \"{}\" was not found", proto::text::visible(asked)))
}
