//! Firecracker's own jailer, inside the Body's sandbox.
//!
//! The Body's first process starts it while it may still create namespaces, as root over the Body's ids only. It
//! creates a root, an id, a pid namespace and limits for Firecracker. It cannot create device nodes, because only the
//! host's root can; the device files are mounted beforehand, and its `mknod` calls are answered as if they had
//! succeeded (`sys::seccomp_notify`).
//!
//! Invariant: the program that the jailer executes in the jail is this one, which enables Landlock and the seccomp
//! filter of every Body for itself and then becomes Firecracker: the jail adds a boundary and removes none.
//! Invariant: Firecracker's root contains itself, the files of its microVM, and the one device it needs.
//! Invariant: a jailer that fails is an error; Firecracker is never started without it instead.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use proto::{
    Mechanism,
    launch::{LaunchPlan, Rlimits},
    spec::USER_ID,
    vm::{JAIL, JAIL_TOOLS, JAILED, JailerPlan},
};
use rustix::{fs::Mode, process::Pid};
use sys::{
    mount::{MountAttrs, Submounts},
    seccomp::SeccompFilter,
};

use super::{
    firecracker,
    hypervisor::{ChildProcess, OutputTail},
    sidecar::{self, Sidecar},
};
use crate::{
    lock_down,
    report::{StepError, StepExt},
};

/// The id of the jailed Firecracker. Every microVM has a jail of its own, so all may share one name.
pub const NAME: &str = "palisade";
/// The user id of Firecracker, among those of the Body.
pub const ID: u32 = USER_ID;
/// A hint for a jailer that fails.
pub const HINT: &str = "take the jailer and the Firecracker of one release; to do without it: pal config set microvm.jailer none";
/// Inodes of the jail besides those of the programs: mount points.
const INODES: u32 = 256;
/// Firecracker itself, in its jail. It is a copy, so that no two microVMs share a page of it.
const HYPERVISOR: &str = "/vmm/firecracker";
/// Directories that the jail mounts from the Body's root.
const SHOWN_DIRS: &[&str] = &["boot", "disks", "frozen", "save", "dev/shm"];
const SHOWN_DEVICES: &[&str] = &["dev/kvm", "dev/urandom"];
/// Devices that the jailer creates and our microVMs do not use: empty files.
const NO_DEVICES: &[&str] = &["dev/net/tun", "dev/userfaultfd"];
/// Directories of the shared libraries of a dynamically linked Firecracker.
const LIBRARIES: &[&str] = &["lib", "lib64", "usr/lib", "usr/lib64"];
/// How long the jailer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const PID_LEN_MAX: u64 = 16;

/// The jailer's entry in the enforcement record.
pub fn mechanism(jailer: &JailerPlan) -> Mechanism {
    match jailer {
        JailerPlan::Used { version, threads, .. } => {
            let group = match threads {
                Some(threads) => format!("an id, a root, a pid namespace and a group of {threads} threads"),
                None => "an id, a root and a pid namespace".to_owned(),
            };
            let held = format!("{version}, inside the boundary above: Firecracker has {group} of its own");
            Mechanism::enforced("jailer", format!("{held}, and no capability"))
        }
        JailerPlan::Absent { why } => Mechanism::absent("jailer", why),
    }
}

/// Starts the jailer, if the microVM has one.
pub fn start(plan: &LaunchPlan) -> Result<Option<Sidecar>, StepError> {
    let vm = plan.vm.as_ref();
    let Some((vm, JailerPlan::Used { bytes, threads, .. })) =
        vm.and_then(|vm| Some((vm, vm.jailer.as_ref()?)))
    else {
        return Ok(None);
    };
    let options = format!("mode=0755,size={bytes},nr_inodes={INODES}");
    sys::mount::mount_new("tmpfs", Path::new(JAIL), MountAttrs::default(), &options)
        .step("mount the jail's tmpfs")?;
    let namespaces = sys::namespace::USER | sys::namespace::MOUNTS;
    let started = sidecar::start(plan, namespaces, |say| {
        let mut command = Command::new(Path::new(JAIL_TOOLS).join("jailer"));
        command.args(arguments(&plan.rlimits, *threads)).env_clear();
        match prepare(plan, &vm.program, *threads, say) {
            Ok(()) => command.exec(),
            Err(error) => error,
        }
    });
    started.step("start Firecracker's jailer").map(Some)
}

