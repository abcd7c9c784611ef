//! `pal serve` as a program sees it: over HTTP, with real Bodies.
//!
//! Each test runs as the user of the suite and again as an ordinary user, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bad_input;
mod client;
mod commands;
mod crash;
mod life;
mod limits;
mod native;
#[path = "../cli/pal.rs"]
#[allow(dead_code, reason = "shared with the suite of the command line")]
mod pal;
mod ports;
mod server;
mod start;
mod telemetry;
mod templates;
mod terminal;

pub(crate) use pal::cli_test as server_test;
