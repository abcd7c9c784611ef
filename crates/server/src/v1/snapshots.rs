//! Snapshots of Bodies.

use axum::{Json, extract::State, http::StatusCode};
use fleet::{Fleet, SnapshotView};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::own,
    error::{ErrorBody, V1Refusal},
    extract::{BodyParam, JsonBody as Sent, NameParam, QueryParams, ReadAccess, RunAccess},
    page::{self, Page, PageQuery},
};
use crate::{App, Caller, authz};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(take)).routes(routes!(list)).routes(routes!(get, remove))
}

/// A named, immutable state of a Body's files.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct Snapshot {
    /// The id of the snapshot.
    id: String,
    /// The name of the snapshot, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    name: Option<String>,
    /// The Body that the snapshot was taken of.
    body: String,
    /// When the snapshot was taken, RFC 3339.
    created_at: String,
    /// Size of the changes that the snapshot holds.
    bytes: u64,
    /// The agent whose checkpoint it belongs to; it is removed with that agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    checkpoint_of: Option<String>,
}

impl From<SnapshotView> for Snapshot {
    fn from(view: SnapshotView) -> Self {
        Self {
            id: view.id.to_string(),
            name: view.name,
            body: view.body.to_string(),
            created_at: view.created_at,
            bytes: view.bytes,
            checkpoint_of: view.checkpoint_of.map(|agent| agent.to_string()),
        }
    }
}

/// The snapshot to take.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "ready" }))]
struct NewSnapshot {
    /// A name for the snapshot.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$")]
    name: Option<String>,
}

/// Take a snapshot of a Body's files, with an optional name.
#[utoipa::path(post, path = "/bodies/{id}/snapshot", operation_id = "snapshot_body", tag = "snapshots", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<NewSnapshot>,
    responses((status = 201, description = "The new snapshot", body = Snapshot), (status = "default", description = "Refused", body = ErrorBody)))]
async fn take(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    asked: Option<Sent<NewSnapshot>>,
) -> Result<(StatusCode, Json<Snapshot>), V1Refusal> {
    let name = asked.and_then(|Sent(asked)| asked.name);
    let taken = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.snapshots().create(&id, name).await
    });
    Ok((StatusCode::CREATED, Json(taken.await?.into())))
}

fn one(fleet: &Fleet, caller: &Caller, key: &str) -> Result<SnapshotView, Failure> {
    let found = authz::snapshots(fleet, caller)?
        .into_iter()
        .find(|view| view.id.as_str() == key || view.name.as_deref() == Some(key));
    found.ok_or_else(|| {
        Failure::new(Kind::NotFound, format!("there is no snapshot {:?}", proto::text::visible(key)))
            .hint("list them: GET /v1/snapshots")
    })
}

/// List the snapshots, oldest first.
#[utoipa::path(get, path = "/snapshots", operation_id = "list_snapshots", tag = "snapshots", params(PageQuery),
    responses((status = 200, description = "A page of snapshots", body = Page<Snapshot>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<Json<Page<Snapshot>>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| authz::snapshots(fleet, &caller)).await?;
    let found = found.into_iter().map(Snapshot::from).collect();
    Ok(Json(page::page(found, &query, |found: &Snapshot| format!("{} {}", found.created_at, found.id))?))
}

/// Show a snapshot, by id or name.
#[utoipa::path(get, path = "/snapshots/{snapshot}", operation_id = "get_snapshot", tag = "snapshots", params(("snapshot" = String, Path, description = "The id or name of the snapshot")),
    responses((status = 200, description = "The snapshot", body = Snapshot), (status = "default", description = "Refused", body = ErrorBody)))]
async fn get(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    NameParam(key): NameParam,
) -> Result<Json<Snapshot>, V1Refusal> {
    let found = state.0.blocking(async move |fleet: &Fleet| one(fleet, &caller, &key));
    Ok(Json(found.await?.into()))
}

/// Remove a snapshot that no Body and no other snapshot uses.
#[utoipa::path(delete, path = "/snapshots/{snapshot}", operation_id = "remove_snapshot", tag = "snapshots", params(("snapshot" = String, Path, description = "The id or name of the snapshot")),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove(
    state: State<App>,
    RunAccess(caller): RunAccess,
    NameParam(key): NameParam,
) -> Result<StatusCode, V1Refusal> {
    let removed = state.0.blocking(async move |fleet: &Fleet| {
        let found = one(fleet, &caller, &key)?;
        fleet.snapshots().remove(found.id.as_str()).map(drop)
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}
