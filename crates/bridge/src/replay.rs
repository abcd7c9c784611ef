//! Replay: the recorded tool calls of an agent run again, in their order, in a fresh Body, and their results are compared.
//!
//! The fresh Body begins with the snapshot of the agent's first checkpoint, which was taken before the first answer. Calls
//! that only changed the agent's log, that went to a person, a sub-agent or a server, or that had no result of their own
//! are skipped and counted.
//!
//! Invariant: nothing is masked but secrets: times, process ids and random numbers in results are differences.
//! Invariant: the fresh Body reaches no network and no writable directory of the host, and is removed at the end.
//! Invariant: neither the agent nor its Body changes.

use std::sync::Arc;

use brain::{
    agent::{AgentTool, CallContext, CallPlan, CallResult, Middleware, ResolvedEvent, ToolRegistry, resolve},
    model::ResultBlock,
};
use proto::{
    AgentId, BodyId, ChainId, Event, EventData, Failure, Kind,
    event_data::{CallEnded, CallOutcome, CallStarted, CallVenue, DecodedEvent},
};
use serde::Serialize;

use crate::{Agents, FleetJournal, LoadedAgent, subagents::TASK_TOOL, venue::ThrowawayBody};

/// Tools whose results come from a person or from another agent.
const SKIPPED_TOOLS: &[&str] = &["ask_user", TASK_TOOL];
/// The longest result in a report, in bytes.
const SHOWN_LEN_MAX: usize = 8 << 10;
/// The most differences that a report names.
const DIFFERENCES_MAX: usize = 200;

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ReplayReport {
    /// Calls with the recorded result.
    pub same: usize,
    /// Calls that were not repeated.
    pub skipped: usize,
    /// Calls with another result, at most 200.
    pub differences: Vec<ReplayDifference>,
    /// How many more calls had another result.
    #[serde(skip_serializing_if = "is_zero")]
    pub differences_more: usize,
}

/// A call with another result than the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplayDifference {
    /// The turn.
    pub turn: u64,
    /// The tool.
    pub tool: String,
    /// The recorded result; a long one is cut.
    pub recorded: String,
    /// The result of the replay; a long one is cut.
    pub replayed: String,
    /// The recorded exit code of its command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded_exit: Option<i32>,
    /// The exit code of the replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replayed_exit: Option<i32>,
}

/// The parts of an agent's driver that a replay needs, made for the fresh Body.
pub struct ReplayParts {
    /// The tools.
    pub tools: ToolRegistry,
    /// The middleware that changes results before they are recorded, outermost first; none that acts otherwise.
    pub refiners: Vec<Arc<dyn Middleware>>,
}

/// A call of the log.
struct RecordedCall {
    chain: ChainId,
    seq: u64,
    turn: u64,
    /// Left out for a call that never started.
    started: Option<CallStarted>,
    ended: Option<(CallEnded, Vec<ResultBlock>)>,
}

impl Agents {
    /// Runs the recorded calls of an agent again and compares the results. `make_parts` makes the tools for a Body.
    pub async fn replay(
        &self,
        id: &AgentId,
        make_parts: impl FnOnce(&LoadedAgent, &BodyId) -> Result<ReplayParts, Failure>,
    ) -> Result<ReplayReport, Failure> {
        let loaded = self.load(id).await?;
        let calls = self.recorded_calls(id, &loaded.events).await?;
        let place = self.open_first_checkpoint(id, &loaded).await?;
        let body = place.id().cloned().ok_or_else(|| Failure::new(Kind::Internal, "the Body is gone"))?;
        let parts = make_parts(&loaded, &body)?;
        let report = replay_calls(id, &body, calls, &parts).await;
        place.remove().await?;
        Ok(report)
    }

    /// The calls of an agent in the order in which they started, without those that a rewind took back.
    async fn recorded_calls(&self, id: &AgentId, events: &[Event]) -> Result<Vec<RecordedCall>, Failure> {
        let (journal, _) = FleetJournal::open(Arc::clone(self.fleet()), id)?;
        let (mut calls, mut turn) = (Vec::new(), 0);
        for event in events.iter().cloned() {
            let event = resolve(&journal, event).await.map_err(|error| {
                Failure::new(Kind::Host, format!("cannot read the log of agent {id}")).because(error)
            })?;
            collect_call(&mut calls, &mut turn, &event);
        }
        Ok(calls)
    }

