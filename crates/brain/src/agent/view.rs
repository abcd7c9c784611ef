//! The view of an agent: everything that the driver and a reader know of it, folded from its events.
//!
//! Invariant: the fold is pure: the same events give the same view, on every host and after every crash.
//! Invariant: every call of an answer has exactly one result in the conversation before the model is asked again.
//! Trust: a log may be of another version. Events that this version does not know change nothing.

use proto::{
    AgentId, BodyId, ChainId, EventData, SnapshotId,
    event_data::{
        AgentBudget, AgentPause, AgentSpec, AnswerEnd, ApprovalDecision, ApprovalGiven, ApprovalScope,
        CallEnded, CheckpointRemoved, DecodedEvent, HistoryCompacted, MessageSource, ModelAnswered,
        ModelUsage, SubagentEnded, Todo,
    },
};
use serde::Serialize;

use super::{blocks::ResolvedEvent, call};
use crate::model::{ChatMessage, ContentBlock, ResultBlock, Speaker, TokenUsage, ToolCall, ToolResult};

/// The tool by which the agent asks for a summary of the conversation.
pub const COMPACT_TOOL: &str = "compact_conversation";

/// The activity of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum AgentStatus {
    /// It works, if a process drives it.
    Working,
    /// It waits for a person.
    Paused {
        /// The reason.
        reason: AgentPause,
        /// The reason in words.
        why: String,
    },
    /// It has finished its task.
    Finished,
}

/// The stage of a call of the newest answer.
#[derive(Debug, Clone, PartialEq)]
pub enum CallStage {
    /// The driver has not looked at it yet.
    New,
    /// It waits for approval, because of this rule.
    Asked(String),
    /// A person decided.
    Decided(Box<ApprovalGiven>),
    /// It runs, or ran when its driver was killed.
    Started(Box<proto::event_data::CallStarted>),
    /// It asked a person a question.
    Questioned,
    /// The person answered the question.
    Answered(String),
    /// It has a result.
    Ended,
}

/// A call of the newest answer.
#[derive(Debug, Clone, PartialEq)]
pub struct CallState {
    /// The call.
    pub call: ToolCall,
    /// Its stage.
    pub stage: CallStage,
}

/// A place to which conversation and Body can go back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// The agent whose chain has its event: this one, or one that it was forked from.
    pub agent: Option<AgentId>,
    /// The `seq` of its event.
    pub seq: u64,
    /// The last complete turn.
    pub turn: u64,
    /// The snapshot of the Body.
    pub snapshot: SnapshotId,
}

/// Sums over the whole log, also over turns that were rewound: money that was spent stays spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct AgentTotals {
    /// Answers of the model.
    pub answers: u64,
    /// Tool calls that ended.
    pub calls: u64,
    /// The tokens.
    pub usage: TokenUsage,
    /// The cost in millionths of a dollar, of the answers whose price is known.
    pub cost_microdollars: u64,
    /// Answers whose price is not known.
    pub unpriced_answers: u64,
    /// How long the model took.
    pub model_ms: u64,
    /// How long the tools took.
    pub tool_ms: u64,
}

impl AgentTotals {
    /// Adds the answers of a sub-agent. Its time is the time of the call that started it.
    fn add_subagent(&mut self, ended: &SubagentEnded) {
        let ModelUsage { input, output, cache_read, cache_write } = ended.usage;
        self.answers += ended.answers;
        self.unpriced_answers += ended.unpriced_answers;
        self.usage = self.usage.plus(TokenUsage { input, output, cache_read, cache_write });
        self.cost_microdollars += ended.cost_microdollars;
    }

    /// A summary costs money, but is no turn.
    fn add_summary(&mut self, compacted: &HistoryCompacted) {
        let Some(ModelUsage { input, output, cache_read, cache_write }) = compacted.usage else { return };
        self.usage = self.usage.plus(TokenUsage { input, output, cache_read, cache_write });
        match compacted.cost_microdollars {
            Some(cost) => self.cost_microdollars += cost,
            None => self.unpriced_answers += 1,
        }
    }
}

fn removed_snapshot(event: &ResolvedEvent) -> Option<SnapshotId> {
    event.event.data_as::<CheckpointRemoved>().map(|data| data.snapshot)
}

