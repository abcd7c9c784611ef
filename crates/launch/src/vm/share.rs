//! Directories of the host that a machine sees live: for each a virtiofsd beside the hypervisor, behind walls of its own.
//!
//! It is started by the Body's first process while that may still make namespaces. What it may reach of the host is one
//! directory; whether it may write there is a property of the mount, which it can neither change nor take away.
//!
//! Invariant: it has the Body's ids and none besides, and namespaces of its own below the Body's: it ends with the Body.
//! Invariant: the hypervisor does not see what is shared; it reaches it through virtiofsd alone.
//! Invariant: its root holds itself, what the Body shares and the Body's own view of `/proc`; no disk, no frozen memory.
//! Invariant: nothing that it makes for a machine lends its owner's rights to who runs it on the host.
//! Trust: a virtiofsd that its machine has taken over can do what its machine may ask it to do anyway.

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

/// Where it finds the socket on which its hypervisor comes.
const SOCKET_FD: RawFd = 3;

/// How long the end of a hypervisor may take to be noticed.
const HANG_UP: Duration = Duration::from_secs(2);

/// Those of one machine, by who minds it.
pub struct VirtiofsDaemons(Vec<(ChildProcess, OutputTail)>);

impl VirtiofsDaemons {
    /// Listens to them.
    pub fn of(sharers: Vec<Sidecar>) -> Self {
        let heard =
            |sharer: Sidecar| (ChildProcess::of(sharer.pid), OutputTail::read_in_background(sharer.said));
        Self(sharers.into_iter().map(heard).collect())
    }

    /// Waits until one of them is gone, and gives its last words.
    pub async fn gone(&mut self) -> String {
        let ended = self.0.iter_mut().map(|(process, said)| {
            Box::pin(async {
                // Without a handle it is gone already.
                if let Ok(handle) = process.handle().and_then(guest::channel::readable) {
                    drop(handle.readable().await);
                }
                // One whose hypervisor hangs up ends by itself, and then it is the hypervisor's end that matters.
                if process.ended().is_some_and(|status| status.exit_status().is_some()) {
                    tokio::time::sleep(HANG_UP).await;
                }
                said.or(io::Error::other(end_of(process))).await.to_string()
            })
        });
        first_of(ended.collect()).await
    }
}

/// The first of them that is done; none is where there are none.
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

/// Starts them all.
pub fn start(plan: &LaunchPlan) -> Result<Vec<Sidecar>, StepError> {
    let Some((vm, program)) = plan.vm.as_ref().and_then(|vm| Some((vm, vm.sharer.as_deref()?))) else {
        return Ok(Vec::new());
    };
    let sharers = vm
        .shares
        .iter()
        .map(|share| start_one(plan, program, share).step("start virtiofsd"))
        .collect::<Result<_, _>>()?;
    hide_path().step("hide what is shared from the hypervisor")?;
    Ok(sharers)
}

/// Each of them has its own view of what is mounted there since it was forked; nobody else is to have one.
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

/// In the child. Returns only when that fails.
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
    own_root()?;
    lock_down::limits(plan).map_err(|error| io::Error::other(error.failed().cause))?;
    sys::caps::no_new_privileges()?;
    sys::landlock::restrict_self(Path::new("/proc"))?;
    sys::deny_setuid::deny_setuid_bits()
}

/// What is mounted there, with the Body's view of processes in it, becomes the root.
fn own_root() -> io::Result<()> {
    let root = Path::new(SHARES);
    // A mount that came from outside cannot be a root; one over it can.
    sys::mount::attach(sys::mount::clone_tree(root, Submounts::Too)?.as_fd(), root)?;
    sys::mount::attach(
        sys::mount::clone_tree(Path::new("/proc"), Submounts::Too)?.as_fd(),
        &root.join("proc"),
    )?;
    rustix::process::chdir(root)?;
    sys::mount::pivot_here()
}