/// The jailer's command line arguments.
fn arguments(limits: &Rlimits, threads: Option<u32>) -> Vec<String> {
    let id = ID.to_string();
    let exec_file = format!("{JAIL_TOOLS}/{JAILED}");
    let limits = [format!("no-file={}", limits.files), format!("fsize={}", limits.file_bytes)];
    let mut told = vec!["--id", NAME, "--exec-file", &exec_file, "--uid", &id, "--gid", &id];
    told.extend(["--chroot-base-dir", JAIL, "--new-pid-ns"]);
    told.extend(limits.iter().flat_map(|limit| ["--resource-limit", limit]));
    let bound = threads.map(|threads| format!("pids.max={threads}"));
    told.extend(bound.iter().flat_map(|bound| ["--cgroup-version", "1", "--cgroup", bound]));
    told.push("--");
    told.extend(firecracker::arguments());
    told.into_iter().map(str::to_owned).collect()
}

/// The root that the jailer creates for Firecracker, as seen from outside the jail.
fn root() -> PathBuf {
    Path::new(JAIL).join(JAILED).join(NAME).join("root")
}

/// Prepares the child process before it executes the jailer.
fn prepare(plan: &LaunchPlan, hypervisor: &Path, threads: Option<u32>, say: OwnedFd) -> io::Result<()> {
    sidecar::close_other_fds(say, None)?;
    sys::namespace::become_ids(0, 0, true)?;
    sys::mount::make_private()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    prepare_root(&root(), hypervisor)?;
    if threads.is_some() {
        mount_cgroup()?;
    }
    lock_down::limits(plan).map_err(|error| io::Error::other(error.failed().cause))?;
    sys::caps::no_new_privileges()?;
    sys::seccomp_notify::mknod::emulate_mknod()
}

/// Mounts Firecracker's files in its jail. No other process sees the mounts.
fn prepare_root(root: &Path, hypervisor: &Path) -> io::Result<()> {
    for dir in SHOWN_DIRS.iter().chain(&["dev/net", "vmm"]) {
        fs::create_dir_all(root.join(dir))?;
    }
    for file in SHOWN_DEVICES.iter().chain(NO_DEVICES) {
        File::create(root.join(file))?;
    }
    for shown in SHOWN_DIRS.iter().chain(SHOWN_DEVICES) {
        let tree = sys::mount::clone_tree(&Path::new("/").join(shown), Submounts::Too)?;
        sys::mount::attach(tree.as_fd(), &root.join(shown))?;
    }
    for dir in LIBRARIES {
        let here = Path::new("/").join(dir);
        if here.is_dir() {
            fs::create_dir_all(root.join(dir))?;
            let attrs = MountAttrs { read_only: true, ..MountAttrs::default() };
            sys::mount::bind(&here, &root.join(dir), attrs, Submounts::Too)?;
        }
    }
    let copy = root.join(&HYPERVISOR[1..]);
    fs::copy(hypervisor, &copy)?;
    fs::set_permissions(&copy, Permissions::from_mode(0o755))
}

/// Mounts the cgroup that the jailer may divide: the Body's own, as the root of its hierarchy.
fn mount_cgroup() -> io::Result<()> {
    sys::namespace::unshare_cgroup()?;
    let attrs = MountAttrs { no_exec: true, ..MountAttrs::default() };
    sys::mount::mount_new("cgroup", Path::new("/sys/fs/cgroup"), attrs, "pids")
}

/// Runs in the jail, executed by the jailer: enables the restrictions under which the jailer could not have worked,
/// and becomes Firecracker. Returns only on failure.
pub fn enter(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let error = match confine() {
        Ok(()) => Command::new(HYPERVISOR).arg0(JAILED).args(arguments).env_clear().exec(),
        Err(error) => error,
    };
    let _ = io::Write::write_all(&mut io::stderr(), format!("{error}\n").as_bytes());
    ExitCode::FAILURE
}

fn confine() -> io::Result<()> {
    sys::caps::no_new_privileges()?;
    sys::landlock::restrict_self(Path::new("/dev"))?;
    SeccompFilter::compile().install()
}

