//! The Body's first process, from the fork to the guest.
//!
//! What needs no plan is done while the plan is on its way: mounts made private, capabilities bounded and, where the
//! launcher is the host's root and brings along what is needed of the host, the views of the kernel. Order matters:
//! ids before mounts (an overlay acts with the ids of who mounts it), the root before Landlock (which forbids mounts),
//! seccomp last (which forbids most of this).

use std::{
    fs::File,
    io::{self, Read, Write},
    mem::ManuallyDrop,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    path::PathBuf,
};

use guest::fsmonitor::FollowedOverlay;
use proto::{
    Mechanism,
    launch::{LaunchFailure, LaunchPlan},
    spec::USER_ID,
    vm::StartReport,
};

use sys::seccomp::SeccompFilter;

use crate::{
    git_dirs::{Hold, Summary},
    kernel_mounts, lock_down,
    lower_dirs::{self, LowerDirs, MappedLower, NamedTree},
    network::NetnsPassage,
    report::{StepError, StepExt},
    root::{self, AssembledRoot},
    vm::{self, VmmInput, sidecar::Sidecar},
};

const PLAN_LEN_MAX: u32 = 4 << 20;

/// What the child brings along from the host.
pub struct InheritedFds {
    /// The guest's listening socket.
    pub listener: OwnedFd,
    /// Its log.
    pub log: OwnedFd,
    /// The doors of its v1 cgroups. Who goes through needs the rights of who opened them.
    pub groups: Vec<OwnedFd>,
    /// Where the minder of a machine is asked to freeze it.
    pub control: Option<OwnedFd>,
    /// What it is made from, where the launcher could take it.
    pub trees: Option<LowerDirs>,
}

/// The same, by number: the launcher opens it after the fork, in the table both share.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct FdNumbers {
    fixed: [RawFd; 2],
    groups: Vec<RawFd>,
    control: Option<RawFd>,
    trees: Option<LowerDirNumbers>,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct LowerDirNumbers {
    disk: Option<RawFd>,
    lowers: Vec<(PathBuf, RawFd)>,
    /// Each with what holds its git directories: place and tree.
    mounts: Vec<(RawFd, Vec<[RawFd; 2]>)>,
    git: Option<Summary>,
}

impl InheritedFds {
    /// What to tell the child.
    pub fn numbers(&self) -> FdNumbers {
        let held = |hold: &Hold| [&hold.place, &hold.tree].map(AsRawFd::as_raw_fd);
        let named = |named: &NamedTree| (named.tree.as_raw_fd(), named.holds.iter().map(held).collect());
        FdNumbers {
            fixed: [&self.listener, &self.log].map(AsRawFd::as_raw_fd),
            groups: self.groups.iter().map(AsRawFd::as_raw_fd).collect(),
            control: self.control.as_ref().map(AsRawFd::as_raw_fd),
            trees: self.trees.as_ref().map(|trees| LowerDirNumbers {
                disk: trees.disk.as_ref().map(AsRawFd::as_raw_fd),
                lowers: trees
                    .lowers
                    .iter()
                    .map(|lower| (lower.path.clone(), lower.tree.as_raw_fd()))
                    .collect(),
                mounts: trees.mounts.iter().map(named).collect(),
                git: trees.git.clone(),
            }),
        }
    }
}

impl FdNumbers {
    fn take(self) -> io::Result<InheritedFds> {
        let take = sys::fd::inherited;
        let [listener, log] = self.fixed;
        let trees = self.trees.map(|trees| -> io::Result<LowerDirs> {
            let lowers = trees
                .lowers
                .into_iter()
                .map(|(path, number)| take(number).map(|tree| MappedLower { path, tree }));
            let held = |[place, tree]: [RawFd; 2]| Ok(Hold { place: take(place)?, tree: take(tree)? });
            let named = |(tree, holds): (RawFd, Vec<[RawFd; 2]>)| -> io::Result<NamedTree> {
                let holds = holds.into_iter().map(held).collect::<io::Result<_>>()?;
                Ok(NamedTree { tree: take(tree)?, holds })
            };
            Ok(LowerDirs {
                disk: trees.disk.map(take).transpose()?,
                lowers: lowers.collect::<io::Result<_>>()?,
                mounts: trees.mounts.into_iter().map(named).collect::<io::Result<_>>()?,
                git: trees.git,
            })
        });
        Ok(InheritedFds {
            listener: take(listener)?,
            log: take(log)?,
            groups: self.groups.into_iter().map(take).collect::<io::Result<_>>()?,
            control: self.control.map(take).transpose()?,
            trees: trees.transpose()?,
        })
    }
}

