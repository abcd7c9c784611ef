//! The process that drives an agent, and how others start it.
//!
//! Invariant: the process outlives the one that started it, and no key of that terminal reaches it.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::OnceLock,
};

use bridge::{Agents, LiveSocket};
use fleet::Durability;
use proto::{AgentId, Failure, Kind};

use crate::args::AgentArg;

/// The durability that was asked for on the command line.
static DURABILITY: OnceLock<Durability> = OnceLock::new();

/// Gives the durability of this process to the drivers that it starts.
pub fn set_durability(durability: Durability) {
    let _ = DURABILITY.set(durability);
}

/// Starts a process that drives an agent. If another process drives the agent, the new one ends.
pub fn wake(agents: &Agents, id: &AgentId) -> Result<(), Failure> {
    let cannot = |error: std::io::Error| {
        Failure::new(Kind::Host, "cannot start the process that drives the agent").because(error)
    };
    let directory = agents.directory(id);
    std::fs::create_dir_all(&directory).map_err(cannot)?;
    // The last words of a driver that works are not lost to one that will end at once.
    let is_driven = agents.is_driven(id);
    let mut log = File::options();
    log.create(true).append(is_driven).write(true).truncate(!is_driven);
    let log = log.open(directory.join("driver.log")).map_err(cannot)?;
    // The path by which the kernel knows this program, even if the file was replaced meanwhile.
    let mut child = Command::new("/proc/self/exe")
        .arg0("pal-agent")
        .arg("--data")
        .arg(agents.fleet().data())
        .args(["--durability", durability_word()])
        .args(["agent", "drive", id.as_str()])
        .current_dir("/")
        // The interrupt key of the terminal goes to the foreground group alone.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(cannot)?;
    // The thread only reaps the child, should this process outlive it.
    std::thread::spawn(move || drop(child.wait()));
    Ok(())
}

fn durability_word() -> &'static str {
    match DURABILITY.get() {
        Some(Durability::Power) => "power",
        Some(Durability::Process) | None => "process",
    }
}

/// Drives an agent until it waits or has finished.
pub async fn drive(agents: &Agents, args: &AgentArg) -> Result<u8, Failure> {
    let _ = sys::process::set_name(c"pal-agent");
    let id = super::find(agents, args.agent.as_deref())?.spec.id;
    let host = super::host(agents)?;
    let directory = agents.directory(&id);
    let live = std::fs::create_dir_all(&directory).and_then(|()| LiveSocket::listen(&directory));
    let live = live.map_err(|error| {
        Failure::new(Kind::Host, "cannot listen for watchers of the agent").because(error)
    })?;
    host.drive(&id, live).await?;
    Ok(0)
}
