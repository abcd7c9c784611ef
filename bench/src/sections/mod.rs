//! What is measured, one file for each question.

mod exec;
mod idle;
mod library;
mod microvm;
mod run;
mod server;
mod throughput;
mod work;

use std::io;

use crate::{ground::Ground, report::Part};

/// One question.
pub struct Section {
    /// Its name for `--only`.
    pub name: &'static str,
    /// Its meaning.
    pub about: &'static str,
    /// Answers it.
    pub run: fn(&Ground) -> io::Result<Part>,
}

/// All of them, in order.
pub const ALL: [Section; 8] = [
    Section { name: "run", about: "`true` in a fresh sandbox", run: run::measure },
    Section { name: "library", about: "create, exec and remove through the library", run: library::measure },
    Section { name: "exec", about: "`true` in something that runs", run: exec::measure },
    Section {
        name: "throughput",
        about: "sandboxes in a second, 1-way and 16-way",
        run: throughput::measure,
    },
    Section { name: "idle", about: "memory of idle Bodies", run: idle::measure },
    Section { name: "work", about: "work inside against work outside", run: work::measure },
    Section { name: "server", about: "`pal serve` as its clients meet it", run: server::measure },
    Section {
        name: "microvm",
        about: "machines: cold, warm, forked, and what they take",
        run: microvm::measure,
    },
];
