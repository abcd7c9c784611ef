//! Starts a process and follows it to its end.
//!
//! The start runs on the serving thread: a helper thread would add a third to its duration, and nothing in a Body can
//! make it wait (there is no FUSE, and FIFOs are not opened). Only a dead network file system that the host mounted
//! could; then the Body's files hang as well.
//! The task that follows a process does not belong to its caller: the process stays known when the caller leaves
//! early.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::{Arc, OnceLock},
    time::Duration,
};

use proto::{
    guest::GuestConfig,
    wire::process::{Pty, StartRequest, pty::Size},
};
use rustix::{
    pipe::PipeFlags,
    process::{Signal, kill_process, kill_process_group},
    pty::OpenptFlags,
};
use sys::spawn::{ChildCredentials, ControllingTerminal, SpawnCommand, SpawnError, SpawnStep};
use tokio::{
    sync::{Mutex, Notify, mpsc, oneshot, watch},
    time::Instant,
};

use super::{
    ENDED_KEPT, GuestProcess, Keeping, OutputSource, end_event,
    hub::{Hub, Listener, ReplayStart},
    input::{StdinHandle, check_size, window},
    program::{self, Program},
    pump::{self, Outlet},
};
use crate::{
    connect::{Code, ConnectError},
    init::{self, Exit, pid_of},
    ready::ready,
    server::GuestServer,
    users::{self, GuestUser},
};

/// How long a process that was killed at its timeout may take to exit, and its output to be drained.
const LATE_WAIT: Duration = Duration::from_secs(2);
const SIZE_DEFAULT: Size = Size { cols: 80, rows: 24 };

/// Starts a process; the answer listens to it from the first byte of its output.
pub async fn start(
    guest: Rc<GuestServer>,
    request: StartRequest,
    user: GuestUser,
    age_max: Option<Duration>,
    keeping: Keeping,
) -> Result<Listener, ConnectError> {
    guest.processes.check_room()?;
    if guest.is_ending() {
        return Err(ConnectError::new(Code::Unavailable, "the Body is ending"));
    }
    let (answer_sender, answer) = oneshot::channel();
    tokio::task::spawn_local(async move {
        // If the caller has left, the send fails and drops the listener, which is what we want.
        let _ = answer_sender.send(start_and_follow(guest, request, user, age_max, keeping).await);
    });
    answer.await.unwrap_or_else(|_| Err(ConnectError::internal("the start was abandoned")))
}

async fn start_and_follow(
    guest: Rc<GuestServer>,
    request: StartRequest,
    user: GuestUser,
    age_max: Option<Duration>,
    keeping: Keeping,
) -> Result<Listener, ConnectError> {
    // No task runs between this look and `add`, so a tag is never started twice.
    if keeping == Keeping::Kept
        && let Some(known) = guest.processes.find_kept_start(&request)?
    {
        return known.listen(ReplayStart::Unheard);
    }
    let starting = guest.reaper.starting();
    let config = guest.config();
    let begun = Instant::now();
    let spawned = spawn(&request, user, &config);
    init::look_at_signals_once();
    let spawned = spawned?;
    let pid = spawned.pid;
    let exit = guest.reaper.exit_of(pid, &starting);
    drop(starting);
    let adopted = match adopt(&guest, request, spawned, keeping) {
        Ok(adopted) => adopted,
        Err(error) => {
            signal(pid, Signal::KILL);
            return Err(ConnectError::internal(format!("cannot watch the process: {error}")));
        }
    };
    guest.processes.add(&adopted.process);
    let listener = adopted.process.listen(ReplayStart::Unheard)?;
    let deadline = age_max.map(|age| begun + age);
    tokio::task::spawn_local(follow(guest.clone(), adopted, exit, deadline));
    Ok(listener)
}

/// Follows a process to its end, reports the end, and forgets it later.
async fn follow(
    guest: Rc<GuestServer>,
    adopted: AdoptedProcess,
    exit: oneshot::Receiver<Exit>,
    deadline: Option<Instant>,
) {
    let AdoptedProcess { process, outlets, held } = adopted;
    let (leader_gone, watching) = watch::channel(None);
    let (done, mut all_done) = mpsc::channel(1);
    for outlet in outlets {
        tokio::task::spawn_local(pump::run(process.clone(), outlet, watching.clone(), done.clone()));
    }
    drop(done);
    let exit = exit_or_late(&process, exit, deadline).await;
    drop(held);
    process.leader_gone.set(true);
    guest.processes.changed.notify_waiters();
    leader_gone.send_replace(Some(Instant::now()));
    if process.timed_out.get() {
        let _ = tokio::time::timeout(LATE_WAIT, all_done.recv()).await;
    } else {
        all_done.recv().await;
    }
    if let StdinHandle::Pipe(pipe) = &process.input
        && let Ok(mut pipe) = pipe.try_lock()
    {
        pipe.take();
    }
    guest.processes.end(&process, end_event(exit));
    drop(process);
    tokio::time::sleep(ENDED_KEPT).await;
    guest.processes.forget_old();
    guest.schedule_trim();
}

