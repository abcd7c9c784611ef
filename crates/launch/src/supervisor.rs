//! The launcher's own process: it creates the Body, reports, then supervises it until its guest has ended.

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
    launch::{CgroupVersion, GuestEnd, LaunchPlan, LaunchReport, LaunchedBody, RunRecord},
    spec::{BodyRole, IdRange, Ids, Life},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use sys::namespace::{ForkResult, IdMapLine};

use crate::{
    egress::EgressProxy,
    idmap,
    init::{self, InheritedFds, InitReport, LauncherRights},
    lower_dirs,
    network::{NetnsHelper, NetnsPassage},
    report::{StepError, StepExt},
    transparent,
};

const PLAN_LEN_MAX: u64 = 4 << 20;
const REPORT_LEN_USUAL: usize = 4 << 10;
/// How often a Body's upper on disk is measured.
const DISK_CHECK: Duration = Duration::from_secs(5);
/// How long after the start the enforcement record of a `pal run` Body is written for other processes.
const RECORD_AFTER: Duration = Duration::from_millis(10);
/// How long after the start the supervisor returns the memory that creating the Body took.
const REST_AFTER: Duration = Duration::from_secs(1);
const CGROUP_PATIENCE: Duration = Duration::from_secs(5);

/// When the Body's first process is forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkTiming {
    /// Before the plan arrives, while the creating `pal` still writes it.
    Early,
    /// When the plan is there, directly into its v2 cgroup.
    Late,
}

/// Forks, reads the plan from standard input, creates the Body, reports on standard output, and supervises it.
pub fn launch_and_supervise(when: ForkTiming) -> ExitCode {
    // The supervisor outlives its `pal`: a pipe or lock that the caller of `pal` left open must not live as long as the Body.
    let _ = sys::fd::close_from(3);
    // Leaves the session of the creating `pal`, so that its terminal's signals do not arrive here.
    let _ = rustix::process::setsid();
    let _ = sys::process::set_name(c"pal-supervisor");
    let forked = (when == ForkTiming::Early).then(|| InitProcess::new(None));
    let (plan, line) = match read_plan().step("read the plan") {
        Ok(read) => read,
        Err(error) => {
            // There is often no plan: `pal` found that it needs no Body.
            if let Some(Ok(forked)) = forked {
                kill_child(forked.pid);
            }
            return fail(&error);
        }
    };
    match launch(&plan, &line, forked) {
        Ok(kept) => supervise(&plan, kept),
        Err(error) => {
            remove_cgroups(&plan);
            // No other process cleans up a `pal run` Body whose creator is gone.
            if plan.life == Life::Run && check_creator().is_err() {
                remove_directory(&move_to_trash(&plan));
                release_ids(&plan);
            }
            fail(&error)
        }
    }
}

fn fail(error: &StepError) -> ExitCode {
    report(&LaunchReport::Failed(error.failed()));
    ExitCode::FAILURE
}

fn report(report: &LaunchReport) {
    let line = serde_json::to_string(report).unwrap_or_default() + "\n";
    let _ = io::stdout().write_all(line.as_bytes());
    let _ = io::stdout().flush();
}

/// Reads the plan, one line, and returns it parsed and as text. Afterwards the end of standard input signals the end
/// of the creating `pal`.
fn read_plan() -> io::Result<(LaunchPlan, String)> {
    let mut line = String::new();
    BufReader::with_capacity(16 << 10, io::stdin().take(PLAN_LEN_MAX)).read_line(&mut line)?;
    Ok((serde_json::from_str(&line)?, line))
}

/// A running Body.
struct RunningBody {
    pid: Pid,
    handle: OwnedFd,
    /// The Body's mount namespace. Unmounting takes the kernel most of a millisecond, plus the time to write back an
    /// upper on disk. While the supervisor holds it, that happens at its exit, after its last report.
    mounts: OwnedFd,
    /// The enforcement record, while it is not written yet.
    record: Option<Enforcement>,
    /// Its egress proxy.
    egress: Option<EgressProxy>,
}

/// The Body's first process, which waits for its plan.
struct InitProcess {
    pid: Pid,
    handle: OwnedFd,
    /// Its start time and the boot id of the host, which together with the pid identify it.
    ticks: u64,
    boot_id: String,
    /// The pipe through which it receives its plan and the numbers of its descriptors.
    plan: OwnedFd,
    /// The pipe through which it reports.
    report_pipe: OwnedFd,
    /// Its ends of both pipes. The descriptor table is shared, so they stay open here until it has its own.
    ends: (OwnedFd, OwnedFd, NetnsPassage),
    /// Its mount namespace, opened at once: later the kernel lets only the host's root open it.
    mounts: OwnedFd,
    /// The process that creates its network namespace.
    helper: NetnsHelper,
}

