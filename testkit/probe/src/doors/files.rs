//! Files of the host, and ways to reach them without a path.

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use super::{behind, head, listable, names, settle};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, Errno, c, call, open};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, reached};

const SECRET: &[&str] = &["secret"];

pub const PROBES: &[Probe] = &behind(
    "files",
    [
        Probe::door("host-file", "read a file of the host", |c| read_at(c.arg("secret"))).needs(SECRET),
        Probe::door("host-directory", "list a directory of the host", |c| listable(c.arg("hostdir")))
            .needs(&["hostdir"]),
        Probe::door("host-file-dotdot", "read it by climbing above the root", |c| {
            read_at(&format!("{}{}", "/..".repeat(40), c.arg("secret")))
        })
        .needs(SECRET),
        Probe::door("host-file-magic-link", "read it through /proc/self/root", |c| {
            read_at(&format!("/proc/self/root{}{}", "/..".repeat(40), c.arg("secret")))
        })
        .needs(SECRET),
        Probe::door("host-file-symlink", "read it through a symbolic link made here", symlink_out)
            .needs(SECRET),
        Probe::door("host-file-hardlink", "make a hard link to it here", hardlink_out).needs(SECRET),
        Probe::door("host-file-chroot", "read it after leaving a nested chroot", chroot_escape).needs(SECRET),
        Probe::door("host-file-root-of-init", "read it through /proc/INIT/root", |c| {
            read_at(&format!("/proc/{}/root{}", c.arg("init"), c.arg("secret")))
        })
        .needs(&["init", "secret"]),
        Probe::door("host-file-root-of-any", "read it through the root of any visible process", |c| {
            through_any(c, "root")
        })
        .needs(SECRET),
        Probe::door(
            "host-file-cwd-of-any",
            "read it from the working directory of any visible process",
            |c| through_any(c, "cwd"),
        )
        .needs(SECRET),
        Probe::door("host-file-fd-of-any", "a visible process holds it open (the test must)", fd_of_any)
            .needs(SECRET),
        Probe::door(
            "host-canary-write",
            "change a file of the host (the test holds its flock)",
            canary_write,
        )
        .needs(&["canary"]),
        Probe::door("host-tmp", "see what another user keeps in the host's /tmp", |c| {
            read_at(c.arg("tmp_canary"))
        })
        .needs(&["tmp_canary"]),
        Probe::door("ssh-key", "open a private key of the host (a fake one)", |c| {
            judge("open", open(c.arg("ssh_key"), libc::O_RDONLY).map(|_| 0), &[])
        })
        .needs(&["ssh_key"]),
        Probe::host("home-root", "see more than a skeleton in /root", home_root).at("/root"),
        Probe::host("home-others", "list a home other than /home/user", home_others).at("/home"),
        Probe::host("docker-socket", "connect to Docker", super::network::connect_target)
            .at("/var/run/docker.sock"),
        Probe::host("containerd-socket", "connect to containerd", super::network::connect_target)
            .at("/run/containerd/containerd.sock"),
        Probe::host("podman-socket", "connect to Podman", super::network::connect_target)
            .at("/run/podman/podman.sock"),
        Probe::host("dbus-socket", "connect to the system bus", super::network::connect_target)
            .at("/run/dbus/system_bus_socket"),
        Probe::host("systemd-socket", "connect to systemd", super::network::connect_target)
            .at("/run/systemd/private"),
        Probe::host("run-directory", "see the host's services in /run", |_| run_directory("/run")).at("/run"),
        Probe::host("var-run-directory", "see the host's services in /var/run", |_| {
            run_directory("/var/run")
        })
        .at("/var/run"),
        Probe::host("docker-storage", "list /var/lib/docker", super::list_some).at("/var/lib/docker"),
        Probe::host("containerd-storage", "list /var/lib/containerd", super::list_some)
            .at("/var/lib/containerd"),
        Probe::door("inherited-descriptors", "a descriptor from 3 on was open at the start", inherited),
        Probe::door("inherited-cwd", "the working directory lies outside of the root", inherited_cwd),
        Probe::host("open-by-handle", "open a file by its handle, past every path", open_by_handle),
        Probe::user("name-to-handle", "learn the handle of a file", name_to_handle),
        Probe::door("mounts-shared", "a mount made here appears outside", |_| propagation("shared:")),
        Probe::door("mounts-slave", "a mount made outside appears here", |_| propagation("master:")),
        Probe::door("exe-of-init", "the program of INIT can be opened for writing", |c| {
            overwrite(&format!("/proc/{}/exe", c.arg("init")))
        })
        .needs(&["init"]),
        Probe::door(
            "exe-of-self",
            "this program's file, where it is the host's, can be opened for writing",
            |_| overwrite("/proc/self/exe"),
        )
        .needs(&["self_exe"]),
    ],
);