/// Waits until the jailer is done, and returns the process that it started. That process is now a child of this one,
/// which is pid 1 of the pid namespace that the jailer was in.
pub async fn released(jailer: Sidecar) -> io::Result<(ChildProcess, OutputTail)> {
    let (mut jailer, said) = (ChildProcess::of(jailer.pid), OutputTail::read_in_background(jailer.said));
    let over = guest::channel::readable(jailer.handle()?)?;
    if tokio::time::timeout(PATIENCE, over.readable()).await.is_err() {
        return Err(said.or(io::ErrorKind::TimedOut.into()).await);
    }
    if jailer.ended().and_then(|status| status.exit_status()) != Some(0) {
        return Err(said.or(io::Error::other("its jailer ended without output")).await);
    }
    let told = sys::fd::read_small(&root().join(format!("{JAILED}.pid")), PID_LEN_MAX)?;
    let pid = told.trim().parse().ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("its jailer did not report the pid of Firecracker"))?;
    Ok((ChildProcess::of(pid), said))
}

#[cfg(test)]
mod tests {
    use proto::enforcement::MechanismStatus;

    use super::*;

    /// The jailer's documented options: each option, whether it takes a value, and whether it is required.
    const OPTIONS: &[(&str, bool, bool)] = &[
        ("--id", true, true),
        ("--exec-file", true, true),
        ("--uid", true, true),
        ("--gid", true, true),
        ("--parent-cgroup", true, false),
        ("--cgroup-version", true, false),
        ("--cgroup", true, false),
        ("--chroot-base-dir", true, false),
        ("--netns", true, false),
        ("--resource-limit", true, false),
        ("--daemonize", false, false),
        ("--new-pid-ns", false, false),
    ];

    #[test]
    fn what_the_jailer_is_told_is_what_it_takes() {
        let limits = Rlimits { files: 4096, file_bytes: 1 << 40, processes: None, data_bytes: None };
        let told = arguments(&limits, Some(18));
        let mut words = told.iter().map(String::as_str);
        let mut said: Vec<(&str, &str)> = Vec::new();
        while let Some(word) = words.next().filter(|word| *word != "--") {
            let known = OPTIONS.iter().find(|(name, ..)| *name == word);
            let (name, takes_value, _) = known.unwrap_or_else(|| panic!("it does not know {word}"));
            said.push((name, if *takes_value { words.next().unwrap() } else { "" }));
        }
        assert_eq!(words.collect::<Vec<_>>(), firecracker::arguments(), "the rest is Firecracker's");
        let expected = [
            ("--id", "palisade"),
            ("--exec-file", "/run/firecracker"),
            ("--uid", "1000"),
            ("--gid", "1000"),
            ("--chroot-base-dir", "/tmp"),
            ("--new-pid-ns", ""),
            ("--resource-limit", "no-file=4096"),
            ("--resource-limit", "fsize=1099511627776"),
            ("--cgroup-version", "1"),
            ("--cgroup", "pids.max=18"),
        ];
        assert_eq!(said, expected);
        let without = arguments(&limits, None);
        assert!(!without.iter().any(|word| word.contains("cgroup")), "none that it could not divide");
        let needed = OPTIONS.iter().filter(|(.., needed)| *needed);
        assert!(needed.into_iter().all(|(name, ..)| said.iter().any(|(one, _)| one == name)));
        assert_eq!(root(), Path::new("/tmp/firecracker/palisade/root"), "base, program, id, root");
    }

    #[test]
    fn the_record_says_whether_and_why_not() {
        let used =
            mechanism(&JailerPlan::Used { version: "Jailer v1.15.1".into(), bytes: 1, threads: Some(18) });
        assert_eq!((used.name.as_str(), used.state), ("jailer", MechanismStatus::Enforced));
        assert!(
            used.reason.starts_with("Jailer v1.15.1") && used.reason.contains("18 threads"),
            "{}",
            used.reason
        );
        let absent = mechanism(&JailerPlan::Absent { why: "it is not here".into() });
        assert_eq!((absent.state, absent.reason.as_str()), (MechanismStatus::Absent, "it is not here"));
    }
}
