//! `pal serve` as a program sees it: over HTTP, with real Bodies.
//!
//! Each test runs as the user of the suite and again as an ordinary user, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod agents;
mod agents_at_work;
mod authorization;
mod bad_input;
mod client;
mod commands;
mod crash;
mod e2b;
mod hygiene;
mod life;
mod limits;
mod native;
mod network;
#[path = "../cli/pal.rs"]
#[allow(dead_code, reason = "shared with the suite of the command line")]
mod pal;
mod ports;
mod removal;
mod server;
mod shapes;
mod start;
mod telemetry;
mod templates;
mod terminal;
mod work;

pub(crate) use pal::cli_test as server_test;
