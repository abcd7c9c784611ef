//! Follows the log of an agent, and notices when its driver is gone.

use std::time::{Duration, Instant};

use brain::agent::{AgentStatus, AgentView, CallStage, ResolvedEvent, resolve};
use bridge::{AgentRecord, Agents, FleetJournal};
use fleet::EventQuery;
use proto::{AgentId, ChainId, Event, Failure, Kind, event_data::QuestionAsked};

/// How long a driver may take to begin.
const START_WAIT: Duration = Duration::from_secs(10);
/// How long an agent at work may be without a driver: one driver may follow another.
const GAP_WAIT: Duration = Duration::from_millis(1500);
/// How many lines of the driver's last words are shown.
const LAST_WORDS: usize = 8;

/// The events of an agent as they come, and the view that they make.
pub struct AgentFollower {
    agents: Agents,
    journal: FleetJournal,
    /// The record.
    pub record: AgentRecord,
    /// The events so far: those of the agents that it was forked from, then its own.
    pub events: Vec<ResolvedEvent>,
    /// The view.
    pub view: AgentView,
    pos: u64,
    /// When a driver was seen last.
    driven: Instant,
    /// How long none may be seen.
    gap: Duration,
}

impl AgentFollower {
    /// Reads the events so far.
    pub async fn open(agents: &Agents, id: &AgentId) -> Result<Self, Failure> {
        let record = agents.find(id.as_str())?;
        let mut events = agents.effective_events(&record)?;
        let (journal, own) = FleetJournal::open(agents.fleet().clone(), id)?;
        let chain = ChainId::Agent(id.clone());
        events.retain(|event| event.chain != chain);
        let pos = own.last().map_or(0, |event| event.pos);
        let mut follower = Self {
            agents: agents.clone(),
            journal,
            record,
            events: Vec::new(),
            view: AgentView::default(),
            pos,
            driven: Instant::now(),
            gap: GAP_WAIT,
        };
        follower.fold(events.into_iter().chain(own)).await?;
        Ok(follower)
    }

    /// The agent.
    pub fn id(&self) -> &AgentId {
        &self.record.spec.id
    }

    /// Whether an event is of the agent's own chain.
    pub fn is_own(&self, event: &Event) -> bool {
        event.chain == ChainId::Agent(self.id().clone())
    }

    /// Reads the events that are new, and returns their place among all events.
    pub async fn read(&mut self) -> Result<std::ops::Range<usize>, Failure> {
        let query =
            EventQuery { after: self.pos, ..EventQuery::of_chain(&ChainId::Agent(self.id().clone())) };
        let new = self.agents.fleet().log().read(&query)?;
        self.pos = new.last().map_or(self.pos, |event| event.pos);
        let from = self.events.len();
        self.fold(new).await?;
        Ok(from..self.events.len())
    }

    async fn fold(&mut self, events: impl IntoIterator<Item = Event>) -> Result<(), Failure> {
        let refolds = self.events.len();
        for event in events {
            let event = resolve(&self.journal, event).await.map_err(|error| {
                Failure::new(Kind::Host, format!("cannot read the log of agent {}", self.id())).because(error)
            })?;
            self.events.push(event);
        }
        let new = &self.events[refolds..];
        if new.iter().any(AgentView::needs_refold) {
            self.view = AgentView::of(&self.events);
        } else {
            new.iter().for_each(|event| self.view.apply(event));
        }
        Ok(())
    }

    /// The question that the agent waits with.
    pub fn open_question(&self) -> Option<QuestionAsked> {
        open_question(&self.view, self.events.iter().map(|event| &event.event))
    }

    /// Fails if the agent should be at work, but no process drives it.
    pub fn check_driver(&mut self) -> Result<(), Failure> {
        if self.view.status() != AgentStatus::Working || self.agents.is_driven(self.id()) {
            (self.driven, self.gap) = (Instant::now(), GAP_WAIT);
        }
        if self.driven.elapsed() > self.gap { Err(self.driver_lost()) } else { Ok(()) }
    }

    /// Expects a new driver: this process has just started one.
    pub fn expect_driver(&mut self) {
        (self.driven, self.gap) = (Instant::now(), START_WAIT);
    }

    fn driver_lost(&self) -> Failure {
        let id = self.id();
        let failure = Failure::new(Kind::Host, format!("no process drives agent {id} any more"))
            .hint(format!("let it go on where it was: pal agent resume {id}"));
        let log = std::fs::read_to_string(self.agents.directory(id).join("driver.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines[lines.len().saturating_sub(LAST_WORDS)..].join("\n");
        if last.is_empty() { failure } else { failure.because(last) }
    }
}

/// The question that an agent waits with.
pub fn open_question<'a>(
    view: &AgentView,
    events: impl DoubleEndedIterator<Item = &'a Event>,
) -> Option<QuestionAsked> {
    let asked = view.calls.iter().find(|state| state.stage == CallStage::Questioned)?;
    let is_it = |question: &QuestionAsked| question.call == asked.call.id;
    events.rev().filter_map(Event::data_as::<QuestionAsked>).find(is_it)
}
