//! `pal`: a computer of its own for every agent. Arguments in, text or JSON out, exit codes.
//!
//! Invariant: only this crate reads the environment, and only this crate prints.
//! Invariant: standard output is data, standard error is talk.

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

/// Takes as many open files as this user may have: a server has many streams, and a repository many directories.
/// Bodies have a limit of their own.
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
    // Exits without joining: a thread may still wait for standard input, which nobody needs any more.
    std::process::exit(i32::from(result.unwrap_or_else(|failure| failure::report(&failure, format))));
}
