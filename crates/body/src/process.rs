//! The process layer: `pal-launch` starts a Body, its cgroup freezes it, and it ends when its first process
//! ends.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::DirBuilderExt, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use proto::{
    Enforcement, Layer, Limits, Mechanism, Spec,
    egress::{CERTIFICATES, Flush, SECRETS_KEY, SOCKET},
    guest::{EGRESS_DIR, EGRESS_PORT, Forward, GuestConfig},
    launch::{
        CgroupVersion, EgressPlan, LaunchFailure, LaunchPlan, LaunchReport, LaunchedBody, RunRecord, Upper,
    },
    limits::HostCapacity,
    secret::{self, Purpose},
    spec::{Access, BodyRole, Life, Mount},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, Resource, Rlimit, Signal, WaitOptions},
};

use crate::{
    dir::{BodyDir, DirError, alive, signal_guest, supervisor_lives},
    driver::{ChangedLimits, DeferredLimit},
    egress::{EgressDir, policy_record},
    groups, ids,
    programs::Programs,
    root::{RootPlan, RootfsStack, followed_seed},
};

const REPORT_LEN_MAX: u64 = 1 << 20;
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);
/// When processes are stopped one by one: how long a process may be in uninterruptible sleep before it counts
/// as waiting in `vfork`.
const VFORK_PATIENCE: Duration = Duration::from_millis(100);
/// How long the kernel may take to end every process of a Body.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Output of each process that the guest keeps for clients that connect later.
const RING_BYTES: u64 = 256 << 10;

