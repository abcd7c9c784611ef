//! Drives agents on this host: opens the model, assembles tools and middleware, and runs the driver.
//!
//! Invariant: keys of models stay in this process. They go into requests to the model's endpoint and nowhere else, and
//! the results of tools are searched for them before they are recorded.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use brain::{
    agent::{
        AgentDriver, AgentStatus, AgentView, BoxFuture, DriveEnd, DriverParts, LiveSink, Middleware,
        NullSink,
        middleware::{BudgetLimit, CallRules, Hooks, MessageEviction, Planning, StuckDetector, Summarizer},
    },
    model::{self, ApiKey, HttpOptions, Model, ModelAddress, ModelCatalog},
};
use fleet::{GitIdentity, Status};
use proto::{
    AgentId, BodyId, EventData, Failure, Kind,
    event_data::{AgentPause, AgentPaused, AgentSpec},
};
use serde::{Deserialize, Serialize};

use crate::{
    AgentRecord, Agents, FleetJournal, LiveSocket, LoadedAgent,
    assembly::ARTIFACTS_DIR,
    checkpoints::BodyCheckpoints,
    commands::AgentCommands,
    mcp::{self, McpConfig},
    scripts::open_script,
    subagent_settings::SubagentSettings,
    subagents::{Lineage, SubagentDriver},
    user_library::read_rules,
};

/// Looks up a variable of the environment.
pub type VariableLookup = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// The settings of a host that agents do not change.
#[derive(Clone)]
pub struct HostSettings {
    /// The user's configuration directory: `models.toml`, `rules.toml`, `roles/`, `plans/`, `skills/`, `AGENTS.md`.
    pub config: PathBuf,
    /// The environment, for the keys of models.
    pub variables: VariableLookup,
    /// The identity and settings of the user's git.
    pub person: GitIdentity,
}

/// The settings of one agent that no event of its own kind has.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentSettings {
    /// Directories of skills on the host, beside those of the user.
    pub skills: Vec<PathBuf>,
    /// The least time between two checkpoints of the Body; 0 for as often as they take a small share of the time.
    pub checkpoint_every_ms: u64,
    /// The settings of a sub-agent; none for an agent that a person started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subagent: Option<SubagentSettings>,
}

impl AgentSettings {
    /// The settings that a spec holds.
    pub fn of(spec: &AgentSpec) -> Self {
        serde_json::from_value(spec.settings.clone()).unwrap_or_default()
    }

    /// Whether another agent started the agent.
    pub fn is_subagent(&self) -> bool {
        self.subagent.is_some()
    }
}

/// Drives the agents of one data directory.
#[derive(Clone)]
pub struct AgentHost {
    agents: Agents,
    settings: Arc<HostSettings>,
}

impl AgentHost {
    /// Drives these agents with these settings.
    pub fn new(agents: Agents, settings: HostSettings) -> Self {
        Self { agents, settings: Arc::new(settings) }
    }

    /// The agents.
    pub fn agents(&self) -> &Agents {
        &self.agents
    }

    /// The settings.
    pub fn settings(&self) -> &HostSettings {
        &self.settings
    }

    /// Drives an agent until it waits or has finished; `None` if another process drives it.
    pub async fn drive(&self, id: &AgentId, live: Arc<dyn LiveSink>) -> Result<Option<DriveEnd>, Failure> {
        self.drive_in(id, Lineage::root(), live).await
    }

    async fn drive_in(
        &self,
        id: &AgentId,
        lineage: Lineage,
        live: Arc<dyn LiveSink>,
    ) -> Result<Option<DriveEnd>, Failure> {
        loop {
            let (agents, agent) = (self.agents.clone(), id.clone());
            let locked = tokio::task::spawn_blocking(move || agents.lock(&agent)).await;
            let Some(lock) = locked.map_err(|_| interrupted())?? else { return Ok(None) };
            let end = match self.drive_once(id, &lineage, &live).await {
                Ok(end) => end,
                Err(failure) => self.pause(id, failure)?,
            };
            self.agents.settle_children(id).await?;
            if matches!(&end, DriveEnd::Paused { reason: AgentPause::Interrupted, .. }) {
                // A Body that does not answer has its own end; the agent is interrupted in any case.
                let _ = self.end_interrupted(id).await;
            }
            drop(lock);
            // An input that came while the driver ended found the lock taken: its sender relies on this driver.
            if self.agents.load(id).await?.view.status() != AgentStatus::Working {
                return Ok(Some(end));
            }
        }
    }

