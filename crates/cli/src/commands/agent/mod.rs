//! `pal agent`: run agents, watch them, answer them, and go back in time.
//!
//! Invariant: this process never drives an agent that a person watches. A detached process does, so that closing the
//! terminal changes nothing for the agent.

mod attach;
mod call_line;
mod driver;
mod end;
mod follow;
mod group;
mod input;
mod keyboard;
mod list;
mod live;
mod prompt;
mod render;
mod run;
mod screen;
mod show;
mod style;
mod transcript;

use std::{path::PathBuf, sync::Arc};

use bridge::{AgentHost, AgentRecord, Agents, HostSettings};
use fleet::{Durability, Fleet};
use proto::{Failure, Kind};

use super::work::git_identity;
use crate::{args::AgentCommand, output::Format};

/// Runs a command of `pal agent`.
pub async fn agent(
    fleet: Fleet,
    durability: Durability,
    command: AgentCommand,
    format: Format,
) -> Result<u8, Failure> {
    driver::set_durability(durability);
    let agents = Agents::new(Arc::new(fleet));
    match command {
        AgentCommand::Run(args) => run::run(&agents, *args, format).await,
        AgentCommand::Ls(args) => list::list(&agents, &args, format).await,
        AgentCommand::Show(args) => show::show(&agents, &args, format).await,
        AgentCommand::Attach(args) => {
            let id = find(&agents, args.agent.as_deref())?.spec.id;
            attach::attach(&agents, &id, attach::WatchFrom::Newest, format).await
        }
        AgentCommand::Send(args) => input::send(&agents, args, format).await,
        AgentCommand::Approve(args) => input::approve(&agents, args, format).await,
        AgentCommand::Deny(args) => input::deny(&agents, args, format).await,
        AgentCommand::Answer(args) => input::answer(&agents, args, format).await,
        AgentCommand::Interrupt(args) => input::interrupt(&agents, &args, false, format).await,
        AgentCommand::Stop(args) => input::interrupt(&agents, &args, true, format).await,
        AgentCommand::Resume(args) => input::resume(&agents, &args, format).await,
        AgentCommand::Fork(args) => run::fork(&agents, args, format).await,
        AgentCommand::Rewind(args) => run::rewind(&agents, &args, format).await,
        AgentCommand::Replay(args) => run::replay(&agents, &args, format).await,
        AgentCommand::Export(args) => transcript::export(&agents, &args, format).await,
        AgentCommand::Cost(args) => list::cost(&agents, &args, format).await,
        AgentCommand::Rm(args) => list::remove(&agents, &args, format).await,
        AgentCommand::Drive(args) => driver::drive(&agents, &args).await,
    }
}

/// The agent that a person names; the newest one without a name.
fn find(agents: &Agents, name: Option<&str>) -> Result<AgentRecord, Failure> {
    match name {
        Some(name) => agents.find(name),
        None => agents.list()?.into_iter().rfind(|record| record.spec.parent.is_none()).ok_or_else(|| {
            Failure::new(Kind::NotFound, "there is no agent").hint("start one: pal agent run \"the task\"")
        }),
    }
}

/// The host that drives agents with the settings of this user.
fn host(agents: &Agents) -> Result<AgentHost, Failure> {
    let settings = HostSettings {
        config: config_dir()?,
        variables: Arc::new(|name| std::env::var(name).ok().filter(|value| !value.is_empty())),
        person: git_identity(),
    };
    Ok(AgentHost::new(agents.clone(), settings))
}

/// The user's configuration directory.
pub fn config_dir() -> Result<PathBuf, Failure> {
    let dir = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir: &PathBuf| dir.is_absolute());
    if let Some(dir) = dir("PAL_CONFIG") {
        return Ok(dir);
    }
    if let Some(dir) = dir("XDG_CONFIG_HOME") {
        return Ok(dir.join("palisade"));
    }
    dir("HOME").map(|home| home.join(".config/palisade")).ok_or_else(|| {
        Failure::new(Kind::Usage, "there is no home directory for the configuration")
            .hint("set HOME, or PAL_CONFIG to a directory")
    })
}