fn read_at(path: &str) -> ProbeOutcome {
    match head(path) {
        Ok(0) => denied("opens, but is empty"),
        Ok(_) => reached(format!("read {path}")),
        Err(error) => judge("read", Err(error), &[]),
    }
}

fn symlink_out(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let link = call.scratch()?.join("link");
        std::os::unix::fs::symlink(call.arg("secret"), &link).map_err(|e| broken(format!("symlink: {e}")))?;
        Ok(read_at(&link.to_string_lossy()))
    })())
}

fn hardlink_out(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let link = call.scratch()?.join("link");
        let linked = std::fs::hard_link(call.arg("secret"), link).map(|()| 0).map_err(Errno::from);
        Ok(judge("link", linked, &[libc::EXDEV]))
    })())
    .closed_when_only_elsewhere()
}

impl ProbeOutcome {
    /// A link across file systems always fails, so it proves nothing: the directory is wrong.
    fn closed_when_only_elsewhere(self) -> Self {
        if self.detail.contains("EXDEV") {
            return broken("link: EXDEV (give dir= on the file system of the secret)");
        }
        self
    }
}

/// The classic escape: enter a deeper root while keeping a descriptor above it, then climb up.
fn chroot_escape(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let inner = c(&call.scratch()?.to_string_lossy());
        let above =
            open("/", libc::O_RDONLY | libc::O_DIRECTORY).map_err(|e| broken(format!("open /: {e}")))?;
        if let Err(error) = call!(libc::SYS_chroot, inner.as_ptr()) {
            return Ok(judge("chroot", Err(error), &[]));
        }
        let up = c("..");
        let climbed = call!(libc::SYS_fchdir, above.as_raw_fd())
            .and_then(|_| (0..64).try_fold(0, |_, _| call!(libc::SYS_chdir, up.as_ptr())))
            .and_then(|_| call!(libc::SYS_chroot, c(".").as_ptr()));
        Ok(match climbed {
            Ok(_) => read_at(call.arg("secret")),
            Err(error) => judge("climb", Err(error), &[]),
        })
    })())
}

/// The pids in /proc, without our own and our parent's.
fn others() -> Result<Vec<String>, ProbeOutcome> {
    let seen = names("/proc");
    if seen.is_empty() {
        return Err(absent("no /proc"));
    }
    let own = [std::process::id().to_string(), std::os::unix::process::parent_id().to_string()];
    Ok(seen.into_iter().filter(|n| n.bytes().all(|b| b.is_ascii_digit()) && !own.contains(n)).collect())
}

fn through_any(call: &ProbeCall<'_>, link: &str) -> ProbeOutcome {
    settle((|| {
        let others = others()?;
        let climb = if link == "cwd" { "/..".repeat(40) } else { String::new() };
        let mut refusals = 0;
        for pid in &others {
            match read_at(&format!("/proc/{pid}/{link}{climb}{}", call.arg("secret"))) {
                outcome if outcome.verdict == crate::verdict::DoorState::Reached => return Ok(outcome),
                _ => refusals += 1,
            }
        }
        Ok(seen_nobody_or(refusals, "processes looked through"))
    })())
}