    async fn open_first_checkpoint(
        &self,
        id: &AgentId,
        loaded: &LoadedAgent,
    ) -> Result<ThrowawayBody, Failure> {
        let first = loaded.view.checkpoints.first().ok_or_else(|| {
            Failure::new(
                Kind::NotFound,
                format!("agent {id} has no checkpoint from which a replay could begin"),
            )
            .hint("the driver takes the first one before the first answer; sub-agents have none")
        })?;
        let body = loaded.view.body.as_ref().ok_or_else(|| {
            Failure::new(Kind::Conflict, format!("agent {id} has no Body")).hint("see it: pal agent show")
        })?;
        ThrowawayBody::at_snapshot(self.fleet(), body, &first.snapshot).await
    }
}

/// Adds what an event says about calls.
fn collect_call(calls: &mut Vec<RecordedCall>, turn: &mut u64, event: &ResolvedEvent) {
    let (chain, seq) = (event.event.chain.clone(), event.event.seq);
    let DecodedEvent::Known(data) = event.event.decode() else { return };
    match data {
        EventData::ModelAnswered(data) => *turn = data.turn,
        EventData::CallStarted(started) => {
            calls.push(RecordedCall { chain, seq, turn: *turn, started: Some(started), ended: None });
        }
        EventData::CallEnded(ended) => {
            let is_it = |call: &&mut RecordedCall| {
                call.turn == *turn
                    && call.ended.is_none()
                    && call.started.as_ref().is_some_and(|started| started.call == ended.call)
            };
            let found = calls.iter_mut().rfind(is_it);
            let result = Some((ended, event.content_as()));
            match found {
                Some(call) => call.ended = result,
                None => calls.push(RecordedCall { chain, seq, turn: *turn, started: None, ended: result }),
            }
        }
        EventData::AgentRewound(data) => {
            calls.retain(|call| call.chain != chain || call.seq <= data.through);
            *turn = data.turn;
        }
        _ => {}
    }
}

/// Runs calls again, one after the other.
async fn replay_calls(
    agent: &AgentId,
    body: &BodyId,
    calls: Vec<RecordedCall>,
    parts: &ReplayParts,
) -> ReplayReport {
    let mut report = ReplayReport::default();
    for call in calls {
        let Some((started, ended, blocks, tool)) = find_repeatable(&call, &parts.tools) else {
            report.skipped += 1;
            continue;
        };
        let result = repeat_call(agent, body, started, tool, &parts.refiners).await;
        let is_same = result.blocks == *blocks
            && result.exit_code == ended.exit_code
            && result.outcome == ended.outcome;
        if is_same {
            report.same += 1;
        } else if report.differences.len() < DIFFERENCES_MAX {
            report.differences.push(ReplayDifference {
                turn: call.turn,
                tool: started.tool.clone(),
                recorded: to_text(blocks),
                replayed: to_text(&result.blocks),
                recorded_exit: ended.exit_code,
                replayed_exit: result.exit_code,
            });
        } else {
            report.differences_more += 1;
        }
    }
    report
}

type RepeatableCall<'a> = (&'a CallStarted, &'a CallEnded, &'a Vec<ResultBlock>, &'a Arc<dyn AgentTool>);

/// The parts of a call that can run again and whose result can be compared.
fn find_repeatable<'a>(call: &'a RecordedCall, tools: &'a ToolRegistry) -> Option<RepeatableCall<'a>> {
    let (started, (ended, blocks)) = (call.started.as_ref()?, call.ended.as_ref()?);
    let has_place = matches!(started.venue, CallVenue::Body | CallVenue::Fork | CallVenue::Microvm);
    let has_result = matches!(ended.outcome, CallOutcome::Done | CallOutcome::Failed);
    let is_skipped = SKIPPED_TOOLS.contains(&started.tool.as_str());
    let tool = tools.get(&started.tool)?;
    (has_place && has_result && !is_skipped).then_some((started, ended, blocks, tool))
}

