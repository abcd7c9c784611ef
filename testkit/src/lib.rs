//! For tests of Bodies: a fleet that goes away, commands in it, a probe that judges from inside.
//!
//! Invariant: a test ends everything it started, and `run` shows that nothing is left: no process, mount, cgroup,
//! descriptor or file.
//! Invariant: a denial is only asserted after the same probe reached what it is denied.
//! Invariant: a skip is a value with a reason, and one that [`skip::EXPECTED`] does not hold is red.

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
