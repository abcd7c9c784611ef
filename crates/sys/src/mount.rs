//! Mounts, by the calls that every kernel since 5.12 has.

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

/// What may be done through a mount.
#[derive(Debug, Clone, Copy, Default)]
pub struct MountAttrs {
    /// Nothing can be changed.
    pub read_only: bool,
    /// Nothing can be executed.
    pub no_exec: bool,
    /// Devices work. Off unless said.
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

/// Cuts the caller's mount namespace off from every other: nothing propagates in or out.
pub fn make_private() -> io::Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change("/", flags)?)
}

/// Mounts a file system of the kernel's own.
pub fn mount_new(kind: &str, target: &Path, attrs: MountAttrs, options: &str) -> io::Result<()> {
    let mut flags = MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, attrs.read_only);
    flags.set(MountFlags::NOEXEC, attrs.no_exec);
    flags.set(MountFlags::NODEV, !attrs.devices);
    let options = CString::new(options)?;
    Ok(rustix::mount::mount(kind, target, kind, flags, options.as_c_str())?)
}

/// Makes a file system of our own read-only, wherever it is seen.
pub fn make_read_only(target: &Path) -> io::Result<()> {
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount_remount(target, flags, "")?)
}

/// A detached copy of what is mounted at a path: with or without the mounts below.
pub fn clone_tree(source: &Path, below: Submounts) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, matches!(below, Submounts::Too));
    Ok(rustix::mount::open_tree(rustix::fs::CWD, source, flags)?)
}

/// A detached copy of what a handle is on, with or without the mounts below.
pub fn clone_tree_of(handle: BorrowedFd<'_>, below: Submounts) -> io::Result<OwnedFd> {
    let mut flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, matches!(below, Submounts::Too));
    Ok(rustix::mount::open_tree(handle, "", flags)?)
}

/// Whether mounts below come along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submounts {
    /// They do.
    Too,
    /// They do not.
    No,
}

/// Restricts a detached mount, with everything below it.
pub fn restrict(tree: BorrowedFd<'_>, attrs: MountAttrs) -> io::Result<()> {
    set_attributes(tree, attrs.bits(), None)
}

/// Shows a detached mount's files under other ids: those a user namespace maps.
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

/// Gives a memory file system of our own other bounds, wherever it is seen.
pub fn resize(target: &Path, options: &str) -> io::Result<()> {
    let options = CString::new(options)?;
    Ok(rustix::mount::mount_remount(target, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?)
}

/// Takes what is mounted at one place to another, with the mounts below it. No link is followed to get there.
pub fn carry(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::move_mount(rustix::fs::CWD, from, rustix::fs::CWD, to, MoveMountFlags::empty())?)
}

/// Puts a detached mount somewhere.
pub fn attach(tree: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    Ok(rustix::mount::move_mount(tree, "", rustix::fs::CWD, target, flags)?)
}

/// Shows one place at another, restricted.
pub fn bind(source: &Path, target: &Path, attrs: MountAttrs, below: Submounts) -> io::Result<()> {
    let tree = clone_tree(source, below)?;
    restrict(tree.as_fd(), attrs)?;
    attach(tree.as_fd(), target)
}

/// Shows one place at another, as it is: one call, for what needs no restriction beyond the source's.
pub fn bind_plain(source: &Path, target: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(source, target)?)
}

/// Stacks read-only directories below a private one.
pub struct Overlay<'a> {
    /// Nearest first; at least one.
    pub lowers: &'a [&'a Path],
    /// Where changes go.
    pub upper: &'a Path,
    /// The kernel's scratch space, beside the upper.
    pub work: &'a Path,
    /// Never sync: for an upper that nobody will see after the Body.
    pub volatile: bool,
    /// Setuid programs work. Towards the host they gain nothing: the ids behind theirs are those of the user namespace
    /// that mounts the stack.
    pub setuid: bool,
}

impl Overlay<'_> {
    /// Mounts the stack.
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

/// Makes the current directory the root and forgets the old one.
pub fn pivot_here() -> io::Result<()> {
    // With both arguments ".", the old root lands on top of the new one and is what "." unmounts next.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Makes the current directory the root, though it lies within a mount: the mount at `above`, which leads to it, becomes
/// the namespace's root, and the current directory the caller's. The host's is forgotten.
///
/// Who is inside comes out only with `CAP_SYS_CHROOT` or a descriptor from above, and finds no more there than `above` holds.
pub fn pivot_and_enter_here(above: &Path) -> io::Result<()> {
    let here = crate::fd::open_path(Path::new("."))?;
    rustix::process::chdir(above)?;
    pivot_here()?;
    rustix::process::fchdir(&here)?;
    rustix::process::chroot(".")?;
    Ok(())
}