/// Everything that the events of an agent say.
#[derive(Debug, Clone, Default)]
pub struct AgentView {
    /// The settings.
    pub spec: Option<AgentSpec>,
    /// The number of the newest driver.
    pub fence: u64,
    /// The Body in which the agent works.
    pub body: Option<BodyId>,
    /// The system prompt; none before the first driver fixed it.
    pub system: Option<Vec<String>>,
    /// The conversation that the model sees, without results of a turn that is not complete yet.
    pub messages: Vec<ChatMessage>,
    /// The calls of the newest answer.
    pub calls: Vec<CallState>,
    /// The number of the newest turn.
    pub turn: u64,
    /// The tasks.
    pub todos: Vec<Todo>,
    /// The plan as it was adopted or changed last.
    pub plan: Option<serde_json::Value>,
    /// The plan template and its phase.
    pub phase: Option<(String, Option<String>)>,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Rules that a person approved for this agent, by the text of the rule.
    pub granted: Vec<String>,
    /// The budget that counts now.
    pub budget: AgentBudget,
    /// The sums.
    pub totals: AgentTotals,
    /// The tokens of the newest request.
    pub context_tokens: u64,
    /// Whether the agent asked for a summary of the conversation.
    pub compact_wanted: bool,
    /// Messages of a person or a parent that no request has had yet, each with the `seq` of its event.
    pub new_prompts: Vec<(u64, String)>,
    /// The last words of the agent, once it has finished.
    pub summary: Option<String>,
    /// The `seq` of the newest event.
    pub seq: u64,
    pub(super) state: Option<AgentStatus>,
    pub(super) results: Vec<ToolResult>,
    pub(super) waiting: Vec<String>,
    pub(super) newest_end: Option<AnswerEnd>,
    pub(super) interrupted: bool,
    /// Whether a request is at the model. A message that arrives meanwhile follows the answer.
    pub(super) asking: bool,
}

impl AgentView {
    /// Folds events, in their order.
    pub fn of(events: &[ResolvedEvent]) -> Self {
        let mut view = Self::default();
        for (index, event) in events.iter().enumerate() {
            if let DecodedEvent::Known(EventData::AgentRewound(data)) = event.event.decode() {
                let chain = &event.event.chain;
                let counts =
                    |other: &&ResolvedEvent| other.event.chain != *chain || other.event.seq <= data.through;
                let kept: Vec<ResolvedEvent> = events[..index].iter().filter(counts).cloned().collect();
                // Money that was spent, the newest driver and the settings of the agent stay, and so does the loss of
                // a checkpoint.
                let (totals, fence) = (view.totals, view.fence);
                let (spec, budget) = (view.spec.take(), view.budget.clone());
                let lost: Vec<SnapshotId> = events[..index].iter().filter_map(removed_snapshot).collect();
                view = Self { totals, fence, spec, budget, state: None, ..Self::of(&kept) };
                view.checkpoints.retain(|checkpoint| !lost.contains(&checkpoint.snapshot));
            }
            view.apply(event);
        }
        view
    }

    /// Whether an event makes it necessary to fold the whole log again.
    pub fn needs_refold(event: &ResolvedEvent) -> bool {
        matches!(event.event.decode(), DecodedEvent::Known(EventData::AgentRewound(_)))
    }

    /// The activity of the agent.
    pub fn status(&self) -> AgentStatus {
        self.state.clone().unwrap_or(AgentStatus::Working)
    }

    /// The calls that have no result yet.
    pub fn open_calls(&self) -> impl Iterator<Item = &CallState> {
        self.calls.iter().filter(|call| call.stage != CallStage::Ended)
    }

    /// Whether the conversation ends with something that the model should answer.
    pub fn wants_answer(&self) -> bool {
        self.open_calls().next().is_none()
            && (self.messages.last().is_some_and(|message| message.speaker == Speaker::User)
                || !self.waiting.is_empty()
                || !self.results.is_empty())
    }

    /// How the newest answer ended.
    pub fn newest_end(&self) -> Option<&AnswerEnd> {
        self.newest_end.as_ref()
    }

