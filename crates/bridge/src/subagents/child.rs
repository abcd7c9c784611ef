//! One sub-agent from its start to its report.

use std::time::Duration;

use brain::{
    agent::{AgentJournal as _, AgentStatus, AgentView, CallContext, CallResult, DriveEnd, LiveUpdate},
    library::{Role, RoleVenue},
    model::{ContentBlock, Speaker},
};
use fleet::{EventOrder, EventQuery, ForkedWork, Names};
use proto::{
    AgentId, BodyId, BodyName, ChainId, Event, EventData, Failure, Kind,
    event_data::{
        AgentEmbodied, AgentParent, AgentPause, AgentSpec, ApprovalMode, CallOutcome, EventKind,
        MessageReceived, MessageSource, ModelUsage, SubagentEnded, SubagentStarted,
    },
};
use tokio::sync::SemaphorePermit;

use super::{DEPTH_MAX, Lineage, Subagents, task::TaskArguments};
use crate::{AgentRecord, AgentSettings, FleetJournal, explain, subagent_settings::SubagentSettings};

/// How often a call looks whether another process still drives its sub-agent.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a call waits at most for new events of a sub-agent that waits for a person, before it looks again.
const FOLLOW: Duration = Duration::from_secs(5);
/// How many starts of sub-agents back that of a call is searched for.
const STARTS_BACK_MAX: usize = 256;
/// The longest title in characters.
const TITLE_LEN_MAX: usize = 80;

/// The end of a sub-agent.
enum SubagentEnd {
    Finished,
    /// It waits for a person, who will not answer in this call.
    Stopped {
        why: String,
    },
}

impl Subagents {
    /// Carries out a call of `task`: starts its sub-agent or finds it, drives it, and brings its work back.
    pub(super) async fn run_task(
        &self,
        context: &CallContext,
        task: &TaskArguments,
        role: &Role,
    ) -> CallResult {
        let _slot = match self.take_slot().await {
            Ok(slot) => slot,
            Err(text) => return CallResult::error(text),
        };
        let lineage = self.lineage.child();
        match self.run_child(context, task, role, lineage).await {
            Ok(result) => result,
            Err(failure) => {
                CallResult::error(format!("Error: the sub-agent could not be run: {}", explain(&failure)))
            }
        }
    }

