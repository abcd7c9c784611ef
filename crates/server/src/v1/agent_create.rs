//! The creation of agents: their Bodies, their settings, and what a repeated request finds.
//!
//! Invariant: a repeated request with the same idempotency key has the agents of the first one, also if the server was
//! killed in between: Bodies without an agent get theirs, and only what is missing is created.
//! Invariant: no field of a request is a key of a model, and none names a directory of the host but by scope `admin`.

use std::collections::BTreeSet;

use bridge::{AgentRecord, AgentSettings, Agents};
use fleet::{Create, Fleet, Force, ProgressLine, UpRequest};
use proto::{
    BodyId, Failure, Kind,
    event_data::{AgentBudget, AgentSpec},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    agent_models::{ApproveMode, BudgetRequest},
    bodies::{NewBody, owned},
    extract::{find_body, read_object_or_null},
    long_work::Report,
    work::UpBody,
};
use crate::{
    App, Caller, Scope,
    agents::{RequestOrigin, check_model},
    authz,
    idempotency::KeyedRequest,
    limits::{self, CreatePermit},
};

/// Most agents of one request.
pub const COUNT_MAX: u32 = 100;
/// The longest task or message, in characters: at most 512 KiB.
pub const TEXT_LEN_MAX: usize = 131_072;
/// The longest title of an agent, in characters.
const TITLE_LEN_MAX: usize = 72;
/// One day.
const CHECKPOINT_MS_MAX: u64 = 24 * 3600 * 1000;

/// The agents to create. They work in the Body `body`, in new Bodies as `create` describes them, or in new Bodies with
/// the repositories of `up`; without any of these, in new Bodies with the defaults.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "task": "the login test fails on empty passwords; fix it", "model": "anthropic:NAME", "budget": { "dollars": 2 } }))]
pub struct NewAgent {
    /// The task.
    #[schema(min_length = 1, max_length = 131072)]
    task: String,
    /// The model: an alias of the server's models.toml, `anthropic:NAME`, `openai:NAME`, `openai-responses:NAME`,
    /// `script:FILE` for a file in the server's `scripts/`, or `NAME@URL`; the alias `default` if left out. A URL that
    /// models.toml does not list needs a key of scope `admin`.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// An existing Body, by id or name.
    #[schema(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    body: Option<String>,
    /// The properties of new Bodies.
    #[serde(default, deserialize_with = "read_object_or_null")]
    create: Option<NewBody>,
    /// The repositories of new Bodies. Only a key of scope `admin` may name repositories.
    #[serde(default, deserialize_with = "read_object_or_null")]
    up: Option<UpBody>,
    /// The name of the role.
    #[schema(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$")]
    role: Option<String>,
    /// The name of the plan template.
    #[schema(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$")]
    plan: Option<String>,
    /// The calls that need a person's approval; `auto` if left out.
    #[serde(default)]
    approve: ApproveMode,
    /// The limits of each agent; no limits if left out.
    #[serde(default, deserialize_with = "read_object_or_null")]
    budget: Option<BudgetRequest>,
    /// The number of agents, each in a Body of its own; 1 if left out.
    #[schema(minimum = 1, maximum = 100)]
    count: Option<u32>,
    /// The least time between two checkpoints of the Body, in milliseconds; if 0 or left out, checkpoints take at most a
    /// twentieth of the agent's time.
    #[schema(minimum = 0, maximum = 86400000)]
    checkpoint_every_ms: Option<u64>,
}

/// Where new agents work.
enum BodyChoice {
    Body(BodyId),
    NewBodies(Box<Create>),
    Repositories(Box<UpRequest>),
}

/// A checked request for agents.
pub struct AgentCreation {
    caller: Caller,
    place: BodyChoice,
    count: u32,
    task: String,
    model: String,
    role: Option<String>,
    plan: Option<String>,
    approve: ApproveMode,
    budget: AgentBudget,
    checkpoint_every_ms: u64,
    request: Option<KeyedRequest>,
}

/// The agents and Bodies that earlier repetitions of a request created.
#[derive(Debug, Default)]
pub struct EarlierResult {
    /// The agents.
    pub agents: Vec<AgentRecord>,
    /// The Bodies that have no agent yet.
    bodies: Vec<BodyId>,
}