/// Why a Body could not be started, frozen or ended.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The launcher could not be run.
    #[error("cannot run the launcher")]
    Launcher(#[source] io::Error),
    /// The launcher reported a failure.
    #[error("cannot {}: {}", .0.step, .0.cause)]
    Refused(LaunchFailure),
    /// The Body's directory cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The Body's upper could not be created.
    #[error("cannot prepare the Body's upper")]
    Upper(#[source] io::Error),
    /// The Body's processes could not be stopped or resumed.
    #[error("cannot {0} the Body's processes")]
    Freeze(&'static str, #[source] io::Error),
    /// Its processes could not be ended.
    #[error("cannot end the Body's processes")]
    End(#[source] io::Error),
}

/// The context in which this host starts Bodies.
#[derive(Debug)]
pub struct LaunchContext {
    /// The launcher.
    pub programs: Programs,
    /// The capacity of this host.
    pub capacity: HostCapacity,
    /// The cgroup mounts of this host.
    pub cgroups: sys::cgroup::CgroupMounts,
    /// When a decision of an egress proxy counts as recorded.
    pub flush: Flush,
}

/// A Body that was just started.
#[derive(Debug)]
pub struct StartedBody {
    /// The enforcement record.
    pub enforcement: Enforcement,
    /// The report of the launcher.
    pub ready: LaunchedBody,
    /// The handle on the supervisor.
    pub supervisor: SupervisorHandle,
    /// Its cgroups.
    pub cgroups: Vec<proto::launch::Cgroup>,
}

/// The handle on the supervisor. Dropping it ends a Body of [`Life::Run`], and a kept Body unless
/// [`SupervisorHandle::detach`] was called.
#[derive(Debug)]
pub struct SupervisorHandle {
    stdin: Option<File>,
    stdout: Option<File>,
    /// Our child process, until it was reaped.
    supervisor: Option<Pid>,
}

impl SupervisorHandle {
    /// Ends the Body, if it depends on this handle.
    pub fn terminate(&mut self) {
        drop(self.stdin.take());
    }

    /// Waits until the supervisor has removed everything of the Body; it is about to exit then.
    pub fn wait_cleanup(&mut self) {
        let cleared = self.stdout.take().map(|mut stdout| stdout.read(&mut [0; 1]));
        if !matches!(cleared, Some(Ok(1))) {
            self.reap();
        }
    }

    /// Waits for the supervisor's exit.
    pub fn reap(&mut self) {
        self.terminate();
        if let Some(supervisor) = self.supervisor.take() {
            wait_for(supervisor);
        }
    }

    /// Whether the supervisor has exited, without waiting.
    pub fn try_reap(&mut self) -> bool {
        // An error means that other code has already reaped it.
        let gone = |supervisor| {
            rustix::process::waitpid(Some(supervisor), WaitOptions::NOHANG)
                .map_or(true, |status| status.is_some())
        };
        if self.supervisor.is_some_and(gone) {
            self.supervisor = None;
        }
        self.supervisor.is_none()
    }

    /// Lets the Body continue without the process that created it, which has recorded the Body; without this
    /// message the supervisor ends the Body. [`SupervisorHandle::reap`] can still wait for the supervisor.
    pub fn detach(&mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        drop(self.stdout.take());
    }
}

/// A Body whose plan was sent and whose guest is being started. Dropping it ends the Body; the supervisor
/// cleans up.
#[derive(Debug)]
pub struct StartingBody {
    supervisor: Option<SupervisorHandle>,
    cgroups: Vec<proto::launch::Cgroup>,
}

impl Drop for StartingBody {
    fn drop(&mut self) {
        if let Some(mut supervisor) = self.supervisor.take() {
            supervisor.reap();
        }
    }
}

/// A launcher that runs and waits for its plan.
#[derive(Debug)]
pub struct Launcher {
    supervisor: Option<SupervisorHandle>,
}

impl Drop for Launcher {
    /// A launcher without a plan exits when its input is closed; this waits for it.
    fn drop(&mut self) {
        if let Some(mut supervisor) = self.supervisor.take() {
            supervisor.reap();
        }
    }
}

impl LaunchContext {
    /// Starts the launcher early, so that it initializes while its plan is being made.
    pub fn start_launcher(&self) -> Result<Launcher, ProcessError> {
        // With cgroup v2 the fork itself enters the group, so the fork must wait for the plan.
        let when = if groups::uses_v2(&self.cgroups) { "late" } else { "early" };
        let mut child = Command::new(&self.programs.launch)
            // The name that `ps` shows, also inside the Body: no path of the host.
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
            supervisor: Some(SupervisorHandle {
                stdin,
                stdout,
                supervisor: i32::try_from(child.id()).ok().and_then(Pid::from_raw),
            }),
        })
    }

    /// Sends the plan of a Body of the process layer in `dir`, whose spec is already written.
    pub fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
        rootfs: &RootfsStack,
    ) -> Result<StartingBody, ProcessError> {
        let root = RootPlan::of(rootfs, spec);
        if spec.life == Life::Kept {
            prepare_upper(dir.path(), spec, &root).map_err(ProcessError::Upper)?;
        }
        let bounds = self.apply_limits(spec, &spec.limits);
        let mut uppers = upper_mechanisms(spec);
        uppers.extend(root.lost(&dir.path().join("disk/upper")));
        let plan = self.plan(dir, spec, token, &root, &bounds, uppers);
        send(launcher, &plan, bounds)
    }

    /// Creates the cgroups of a Body with these limits.
    pub(crate) fn apply_limits(&self, spec: &Spec, limits: &Limits) -> groups::BodyCgroups {
        groups::apply_limits(&self.cgroups, &spec.id, limits, self.capacity.cpus, spec.ids.has_root())
    }

    /// Changes the limits of a running Body: its cgroups, and what its supervisor reads from the spec.
    pub(crate) fn change_limits(
        &self,
        running: &RunRecord,
        spec: &Spec,
        new: &Limits,
    ) -> io::Result<ChangedLimits> {
        let old = &spec.limits;
        let mut changed = groups::change_limits(&running.cgroups, &spec.id, old, new, self.capacity.cpus)?;
        let spec = Spec { limits: new.clone(), ..spec.clone() };
        if (new.disk, new.inodes) != (old.disk, old.inodes) {
            changed.mechanisms.extend(upper_mechanisms(&spec));
        }
        if new.disk != old.disk && !raise_file_limit(running, new.disk.0) {
            let why = format!("until then no single file may be larger than {}", old.disk.min(new.disk));
            changed.deferred.push(DeferredLimit { limit: "disk", why });
        }
        if new.wall_ms != old.wall_ms {
            changed.mechanisms.push(wall_record(new));
        }
        Ok(changed)
    }

    /// The plan of a Body whose guest runs on the host's kernel. `uppers` describes the limits of its upper.
    pub(crate) fn plan(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
        root: &RootPlan<'_>,
        bounds: &groups::BodyCgroups,
        uppers: Vec<Mechanism>,
    ) -> LaunchPlan {
        let limits = &spec.limits;
        let data = dir.path().ancestors().nth(2).unwrap_or(Path::new("/"));
        let egress = EgressDir::of(data, &spec.id);
        let mut mounts = mounts_of_spec(spec, &egress);
        // Layers of dependencies, which are made in steps, hold nothing of one Body.
        let has_certificates = spec.role == BodyRole::Work && egress.shared().join(CERTIFICATES).exists();
        mounts.iter_mut().for_each(|mount| mount.target = root.place_of(&mount.target));
        let followed = root.followed(&mounts);
        LaunchPlan {
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
                .chain(has_certificates.then(|| root.certificate_seeds()).into_iter().flatten())
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
            inodes: limits.inodes,
            life: spec.life,
            role: spec.role,
            vm: None,
            egress: spec.egress.as_ref().map(|_| EgressPlan {
                dir: egress.path().to_owned(),
                key: data.join(SECRETS_KEY),
                token: Some(token.to_owned()),
            }),
            mechanisms: [ids::record(data, &spec.id, &spec.ids), ids::groups_record(&spec.ids)]
                .into_iter()
                .chain(bounds.mechanisms.iter().cloned())
                .chain(uppers)
                .chain([wall_record(limits), output_record(limits)])
                .chain(policy_record(spec))
                .collect(),
        }
    }
}