/// What the child writes to its parent, after one byte that says its descriptors are its own: lines of this.
#[derive(serde::Serialize, serde::Deserialize)]
pub enum InitReport {
    /// Everything is in place.
    Done(Vec<Mechanism>, Option<Box<StartReport>>),
    /// It is not.
    Failed(LaunchFailure),
}

/// Whose launcher the child has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LauncherRights {
    /// The host's root: what the Body is made from is brought along, and the Body has a root.
    ByRoot,
    /// An ordinary user: only the child itself can reach what the Body is made from.
    ByUser,
}

/// The child's whole life until it is the guest.
pub fn run(plan: OwnedFd, tell: &OwnedFd, network: &OwnedFd, launched: LauncherRights) -> ! {
    let error = match receive_plan(plan, tell, launched) {
        Ok(InitSetup { plan, inherited_fds, filter }) => match prepare_root(&plan, &inherited_fds, network) {
            Ok(prepared) => exec_guest(plan, inherited_fds, tell, prepared, &filter),
            Err(error) => error,
        },
        Err(error) => error,
    };
    let _ = send_report(tell, &InitReport::Failed(error.failed()));
    std::process::exit(1)
}

fn send_report(tell: &OwnedFd, told: &InitReport) -> io::Result<()> {
    let line = serde_json::to_string(told)? + "\n";
    File::from(tell.try_clone()?).write_all(line.as_bytes())
}

struct InitSetup {
    plan: LaunchPlan,
    inherited_fds: InheritedFds,
    filter: SeccompFilter,
}

/// Does what needs no plan, waits for the plan, then parts from the parent's descriptors.
fn receive_plan(plan: OwnedFd, tell: &OwnedFd, launched: LauncherRights) -> Result<InitSetup, StepError> {
    // While the table is shared this process holds the other end of its own pipe and would never hear of its end.
    sys::process::die_with_parent().step("die with the launcher")?;
    sys::mount::make_private().step("make mounts private")?;
    let filter = lock_down::lock_down_early()?;
    // Not closed here: the number still belongs to the launcher, too.
    let mut pipe = ManuallyDrop::new(File::from(plan));
    pipe.read_exact(&mut [0u8; 1]).step("wait for the Body's ids")?;
    if launched == LauncherRights::ByRoot {
        assume_ids(0)?;
        // The kernel forgets that promise with the ids.
        sys::process::die_with_parent().step("die with the launcher")?;
        mount_staging()?;
    }
    let (plan, numbers): (LaunchPlan, FdNumbers) = read_plan(&mut pipe).step("read the plan")?;
    sys::namespace::own_descriptors().step("part from the launcher's descriptors")?;
    rustix::io::write(tell, b".").step("tell the launcher")?;
    Ok(InitSetup { plan, inherited_fds: numbers.take().step("take the launcher's descriptors")?, filter })
}

fn mount_staging() -> Result<(), StepError> {
    root::mount_stage()?;
    kernel_mounts::ahead()
}

fn read_plan(pipe: &mut File) -> io::Result<(LaunchPlan, FdNumbers)> {
    let mut lens = [[0u8; size_of::<u32>()]; 2];
    pipe.read_exact(lens.as_flattened_mut())?;
    let [plan, numbers] = lens.map(u32::from_ne_bytes);
    let len = plan.checked_add(numbers).filter(|len| *len <= PLAN_LEN_MAX);
    let mut text = vec![0; len.ok_or(io::ErrorKind::FileTooLarge)? as usize];
    pipe.read_exact(&mut text)?;
    let (plan, numbers) = text.split_at(plan as usize);
    Ok((serde_json::from_slice(plan)?, serde_json::from_slice(numbers)?))
}

