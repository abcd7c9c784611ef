//! For tests of Bodies: a temporary fleet, commands in it, a probe that judges from inside.
//!
//! Invariant: a test ends everything that it started, and `run` checks that nothing is left: no process,
//! mount, cgroup, descriptor or file.
//! Invariant: a denial is only asserted after the same probe has succeeded with the door open.
//! Invariant: a skip has a reason, and a skip that is not in [`skip::EXPECTED`] fails.

mod bodies;
pub mod doors;
pub mod leaks;
mod microvm_setup;
pub mod probe;
pub mod registry;
pub mod roots;
mod run;
pub mod skip;
mod temporary;
pub mod test_driver;
pub mod user;
pub mod wait;

pub use bodies::{Bodies, CommandOutput, PROBE_INSIDE, explain, open, ran};
pub use leaks::kill;
pub use run::{CallerSkips, run};
pub use sys::{caps::is_host_root as is_root, proc::sees_every_process};
pub use temporary::TemporaryDir;
pub use testkit_macros::body_test;
pub use user::{run_as_account, run_as_user};
