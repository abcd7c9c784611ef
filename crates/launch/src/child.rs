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

use guest::changes::Followed;
use proto::{
    Mechanism,
    launch::{Failed, Plan},
    spec::USER_ID,
    vm::Revival,
};

use sys::filter::Filter;

use crate::{
    lock_down,
    network::Way,
    places::Places,
    report::{Step, StepError},
    root::{self, Assembled},
    trees::{self, Lower, Trees},
    views,
    vm::{self, Charge, beside::Beside},
};

const PLAN_LEN_MAX: u32 = 4 << 20;

/// What the child brings along from the host.
pub struct Luggage {
    /// The guest's listening socket.
    pub listener: OwnedFd,
    /// Its log.
    pub log: OwnedFd,
    /// The doors of its v1 cgroups. Who goes through needs the rights of who opened them.
    pub groups: Vec<OwnedFd>,
    /// Where the minder of a machine is asked to freeze it.
    pub control: Option<OwnedFd>,
    /// What it is made from, where the launcher could take it.
    pub trees: Option<Trees>,
}

/// The same, by number: the launcher opens it after the fork, in the table both share.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Numbers {
    fixed: [RawFd; 2],
    groups: Vec<RawFd>,
    control: Option<RawFd>,
    trees: Option<TreeNumbers>,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct TreeNumbers {
    disk: Option<RawFd>,
    lowers: Vec<(PathBuf, RawFd)>,
    mounts: Vec<RawFd>,
}

impl Luggage {
    /// What to tell the child.
    pub fn numbers(&self) -> Numbers {
        Numbers {
            fixed: [&self.listener, &self.log].map(AsRawFd::as_raw_fd),
            groups: self.groups.iter().map(AsRawFd::as_raw_fd).collect(),
            control: self.control.as_ref().map(AsRawFd::as_raw_fd),
            trees: self.trees.as_ref().map(|trees| TreeNumbers {
                disk: trees.disk.as_ref().map(AsRawFd::as_raw_fd),
                lowers: trees
                    .lowers
                    .iter()
                    .map(|lower| (lower.path.clone(), lower.tree.as_raw_fd()))
                    .collect(),
                mounts: trees.mounts.iter().map(AsRawFd::as_raw_fd).collect(),
            }),
        }
    }
}