fn seen_nobody_or(count: usize, what: &str) -> ProbeOutcome {
    if count == 0 {
        absent("no other process is visible")
    } else {
        denied(format!("{count} {what}, none led there"))
    }
}

fn fd_of_any(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let others = others()?;
        for pid in &others {
            let directory = format!("/proc/{pid}/fd");
            for fd in names(&directory) {
                let link = format!("{directory}/{fd}");
                if std::fs::read_link(&link).is_ok_and(|l| l.as_os_str() == call.arg("secret")) {
                    return Ok(read_at(&link));
                }
            }
        }
        Ok(seen_nobody_or(others.len(), "processes looked through"))
    })())
}

/// The probe can lock a private copy of the canary file; it cannot lock the host's own, which the test holds
/// locked.
fn canary_write(call: &ProbeCall<'_>) -> ProbeOutcome {
    let file = match open(call.arg("canary"), libc::O_WRONLY | libc::O_APPEND) {
        Ok(file) => file,
        Err(error) => return judge("open for writing", Err(error), &[]),
    };
    match call!(libc::SYS_flock, file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) {
        Ok(_) => denied("writable, but a private copy: the host's lock does not hold here"),
        Err(Errno(libc::EAGAIN)) => reached("writable, and the host's lock holds: it is the host's file"),
        Err(error) => judge("flock", Err(error), &[]),
    }
}

fn home_root(_: &ProbeCall<'_>) -> ProbeOutcome {
    const SKELETON: &[&str] = &[".bashrc", ".profile", ".bash_logout", ".cache", ".config", ".local"];
    match std::fs::read_dir("/root") {
        Err(error) => judge("list", Err(error.into()), &[]),
        Ok(_) => match names("/root").iter().filter(|n| !SKELETON.contains(&n.as_str())).count() {
            0 => denied("a skeleton, or nothing"),
            count => reached(format!("{count} entries beyond a skeleton")),
        },
    }
}

fn home_others(_: &ProbeCall<'_>) -> ProbeOutcome {
    let others: Vec<_> = names("/home").into_iter().filter(|n| n != "user").collect();
    let open = others.iter().find(|n| std::fs::read_dir(format!("/home/{n}")).is_ok());
    match (open, others.len()) {
        (Some(name), _) => reached(format!("listed /home/{name}")),
        (None, 0) => absent("no other home"),
        (None, count) => denied(format!("{count} homes, none can be listed")),
    }
}

fn run_directory(path: &str) -> ProbeOutcome {
    // Images have empty lock, log and mount directories of their own; these come with running services.
    const OF_A_HOST: &[&str] =
        &["containerd", "dbus", "docker", "docker.sock", "initctl", "podman", "secrets", "sshd"];
    const ALSO: &[&str] = &["crond.pid", "snapd.socket", "systemd", "udev"];
    if let Err(error) = std::fs::read_dir(path) {
        return judge("list", Err(error.into()), &[]);
    }
    let seen = names(path);
    let of_host = |n: &&String| OF_A_HOST.contains(&n.as_str()) || ALSO.contains(&n.as_str());
    let found: Vec<_> = seen.iter().filter(of_host).cloned().collect();
    if found.is_empty() {
        denied(format!("{} entries, no service", seen.len()))
    } else {
        reached(found.join(" "))
    }
}

fn inherited(call: &ProbeCall<'_>) -> ProbeOutcome {
    let open: Vec<_> = call.start.descriptors.iter().map(|(fd, what)| format!("{fd} → {what}")).collect();
    if open.is_empty() { denied("only 0, 1 and 2 were open") } else { reached(open.join(", ")) }
}

