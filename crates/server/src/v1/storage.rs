//! The data directory: disk usage, homes and settings. All of it is for keys of scope `admin`.

use std::collections::BTreeMap;

use axum::{Json, extract::State, http::StatusCode};
use fleet::{Fleet, Setting};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, NameParam},
};
use crate::App;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(disk_usage))
        .routes(routes!(homes))
        .routes(routes!(remove_home))
        .routes(routes!(settings))
        .routes(routes!(get_setting, change_setting))
}

/// The disk space of one kind of data.
#[derive(Debug, Serialize, ToSchema)]
struct StorageShare {
    /// The kind.
    kind: String,
    /// The number of items.
    count: usize,
    /// The size in bytes.
    bytes: u64,
}

/// The disk space of the data directory.
#[derive(Debug, Serialize, ToSchema)]
struct DiskUsage {
    /// The disk space of each kind of data.
    shares: Vec<StorageShare>,
    /// The bytes that unused layers, snapshots and dependencies may take.
    budget: u64,
}

/// Show how much disk space each part of the data directory takes.
#[utoipa::path(get, path = "/disk-usage", operation_id = "get_disk_usage", tag = "host",
    responses((status = 200, description = "The disk usage", body = DiskUsage), (status = "default", description = "Refused", body = ErrorBody)))]
async fn disk_usage(state: State<App>, _: AdminAccess) -> Result<Json<DiskUsage>, V1Refusal> {
    let (shares, budget) = state.0.blocking(async |fleet: &Fleet| fleet.garbage().disk_usage()).await?;
    let share = |share: fleet::DiskShare| StorageShare {
        kind: share.kind.to_owned(),
        count: share.count,
        bytes: share.bytes,
    };
    Ok(Json(DiskUsage { shares: shares.into_iter().map(share).collect(), budget: budget.0 }))
}

/// A home directory that outlives its Bodies.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Home)]
struct HomeInfo {
    /// The name.
    name: String,
    /// When it was last stored, RFC 3339.
    kept_at: String,
    /// The size in bytes.
    bytes: u64,
    /// The Body that uses it now.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    body: Option<String>,
}

/// All homes.
#[derive(Debug, Serialize, ToSchema)]
struct HomeList {
    /// The homes, by name.
    items: Vec<HomeInfo>,
}

/// List the homes.
#[utoipa::path(get, path = "/homes", operation_id = "list_homes", tag = "homes",
    responses((status = 200, description = "All homes", body = HomeList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn homes(state: State<App>, _: AdminAccess) -> Result<Json<HomeList>, V1Refusal> {
    let views = state.0.blocking(async |fleet: &Fleet| fleet.homes().list()).await?;
    let home = |view: fleet::HomeView| HomeInfo {
        name: view.record.name,
        kept_at: view.record.kept_at,
        bytes: view.bytes,
        body: view.body.map(|body| body.to_string()),
    };
    Ok(Json(HomeList { items: views.into_iter().map(home).collect() }))
}

/// Remove a home that no Body uses.
#[utoipa::path(delete, path = "/homes/{home}", operation_id = "remove_home", tag = "homes", params(("home" = String, Path, description = "The name of the home")),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove_home(
    state: State<App>,
    _: AdminAccess,
    NameParam(name): NameParam,
) -> Result<StatusCode, V1Refusal> {
    state.0.blocking(async move |fleet: &Fleet| fleet.homes().remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Settings by name.
#[derive(Debug, Serialize, ToSchema)]
struct SettingValues(BTreeMap<&'static str, Value>);

/// Show all settings of the data directory.
#[utoipa::path(get, path = "/config", operation_id = "list_settings", tag = "host",
    responses((status = 200, description = "The settings by name", body = SettingValues), (status = "default", description = "Refused", body = ErrorBody)))]
async fn settings(state: State<App>, _: AdminAccess) -> Result<Json<SettingValues>, V1Refusal> {
    let settings = state.0.blocking(async |fleet: &Fleet| fleet.settings().read()).await?;
    let values = Setting::ALL.into_iter().map(|setting| (setting.name(), setting.json(&settings)));
    Ok(Json(SettingValues(values.collect())))
}

/// Finds the setting that a path names.
fn find(name: &str) -> Result<Setting, Failure> {
    Setting::find(name).map_err(|failure| Failure { kind: Kind::NotFound, ..failure })
}

/// Show one setting.
#[utoipa::path(get, path = "/config/{setting}", operation_id = "get_setting", tag = "host", params(("setting" = String, Path, description = "The name of the setting", example = "store.budget")),
    responses((status = 200, description = "The setting by its name", body = SettingValues), (status = "default", description = "Refused", body = ErrorBody)))]
async fn get_setting(
    state: State<App>,
    _: AdminAccess,
    NameParam(name): NameParam,
) -> Result<Json<SettingValues>, V1Refusal> {
    let setting = find(&name)?;
    let settings = state.0.blocking(async |fleet: &Fleet| fleet.settings().read()).await?;
    Ok(Json(SettingValues([(setting.name(), setting.json(&settings))].into())))
}

/// The new value of a setting.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "value": "20GiB" }))]
struct NewValue {
    /// The value as text, as `pal config set` takes it.
    value: String,
}

/// Change a setting.
#[utoipa::path(put, path = "/config/{setting}", operation_id = "change_setting", tag = "host", params(("setting" = String, Path, description = "The name of the setting", example = "store.budget")), request_body = NewValue,
    responses((status = 200, description = "The setting by its name", body = SettingValues), (status = "default", description = "Refused", body = ErrorBody)))]
async fn change_setting(
    state: State<App>,
    _: AdminAccess,
    NameParam(name): NameParam,
    Sent(asked): Sent<NewValue>,
) -> Result<Json<SettingValues>, V1Refusal> {
    let setting = find(&name)?;
    let settings =
        state.0.blocking(async move |fleet: &Fleet| fleet.settings().set(setting, &asked.value)).await?;
    Ok(Json(SettingValues([(setting.name(), setting.json(&settings))].into())))
}