    async fn drive_once(
        &self,
        id: &AgentId,
        lineage: &Lineage,
        live: &Arc<dyn LiveSink>,
    ) -> Result<DriveEnd, Failure> {
        self.agents.settle_children(id).await?;
        let LoadedAgent { record, events, view } = self.agents.load(id).await?;
        let journal = FleetJournal::after(Arc::clone(self.agents.fleet()), id, &events);
        let body = view.body.clone().ok_or_else(|| {
            Failure::new(Kind::Internal, format!("agent {id} has no Body")).hint("see it: pal agent show")
        })?;
        self.start_body(&body).await?;
        let parts = self.assemble(&record, &view, &body, journal, lineage, live).await?;
        let mut driver =
            AgentDriver::take_over(parts, events, std::process::id()).await.map_err(|error| {
                Failure::new(Kind::Conflict, format!("cannot drive agent {id}")).because(error)
            })?;
        driver.drive().await.map_err(|error| {
            Failure::new(Kind::Conflict, format!("the driver of agent {id} cannot go on")).because(error)
        })
    }

    async fn assemble(
        &self,
        record: &AgentRecord,
        view: &AgentView,
        body: &BodyId,
        journal: FleetJournal,
        lineage: &Lineage,
        live: &Arc<dyn LiveSink>,
    ) -> Result<DriverParts, Failure> {
        let spec = &record.spec;
        let config = &self.settings.config;
        let catalog = catalog(config)?;
        let opened = self.open_model(&catalog, &spec.model)?;
        let mut kit = self.make_kit(record, body, live).await?;
        let servers = McpConfig::read(config)?;
        let workdir = Some(kit.place.workplace.workdir());
        let variables = &self.settings.variables;
        for tool in mcp::connect(&servers, self.agents.fleet(), body, workdir, variables).await? {
            kit.tools.add(tool);
        }
        if let Some(task) = self.subagents(spec, &kit.library, lineage, live).tool() {
            kit.tools.add(task);
        }
        let commands = Arc::new(AgentCommands::new(Arc::clone(&kit.place.workplace)));
        let planning = Planning::new(kit.library.plans().cloned(), Arc::clone(&commands) as _, view);
        for tool in planning.tools() {
            kit.tools.add(tool);
        }
        if let Some(role) = &kit.role {
            kit.tools.retain(|name| role.allows_tool(name));
        }
        let system = self.make_prompt(spec, &kit).await?;
        let window = catalog.facts(opened.model.address()).and_then(|facts| facts.context_tokens);
        let files = Arc::clone(&kit.place.files);
        let history = format!("{ARTIFACTS_DIR}/conversation_history");
        let file = format!("{history}/{}.md", spec.id);
        let summarizer =
            Arc::new(Summarizer::new(Arc::clone(&opened.model), Arc::clone(&files) as _, window, file));
        let hooks =
            Hooks::new(self.read_hooks()?, commands, spec).before_summaries_of(Arc::clone(&summarizer));
        let [mask, result_eviction] = self.refiners(opened.secrets, &kit.place);
        // The module `middleware` of the Brain says why they are in this order.
        let middleware: Vec<Arc<dyn Middleware>> = vec![
            mask,
            Arc::new(BudgetLimit),
            lineage.budget(),
            Arc::new(StuckDetector),
            planning,
            Arc::new(CallRules::new(read_rules(config)?)),
            Arc::new(hooks),
            Arc::new(MessageEviction::new(files, history)),
            summarizer,
            Arc::clone(&kit.router) as _,
            result_eviction,
            Arc::new(BodyCheckpoints::new(Arc::clone(self.agents.fleet()), AgentSettings::of(spec))),
        ];
        Ok(DriverParts {
            agent: spec.id.clone(),
            journal: Arc::new(journal),
            model: opened.model,
            catalog: Arc::new(catalog),
            tools: kit.tools,
            middleware,
            system,
            live: Arc::clone(live),
        })
    }

