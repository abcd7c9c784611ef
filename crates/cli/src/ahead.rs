//! What `pal` starts before it has read its own arguments.

use std::{ffi::CStr, process::ExitCode};

use fleet::Launcher;
use launch::When;

/// For `pal run`, the launcher of its Body: it makes namespaces on another processor while this one reads arguments,
/// opens the data directory and writes the plan. One that gets no plan ends. What could not be started here is
/// started later, and fails there with a reason.
///
/// To be called first of all: the launcher is a copy of this process, and should hold nothing of it.
pub fn launcher() -> Option<Launcher> {
    let wanted = verb(sys::origin::arguments()) == Some(c"run");
    wanted.then(|| Launcher::fork(launch).ok()).flatten()
}

/// The first argument that is neither an option nor an option's value.
fn verb<'a>(mut arguments: impl Iterator<Item = &'a CStr>) -> Option<&'a CStr> {
    loop {
        let argument = arguments.next()?;
        match argument.to_bytes() {
            b"--data" | b"--durability" => drop(arguments.next()),
            [b'-', ..] => {}
            _ => return Some(argument),
        }
    }
}

fn launch() -> ExitCode {
    // Where there is only cgroup v2, the Body's first process is forked straight into its group, which the plan names.
    launch::make_and_keep(if sys::cgroup::is_unified() { When::Late } else { When::Early })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_is_found_behind_options() {
        let found = |words: &[&'static CStr]| verb(words.iter().copied());
        assert_eq!(found(&[c"run", c"--", c"true"]), Some(c"run"));
        assert_eq!(found(&[c"--data", c"run", c"--json", c"ls"]), Some(c"ls"));
        assert_eq!(found(&[c"--data=run", c"--durability", c"power", c"run"]), Some(c"run"));
        assert_eq!(found(&[c"--json"]), None);
        assert_eq!(found(&[]), None);
    }
}