impl InitProcess {
    fn new(cgroup: Option<BorrowedFd<'_>>) -> Result<Self, StepError> {
        let launched =
            if sys::caps::is_host_root() { LauncherRights::ByRoot } else { LauncherRights::ByUser };
        let (hear, plan) = pipe()?;
        let (report_pipe, tell) = pipe()?;
        let way = NetnsPassage::new()?;
        let flags = sys::namespace::FORKED | sys::namespace::SHARE_DESCRIPTORS;
        match sys::namespace::fork_into(flags, cgroup)
            .step("make the Body's namespaces")
            .map_err(explain_namespaces)?
        {
            ForkResult::Child => init::run(hear, &tell, &way.take, launched),
            ForkResult::Parent(pid) => {
                let known = || -> Result<Self, StepError> {
                    let mounts = File::open(format!("/proc/{}/ns/mnt", pid.as_raw_nonzero()))
                        .step("open the Body's mounts")?
                        .into();
                    let helper = NetnsHelper::start(pid, &way)?;
                    let handle = sys::process::open(pid).step("open the Body's first process")?;
                    let ticks = sys::proc::start_ticks(pid.as_raw_nonzero().get())
                        .step("read the start time of the Body's first process")?;
                    let boot_id = sys::proc::boot_id().step("read the boot id")?;
                    Ok(Self {
                        pid,
                        handle,
                        ticks,
                        boot_id,
                        plan,
                        report_pipe,
                        ends: (hear, tell, way),
                        mounts,
                        helper,
                    })
                };
                known().inspect_err(|_| kill_child(pid))
            }
        }
    }
}

/// Maps a Body's ids, and notifies its first process.
fn give_ids(ids: &Ids, pid: Pid, plan: BorrowedFd<'_>) -> Result<(), StepError> {
    write_maps(ids, pid)?;
    rustix::io::write(plan, b".").map(drop).step("notify the Body's first process of its ids")
}

fn launch(
    plan: &LaunchPlan,
    line: &str,
    forked: Option<Result<InitProcess, StepError>>,
) -> Result<RunningBody, StepError> {
    let forked = match forked {
        Some(forked) => forked.and_then(|forked| fork_into_cgroup(plan, forked))?,
        None => InitProcess::new(v2_group(plan)?.as_ref().map(AsFd::as_fd))?,
    };
    let pid = forked.pid;
    start_body(plan, line, forked).inspect_err(|_| kill_child(pid))
}

fn pipe() -> Result<(OwnedFd, OwnedFd), StepError> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")
}

fn v2_group(plan: &LaunchPlan) -> Result<Option<OwnedFd>, StepError> {
    let group = plan.cgroups.iter().find(|group| group.version == CgroupVersion::V2);
    group.map(|group| sys::fd::open_path(&group.path)).transpose().step("open the Body's cgroup")
}