    /// Whether a person interrupted the turn that runs.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// The newest text of the model.
    pub fn newest_text(&self) -> String {
        let spoken = self.messages.iter().rev().find(|message| message.speaker == Speaker::Assistant);
        let texts = spoken.into_iter().flat_map(|message| &message.blocks).filter_map(|block| match block {
            ContentBlock::Text { text } => Some(text.as_str()),
            _ => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Folds one more event.
    pub fn apply(&mut self, resolved: &ResolvedEvent) {
        self.seq = resolved.event.seq;
        let DecodedEvent::Known(data) = resolved.event.decode() else { return };
        match data {
            EventData::AgentCreated(data) => {
                self.budget = data.spec.budget.clone();
                self.spec = Some(data.spec);
                self.state = None;
            }
            EventData::AgentDriven(data) => {
                self.fence = data.fence;
                self.end_asking();
            }
            EventData::ModelAsked(_) => {
                self.asking = true;
                self.new_prompts.clear();
            }
            EventData::ModelFailed(data) if data.retry_ms.is_none() => self.end_asking(),
            EventData::AgentEmbodied(data) => self.body = Some(data.body),
            EventData::AgentInstructed(_) => self.system = Some(resolved.content_as()),
            EventData::AgentBudgeted(data) => {
                self.budget = data.budget;
                self.go_on(&AgentPause::Budget);
            }
            EventData::MessageReceived(data) => {
                if data.from != MessageSource::Palisade {
                    self.new_prompts.push((self.seq, data.text.clone()));
                }
                self.receive(data.text);
            }
            EventData::ModelAnswered(data) => self.answer(&data, resolved.content_as()),
            EventData::CallStarted(data) => {
                self.set_stage(&data.call.clone(), CallStage::Started(Box::new(data)))
            }
            EventData::CallEnded(data) => self.end_call(&data, resolved.content_as()),
            EventData::ApprovalAsked(data) => self.set_stage(&data.call, CallStage::Asked(data.why)),
            EventData::ApprovalGiven(data) => self.decide(data),
            EventData::QuestionAsked(data) => self.set_stage(&data.call, CallStage::Questioned),
            EventData::QuestionAnswered(data) => {
                self.set_stage(&data.call, CallStage::Answered(data.answer));
                self.go_on(&AgentPause::Question);
            }
            EventData::PlanChanged(data) => self.todos = data.todos,
            EventData::PlanAdopted(data) => self.plan = Some(data.template),
            EventData::PhaseEntered(data) => self.phase = Some((data.plan, data.phase)),
            EventData::CheckpointTaken(data) => self.checkpoints.push(Checkpoint {
                agent: match &resolved.event.chain {
                    ChainId::Agent(agent) => Some(agent.clone()),
                    _ => None,
                },
                seq: resolved.event.seq,
                turn: data.turn,
                snapshot: data.snapshot,
            }),
            EventData::CheckpointRemoved(data) => {
                self.checkpoints.retain(|checkpoint| checkpoint.snapshot != data.snapshot)
            }
            EventData::SubagentEnded(data) => self.totals.add_subagent(&data),
            EventData::HistoryCompacted(data) => {
                self.totals.add_summary(&data);
                self.compact(data.messages, data.summary);
            }
            // An agent that waits does nothing that could be interrupted.
            EventData::AgentInterrupted(_) => self.interrupted = self.state.is_none(),
            EventData::AgentResumed(_) => self.resume(),
            EventData::AgentPaused(data) => {
                self.interrupted = false;
                self.state = Some(AgentStatus::Paused { reason: data.reason, why: data.why });
            }
            EventData::AgentFinished(data) => {
                self.summary = Some(data.summary);
                self.state = Some(AgentStatus::Finished);
            }
            _ => {}
        }
    }

    /// Adds a message of the user. While calls are open it waits: their results come first.
    fn receive(&mut self, text: String) {
        self.state = None;
        self.interrupted = false;
        self.waiting.push(text);
        self.settle_turn();
    }

    fn end_asking(&mut self) {
        self.asking = false;
        self.settle_turn();
    }

    fn answer(&mut self, data: &ModelAnswered, mut blocks: Vec<ContentBlock>) {
        self.turn = data.turn;
        self.totals.answers += 1;
        let usage = TokenUsage {
            input: data.usage.input,
            output: data.usage.output,
            cache_read: data.usage.cache_read,
            cache_write: data.usage.cache_write,
        };
        self.totals.usage = self.totals.usage.plus(usage);
        self.totals.model_ms += data.took_ms;
        match data.cost_microdollars {
            Some(cost) => self.totals.cost_microdollars += cost,
            None => self.totals.unpriced_answers += 1,
        }
        self.context_tokens = usage.total_input() + usage.output;
        self.newest_end = Some(data.stop.clone());
        let mut calls: Vec<CallState> = Vec::new();
        // Of two calls with one id the provider would accept only one result.
        blocks.retain(|block| {
            let ContentBlock::ToolCall(call) = block else { return true };
            let is_new = !calls.iter().any(|other| other.call.id == call.id);
            if is_new {
                calls.push(CallState { call: call.clone(), stage: CallStage::New });
            }
            is_new
        });
        self.calls = calls;
        if !blocks.is_empty() {
            self.messages.push(ChatMessage::from_model(blocks));
        }
        self.end_asking();
    }

    fn set_stage(&mut self, call: &str, stage: CallStage) {
        if let Some(state) = self.calls.iter_mut().find(|state| state.call.id == call) {
            state.stage = stage;
        }
    }

    fn decide(&mut self, data: ApprovalGiven) {
        let rule = self.calls.iter().find_map(|state| match &state.stage {
            CallStage::Asked(rule) if state.call.id == data.call => Some(rule.clone()),
            _ => None,
        });
        let Some(rule) = rule else { return };
        let approves = matches!(data.decision, ApprovalDecision::Approve | ApprovalDecision::Edit);
        if approves && data.scope != ApprovalScope::Once {
            self.granted.push(rule);
        }
        let call = data.call.clone();
        self.set_stage(&call, CallStage::Decided(Box::new(data)));
        if !self.calls.iter().any(|state| matches!(state.stage, CallStage::Asked(_))) {
            self.go_on(&AgentPause::Approval);
        }
    }

    /// Ends a pause that has this reason.
    fn go_on(&mut self, ended: &AgentPause) {
        if matches!(&self.state, Some(AgentStatus::Paused { reason, .. }) if reason == ended) {
            self.state = None;
        }
    }

    /// Ends a pause that needs no decision of a person: one for an approval or a question stays.
    fn resume(&mut self) {
        let needs_answer =
            |reason: &AgentPause| matches!(reason, AgentPause::Approval | AgentPause::Question);
        if matches!(&self.state, Some(AgentStatus::Paused { reason, .. }) if !needs_answer(reason)) {
            self.state = None;
        }
    }

    fn end_call(&mut self, data: &CallEnded, blocks: Vec<ResultBlock>) {
        let is_open =
            self.calls.iter().any(|state| state.call.id == data.call && state.stage != CallStage::Ended);
        if !is_open {
            return;
        }
        let compacts = |state: &CallState| matches!(&state.stage, CallStage::Started(started) if started.call == data.call && started.tool == COMPACT_TOOL);
        if self.calls.iter().any(compacts) && !call::is_error(&data.outcome) {
            self.compact_wanted = true;
        }
        self.totals.calls += 1;
        self.totals.tool_ms += data.took_ms;
        self.set_stage(&data.call, CallStage::Ended);
        let is_error = call::is_error(&data.outcome);
        self.results.push(ToolResult { call_id: data.call.clone(), blocks, is_error });
        self.settle_turn();
    }

    /// Once every call has its result, moves the results, in the order of the calls, and the waiting messages into the
    /// conversation.
    fn settle_turn(&mut self) {
        if self.asking || self.open_calls().next().is_some() {
            return;
        }
        let mut results = std::mem::take(&mut self.results);
        let place = |result: &ToolResult| self.calls.iter().position(|state| state.call.id == result.call_id);
        results.sort_by_key(place);
        let mut blocks: Vec<ContentBlock> = results.into_iter().map(ContentBlock::ToolResult).collect();
        blocks.extend(std::mem::take(&mut self.waiting).into_iter().map(ContentBlock::text));
        if blocks.is_empty() {
            return;
        }
        match self.messages.last_mut() {
            Some(last) if last.speaker == Speaker::User => last.blocks.extend(blocks),
            _ => self.messages.push(ChatMessage { speaker: Speaker::User, blocks }),
        }
    }

    /// Puts a summary in the place of the oldest messages.
    fn compact(&mut self, count: u64, summary: String) {
        self.compact_wanted = false;
        self.context_tokens = 0;
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.messages.len());
        self.messages.drain(..count);
        let block = ContentBlock::text(summary);
        match self.messages.first_mut() {
            Some(first) if first.speaker == Speaker::User => first.blocks.insert(0, block),
            _ => self.messages.insert(0, ChatMessage { speaker: Speaker::User, blocks: vec![block] }),
        }
    }
}
