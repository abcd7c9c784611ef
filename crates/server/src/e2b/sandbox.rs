//! Bodies in the JSON format of E2B's clients.

use std::time::{Duration, UNIX_EPOCH};

use fleet::{BodyView, Lease, Rest, Status, Then, clock};
use serde_json::{Value, json};

use super::network::EGRESS_PROXY;
use crate::App;

/// The envd version; the SDKs choose their features by it.
pub const ENVD_VERSION: &str = "0.6.4";
const CLIENT: &str = "palisade";
/// The end time of a sandbox that has none.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The response of create and connect.
pub fn sandbox(app: &App, view: &BodyView, lease: Option<&Lease>) -> Value {
    let mut sandbox = json!({
        "templateID": view.spec.template,
        "sandboxID": view.id(),
        "clientID": CLIENT,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": app.fleet().token(view.id()),
        "trafficAccessToken": lease.and_then(|lease| lease.traffic_token.as_deref()),
        "domain": app.public_domain(),
    });
    if let Some(alias) = lease.and_then(|lease| lease.alias.as_deref()) {
        sandbox["alias"] = alias.into();
    }
    sandbox
}

/// One item of a list.
pub fn listed(view: &BodyView, lease: Option<&Lease>) -> Value {
    let limits = &view.spec.limits;
    let mut listed = json!({
        "templateID": view.spec.template,
        "sandboxID": view.id(),
        "clientID": CLIENT,
        "startedAt": started_at(view, lease),
        "endAt": end_at(lease),
        "envdVersion": ENVD_VERSION,
        "cpuCount": cpu_count(view),
        "memoryMB": limits.memory.0 >> 20,
        "diskSizeMB": limits.disk.0 >> 20,
        "state": state(view.status),
        "metadata": lease.map(|lease| &lease.metadata),
        "volumeMounts": [],
    });
    if let Some(alias) = lease.and_then(|lease| lease.alias.as_deref()) {
        listed["alias"] = alias.into();
    }
    if let Some(how) = pause_mode(view.status, lease) {
        listed["pauseMode"] = how.into();
    }
    listed
}

/// The response of info.
pub fn detail(app: &App, view: &BodyView, lease: Option<&Lease>) -> Value {
    let mut detail = listed(view, lease);
    detail["envdAccessToken"] = app.fleet().token(view.id()).into();
    detail["domain"] = app.public_domain().into();
    let Some(lease) = lease else { return detail };
    detail["lifecycle"] = json!({
        "autoResume": lease.auto_resume,
        "onTimeout": match lease.then { Then::Kill => "kill", Then::Pause(_) => "pause" },
    });
    let mut network = lease.network.clone();
    if let Some(network) = network.as_object_mut() {
        network.remove("allowInternetAccess");
        network.remove(EGRESS_PROXY);
    }
    // Reports what is enforced and not what was requested: a Body without a policy reaches only its own loopback.
    let rules = view.spec.egress.as_ref().map(proto::spec::Egress::all_rules).unwrap_or_default();
    detail["allowInternetAccess"] = (!rules.is_empty()).into();
    if network.as_object().is_some_and(|network| !network.is_empty()) {
        detail["network"] = network;
    }
    detail
}

/// Running or paused. A Body that ended without being removed counts as paused: a client can connect to it
/// again, and finds its files.
pub fn state(status: Status) -> &'static str {
    match status {
        Status::Running => "running",
        Status::Paused | Status::Stopped | Status::Dead | Status::Interrupted => "paused",
    }
}

fn pause_mode(status: Status, lease: Option<&Lease>) -> Option<&'static str> {
    match (status, lease.and_then(|lease| lease.paused)) {
        (Status::Running, _) => None,
        (Status::Paused, Some(Rest::Memory) | None) => Some("full"),
        _ => Some("filesystem"),
    }
}

/// CPUs, rounded up: E2B uses whole numbers.
pub fn cpu_count(view: &BodyView) -> u32 {
    view.spec.limits.cpu_milli.div_ceil(1000)
}

/// When the sandbox started.
pub fn started_at(view: &BodyView, lease: Option<&Lease>) -> String {
    lease.map_or_else(|| view.spec.created_at.clone(), |lease| lease.since.clone())
}

fn end_at(lease: Option<&Lease>) -> String {
    let Some(lease) = lease else { return NEVER.to_owned() };
    match lease.deadline_ms {
        Some(deadline) => clock::rfc3339(UNIX_EPOCH + Duration::from_millis(deadline)),
        // A paused sandbox has no end time. The response gives the start of its last run, which is in the
        // past.
        None => lease.since.clone(),
    }
}
