//! `bench`: measures pal and its peers in one run on one host, and checks the bars.
//!
//! Invariant: compared programs are measured interleaved, so that noise affects all of them.
//! Invariant: a peer is in a table only if it really ran; otherwise the table says why it is missing.
//! Invariant: this program ends everything that it starts, also when it is interrupted.
//! Absent on purpose: assertions about wall time. Bars are printed; only `--strict` makes them an exit code.

mod agents;
mod args;
mod client;
mod context;
mod groups;
mod library;
mod machine;
mod measure;
mod memory;
mod namespace;
mod oci;
mod peers;
mod plain_qemu;
mod report;
mod residents;
mod run;
mod sections;
mod stats;
mod tested_server;
mod user;
mod workload;

use std::{io, process::ExitCode};

use args::{BenchArgs, BenchCommand};
use context::BenchContext;
use report::BenchReport;

fn main() -> ExitCode {
    match args::parse(std::env::args().skip(1)) {
        Ok(BenchCommand::Help) => {
            print!("{}", args::HELP);
            ExitCode::SUCCESS
        }
        Ok(BenchCommand::Work(words)) => finish(workload::main(&words).map(|()| true)),
        Ok(BenchCommand::Bench(args)) => finish(bench(args)),
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

/// Measures; returns false if a bar is missed under `--strict`.
fn bench(args: BenchArgs) -> io::Result<bool> {
    if let Some(user) = args.as_user {
        return user::again_as(user);
    }
    measure::listen_to_interrupts()?;
    let context = BenchContext::prepare(args)?;
    let mut report = BenchReport::new(machine::describe(&context));
    print!("{}", report.head());
    for section in sections::ALL {
        if !context.args.wants(section.name) || measure::interrupted() {
            continue;
        }
        eprintln!("measuring: {} …", section.about);
        match (section.run)(&context) {
            Ok(part) => {
                print!("{}", part.markdown());
                report.parts.push(part);
            }
            Err(error) => eprintln!("error: {}: {error}", section.name),
        }
    }
    print!("{}", report.bars_markdown());
    if let Some(file) = &context.args.json {
        std::fs::write(file, report.json()?)?;
    }
    if let Some(file) = &context.args.save {
        std::fs::write(file, report.markdown())?;
    }
    Ok(!context.args.strict || report.all_passed())
}
