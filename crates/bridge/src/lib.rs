//! The Bridge: joins a Brain to Bodies. Agents, their logs, their tools and their checkpoints.
//!
//! Invariant: nothing that a model asks for runs on the host: every tool acts in a Body, or on the agent's own log.
//! Absent on purpose: printing, environment variables, terminals. The command line and the server bring those.

mod agents;
mod assembly;
mod checkpoints;
mod commands;
pub mod files;
mod host;
mod journal;
mod live;
pub mod mcp;
mod processes;
mod removal;
mod replay;
mod scripts;
mod subagent_settings;
pub mod subagents;
pub mod tools;
mod travel;
mod user_library;
pub mod venue;
mod workplace;

pub use brain::{
    agent::{
        AgentStatus, AgentTotals, AgentView, CallStage, Checkpoint, DriveEnd, LiveSink, LiveUpdate,
        ResolvedEvent,
    },
    model::{ModelAddress, ToolArguments},
};

pub use agents::{AgentRecord, Agents, DriverLock, LoadedAgent, check_message};
pub use checkpoints::BodyCheckpoints;
pub use host::{AgentHost, AgentSettings, HostSettings, VariableLookup, catalog, key_variable};
pub use journal::FleetJournal;
pub use live::{LiveSocket, live_channel, watch_live};
pub use removal::RemovedBody;
pub use replay::{ReplayDifference, ReplayReport};
pub use scripts::find_script;
pub use workplace::{Workplace, explain, guest_key};