/// Sets everything up.
fn prepare_root(
    plan: &LaunchPlan,
    inherited_fds: &InheritedFds,
    network: &OwnedFd,
) -> Result<PreparedInit, StepError> {
    for door in &inherited_fds.groups {
        sys::cgroup::enter_v1(door.as_fd()).step("enter the Body's cgroup")?;
    }
    sys::namespace::unshare_cgroup().step("make a cgroup namespace")?;
    let gathered;
    let trees = match &inherited_fds.trees {
        Some(trees) => trees,
        None => {
            assume_ids(if plan.ids.has_root() { 0 } else { USER_ID })?;
            gathered = lower_dirs::open_lower_dirs(plan)?;
            mount_staging()?;
            &gathered
        }
    };
    let AssembledRoot { mut told, followed } = root::assemble(plan, trees)?;
    told.extend(kernel_mounts::mount_all(plan, trees)?);
    root::enter(plan).step("enter the Body's root")?;
    rustix::system::sethostname(plan.body.as_str().as_bytes()).step("set the host name")?;
    NetnsPassage::enter(network.as_fd())?;
    told.extend(namespace_mechanisms());
    // While namespaces can still be made.
    let mut beside = vm::share::start(plan)?;
    beside.extend(vm::jail::start(plan)?);
    told.extend(lock_down::limits(plan)?);
    told.extend(lock_down::privileges(plan)?);
    Ok(PreparedInit { told, followed, beside })
}

/// A Body that only lacks its guest.
struct PreparedInit {
    told: Vec<Mechanism>,
    followed: Vec<FollowedOverlay>,
    /// Who shares directories with a machine, and who jails its hypervisor.
    beside: Vec<Sidecar>,
}

/// Root of the Body where there is one, otherwise its only user.
fn assume_ids(id: u32) -> Result<(), StepError> {
    sys::namespace::become_ids(id, id, id == 0).step("take the Body's ids")
}

fn namespace_mechanisms() -> Vec<Mechanism> {
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
///
/// Without an exec: the guest is part of this program, which saves a tenth of a Body's whole start. What an exec
/// would have swept away is swept by hand: descriptors here, capabilities and the rest by `lock_down`.
fn exec_guest(
    plan: LaunchPlan,
    inherited_fds: InheritedFds,
    tell: &OwnedFd,
    prepared: PreparedInit,
    filter: &SeccompFilter,
) -> StepError {
    let PreparedInit { told: mechanisms, followed, beside } = prepared;
    let GuestFds { listener, tell, control, followed, mut beside } =
        match close_other_fds(inherited_fds, tell, followed, beside) {
            Ok(kept) => kept,
            Err(error) => return error,
        };
    // A Body outlives its keeper.
    let _ = sys::process::outlive_parent();
    if let Err(error) = lock_down::filter(&plan, filter) {
        let _ = send_report(&tell, &InitReport::Failed(error.failed()));
        std::process::exit(1);
    }
    if let (Some(machine), Some(control)) = (plan.vm, control) {
        let jailer = if machine.is_jailed() { beside.pop() } else { None };
        std::process::exit(run_vmm(
            VmmInput { vm: machine, callers: listener, control, sharers: beside, jailer },
            tell,
            mechanisms,
        ));
    }
    // The launcher hears the end of this pipe, and takes it for the guest's beginning.
    let begun = move || drop(send_report(&tell, &InitReport::Done(mechanisms, None)));
    let code = match guest::serve(plan.config, listener, followed, begun) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(io::stderr(), "pal-guest: {error}");
            1
        }
    };
    std::process::exit(code)
}

/// Minds a machine instead; its guest's beginning is the end of the pipe here, too.
fn run_vmm(input: VmmInput, tell: OwnedFd, mut mechanisms: Vec<Mechanism>) -> i32 {
    let about = input.vm.clone();
    vm::run_vmm(input, move |revived| {
        let told = match revived {
            Ok(revival) => {
                mechanisms.extend(vm::mechanisms(&about, &revival));
                InitReport::Done(mechanisms, Some(Box::new(revival)))
            }
            Err(error) => InitReport::Failed(error.failed()),
        };
        let _ = send_report(&tell, &told);
    })
}

