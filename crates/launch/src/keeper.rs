//! The launcher's own side: makes the Body, reports, then keeps it until its guest is gone.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use proto::{
    Enforcement,
    launch::{CgroupVersion, End, Plan, Ready, Report, Running},
    spec::{Access, IdRange, Ids, Life},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use sys::namespace::{MapLine, Side};

use crate::{
    child::{self, Launched, Luggage, Told},
    idmap,
    network::{Helper, Way},
    places::Places,
    report::{Step, StepError},
    trees,
};

const PLAN_LEN_MAX: u64 = 4 << 20;
const TOLD_LEN_USUAL: usize = 4 << 10;
/// How often a Body's upper on disk is measured.
const DISK_CHECK: Duration = Duration::from_secs(5);
/// When the record of a run is written for others to read.
const RECORD_AFTER: Duration = Duration::from_millis(10);
/// When a keeper gives back the memory that making the Body took.
const REST_AFTER: Duration = Duration::from_secs(1);
const CGROUP_PATIENCE: Duration = Duration::from_secs(5);

/// When the Body's first process is forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Before the plan is there, while the maker still writes it.
    Early,
    /// With the plan, whose v2 cgroup it is forked into.
    Late,
}

/// Forks, reads the plan from standard input, makes the Body, reports on standard output, keeps it. `places` is for a maker
/// that goes on at the same time, and has put us apart; `wish` are the ids that the plan will most likely say.
pub fn make_and_keep(when: When, places: Option<Places>, wish: Option<&Ids>) -> ExitCode {
    // Away from the maker's terminal and its signals.
    let _ = rustix::process::setsid();
    let _ = sys::process::set_name(c"pal-keeper");
    let forked = (when == When::Early).then(|| Forked::new(None, places, wish));
    let (plan, line) = match read_plan().step("read the plan") {
        Ok(read) => read,
        Err(error) => {
            // Often there is none: the maker found that it needs no Body.
            if let Some(Ok(forked)) = forked {
                end_child(forked.pid);
            }
            return fail(&error);
        }
    };
    match make(&plan, &line, forked, places) {
        Ok(kept) => keep(&plan, kept),
        Err(error) => {
            remove_cgroups(&plan);
            // Nobody else looks after a run whose maker is gone.
            if plan.life == Life::Run && maker_is_there().is_err() {
                remove_directory(&set_aside(&plan));
                release_ids(&plan);
            }
            fail(&error)
        }
    }
}

fn fail(error: &StepError) -> ExitCode {
    report(&Report::Failed(error.failed()));
    ExitCode::FAILURE
}

fn report(report: &Report) {
    let line = serde_json::to_string(report).unwrap_or_default() + "\n";
    let _ = io::stdout().write_all(line.as_bytes());
    let _ = io::stdout().flush();
}

/// One line, as it is and as it is meant; what follows it on standard input is the maker's life.
fn read_plan() -> io::Result<(Plan, String)> {
    let mut line = String::new();
    BufReader::with_capacity(16 << 10, io::stdin().take(PLAN_LEN_MAX)).read_line(&mut line)?;
    Ok((serde_json::from_str(&line)?, line))
}

/// A Body that runs.
struct Kept {
    pid: Pid,
    handle: OwnedFd,
    /// The Body's mounts. Taking them down takes the kernel most of a millisecond, and as long as the disk takes to
    /// write back what is in an upper there; while they are held here, they go with the keeper, after its last word.
    mounts: OwnedFd,
    /// The record, while it is not written yet.
    record: Option<Enforcement>,
}

/// The Body's first process, waiting for its plan.
struct Forked {
    pid: Pid,
    handle: OwnedFd,
    /// When it began, and since when the host runs: by both it is known again.
    ticks: u64,
    boot_id: String,
    /// The ids it has already.
    ids: Option<Ids>,
    /// Where it reads its plan and the numbers of its descriptors.
    plan: OwnedFd,
    /// Where it tells how it goes.
    told: OwnedFd,
    /// Its ends of both. The table is shared, so they stay open here until it has its own.
    ends: (OwnedFd, OwnedFd, Way),
    /// Its mount namespace. Taken at once: later the kernel lets only the host's root look.
    mounts: OwnedFd,
    /// Who makes its network.
    helper: Helper,
}

