//! Fork and rewind: conversation and Body go to a checkpoint together.
//!
//! Invariant: nothing is lost. A fork leaves the agent as it is; a rewind keeps the events after the checkpoint in the
//! log and leaves the Body before it in place.

use std::collections::BTreeSet;

use brain::agent::{AgentView, Checkpoint};
use proto::{
    AgentId, BodyId, EventData, Failure, Kind, SnapshotId,
    event_data::{AgentEmbodied, AgentPosition, AgentRewound, AgentSpec},
};

use crate::{AgentRecord, AgentSettings, Agents};

impl Agents {
    /// Creates agents that go on from a checkpoint of this one, each with a Body of its own; from now if no turn is
    /// given and no process drives the agent, else from the newest checkpoint.
    pub async fn fork(
        &self,
        id: &AgentId,
        turn: Option<u64>,
        count: u32,
        message: Option<String>,
    ) -> Result<Vec<AgentRecord>, Failure> {
        let loaded = self.load(id).await?;
        let body = body_of(&loaded.view, id)?;
        if turn.is_none() && !self.is_driven(id) && loaded.view.open_calls().next().is_none() {
            let bodies = self.fleet().snapshots().fork(&body, count).await?;
            let through = AgentPosition { agent: id.clone(), through: loaded.view.seq };
            return bodies
                .iter()
                .map(|fork| self.create_fork(&loaded.record.spec, &through, fork.id(), message.clone()))
                .collect();
        }
        let checkpoint = self.find_checkpoint(&loaded.view, id, turn)?;
        let through = position(checkpoint, id);
        let mut forks = Vec::new();
        for _ in 0..count {
            let fork = self.fleet().snapshots().fork_at(&body, &checkpoint.snapshot).await?;
            forks.push(self.create_fork(&loaded.record.spec, &through, fork.id(), message.clone())?);
        }
        Ok(forks)
    }

    fn create_fork(
        &self,
        spec: &AgentSpec,
        through: &AgentPosition,
        body: &BodyId,
        message: Option<String>,
    ) -> Result<AgentRecord, Failure> {
        // A fork of a sub-agent works for the person who made it.
        let settings = AgentSettings { subagent: None, ..AgentSettings::of(spec) };
        let settings = serde_json::to_value(settings).unwrap_or_default();
        let spec = AgentSpec { id: Self::new_id()?, parent: None, settings, ..spec.clone() };
        self.create(spec, Some(through.clone()), body, message)
    }

    /// Moves an agent back to a checkpoint, into a new Body that begins with the checkpoint's files.
    pub async fn rewind(&self, id: &AgentId, turn: u64) -> Result<BodyId, Failure> {
        let Some(_lock) = self.lock(id)? else {
            return Err(Failure::new(Kind::Conflict, format!("a process drives agent {id}"))
                .hint(format!("interrupt it first: pal agent interrupt {id}")));
        };
        let loaded = self.load(id).await?;
        let body = body_of(&loaded.view, id)?;
        let checkpoint = self.find_checkpoint(&loaded.view, id, Some(turn))?;
        let through = position(checkpoint, id);
        if through.agent != *id {
            return Err(Failure::new(Kind::Usage, format!("turn {turn} was before agent {id} was forked"))
                .hint(format!(
                    "rewind or fork the agent that it came from: pal agent fork {} --at {turn}",
                    through.agent
                )));
        }
        let fresh = self.fleet().snapshots().fork_at(&body, &checkpoint.snapshot).await?;
        let body = fresh.id().clone();
        self.note(
            id,
            [
                EventData::from(AgentRewound { through: checkpoint.seq, turn }),
                EventData::from(AgentEmbodied {
                    body: body.clone(),
                    snapshot: Some(checkpoint.snapshot.clone()),
                }),
            ],
        )?;
        Ok(body)
    }
}

fn body_of(view: &AgentView, id: &AgentId) -> Result<BodyId, Failure> {
    view.body.clone().ok_or_else(|| Failure::new(Kind::Conflict, format!("agent {id} has no Body")))
}

/// The place of a checkpoint in the chain of this agent, or of the agent that took it.
fn position(checkpoint: &Checkpoint, id: &AgentId) -> AgentPosition {
    AgentPosition { agent: checkpoint.agent.clone().unwrap_or_else(|| id.clone()), through: checkpoint.seq }
}

impl Agents {
    /// The checkpoints of an agent whose snapshots exist, oldest first.
    pub fn checkpoints<'a>(&self, view: &'a AgentView) -> Result<Vec<&'a Checkpoint>, Failure> {
        let snapshots: BTreeSet<SnapshotId> =
            self.fleet().snapshots().list()?.into_iter().map(|snapshot| snapshot.id).collect();
        Ok(view.checkpoints.iter().filter(|one| snapshots.contains(&one.snapshot)).collect())
    }

    /// The checkpoint of a turn; the newest one if no turn is given.
    fn find_checkpoint<'a>(
        &self,
        view: &'a AgentView,
        id: &AgentId,
        turn: Option<u64>,
    ) -> Result<&'a Checkpoint, Failure> {
        let existing = self.checkpoints(view)?;
        let found = match turn {
            Some(turn) => existing.iter().rfind(|checkpoint| checkpoint.turn == turn),
            None => existing.last(),
        };
        found.copied().ok_or_else(|| {
            let mut turns: Vec<String> = existing.iter().map(|one| one.turn.to_string()).collect();
            turns.dedup();
            let failure = Failure::new(
                Kind::NotFound,
                match turn {
                    Some(turn) => format!("agent {id} has no checkpoint of turn {turn}"),
                    None => format!("agent {id} has no checkpoint yet"),
                },
            );
            if turns.is_empty() {
                failure.hint("the driver takes the first one before the first answer")
            } else {
                failure.hint(format!("turns with a checkpoint: {}", turns.join(", ")))
            }
        })
    }
}
