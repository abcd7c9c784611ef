//! An agent without a Body: a journal in memory that can fail at a chosen append, and tools that count their effects.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use brain::{
    agent::{
        AgentDriver, AgentJournal, AgentTool, AgentView, BoxFuture, CallContext, CallPlan, CallResult,
        DriveEnd, DriveError, DriverParts, JournalError, Middleware, NullSink, ToolRegistry,
        middleware::{AgentFiles, BudgetLimit, ModeRules, StuckDetector},
    },
    model::{
        AnswerFuture, Model, ModelAddress, ModelCatalog, ModelProgress, ModelRequest, ToolSchema,
        retry::RetryPolicy,
        scripted::{Script, ScriptedModel},
    },
};
use proto::{
    AgentId, ChainHead, ChainId, Draft, Event,
    event_data::{AgentCreated, AgentSpec, ApprovalMode, EventData, MessageReceived, MessageSource},
};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

/// The events of one agent in memory.
#[derive(Default)]
pub struct MemoryJournal {
    events: Mutex<Vec<Event>>,
    artifacts: Mutex<BTreeMap<String, Vec<u8>>>,
    /// How many events the driver has seen.
    seen: Mutex<usize>,
    /// After this many events the journal fails, as if the driver were killed.
    pub events_max: Mutex<usize>,
    changed: Notify,
}

pub fn agent() -> AgentId {
    "agent1".parse().unwrap()
}

impl MemoryJournal {
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// Appends as a person does, from another process.
    pub fn put(&self, data: impl Into<EventData>) {
        self.store(vec![Draft::of_agent(&agent(), data)]);
        self.changed.notify_waiters();
    }

    fn store(&self, drafts: Vec<Draft>) {
        let mut events = self.events.lock().unwrap();
        for draft in drafts {
            let head = events.last().map_or_else(ChainHead::genesis, Event::head);
            let at = "2026-01-01T00:00:00.000000Z".to_owned();
            events.push(Event::place(draft, ChainId::Agent(agent()), &head, at));
        }
    }

    fn unseen(&self) -> Vec<Event> {
        let events = self.events.lock().unwrap();
        let mut seen = self.seen.lock().unwrap();
        let new = events[*seen..].to_vec();
        *seen = events.len();
        new
    }

    /// All events, for a new driver that has now seen them.
    pub fn open(&self) -> Vec<Event> {
        *self.seen.lock().unwrap() = 0;
        self.unseen()
    }
}

impl AgentJournal for MemoryJournal {
    fn append(&self, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Event>, JournalError>> {
        Box::pin(async move {
            let room = *self.events_max.lock().unwrap();
            if self.events.lock().unwrap().len() + drafts.len() > room {
                return Err(JournalError::Store("killed".into()));
            }
            self.store(drafts);
            Ok(self.unseen())
        })
    }

    fn follow(&self, wait: Duration) -> BoxFuture<'_, Result<Vec<Event>, JournalError>> {
        Box::pin(async move {
            let changed = self.changed.notified();
            let new = self.unseen();
            if !new.is_empty() {
                return Ok(new);
            }
            let _ = tokio::time::timeout(wait, changed).await;
            Ok(self.unseen())
        })
    }

    fn put_artifact(&self, bytes: Vec<u8>) -> BoxFuture<'_, Result<String, JournalError>> {
        Box::pin(async move {
            let name = format!("{:x}", bytes.len());
            self.artifacts.lock().unwrap().insert(name.clone(), bytes);
            Ok(name)
        })
    }

    fn get_artifact<'a>(&'a self, sha256: &'a str, len: u64) -> BoxFuture<'a, Result<Vec<u8>, JournalError>> {
        Box::pin(async move {
            let bytes = self.artifacts.lock().unwrap().get(sha256).cloned().unwrap_or_default();
            assert_eq!(bytes.len() as u64, len);
            Ok(bytes)
        })
    }
}

/// The effects of calls, by their keys: what a Body's ledger knows after a crash.
pub type Ledger = Arc<Mutex<BTreeMap<String, u32>>>;

/// A tool that counts how often each key took effect.
pub struct CountingTool {
    pub name: &'static str,
    pub ledger: Ledger,
    pub plan: fn(&Map<String, Value>) -> CallPlan,
    pub result: fn(&Map<String, Value>) -> CallResult,
}

impl AgentTool for CountingTool {
    fn schema(&self) -> ToolSchema {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSchema { name: self.name.into(), description: "counts".into(), parameters }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        Ok((self.plan)(arguments))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            *self.ledger.lock().unwrap().entry(context.key).or_default() += 1;
            (self.result)(&context.arguments)
        })
    }

    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move {
            let ran = self.ledger.lock().unwrap().contains_key(&context.key);
            // The ledger decides: a call that never reached the tool runs now.
            Some(if ran { (self.result)(&context.arguments) } else { self.run(context).await })
        })
    }
}

