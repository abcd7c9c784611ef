//! Directories of the host that a microVM sees live. For each, a virtiofsd runs next to the hypervisor, in a sandbox
//! of its own.
//!
//! The Body's first process starts it while it may still create namespaces. It can reach one directory of the host;
//! whether it may write there is a property of the mount, which it cannot change.
//!
//! Invariant: it has the Body's ids and no others, and namespaces of its own below the Body's: it ends with the Body.
//! Invariant: the hypervisor cannot see the shared directories; it reaches them only through virtiofsd.
//! Invariant: its root contains its own program, the shared directories and the Body's `/proc`; no disk, no saved
//! memory.
//! Invariant: no file that it creates for a microVM gives its owner's rights to a user who runs it on the host.
//! Trust: a virtiofsd that its microVM has taken over can do only what the microVM may ask it to do anyway.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd, RawFd},
        unix::{net::UnixListener, process::CommandExt},
    },
    path::Path,
    process::Command,
    task::Poll,
    time::Duration,
};

use proto::{
    launch::LaunchPlan,
    vm::{SHARES, SharePlan},
};
use sys::mount::{MountAttrs, Submounts};

use super::{
    hypervisor::{ChildProcess, OutputTail},
    sidecar::{self, Sidecar},
};
use crate::{
    lock_down,
    report::{StepError, StepExt},
};

/// The descriptor of the socket on which the hypervisor connects.
const SOCKET_FD: RawFd = 3;

/// How long it may take to notice the end of a hypervisor.
const HANG_UP: Duration = Duration::from_secs(2);

/// The virtiofsd processes of one microVM.
pub struct VirtiofsDaemons(Vec<(ChildProcess, OutputTail)>);

impl VirtiofsDaemons {
    /// Starts to read their output.
    pub fn of(sharers: Vec<Sidecar>) -> Self {
        let heard =
            |sharer: Sidecar| (ChildProcess::of(sharer.pid), OutputTail::read_in_background(sharer.said));
        Self(sharers.into_iter().map(heard).collect())
    }

    /// Waits until one of them has ended, and returns its last output.
    pub async fn gone(&mut self) -> String {
        let ended = self.0.iter_mut().map(|(process, said)| {
            Box::pin(async {
                // If there is no pidfd, the process has ended already.
                if let Ok(handle) = process.handle().and_then(guest::channel::readable) {
                    drop(handle.readable().await);
                }
                // virtiofsd ends by itself when its hypervisor disconnects, and then the hypervisor's end is the one
                // to report.
                if process.ended().is_some_and(|status| status.exit_status().is_some()) {
                    tokio::time::sleep(HANG_UP).await;
                }
                said.or(io::Error::other(end_of(process))).await.to_string()
            })
        });
        first_of(ended.collect()).await
    }
}

/// Waits for the first future that completes; without any, forever.
async fn first_of<T>(mut all: Vec<std::pin::Pin<Box<impl Future<Output = T>>>>) -> T {
    std::future::poll_fn(|context| {
        let done = all.iter_mut().find_map(|one| match one.as_mut().poll(context) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        });
        done.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

fn end_of(process: &mut ChildProcess) -> String {
    match process.ended() {
        Some(status) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("it ended with code {code}"),
            (None, Some(signal)) => format!("it was killed by signal {signal}"),
            (None, None) => "it ended".to_owned(),
        },
        None => "it cannot be watched".to_owned(),
    }
}

/// Starts a virtiofsd for each shared directory.
pub fn start(plan: &LaunchPlan) -> Result<Vec<Sidecar>, StepError> {
    let Some((vm, program)) = plan.vm.as_ref().and_then(|vm| Some((vm, vm.sharer.as_deref()?))) else {
        return Ok(Vec::new());
    };
    let sharers = vm
        .shares
        .iter()
        .map(|share| start_one(plan, program, share).step("start virtiofsd"))
        .collect::<Result<_, _>>()?;
    hide_path().step("hide the shared directories from the hypervisor")?;
    Ok(sharers)
}

/// Hides the shared directories. Each virtiofsd was forked with its own mount namespace and still sees them; no other
/// process may.
fn hide_path() -> io::Result<()> {
    let attrs = MountAttrs { read_only: true, no_exec: true, devices: false };
    sys::mount::mount_new("tmpfs", Path::new(SHARES), attrs, "mode=0555,size=4k,nr_inodes=1")
}

fn start_one(plan: &LaunchPlan, program: &Path, share: &SharePlan) -> io::Result<Sidecar> {
    let listener = OwnedFd::from(UnixListener::bind(&share.socket)?);
    sidecar::start(plan, sys::namespace::FORKED, |complain| {
        exec_virtiofsd(plan, program, share, listener, complain)
    })
}

/// Prepares the child process and executes virtiofsd; returns only on failure.
fn exec_virtiofsd(
    plan: &LaunchPlan,
    program: &Path,
    share: &SharePlan,
    listener: OwnedFd,
    complain: OwnedFd,
) -> io::Error {
    let mut command = Command::new(program);
    command
        .arg(format!("--fd={SOCKET_FD}"))
        .args(["-f", "--rlimit-nofile=0", "-o", "sandbox=chroot", "-o", "cache=auto", "-o", "timeout=0"])
        .args(["-o", "log_level=warn", "-o"])
        .arg(format!("source={}", share.dir.display()))
        .env_clear();
    match prepare(plan, listener, complain) {
        Ok(()) => command.exec(),
        Err(error) => error,
    }
}

fn prepare(plan: &LaunchPlan, listener: OwnedFd, complain: OwnedFd) -> io::Result<()> {
    sidecar::close_other_fds(complain, Some(listener))?;
    sys::namespace::become_ids(0, 0, true)?;
    sys::mount::make_private()?;
    enter_own_root()?;
    lock_down::limits(plan).map_err(|error| io::Error::other(error.failed().cause))?;
    sys::caps::no_new_privileges()?;
    sys::landlock::restrict_self(Path::new("/proc"))?;
    sys::deny_setuid::deny_setuid_bits()
}

/// Makes the directory of the shares, with the Body's `/proc` in it, the root.
fn enter_own_root() -> io::Result<()> {
    let root = Path::new(SHARES);
    // A mount inherited from the parent namespace cannot become a root; a new mount over it can.
    sys::mount::attach(sys::mount::clone_tree(root, Submounts::Too)?.as_fd(), root)?;
    sys::mount::attach(
        sys::mount::clone_tree(Path::new("/proc"), Submounts::Too)?.as_fd(),
        &root.join("proc"),
    )?;
    rustix::process::chdir(root)?;
    sys::mount::pivot_here()
}