impl Numbers {
    fn take(self) -> io::Result<Luggage> {
        let take = sys::fd::inherited;
        let [listener, log] = self.fixed;
        let trees = self.trees.map(|trees| -> io::Result<Trees> {
            let lowers =
                trees.lowers.into_iter().map(|(path, number)| take(number).map(|tree| Lower { path, tree }));
            Ok(Trees {
                disk: trees.disk.map(take).transpose()?,
                lowers: lowers.collect::<io::Result<_>>()?,
                mounts: trees.mounts.into_iter().map(take).collect::<io::Result<_>>()?,
            })
        });
        Ok(Luggage {
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
pub enum Told {
    /// Everything is in place.
    Done(Vec<Mechanism>, Option<Box<Revival>>),
    /// It is not.
    Failed(Failed),
}

/// Whose launcher the child has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launched {
    /// The host's root: what the Body is made from is brought along, and the Body has a root.
    ByRoot,
    /// An ordinary user: only the child itself can reach what the Body is made from.
    ByUser,
}

/// The child's whole life until it is the guest.
pub fn live(
    plan: OwnedFd,
    tell: &OwnedFd,
    network: &OwnedFd,
    places: Option<Places>,
    launched: Launched,
) -> ! {
    let error = match begin(plan, tell, launched) {
        Ok(Begun { plan, luggage, filter }) => match prepare(&plan, &luggage, network, places) {
            Ok(prepared) => become_guest(plan, luggage, tell, prepared, &filter),
            Err(error) => error,
        },
        Err(error) => error,
    };
    let _ = say(tell, &Told::Failed(error.failed()));
    std::process::exit(1)
}

fn say(tell: &OwnedFd, told: &Told) -> io::Result<()> {
    let line = serde_json::to_string(told)? + "\n";
    File::from(tell.try_clone()?).write_all(line.as_bytes())
}

struct Begun {
    plan: Plan,
    luggage: Luggage,
    filter: Filter,
}

/// Does what needs no plan, waits for the plan, then parts from the parent's descriptors.
fn begin(plan: OwnedFd, tell: &OwnedFd, launched: Launched) -> Result<Begun, StepError> {
    // While the table is shared this process holds the other end of its own pipe and would never hear of its end.
    sys::process::die_with_parent().step("die with the launcher")?;
    sys::mount::make_private().step("make mounts private")?;
    let filter = lock_down::ahead()?;
    // Not closed here: the number still belongs to the launcher, too.
    let mut pipe = ManuallyDrop::new(File::from(plan));
    pipe.read_exact(&mut [0u8; 1]).step("wait for the Body's ids")?;
    if launched == Launched::ByRoot {
        become_first(0)?;
        // The kernel forgets that promise with the ids.
        sys::process::die_with_parent().step("die with the launcher")?;
        set_the_stage()?;
    }
    let (plan, numbers): (Plan, Numbers) = read_plan(&mut pipe).step("read the plan")?;
    sys::namespace::own_descriptors().step("part from the launcher's descriptors")?;
    rustix::io::write(tell, b".").step("tell the launcher")?;
    Ok(Begun { plan, luggage: numbers.take().step("take the launcher's descriptors")?, filter })
}

fn set_the_stage() -> Result<(), StepError> {
    root::raise_stage()?;
    views::ahead()
}

fn read_plan(pipe: &mut File) -> io::Result<(Plan, Numbers)> {
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
fn prepare(
    plan: &Plan,
    luggage: &Luggage,
    network: &OwnedFd,
    places: Option<Places>,
) -> Result<Prepared, StepError> {
    for door in &luggage.groups {
        sys::cgroup::enter_v1(door.as_fd()).step("enter the Body's cgroup")?;
    }
    sys::namespace::unshare_cgroup().step("make a cgroup namespace")?;
    let gathered;
    let trees = match &luggage.trees {
        Some(trees) => trees,
        None => {
            become_first(if plan.ids.has_root() { 0 } else { USER_ID })?;
            gathered = trees::gather(plan)?;
            set_the_stage()?;
            &gathered
        }
    };
    let Assembled { mut told, followed } = root::assemble(plan, trees)?;
    told.extend(views::mount_all(plan, trees)?);
    root::enter(plan).step("enter the Body's root")?;
    rustix::system::sethostname(plan.body.as_str().as_bytes()).step("set the host name")?;
    Way::enter(network.as_fd())?;
    told.extend(namespaces());
    // Whoever is started from here on is for work, and has every processor.
    if let Some(places) = places {
        places.anywhere();
    }
    // While namespaces can still be made.
    let mut beside = vm::share::start(plan)?;
    beside.extend(vm::jail::start(plan)?);
    told.extend(lock_down::limits(plan)?);
    told.extend(lock_down::privileges(plan)?);
    Ok(Prepared { told, followed, beside })
}

/// A Body that only lacks its guest.
struct Prepared {
    told: Vec<Mechanism>,
    followed: Vec<Followed>,
    /// Who shares directories with a machine, and who jails its hypervisor.
    beside: Vec<Beside>,
}

/// Root of the Body where there is one, otherwise its only user.
fn become_first(id: u32) -> Result<(), StepError> {
    sys::namespace::become_ids(id, id, id == 0).step("take the Body's ids")
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
///
/// Without an exec: the guest is part of this program, which saves a tenth of a Body's whole start. What an exec
/// would have swept away is swept by hand: descriptors here, capabilities and the rest by `lock_down`.
fn become_guest(
    plan: Plan,
    luggage: Luggage,
    tell: &OwnedFd,
    prepared: Prepared,
    filter: &Filter,
) -> StepError {
    let Prepared { told: mechanisms, followed, beside } = prepared;
    let Kept { listener, tell, control, followed, mut beside } =
        match keep_only(luggage, tell, followed, beside) {
            Ok(kept) => kept,
            Err(error) => return error,
        };
    // A Body outlives its keeper.
    let _ = sys::process::outlive_parent();
    if let Err(error) = lock_down::filter(&plan, filter) {
        let _ = say(&tell, &Told::Failed(error.failed()));
        std::process::exit(1);
    }
    if let (Some(machine), Some(control)) = (plan.vm, control) {
        let jailer = if machine.is_jailed() { beside.pop() } else { None };
        std::process::exit(mind(
            Charge { vm: machine, callers: listener, control, sharers: beside, jailer },
            tell,
            mechanisms,
        ));
    }
    // The launcher hears the end of this pipe, and takes it for the guest's beginning.
    let begun = move || drop(say(&tell, &Told::Done(mechanisms, None)));
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
fn mind(charge: Charge, tell: OwnedFd, mut mechanisms: Vec<Mechanism>) -> i32 {
    let about = charge.vm.clone();
    vm::live(charge, move |revived| {
        let told = match revived {
            Ok(revival) => {
                mechanisms.extend(vm::mechanisms(&about, &revival));
                Told::Done(mechanisms, Some(Box::new(revival)))
            }
            Err(error) => Told::Failed(error.failed()),
        };
        let _ = say(&tell, &told);
    })
}

const TELL_FD: RawFd = 4;
const LISTEN_FD: RawFd = 3;
const CONTROL_FD: RawFd = 5;
/// From here on, one after another: views of followed areas, and what is said by who is beside a machine's minder.
const VIEWS_FD: RawFd = 6;

/// What the guest, or who minds a machine, still holds of the host.
struct Kept {
    listener: UnixListener,
    tell: OwnedFd,
    control: Option<UnixListener>,
    followed: Vec<Followed>,
    beside: Vec<Beside>,
}

/// Closes every descriptor but the log, the sockets, views of areas and, for one more word, the pipe to the launcher.
fn keep_only(
    luggage: Luggage,
    tell: &OwnedFd,
    followed: Vec<Followed>,
    beside: Vec<Beside>,
) -> Result<Kept, StepError> {
    let null: OwnedFd =
        File::options().read(true).write(true).open("/dev/null").step("open /dev/null")?.into();
    // Above all fixed numbers first, so that placing one never closes another.
    let views = VIEWS_FD
        + followed.iter().map(|followed| 1 + followed.lowers.len() as RawFd).sum::<RawFd>()
        + beside.len() as RawFd;
    let high = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, views + 2).step("copy a descriptor");
    let placed = [(high(null.as_fd())?, 0), (high(null.as_fd())?, 1), (high(luggage.log.as_fd())?, 2)];
    let (listener, tell) = (high(luggage.listener.as_fd())?, high(tell.as_fd())?);
    let has_control = luggage.control.is_some();
    // Its number is taken in any case, so that those behind it are always the same.
    let control = high(luggage.control.as_ref().unwrap_or(&null).as_fd())?;
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
    std::mem::forget((luggage, null, followed, beside));
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
        views.push(Followed {
            at,
            token,
            upper,
            lowers: (0..lowers).map(|_| next()).collect::<Result<_, _>>()?,
            above,
        });
    }
    let beside =
        pids.into_iter().map(|pid| next().map(|said| Beside { pid, said })).collect::<Result<_, _>>()?;
    Ok(Kept { listener: take(LISTEN_FD)?.into(), tell: take(TELL_FD)?, control, followed: views, beside })
}
