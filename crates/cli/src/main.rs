//! `pal`: gives every agent a computer of its own. Parses arguments, prints text or JSON, sets exit codes.
//!
//! Invariant: only this crate reads the environment, and only this crate prints.
//! Invariant: results go to standard output, messages to standard error.

mod age;
mod args;
mod commands;
mod failure;
mod output;
mod pager;
mod progress;
mod session;
mod settings;
mod table;
mod terminal;
mod usage;

use std::ffi::OsString;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files to the user's maximum: a server has many streams, and a repository many
/// directories. Bodies have a limit of their own.
fn allow_files() {
    let have = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: have.maximum, ..have });
}

fn main() {
    let argv: Vec<OsString> = std::env::args_os().collect();
    if argv.get(1).is_some_and(|first| first == terminal::RESCUE) {
        terminal::restore_when_orphaned();
        std::process::exit(0);
    }
    allow_files();
    let (format, result) = match args::Cli::read(&argv) {
        Ok(cli) => (cli.common.format(), commands::dispatch(cli)),
        Err(error) => (output::Format::guess(&argv), usage::answer(&error, &argv)),
    };
    // Exits without joining threads: one may still block on standard input.
    std::process::exit(i32::from(result.unwrap_or_else(|failure| failure::report(&failure, format))));
}
