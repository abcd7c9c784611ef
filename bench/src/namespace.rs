//! A mount namespace for peers that fail with this host's cgroup mounts.

use std::{io, thread};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

const UNIFIED: &str = "/sys/fs/cgroup/unified";

/// Runs a function in a thread that does not see `/sys/fs/cgroup/unified`; other threads still do.
pub fn without_unified<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            hide_unified()?;
            act()
        });
        inside.join().unwrap_or_else(|_| Err(io::Error::other("the thread without cgroup v2 broke")))
    })
}

/// Hides it from this thread and its children.
pub fn hide_unified() -> io::Result<()> {
    if !std::path::Path::new(UNIFIED).exists() {
        return Ok(());
    }
    #[expect(deprecated, reason = "its replacement is unsafe because of CLONE_FILES, which is not used")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::FS | rustix::thread::UnshareFlags::NEWNS)?;
    // Otherwise the unmount would propagate to the host.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    match unmount(UNIFIED, UnmountFlags::DETACH) {
        Err(error) if error != rustix::io::Errno::INVAL => Err(error.into()),
        _ => Ok(()),
    }
}