    /// Takes one of the places for agents that run at once. Only the first agent waits for one: agents that wait for each
    /// other's places would wait for ever.
    async fn take_slot(&self) -> Result<SemaphorePermit<'_>, String> {
        let none = || {
            "Error: too many sub-agents run at once. Do this task yourself, or try again when others have ended."
                .to_owned()
        };
        match self.depth() {
            0 => self.lineage.slots.acquire().await.map_err(|_| none()),
            _ => self.lineage.slots.try_acquire().map_err(|_| none()),
        }
    }

    async fn run_child(
        &self,
        context: &CallContext,
        task: &TaskArguments,
        role: &Role,
        lineage: Lineage,
    ) -> Result<CallResult, Failure> {
        let body =
            context.body.as_ref().ok_or_else(|| Failure::new(Kind::Conflict, "the agent has no Body"))?;
        let record = match self.find_child(&context.key)? {
            Some(record) => record,
            None => self.create_child(context, task, role, body).await?,
        };
        let child = record.spec.id.clone();
        self.embody_child(&record, context, task, body).await?;
        let end = self.drive_child(&child, context, &lineage).await?;
        let view = self.agents.load(&child).await?.view;
        let ended = |outcome| end_event(context, &child, &view, outcome);
        match end {
            SubagentEnd::Finished => {
                let note = self.bring_back(&record, &view, body).await?;
                let text = [Some(last_text(&view)), note].into_iter().flatten().collect::<Vec<_>>();
                Ok(CallResult::text(text.join("\n\n")).with_event(ended(CallOutcome::Done)))
            }
            SubagentEnd::Stopped { why } => {
                let mut text =
                    format!("Error: the sub-agent {child} stopped before its task was done: {why}.");
                if let Some(place) = view.body.as_ref().filter(|place| *place != body) {
                    text.push_str(&format!(" Its work is in Body {place}, and is not merged."));
                }
                let last = last_text(&view);
                if !last.is_empty() {
                    text.push_str(&format!(" Its last words:\n\n{last}"));
                }
                Ok(CallResult::error(text).with_event(ended(CallOutcome::Failed)))
            }
        }
    }

    /// The sub-agent that a call started, if it did.
    fn find_child(&self, key: &str) -> Result<Option<AgentRecord>, Failure> {
        let is_ours = |record: &AgentRecord| {
            let parent = record.spec.parent.as_ref();
            parent.is_some_and(|parent| parent.agent == self.spec.id && parent.call == key)
        };
        Ok(self.agents.list()?.into_iter().find(is_ours))
    }

    async fn create_child(
        &self,
        context: &CallContext,
        task: &TaskArguments,
        role: &Role,
        body: &BodyId,
    ) -> Result<AgentRecord, Failure> {
        let depth = self.depth() + 1;
        if depth > DEPTH_MAX {
            return Err(Failure::new(
                Kind::Limit,
                format!("at most {DEPTH_MAX} agents can be above another"),
            ));
        }
        // A driver that goes on with this call after a crash has not looked at the budget yet.
        self.lineage.meter.note_once(&self.agents.load(&self.spec.id).await?.view);
        let shares_body = role.venue != RoleVenue::Fork;
        let marks = match shares_body {
            true => Vec::new(),
            false => ForkedWork::of(self.agents.fleet()).mark(body).await?,
        };
        let settings = AgentSettings {
            subagent: Some(SubagentSettings { shares_body, marks }),
            ..AgentSettings::of(&self.spec)
        };
        let parent = AgentParent { agent: self.spec.id.clone(), call: context.key.clone(), depth };
        let mode = match role.venue {
            RoleVenue::ReadOnly => ApprovalMode::Plan,
            RoleVenue::Body | RoleVenue::Fork => self.spec.mode.clone(),
        };
        let spec = AgentSpec {
            id: crate::Agents::new_id()?,
            model: role.model.clone().unwrap_or_else(|| self.spec.model.clone()),
            title: title(&task.description),
            role: Some(role.name.clone()),
            plan: None,
            mode,
            budget: self.lineage.meter.rest(),
            parent: Some(parent),
            group: None,
            settings: serde_json::to_value(settings).unwrap_or_default(),
            ..self.spec.clone()
        };
        self.agents.create_bodiless(spec)
    }

    /// Gives a new sub-agent its Body and its task. A crash in between leaves a Body that its name tells of.
    async fn embody_child(
        &self,
        record: &AgentRecord,
        context: &CallContext,
        task: &TaskArguments,
        parent_body: &BodyId,
    ) -> Result<(), Failure> {
        let child = &record.spec.id;
        if self.agents.load(child).await?.view.body.is_some() {
            return Ok(());
        }
        let shares_body =
            AgentSettings::of(&record.spec).subagent.is_some_and(|settings| settings.shares_body);
        let body = if shares_body { parent_body.clone() } else { self.fork_body(child, parent_body).await? };
        self.note_start(record, context, &body)?;
        let text = task.description.clone();
        self.agents.note(
            child,
            [
                EventData::from(AgentEmbodied { body, snapshot: None }),
                EventData::from(MessageReceived { from: MessageSource::Parent, text }),
            ],
        )
    }

    /// Tells the parent's log of a new sub-agent, unless an earlier driver did.
    fn note_start(&self, record: &AgentRecord, context: &CallContext, body: &BodyId) -> Result<(), Failure> {
        let child = &record.spec.id;
        let query = EventQuery {
            kinds: SubagentStarted::NAMES.to_vec(),
            order: EventOrder::NewestFirst,
            limit: STARTS_BACK_MAX,
            ..EventQuery::of_chain(&ChainId::Agent(self.spec.id.clone()))
        };
        let known = self.agents.fleet().log().read(&query)?;
        let is_it = |started: SubagentStarted| started.agent == *child;
        if known.iter().filter_map(Event::data_as::<SubagentStarted>).any(is_it) {
            return Ok(());
        }
        let role = record.spec.role.clone().unwrap_or_default();
        let started =
            SubagentStarted { call: context.call.clone(), agent: child.clone(), role, body: body.clone() };
        self.agents.note(&self.spec.id, [EventData::from(started)])
    }

    async fn fork_body(&self, child: &AgentId, parent: &BodyId) -> Result<BodyId, Failure> {
        let fleet = self.agents.fleet();
        let name = body_name(child)?;
        if let Some(body) = Names::of(fleet).find_exact(&name)? {
            return Ok(body);
        }
        let terms = fleet.leases().terms_of_fork(parent)?;
        let forks = fleet.snapshots().fork_leased(parent, 1, Some(&name), terms).await?;
        let fork = forks.first().ok_or_else(|| Failure::new(Kind::Internal, "a fork was not created"))?;
        Ok(fork.id().clone())
    }

    /// Drives a sub-agent until it has finished or stopped. While it waits for a person, the call waits, too.
    async fn drive_child(
        &self,
        child: &AgentId,
        context: &CallContext,
        lineage: &Lineage,
    ) -> Result<SubagentEnd, Failure> {
        loop {
            match self.driver.drive_subagent(child, lineage.clone()).await? {
                Some(DriveEnd::Finished) => return Ok(SubagentEnd::Finished),
                Some(DriveEnd::Paused { reason: AgentPause::Approval | AgentPause::Question, why }) => {
                    let text = format!("sub-agent {child} waits: {why}; see it: pal agent show {child}\n");
                    self.live.update(LiveUpdate::Output { call: context.call.clone(), text });
                    self.await_person(child).await?;
                }
                Some(DriveEnd::Paused { why, .. }) => return Ok(SubagentEnd::Stopped { why }),
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Waits until a person has answered a sub-agent.
    async fn await_person(&self, child: &AgentId) -> Result<(), Failure> {
        let (journal, _) = FleetJournal::open(self.agents.fleet().clone(), child)?;
        loop {
            let waits = |reason: &AgentPause| matches!(reason, AgentPause::Approval | AgentPause::Question);
            match self.agents.load(child).await?.view.status() {
                AgentStatus::Paused { reason, .. } if waits(&reason) => {}
                _ => return Ok(()),
            }
            let followed = journal.follow(FOLLOW).await;
            followed.map_err(|error| {
                Failure::new(Kind::Host, format!("cannot read the log of agent {child}")).because(error)
            })?;
        }
    }
}

/// The name of a sub-agent's Body.
pub(super) fn body_name(child: &AgentId) -> Result<BodyName, Failure> {
    format!("task-{child}").parse().map_err(|error| {
        Failure::new(Kind::Internal, "the Body of a sub-agent cannot be named").because(error)
    })
}

/// The event that counts the answers of a sub-agent for its parent.
pub(super) fn end_of(call: String, child: &AgentId, view: &AgentView, outcome: CallOutcome) -> SubagentEnded {
    let totals = view.totals;
    SubagentEnded {
        call,
        agent: child.clone(),
        outcome,
        answers: totals.answers,
        unpriced_answers: totals.unpriced_answers,
        usage: ModelUsage {
            input: totals.usage.input,
            output: totals.usage.output,
            cache_read: totals.usage.cache_read,
            cache_write: totals.usage.cache_write,
        },
        cost_microdollars: totals.cost_microdollars,
    }
}

fn end_event(
    context: &CallContext,
    child: &AgentId,
    view: &AgentView,
    outcome: CallOutcome,
) -> SubagentEnded {
    end_of(context.call.clone(), child, view, outcome)
}

/// The newest text of the model that is not empty.
fn last_text(view: &AgentView) -> String {
    let spoken = view.messages.iter().rev().filter(|message| message.speaker == Speaker::Assistant);
    let texts = spoken.map(|message| {
        let texts = message.blocks.iter().filter_map(|block| match block {
            ContentBlock::Text { text } => Some(text.as_str()),
            _ => None,
        });
        texts.collect::<Vec<_>>().join("\n").trim_end().to_owned()
    });
    texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
}

fn title(description: &str) -> String {
    let first = description.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    proto::text::visible(first).chars().take(TITLE_LEN_MAX).collect()
}
