//! The removal of agents: with their sub-agents and their checkpoints, on request with their Bodies.
//!
//! Invariant: a checkpoint that a fork of the agent can still go back to stays.
//! Invariant: the Body goes first. If its work cannot be saved, the agent stays as well.

use std::collections::VecDeque;

use fleet::{Discard, Force};
use proto::{AgentId, ChainId, Failure, Kind, event_data::CheckpointTaken};

use crate::{AgentSettings, Agents, LoadedAgent};

/// Whether the Bodies of removed agents are removed, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovedBody {
    /// The Body stays.
    Kept,
    /// The Body is removed, after its work is saved.
    Removed,
}

impl Agents {
    /// Removes an agent that no process drives, its sub-agents and their checkpoints. Their events stay in the log.
    pub async fn remove_whole(&self, id: &AgentId, body: RemovedBody) -> Result<(), Failure> {
        // The sub-agents come before the agent that started them.
        let mut family = self.family(id)?;
        while let Some(id) = family.pop_back() {
            self.remove_one(&id, body).await?;
        }
        Ok(())
    }

    /// An agent and its sub-agents, in the order of their depth.
    pub fn family(&self, id: &AgentId) -> Result<VecDeque<AgentId>, Failure> {
        let all = self.list()?;
        let mut family = VecDeque::from([id.clone()]);
        let mut index = 0;
        while let Some(parent) = family.get(index).cloned() {
            let children = all.iter().filter(|record| {
                record.spec.parent.as_ref().is_some_and(|above| above.agent == parent)
                    && !family.contains(&record.spec.id)
            });
            let children: Vec<AgentId> = children.map(|record| record.spec.id.clone()).collect();
            family.extend(children);
            index += 1;
        }
        Ok(family)
    }

    async fn remove_one(&self, id: &AgentId, body: RemovedBody) -> Result<(), Failure> {
        let Some(lock) = self.lock(id)? else {
            return Err(Failure::new(Kind::Conflict, format!("a process drives agent {id}"))
                .hint(format!("stop it first: pal agent stop {id}")));
        };
        let loaded = self.load(id).await?;
        // The Body of a sub-agent may be that of the agent that started it.
        let shares_body = AgentSettings::of(&loaded.record.spec).subagent.is_some_and(|sub| sub.shares_body);
        let removes_body = body == RemovedBody::Removed && !shares_body;
        if let Some(id) = loaded.view.body.as_ref().filter(|_| removes_body) {
            match self.fleet().remove_with(id, Force::Yes, Discard::No).await {
                Err(failure) if failure.kind != Kind::NotFound => return Err(failure),
                _ => {}
            }
        }
        self.remove(id, removes_body)?;
        drop(lock);
        // Newest first: a snapshot may stand on an older one. The ones of removed agents that this agent was forked from
        // stayed because of it.
        for event in loaded.events.iter().rev() {
            let (ChainId::Agent(owner), Some(taken)) = (&event.chain, event.data_as::<CheckpointTaken>())
            else {
                continue;
            };
            let is_needed = owner != id && self.get(owner).is_ok();
            if !is_needed && !self.is_inherited(owner, event.seq)? {
                self.drop_snapshot(taken.snapshot.as_str())?;
            }
        }
        self.drop_unnamed_snapshots(&loaded)
    }

    /// Removes the snapshots for checkpoints that no event names: their driver was killed in between.
    fn drop_unnamed_snapshots(&self, removed: &LoadedAgent) -> Result<(), Failure> {
        let id = &removed.record.spec.id;
        let snapshots = self.fleet().snapshots().list()?;
        for snapshot in snapshots.iter().rev().filter(|view| view.checkpoint_of.as_ref() == Some(id)) {
            let names = |taken: CheckpointTaken| taken.snapshot == snapshot.id;
            if !removed.events.iter().any(|event| event.data_as::<CheckpointTaken>().is_some_and(names)) {
                self.drop_snapshot(snapshot.id.as_str())?;
            }
        }
        Ok(())
    }

    /// Removes a snapshot, unless a Body or another snapshot still uses it.
    fn drop_snapshot(&self, snapshot: &str) -> Result<(), Failure> {
        match self.fleet().snapshots().remove(snapshot) {
            Err(failure) if !matches!(failure.kind, Kind::NotFound | Kind::Conflict) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Whether another agent was forked from this one behind an event, and so can go back to it.
    fn is_inherited(&self, id: &AgentId, seq: u64) -> Result<bool, Failure> {
        for record in self.list()?.iter().filter(|record| record.forked_from.is_some()) {
            let origins = self.origins(record)?;
            if origins.iter().any(|origin| origin.agent == *id && origin.through >= seq) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
