//! The process layer: a Body made by `pal-launch`, frozen by its cgroup, ended by the end of its first process.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::DirBuilderExt, process::CommandExt},
    },
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use proto::{
    BodyId, Enforcement, Limits, Mechanism, Spec,
    guest::{EGRESS_DIR, EGRESS_PORT, Forward, GuestConfig},
    launch::{CgroupVersion, Failed, Plan, Ready, Report, Running, Upper},
    limits::HostCapacity,
    spec::{Access, Ids, Life, Mount},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use sys::namespace::Side;

use crate::{
    dir::{BodyDir, DirError, alive, keeper_lives, signal_guest},
    groups, ids,
    programs::Programs,
    root::{Root, Under, followed_seed},
    vm,
};

const REPORT_LEN_MAX: u64 = 1 << 20;
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a process that is stopped one by one may be busy in the kernel before it is taken to wait for another.
const VFORK_PATIENCE: Duration = Duration::from_millis(100);
/// How long a helper on our own processor is let go first.
const HELPER_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// How long the kernel may take to end every process of a Body.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Output of each process that is kept for those who connect later.
const RING_BYTES: u64 = 256 << 10;

/// Why a Body could not be made, frozen or ended.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The launcher could not be run.
    #[error("cannot run the launcher")]
    Launcher(#[source] io::Error),
    /// The launcher said no.
    #[error("cannot {}: {}", .0.step, .0.cause)]
    Refused(Failed),
    /// Its directory.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// Its upper could not be made.
    #[error("cannot prepare the Body's upper")]
    Upper(#[source] io::Error),
    /// Its processes could not be stopped or let go.
    #[error("cannot {0} the Body's processes")]
    Freeze(&'static str, #[source] io::Error),
    /// Its processes could not be ended.
    #[error("cannot end the Body's processes")]
    End(#[source] io::Error),
}

/// What every Body of this host is made with.
#[derive(Debug)]
pub struct Maker {
    /// The launcher.
    pub programs: Programs,
    /// What this host has.
    pub capacity: HostCapacity,
    /// Where it has its cgroups.
    pub cgroups: sys::cgroup::Mounts,
}

/// A Body that was just made.
#[derive(Debug)]
pub struct Made {
    /// What holds it.
    pub enforcement: Enforcement,
    /// Where it runs.
    pub ready: Ready,
    /// The maker's side of a Body that lives as long as its maker.
    pub tether: Tether,
    /// Its cgroups.
    pub cgroups: Vec<proto::launch::Cgroup>,
}

/// Dropped, it ends a Body of [`Life::Run`], and a kept one unless it was slackened before.
#[derive(Debug)]
pub struct Tether {
    stdin: Option<File>,
    stdout: Option<File>,
    /// Our child, until somebody has waited for it.
    keeper: Option<Pid>,
    /// If it is as quick as we are, and must not be run in our place: where that is.
    apart: Option<CpuSet>,
    /// Where else we may run, while we keep to that place.
    stays: Option<CpuSet>,
}

impl Tether {
    /// Keeps to our place, as long as the Body is being made.
    fn stay(&mut self) {
        if let Some(place) = &self.apart {
            self.stays = sched_getaffinity(None).ok();
            let _ = sched_setaffinity(None, place);
        }
    }

    /// Runs anywhere again.
    fn leave(&mut self) {
        if let Some(everywhere) = self.stays.take() {
            let _ = sched_setaffinity(None, &everywhere);
        }
    }

    /// Ends the Body, if it lives by this tether.
    pub fn cut(&mut self) {
        let Some(stdin) = self.stdin.take() else { return };
        if let (Some(_), Some(keeper)) = (&self.apart, self.keeper) {
            // What it wakes up for is done beside what we do meanwhile.
            let _ = sys::process::keep_off_own_processor(keeper);
        }
        drop(stdin);
    }

    /// Waits until its keeper has left nothing of the Body; the keeper itself is about to exit then.
    pub fn wait_cleared(&mut self) {
        let cleared = self.stdout.take().map(|mut stdout| stdout.read(&mut [0; 1]));
        if !matches!(cleared, Some(Ok(1))) {
            self.bury();
        }
    }

    /// Waits for the keeper's own end.
    pub fn bury(&mut self) {
        self.leave();
        self.cut();
        if let Some(keeper) = self.keeper.take() {
            wait_for(keeper);
        }
    }

    /// Whether the keeper is gone, without waiting for it.
    pub fn is_buried(&mut self) -> bool {
        // An error means that somebody else has waited for it.
        let gone = |keeper| {
            rustix::process::waitpid(Some(keeper), WaitOptions::NOHANG)
                .map_or(true, |status| status.is_some())
        };
        if self.keeper.is_some_and(gone) {
            self.keeper = None;
        }
        self.keeper.is_none()
    }

    /// Lets the Body go on without its maker, which has written down that there is one: a keeper that never hears
    /// this word ends the Body. The keeper can still be waited for by [`Tether::bury`].
    pub fn slacken(&mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        drop(self.stdout.take());
    }
}

/// A Body whose plan was sent and whose guest is being started. Dropped, it ends; its keeper clears it away.
#[derive(Debug)]
pub struct Begun {
    tether: Option<Tether>,
    cgroups: Vec<proto::launch::Cgroup>,
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(mut tether) = self.tether.take() {
            tether.bury();
        }
    }
}

/// A launcher that runs already and waits for its plan.
#[derive(Debug)]
pub struct Launcher {
    tether: Option<Tether>,
    /// What it was promised, if anything.
    wish: Option<(BodyId, Ids)>,
}

impl Drop for Launcher {
    /// One that never got a plan ends by itself when nobody can send one any more; it is waited for here.
    fn drop(&mut self) {
        if let Some(mut tether) = self.tether.take() {
            tether.bury();
        }
    }
}

impl Launcher {
    /// Its process.
    pub fn pid(&self) -> Option<Pid> {
        self.tether.as_ref().and_then(|tether| tether.keeper)
    }

    /// Notes that it stays off the caller's processor, `place`, but for a helper that works there; from when it has its plan
    /// until the Body is made, the caller stays there. As long as the caller has no more to say to the launcher, that
    /// helper's work comes first: the Body waits for it.
    pub fn is_apart(&mut self, place: CpuSet) {
        self.tether.iter_mut().for_each(|tether| tether.apart = Some(place));
    }

    /// The Body's id that it goes best with.
    pub fn wish(&self) -> Option<&BodyId> {
        self.wish.as_ref().map(|(id, _)| id)
    }

    /// Whether a Body may have these ids and this launcher.
    pub fn fits(&self, ids: &Ids) -> bool {
        self.wish.as_ref().is_none_or(|(_, promised)| promised == ids)
    }

    /// Forks it from the caller, which has one thread, standard streams, and has done nothing yet: what `launch` does there is what
    /// the program `pal-launch` does, without the milliseconds of starting a program. It is told which ids its Body
    /// will most likely have, where those follow from the Body's own, which is drawn here.
    pub fn fork(launch: impl FnOnce(Option<&Ids>) -> ExitCode) -> io::Result<Self> {
        let id = BodyId::from_random(sys::random::bytes()?);
        let (plan, stdin) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (stdout, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Both sides find out by themselves: the fewer things come before the fork, the earlier there are two.
        match sys::namespace::fork_into(sys::namespace::NONE, None)? {
            Side::Parent(pid) => Ok(Self {
                tether: Some(Tether {
                    stdin: Some(stdin.into()),
                    stdout: Some(stdout.into()),
                    keeper: Some(pid),
                    apart: None,
                    stays: None,
                }),
                wish: ids::expected(&id).map(|ids| (id, ids)),
            }),
            Side::Child => {
                // Nothing of the caller's stays open, least of all the other ends of its own pipes.
                let code = settle_in(plan, report)
                    .map_or(ExitCode::FAILURE, |()| launch(ids::expected(&id).as_ref()));
                std::process::exit(if code == ExitCode::SUCCESS { 0 } else { 1 })
            }
        }
    }
}

/// Standard input and output of the launcher; every other descriptor of its parent is closed.
fn settle_in(plan: OwnedFd, report: OwnedFd) -> io::Result<()> {
    sys::origin::forget(c"pal-launch");
    sys::process::ignore_broken_pipes();
    let null: OwnedFd = File::options().write(true).open("/dev/null")?.into();
    // Above all fixed numbers first, so that placing one never closes another.
    let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 8);
    let placed = [(high(plan)?, 0), (high(report)?, 1), (high(null)?, 2)];
    placed.into_iter().try_for_each(|(fd, number)| sys::fd::place(fd, number))?;
    sys::fd::close_from(3)
}

impl Maker {
    /// Starts the launcher ahead, so that it gets ready while its plan is being made.
    pub fn start_launcher(&self) -> Result<Launcher, ProcessError> {
        // A v2 group is entered by the fork itself, so there the fork must wait for the plan.
        let when = if groups::uses_v2(&self.cgroups) { "late" } else { "early" };
        let mut child = Command::new(&self.programs.launch)
            // What `ps` shows, also inside the Body: no path of the host.
            .arg0("pal-launch")
            .arg(when)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/local/bin")
            .spawn()
            .map_err(ProcessError::Launcher)?;
        let stdin = child.stdin.take().map(|stdin| File::from(OwnedFd::from(stdin)));
        let stdout = child.stdout.take().map(|stdout| File::from(OwnedFd::from(stdout)));
        Ok(Launcher {
            tether: Some(Tether {
                stdin,
                stdout,
                keeper: i32::try_from(child.id()).ok().and_then(Pid::from_raw),
                apart: None,
                stays: None,
            }),
            wish: None,
        })
    }

    /// Sends the plan of the Body in `dir`, whose spec is written already.
    pub fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
        under: &Under,
    ) -> Result<Begun, ProcessError> {
        let root = Root::of(under, spec);
        match &under.vm {
            Some(parts) => vm::plan::prepare_disk(dir.path(), spec, parts).map_err(ProcessError::Upper)?,
            None if spec.life == Life::Kept => {
                prepare_upper(dir.path(), spec, &root).map_err(ProcessError::Upper)?
            }
            None => {}
        }
        let limits = if under.vm.is_some() { vm::plan::around(&spec.limits) } else { spec.limits.clone() };
        let mut bounds =
            groups::bound(&self.cgroups, &spec.id, &limits, self.capacity.cpus, spec.ids.has_root());
        if under.vm.as_ref().is_some_and(vm::Parts::is_jailed)
            && let Err(error) = groups::hand_over(&self.cgroups, &mut bounds, &spec.ids)
        {
            groups::unbound(&bounds.cgroups);
            return Err(ProcessError::Upper(error));
        }
        let plan = self.plan(dir, spec, token, &root, &bounds);
        let plan = match &under.vm {
            Some(parts) => vm::plan::plan(
                dir.path(),
                plan,
                spec,
                parts,
                root.seeds(&spec.id, &machine_id(token)),
                machine_id(token),
                &bounds,
            ),
            None => plan,
        };
        let cgroups = bounds.cgroups;
        match send(launcher, &plan) {
            Ok(tether) => Ok(Begun { tether: Some(tether), cgroups }),
            Err(error) => {
                groups::unbound(&cgroups);
                Err(error)
            }
        }
    }

    fn plan(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
        root: &Root<'_>,
        bounds: &groups::Bounds,
    ) -> Plan {
        let limits = &spec.limits;
        let data = dir.path().ancestors().nth(2).unwrap_or(Path::new("/"));
        let mounts = mounts(spec);
        let followed = root.followed(&mounts);
        Plan {
            body: spec.id.clone(),
            dir: dir.path().to_owned(),
            config: guest_config(spec, token),
            ids: spec.ids.clone(),
            claims: ids::claims_of(data, &spec.ids, &spec.id),
            upper: match spec.life {
                Life::Run => Upper::Memory { bytes: limits.disk.0, inodes: limits.inodes },
                Life::Kept => Upper::Disk,
            },
            areas: root.areas(),
            seeds: root
                .seeds(&spec.id, &machine_id(token))
                .into_iter()
                .chain(followed_seed(&followed))
                .collect(),
            followed,
            setuid: spec.base.as_ref().is_some_and(|base| base.sudo),
            shm_bytes: limits.memory.0 / 4,
            mounts,
            cgroups: bounds.cgroups.clone(),
            rlimits: bounds.rlimits,
            cpus: bounds.cpus,
            wall_ms: limits.wall_ms,
            disk_bytes: limits.disk.0,
            life: spec.life,
            vm: None,
            mechanisms: [ids::record(data, &spec.id, &spec.ids), ids::groups_record(&spec.ids)]
                .into_iter()
                .chain(bounds.mechanisms.iter().cloned())
                .chain(other_limits(spec))
                .collect(),
        }
    }
}

/// What the guest of a Body is told.
pub fn guest_config(spec: &Spec, token: &str) -> GuestConfig {
    GuestConfig {
        body: spec.id.clone(),
        template: spec.template.clone(),
        token: Some(token.to_owned()),
        envs: spec.env.clone(),
        user: spec.user.clone(),
        workdir: spec.workdir.clone(),
        ring_bytes: RING_BYTES,
        forward: spec.egress.as_ref().map(|_| Forward {
            port: EGRESS_PORT,
            socket: format!("{EGRESS_DIR}/{}", crate::egress::SOCKET),
        }),
    }
}

/// Different for each Body, the same for each start of it, and tells nothing about the token.
fn machine_id(token: &str) -> String {
    let draft = proto::Draft { kind: "machine-id".into(), body: None, brain: None, data: token.into() };
    proto::Event::chain(draft, 0, String::new(), proto::event::GENESIS).hash[..32].to_owned()
}

/// What its spec names, and the socket of its way out.
fn mounts(spec: &Spec) -> Vec<Mount> {
    let way_out = spec.egress.as_ref().map(|egress| Mount {
        source: egress.dir.clone(),
        target: EGRESS_DIR.into(),
        access: Access::ReadOnly,
    });
    spec.mounts.iter().cloned().chain(way_out).collect()
}

fn other_limits(spec: &Spec) -> Vec<Mechanism> {
    let limits = &spec.limits;
    if spec.layer == proto::Layer::Microvm {
        let mut held = vm::plan::limits_record(spec);
        held.extend([wall_record(limits), output_record(limits)]);
        return held;
    }
    let disk = match spec.life {
        Life::Run => Mechanism::enforced(
            "disk limit",
            format!("{} and {} files in memory of its own", limits.disk, limits.inodes),
        ),
        Life::Kept => Mechanism::degraded(
            "disk limit",
            format!(
                "{} for one file by rlimit, for all together checked every few seconds: the data directory has no quotas",
                limits.disk
            ),
        ),
    };
    let way_out = spec.egress.as_ref().map(|egress| {
        Mechanism::degraded(
            "way out",
            format!(
                "a proxy of the host connects it to {}, by name, and writes each connection down",
                egress.allow.join(", ")
            ),
        )
    });
    [Some(disk), Some(wall_record(limits)), Some(output_record(limits)), way_out]
        .into_iter()
        .flatten()
        .collect()
}

fn wall_record(limits: &Limits) -> Mechanism {
    match limits.wall_ms {
        Some(ms) => Mechanism::enforced(
            "time limit",
            format!("{ms} ms by its keeper, which no process of the Body can reach"),
        ),
        None => Mechanism::enforced("time limit", "none was asked for"),
    }
}

fn output_record(limits: &Limits) -> Mechanism {
    Mechanism::enforced("output limit", format!("{} of each exec are recorded", limits.output))
}

/// Makes `disk/upper` and `disk/work` for every area, owned by the Body's root.
fn prepare_upper(dir: &Path, spec: &Spec, root: &Root<'_>) -> io::Result<()> {
    let first = if spec.ids.has_root() { 0 } else { proto::spec::USER_ID };
    let owner = spec.ids.user_outside(first).zip(spec.ids.group_outside(first));
    let make = |path: &Path| -> io::Result<()> {
        match fs::DirBuilder::new().mode(0o755).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            made => made?,
        }
        match owner {
            Some((user, group)) if sys::caps::is_host_root() => {
                std::os::unix::fs::lchown(path, Some(user), Some(group))
            }
            _ => Ok(()),
        }
    };
    let disk = dir.join("disk");
    make(&disk)?;
    for kind in ["upper", "work"] {
        let top = disk.join(kind);
        make(&top)?;
        root.area_dirs().iter().try_for_each(|area| make(&top.join(area)))?;
    }
    Ok(())
}

fn wait_for(keeper: Pid) {
    while matches!(rustix::process::waitpid(Some(keeper), WaitOptions::empty()), Err(rustix::io::Errno::INTR))
    {
    }
}

fn send(mut launcher: Launcher, plan: &Plan) -> Result<Tether, ProcessError> {
    let Some(mut tether) = launcher.tether.take() else {
        return Err(ProcessError::Launcher(io::ErrorKind::NotFound.into()));
    };
    let mut line = serde_json::to_vec(plan).map_err(|error| ProcessError::Launcher(error.into()))?;
    line.push(b'\n');
    tether.stay();
    match tether.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(&line)) {
        Ok(()) => {
            if let (Some(_), Some(stdout)) = (&tether.apart, &tether.stdout) {
                let _ =
                    rustix::event::poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&HELPER_PATIENCE));
            }
            Ok(tether)
        }
        Err(error) => {
            tether.bury();
            Err(ProcessError::Launcher(error))
        }
    }
}

