//! Mounts, by the system calls that every kernel since 5.12 has.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

/// Restrictions of a mount.
#[derive(Debug, Clone, Copy, Default)]
pub struct MountAttrs {
    /// Nothing can be changed through it.
    pub read_only: bool,
    /// Nothing can be executed through it.
    pub no_exec: bool,
    /// Device files work through it; off by default.
    pub devices: bool,
}

impl MountAttrs {
    fn bits(self) -> u64 {
        let mut bits = libc::MOUNT_ATTR_NOSUID;
        if self.read_only {
            bits |= libc::MOUNT_ATTR_RDONLY;
        }
        if self.no_exec {
            bits |= libc::MOUNT_ATTR_NOEXEC;
        }
        if !self.devices {
            bits |= libc::MOUNT_ATTR_NODEV;
        }
        bits
    }
}

/// Makes the caller's mount namespace private: no mount propagates in or out.
pub fn make_private() -> io::Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change("/", flags)?)
}

/// Mounts a new file system.
pub fn mount_new(kind: &str, target: &Path, attrs: MountAttrs, options: &str) -> io::Result<()> {
    let mut flags = MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, attrs.read_only);
    flags.set(MountFlags::NOEXEC, attrs.no_exec);
    flags.set(MountFlags::NODEV, !attrs.devices);
    let options = CString::new(options)?;
    Ok(rustix::mount::mount(kind, target, kind, flags, options.as_c_str())?)
}

/// Makes a file system of the caller read-only in all its mounts.
pub fn make_read_only(target: &Path) -> io::Result<()> {
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount_remount(target, flags, "")?)
}

/// A detached copy of the mount at a path, with or without submounts.
pub fn clone_tree(source: &Path, below: Submounts) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, matches!(below, Submounts::Too));
    Ok(rustix::mount::open_tree(rustix::fs::CWD, source, flags)?)
}

/// A detached copy of the mount that a handle refers to, with or without submounts.
pub fn clone_tree_of(handle: BorrowedFd<'_>, below: Submounts) -> io::Result<OwnedFd> {
    let mut flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, matches!(below, Submounts::Too));
    Ok(rustix::mount::open_tree(handle, "", flags)?)
}

/// Whether submounts are included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submounts {
    /// They are.
    Too,
    /// They are not.
    No,
}

/// Restricts a detached mount, with all its submounts.
pub fn restrict(tree: BorrowedFd<'_>, attrs: MountAttrs) -> io::Result<()> {
    set_attributes(tree, attrs.bits(), None)
}

/// Maps the ids of a detached mount by a user namespace.
pub fn map_ids(tree: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    set_attributes(tree, libc::MOUNT_ATTR_IDMAP, Some(user_namespace))
}

fn set_attributes(tree: BorrowedFd<'_>, set: u64, user_namespace: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: set,
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_namespace.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if set & libc::MOUNT_ATTR_IDMAP == 0 { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string, the structure outlives the call and its size is passed along.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Changes the limits of a tmpfs in all its mounts.
pub fn resize(target: &Path, options: &str) -> io::Result<()> {
    let options = CString::new(options)?;
    Ok(rustix::mount::mount_remount(target, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?)
}

/// Moves a mount with its submounts to another path. No link is followed on the way there.
pub fn carry(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::move_mount(rustix::fs::CWD, from, rustix::fs::CWD, to, MoveMountFlags::empty())?)
}

/// Attaches a detached mount to a path.
pub fn attach(tree: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    Ok(rustix::mount::move_mount(tree, "", rustix::fs::CWD, target, flags)?)
}

/// Bind-mounts a path at another, restricted.
pub fn bind(source: &Path, target: &Path, attrs: MountAttrs, below: Submounts) -> io::Result<()> {
    let tree = clone_tree(source, below)?;
    restrict(tree.as_fd(), attrs)?;
    attach(tree.as_fd(), target)
}

/// Bind-mounts a path at another in one call, with the restrictions of the source.
pub fn bind_plain(source: &Path, target: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(source, target)?)
}

/// An overlay of read-only directories and a private one.
pub struct Overlay<'a> {
    /// Read-only directories, nearest first; at least one.
    pub lowers: &'a [&'a Path],
    /// The directory for changes.
    pub upper: &'a Path,
    /// The kernel's work directory, on the upper's file system.
    pub work: &'a Path,
    /// Never sync: for an upper that is not read after the Body.
    pub volatile: bool,
    /// Setuid programs work. They gain nothing on the host: their ids are those of the user namespace that mounts the
    /// overlay.
    pub setuid: bool,
}

impl Overlay<'_> {
    /// Mounts the overlay.
    pub fn mount(&self, target: &Path) -> io::Result<()> {
        let mut options = b"userxattr,lowerdir=".to_vec();
        for (index, lower) in self.lowers.iter().enumerate() {
            if index > 0 {
                options.push(b':');
            }
            escape(lower, &mut options);
        }
        options.extend_from_slice(b",upperdir=");
        escape(self.upper, &mut options);
        options.extend_from_slice(b",workdir=");
        escape(self.work, &mut options);
        if self.volatile {
            options.extend_from_slice(b",volatile");
        }
        let options = CString::new(options)?;
        let mut flags = MountFlags::NODEV;
        flags.set(MountFlags::NOSUID, !self.setuid);
        Ok(rustix::mount::mount("overlay", target, "overlay", flags, options.as_c_str())?)
    }
}

fn escape(path: &Path, out: &mut Vec<u8>) {
    for byte in path.as_os_str().as_bytes() {
        if matches!(byte, b':' | b',' | b'\\') {
            out.push(b'\\');
        }
        out.push(*byte);
    }
}

/// Makes the current directory the root and detaches the old one.
pub fn pivot_here() -> io::Result<()> {
    // With both arguments ".", the old root is mounted over the new one, and unmounting "." removes it.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Makes the current directory the root, though it lies within a mount: the mount at `above`, which contains it,
/// becomes the root of the namespace, and the current directory the root of the caller. The host's root is detached.
///
/// A process inside can leave its root only with `CAP_SYS_CHROOT` or a descriptor from outside, and finds only the
/// contents of `above` there.
pub fn pivot_and_enter_here(above: &Path) -> io::Result<()> {
    let here = crate::fd::open_path(Path::new("."))?;
    rustix::process::chdir(above)?;
    pivot_here()?;
    rustix::process::fchdir(&here)?;
    rustix::process::chroot(".")?;
    Ok(())
}