impl Forked {
    fn new(
        cgroup: Option<BorrowedFd<'_>>,
        places: Option<Places>,
        ids: Option<&Ids>,
    ) -> Result<Self, StepError> {
        let launched = if sys::caps::is_host_root() { Launched::ByRoot } else { Launched::ByUser };
        let (hear, plan) = pipe()?;
        let (told, tell) = pipe()?;
        let way = Way::new()?;
        let flags = sys::namespace::FORKED | sys::namespace::SHARE_DESCRIPTORS;
        match sys::namespace::fork_into(flags, cgroup)
            .step("make the Body's namespaces")
            .map_err(explain_namespaces)?
        {
            Side::Child => child::live(hear, &tell, &way.take, places, launched),
            Side::Parent(pid) => {
                let known = || -> Result<Self, StepError> {
                    let mounts = File::open(format!("/proc/{}/ns/mnt", pid.as_raw_nonzero()))
                        .step("open the Body's mounts")?
                        .into();
                    ids.map_or(Ok(()), |ids| write_maps(ids, pid))?;
                    let helper = Helper::start(pid, &way, places)?;
                    // Last: from here on that process has work for a while, and we wait for it on the same processor.
                    ids.map_or(Ok(()), |_| tell_of_ids(plan.as_fd()))?;
                    let handle = sys::process::open(pid).step("open the Body's first process")?;
                    let ticks = sys::proc::start_ticks(pid.as_raw_nonzero().get())
                        .step("read the start of the Body's first process")?;
                    let boot_id = sys::proc::boot_id().step("read the boot id")?;
                    Ok(Self {
                        pid,
                        handle,
                        ticks,
                        boot_id,
                        ids: ids.cloned(),
                        plan,
                        told,
                        ends: (hear, tell, way),
                        mounts,
                        helper,
                    })
                };
                known().inspect_err(|_| end_child(pid))
            }
        }
    }
}

/// Maps a Body's ids, and says so to its first process.
fn give_ids(ids: &Ids, pid: Pid, plan: BorrowedFd<'_>) -> Result<(), StepError> {
    write_maps(ids, pid)?;
    tell_of_ids(plan)
}

fn tell_of_ids(plan: BorrowedFd<'_>) -> Result<(), StepError> {
    rustix::io::write(plan, b".").map(drop).step("tell the Body's first process of its ids")
}

fn make(
    plan: &Plan,
    line: &str,
    forked: Option<Result<Forked, StepError>>,
    places: Option<Places>,
) -> Result<Kept, StepError> {
    let forked = match forked {
        Some(forked) => forked.and_then(|forked| follow(plan, forked))?,
        None => Forked::new(v2_group(plan)?.as_ref().map(AsFd::as_fd), places, Some(&plan.ids))?,
    };
    let pid = forked.pid;
    settle(plan, line, forked, places).inspect_err(|_| end_child(pid))
}

fn pipe() -> Result<(OwnedFd, OwnedFd), StepError> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")
}

fn v2_group(plan: &Plan) -> Result<Option<OwnedFd>, StepError> {
    let group = plan.cgroups.iter().find(|group| group.version == CgroupVersion::V2);
    group.map(|group| sys::fd::open_path(&group.path)).transpose().step("open the Body's cgroup")
}

/// Who was forked too early for its v2 group is moved there.
fn follow(plan: &Plan, forked: Forked) -> Result<Forked, StepError> {
    let group = plan.cgroups.iter().find(|group| group.version == CgroupVersion::V2);
    let moved =
        group.map_or(Ok(()), |group| sys::cgroup::move_v2(forked.pid.as_raw_nonzero().get(), &group.path));
    moved.inspect_err(|_| end_child(forked.pid)).step("enter the Body's cgroup").map(|()| forked)
}

