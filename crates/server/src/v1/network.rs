//! Routes for the network of a Body: show, replace and extend its policy.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use fleet::{Fleet, NetworkRequest, NetworkState, PolicyChange, PolicyChanger, PolicyForce, PolicyPart};
use proto::{
    Failure, Kind,
    egress::{ACCEPT_MAX, EgressRule, RULES_MAX, RuleAction, RuleLimit, RuleResponse},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::own,
    error::{ErrorBody, V1Refusal},
    extract::{BodyParam, JsonBody as Sent, ReadAccess, RunAccess, read_object_or_null, read_objects},
    secrets::BodySecret,
};
use crate::{App, Caller, InternetAccess, Scope, authz};

/// Most presets of a request.
const PRESETS_MAX: usize = 8;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show, replace, extend))
}

/// The network of a Body: presets and rules. A Body reaches what a rule allows and none denies.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "preset": ["registries"], "allow": ["api.example.org:443"] }))]
pub struct NetworkTerms {
    /// Presets: `closed`, `registries`, `models`, `git` (the remotes of the Body's repositories), `research` or `open`.
    #[serde(default)]
    #[schema(max_items = 8)]
    pub preset: Vec<String>,
    /// Targets that are allowed, as `HOST[:PORTS][+MARK]`.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub allow: Vec<String>,
    /// Targets that are denied, whatever allows them.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub deny: Vec<String>,
    /// Targets whose connections wait for up to two minutes until a change of the policy allows or denies them.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub ask: Vec<String>,
    /// Further rules.
    #[serde(default, deserialize_with = "read_objects")]
    #[schema(max_items = 256)]
    pub rules: Vec<NetworkRule>,
    /// Other Bodies that may connect, as `BODY:PORTS` with the name or the id of the Body. Its own policy must allow
    /// `NAME.body.internal:PORT`.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub accept: Vec<String>,
}

/// A rule about targets.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    /// Whether the rule allows the targets.
    #[serde(default)]
    pub action: NetworkAction,
    /// The targets, as `HOST[:PORTS][+MARK]`.
    pub to: String,
    /// Parameters of the query that a request must have, each once, with a value that fits the pattern: `*` is any text,
    /// `?` one character, `[a-z0-9]` one of these.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub query: BTreeMap<String, String>,
    /// Headers that a request must have, each once, with a value that fits the pattern.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Headers that each request to the targets gets on its way out; `${NAME}` in a value stands for a secret of the Body.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, String>,
    /// The times at which the rule counts, in UTC: `[DAYS ]HH:MM-HH:MM`, such as `mon-fri 08:00-18:00`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 11, max_length = 39)]
    pub window: Option<String>,
    /// The budgets of a rule that allows.
    #[serde(default, deserialize_with = "read_object_or_null", skip_serializing_if = "Option::is_none")]
    pub limit: Option<NetworkLimit>,
    /// The answer to requests, which then reach no host.
    #[serde(default, deserialize_with = "read_object_or_null", skip_serializing_if = "Option::is_none")]
    pub respond: Option<NetworkResponse>,
    /// The host, as `NAME:PORT`, to which requests go in place of their own; it may be private if the rule says `+private`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 3, max_length = 259)]
    pub forward: Option<String>,
    /// The reason for the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, max_length = 200)]
    pub why: Option<String>,
    /// Targets (`HOST:PORT`) that the rule must match; a rule that does not is refused.
    #[serde(default, rename = "match", skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 32)]
    pub matches: Vec<String>,
    /// Targets that the rule must not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 32)]
    pub not_match: Vec<String>,
}

/// The budgets of a rule; at least one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 1)]
pub struct NetworkLimit {
    /// How many requests, where requests are judged, or else connections, in any second, minute or hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^([1-9][0-9]{0,3}|10000)/(s|min|h)$", example = "60/min")]
    pub rate: Option<String>,
    /// How many bytes in both directions together, as long as the Body lives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[1-9][0-9]{0,6}(KiB|MiB|GiB)$", example = "100MiB")]
    pub bytes: Option<String>,
}