/// A Body for a new agent, and the directory in it.
type AgentBody = (BodyId, Option<String>);

impl NewAgent {
    /// Checks the request of a caller.
    pub async fn check(
        self,
        app: &App,
        caller: &Caller,
        request: Option<KeyedRequest>,
    ) -> Result<AgentCreation, Failure> {
        check_text("task", &self.task)?;
        let count = self.count.unwrap_or(1);
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(Failure::new(Kind::Usage, format!("cannot create {count} agents in one request"))
                .hint(format!("ask for 1 to {COUNT_MAX}")));
        }
        let checkpoint_every_ms = self.checkpoint_every_ms.unwrap_or(0);
        if checkpoint_every_ms > CHECKPOINT_MS_MAX {
            return Err(Failure::new(Kind::Usage, "`checkpoint_every_ms` is out of range")
                .hint(format!("at most {CHECKPOINT_MS_MAX} ms")));
        }
        for (field, name) in [("role", &self.role), ("plan", &self.plan)] {
            name.as_deref().map_or(Ok(()), |name| check_file_name(field, name))?;
        }
        let budget = self.budget.unwrap_or_default().over(&AgentBudget::default())?;
        let host = app.agents().host();
        let model = check_model(host.settings(), caller, self.model.as_deref())?;
        // A file of the operator with an error is not the caller's fault.
        let named = host.check_names(self.role.as_deref(), self.plan.as_deref());
        named.map_err(|failure| match failure.kind {
            Kind::NotFound => failure,
            _ => Failure { kind: Kind::Host, ..failure },
        })?;
        let mark = request.as_ref().map(KeyedRequest::mark);
        let place = place(app, caller, (self.body, self.create, self.up), count, mark).await?;
        Ok(AgentCreation {
            caller: caller.clone(),
            place,
            count,
            task: self.task,
            model,
            role: self.role,
            plan: self.plan,
            approve: self.approve,
            budget,
            checkpoint_every_ms,
            request,
        })
    }
}

/// Checks a text that an agent gets.
pub fn check_text(field: &str, text: &str) -> Result<(), Failure> {
    if text.trim().is_empty() {
        return Err(Failure::new(Kind::Usage, format!("`{field}` is empty")).hint("write some text"));
    }
    if text.chars().count() > TEXT_LEN_MAX {
        return Err(Failure::new(Kind::Usage, format!("`{field}` is longer than {TEXT_LEN_MAX} characters"))
            .hint("put long text into a file of the Body: PUT /v1/bodies/{id}/files"));
    }
    Ok(())
}

/// Checks the name of a role or a plan: it becomes the name of a file.
fn check_file_name(field: &str, name: &str) -> Result<(), Failure> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_name = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| plain(byte) || b"-_".contains(&byte))
        && name.bytes().next().is_some_and(plain);
    if is_name {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, format!("`{field}` is no name"))
        .hint("names are 1 to 64 of a-z, 0-9, `-` and `_`"))
}

/// The place that a request names.
async fn place(
    app: &App,
    caller: &Caller,
    named: (Option<String>, Option<NewBody>, Option<UpBody>),
    count: u32,
    mark: Option<String>,
) -> Result<BodyChoice, Failure> {
    match named {
        (Some(_), None, None) if count > 1 => {
            Err(Failure::new(Kind::Usage, "several agents of one request need a Body each")
                .hint("leave `body` out, or create one agent and fork it: POST /v1/agents/{agent}/fork"))
        }
        (Some(name), None, None) => {
            let id = find_body(app, caller, &name).await?;
            owned(app, caller, &id).await?;
            Ok(BodyChoice::Body(id))
        }
        (None, None, Some(up)) => repositories(app, caller, up, count),
        (None, create, None) => new_bodies(app, caller, create.unwrap_or_default(), count, mark).await,
        _ => Err(Failure::new(Kind::Usage, "`body`, `create` and `up` exclude each other")
            .hint("name one of them, or none")),
    }
}

fn repositories(app: &App, caller: &Caller, up: UpBody, count: u32) -> Result<BodyChoice, Failure> {
    if caller.scope < Scope::Admin {
        return Err(Failure::new(Kind::Denied, "only a key of scope admin may name repositories")
            .hint("make one that may: pal keys create --scope admin NAME"));
    }
    if up.count.is_some() {
        return Err(
            Failure::new(Kind::Usage, "`up` cannot have a `count` here").hint("write `count` beside `up`")
        );
    }
    let request = UpRequest { count, ..up.into_request(app, caller)? };
    Ok(BodyChoice::Repositories(Box::new(request)))
}

