//! The confinement of `pal-egress`: what it needs for its work, and nothing else of the host.
//!
//! It may open files for reading, below the directories of the resolver's files; sockets of the Internet families; memory
//! that is never executable. It may start no program, signal no process and write no file but the spool that it holds.
//! Run by root it becomes `nobody` first.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
};

use rustix::{
    process::{DumpableBehavior, Resource},
    thread::CapabilitySet,
};

use crate::resolve;

/// The user without rights, on every Linux.
const NOBODY: u32 = 65534;
/// Two for each connection, and some besides.
const FILES_MAX: u64 = 512;

/// Confines the caller for good. Gives the Landlock ABI that holds it; 0 where the kernel has none.
pub fn confine() -> io::Result<i64> {
    sys::process::limit(Resource::Core, 0)?;
    sys::process::limit(Resource::Nofile, FILES_MAX)?;
    let dirs = resolver_dirs();
    if sys::caps::is_host_root() {
        sys::namespace::become_ids(NOBODY, NOBODY, true)?;
    } else if rustix::process::geteuid().is_root() {
        // Root of a container may have no other id than its own.
        let _ = sys::namespace::become_ids(NOBODY, NOBODY, true);
    }
    sys::caps::limit_to(CapabilitySet::empty())?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::caps::no_new_privileges()?;
    let landlock = sys::landlock::only_read_below(&dirs)?;
    sys::egress_filter::install()?;
    Ok(landlock)
}

/// Directories that hold the resolver's files. Directories, because the files are replaced by others of the same name.
fn resolver_dirs() -> BTreeSet<PathBuf> {
    let files = [resolve::HOSTS, resolve::SERVERS].map(PathBuf::from);
    let targets = files.iter().filter_map(|file| file.canonicalize().ok()).collect::<Vec<_>>();
    let dirs = files.iter().chain(&targets).filter_map(|file| file.parent());
    dirs.filter(|dir| dir.is_dir()).map(Path::to_owned).collect()
}
