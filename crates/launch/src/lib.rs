//! `pal-launch`: creates one Body on the process layer, then supervises it.
//!
//! It is a program of its own so that a small process with one thread drops privileges and enters namespaces, never a
//! fork of a running server. It reads its plan, forks the Body's first process into new namespaces, and stays as the
//! parent of that process: it records how the guest ends, ends it at its timeout or when its creator is gone, and
//! cleans up the Body's directory. A killed supervisor takes nothing with it: the Body runs on.
//!
//! Invariant: it has one thread, from start to end.
//! Invariant: when the guest begins, the first process holds nothing of the host but its socket, its log and its
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
mod peers;
mod report;
mod root;
mod supervisor;
mod transparent;
mod unpack;
mod userns_fs;
mod vm;

use std::{ffi::OsString, path::Path, process::ExitCode};

use supervisor::{ForkTiming, launch_and_supervise};
pub use vm::{ApiRequest, requests, traffic};

/// Runs the program: takes its arguments, the program name first, and returns its exit code.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let called = arguments.next().unwrap_or_default();
    if Path::new(&called).file_name() == Path::new(proto::workspace::CHANGES).file_name() {
        return guest::fsmonitor::ask(arguments);
    }
    if Path::new(&called).file_name() == Some(proto::vm::JAILED.as_ref()) {
        return vm::firecracker_jail::enter(arguments);
    }
    if Path::new(&called).file_name() == Some(proto::egress::PROGRAM.as_ref()) {
        return ::egress::main();
    }
    if rustix::process::getpid().is_init() && Path::new("/modules").is_dir() {
        // This is the first process of a microVM: the kernel started this program from the initramfs.
        guest::vm::main();
    }
    match arguments.next() {
        // `pal-launch tree …` works on a Body's files with the Body's own ids.
        Some(verb) if verb == "tree" => userns_fs::main(arguments),
        Some(verb) if verb == "image" => image::main(),
        Some(word) if word == "early" => launch_and_supervise(ForkTiming::Early),
        _ => launch_and_supervise(ForkTiming::Late),
    }
}