/// The answer of a rule.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkResponse {
    /// Its status.
    #[schema(minimum = 200, maximum = 599)]
    pub status: u16,
    /// Its headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Its body: at most 64 KiB.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(max_length = 65536)]
    pub body: String,
}

/// The effect of a rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NetworkAction {
    /// The Body may reach the targets.
    #[default]
    Allow,
    /// The Body may not, whatever allows them.
    Deny,
    /// Connections wait for up to two minutes until a change of the policy allows or denies them; an event
    /// `network.asked` tells of them.
    Ask,
}

/// The policy of a Body.
#[derive(Debug, Serialize, ToSchema)]
struct NetworkPolicy {
    /// Whether the Body has a policy; without one it reaches only itself.
    policy: bool,
    /// The rules.
    rules: Vec<NetworkRule>,
    /// The secrets that the Body may use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    secrets: Vec<BodySecret>,
    /// Other Bodies that may connect, as `BODY:PORTS`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    accept: Vec<String>,
    /// The ceiling of the key that owns the Body, if it has one: every connection must be allowed by these rules, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    ceiling: Option<Vec<NetworkRule>>,
    /// The number of the policy: each change has the next one.
    generation: u64,
    /// When the policy counts.
    in_force: NetworkForce,
    /// The open connections, if the Body's egress process runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    open: Option<usize>,
    /// The connections that this change closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    closed: Option<usize>,
}

/// When a policy counts.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum NetworkForce {
    /// Now.
    Now,
    /// From the next start of the Body on.
    AtNextStart,
    /// As soon as the Body's egress process, which does not answer, runs again.
    AtRestart,
}

impl From<NetworkRule> for EgressRule {
    fn from(rule: NetworkRule) -> Self {
        let NetworkRule {
            action,
            to,
            query,
            headers,
            set_headers,
            window,
            limit,
            respond,
            forward,
            why,
            matches,
            not_match,
        } = rule;
        let action = match action {
            NetworkAction::Allow => RuleAction::Allow,
            NetworkAction::Deny => RuleAction::Deny,
            NetworkAction::Ask => RuleAction::Ask,
        };
        let limit = limit.map(|NetworkLimit { rate, bytes }| RuleLimit { rate, bytes });
        let respond =
            respond.map(|NetworkResponse { status, headers, body }| RuleResponse { status, headers, body });
        Self {
            action,
            to,
            query,
            headers,
            set_headers,
            window,
            limit,
            respond,
            forward,
            why,
            matches,
            not_match,
        }
    }
}

impl From<EgressRule> for NetworkRule {
    fn from(rule: EgressRule) -> Self {
        let EgressRule {
            action,
            to,
            query,
            headers,
            set_headers,
            window,
            limit,
            respond,
            forward,
            why,
            matches,
            not_match,
        } = rule;
        let action = match action {
            RuleAction::Allow => NetworkAction::Allow,
            RuleAction::Deny => NetworkAction::Deny,
            RuleAction::Ask => NetworkAction::Ask,
        };
        let limit = limit.map(|RuleLimit { rate, bytes }| NetworkLimit { rate, bytes });
        let respond =
            respond.map(|RuleResponse { status, headers, body }| NetworkResponse { status, headers, body });
        Self {
            action,
            to,
            query,
            headers,
            set_headers,
            window,
            limit,
            respond,
            forward,
            why,
            matches,
            not_match,
        }
    }
}

impl From<NetworkState> for NetworkPolicy {
    fn from(state: NetworkState) -> Self {
        let NetworkState {
            id: _,
            policy,
            rules,
            secrets,
            accept,
            ceiling,
            generation,
            in_force,
            open,
            closed,
        } = state;
        let in_force = match in_force {
            PolicyForce::Now => NetworkForce::Now,
            PolicyForce::AtNextStart => NetworkForce::AtNextStart,
            PolicyForce::AtRestart => NetworkForce::AtRestart,
        };
        Self {
            policy,
            rules: rules.into_iter().map(Into::into).collect(),
            secrets: secrets.into_iter().map(Into::into).collect(),
            accept,
            ceiling: ceiling.map(|rules| rules.into_iter().map(Into::into).collect()),
            generation,
            in_force,
            open,
            closed,
        }
    }
}

