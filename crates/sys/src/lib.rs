//! The one room with `unsafe`: what Linux offers, as safe functions without policy.
//!
//! Invariant: nothing here decides what a Body may do; callers bring the decision as data.
//! Absent on purpose: logging, configuration, environment variables.

pub mod beside;
mod bpf;
pub mod caps;
pub mod cgroup;
pub mod devices;
pub mod fd;
pub mod filter;
pub mod imprint;
pub mod intercept;
pub mod landlock;
pub mod memory;
pub mod modes;
pub mod mount;
pub mod namespace;
pub mod origin;
pub mod pages;
pub mod proc;
pub mod process;
pub mod quiet;
pub mod random;
pub mod rest;
pub mod signals;
pub mod spawn;
mod stack;
pub mod trace;
pub mod tree;
pub mod vsock;