fn explain_namespaces(error: StepError) -> StepError {
    match error.cause().raw_os_error() {
        Some(code) if code == rustix::io::Errno::PERM.raw_os_error() => error.hint(
            "user namespaces are restricted here; `pal doctor` says by what, for example: \
             sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        Some(code) if code == rustix::io::Errno::NOSPC.raw_os_error() => error
            .hint("the limit of namespaces is reached; raise it: sysctl -w user.max_user_namespaces=65536"),
        _ => error,
    }
}

/// Opens what the child needs of the host. The two share their descriptors, so numbers are all it must be told.
fn pack(plan: &Plan) -> Result<Luggage, StepError> {
    rustix::process::chdir(&plan.dir).step("enter the Body's directory")?;
    // By a name relative to the directory: a socket's path may have no more than 107 bytes.
    let listener = UnixListener::bind("guest.sock").step("listen on the guest's socket")?;
    // Nobody could read the log of a run: it would go with its directory.
    let log = if plan.life == Life::Run { "/dev/null" } else { "guest.log" };
    let log = File::options().append(true).create(true).open(log).step("open the guest's log")?;
    let control = match &plan.vm {
        Some(_) => {
            Some(UnixListener::bind(proto::vm::CONTROL).step("listen on the machine's socket")?.into())
        }
        None => None,
    };
    let groups = plan.cgroups.iter().filter(|group| group.version == CgroupVersion::V1);
    Ok(Luggage {
        listener: listener.into(),
        log: log.into(),
        groups: groups
            .map(|group| sys::cgroup::door_v1(&group.path))
            .collect::<io::Result<_>>()
            .step("open the Body's cgroups")?,
        control,
        trees: if sys::caps::is_host_root() { Some(trees::gather(plan)?) } else { None },
    })
}

/// Fails if nobody holds the other end of standard input any more.
fn maker_is_there() -> io::Result<()> {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
    rustix::event::poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if watched[0].revents().is_empty() { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

/// Gives the child its ids and its plan, waits until it is the guest, and reports.
fn settle(plan: &Plan, line: &str, forked: Forked, places: Option<Places>) -> Result<Kept, StepError> {
    let Forked { pid, handle, ticks, boot_id, ids, plan: pipe, told, ends, mounts, helper } = forked;
    match ids {
        None => give_ids(&plan.ids, pid, pipe.as_fd())?,
        Some(ids) if ids == plan.ids => {}
        Some(_) => return Err(io::Error::other("it was promised other ids")).step("map the Body's ids"),
    }
    // Whoever comes after a maker that was killed may be at the same Body already.
    maker_is_there().step("find the maker")?;
    let luggage = pack(plan)?;
    // Before the child goes on: from here on whoever finds the directory can end the Body, also without us.
    let mut ready = Ready {
        pid: pid.as_raw_nonzero().get(),
        ticks,
        keeper: rustix::process::getpid().as_raw_nonzero().get(),
        mechanisms: Vec::new(),
        revival: None,
    };
    write_running(plan, &ready, boot_id)?;
    hand_over(line, &luggage, pipe).step("hand the plan to the Body's first process")?;
    if let Some(places) = places {
        places.anywhere();
    }
    let mut told = File::from(told);
    wait_parted(&handle, &mut told).step("hear from the Body's first process")?;
    drop((luggage, ends));
    helper.wait().map_err(explain_namespaces)?;
    // A machine takes its time, and one that is still being frozen as long as that takes: its maker may go meanwhile.
    if plan.vm.is_some() && !is_told(&told).step("hear from the Body's first process")? {
        return Ok(Kept { pid, handle, mounts, record: None });
    }
    match hear(told)? {
        Told::Done(mechanisms, revival) => {
            ready.mechanisms = mechanisms;
            ready.revival = revival.map(|revival| *revival);
        }
        Told::Failed(failed) => {
            report(&Report::Failed(failed));
            remove_cgroups_after(plan, pid);
            std::process::exit(1);
        }
    }
    ready.mechanisms.extend(plan.mechanisms.iter().cloned());
    let record = Enforcement { mechanisms: ready.mechanisms.clone() };
    if plan.life == Life::Kept {
        write_record(&record).step("write the record")?;
    }
    report(&Report::Ready(ready));
    // The maker of a run has the record now; others find it once it has lasted a moment.
    let record = (plan.life == Life::Run).then_some(record);
    Ok(Kept { pid, handle, mounts, record })
}

fn write_record(record: &Enforcement) -> io::Result<()> {
    sys::fd::write_whole(Path::new("enforcement.json"), &serde_json::to_vec(record)?)
}

/// Waits until the child has descriptors of its own. Before that its end closes no pipe: we hold both ends, too.
fn wait_parted(child: &OwnedFd, told: &mut File) -> io::Result<()> {
    let mut watched = [PollFd::new(told, PollFlags::IN), PollFd::new(child, PollFlags::IN)];
    while let Err(errno) = rustix::event::poll(&mut watched, None) {
        if errno != rustix::io::Errno::INTR {
            return Err(errno.into());
        }
    }
    if watched[0].revents().is_empty() {
        return Err(io::Error::other("it ended without a word"));
    }
    told.read_exact(&mut [0u8; 1])
}

/// The plan as it came, and the numbers, in one piece: whoever waits for it is woken once.
fn hand_over(line: &str, luggage: &Luggage, pipe: OwnedFd) -> io::Result<()> {
    let numbers = serde_json::to_vec(&luggage.numbers())?;
    let mut text = Vec::with_capacity(2 * size_of::<u32>() + line.len() + numbers.len());
    text.extend((line.len() as u32).to_ne_bytes());
    text.extend((numbers.len() as u32).to_ne_bytes());
    text.extend_from_slice(line.as_bytes());
    text.extend(numbers);
    File::from(pipe).write_all(&text)
}

fn remove_cgroups_after(plan: &Plan, pid: Pid) {
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
    remove_cgroups(plan);
}

/// Waits until there is something to hear; false where the maker is gone before that.
fn is_told(told: &File) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(told, PollFlags::IN), PollFd::new(&stdin, PollFlags::empty())];
    while let Err(errno) = rustix::event::poll(&mut watched, None) {
        if errno != rustix::io::Errno::INTR {
            return Err(errno.into());
        }
    }
    Ok(!watched[0].revents().is_empty())
}

fn hear(told: File) -> Result<Told, StepError> {
    // Without room of its own a string would grow by reads of 32 bytes.
    let mut text = String::with_capacity(TOLD_LEN_USUAL);
    told.take(PLAN_LEN_MAX).read_to_string(&mut text).step("hear from the Body's first process")?;
    let last = text.lines().last().unwrap_or_default();
    let cause = |_| io::Error::other("it ended without a word");
    serde_json::from_str(last).map_err(cause).step("hear from the Body's first process")
}

fn write_maps(ids: &Ids, pid: Pid) -> Result<(), StepError> {
    let lines = |ranges: &[IdRange]| -> Vec<MapLine> {
        ranges.iter().map(|r| MapLine { inside: r.inside, outside: r.outside, count: r.count }).collect()
    };
    let (users, groups) = (lines(&ids.users), lines(&ids.groups));
    if sys::caps::is_host_root() {
        return sys::namespace::write_maps(pid, &users, &groups, true).step("map the Body's ids");
    }
    if ids.has_root() {
        return idmap::write_with_helpers(pid, &users, &groups);
    }
    sys::namespace::write_maps(pid, &users, &groups, false).step("map the Body's id")
}

fn write_running(plan: &Plan, ready: &Ready, boot_id: String) -> Result<(), StepError> {
    let running = Running {
        boot_id,
        pid: ready.pid,
        ticks: ready.ticks,
        keeper: ready.keeper,
        cgroups: plan.cgroups.clone(),
    };
    let text = serde_json::to_vec(&running).map_err(io::Error::from).step("write run.json")?;
    sys::fd::write_whole(Path::new("run.json"), &text).step("write run.json")
}

fn end_child(pid: Pid) {
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
}

/// Waits for the end of the guest, of its time, of its maker, or of its disk.
fn keep(plan: &Plan, mut kept: Kept) -> ExitCode {
    let started = Instant::now();
    let ordered = wait(plan, &mut kept, started);
    let forgotten = ordered == Some(Order::Forgotten);
    let ordered = ordered.map(Order::end);
    // A kept Body that was never published is none. One that was, and that its `pal start` left behind, stays.
    let owner_gone =
        matches!(ordered, Some(End::Owner)) && (plan.life == Life::Run || !Path::new("spec.json").exists());
    if owner_gone {
        // While the kernel ends the Body's processes.
        let aside = set_aside(plan);
        if !reaches_host(plan) {
            // They are killed, and what they could still touch goes with them: nobody need wait for their burial.
            say_cleared();
        }
        remove_directory(&aside);
    }
    let status = rustix::process::waitpid(Some(kept.pid), WaitOptions::empty())
        .ok()
        .flatten()
        .map(|(_, status)| status);
    let end = ordered.unwrap_or_else(|| judge(plan, status));
    remove_cgroups(plan);
    if owner_gone {
        release_ids(plan);
        say_cleared();
    } else if forgotten {
        // What is left of a directory still belongs to these ids; `pal gc` takes both.
        if is_removed() {
            release_ids(plan);
        }
    } else if let Ok(text) = serde_json::to_vec(&end) {
        let _ = sys::fd::write_whole(Path::new("end.json"), &text);
        let _ = std::fs::remove_file("guest.sock");
        let _ = std::fs::remove_file(proto::vm::CONTROL);
    }
    drop(kept.mounts);
    ExitCode::SUCCESS
}

/// Whether a process that is being killed could still change something outside of the Body's own memory.
fn reaches_host(plan: &Plan) -> bool {
    plan.upper == proto::launch::Upper::Disk
        || plan.mounts.iter().any(|mount| mount.access == Access::ReadWrite)
}

/// Tells the maker, who may have gone on already, that nothing is left of the Body.
fn say_cleared() {
    let _ = io::stdout().write_all(b"\n").and_then(|()| io::stdout().flush());
}

/// Why a guest is ended here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Its maker is gone.
    Owner,
    /// Its time is over.
    Timeout,
    /// Its disk is full.
    Disk,
    /// Its directory was removed: nobody could ever find it again, and nobody is told of its end.
    Forgotten,
}

