//! Sub-agents whose call ended without them: it was interrupted, or its driver was.

use brain::agent::{AgentStatus, CallStage};
use fleet::{Discard, Force, Names};
use proto::{
    AgentId, Event, EventData, Failure, Kind,
    event_data::{AgentPause, AgentPaused, CallOutcome, SubagentEnded},
};

use super::child::{body_name, end_of};
use crate::{AgentRecord, Agents, journal::read_chain};

impl Agents {
    /// The sub-agents that an agent started, oldest first.
    pub fn children(&self, id: &AgentId) -> Result<Vec<AgentRecord>, Failure> {
        let is_child =
            |record: &AgentRecord| record.spec.parent.as_ref().is_some_and(|parent| parent.agent == *id);
        Ok(self.list()?.into_iter().filter(is_child).collect())
    }

    /// Pauses the sub-agents whose calls have ended without them, and counts their answers for the agent. The driver of
    /// an agent does this before and after it works.
    pub async fn settle_children(&self, id: &AgentId) -> Result<(), Failure> {
        let children = self.children(id)?;
        if children.is_empty() {
            return Ok(());
        }
        let view = self.load(id).await?.view;
        let is_open = |key: &str| {
            view.open_calls()
                .any(|state| matches!(&state.stage, CallStage::Started(started) if started.key == key))
        };
        let ended: Vec<SubagentEnded> =
            read_chain(self.fleet(), id, 0)?.iter().filter_map(Event::data_as::<SubagentEnded>).collect();
        for child in children {
            let call = child.spec.parent.as_ref().map(|parent| parent.call.clone()).unwrap_or_default();
            if is_open(&call) || ended.iter().any(|ended| ended.agent == child.spec.id) {
                continue;
            }
            self.settle_child(id, &child, call).await?;
        }
        Ok(())
    }

    async fn settle_child(&self, id: &AgentId, child: &AgentRecord, call: String) -> Result<(), Failure> {
        let child_id = &child.spec.id;
        // A person may drive it; then it is no leftover.
        if self.is_driven(child_id) {
            return Ok(());
        }
        let Some(_lock) = self.lock(child_id)? else { return Ok(()) };
        let view = self.load(child_id).await?.view;
        if view.status() == AgentStatus::Working {
            let why = "the call that started this sub-agent was interrupted".to_owned();
            self.note(child_id, [EventData::from(AgentPaused { reason: AgentPause::Interrupted, why })])?;
        }
        if view.body.is_none() {
            self.remove_unused_fork(child_id).await?;
        }
        self.note(id, [EventData::from(end_of(call, child_id, &view, CallOutcome::Interrupted))])
    }

    /// Removes the Body of a sub-agent that never got it.
    async fn remove_unused_fork(&self, child: &AgentId) -> Result<(), Failure> {
        let Some(body) = Names::of(self.fleet()).find_exact(&body_name(child)?)? else { return Ok(()) };
        match self.fleet().remove_with(&body, Force::Yes, Discard::Yes).await {
            Err(failure) if failure.kind == Kind::NotFound => Ok(()),
            done => done,
        }
    }
}