/// Moves a process that was forked before its v2 cgroup was known into that cgroup.
fn fork_into_cgroup(plan: &LaunchPlan, forked: InitProcess) -> Result<InitProcess, StepError> {
    let group = plan.cgroups.iter().find(|group| group.version == CgroupVersion::V2);
    let moved =
        group.map_or(Ok(()), |group| sys::cgroup::move_v2(forked.pid.as_raw_nonzero().get(), &group.path));
    moved.inspect_err(|_| kill_child(forked.pid)).step("enter the Body's cgroup").map(|()| forked)
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

/// Opens the host's descriptors for the child. Both processes share one table, so only the numbers are sent.
fn collect_fds(plan: &LaunchPlan) -> Result<InheritedFds, StepError> {
    rustix::process::chdir(&plan.dir).step("enter the Body's directory")?;
    // Bound by a relative name, because a socket's path may have at most 107 bytes.
    let listener = UnixListener::bind("guest.sock").step("listen on the guest's socket")?;
    // The log of a `pal run` Body would vanish with its directory, so it is not kept.
    let log = if plan.life == Life::Run { "/dev/null" } else { "guest.log" };
    let log = File::options().append(true).create(true).open(log).step("open the guest's log")?;
    let control = match &plan.vm {
        Some(_) => Some(
            UnixListener::bind(proto::vm::CONTROL).step("listen on the microVM's control socket")?.into(),
        ),
        None => None,
    };
    let groups = plan.cgroups.iter().filter(|group| group.version == CgroupVersion::V1);
    Ok(InheritedFds {
        listener: listener.into(),
        log: log.into(),
        groups: groups
            .map(|group| sys::cgroup::door_v1(&group.path))
            .collect::<io::Result<_>>()
            .step("open the Body's cgroups")?,
        control,
        trees: if sys::caps::is_host_root() { Some(lower_dirs::open_lower_dirs(plan)?) } else { None },
    })
}

/// Fails if the creating `pal` has closed its end of standard input.
fn check_creator() -> io::Result<()> {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
    rustix::event::poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if watched[0].revents().is_empty() { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

/// Gives the child its ids and its plan, waits until it is the guest, and reports.
fn start_body(plan: &LaunchPlan, line: &str, forked: InitProcess) -> Result<RunningBody, StepError> {
    let InitProcess { pid, handle, ticks, boot_id, plan: pipe, report_pipe, ends, mounts, helper } = forked;
    give_ids(&plan.ids, pid, pipe.as_fd())?;
    // If the creating `pal` was killed, another `pal` may already be cleaning up this Body.
    check_creator().step("find the creating pal")?;
    let inherited_fds = collect_fds(plan)?;
    // Before the child continues: from here on any `pal` that finds the directory can end the Body, even without us.
    let supervisor = rustix::process::getpid().as_raw_nonzero().get();
    let mut ready = LaunchedBody {
        pid: pid.as_raw_nonzero().get(),
        ticks,
        supervisor,
        supervisor_ticks: sys::proc::start_ticks(supervisor).step("read the supervisor's start time")?,
        mechanisms: Vec::new(),
        revival: None,
    };
    write_running(plan, &ready, boot_id)?;
    send_plan(line, &inherited_fds, pipe).step("hand the plan to the Body's first process")?;
    let mut report_pipe = File::from(report_pipe);
    wait_fd_table_split(&handle, &mut report_pipe).step("read the report of the Body's first process")?;
    let (hear, tell, NetnsPassage { take, send }) = ends;
    drop((inherited_fds, hear, tell, take));
    helper.wait().map_err(explain_namespaces)?;
    // The first process sends them before it starts the guest.
    let sockets = if transparent::is_wanted(plan) { transparent::receive(send.as_fd()) } else { Vec::new() };
    let (egress, held) = EgressProxy::start(plan, handle.as_fd(), sockets)?.unzip();
    // A microVM takes seconds to boot, and the creating `pal` may end meanwhile.
    if plan.vm.is_some()
        && !is_report_ready(&report_pipe).step("read the report of the Body's first process")?
    {
        return Ok(RunningBody { pid, handle, mounts, record: None, egress });
    }
    match read_init_report(report_pipe)? {
        InitReport::Done(mechanisms, revival) => {
            ready.mechanisms = mechanisms;
            ready.revival = revival.map(|revival| *revival);
        }
        InitReport::Failed(failed) => {
            report(&LaunchReport::Failed(failed));
            remove_cgroups_after(plan, pid);
            std::process::exit(1);
        }
    }
    ready.mechanisms.extend(plan.mechanisms.iter().cloned().chain(held));
    let record = Enforcement { mechanisms: ready.mechanisms.clone() };
    if plan.life == Life::Kept {
        write_record(&record).step("write the record")?;
    }
    report(&LaunchReport::Ready(ready));
    // The creating `pal` has the record now; for other processes it is written after a moment.
    let record = (plan.life == Life::Run).then_some(record);
    Ok(RunningBody { pid, handle, mounts, record, egress })
}

fn write_record(record: &Enforcement) -> io::Result<()> {
    sys::fd::write_whole(Path::new("enforcement.json"), &serde_json::to_vec(record)?)
}

/// Waits until the child has its own descriptor table. Before that, its exit closes no pipe, because this process
/// holds both ends as well.
fn wait_fd_table_split(child: &OwnedFd, report_pipe: &mut File) -> io::Result<()> {
    let mut watched = [PollFd::new(report_pipe, PollFlags::IN), PollFd::new(child, PollFlags::IN)];
    while let Err(errno) = rustix::event::poll(&mut watched, None) {
        if errno != rustix::io::Errno::INTR {
            return Err(errno.into());
        }
    }
    if watched[0].revents().is_empty() {
        return Err(io::Error::other("it ended without a report"));
    }
    report_pipe.read_exact(&mut [0u8; 1])
}

/// Sends the plan as it came and the numbers in one write, so that the child wakes up once.
fn send_plan(line: &str, inherited_fds: &InheritedFds, pipe: OwnedFd) -> io::Result<()> {
    let numbers = serde_json::to_vec(&inherited_fds.numbers())?;
    let mut text = Vec::with_capacity(2 * size_of::<u32>() + line.len() + numbers.len());
    text.extend((line.len() as u32).to_ne_bytes());
    text.extend((numbers.len() as u32).to_ne_bytes());
    text.extend_from_slice(line.as_bytes());
    text.extend(numbers);
    File::from(pipe).write_all(&text)
}

fn remove_cgroups_after(plan: &LaunchPlan, pid: Pid) {
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
    remove_cgroups(plan);
}

/// Waits until there is a report to read; false if the creating `pal` ended before that.
fn is_report_ready(report_pipe: &File) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(report_pipe, PollFlags::IN), PollFd::new(&stdin, PollFlags::empty())];
    while let Err(errno) = rustix::event::poll(&mut watched, None) {
        if errno != rustix::io::Errno::INTR {
            return Err(errno.into());
        }
    }
    Ok(!watched[0].revents().is_empty())
}

fn read_init_report(report_pipe: File) -> Result<InitReport, StepError> {
    // With capacity from the start; an empty string would grow by reads of 32 bytes.
    let mut text = String::with_capacity(REPORT_LEN_USUAL);
    report_pipe
        .take(PLAN_LEN_MAX)
        .read_to_string(&mut text)
        .step("read the report of the Body's first process")?;
    let last = text.lines().last().unwrap_or_default();
    let cause = |_| io::Error::other("it ended without a report");
    serde_json::from_str(last).map_err(cause).step("read the report of the Body's first process")
}

fn write_maps(ids: &Ids, pid: Pid) -> Result<(), StepError> {
    let lines = |ranges: &[IdRange]| -> Vec<IdMapLine> {
        ranges.iter().map(|r| IdMapLine { inside: r.inside, outside: r.outside, count: r.count }).collect()
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

fn write_running(plan: &LaunchPlan, ready: &LaunchedBody, boot_id: String) -> Result<(), StepError> {
    let running = RunRecord {
        boot_id,
        pid: ready.pid,
        ticks: ready.ticks,
        supervisor: ready.supervisor,
        supervisor_ticks: Some(ready.supervisor_ticks),
        cgroups: plan.cgroups.clone(),
    };
    let text = serde_json::to_vec(&running).map_err(io::Error::from).step("write run.json")?;
    sys::fd::write_whole(Path::new("run.json"), &text).step("write run.json")
}

fn kill_child(pid: Pid) {
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
}

/// Waits for the end of the guest, its timeout, the end of its creator, or a full disk.
fn supervise(plan: &LaunchPlan, mut kept: RunningBody) -> ExitCode {
    let started = Instant::now();
    let ordered = wait(plan, &mut kept, started);
    let directory_removed = ordered == Some(KillReason::Forgotten);
    let ordered = ordered.map(KillReason::end);
    // A kept Body that was never published is removed, and so is one of a step. Another one that was published, and
    // whose `pal start` or `pal prepare` ended early, stays.
    let owner_gone = matches!(ordered, Some(GuestEnd::Owner))
        && (plan.life == Life::Run || plan.role == BodyRole::Step || !Path::new("spec.json").exists());
    if owner_gone {
        // In parallel with the kernel, which ends the Body's processes.
        let trash = move_to_trash(plan);
        if !reaches_host(plan) {
            // The processes are killed, and everything that they could still change goes with them, so the caller
            // need not wait until they are reaped.
            report_cleanup();
        }
        remove_directory(&trash);
    }
    let status = rustix::process::waitpid(Some(kept.pid), WaitOptions::empty())
        .ok()
        .flatten()
        .map(|(_, status)| status);
    kept.egress.into_iter().for_each(EgressProxy::end);
    let end = ordered.unwrap_or_else(|| end_of_guest(plan, status));
    remove_cgroups(plan);
    if owner_gone {
        release_ids(plan);
        report_cleanup();
    } else if directory_removed {
        // If something of the directory is left, it still belongs to these ids; `pal gc` removes both.
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
fn reaches_host(plan: &LaunchPlan) -> bool {
    plan.upper == proto::launch::Upper::Disk || plan.mounts.iter().any(|mount| mount.access.is_writable())
}

/// Reports to the creating `pal`, which may have ended already, that nothing is left of the Body.
fn report_cleanup() {
    let _ = io::stdout().write_all(b"\n").and_then(|()| io::stdout().flush());
}

/// The reason why the supervisor kills a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KillReason {
    /// The creating `pal` has ended.
    Owner,
    /// Its timeout has passed.
    Timeout,
    /// Its disk limit is exceeded.
    Disk,
    /// Its inode limit is exceeded.
    Inodes,
    /// Its directory was removed: no `pal` could find the Body again, and there is no place to record its end.
    Forgotten,
}

impl KillReason {
    fn end(self) -> GuestEnd {
        match self {
            Self::Owner => GuestEnd::Owner,
            Self::Timeout => GuestEnd::Timeout,
            Self::Disk => GuestEnd::Disk,
            Self::Inodes => GuestEnd::Inodes,
            Self::Forgotten => GuestEnd::Unknown,
        }
    }
}

/// The limits that the supervisor enforces: at first those of the plan, later those of the spec, which `pal limit` changes.
struct SupervisedLimits {
    wall_ms: Option<u64>,
    disk_bytes: u64,
    inodes: u64,
    /// Inode and time of the spec that was read last: each change of the spec is a new file.
    spec: Option<(u64, i64, i64)>,
}

impl SupervisedLimits {
    fn of(plan: &LaunchPlan) -> Self {
        Self { wall_ms: plan.wall_ms, disk_bytes: plan.disk_bytes, inodes: plan.inodes, spec: None }
    }

    /// Reads the spec if it changed. One that cannot be read changes nothing.
    fn refresh(&mut self, plan: &LaunchPlan) {
        use std::os::unix::fs::MetadataExt;
        if plan.upper != proto::launch::Upper::Disk {
            return;
        }
        let path = Path::new("spec.json");
        let found =
            path.symlink_metadata().map(|found| (found.ino(), found.ctime(), found.ctime_nsec())).ok();
        if found.is_none() || found == self.spec {
            return;
        }
        let text = sys::fd::read_small(path, PLAN_LEN_MAX).unwrap_or_default();
        if let Ok(proto::Spec { limits, .. }) = serde_json::from_str(&text) {
            *self = Self {
                wall_ms: limits.wall_ms,
                disk_bytes: limits.disk.0,
                inodes: limits.inodes,
                spec: found,
            };
        }
    }
}

/// Waits until the guest has ended or must be killed; `None` if it ended by itself.
fn wait(plan: &LaunchPlan, kept: &mut RunningBody, started: Instant) -> Option<KillReason> {
    let stdin = io::stdin();
    let mut limits = SupervisedLimits::of(plan);
    let mut trimmed = false;
    // A kept Body ends with its creator until the creator has recorded it and detaches it.
    let mut attached = true;
    loop {
        kept.egress.iter_mut().for_each(EgressProxy::tend);
        let mut watched = vec![PollFd::new(&kept.handle, PollFlags::IN)];
        if attached {
            watched.push(PollFd::new(&stdin, PollFlags::IN));
        }
        let proxy = kept.egress.as_ref();
        let of_proxy = proxy.into_iter().flat_map(EgressProxy::watched);
        watched.extend(of_proxy.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let rest = match &kept.record {
            Some(_) => Some(RECORD_AFTER),
            None => (!trimmed).then_some(REST_AFTER),
        };
        let pause = next_check(plan, &limits, started)
            .into_iter()
            .chain(rest)
            .chain(proxy.and_then(EgressProxy::next_check))
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
        if !trimmed && started.elapsed() >= REST_AFTER {
            trimmed = true;
            sys::spawn::trim_heap();
        }
        let creator_gone = attached && watched.get(1).is_some_and(|creator| !creator.revents().is_empty());
        if creator_gone && plan.life == Life::Kept && matches!(rustix::io::read(&stdin, &mut [0u8; 1]), Ok(1))
        {
            attached = false;
            continue;
        }
        limits.refresh(plan);
        let order = match (creator_gone, limits.wall_ms) {
            (true, _) => KillReason::Owner,
            (_, Some(wall)) if started.elapsed() >= Duration::from_millis(wall) => KillReason::Timeout,
            _ if !attached && directory_gone() => KillReason::Forgotten,
            _ => match exceeds_disk_limit(plan, &limits) {
                Some(order) => order,
                None => continue,
            },
        };
        let _ = sys::process::signal(kept.handle.as_fd(), Signal::KILL);
        thaw_cgroups(plan);
        return Some(order);
    }
}

/// Whether the directory of a recorded Body, or its spec, was removed.
fn directory_gone() -> bool {
    let missing = |name: &str| {
        Path::new(name).symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    // `pal` renames the spec to a draft before it ends a Body itself, possibly between two of these checks.
    is_removed() || (missing("spec.json") && missing("spec.draft"))
}

/// Whether the Body's directory is gone. The kernel knows: a moved directory still has a path, a removed one has
/// none.
fn is_removed() -> bool {
    std::env::current_dir().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// How long until the next check is due; `None` if only an event can change something.
fn next_check(plan: &LaunchPlan, limits: &SupervisedLimits, started: Instant) -> Option<Duration> {
    let wall = limits.wall_ms.map(|wall| Duration::from_millis(wall).saturating_sub(started.elapsed()));
    let disk = (plan.upper == proto::launch::Upper::Disk).then_some(DISK_CHECK);
    wall.into_iter().chain(disk).min()
}

/// The limit that the upper on disk exceeds, if any.
fn exceeds_disk_limit(plan: &LaunchPlan, limits: &SupervisedLimits) -> Option<KillReason> {
    if plan.upper != proto::launch::Upper::Disk {
        return None;
    }
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let upper = rustix::fs::open("disk/upper", flags, rustix::fs::Mode::empty()).ok()?;
    let used = sys::tree::usage(upper.as_fd()).ok()?;
    if used.bytes > limits.disk_bytes {
        Some(KillReason::Disk)
    } else {
        (used.entries > limits.inodes).then_some(KillReason::Inodes)
    }
}

/// Thaws the Body's cgroups, because a frozen process dies only when it is thawed.
fn thaw_cgroups(plan: &LaunchPlan) {
    for group in &plan.cgroups {
        if sys::cgroup::is_frozen(&group.path) {
            let _ = match group.version {
                CgroupVersion::V1 => sys::cgroup::thaw_v1(&group.path, CGROUP_PATIENCE),
                CgroupVersion::V2 => sys::cgroup::freeze_v2(&group.path, false, CGROUP_PATIENCE),
            };
        }
    }
}

fn end_of_guest(plan: &LaunchPlan, status: Option<WaitStatus>) -> GuestEnd {
    let Some(status) = status else { return GuestEnd::Unknown };
    if let Some(code) = status.exit_status() {
        return GuestEnd::Exit { code };
    }
    let oom =
        plan.cgroups.iter().any(|group| sys::cgroup::oom_kills(&group.path).is_some_and(|kills| kills > 0));
    match status.terminating_signal() {
        Some(signal) if signal == Signal::KILL.as_raw() && oom => GuestEnd::Oom,
        Some(signal) => GuestEnd::Killed { signal },
        None => GuestEnd::Unknown,
    }
}

fn remove_cgroups(plan: &LaunchPlan) {
    for group in &plan.cgroups {
        let _ = sys::cgroup::remove(&group.path, CGROUP_PATIENCE);
    }
}

/// Renames the directory, so that no `pal` finds a Body there any more; returns the new path.
fn move_to_trash(plan: &LaunchPlan) -> PathBuf {
    let trash = proto::launch::set_aside(&plan.dir);
    if std::fs::rename(&plan.dir, &trash).is_ok() { trash } else { plan.dir.clone() }
}

/// Removes the directory of a `pal run` Body.
fn remove_directory(dir: &Path) {
    let _ = std::env::set_current_dir("/");
    let Some((parent, name)) = dir.parent().zip(dir.file_name()) else { return };
    let name = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(name)).unwrap_or_default();
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    if let Ok(parent) = rustix::fs::open(parent, flags, rustix::fs::Mode::empty()) {
        let _ = sys::tree::remove(parent.as_fd(), &name);
    }
}

/// Releases the ids after the last process that had them has ended: another Body may claim them now.
fn release_ids(plan: &LaunchPlan) {
    for claim in &plan.claims {
        let _ = sys::fd::remove_link(&claim.link, &claim.target);
    }
}
