//! The sections, one file for each question.

mod agent;
mod exec;
mod idle;
mod library;
mod microvm;
mod run;
mod server;
mod throughput;
mod work;

use std::io;

use crate::{context::BenchContext, report::ReportSection};

/// One section.
pub struct BenchSection {
    /// Its name for `--only`.
    pub name: &'static str,
    /// Its meaning.
    pub about: &'static str,
    /// Measures it.
    pub run: fn(&BenchContext) -> io::Result<ReportSection>,
}

/// All sections, in order.
pub const ALL: [BenchSection; 9] = [
    BenchSection { name: "run", about: "`true` in a fresh sandbox", run: run::measure },
    BenchSection {
        name: "library",
        about: "create, exec and remove through the library",
        run: library::measure,
    },
    BenchSection { name: "exec", about: "`true` in something that runs", run: exec::measure },
    BenchSection {
        name: "throughput",
        about: "sandboxes in a second, 1-way and 16-way",
        run: throughput::measure,
    },
    BenchSection { name: "idle", about: "memory of idle Bodies", run: idle::measure },
    BenchSection { name: "work", about: "work inside against work outside", run: work::measure },
    BenchSection { name: "server", about: "`pal serve` as its clients meet it", run: server::measure },
    BenchSection {
        name: "microvm",
        about: "machines: cold, warm, forked, and what they take",
        run: microvm::measure,
    },
    BenchSection { name: "agent", about: "agents with scripted models", run: agent::measure },
];
