//! `pal` as users and programs see it: exit codes, pipes, terminals, signals, bad input.
//!
//! Each test runs as the user of the suite and again as an ordinary user, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod agent;
mod agent_input;
mod agent_terminal;
mod agent_travel;
mod bad_input;
mod doctor;
mod json;
mod kill;
mod listing;
mod net;
mod origin;
mod pal;
mod pipes;
mod port;
mod secret;
mod setup;
mod terminal;
mod together;

pub(crate) use pal::cli_test;
