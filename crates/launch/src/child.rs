//! The Body's first process, from the fork to the guest.
//!
//! Order matters: cgroups before ids (entering them needs the host's), ids before mounts (an overlay acts with the
//! ids of who mounts it), the root before Landlock (which forbids mounts), seccomp last (which forbids most of this).

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
};

use proto::{
    Mechanism,
    guest::{CONFIG_FD, LISTEN_FD},
    launch::{CgroupVersion, Plan},
    spec::USER_ID,
};

use crate::{
    lock_down,
    report::{Step, StepError},
    root,
    trees::{self, Trees},
    views,
};

/// What the child brings along from the host.
pub struct Luggage {
    /// The guest's binary.
    pub guest: OwnedFd,
    /// Its configuration.
    pub config: OwnedFd,
    /// Its listening socket.
    pub listener: OwnedFd,
    /// Its log.
    pub log: OwnedFd,
    /// Ends when the id maps are written.
    pub mapped: OwnedFd,
    /// What it is made from, where the launcher could take it.
    pub trees: Option<Trees>,
}

/// What the child tells before it becomes the guest.
pub type Told = Vec<Mechanism>;

/// Sets everything up; the caller then tells what was done and executes the guest.
pub fn prepare(plan: &Plan, luggage: &Luggage) -> Result<Told, StepError> {
    for group in plan.cgroups.iter().filter(|group| group.version == CgroupVersion::V1) {
        sys::cgroup::enter_v1(&group.path).step("enter the Body's cgroup")?;
    }
    sys::namespace::unshare_cgroup().step("make a cgroup namespace")?;
    wait_for_maps(&luggage.mapped).step("wait for the id maps")?;
    become_first(plan)?;
    sys::mount::make_private().step("make mounts private")?;
    let gathered = if luggage.trees.is_none() { Some(trees::gather(plan)?) } else { None };
    let Some(trees) = luggage.trees.as_ref().or(gathered.as_ref()) else { return Ok(Vec::new()) };
    let mut told = root::assemble(plan, trees)?;
    told.extend(views::mount_all(plan, trees)?);
    sys::mount::pivot_here().step("enter the Body's root")?;
    rustix::system::sethostname(plan.body.as_str().as_bytes()).step("set the host name")?;
    sys::namespace::loopback_up().step("bring the loopback up")?;
    told.extend(namespaces());
    told.extend(lock_down::limits(plan)?);
    told.extend(lock_down::privileges(luggage.guest.as_fd())?);
    Ok(told)
}

fn wait_for_maps(mapped: &OwnedFd) -> io::Result<()> {
    let mut one = [0u8; 1];
    match File::from(mapped.try_clone()?).read(&mut one)? {
        1 => Ok(()),
        _ => Err(io::Error::other("the launcher gave up")),
    }
}

/// Root of the Body where there is one, otherwise its only user.
fn become_first(plan: &Plan) -> Result<(), StepError> {
    let id = if plan.ids.has_root() { 0 } else { USER_ID };
    sys::namespace::become_ids(id, id, plan.ids.has_root()).step("take the Body's ids")
}

fn namespaces() -> Vec<Mechanism> {
    let own = |name: &str, about: &str| Mechanism::enforced(format!("{name} namespace"), about);
    vec![
        own("user", "no id of the host's root is mapped"),
        own("mount", "private; nothing propagates"),
        own("pid", "sees only its own processes"),
        own("network", "loopback only"),
        own("ipc", "own System V and POSIX objects"),
        own("uts", "own host name"),
        own("cgroup", "sees its own group as the root"),
    ]
}

/// Becomes the guest. Returns only when that fails.
pub fn become_guest(plan: &Plan, luggage: Luggage, told: OwnedFd) -> StepError {
    match place_and_exec(plan, luggage, told) {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

fn place_and_exec(plan: &Plan, luggage: Luggage, _told: OwnedFd) -> Result<std::convert::Infallible, StepError> {
    let null = File::options().read(true).write(true).open("/dev/null").step("open /dev/null")?;
    let null: OwnedFd = null.into();
    for number in [0, 1] {
        sys::fd::place(null.try_clone().step("copy a descriptor")?, number).step("place standard streams")?;
    }
    sys::fd::place(luggage.log, 2).step("place the log")?;
    sys::fd::close_on_exec_from(3).step("close what is not the guest's")?;
    // Numbers that are in use by our own luggage are moved out of the way by duplication first.
    let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 16);
    let config = high(luggage.config).step("copy a descriptor")?;
    let listener = high(luggage.listener).step("copy a descriptor")?;
    let guest = high(luggage.guest).step("copy a descriptor")?;
    sys::fd::place(config, CONFIG_FD).step("place the configuration")?;
    sys::fd::place(listener, LISTEN_FD).step("place the socket")?;
    lock_down::filter()?;
    // One string, so that `ps` tells whose guest it is while the guest sees no arguments.
    let name = format!("pal-guest {}", plan.body);
    let cause = sys::process::exec_fd(guest.as_fd(), &[&name], &["PATH=/usr/bin:/bin"]);
    Err(cause).step("start the guest")
}
