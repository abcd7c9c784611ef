//! The confinement of `pal-egress`: it keeps the rights that its work needs, and nothing else of the host.
//!
//! It may open files for reading below the directories of the resolver's files, open Internet sockets, and allocate
//! memory that is never executable. It may not start a program, signal a process or write a file other than the spool
//! that it holds. When root starts it, it becomes `nobody` first.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
};

use rustix::{
    process::{DumpableBehavior, Resource},
    thread::CapabilitySet,
};

use crate::{peers::PEERS_MAX, proxy::CONNECTIONS_MAX, resolve};

/// The unprivileged user id on every Linux.
const NOBODY: u32 = 65534;
/// Two descriptors for each of the connections and of those of other Bodies, two for each lookup of a name, and some
/// besides.
const FILES_MAX: u64 = (4 * CONNECTIONS_MAX + 2 * PEERS_MAX) as u64;

/// Confines the caller for good. Returns the Landlock ABI that confines it; 0 if the kernel has none.
pub fn confine() -> io::Result<i64> {
    sys::process::limit(Resource::Core, 0)?;
    sys::process::limit(Resource::Nofile, FILES_MAX)?;
    let dirs = resolver_dirs();
    if sys::caps::is_host_root() {
        sys::namespace::become_ids(NOBODY, NOBODY, true)?;
    } else if rustix::process::geteuid().is_root() {
        // Root of a container may have no other id than its own, so a failure is ignored.
        let _ = sys::namespace::become_ids(NOBODY, NOBODY, true);
    }
    sys::caps::limit_to(CapabilitySet::empty())?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::caps::no_new_privileges()?;
    let landlock = sys::landlock::only_read_below(&dirs)?;
    sys::egress_filter::install()?;
    Ok(landlock)
}

/// The directories of the resolver's files. They are directories, because the files themselves are replaced by others
/// of the same name.
fn resolver_dirs() -> BTreeSet<PathBuf> {
    let files = [resolve::HOSTS, resolve::SERVERS].map(PathBuf::from);
    let targets = files.iter().filter_map(|file| file.canonicalize().ok()).collect::<Vec<_>>();
    let dirs = files.iter().chain(&targets).filter_map(|file| file.parent());
    dirs.filter(|dir| dir.is_dir()).map(Path::to_owned).collect()
}
