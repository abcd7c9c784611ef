//! An agent without a model: the test makes the calls.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use brain::agent::{CallContext, CallResult, LiveSink, LiveUpdate, NullSink, ToolRegistry};
use bridge::{
    AgentRecord, Agents, Workplace,
    files::{BodyBackend, CompositeFiles, SharedStore, StateFiles},
    tools::registry,
};
use fleet::Fleet;
use proto::{
    AgentId, BodyId, Draft, EventData,
    event_data::{AgentPosition, AgentSpec, ApprovalMode, CallStarted},
};
use serde_json::{Map, Value};
use testkit::Bodies;

/// The directory in which the agents of these tests work.
pub const WORKDIR: &str = "/home/user";

/// An agent, its tools and its Body.
pub struct ToolWorld {
    pub fleet: Arc<Fleet>,
    pub body: BodyId,
    pub record: AgentRecord,
    pub files: Arc<CompositeFiles>,
    pub tools: ToolRegistry,
    calls: AtomicU64,
}

/// Collects the live output of calls.
#[derive(Default)]
pub struct LiveLog(pub Mutex<String>);

impl LiveSink for LiveLog {
    fn update(&self, update: LiveUpdate) {
        if let LiveUpdate::Output { text, .. } = update {
            self.0.lock().unwrap().push_str(&text);
        }
    }
}

impl ToolWorld {
    /// An agent in a new Body.
    pub async fn new(t: &Bodies) -> Self {
        let body = t.create().await;
        Self::in_body(t, body, None, Arc::new(NullSink))
    }

    /// An agent in a Body, possibly forked from another one.
    pub fn in_body(t: &Bodies, body: BodyId, origin: Option<AgentPosition>, live: Arc<dyn LiveSink>) -> Self {
        let fleet = Arc::new(t.second());
        let agents = Agents::new(Arc::clone(&fleet));
        let spec = AgentSpec {
            id: Agents::new_id().unwrap(),
            model: "script:none".into(),
            title: "tools".into(),
            role: None,
            plan: None,
            mode: ApprovalMode::Auto,
            budget: Default::default(),
            parent: None,
            workdir: None,
            repository: None,
            group: None,
            settings: Value::Null,
        };
        let record = agents.create(spec, origin, &body, None).unwrap();
        Self::of_agent(fleet, body, record, live)
    }

    /// The tools of an agent as another driver opens them.
    pub fn reopen(&self, t: &Bodies) -> Self {
        let calls = AtomicU64::new(self.calls.load(Ordering::SeqCst));
        let opened =
            Self::of_agent(Arc::new(t.second()), self.body.clone(), self.record.clone(), Arc::new(NullSink));
        Self { calls, ..opened }
    }

    fn of_agent(fleet: Arc<Fleet>, body: BodyId, record: AgentRecord, live: Arc<dyn LiveSink>) -> Self {
        let agents = Agents::new(Arc::clone(&fleet));
        let place = Workplace::new(Arc::clone(&fleet), record.spec.id.clone(), body.clone(), WORKDIR);
        let place = Arc::new(place);
        let files = CompositeFiles::new(Arc::new(BodyBackend::new(Arc::clone(&place))), WORKDIR)
            .with_route("/memories/", Arc::new(SharedStore::new(Arc::clone(&fleet), None)))
            .with_route("/agent/", Arc::new(StateFiles::open(&agents, &record).unwrap()));
        let files = Arc::new(files);
        let tools = registry(&place, &files, &live);
        Self { fleet, body, record, files, tools, calls: AtomicU64::new(0) }
    }

    pub fn agent(&self) -> &AgentId {
        &self.record.spec.id
    }

    /// Appends events to the agent's chain.
    pub fn note(&self, events: impl IntoIterator<Item = EventData>) {
        let drafts = events
            .into_iter()
            .map(|data| Draft::of_agent(self.agent(), data).in_body(Some(&self.body)))
            .collect::<Vec<_>>();
        if !drafts.is_empty() {
            self.fleet.log().note_to_agent(self.agent(), drafts).unwrap();
        }
    }

    /// Records the start of a call, as the driver does.
    pub fn begin(&self, tool: &str, arguments: Value) -> Result<CallContext, String> {
        let arguments = arguments.as_object().cloned().unwrap_or_else(Map::new);
        let plan = self.tools.plan(tool, &arguments)?;
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let call = format!("call{number}");
        let key = format!("{}-{number}-{call}", self.agent());
        let started = CallStarted {
            call: call.clone(),
            tool: tool.into(),
            arguments: Value::Object(arguments.clone()),
            risk: plan.risk.clone(),
            venue: plan.venue.clone(),
            why: plan.why.clone(),
            key: key.clone(),
        };
        self.note([started.into()]);
        Ok(CallContext {
            agent: self.agent().clone(),
            call,
            tool: tool.into(),
            key,
            body: Some(self.body.clone()),
            plan,
            arguments,
        })
    }

    /// Carries out a call, and appends its events.
    pub async fn call(&self, tool: &str, arguments: Value) -> CallResult {
        let context = match self.begin(tool, arguments) {
            Ok(context) => context,
            Err(text) => return CallResult::error(text),
        };
        self.run(context).await
    }

    pub async fn run(&self, context: CallContext) -> CallResult {
        let tool = self.tools.get(&context.tool).expect("the tool is registered");
        let result = tool.run(context).await;
        self.note(result.events.clone());
        result
    }

    pub async fn recover(&self, context: CallContext) -> Option<CallResult> {
        let tool = self.tools.get(&context.tool).expect("the tool is registered");
        let result = tool.recover(context).await;
        self.note(result.iter().flat_map(|result| result.events.clone()));
        result
    }

    /// The text of a call's result.
    pub async fn text(&self, tool: &str, arguments: Value) -> String {
        text_of(&self.call(tool, arguments).await)
    }

    /// The text of a result that must be an error.
    pub async fn error(&self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments).await;
        assert!(result.is_error(), "{}", text_of(&result));
        text_of(&result)
    }
}

pub fn text_of(result: &CallResult) -> String {
    result.blocks.iter().filter_map(|block| block.as_text()).collect::<Vec<_>>().join("\n")
}

/// Waits until a condition holds.
pub async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    for _ in 0..200 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never: {what}");
}
