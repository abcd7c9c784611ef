//! `pal-guest --config FILE (--unix PATH | --tcp ADDRESS:PORT)`: the guest without a Body, for tests and developers.
//!
//! A Body has no such program: the process that `pal-launch` prepares runs the guest itself.

use std::{io::Write, process::ExitCode};

fn main() -> ExitCode {
    match guest::serve_command_line() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pal-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
