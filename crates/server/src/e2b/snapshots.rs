//! Snapshots of sandboxes. To E2B's clients they are templates.

use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use fleet::{Fleet, SnapshotView};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    E2bRefusal,
    create::template,
    extract::{JsonRequest, QueryPairs, find},
    list::page,
};
use crate::{App, Caller, authz, route::without_client};

#[derive(Debug, Deserialize)]
pub struct SnapshotRequest {
    name: Option<String>,
}

/// `POST /sandboxes/{id}/snapshots`.
pub async fn take(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<SnapshotRequest>,
) -> Result<Response, E2bRefusal> {
    let (view, _) = find(&app, &caller, &id).await?;
    let (body, name) = (view.id().clone(), asked.value.name.as_deref().map(template));
    let taken = app.blocking(async move |fleet: &Fleet| fleet.snapshots().create(&body, name).await).await?;
    Ok((StatusCode::CREATED, Json(snapshot_json(&taken))).into_response())
}

/// `GET /snapshots`.
pub async fn list(State(app): State<App>, caller: Caller, query: QueryPairs) -> Result<Response, E2bRefusal> {
    let (body, name) = (query.text("sandboxID").map(without_client), query.text("name").map(template));
    let all = app.blocking(async move |fleet: &Fleet| authz::snapshots(fleet, &caller)).await?;
    let wanted = |snapshot: &SnapshotView| {
        !snapshot.for_forks
            && snapshot.checkpoint_of.is_none()
            && body.is_none_or(|body| snapshot.body.as_str() == body)
            && name.as_ref().is_none_or(|name| snapshot.name.as_ref() == Some(name))
    };
    let found: Vec<SnapshotView> = all.into_iter().filter(wanted).collect();
    let keys: Vec<String> =
        found.iter().map(|snapshot| format!("{}_{}", snapshot.created_at, snapshot.id)).collect();
    let (from, to, next) = page(&keys, query.text("nextToken"), query.limit()?, false)?;
    let mut response = Json(found[from..to].iter().map(snapshot_json).collect::<Vec<_>>()).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

/// Uses the snapshot's name if it has one; a snapshot has exactly one tag.
fn snapshot_json(snapshot: &SnapshotView) -> Value {
    let tagged = |name: &str| if name.contains(':') { name.to_owned() } else { format!("{name}:default") };
    let names: Vec<String> = snapshot.name.iter().map(|name| tagged(name)).collect();
    let id = names.first().cloned().unwrap_or_else(|| tagged(snapshot.id.as_str()));
    json!({ "snapshotID": id, "names": names })
}
