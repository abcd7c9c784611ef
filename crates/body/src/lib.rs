//! One sandbox: how it is created, frozen, restored and ended, and the stream to its guest.
//!
//! A Body is a directory, an enforcement record and a stream to its guest; only creating, freezing and ending
//! differ by layer. This crate stores no event: it returns what happened, and `fleet` records it.
//!
//! Invariant: a Body does not depend on the process that created it. Its directory is enough to use and end
//! it.
//! Absent on purpose: retention, names, listing; `fleet` has them.

pub mod archive;
pub mod capacity;
pub mod dir;
pub mod driver;
pub mod egress;
pub mod failure;
pub mod groups;
pub mod guest;
mod helper;
pub mod host;
pub mod ids;
pub mod layers;
pub mod process;
pub mod process_driver;
pub mod programs;
pub mod root;
pub mod snapshot;
pub mod usage;
pub mod vm;

pub use dir::{BodyDir, ProcessState};
pub use guest::GuestClient;