/// The configuration of a Body's guest.
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
            socket: format!("{EGRESS_DIR}/{SOCKET}"),
            transparent: spec.layer == Layer::Microvm,
        }),
    }
}

/// The machine id: different for each Body, equal for each start of it. The Body can read it, but cannot
/// derive the token from it.
pub(crate) fn machine_id(token: &str) -> String {
    secret::derive(token, Purpose::MachineId, &[])[..32].to_owned()
}

/// The mounts that the spec names, and the directory of the egress proxy's socket.
fn mounts_of_spec(spec: &Spec, egress: &EgressDir) -> Vec<Mount> {
    let socket = spec.egress.as_ref().map(|_| Mount {
        source: egress.shared(),
        target: EGRESS_DIR.into(),
        access: Access::ReadOnly,
    });
    spec.mounts.iter().cloned().chain(socket).collect()
}

/// How the upper of a Body of the process layer is limited.
fn upper_mechanisms(spec: &Spec) -> Vec<Mechanism> {
    let limits = &spec.limits;
    match spec.life {
        Life::Run => vec![
            Mechanism::enforced("disk limit", format!("{} in a tmpfs of its own", limits.disk)),
            Mechanism::enforced(
                "inode limit",
                format!("{} files and directories in a tmpfs of its own", limits.inodes),
            ),
        ],
        Life::Kept => vec![
            Mechanism::degraded(
                "disk limit",
                format!(
                    "{} for one file by rlimit, for all together checked every few seconds: the data directory has no quotas",
                    limits.disk
                ),
            ),
            Mechanism::degraded(
                "inode limit",
                format!(
                    "{} files and directories, counted every few seconds: the data directory has no quotas",
                    limits.inodes
                ),
            ),
        ],
    }
}

/// Sets the largest file of commands that the guest starts from now on. Only root may raise it.
fn raise_file_limit(running: &RunRecord, bytes: u64) -> bool {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let is_it = alive(running.pid, running.ticks).is_some();
    is_it && rustix::process::prlimit(Pid::from_raw(running.pid), Resource::Fsize, limit).is_ok()
}