impl Begun {
    /// Whether it is known what became of it: then [`Begun::finish`] does not wait.
    pub fn is_decided(&self) -> bool {
        let Some(stdout) = self.tether.as_ref().and_then(|tether| tether.stdout.as_ref()) else {
            return true;
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&now))
            .map_or(true, |ready| ready > 0)
    }

    /// Waits until the guest was started.
    pub fn finish(mut self) -> Result<Made, ProcessError> {
        let cgroups = std::mem::take(&mut self.cgroups);
        let Some(mut tether) = self.tether.take() else {
            return Err(ProcessError::Launcher(io::ErrorKind::NotFound.into()));
        };
        // From here on we wait, and the first command may have our place.
        tether.leave();
        let error = match read_report(&mut tether) {
            Ok(Report::Ready(ready)) => {
                let enforcement = Enforcement { mechanisms: ready.mechanisms.clone() };
                return Ok(Made { enforcement, ready, tether, cgroups });
            }
            Ok(Report::Failed(failed)) => ProcessError::Refused(failed),
            Err(error) => ProcessError::Launcher(error),
        };
        tether.bury();
        groups::unbound(&cgroups);
        Err(error)
    }
}

fn read_report(tether: &mut Tether) -> io::Result<Report> {
    let stdout = tether.stdout.as_mut().ok_or_else(|| io::Error::other("the launcher has no output"))?;
    let mut line = String::new();
    BufReader::with_capacity(8 << 10, stdout.take(REPORT_LEN_MAX)).read_line(&mut line)?;
    serde_json::from_str(&line).map_err(|_| io::Error::other("the launcher ended without a report"))
}

