//! The Body's first process, from the fork to the guest.
//!
//! Steps that need no plan run while the plan is on its way: making mounts private, bounding capabilities and, if the
//! launcher is the host's root, mounting the kernel file systems. The order matters: ids before mounts (an overlay
//! acts with the ids of the process that mounts it), the root before Landlock (which forbids mounts), seccomp last
//! (which forbids most of this).

use std::{
    fs::File,
    io::{self, Read, Write},
    mem::ManuallyDrop,
    net::UdpSocket,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    path::PathBuf,
};

use guest::fsmonitor::FollowedOverlay;
use proto::{
    Mechanism, MechanismStatus,
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
    transparent,
    vm::{self, VmmInput, sidecar::Sidecar},
};

const PLAN_LEN_MAX: u32 = 4 << 20;

/// Descriptors of the host that the child inherits.
pub struct InheritedFds {
    /// The guest's listening socket.
    pub listener: OwnedFd,
    /// The guest's log.
    pub log: OwnedFd,
    /// The `tasks` files of its v1 cgroups. Writing to them needs the rights of the process that opened them.
    pub groups: Vec<OwnedFd>,
    /// The socket on which the VMM process receives control requests such as saving the microVM.
    pub control: Option<OwnedFd>,
    /// The lower directories, where the launcher could open them.
    pub trees: Option<LowerDirs>,
}

/// The inherited descriptors by number: the launcher opens them after the fork, in the table that both share.
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
    /// Each mount with the mounts that protect its git directories: mount point and tree.
    mounts: Vec<(RawFd, Vec<[RawFd; 2]>)>,
    git: Option<Summary>,
}

impl InheritedFds {
    /// The numbers to send to the child.
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

/// Reports of the child to its parent, one per line, after a first byte that says that its descriptor table is its
/// own.
#[derive(serde::Serialize, serde::Deserialize)]
pub enum InitReport {
    /// The Body is set up.
    Done(Vec<Mechanism>, Option<Box<StartReport>>),
    /// A step failed.
    Failed(LaunchFailure),
}

/// The rights of the launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LauncherRights {
    /// The host's root: it opens the lower directories for the child, and the Body has a root.
    ByRoot,
    /// An ordinary user: only the child itself can open the lower directories.
    ByUser,
}

/// Runs the child until it is the guest; never returns.
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

/// Does the steps that need no plan, waits for the plan, then separates from the parent's descriptor table.
fn receive_plan(plan: OwnedFd, tell: &OwnedFd, launched: LauncherRights) -> Result<InitSetup, StepError> {
    // While the table is shared, this process holds the other end of its own pipe and would never see its end of
    // file.
    sys::process::die_with_parent().step("die with the launcher")?;
    sys::mount::make_private().step("make mounts private")?;
    let filter = lock_down::lock_down_early()?;
    // Not closed here: the descriptor still belongs to the launcher as well.
    let mut pipe = ManuallyDrop::new(File::from(plan));
    pipe.read_exact(&mut [0u8; 1]).step("wait for the Body's ids")?;
    if launched == LauncherRights::ByRoot {
        assume_ids(0)?;
        // The kernel clears the parent-death signal when the ids change.
        sys::process::die_with_parent().step("die with the launcher")?;
        mount_staging()?;
    }
    let (plan, numbers): (LaunchPlan, FdNumbers) = read_plan(&mut pipe).step("read the plan")?;
    sys::namespace::own_descriptors().step("separate from the launcher's descriptors")?;
    rustix::io::write(tell, b".").step("report to the launcher")?;
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

/// Does the steps that need the plan.
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
    let transparent = transparent::is_wanted(plan).then(|| transparent::set_up(network.as_fd()));
    let resolver = bind_resolver(plan, transparent.as_ref());
    told.extend(namespace_mechanisms());
    told.extend(transparent);
    // Sidecars start while namespaces can still be created.
    let mut beside = vm::virtiofs_daemons::start(plan)?;
    beside.extend(vm::firecracker_jail::start(plan)?);
    told.extend(lock_down::limits(plan)?);
    told.extend(lock_down::privileges(plan)?);
    Ok(PreparedInit { told, followed, beside, resolver })
}

/// Binds the socket on which the guest answers name lookups, while the capability for its port is there. In a
/// transparent network the egress proxy answers them, and a microVM has a loopback of its own.
fn bind_resolver(plan: &LaunchPlan, transparent: Option<&Mechanism>) -> Option<UdpSocket> {
    let is_transparent = transparent.is_some_and(|told| told.state == MechanismStatus::Enforced);
    if is_transparent || plan.vm.is_some() {
        return None;
    }
    UdpSocket::bind(guest::resolver::ADDRESS).ok()
}

/// A Body that is complete but for its guest.
struct PreparedInit {
    told: Vec<Mechanism>,
    followed: Vec<FollowedOverlay>,
    /// The processes that share directories with a microVM or jail its hypervisor.
    beside: Vec<Sidecar>,
    /// The socket on which the Body's programs ask the guest for names.
    resolver: Option<UdpSocket>,
}

