//! `pal-launch`: makes one Body on the process layer, then keeps it.
//!
//! Why a program of its own: privileges are dropped and namespaces entered in a small process with one thread, never
//! in a copy of a running server. It reads its plan, forks the Body's first process into new namespaces, and stays
//! as that process's parent: it learns how the guest ends, ends it when its time or its maker is over, and leaves
//! the Body's directory in order. A keeper that is killed takes nothing with it: the Body runs on.
//!
//! Invariant: one thread, from start to end.
//! Invariant: the first process holds nothing of the host when the guest begins but its socket, its log and its
//! configuration.

mod egress;
mod ext4;
mod git_dirs;
mod idmap;
mod image;
mod init;
mod kernel_mounts;
mod lock_down;
mod lower_dirs;
mod network;
mod report;
mod root;
mod supervisor;
mod unpack;
mod userns_fs;
mod vm;

use std::{ffi::OsString, path::Path, process::ExitCode};

use supervisor::{ForkTiming, launch_and_supervise};
pub use vm::{ApiRequest, requests, traffic};

/// The program's arguments in, its name first; its exit code out.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let called = arguments.next().unwrap_or_default();
    if Path::new(&called).file_name() == Path::new(proto::workspace::CHANGES).file_name() {
        return guest::fsmonitor::ask(arguments);
    }
    if Path::new(&called).file_name() == Some(proto::vm::JAILED.as_ref()) {
        return vm::jail::enter(arguments);
    }
    if Path::new(&called).file_name() == Some(proto::egress::PROGRAM.as_ref()) {
        return ::egress::main();
    }
    if rustix::process::getpid().is_init() && Path::new("/modules").is_dir() {
        // The first process of a machine: its kernel started this program from its first file system.
        guest::vm::main();
    }
    match arguments.next() {
        // `pal-launch tree …`: work on a Body's files under its own ids.
        Some(verb) if verb == "tree" => userns_fs::main(arguments),
        Some(verb) if verb == "image" => image::main(),
        Some(word) if word == "early" => launch_and_supervise(ForkTiming::Early),
        _ => launch_and_supervise(ForkTiming::Late),
    }
}
