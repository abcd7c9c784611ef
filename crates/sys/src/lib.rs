//! The only crate with `unsafe`: Linux system calls as safe functions without policy.
//!
//! Invariant: nothing here decides what a Body may do; callers pass the decision as data.
//! Absent on purpose: logging, configuration, environment variables.

mod bpf;
pub mod caps;
pub mod cgroup;
pub mod deny_setuid;
pub mod egress_filter;
pub mod fd;
pub mod landlock;
pub mod lazy_write_stream;
pub mod mount;
pub mod namespace;
mod netlink;
pub mod pagemap;
pub mod proc;
pub mod process;
pub mod ptrace_mmap;
pub mod random;
pub mod redirect;
pub mod seccomp;
pub mod seccomp_notify;
pub mod signals;
pub mod sparse;
pub mod spawn;
mod stack;
pub mod thread_rights;
pub mod tree;
pub mod vsock;