fn wall_record(limits: &Limits) -> Mechanism {
    match limits.wall_ms {
        Some(ms) => Mechanism::enforced(
            "time limit",
            format!("{ms} ms by its supervisor, which no process of the Body can reach"),
        ),
        None => Mechanism::enforced("time limit", "none was requested"),
    }
}

fn output_record(limits: &Limits) -> Mechanism {
    Mechanism::enforced("output limit", format!("{} of each exec are recorded", limits.output))
}

/// Creates `disk/upper` and `disk/work` for every mount, owned by the Body's root.
fn prepare_upper(dir: &Path, spec: &Spec, root: &RootPlan<'_>) -> io::Result<()> {
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

fn wait_for(supervisor: Pid) {
    while matches!(
        rustix::process::waitpid(Some(supervisor), WaitOptions::empty()),
        Err(rustix::io::Errno::INTR)
    ) {}
}

/// Sends a plan to a launcher. If that fails, it removes the cgroups of the Body.
pub(crate) fn send(
    mut launcher: Launcher,
    plan: &LaunchPlan,
    bounds: groups::BodyCgroups,
) -> Result<StartingBody, ProcessError> {
    let cgroups = bounds.cgroups;
    let sent = match launcher.supervisor.take() {
        Some(supervisor) => send_line(supervisor, plan),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    match sent {
        Ok(supervisor) => Ok(StartingBody { supervisor: Some(supervisor), cgroups }),
        Err(error) => {
            groups::remove_cgroups(&cgroups);
            Err(ProcessError::Launcher(error))
        }
    }
}

fn send_line(mut supervisor: SupervisorHandle, plan: &LaunchPlan) -> io::Result<SupervisorHandle> {
    let mut line = serde_json::to_vec(plan)?;
    line.push(b'\n');
    match supervisor.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(&line)) {
        Ok(()) => Ok(supervisor),
        Err(error) => {
            supervisor.reap();
            Err(error)
        }
    }
}

impl StartingBody {
    /// Waits until the guest was started.
    pub fn finish(mut self) -> Result<StartedBody, ProcessError> {
        let cgroups = std::mem::take(&mut self.cgroups);
        let Some(mut supervisor) = self.supervisor.take() else {
            return Err(ProcessError::Launcher(io::ErrorKind::NotFound.into()));
        };
        let error = match read_report(&mut supervisor) {
            Ok(LaunchReport::Ready(ready)) => {
                let enforcement = Enforcement { mechanisms: ready.mechanisms.clone() };
                return Ok(StartedBody { enforcement, ready, supervisor, cgroups });
            }
            Ok(LaunchReport::Failed(failed)) => ProcessError::Refused(failed),
            Err(error) => ProcessError::Launcher(error),
        };
        supervisor.reap();
        groups::remove_cgroups(&cgroups);
        Err(error)
    }
}

fn read_report(supervisor: &mut SupervisorHandle) -> io::Result<LaunchReport> {
    let stdout = supervisor.stdout.as_mut().ok_or_else(|| io::Error::other("the launcher has no output"))?;
    let mut line = String::new();
    BufReader::with_capacity(8 << 10, stdout.take(REPORT_LEN_MAX)).read_line(&mut line)?;
    serde_json::from_str(&line).map_err(|_| io::Error::other("the launcher ended without a report"))
}

/// Stops every process.
pub fn pause(running: &RunRecord) -> Result<(), ProcessError> {
    let frozen = match freezer(running) {
        Some((path, CgroupVersion::V1)) => sys::cgroup::freeze_v1(path, FREEZE_PATIENCE),
        Some((path, CgroupVersion::V2)) => sys::cgroup::freeze_v2(path, true, FREEZE_PATIENCE),
        None => stop_one_by_one(running),
    };
    frozen.map_err(|error| ProcessError::Freeze("stop", error))
}

/// Resumes every process.
pub fn resume(running: &RunRecord) -> Result<(), ProcessError> {
    let thawed = match freezer(running) {
        Some((path, CgroupVersion::V1)) => sys::cgroup::thaw_v1(path, FREEZE_PATIENCE),
        Some((path, CgroupVersion::V2)) => sys::cgroup::freeze_v2(path, false, FREEZE_PATIENCE),
        None => process_tree(running).map(|pids| signal_all(&pids, Signal::CONT)),
    };
    thawed.map_err(|error| ProcessError::Freeze("let go", error))
}

fn freezer(running: &RunRecord) -> Option<(&Path, CgroupVersion)> {
    let freezes = |path: &Path| path.join("freezer.state").exists() || path.join("cgroup.freeze").exists();
    running
        .cgroups
        .iter()
        .find(|group| freezes(&group.path))
        .map(|group| (group.path.as_path(), group.version))
}

/// Stops the guest first, so that it starts no process; then the others, until a scan finds no new process.
fn stop_one_by_one(running: &RunRecord) -> io::Result<()> {
    let begun = Instant::now();
    let deadline = begun + FREEZE_PATIENCE;
    loop {
        let pids = process_tree(running)?;
        signal_all(&pids, Signal::STOP);
        // A process that waits in `vfork` for a stopped child stops as soon as the child continues, and not
        // before.
        let waits = |state| state == 'D' && begun.elapsed() > VFORK_PATIENCE;
        let stopped = |pid: &i32| {
            sys::proc::stat(*pid)
                .map_or(true, |stat| matches!(stat.state, 'T' | 't' | 'Z' | 'X') || waits(stat.state))
        };
        if process_tree(running)?.iter().all(stopped) {
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

/// The guest and all its descendants: in a pid namespace, every process descends from the first one.
pub(crate) fn process_tree(running: &RunRecord) -> io::Result<Vec<i32>> {
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

/// Ends every process of a Body at once, and waits until they are gone and the supervisor has recorded that.
pub fn kill(dir: &BodyDir, running: &RunRecord) -> Result<(), ProcessError> {
    let handle = signal_guest(running, Signal::KILL).map_err(ProcessError::End)?;
    if freezer(running).is_some_and(|(path, _)| sys::cgroup::is_frozen(path)) {
        // The supervisor may have removed the cgroup meanwhile: then there is no process left to resume.
        resume(running)
            .or_else(|error| if alive(running.pid, running.ticks).is_some() { Err(error) } else { Ok(()) })?;
    }
    if let Some(handle) = handle {
        wait_exit(&handle, running).map_err(ProcessError::End)?;
    }
    finish_supervisor(dir, running);
    Ok(())
}

/// After the guest's end: waits for the supervisor, and does its work if it was killed.
pub fn finish_supervisor(dir: &BodyDir, running: &RunRecord) {
    dir.wait_for_keeper(running);
    groups::remove_cgroups(&running.cgroups);
}

/// After a Body's end: waits until its supervisor is gone, and with it the Body's mounts.
pub fn wait_unmounted(running: &RunRecord) {
    let deadline = Instant::now() + END_PATIENCE;
    while supervisor_lives(running) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Waits for the end of a guest that is shutting down; false on timeout.
pub fn wait_end(running: &RunRecord, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while alive(running.pid, running.ticks).is_some() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

fn wait_exit(handle: &OwnedFd, running: &RunRecord) -> io::Result<()> {
    let patience = Timespec { tv_sec: END_PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = rustix::event::poll(&mut [PollFd::new(&handle.as_fd(), PollFlags::IN)], Some(&patience))?;
    if ready == 0 && alive(running.pid, running.ticks).is_some() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::machine_id;

    #[test]
    fn a_machine_id_is_a_keyed_hash() {
        // The value was computed with Python's hmac module.
        assert_eq!(machine_id("a token"), "2db6a343999b9aa58589311b6724382e");
        assert_ne!(machine_id("another token"), machine_id("a token"));
    }
}