/// Stops every process.
pub fn pause(running: &Running) -> Result<(), ProcessError> {
    let frozen = match freezer(running) {
        Some((path, CgroupVersion::V1)) => sys::cgroup::freeze_v1(path, FREEZE_PATIENCE),
        Some((path, CgroupVersion::V2)) => sys::cgroup::freeze_v2(path, true, FREEZE_PATIENCE),
        None => stop_one_by_one(running),
    };
    frozen.map_err(|error| ProcessError::Freeze("stop", error))
}

/// Lets every process go on.
pub fn resume(running: &Running) -> Result<(), ProcessError> {
    let thawed = match freezer(running) {
        Some((path, CgroupVersion::V1)) => sys::cgroup::thaw_v1(path, FREEZE_PATIENCE),
        Some((path, CgroupVersion::V2)) => sys::cgroup::freeze_v2(path, false, FREEZE_PATIENCE),
        None => family(running).map(|pids| signal_all(&pids, Signal::CONT)),
    };
    thawed.map_err(|error| ProcessError::Freeze("let go", error))
}

fn freezer(running: &Running) -> Option<(&Path, CgroupVersion)> {
    let freezes = |path: &Path| path.join("freezer.state").exists() || path.join("cgroup.freeze").exists();
    running
        .cgroups
        .iter()
        .find(|group| freezes(&group.path))
        .map(|group| (group.path.as_path(), group.version))
}

