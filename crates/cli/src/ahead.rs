//! What `pal` starts before it has read its own arguments.

use std::process::ExitCode;

use fleet::Launcher;
use launch::When;

/// For `pal run`, the launcher of its Body: it makes namespaces on another processor while this one reads arguments,
/// opens the data directory and writes the plan. One that gets no plan ends. What could not be started here is
/// started later, and fails there with a reason.
///
/// To be called first of all: the launcher is a copy of this process, and should hold nothing of it.
pub fn launcher() -> Option<Launcher> {
    let wanted = sys::origin::first_argument().is_some_and(|verb| verb == c"run");
    wanted.then(|| Launcher::fork(launch).ok()).flatten()
}

fn launch() -> ExitCode {
    // Where there is only cgroup v2, the Body's first process is forked straight into its group, which the plan names.
    launch::make_and_keep(if sys::cgroup::is_unified() { When::Late } else { When::Early })
}
