//! The test suite of the store: round trips, tampering, crashes, migrations and errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod artifact;
mod chain;
mod child;
mod conformance;
mod crash;
mod disk;
mod migrate;
mod power;
mod records;
mod scene;
mod seals;
mod tamper;
mod trouble;