async fn repeat_call(
    agent: &AgentId,
    body: &BodyId,
    started: &CallStarted,
    tool: &Arc<dyn AgentTool>,
    refiners: &[Arc<dyn Middleware>],
) -> CallResult {
    let context = CallContext {
        agent: agent.clone(),
        call: started.call.clone(),
        tool: started.tool.clone(),
        key: format!("replay-{body}-{}", started.key),
        body: Some(body.clone()),
        plan: CallPlan {
            risk: started.risk.clone(),
            venue: started.venue.clone(),
            why: started.why.clone(),
            writes: Vec::new(),
        },
        arguments: started.arguments.as_object().cloned().unwrap_or_default(),
    };
    let mut result = tool.run(context.clone()).await;
    for refiner in refiners.iter().rev() {
        result = refiner.refine(&context, result).await;
    }
    result
}

fn to_text(blocks: &[ResultBlock]) -> String {
    let texts = blocks.iter().map(|block| match block {
        ResultBlock::Text { text } => text.clone(),
        ResultBlock::Image(image) => format!("[{} of {} bytes]", image.media_type, image.data.len()),
    });
    let mut text = texts.collect::<Vec<_>>().join("\n");
    if text.len() > SHOWN_LEN_MAX {
        let end = (0..=SHOWN_LEN_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use proto::{
        ChainHead, Draft,
        event_data::{AgentRewound, AnswerEnd, CallRisk, ModelAnswered, ModelUsage, StoredMessage},
    };
    use serde_json::json;

    use super::*;

    fn message() -> StoredMessage {
        StoredMessage { blocks: None, artifact: None, artifact_bytes: 0 }
    }

    fn answered(turn: u64) -> EventData {
        let usage = ModelUsage { input: 0, output: 0, cache_read: 0, cache_write: 0 };
        let stop = AnswerEnd::ToolUse;
        ModelAnswered { turn, message: message(), stop, usage, cost_microdollars: None, took_ms: 0 }.into()
    }

    fn started(call: &str) -> EventData {
        CallStarted {
            call: call.into(),
            tool: "execute".into(),
            arguments: json!({}),
            risk: CallRisk::Workspace,
            venue: CallVenue::Body,
            why: String::new(),
            key: call.into(),
        }
        .into()
    }

    fn ended(call: &str) -> EventData {
        let outcome = CallOutcome::Done;
        CallEnded { call: call.into(), outcome, result: message(), exit_code: Some(0), took_ms: 1 }.into()
    }

    /// The calls of events: turn, id, whether it started, whether it ended.
    fn collect(events: Vec<EventData>) -> Vec<(u64, String, bool, bool)> {
        let agent: AgentId = "a1".parse().unwrap();
        let (mut calls, mut turn, mut head) = (Vec::new(), 0, ChainHead::genesis());
        for data in events {
            let draft = Draft::of_agent(&agent, data);
            let at = "2026-01-01T00:00:00.000000Z".to_owned();
            let event = Event::place(draft, ChainId::Agent(agent.clone()), &head, at);
            head = event.head();
            let content = json!([{"type": "text", "text": "x"}]);
            collect_call(&mut calls, &mut turn, &ResolvedEvent { event, content });
        }
        let describe = |call: RecordedCall| {
            let id = call.started.as_ref().map(|started| started.call.clone());
            let id = id.or(call.ended.as_ref().map(|(ended, _)| ended.call.clone()));
            (call.turn, id.unwrap_or_default(), call.started.is_some(), call.ended.is_some())
        };
        calls.into_iter().map(describe).collect()
    }

    #[test]
    fn calls_keep_their_order_and_rewound_ones_are_gone() {
        let events = vec![
            answered(1),
            started("a"),
            started("b"),
            ended("b"),
            ended("a"),
            answered(2),
            ended("refused"),
            started("a"),
            ended("a"),
            answered(3),
            started("c"),
        ];
        let found = collect(events.clone());
        let expected = [
            (1, "a", true, true),
            (1, "b", true, true),
            (2, "refused", false, true),
            (2, "a", true, true),
            (3, "c", true, false),
        ];
        assert_eq!(found, expected.map(|(turn, id, began, end)| (turn, id.to_owned(), began, end)));
        // Back to the end of the first turn: the first event has the number 1.
        let rewound = EventData::from(AgentRewound { through: 5, turn: 1 });
        let events = events.into_iter().chain([rewound, answered(2), started("d"), ended("d")]).collect();
        let ids: Vec<String> = collect(events).into_iter().map(|call| call.1).collect();
        assert_eq!(ids, ["a", "b", "d"]);
    }
}
