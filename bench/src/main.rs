//! `bench`: pal and its peers, measured in one run on one machine, and the bars of the plan judged by it.
//!
//! Invariant: what is compared is measured interleaved, so that a noisy neighbour is everybody's.
//! Invariant: a peer is in a table only if it really ran; otherwise the table says why it is not.
//! Invariant: what this program starts, it ends, also when it is interrupted.
//! Absent on purpose: assertions about wall time. Bars are printed; only `--strict` makes them an exit code.

mod args;
mod client;
mod ground;
mod groups;
mod library;
mod machine;
mod measure;
mod memory;
mod namespace;
mod oci;
mod peers;
mod plain;
mod report;
mod residents;
mod run;
mod sections;
mod stats;
mod user;
mod workload;

use std::{io, process::ExitCode};

use args::{Args, Asked};
use ground::Ground;
use report::Report;

fn main() -> ExitCode {
    match args::parse(std::env::args().skip(1)) {
        Ok(Asked::Help) => {
            print!("{}", args::HELP);
            ExitCode::SUCCESS
        }
        Ok(Asked::Work(words)) => finish(workload::main(&words).map(|()| true)),
        Ok(Asked::Bench(args)) => finish(bench(args)),
        Err(why) => {
            eprintln!("error: {why}\n  hint: cargo run --release -p bench -- --help");
            ExitCode::from(2)
        }
    }
}

fn finish(done: io::Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(121)
        }
    }
}

/// Measures; false when a bar is missed and that matters.
fn bench(args: Args) -> io::Result<bool> {
    if let Some(user) = args.as_user {
        return user::again_as(user);
    }
    measure::listen_to_interrupts()?;
    let ground = Ground::prepare(args)?;
    let mut report = Report::new(machine::describe(&ground));
    print!("{}", report.head());
    for section in sections::ALL {
        if !ground.args.wants(section.name) || measure::interrupted() {
            continue;
        }
        eprintln!("measuring: {} …", section.about);
        match (section.run)(&ground) {
            Ok(part) => {
                print!("{}", part.markdown());
                report.parts.push(part);
            }
            Err(error) => eprintln!("error: {}: {error}", section.name),
        }
    }
    print!("{}", report.bars_markdown());
    if let Some(file) = &ground.args.json {
        std::fs::write(file, report.json()?)?;
    }
    if let Some(file) = &ground.args.save {
        std::fs::write(file, report.markdown())?;
    }
    Ok(!ground.args.strict || report.all_passed())
}