async fn exit_or_late(
    process: &GuestProcess,
    mut exit: oneshot::Receiver<Exit>,
    deadline: Option<Instant>,
) -> Exit {
    let killed = Exit::Signal(9);
    let Some(deadline) = deadline else { return exit.await.unwrap_or(killed) };
    if let Ok(exit) = tokio::time::timeout_at(deadline, &mut exit).await {
        return exit.unwrap_or(killed);
    }
    process.timed_out.set(true);
    // Kill the whole process group: a caller that sets a timeout wants the work to end, not only the shell.
    if let Some(pid) = pid_of(process.pid) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
    tokio::time::timeout(LATE_WAIT, exit).await.map_or(killed, |exit| exit.unwrap_or(killed))
}

impl GuestProcess {
    /// Signals the leader only.
    pub fn signal(&self, number: i32) -> Result<(), ConnectError> {
        let gone = || ConnectError::new(Code::NotFound, format!("process with pid {} not found", self.pid));
        let signal = Signal::from_named_raw(number)
            .ok_or_else(|| ConnectError::new(Code::Unimplemented, format!("invalid signal: {number}")))?;
        let pid = pid_of(self.pid).filter(|_| !self.leader_gone.get()).ok_or_else(gone)?;
        kill_process(pid, signal)
            .map_err(|error| ConnectError::internal(format!("error sending signal: {error}")))
    }

    /// Does what the kernel does when a terminal closes: the leader and the processes in the foreground get SIGHUP,
    /// and SIGCONT in case they are stopped. A process with a pipe loses its input as well.
    pub fn hang_up(&self) {
        let Some(leader) = pid_of(self.pid).filter(|_| !self.leader_gone.get()) else { return };
        let mut groups = vec![leader];
        match &self.input {
            StdinHandle::Terminal { master, .. } => {
                groups.extend(rustix::termios::tcgetpgrp(master.get_ref()).ok().filter(|pid| *pid != leader));
            }
            StdinHandle::Pipe(pipe) => drop(pipe.try_lock().map(|mut pipe| pipe.take())),
        }
        for signal in [Signal::HUP, Signal::CONT] {
            for group in &groups {
                let _ = kill_process_group(*group, signal);
            }
        }
    }
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = pid_of(pid) {
        let _ = kill_process(pid, signal);
    }
}

fn adopt(
    guest: &GuestServer,
    request: StartRequest,
    spawned: SpawnedProcess,
    keeping: Keeping,
) -> io::Result<AdoptedProcess> {
    let watched = |fd: OwnedFd| {
        rustix::io::ioctl_fionbio(&fd, true)?;
        ready(fd)
    };
    let (mut outlets, mut held) = (Vec::with_capacity(2), None);
    let input = match spawned.ends {
        ProcessEnds::Terminal(master) => {
            let master = Rc::new(watched(master)?);
            outlets.push(Outlet { fd: master.clone(), stream: OutputSource::Pty });
            StdinHandle::Terminal { master, turn: Mutex::new(()) }
        }
        ProcessEnds::Pipes { stdin, stdout, stderr, theirs } => {
            held = theirs;
            outlets.push(Outlet { fd: Rc::new(watched(stdout)?), stream: OutputSource::Stdout });
            outlets.push(Outlet { fd: Rc::new(watched(stderr)?), stream: OutputSource::Stderr });
            StdinHandle::Pipe(Mutex::new(stdin.map(watched).transpose()?))
        }
    };
    let process = Rc::new(GuestProcess {
        pid: spawned.pid,
        config: request.process.unwrap_or_default(),
        tag: request.tag,
        hub: RefCell::new(Hub::new(guest.config().ring_bytes, keeping)),
        input,
        leader_gone: Cell::new(false),
        timed_out: Cell::new(false),
        began: Instant::now(),
        news: Notify::new(),
    });
    Ok(AdoptedProcess { process, outlets, held })
}

/// A process that runs and is listed.
struct AdoptedProcess {
    process: Rc<GuestProcess>,
    outlets: Vec<Outlet>,
    /// Dropped after the process has exited.
    held: Option<[OwnedFd; 2]>,
}

/// A running process, and the guest's ends of its input and output.
struct SpawnedProcess {
    pid: u32,
    ends: ProcessEnds,
}

enum ProcessEnds {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
        /// The process's ends of the two pipes, held until it has exited: without them, each pipe would report its
        /// end of file and wake the guest twice while the process is still exiting.
        theirs: Option<[OwnedFd; 2]>,
    },
    Terminal(OwnedFd),
}

impl ProcessEnds {
    fn holding(mut self, [_, out, err]: [OwnedFd; 3]) -> Self {
        if let Self::Pipes { theirs, .. } = &mut self {
            *theirs = Some([out, err]);
        }
        self
    }
}