impl Order {
    fn end(self) -> End {
        match self {
            Self::Owner => End::Owner,
            Self::Timeout => End::Timeout,
            Self::Disk => End::Disk,
            Self::Forgotten => End::Unknown,
        }
    }
}

/// None when the guest ended by itself; otherwise why it was ended here.
fn wait(plan: &Plan, kept: &mut Kept, started: Instant) -> Option<Order> {
    let stdin = io::stdin();
    let mut rested = false;
    // A kept Body hangs by its maker until that has written it down, and says so.
    let mut tied = true;
    loop {
        let mut watched = vec![PollFd::new(&kept.handle, PollFlags::IN)];
        if tied {
            watched.push(PollFd::new(&stdin, PollFlags::IN));
        }
        let rest = match &kept.record {
            Some(_) => Some(RECORD_AFTER),
            None => (!rested).then_some(REST_AFTER),
        };
        let pause = next_check(plan, started)
            .into_iter()
            .chain(rest)
            .min()
            .map(|pause| Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() });
        match rustix::event::poll(&mut watched, pause.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return None,
            Ok(_) => {}
        }
        if !watched[0].revents().is_empty() {
            return None;
        }
        if started.elapsed() >= RECORD_AFTER
            && let Some(record) = kept.record.take()
        {
            let _ = write_record(&record);
        }
        if !rested && started.elapsed() >= REST_AFTER {
            rested = true;
            sys::rest::trim_heap();
            sys::rest::release_clean_pages();
        }
        let maker_gone = watched.get(1).is_some_and(|maker| !maker.revents().is_empty());
        if maker_gone && plan.life == Life::Kept && matches!(rustix::io::read(&stdin, &mut [0u8; 1]), Ok(1)) {
            tied = false;
            continue;
        }
        let order = match (maker_gone, plan.wall_ms) {
            (true, _) => Order::Owner,
            (_, Some(wall)) if started.elapsed() >= Duration::from_millis(wall) => Order::Timeout,
            _ if !tied && is_forgotten() => Order::Forgotten,
            _ if over_disk(plan) => Order::Disk,
            _ => {
                // What the look needed of the program is not needed again for a while.
                if rested {
                    sys::rest::release_clean_pages();
                }
                continue;
            }
        };
        // Where we were told to keep off its maker's processor, its guest is not to die there either: it would take the
        // processor from the maker, which is writing down what was.
        let _ = sys::process::stay_where_we_may(kept.pid);
        let _ = sys::process::signal(kept.handle.as_fd(), Signal::KILL);
        thaw(plan);
        return Some(order);
    }
}