async fn new_bodies(
    app: &App,
    caller: &Caller,
    wanted: NewBody,
    count: u32,
    mark: Option<String>,
) -> Result<BodyChoice, Failure> {
    if wanted.name.is_some() && count > 1 {
        return Err(Failure::new(Kind::Usage, "several Bodies cannot have one name")
            .hint("leave `name` out, or ask for one agent"));
    }
    let create = wanted.into_create(app, caller, mark)?;
    if let Some(layer) = create.layer {
        // A client cannot set up the layer, but may choose another one.
        let ready = app.fleet().creator().readiness(layer);
        ready.map_err(|failure| Failure { kind: Kind::Conflict, ..failure })?;
    }
    let (asking, template) = (caller.clone(), create.template.clone());
    app.blocking(async move |fleet: &Fleet| authz::usable(fleet, &asking, &template)).await?;
    Ok(BodyChoice::NewBodies(Box::new(create)))
}

impl AgentCreation {
    /// Finds what earlier repetitions of the request created. The caller holds the slot of the request.
    pub fn find_earlier(&self, app: &App, fleet: &Fleet) -> Result<EarlierResult, Failure> {
        let Some(request) = &self.request else { return Ok(EarlierResult::default()) };
        let service = app.agents();
        let mut agents = Vec::new();
        let mut used = BTreeSet::new();
        for record in service.agents().list()? {
            let origin = RequestOrigin::of(&record).filter(|_| record.forked_from.is_none());
            if request.is_marked(origin.and_then(|origin| origin.request).as_deref())? {
                used.extend(service.body_of(fleet, &record.spec.id)?);
                agents.push(record);
            }
        }
        let mut bodies = request.made_bodies(fleet)?;
        bodies.retain(|body| !used.contains(body));
        bodies.truncate((self.count as usize).saturating_sub(agents.len()));
        Ok(EarlierResult { agents, bodies })
    }

    /// Whether the agents exist.
    pub fn is_complete(&self, earlier: &EarlierResult) -> bool {
        earlier.agents.len() >= self.count as usize
    }

    /// How many Bodies are still to be created.
    fn missing(&self, earlier: &EarlierResult) -> u32 {
        let made = earlier.agents.len() + earlier.bodies.len();
        self.count.saturating_sub(u32::try_from(made).unwrap_or(u32::MAX))
    }

    /// Admits the missing agents and Bodies, or refuses them with the reason.
    pub async fn admit(&self, app: &App, earlier: &EarlierResult) -> Result<Option<CreatePermit>, Failure> {
        let count = self.count as usize - earlier.agents.len().min(self.count as usize);
        limits::admit_agents(app, &self.caller, count).await?;
        let missing = self.missing(earlier);
        match &self.place {
            BodyChoice::Body(_) => Ok(None),
            _ if missing == 0 => Ok(None),
            BodyChoice::NewBodies(create) => {
                limits::admit_many(app, &self.caller, create, missing).await.map(Some)
            }
            BodyChoice::Repositories(up) => {
                limits::admit_many(app, &self.caller, &up.create, missing).await.map(Some)
            }
        }
    }

    /// Creates the missing Bodies and agents; returns all agents of the request.
    pub async fn carry_out(
        self,
        app: &App,
        fleet: &Fleet,
        earlier: EarlierResult,
        admitted: Option<CreatePermit>,
        report: Report<'_>,
    ) -> Result<Vec<AgentRecord>, Failure> {
        let bodies = self.make_bodies(app, fleet, &earlier, report).await?;
        drop(admitted);
        let mut records = earlier.agents;
        let group = match records.first() {
            Some(first) => first.spec.group.clone(),
            None if self.count > 1 => Some(Agents::new_id()?.to_string()),
            None => None,
        };
        for body in &bodies {
            let spec = self.spec(body, group.clone())?;
            // A repetition that finds all agents starts no driver: the server that starts after a kill does.
            app.agents().write_mark(&spec.id)?;
            records.push(app.agents().agents().create(spec, None, &body.0, Some(self.task.clone()))?);
        }
        Ok(records)
    }