const TELL_FD: RawFd = 4;
const LISTEN_FD: RawFd = 3;
const CONTROL_FD: RawFd = 5;
/// From here on, one after another: views of followed areas, and what is said by who is beside a machine's minder.
const VIEWS_FD: RawFd = 6;

/// What the guest, or who minds a machine, still holds of the host.
struct GuestFds {
    listener: UnixListener,
    tell: OwnedFd,
    control: Option<UnixListener>,
    followed: Vec<FollowedOverlay>,
    beside: Vec<Sidecar>,
}

/// Closes every descriptor but the log, the sockets, views of areas and, for one more word, the pipe to the launcher.
fn close_other_fds(
    inherited_fds: InheritedFds,
    tell: &OwnedFd,
    followed: Vec<FollowedOverlay>,
    beside: Vec<Sidecar>,
) -> Result<GuestFds, StepError> {
    let null: OwnedFd =
        File::options().read(true).write(true).open("/dev/null").step("open /dev/null")?.into();
    // Above all fixed numbers first, so that placing one never closes another.
    let views = VIEWS_FD
        + followed.iter().map(|followed| 1 + followed.lowers.len() as RawFd).sum::<RawFd>()
        + beside.len() as RawFd;
    let high = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, views + 2).step("copy a descriptor");
    let placed = [(high(null.as_fd())?, 0), (high(null.as_fd())?, 1), (high(inherited_fds.log.as_fd())?, 2)];
    let (listener, tell) = (high(inherited_fds.listener.as_fd())?, high(tell.as_fd())?);
    let has_control = inherited_fds.control.is_some();
    // Its number is taken in any case, so that those behind it are always the same.
    let control = high(inherited_fds.control.as_ref().unwrap_or(&null).as_fd())?;
    let all = followed.iter().flat_map(|followed| [&followed.upper].into_iter().chain(&followed.lowers));
    let all = all.chain(beside.iter().map(|one| &one.said));
    let all = all.map(|view| high(view.as_fd())).collect::<Result<Vec<_>, _>>()?;
    for (fd, number) in placed {
        sys::fd::place(fd, number).step("place standard streams")?;
    }
    sys::fd::place(listener, LISTEN_FD).step("place the socket")?;
    sys::fd::place(tell, TELL_FD).step("place the pipe")?;
    sys::fd::place(control, CONTROL_FD).step("place the second socket")?;
    for (view, number) in all.into_iter().zip(VIEWS_FD..) {
        sys::fd::place(view, number).step("place a view")?;
    }
    let named: Vec<_> = followed
        .iter()
        .map(|followed| (followed.at.clone(), followed.token.clone(), followed.above, followed.lowers.len()))
        .collect();
    let pids: Vec<_> = beside.iter().map(|one| one.pid).collect();
    // Their numbers are closed below, by number.
    std::mem::forget((inherited_fds, null, followed, beside));
    sys::fd::close_from(views).step("close what is not the guest's")?;
    let take = |number| -> Result<OwnedFd, StepError> {
        let fd = sys::fd::inherited(number).step("take a descriptor")?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).step("mark a descriptor")?;
        Ok(fd)
    };
    let control = Some(take(CONTROL_FD)?).filter(|_| has_control).map(UnixListener::from);
    let mut numbers = VIEWS_FD..;
    let mut next = || numbers.next().map_or_else(|| take(RawFd::MAX), &take);
    let mut views = Vec::new();
    for (at, token, above, lowers) in named {
        let upper = next()?;
        views.push(FollowedOverlay {
            at,
            token,
            upper,
            lowers: (0..lowers).map(|_| next()).collect::<Result<_, _>>()?,
            above,
        });
    }
    let beside =
        pids.into_iter().map(|pid| next().map(|said| Sidecar { pid, said })).collect::<Result<_, _>>()?;
    Ok(GuestFds { listener: take(LISTEN_FD)?.into(), tell: take(TELL_FD)?, control, followed: views, beside })
}