/// The guest first, so that it starts nobody; then the rest, until a look finds nobody new.
fn stop_one_by_one(running: &Running) -> io::Result<()> {
    let begun = Instant::now();
    let deadline = begun + FREEZE_PATIENCE;
    loop {
        let pids = family(running)?;
        signal_all(&pids, Signal::STOP);
        // Who waits in `vfork` for a child that stands still already stops the moment it goes on, and not before.
        let waits = |state| state == 'D' && begun.elapsed() > VFORK_PATIENCE;
        let stopped = |pid: &i32| {
            sys::proc::stat(*pid)
                .map_or(true, |stat| matches!(stat.state, 'T' | 't' | 'Z' | 'X') || waits(stat.state))
        };
        if family(running)?.iter().all(stopped) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn signal_all(pids: &[i32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The guest and everybody below it: in a pid namespace no process can leave its first one's family.
pub(crate) fn family(running: &Running) -> io::Result<Vec<i32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = sys::fd::read_small(&entry.path().join("stat"), 4096) else { continue };
        let parent = stat
            .rfind(')')
            .and_then(|at| stat[at + 1..].split_ascii_whitespace().nth(1)?.parse::<i32>().ok());
        parents.extend(parent.map(|parent| (pid, parent)));
    }
    let mut family = vec![running.pid];
    let mut at = 0;
    while let Some(parent) = family.get(at).copied() {
        family.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    Ok(family)
}

/// Ends every process of a Body at once, waits until they are gone, and until its keeper has written that down.
pub fn kill(dir: &BodyDir, running: &Running) -> Result<(), ProcessError> {
    let handle = signal_guest(running, Signal::KILL).map_err(ProcessError::End)?;
    if freezer(running).is_some_and(|(path, _)| sys::cgroup::is_frozen(path)) {
        // Its keeper may have taken the group away meanwhile: then there is nobody left to be let go.
        resume(running)
            .or_else(|error| if alive(running.pid, running.ticks).is_some() { Err(error) } else { Ok(()) })?;
    }
    if let Some(handle) = handle {
        wait_gone(&handle, running).map_err(ProcessError::End)?;
    }
    settle(dir, running);
    Ok(())
}

/// After the guest is gone: waits for the keeper, and does its work where it was killed.
pub fn settle(dir: &BodyDir, running: &Running) {
    dir.wait_for_keeper(running.keeper);
    groups::unbound(&running.cgroups);
}

/// After a Body's end: waits until its keeper is gone, and with it the Body's mounts.
pub fn wait_unmounted(running: &Running) {
    let deadline = Instant::now() + END_PATIENCE;
    while keeper_lives(running.keeper) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Waits for a guest that was told to end; false when the time is over.
pub fn wait_end(running: &Running, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while alive(running.pid, running.ticks).is_some() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

fn wait_gone(handle: &OwnedFd, running: &Running) -> io::Result<()> {
    let patience = Timespec { tv_sec: END_PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = rustix::event::poll(&mut [PollFd::new(&handle.as_fd(), PollFlags::IN)], Some(&patience))?;
    if ready == 0 && alive(running.pid, running.ticks).is_some() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}