/// Spawns a process; nothing follows it yet.
fn spawn(
    request: &StartRequest,
    user: GuestUser,
    config: &Arc<GuestConfig>,
) -> Result<SpawnedProcess, ConnectError> {
    request.pty.and_then(|pty| pty.size).map_or(Ok(()), check_size)?;
    users::check_reachable(&user)?;
    let asked = request.process.clone().unwrap_or_default();
    let program = Program::new(&asked, &user, config)?;
    let lack = |error: io::Error| ConnectError::internal(format!("cannot prepare the process: {error}"));
    let (ours, theirs) = match &request.pty {
        Some(pty) => terminal(pty, &user).map_err(lack)?,
        None => pipes(request.stdin.unwrap_or(true)).map_err(lack)?,
    };
    let [stdin, stdout, stderr] = &theirs;
    let pid = sys::spawn::spawn(&SpawnCommand {
        program: &program.file,
        args: &program.args,
        envs: &program.envs,
        cwd: &program.cwd,
        credentials: credentials(&user).as_ref(),
        stdin: stdin.as_fd(),
        stdout: stdout.as_fd(),
        stderr: stderr.as_fd(),
        terminal: if request.pty.is_some() { ControllingTerminal::Stdin } else { ControllingTerminal::None },
    });
    let pid = pid.map_err(|error| start_failure(&asked.cmd, &program, &error))?;
    Ok(SpawnedProcess { pid, ends: ours.holding(theirs) })
}

/// `None` if the guest already has the user's ids: in a Body with a single id it could not even set its groups.
pub fn credentials(user: &GuestUser) -> Option<ChildCredentials> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid().as_raw());
    let become_other = user.uid != uid.as_raw() || uid.is_root() && user.gid != gid;
    become_other.then(|| ChildCredentials { uid: user.uid, gid: user.gid, groups: user.groups.clone() })
}

fn pipes(with_stdin: bool) -> io::Result<(ProcessEnds, [OwnedFd; 3])> {
    let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
    let (stdin, their_stdin) = if with_stdin {
        let (theirs, ours) = pipe()?;
        (Some(ours), theirs)
    } else {
        (None, open_dev_null()?)
    };
    let (stdout, their_stdout) = pipe()?;
    let (stderr, their_stderr) = pipe()?;
    Ok((
        ProcessEnds::Pipes { stdin, stdout, stderr, theirs: None },
        [their_stdin, their_stdout, their_stderr],
    ))
}

/// Standard input of a process to which no caller writes; `/dev/null` is opened once.
fn open_dev_null() -> io::Result<OwnedFd> {
    static NULL: OnceLock<File> = OnceLock::new();
    let null = match NULL.get() {
        Some(null) => null,
        None => {
            let opened = File::open("/dev/null")?;
            NULL.get_or_init(|| opened)
        }
    };
    null.try_clone().map(OwnedFd::from)
}

fn terminal(pty: &Pty, user: &GuestUser) -> io::Result<(ProcessEnds, [OwnedFd; 3])> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    rustix::termios::tcsetwinsize(&master, window(pty.size.unwrap_or(SIZE_DEFAULT)))?;
    // The user can then open its terminal by name. In a Body with a single id it is the owner already.
    let _ = rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(user.uid)), None);
    let (stdin, stdout) = (slave.try_clone()?, slave.try_clone()?);
    Ok((ProcessEnds::Terminal(master), [stdin, stdout, slave]))
}

fn start_failure(cmd: &str, program: &Program, error: &SpawnError) -> ConnectError {
    use io::ErrorKind::{ArgumentListTooLong, NotFound, PermissionDenied};
    let cwd = program.cwd.to_string_lossy();
    let source = &error.source;
    match (error.step, source.kind()) {
        (SpawnStep::Exec, NotFound) => program::not_found(cmd),
        (SpawnStep::Exec, ArgumentListTooLong) => {
            ConnectError::invalid("the arguments and the environment are too long")
        }
        (SpawnStep::Exec, PermissionDenied) => program::not_executable(cmd),
        (SpawnStep::Exec, _) => program::not_executable(&format!("{cmd} ({source})")),
        (SpawnStep::Directory, PermissionDenied) => {
            ConnectError::new(Code::PermissionDenied, format!("no permission to enter cwd '{cwd}'"))
        }
        (SpawnStep::Directory, _) => ConnectError::invalid(format!("cannot enter cwd '{cwd}': {source}")),
        (SpawnStep::Clone, _) => {
            ConnectError::new(Code::ResourceExhausted, format!("cannot create a process: {source}"))
        }
        (SpawnStep::Credentials, _) => ConnectError::new(
            Code::PermissionDenied,
            format!("cannot switch to the user: {source}; is its id mapped into this Body?"),
        ),
        (step, _) => ConnectError::internal(format!("cannot start the process at step {step:?}: {source}")),
    }
}
