//! Judges a sandbox from inside: each probe tries one door and reports whether it is open.
//!
//! Invariant: `denied` means that the kernel refused the very action that was tried. A probe that could not
//! try is `broken`; if this kernel or root lacks the resource, it is `denied` with a detail that begins
//! `absent:`.
//! Invariant: on an open host, as root, no probe changes anything that outlives it. Harmful doors are judged
//! by opening without writing, or by arguments that fail only after the permission check.
//! Invariant: nothing is sent beyond loopback, and no process is touched but those the caller names.
//! Absent on purpose: a default for the process to attack. Pid 1 of a host belongs to the host; the caller
//! passes `init=1` inside a Body and a process of its own as the control.

mod catalog;
mod doors;
mod run;
mod sys;
mod verdict;

use std::io::Write;
use std::process::ExitCode;

use catalog::{Probe, ProbeArgs, ProbeListing};
use run::{InitialState, ProbeRunner};

const USAGE: &str = "usage: probe list | probe run NAME [key=value…] | probe all [key=value…]";

fn main() -> ExitCode {
    // Before anything opens a file: the descriptors that are open now were inherited.
    let start = InitialState::look();
    let words: Vec<String> = std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["list"] => say(&catalog::all().map(ProbeListing::from).collect::<Vec<_>>()),
        ["run", name, rest @ ..] => match catalog::all().find(|p| p.name == *name) {
            Some(probe) => with_args(rest, |args| say(&ProbeRunner::new(start, args).report(probe))),
            None => usage(&format!("no probe is called {name}")),
        },
        ["all", rest @ ..] => with_args(rest, |args| {
            let runnable: Vec<&Probe> = catalog::all().filter(|p| p.missing(&args).is_none()).collect();
            let runner = ProbeRunner::new(start, args);
            say(&runnable.into_iter().map(|p| runner.report(p)).collect::<Vec<_>>())
        }),
        _ => usage(USAGE),
    }
}

fn with_args(words: &[&str], then: impl FnOnce(ProbeArgs) -> ExitCode) -> ExitCode {
    match ProbeArgs::parse(words) {
        Ok(args) => then(args),
        Err(word) => usage(&format!("{word} is not key=value")),
    }
}

/// Prints one line of JSON.
fn say<T: serde::Serialize>(value: &T) -> ExitCode {
    match serde_json::to_string(value) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => usage(&format!("cannot write JSON: {error}")),
    }
}

fn usage(text: &str) -> ExitCode {
    // There is no place to report a failed write to standard error.
    let _ = writeln!(std::io::stderr(), "probe: {text}");
    ExitCode::from(2)
}