    async fn make_bodies(
        &self,
        app: &App,
        fleet: &Fleet,
        earlier: &EarlierResult,
        report: Report<'_>,
    ) -> Result<Vec<AgentBody>, Failure> {
        let place = |view: &fleet::BodyView| (view.id().clone(), view.spec.workdir.clone());
        let missing = self.missing(earlier);
        let mut bodies = Vec::new();
        for id in &earlier.bodies {
            bodies.push(place(&fleet.view(id)?));
        }
        match &self.place {
            BodyChoice::Body(id) => bodies.push(place(&fleet.view(id)?)),
            BodyChoice::Repositories(up) if missing > 0 => {
                let mut say = |line: ProgressLine<'_>| report(&line.to_string());
                let request = UpRequest { count: missing, ..(**up).clone() };
                let views = fleet.workspaces().up_with_progress(request, &mut say).await?;
                bodies.extend(views.iter().map(place));
            }
            BodyChoice::NewBodies(create) => {
                let views = make_all(fleet, create, missing).await?;
                for view in &views {
                    if let Some(lease) = fleet.leases().get(view.id())? {
                        app.timer().note(view.id(), &lease);
                    }
                }
                bodies.extend(views.iter().map(place));
            }
            BodyChoice::Repositories(_) => {}
        }
        Ok(bodies)
    }

    fn spec(&self, body: &AgentBody, group: Option<String>) -> Result<AgentSpec, Failure> {
        let settings =
            AgentSettings { checkpoint_every_ms: self.checkpoint_every_ms, ..AgentSettings::default() };
        let mut settings = serde_json::to_value(settings).map_err(|error| {
            Failure::new(Kind::Internal, "the settings of the agent cannot be written").because(error)
        })?;
        let request = self.request.as_ref().map(KeyedRequest::mark);
        RequestOrigin { owner: self.caller.key.clone(), request }.write_to(&mut settings);
        Ok(AgentSpec {
            id: Agents::new_id()?,
            model: self.model.clone(),
            title: self.task.lines().next().unwrap_or_default().chars().take(TITLE_LEN_MAX).collect(),
            role: self.role.clone(),
            plan: self.plan.clone(),
            mode: self.approve.into(),
            budget: self.budget.clone(),
            parent: None,
            workdir: body.1.clone(),
            repository: None,
            group,
            settings,
        })
    }
}

/// Creates several Bodies, or none.
async fn make_all(fleet: &Fleet, create: &Create, count: u32) -> Result<Vec<fleet::BodyView>, Failure> {
    let mut views: Vec<fleet::BodyView> = Vec::new();
    for _ in 0..count {
        let made = match with_own_token(create) {
            Ok(create) => fleet.create(create).await,
            Err(failure) => Err(failure),
        };
        match made {
            Ok(view) => views.push(view),
            Err(failure) => {
                for view in &views {
                    let _ = fleet.remove(view.id(), Force::Yes).await;
                }
                return Err(failure);
            }
        }
    }
    Ok(views)
}

/// The request with a token of its own for the ports, if it has one.
fn with_own_token(create: &Create) -> Result<Create, Failure> {
    let mut create = create.clone();
    if let Some(token) = create.lease.as_mut().and_then(|lease| lease.traffic_token.as_mut()) {
        *token = fleet::lease::new_traffic_token()?;
    }
    Ok(create)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_roles_are_names_of_files() {
        let long = "x".repeat(64);
        for good in ["tester", "fix-bug", "a_1", "0", &long] {
            assert!(check_file_name("role", good).is_ok(), "{good}");
        }
        let longer = "x".repeat(65);
        for bad in ["", "../tester", "a/b", "Tester", "-a", ".", "a.md", "ž", "a\0", &longer] {
            assert_eq!(check_file_name("role", bad).unwrap_err().kind, Kind::Usage, "{bad:?}");
        }
    }

    #[test]
    fn texts_have_bounds() {
        assert!(check_text("task", "x").is_ok());
        assert!(check_text("task", &"ž".repeat(TEXT_LEN_MAX)).is_ok());
        for bad in ["", " \n", &"x".repeat(TEXT_LEN_MAX + 1)] {
            assert_eq!(check_text("task", bad).unwrap_err().kind, Kind::Usage);
        }
    }
}
