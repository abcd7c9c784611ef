//! The one room with `unsafe`: what Linux offers, as safe functions without policy.
//!
//! Invariant: nothing here decides what a Body may do; callers bring the decision as data.
//! Absent on purpose: logging, configuration, environment variables.

pub mod spawn;