impl NetworkTerms {
    /// The request to the fleet, before it is known who makes it.
    pub fn unchecked_request(self) -> Result<NetworkRequest, Failure> {
        for (name, len, max) in [
            ("preset", self.preset.len(), PRESETS_MAX),
            ("allow", self.allow.len(), RULES_MAX),
            ("deny", self.deny.len(), RULES_MAX),
            ("ask", self.ask.len(), RULES_MAX),
            ("rules", self.rules.len(), RULES_MAX),
            ("accept", self.accept.len(), ACCEPT_MAX),
        ] {
            if len > max {
                return Err(Failure::new(
                    Kind::Usage,
                    format!("`{name}` has {len} items; it may have {max}"),
                ));
            }
        }
        let presets = self.preset.iter().map(|name| name.parse()).collect::<Result<_, _>>()?;
        let rules = self.rules.into_iter().map(Into::into).collect();
        let (allow, deny, ask, accept) = (self.allow, self.deny, self.ask, self.accept);
        Ok(NetworkRequest { presets, allow, deny, ask, rules, accept, ..NetworkRequest::default() })
    }

    /// The request to the fleet, if this caller may make it.
    pub fn into_request(self, app: &App, caller: &Caller) -> Result<NetworkRequest, Failure> {
        let request = self.unchecked_request()?;
        let internet = authz::internet_of(app.config().internet, caller);
        authz::check_network(internet, caller, &request)?;
        authz::check_named_bodies(app.fleet(), caller, &request)?;
        let asks = internet == InternetAccess::Asked && caller.scope < Scope::Admin;
        Ok(NetworkRequest { asks, ..request })
    }
}

/// Show the network policy of a Body.
#[utoipa::path(get, path = "/bodies/{id}/network", operation_id = "get_network", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The policy", body = NetworkPolicy), (status = "default", description = "Refused", body = ErrorBody)))]
async fn show(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<NetworkPolicy>, V1Refusal> {
    let shown = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        PolicyChanger::of(fleet).show(&id)
    });
    Ok(Json(shown.await?.into()))
}

/// Replace the network policy of a Body. Connections that the new one does not allow are closed.
///
/// Keys of scope `run` may do that if the server's operator allows it (`pal serve --internet allow`), and then for
/// public targets only.
#[utoipa::path(put, path = "/bodies/{id}/network", operation_id = "replace_network", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = NetworkTerms,
    responses((status = 200, description = "The new policy", body = NetworkPolicy), (status = "default", description = "Refused", body = ErrorBody)))]
async fn replace(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    Sent(asked): Sent<NetworkTerms>,
) -> Result<Json<NetworkPolicy>, V1Refusal> {
    change(&state.0, caller, id, asked, PolicyChange::Replace).await
}

/// Add rules to the network policy of a Body. A rule takes the place of one about the same target.
#[utoipa::path(patch, path = "/bodies/{id}/network", operation_id = "extend_network", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = NetworkTerms,
    responses((status = 200, description = "The new policy", body = NetworkPolicy), (status = "default", description = "Refused", body = ErrorBody)))]
async fn extend(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    Sent(asked): Sent<NetworkTerms>,
) -> Result<Json<NetworkPolicy>, V1Refusal> {
    change(&state.0, caller, id, asked, PolicyChange::Add).await
}

async fn change(
    app: &App,
    caller: Caller,
    id: proto::BodyId,
    asked: NetworkTerms,
    how: fn(PolicyPart) -> PolicyChange,
) -> Result<Json<NetworkPolicy>, V1Refusal> {
    let state = app.clone();
    let changed = app.blocking(async move |fleet: &Fleet| {
        let (view, lease) = own(fleet, &caller, &id)?;
        authz::check_network_change(&caller, lease.as_ref())?;
        let request = asked.into_request(&state, &caller)?;
        let workspaces = view.spec.workspaces.iter();
        let remotes: Vec<String> =
            workspaces.flat_map(|own| fleet::remote_addresses(&own.repository)).collect();
        let part = request.policy(&remotes)?.map(PolicyPart::from).unwrap_or_default();
        PolicyChanger::of(fleet).change(&id, how(part))
    });
    Ok(Json(changed.await?.into()))
}
