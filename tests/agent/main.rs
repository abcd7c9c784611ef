//! Agents in Bodies, with scripted models: sub-agents, venues, checkpoints and replay.

mod crash;
#[allow(dead_code, reason = "the suite of repositories uses all of it")]
#[path = "../work/repo.rs"]
mod repo;
mod subagents;
mod travel;
mod venues;
mod world;
