//! The agent: a loop that asks a model, carries out its tool calls and writes everything down.
//!
//! The log is the only truth. [`AgentView`] is a fold over the events of the agent's chain; [`AgentDriver`] looks at the view,
//! takes one step, appends the events of that step and folds them into the view. A driver that is killed at any event
//! leaves a log from which the next driver goes on.
//!
//! Invariant: an answer is in the log before the driver acts on it, and a call is in the log before it runs.
//! Invariant: a call that has started runs once: after a crash the tool is asked for the outcome by the call's key, and
//! an outcome that the tool does not know is told to the model as unknown.
//! Invariant: one driver at a time. Every append names the head that it expects, and an append of another driver ends
//! this one.

mod blocks;
mod call;
mod deadline;
mod driver;
mod journal;
pub mod middleware;
mod tool;
mod turn;
mod view;

pub use blocks::{ResolvedEvent, resolve, store_content};
pub use call::{CallEffect, CallPlan, CallResult};
pub use driver::{AgentDriver, DriveEnd, DriveError, DriverParts, LiveSink, LiveUpdate, NullSink};
pub use journal::{AgentJournal, BoxFuture, JournalError};
pub use middleware::{Continuation, Judgement, Middleware};
pub use tool::{AgentTool, CallContext, ToolRegistry};
pub use view::{AgentStatus, AgentTotals, AgentView, COMPACT_TOOL, CallStage, CallState, Checkpoint};
