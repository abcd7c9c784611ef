//! The processes of an agent in its Body: those of interrupted calls end with the turn, all of them when a person stops
//! the agent.
//!
//! Invariant: only commands of this agent's own calls are ended, never another process of the Body.

use std::collections::BTreeSet;

use brain::agent::AgentView;
use fleet::Status;
use proto::{
    AgentId, BodyId, Event, EventData, Failure,
    event_data::{CallOutcome, DecodedEvent},
};

use crate::{AgentHost, LoadedAgent, Workplace, guest_key};

/// The calls whose processes end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndedCalls {
    /// Those that were interrupted in the newest turn.
    Interrupted,
    /// All.
    All,
}

impl AgentHost {
    /// Ends all processes that an agent started in its Body and that still run; returns how many.
    pub async fn end_processes(&self, id: &AgentId) -> Result<usize, Failure> {
        let loaded = self.agents().load(id).await?;
        self.end_commands(&loaded, EndedCalls::All).await
    }

    /// Ends the processes that an interrupt of a person was about. A driver whose process ends afterwards calls this, so
    /// that none of them goes on.
    pub(crate) async fn end_interrupted(&self, id: &AgentId) -> Result<usize, Failure> {
        let loaded = self.agents().load(id).await?;
        let is_stopped = |event: &Event| match event.decode() {
            DecodedEvent::Known(EventData::AgentInterrupted(data)) => Some(data.stop),
            _ => None,
        };
        let calls = match loaded.events.iter().rev().find_map(is_stopped) {
            Some(true) => EndedCalls::All,
            _ => EndedCalls::Interrupted,
        };
        self.end_commands(&loaded, calls).await
    }

    async fn end_commands(&self, loaded: &LoadedAgent, calls: EndedCalls) -> Result<usize, Failure> {
        let fleet = self.agents().fleet();
        let Some(body) = running_body(self, &loaded.view) else { return Ok(0) };
        let wanted = tags(&loaded.events, calls);
        let running = fleet.execs().tagged(&body).await?;
        let workdir = loaded.view.spec.as_ref().and_then(|spec| spec.workdir.clone()).unwrap_or("/".into());
        let place = Workplace::new(fleet.clone(), loaded.record.spec.id.clone(), body, workdir);
        let mut ended = 0;
        for (tag, _) in running.iter().filter(|(tag, _)| wanted.contains(tag)) {
            place.kill_kept(tag).await?;
            ended += 1;
        }
        Ok(ended)
    }
}

/// The Body of an agent, if it runs.
fn running_body(host: &AgentHost, view: &AgentView) -> Option<BodyId> {
    let body = view.body.clone()?;
    let found = host.agents().fleet().find(body.as_str()).ok()?;
    (found.status == Status::Running).then_some(body)
}

/// The tags by which the guest knows the commands of calls.
fn tags(events: &[Event], calls: EndedCalls) -> BTreeSet<String> {
    let mut open: Vec<(String, String)> = Vec::new();
    let mut found = BTreeSet::new();
    for event in events {
        match event.decode() {
            // The calls of an earlier answer have their results.
            DecodedEvent::Known(EventData::ModelAnswered(_)) => {
                open.clear();
                if calls == EndedCalls::Interrupted {
                    found.clear();
                }
            }
            DecodedEvent::Known(EventData::CallStarted(data)) => {
                let tag = guest_key(&data.key);
                if calls == EndedCalls::All {
                    found.insert(tag.clone());
                }
                open.push((data.call, tag));
            }
            DecodedEvent::Known(EventData::CallEnded(data)) if data.outcome == CallOutcome::Interrupted => {
                found.extend(open.iter().filter(|(call, _)| *call == data.call).map(|(_, tag)| tag.clone()));
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proto::ChainId;
    use serde_json::json;

    use super::*;

    fn events(data: impl IntoIterator<Item = (&'static str, serde_json::Value)>) -> Vec<Event> {
        let id: AgentId = "a1".parse().unwrap();
        let draft = |(kind, data): (&'static str, serde_json::Value)| {
            let event = json!({"v": 2, "pos": 1, "chain": ChainId::Agent(id.clone()), "seq": 1,
                "at": "2026-01-01T00:00:00.000000Z", "type": kind, "data": data, "prev": "", "hash": ""});
            serde_json::from_value(event).unwrap()
        };
        data.into_iter().map(draft).collect()
    }

    fn started(call: &str, key: &str) -> (&'static str, serde_json::Value) {
        let arguments = json!({"command": "x"});
        let data = json!({"call": call, "tool": "execute", "arguments": arguments, "risk": "workspace",
            "venue": "body", "why": "w", "key": key});
        ("call.started", data)
    }

    fn ended(call: &str, outcome: &str) -> (&'static str, serde_json::Value) {
        ("call.ended", json!({"call": call, "outcome": outcome, "result": {"blocks": []}, "took_ms": 1}))
    }

    fn answered() -> (&'static str, serde_json::Value) {
        let usage = json!({"input": 1, "output": 1, "cache_read": 0, "cache_write": 0});
        let message = json!({"blocks": []});
        (
            "model.answered",
            json!({"turn": 1, "message": message, "stop": "tool_use", "usage": usage,
            "cost_microdollars": null, "took_ms": 1}),
        )
    }

    #[test]
    fn only_commands_of_interrupted_calls_end_unless_all_do() {
        let log = events([
            answered(),
            started("c1", "k1"),
            ended("c1", "interrupted"),
            answered(),
            started("c1", "k2"),
            started("c2", "k3"),
            ended("c2", "done"),
            ended("c1", "interrupted"),
        ]);
        assert_eq!(tags(&log, EndedCalls::Interrupted), BTreeSet::from(["k2".to_owned()]));
        let all = ["k1", "k2", "k3"].map(str::to_owned);
        assert_eq!(tags(&log, EndedCalls::All), BTreeSet::from(all));
    }
}
