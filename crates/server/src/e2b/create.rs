//! Creates sandboxes.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use fleet::{BodyView, Create, Fleet, Lease, Rest, Then};
use proto::{event::hex, spec::Egress};
use serde::Deserialize;
use serde_json::Value;

use super::{
    E2bRefusal,
    extract::JsonRequest,
    network::{self, InternetRequest},
    sandbox, templates,
};
use crate::{App, Caller, InternetAccess, authz, idempotency::KeyedRequest, limits, v1::read_object_or_null};

/// The longest time to live of a sandbox: thirty days.
const TIMEOUT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
const METADATA_LEN_MAX: usize = 64 << 10;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<i64>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<Value>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    #[serde(default, deserialize_with = "read_object_or_null")]
    auto_resume: Option<AutoResume>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct AutoResume {
    enabled: bool,
}

/// `POST /sandboxes`.
pub async fn v1(
    app: State<App>,
    caller: Caller,
    headers: HeaderMap,
    asked: JsonRequest<NewSandbox>,
) -> Result<Response, E2bRefusal> {
    make(app.0, caller, headers, asked, 15).await
}

/// `POST /v2/sandboxes`.
pub async fn v2(
    app: State<App>,
    caller: Caller,
    headers: HeaderMap,
    asked: JsonRequest<NewSandbox>,
) -> Result<Response, E2bRefusal> {
    make(app.0, caller, headers, asked, 300).await
}

async fn make(
    app: App,
    caller: Caller,
    headers: HeaderMap,
    asked: JsonRequest<NewSandbox>,
    timeout_s: i64,
) -> Result<Response, E2bRefusal> {
    let request = KeyedRequest::of(&headers, &caller, &asked.bytes)?;
    templates::usable(&app, &caller, &asked.value.template_id).await?;
    let mut create = request_of(asked.value, &caller, timeout_s)?;
    let internet = authz::internet_of(app.config().internet, &caller);
    if let (InternetAccess::Asked | InternetAccess::Allowed, Some(lease)) = (internet, &create.lease) {
        // A sandbox without internet access has a policy, too, because its client may ask for some later.
        let rules = network::rules(&lease.network, &caller, internet);
        create.egress = Some(Egress { rules, ..Egress::default() });
    }
    let Some(request) = request else { return Ok(created(&app, made(&app, &caller, create).await?)) };
    // A repetition of a request that is in progress waits for the first one.
    let mut turn = app.turns().take(&request).await;
    if let Some(before) = request.find_made(&app, &turn).await? {
        return Ok(created(&app, before));
    }
    let lease = create.lease.map(|lease| Lease { request: Some(request.mark()), ..lease });
    let new = made(&app, &caller, Create { lease, ..create }).await?;
    *turn = Some(new.0.id().clone());
    Ok(created(&app, new))
}

async fn made(app: &App, caller: &Caller, create: Create) -> Result<(BodyView, Option<Lease>), E2bRefusal> {
    let lease = create.lease.clone();
    let terms = lease.clone();
    let admitted = limits::admit(app, caller, &create).await?;
    let view = app
        .blocking(async move |fleet: &Fleet| {
            let made = fleet.create(create).await;
            // The permit is released here and not earlier: the Body is created even if the caller has
            // disconnected.
            drop(admitted);
            let view = made?;
            if let (Some(terms), None) = (&terms, &view.spec.egress) {
                network::note_refused(fleet, view.id(), &terms.network)?;
            }
            Ok(view)
        })
        .await?;
    if let Some(lease) = &lease {
        app.timer().note(view.id(), lease);
    }
    Ok((view, lease))
}

/// The response of a create. It says that the sandbox has no internet access, unless the request wants none.
fn created(app: &App, (view, lease): (BodyView, Option<Lease>)) -> Response {
    let mut sandbox = sandbox::sandbox(app, &view, lease.as_ref());
    if view.spec.egress.is_some() {
        return (StatusCode::CREATED, Json(sandbox)).into_response();
    }
    if lease.is_some_and(|lease| network::internet(&lease.network) != InternetRequest::Refused) {
        sandbox["allowInternetAccess"] = false.into();
        sandbox["warnings"] = [network::NO_INTERNET].as_slice().into();
    }
    (StatusCode::CREATED, Json(sandbox)).into_response()
}

fn request_of(asked: NewSandbox, caller: &Caller, timeout_s: i64) -> Result<Create, E2bRefusal> {
    if asked.iam.as_ref().is_some_and(|iam| !iam.is_null()) {
        return Err(E2bRefusal::absent("identity tokens (iam)"));
    }
    if asked.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
        return Err(E2bRefusal::absent("volumes"));
    }
    let mut lease = Lease::new(timeout(asked.timeout.unwrap_or(timeout_s))?, then(&asked)?);
    lease.owner = Some(caller.key.clone());
    lease.alias = Some(asked.template_id.clone());
    lease.auto_resume = asked.auto_resume.as_ref().is_some_and(|resume| resume.enabled);
    lease.metadata = asked.metadata.unwrap_or_default();
    check_metadata(&lease.metadata)?;
    lease.network = network::checked(asked.network, asked.allow_internet_access)?;
    if lease.network.get("allowPublicTraffic") == Some(&Value::Bool(false)) {
        lease.traffic_token = Some(traffic_token()?);
    }
    Ok(Create {
        template: asked.template_id,
        env: asked.env_vars.unwrap_or_default(),
        lease: Some(lease),
        ..Create::kept()
    })
}

fn then(asked: &NewSandbox) -> Result<Then, E2bRefusal> {
    let resumes = asked.auto_resume.as_ref().is_some_and(|resume| resume.enabled);
    match (asked.auto_pause.unwrap_or(false), asked.auto_pause_memory.unwrap_or(true)) {
        (false, _) => Ok(Then::Kill),
        (true, true) => Ok(Then::Pause(Rest::Memory)),
        (true, false) if resumes => Err(E2bRefusal::bad(
            "autoResume needs the memory: it cannot be combined with autoPauseMemory false",
        )),
        (true, false) => Ok(Then::Pause(Rest::Files)),
    }
}

/// A time to live, from seconds.
pub fn timeout(seconds: i64) -> Result<Duration, E2bRefusal> {
    let asked = u64::try_from(seconds).ok().map(Duration::from_secs).filter(|asked| *asked <= TIMEOUT_MAX);
    asked.ok_or_else(|| {
        E2bRefusal::bad(format!("timeout is not a number of seconds from 0 to {}", TIMEOUT_MAX.as_secs()))
    })
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), E2bRefusal> {
    let len: usize = metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
    if len > METADATA_LEN_MAX { Err(E2bRefusal::bad("metadata is longer than 64 KiB")) } else { Ok(()) }
}

/// The template's name without its tag; snapshots have no tags.
pub fn template(asked: &str) -> String {
    asked.strip_suffix(":default").or_else(|| asked.strip_suffix(":latest")).unwrap_or(asked).to_owned()
}

/// Generates the token that callers of private ports send.
pub fn traffic_token() -> Result<String, E2bRefusal> {
    sys::random::bytes::<16>().map(|drawn| hex(&drawn)).map_err(|_| {
        E2bRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "cannot read random bytes from the kernel")
    })
}
