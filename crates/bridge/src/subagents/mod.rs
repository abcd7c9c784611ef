//! Sub-agents: an agent gives a task to another one with a context of its own, and gets its report and its work.
//!
//! A sub-agent is an agent like any other, with a chain, a role and a parent. It works in a fork of the parent's Body, or
//! in the parent's Body itself if its role only reads. The process that drives the parent drives it, too.
//!
//! Invariant: the key of a call identifies its sub-agent, so that a call that is repeated after a crash finds the
//! sub-agent, goes on with it and brings its work back once.
//! Invariant: the answers of a sub-agent count for every agent above it, while it runs and afterwards.
//! Invariant: a sub-agent has at most the rights of its parent: its mode, its Body's policy, the rest of its budget.
//! Invariant: work that could not be merged stays in the sub-agent's Body, and the result says where.

mod budget;
mod child;
mod merge;
mod roles;
mod settle;
mod task;

use std::sync::Arc;

use brain::{
    agent::{AgentTool, BoxFuture, DriveEnd, LiveSink, Middleware},
    library::Role,
};
use proto::{AgentId, Failure, event_data::AgentSpec};
use tokio::sync::{Mutex, Semaphore};

use crate::Agents;
use budget::{SharedBudget, SpendMeter};
use task::TaskTool;

pub use roles::{find_role, general_purpose, roles_for_tasks, shape_tools};
pub use task::TASK_TOOL;

/// How many agents may be above a sub-agent.
const DEPTH_MAX: u64 = 3;
/// The most sub-agents of one agent and its sub-agents that run at once.
const RUNNING_MAX: usize = 8;

/// Drives a sub-agent; the host of agents does.
pub trait SubagentDriver: Send + Sync {
    /// Drives an agent until it waits or has finished; `None` if another process drives it.
    fn drive_subagent<'a>(
        &'a self,
        id: &'a AgentId,
        lineage: Lineage,
    ) -> BoxFuture<'a, Result<Option<DriveEnd>, Failure>>;
}

/// The agents that are driven together: an agent, the ones above it, and the limits that they share.
#[derive(Clone)]
pub struct Lineage {
    meter: Arc<SpendMeter>,
    slots: Arc<Semaphore>,
}

impl Lineage {
    /// The lineage of an agent that no other agent waits for.
    pub fn root() -> Self {
        Self { meter: Arc::new(SpendMeter::default()), slots: Arc::new(Semaphore::new(RUNNING_MAX)) }
    }

    /// The lineage of a sub-agent of this agent.
    fn child(&self) -> Self {
        Self { meter: SpendMeter::below(&self.meter), slots: Arc::clone(&self.slots) }
    }

    /// Pauses the agent when the budget of an agent above it is used up. It belongs behind the agent's own budget.
    pub fn budget(&self) -> Arc<dyn Middleware> {
        Arc::new(SharedBudget::new(Arc::clone(&self.meter)))
    }
}

/// The sub-agents of one agent, for the process that drives it.
pub struct Subagents {
    agents: Agents,
    spec: AgentSpec,
    roles: Vec<Role>,
    driver: Arc<dyn SubagentDriver>,
    lineage: Lineage,
    live: Arc<dyn LiveSink>,
    /// Work goes into the Body of one sub-agent after the other.
    merging: Mutex<()>,
}

impl Subagents {
    /// Lets an agent give tasks to sub-agents of these roles.
    pub fn new(
        agents: Agents,
        spec: &AgentSpec,
        roles: Vec<Role>,
        driver: Arc<dyn SubagentDriver>,
        lineage: Lineage,
        live: Arc<dyn LiveSink>,
    ) -> Arc<Self> {
        let spec = spec.clone();
        Arc::new(Self { agents, spec, roles, driver, lineage, live, merging: Mutex::new(()) })
    }

    /// The tool `task`; none for an agent that has too many agents above it, or no role to give a task to.
    pub fn tool(self: &Arc<Self>) -> Option<Arc<dyn AgentTool>> {
        if self.depth() >= DEPTH_MAX || self.roles.is_empty() {
            return None;
        }
        Some(Arc::new(TaskTool::new(Arc::clone(self))))
    }

    /// How many agents are above this one.
    fn depth(&self) -> u64 {
        self.spec.parent.as_ref().map_or(0, |parent| parent.depth)
    }

    fn role(&self, name: &str) -> Option<&Role> {
        self.roles.iter().find(|role| role.name == name)
    }
}