/// Whether somebody removed the directory of a Body that had been written down, or what makes it a Body's.
fn is_forgotten() -> bool {
    let missing = |name: &str| {
        Path::new(name).symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    // The draft is what `pal` makes of the spec before it ends a Body itself, perhaps between two of these looks.
    is_removed() || (missing("spec.json") && missing("spec.draft"))
}

/// Whether the Body's directory is gone. The kernel knows: one that was moved has a name, one that was removed has none.
fn is_removed() -> bool {
    std::env::current_dir().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// How long nothing needs to be looked at; none means until something happens.
fn next_check(plan: &Plan, started: Instant) -> Option<Duration> {
    let wall = plan.wall_ms.map(|wall| Duration::from_millis(wall).saturating_sub(started.elapsed()));
    let disk = (plan.upper == proto::launch::Upper::Disk).then_some(DISK_CHECK);
    wall.into_iter().chain(disk).min()
}

fn over_disk(plan: &Plan) -> bool {
    if plan.upper != proto::launch::Upper::Disk {
        return false;
    }
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let upper = rustix::fs::open("disk/upper", flags, rustix::fs::Mode::empty());
    upper
        .ok()
        .and_then(|upper| sys::tree::usage(upper.as_fd()).ok())
        .is_some_and(|used| used.bytes > plan.disk_bytes)
}

/// A frozen process dies only when it is let go.
fn thaw(plan: &Plan) {
    for group in &plan.cgroups {
        if sys::cgroup::is_frozen(&group.path) {
            let _ = match group.version {
                CgroupVersion::V1 => sys::cgroup::thaw_v1(&group.path, CGROUP_PATIENCE),
                CgroupVersion::V2 => sys::cgroup::freeze_v2(&group.path, false, CGROUP_PATIENCE),
            };
        }
    }
}

fn judge(plan: &Plan, status: Option<WaitStatus>) -> End {
    let Some(status) = status else { return End::Unknown };
    if let Some(code) = status.exit_status() {
        return End::Exit { code };
    }
    let oom =
        plan.cgroups.iter().any(|group| sys::cgroup::oom_kills(&group.path).is_some_and(|kills| kills > 0));
    match status.terminating_signal() {
        Some(signal) if signal == Signal::KILL.as_raw() && oom => End::Oom,
        Some(signal) => End::Killed { signal },
        None => End::Unknown,
    }
}

fn remove_cgroups(plan: &Plan) {
    for group in &plan.cgroups {
        let _ = sys::cgroup::remove(&group.path, CGROUP_PATIENCE);
    }
}

/// From here on nobody finds a Body there. Gives the directory's new name.
fn set_aside(plan: &Plan) -> PathBuf {
    let aside = proto::launch::set_aside(&plan.dir);
    if std::fs::rename(&plan.dir, &aside).is_ok() { aside } else { plan.dir.clone() }
}

/// Ends what a `pal run` leaves behind.
fn remove_directory(dir: &Path) {
    let _ = std::env::set_current_dir("/");
    let Some((parent, name)) = dir.parent().zip(dir.file_name()) else { return };
    let name = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(name)).unwrap_or_default();
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    if let Ok(parent) = rustix::fs::open(parent, flags, rustix::fs::Mode::empty()) {
        let _ = sys::tree::remove(parent.as_fd(), &name);
    }
}

/// After the last process that had them: from here on another Body may have these ids.
fn release_ids(plan: &Plan) {
    for claim in &plan.claims {
        let _ = sys::fd::remove_link(&claim.link, &claim.target);
    }
}