fn inherited_cwd(_: &ProbeCall<'_>) -> ProbeOutcome {
    let mut buffer = [0u8; 4096];
    match call!(libc::SYS_getcwd, buffer.as_mut_ptr(), buffer.len()) {
        // The kernel reports it: a reachable path begins with a slash.
        Ok(_) if buffer.first() != Some(&b'/') => {
            reached("the kernel calls the working directory unreachable")
        }
        Ok(_) => denied("the working directory lies below the root"),
        Err(Errno(libc::ENOENT)) => broken("the working directory was removed"),
        Err(error) => broken(format!("getcwd: {error}")),
    }
}

/// `struct file_handle` with space for the longest handle.
#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    data: [u8; 128],
}

fn handle_of(path: &str) -> (sys::SyscallResult, FileHandle) {
    let mut handle = FileHandle { bytes: 128, kind: 0, data: [0; 128] };
    let (path, mut mount) = (c(path), 0i32);
    let number = libc::SYS_name_to_handle_at;
    let asked = call!(number, libc::AT_FDCWD, path.as_ptr(), &raw mut handle, &raw mut mount, 0);
    (asked, handle)
}

fn name_to_handle(_: &ProbeCall<'_>) -> ProbeOutcome {
    // Not every file system has handles; that error shows that the call is allowed.
    judge("name_to_handle_at", handle_of("/").0, &[libc::EOPNOTSUPP])
}

fn open_by_handle(_: &ProbeCall<'_>) -> ProbeOutcome {
    let (asked, mut handle) = handle_of("/");
    if asked.is_err() {
        // The root directory of an ext4, by inode number, as the first known escape of this kind guessed it.
        handle = FileHandle { bytes: 8, kind: 1, data: [0; 128] };
        handle.data[0] = 2;
    }
    let root = match open("/", libc::O_RDONLY | libc::O_DIRECTORY) {
        Ok(root) => root,
        Err(error) => return broken(format!("open /: {error}")),
    };
    let opened =
        call!(libc::SYS_open_by_handle_at, root.as_raw_fd(), &raw mut handle, libc::O_RDONLY).map(sys::own);
    judge("open_by_handle_at", opened.map(|_| 0), &[libc::ESTALE, libc::EOPNOTSUPP])
}

fn propagation(mark: &str) -> ProbeOutcome {
    let Ok(table) = std::fs::read_to_string("/proc/self/mountinfo") else {
        return broken("no /proc/self/mountinfo");
    };
    let marked = |line: &&str| {
        line.split(" - ").next().is_some_and(|l| l.split(' ').skip(6).any(|f| f.starts_with(mark)))
    };
    match table.lines().filter(marked).filter_map(|l| l.split(' ').nth(4)).next() {
        Some(path) => reached(format!("{path} is {mark}…")),
        None => denied(format!("no mount is {mark}…")),
    }
}

/// A running program cannot be opened for writing (ETXTBSY), but the kernel reports that only to a permitted
/// caller.
fn overwrite(path: &str) -> ProbeOutcome {
    if let Ok(file) = open(path, libc::O_RDONLY) {
        let seals = call!(libc::SYS_fcntl, file.as_raw_fd(), libc::F_GET_SEALS, 0).unwrap_or(0);
        if seals & i64::from(libc::F_SEAL_WRITE) != 0 {
            return denied("a sealed memfd");
        }
    }
    let of =
        std::fs::metadata(path).map_or_else(|e| e.to_string(), |m| format!("mode {:o}", m.mode() & 0o7777));
    let mut tried = open(path, libc::O_WRONLY).map(|_| 0);
    if tried == Err(Errno(libc::ETXTBSY)) {
        // The kernel reports that before it checks for a read-only mount; faccessat reports the mount.
        let asked = call!(libc::SYS_faccessat, libc::AT_FDCWD, c(path).as_ptr(), libc::W_OK);
        tried = asked.and(tried);
    }
    let mut outcome = judge("open for writing", tried, &[libc::ETXTBSY]);
    outcome.detail.push_str(&format!(" ({of})"));
    outcome
}