    /// The keys that must not be in the results of an agent's tools.
    pub(crate) fn model_secrets(&self, spec: &AgentSpec) -> Vec<String> {
        let address =
            catalog(&self.settings.config).ok().and_then(|catalog| catalog.resolve(&spec.model).ok());
        let variable = address.as_ref().and_then(key_variable);
        variable.and_then(|name| (self.settings.variables)(name)).into_iter().collect()
    }

    /// Opens a model by its address or alias.
    fn open_model(&self, catalog: &ModelCatalog, text: &str) -> Result<OpenedModel, Failure> {
        let address = catalog.resolve(text).map_err(|error| {
            Failure::new(Kind::Usage, error.to_string()).hint("see docs/reference/models.md")
        })?;
        if let ModelAddress::Script { file } = &address
            && file.is_relative()
        {
            let model = open_script(&self.settings.config, file)?;
            return Ok(OpenedModel { model, secrets: Vec::new() });
        }
        let key = key_variable(&address).and_then(|name| (self.settings.variables)(name));
        let secrets = key.iter().cloned().collect();
        let opened = model::open(&address, key.map(ApiKey::new), HttpOptions::default());
        let model = opened.map_err(|error| {
            let failure = Failure::new(Kind::Usage, error.to_string());
            match key_variable(&address) {
                Some(name) => failure.hint(format!("set the key: export {name}=…, then: pal agent resume")),
                None => failure,
            }
        })?;
        Ok(OpenedModel { model, secrets })
    }

    async fn start_body(&self, body: &BodyId) -> Result<(), Failure> {
        let fleet = self.agents.fleet();
        if fleet.find(body.as_str())?.status != Status::Running {
            fleet.start(body).await?;
        }
        Ok(())
    }

    /// Records why an agent could not be driven.
    fn pause(&self, id: &AgentId, failure: Failure) -> Result<DriveEnd, Failure> {
        let reason = if failure.kind == Kind::Usage { AgentPause::Model } else { AgentPause::Body };
        let hint =
            failure.hints.first().map(String::as_str).map(|hint| format!(" ({hint})")).unwrap_or_default();
        let why = format!("{failure}{hint}");
        self.agents.note(id, [EventData::from(AgentPaused { reason: reason.clone(), why: why.clone() })])?;
        Ok(DriveEnd::Paused { reason, why })
    }
}

impl SubagentDriver for AgentHost {
    fn drive_subagent<'a>(
        &'a self,
        id: &'a AgentId,
        lineage: Lineage,
    ) -> BoxFuture<'a, Result<Option<DriveEnd>, Failure>> {
        Box::pin(async move {
            let live: Arc<dyn LiveSink> = match LiveSocket::listen(&self.agents.directory(id)) {
                Ok(live) => live,
                Err(_) => Arc::new(NullSink),
            };
            self.drive_in(id, lineage, live).await
        })
    }
}

struct OpenedModel {
    model: Arc<dyn Model>,
    secrets: Vec<String>,
}

fn interrupted() -> Failure {
    Failure::new(Kind::Internal, "a thread of the driver ended early")
}

/// The variable that holds the key for an address.
pub fn key_variable(address: &ModelAddress) -> Option<&'static str> {
    match address.wire() {
        model::Wire::Anthropic => Some("ANTHROPIC_API_KEY"),
        model::Wire::Chat | model::Wire::Responses => Some("OPENAI_API_KEY"),
        model::Wire::Script => None,
    }
}

/// Reads the names and prices of models from the user's configuration.
pub fn catalog(config: &Path) -> Result<ModelCatalog, Failure> {
    let path = config.join("models.toml");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(ModelCatalog::default()),
        Err(error) => return Err(Failure::new(Kind::Usage, "cannot read models.toml").because(error)),
    };
    let catalog: ModelCatalog = toml::from_str(&text).map_err(|error| {
        Failure::new(Kind::Usage, format!("models.toml has an error: {}", error.message()))
            .hint("see docs/reference/models.md")
    })?;
    match catalog.find_fault() {
        Some(fault) => Err(Failure::new(Kind::Usage, format!("models.toml: {fault}"))),
        None => Ok(catalog),
    }
}