/// A model that keeps the requests it got.
pub struct RecordingModel {
    pub inner: Arc<dyn Model>,
    pub requests: Arc<Mutex<Vec<ModelRequest>>>,
}

impl Model for RecordingModel {
    fn address(&self) -> &ModelAddress {
        self.inner.address()
    }

    fn answer<'a>(
        &'a self,
        request: &'a ModelRequest,
        progress: &'a (dyn Fn(ModelProgress) + Send + Sync),
    ) -> AnswerFuture<'a> {
        self.requests.lock().unwrap().push(request.clone());
        self.inner.answer(request, progress)
    }
}

/// Files of an agent in memory.
#[derive(Default)]
pub struct MemoryFiles(pub Mutex<BTreeMap<String, String>>);

impl AgentFiles for MemoryFiles {
    fn write<'a>(&'a self, path: &'a str, text: &'a str) -> BoxFuture<'a, Result<(), String>> {
        self.0.lock().unwrap().insert(path.into(), text.into());
        Box::pin(async { Ok(()) })
    }

    fn read<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<Option<String>, String>> {
        let found = self.0.lock().unwrap().get(path).cloned();
        Box::pin(async { Ok(found) })
    }

    fn list<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<String>, String>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// Adds to the parts of a driver, for an agent with this view.
pub type Extension = Box<dyn Fn(&mut DriverParts, &AgentView) + Send + Sync>;

/// An agent with a script, the counting tools and the usual middleware.
pub struct World {
    pub journal: Arc<MemoryJournal>,
    pub ledger: Ledger,
    /// The requests to the model, of all drivers.
    pub requests: Arc<Mutex<Vec<ModelRequest>>>,
    pub extension: Option<Extension>,
    script: String,
    mode: ApprovalMode,
}

impl World {
    pub fn new(script: &str, mode: ApprovalMode) -> Self {
        Self::with_plan(script, mode, None)
    }

    /// An agent that follows a plan from the beginning.
    pub fn with_plan(script: &str, mode: ApprovalMode, plan: Option<&str>) -> Self {
        let world = Self {
            journal: Arc::new(MemoryJournal { events_max: Mutex::new(usize::MAX), ..Default::default() }),
            ledger: Ledger::default(),
            requests: Arc::default(),
            extension: None,
            script: script.to_owned(),
            mode,
        };
        let spec = AgentSpec {
            id: agent(),
            model: "script:test".into(),
            title: "task".into(),
            role: None,
            plan: plan.map(str::to_owned),
            mode: world.mode.clone(),
            budget: Default::default(),
            parent: None,
            workdir: None,
            repository: None,
            group: None,
            settings: serde_json::Value::Null,
        };
        world.journal.put(AgentCreated { spec, forked_from: None });
        world.say("do it");
        world
    }

    pub fn say(&self, text: &str) {
        self.journal.put(MessageReceived { from: MessageSource::User, text: text.to_owned() });
    }

    fn parts(&self) -> DriverParts {
        let mut tools = ToolRegistry::default();
        let counting =
            |name, plan, result| CountingTool { name, ledger: Arc::clone(&self.ledger), plan, result };
        tools.add(Arc::new(counting("look", |_| CallPlan::reading("test"), |_| CallResult::text("seen"))));
        tools.add(Arc::new(counting(
            "work",
            |arguments| {
                let path = arguments.get("path").and_then(Value::as_str).map(str::to_owned);
                CallPlan { writes: path.into_iter().collect(), ..CallPlan::working("test") }
            },
            |_| CallResult::text("worked"),
        )));
        tools.add(Arc::new(counting("fail", |_| CallPlan::working("test"), |_| CallResult::error("no"))));
        let middleware: Vec<Arc<dyn Middleware>> =
            vec![Arc::new(BudgetLimit), Arc::new(StuckDetector), Arc::new(ModeRules)];
        let script = Script::parse(&self.script).expect("the script is valid");
        let model = ScriptedModel::new(script, PathBuf::from("test"), RetryPolicy::default());
        DriverParts {
            agent: agent(),
            journal: Arc::clone(&self.journal) as Arc<dyn AgentJournal>,
            model: Arc::new(RecordingModel { inner: Arc::new(model), requests: Arc::clone(&self.requests) }),
            catalog: Arc::new(ModelCatalog::default()),
            tools,
            middleware,
            system: vec!["be good".into()],
            live: Arc::new(NullSink),
        }
    }

    /// Drives the agent until it waits, has finished, or its journal fails.
    pub async fn drive(&self) -> Result<DriveEnd, DriveError> {
        let mut parts = self.parts();
        if let Some(extension) = &self.extension {
            extension(&mut parts, &self.view().await);
        }
        let events = self.journal.open();
        AgentDriver::take_over(parts, events, 1).await?.drive().await
    }

    pub async fn view(&self) -> AgentView {
        let mut resolved = Vec::new();
        for event in self.journal.events() {
            resolved.push(brain::agent::resolve(self.journal.as_ref(), event).await.unwrap());
        }
        AgentView::of(&resolved)
    }
}
