//! One agent of a test: a Body, a script as its model, and the host that drives it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use bridge::{AgentHost, AgentRecord, AgentView, Agents, DriveEnd, HostSettings, LiveSink, LiveUpdate};
use fleet::Fleet;
use proto::{
    AgentId, BodyId, Event, Failure,
    event_data::{AgentBudget, AgentSpec, ApprovalMode, EventKind},
};
use testkit::{Bodies, explain};

use crate::repo::person;

/// The agents of a test. Their driver is another process than the test's own fleet would be.
pub struct World {
    pub host: AgentHost,
    script: PathBuf,
}

/// A watcher that sees nothing.
pub struct NoWatcher;

impl LiveSink for NoWatcher {
    fn update(&self, _: LiveUpdate) {}
}

/// Drives the agents of a test's directory.
pub fn host(dir: &Path, fleet: Arc<Fleet>) -> AgentHost {
    let settings =
        HostSettings { config: dir.join("config"), variables: Arc::new(|_| None), person: person() };
    AgentHost::new(Agents::new(fleet), settings)
}

impl World {
    /// Agents whose model answers from a script.
    pub fn new(t: &Bodies, script: &str) -> Self {
        std::fs::create_dir_all(t.dir().join("config")).unwrap();
        let file = t.dir().join("script.toml");
        std::fs::write(&file, script).unwrap();
        Self { host: host(t.dir(), Arc::new(t.second())), script: file }
    }

    /// Writes a file of the configuration directory.
    pub fn configure(&self, name: &str, text: &str) {
        std::fs::write(self.host.settings().config.join(name), text).unwrap();
    }

    pub fn agents(&self) -> &Agents {
        self.host.agents()
    }

    pub fn fleet(&self) -> &Arc<Fleet> {
        self.agents().fleet()
    }

    /// Creates an agent in a Body, with a task.
    pub fn agent(&self, body: &BodyId, budget: AgentBudget) -> AgentId {
        self.agent_in_mode(body, budget, ApprovalMode::Auto)
    }

    /// Creates an agent that needs approvals as a mode says.
    pub fn agent_in_mode(&self, body: &BodyId, budget: AgentBudget, mode: ApprovalMode) -> AgentId {
        let spec = AgentSpec {
            id: Agents::new_id().unwrap(),
            model: format!("script:{}", self.script.display()),
            title: "a task".into(),
            role: None,
            plan: None,
            mode,
            budget,
            parent: None,
            workdir: None,
            repository: None,
            group: None,
            settings: serde_json::json!({ "checkpoint_every_ms": 1 }),
        };
        let record = self.agents().create(spec, None, body, Some("do it".into()));
        record.unwrap_or_else(|failure| panic!("{}", explain(&failure))).spec.id
    }

    /// Drives an agent until it waits or has finished.
    pub async fn drive(&self, id: &AgentId) -> DriveEnd {
        let end = self.try_drive(id).await;
        end.unwrap_or_else(|failure| panic!("{}", explain(&failure))).expect("no other process drives it")
    }

    pub async fn try_drive(&self, id: &AgentId) -> Result<Option<DriveEnd>, Failure> {
        self.host.drive(id, Arc::new(NoWatcher)).await
    }

    /// Creates an agent and drives it to its end; panics if it does not finish.
    pub async fn finish(&self, body: &BodyId) -> AgentId {
        let id = self.agent(body, AgentBudget::default());
        let end = self.drive(&id).await;
        assert_eq!(end, DriveEnd::Finished, "{:#?}", self.view(&id).await.messages);
        id
    }

    pub async fn view(&self, id: &AgentId) -> AgentView {
        let loaded = self.agents().load(id).await;
        loaded.unwrap_or_else(|failure| panic!("{}", explain(&failure))).view
    }

    pub fn children(&self, id: &AgentId) -> Vec<AgentRecord> {
        self.agents().children(id).unwrap()
    }

    /// The data of all events of a kind in an agent's chain.
    pub fn events_of<T: EventKind>(&self, id: &AgentId) -> Vec<T> {
        let record = self.agents().get(id).unwrap();
        let events = self.agents().effective_events(&record).unwrap();
        events.iter().filter_map(Event::data_as::<T>).collect()
    }

    /// The text of an agent's whole conversation, as JSON.
    pub async fn conversation(&self, id: &AgentId) -> String {
        serde_json::to_string(&self.view(id).await.messages).unwrap()
    }

    /// Whether a Body exists.
    pub fn exists(&self, body: &BodyId) -> bool {
        self.fleet().view(body).is_ok()
    }

    /// The ids of all Bodies.
    pub fn bodies(&self) -> Vec<BodyId> {
        self.fleet().list().unwrap().iter().map(|view| view.id().clone()).collect()
    }
}