/// Becomes root of the Body if it has one, otherwise its only user.
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

/// Becomes the guest; returns only on failure.
///
/// There is no exec: the guest is part of this program, which saves a tenth of the time to start a Body. So this
/// function closes the descriptors and `lock_down` drops the capabilities that an exec would have removed.
fn exec_guest(
    plan: LaunchPlan,
    inherited_fds: InheritedFds,
    tell: &OwnedFd,
    prepared: PreparedInit,
    filter: &SeccompFilter,
) -> StepError {
    let PreparedInit { told: mechanisms, followed, beside, resolver } = prepared;
    let GuestFds { listener, tell, control, resolver, followed, mut beside } =
        match close_other_fds(inherited_fds, tell, resolver, followed, beside) {
            Ok(kept) => kept,
            Err(error) => return error,
        };
    // A Body outlives its supervisor.
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
    // The launcher reads this pipe to its end, and takes that for the start of the guest.
    let begun = move || drop(send_report(&tell, &InitReport::Done(mechanisms, None)));
    let code = match guest::serve(plan.config, listener, resolver, followed, begun) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(io::stderr(), "pal-guest: {error}");
            1
        }
    };
    std::process::exit(code)
}

/// Runs the VMM process instead of the guest; here, too, the end of the pipe is the start of the guest.
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
const RESOLVER_FD: RawFd = 6;
/// From here on, one after another: the directories of followed overlays, and the output of sidecars.
const VIEWS_FD: RawFd = 7;

/// The descriptors of the host that the guest or the VMM process keeps.
struct GuestFds {
    listener: UnixListener,
    tell: OwnedFd,
    control: Option<UnixListener>,
    resolver: Option<UdpSocket>,
    followed: Vec<FollowedOverlay>,
    beside: Vec<Sidecar>,
}

/// Closes every descriptor but the log, the sockets, the followed directories and, for one more report, the pipe to
/// the launcher.
fn close_other_fds(
    inherited_fds: InheritedFds,
    tell: &OwnedFd,
    resolver: Option<UdpSocket>,
    followed: Vec<FollowedOverlay>,
    beside: Vec<Sidecar>,
) -> Result<GuestFds, StepError> {
    let null: OwnedFd =
        File::options().read(true).write(true).open("/dev/null").step("open /dev/null")?.into();
    // First above all fixed numbers, so that placing one never closes another.
    let views = VIEWS_FD
        + followed.iter().map(|followed| 1 + followed.lowers.len() as RawFd).sum::<RawFd>()
        + beside.len() as RawFd;
    let high = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, views + 2).step("copy a descriptor");
    let placed = [(high(null.as_fd())?, 0), (high(null.as_fd())?, 1), (high(inherited_fds.log.as_fd())?, 2)];
    let (listener, tell) = (high(inherited_fds.listener.as_fd())?, high(tell.as_fd())?);
    let has_control = inherited_fds.control.is_some();
    // Its number is always taken, so that the numbers after it are always the same.
    let control = high(inherited_fds.control.as_ref().unwrap_or(&null).as_fd())?;
    let has_resolver = resolver.is_some();
    let names = high(resolver.as_ref().map_or(null.as_fd(), AsFd::as_fd))?;
    let all = followed.iter().flat_map(|followed| [&followed.upper].into_iter().chain(&followed.lowers));
    let all = all.chain(beside.iter().map(|one| &one.said));
    let all = all.map(|view| high(view.as_fd())).collect::<Result<Vec<_>, _>>()?;
    for (fd, number) in placed {
        sys::fd::place(fd, number).step("place standard streams")?;
    }
    sys::fd::place(listener, LISTEN_FD).step("place the socket")?;
    sys::fd::place(tell, TELL_FD).step("place the pipe")?;
    sys::fd::place(control, CONTROL_FD).step("place the second socket")?;
    sys::fd::place(names, RESOLVER_FD).step("place the socket for names")?;
    for (view, number) in all.into_iter().zip(VIEWS_FD..) {
        sys::fd::place(view, number).step("place a followed directory")?;
    }
    let named: Vec<_> = followed
        .iter()
        .map(|followed| (followed.at.clone(), followed.token.clone(), followed.above, followed.lowers.len()))
        .collect();
    let pids: Vec<_> = beside.iter().map(|one| one.pid).collect();
    // These descriptors are closed below, by number.
    std::mem::forget((inherited_fds, null, resolver, followed, beside));
    sys::fd::close_from(views).step("close the other descriptors")?;
    let take = |number| -> Result<OwnedFd, StepError> {
        let fd = sys::fd::inherited(number).step("take a descriptor")?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).step("mark a descriptor")?;
        Ok(fd)
    };
    let control = Some(take(CONTROL_FD)?).filter(|_| has_control).map(UnixListener::from);
    let resolver = Some(take(RESOLVER_FD)?).filter(|_| has_resolver).map(UdpSocket::from);
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
    Ok(GuestFds {
        listener: take(LISTEN_FD)?.into(),
        tell: take(TELL_FD)?,
        control,
        resolver,
        followed: views,
        beside,
    })
}
