//! The supervisor's side of a Body's egress proxy: it starts `pal-egress`, restarts it when it dies, and ends it with
//! the Body.
//!
//! Invariant: the supervisor holds the listening socket, so connections wait while no proxy accepts them; they go
//! nowhere else.
//! Invariant: `pal-egress` holds a pidfd of the Body's first process, so it ends with the Body even if the supervisor
//! was killed; no process restarts it then.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use proto::{
    Mechanism,
    egress::{EgressAnswer, PROGRAM, SHARED, SOCKET, SPOOL},
    launch::{EgressPlan, LaunchPlan},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, Signal, WaitOptions},
};

use crate::report::{StepError, StepExt};

const ANSWER_LEN_MAX: u64 = 64 << 10;
/// How long a new proxy may take to confine itself.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// How long the proxy may take to end after its Body has.
const END_PATIENCE: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// The pause before a restart. It doubles with each restart, up to the maximum, while no proxy runs for long.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A proxy that ran this long counts as healthy, and resets the pause.
const SOUND_AFTER: Duration = Duration::from_secs(10);

/// The egress proxy of a running Body.
pub struct EgressProxy {
    plan: EgressPlan,
    listener: OwnedFd,
    spool: OwnedFd,
    log: OwnedFd,
    /// A pidfd of the Body's first process.
    body: OwnedFd,
    state: State,
    /// The pause before the next restart.
    pause: Duration,
}

enum State {
    Running(ProxyProcess),
    /// Until the pause before a restart is over.
    Waiting(Instant),
}

struct ProxyProcess {
    pid: Pid,
    handle: OwnedFd,
    since: Instant,
}

/// A proxy that was just started, and the supervisor's end of the socket to it.
struct StartedProxy {
    process: ProxyProcess,
    socket: UnixStream,
}

impl EgressProxy {
    /// Starts the proxy of the Body whose first process is `body`, if the plan has one, and waits until it has
    /// confined itself.
    pub fn start(plan: &LaunchPlan, body: BorrowedFd<'_>) -> Result<Option<(Self, Mechanism)>, StepError> {
        let Some(plan) = &plan.egress else { return Ok(None) };
        let step = "start the egress proxy";
        let (listener, spool) = open(&plan.dir).step("open the socket and the spool of the egress proxy")?;
        let log = File::options().append(true).create(true).open("guest.log").step("open the guest's log")?;
        let mut proxy = Self {
            plan: plan.clone(),
            listener,
            spool,
            log: log.into(),
            body: body.try_clone_to_owned().step(step)?,
            state: State::Waiting(Instant::now()),
            pause: PAUSE_MIN,
        };
        let StartedProxy { process, socket } = proxy.spawn().step(step)?;
        proxy.state = State::Running(process);
        match read_answer(&socket).step(step)? {
            EgressAnswer::Ready { landlock } => Ok(Some((proxy, mechanism(landlock)))),
            EgressAnswer::Failed { step: at, cause } => {
                Err(StepError::new(step, format!("the egress proxy cannot {at}: {cause}")))
            }
        }
    }

    fn spawn(&self) -> io::Result<StartedProxy> {
        let (socket, far) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg0(PROGRAM)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(far)))
            .stdout(Stdio::null())
            .stderr(Stdio::from(self.log.try_clone()?))
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let process = ProxyProcess { pid, handle: sys::process::open(pid)?, since: Instant::now() };
        let told = self.tell(&socket);
        if told.is_err() {
            end(&process);
        }
        told.map(|()| StartedProxy { process, socket })
    }

    fn tell(&self, mut socket: &UnixStream) -> io::Result<()> {
        for fd in [&self.listener, &self.spool, &self.body] {
            sys::fd::send(socket.as_fd(), fd.as_fd())?;
        }
        let mut line = serde_json::to_vec(&self.plan.orders)?;
        line.push(b'\n');
        socket.write_all(&line)
    }

    /// A pidfd of the proxy, to poll for its end.
    pub fn handle(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Running(process) => Some(process.handle.as_fd()),
            State::Waiting(_) => None,
        }
    }

    /// How long until [`EgressProxy::tend`] must be called again if nothing else happens.
    pub fn next_check(&self) -> Option<Duration> {
        match &self.state {
            State::Running(_) => None,
            State::Waiting(until) => Some(until.saturating_duration_since(Instant::now())),
        }
    }

    /// Restarts a proxy that has died, once its pause is over.
    pub fn tend(&mut self) {
        if let State::Running(process) = &self.state
            && let Ok(Some(_)) = rustix::process::waitpid(Some(process.pid), WaitOptions::NOHANG)
        {
            if process.since.elapsed() >= SOUND_AFTER {
                self.pause = PAUSE_MIN;
            }
            self.wait_a_while();
        }
        if let State::Waiting(until) = &self.state
            && *until <= Instant::now()
        {
            match self.spawn() {
                // If the proxy fails, it writes the reason to the log.
                Ok(StartedProxy { process, .. }) => self.state = State::Running(process),
                Err(_) => self.wait_a_while(),
            }
        }
    }

    fn wait_a_while(&mut self) {
        self.state = State::Waiting(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(PAUSE_MAX);
    }

    /// Waits until the proxy has ended; called after the end of its Body.
    pub fn end(self) {
        let State::Running(process) = &self.state else { return };
        let _ = rustix::event::poll(&mut [PollFd::new(&process.handle, PollFlags::IN)], Some(&END_PATIENCE));
        end(process);
        let _ = std::fs::remove_file(self.plan.dir.join(SHARED).join(SOCKET));
    }
}

fn end(process: &ProxyProcess) {
    let _ = sys::process::signal(process.handle.as_fd(), Signal::KILL);
    let _ = rustix::process::waitpid(Some(process.pid), WaitOptions::empty());
}

/// Opens the listening socket, in place of one that an earlier run of the Body left, and the spool.
fn open(dir: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let spool = File::options().append(true).create(true).open(dir.join(SPOOL))?;
    spool.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    let socket = dir.join(SHARED).join(SOCKET);
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Bound through a descriptor, because a socket's path may have at most 107 bytes.
    let shared = sys::fd::open_path(&dir.join(SHARED))?;
    let listener = UnixListener::bind(sys::fd::path_of(shared.as_fd()).join(SOCKET))?;
    // Programs of the Body connect with ids other than ours.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666))?;
    Ok((listener.into(), spool.into()))
}

fn read_answer(socket: &UnixStream) -> io::Result<EgressAnswer> {
    socket.set_read_timeout(Some(ANSWER_PATIENCE))?;
    let mut line = String::new();
    BufReader::new(socket.take(ANSWER_LEN_MAX)).read_line(&mut line)?;
    serde_json::from_str(&line).map_err(|_| io::Error::other("the egress proxy ended without an answer"))
}

fn mechanism(landlock: i64) -> Mechanism {
    let name = "egress process";
    let held = "no new privileges, an allow-list of system calls: no exec, no file opened for writing, no socket but of \
                the Internet";
    match landlock {
        0 => Mechanism::degraded(name, format!("{held}; this kernel has no Landlock")),
        abi => Mechanism::enforced(
            name,
            format!("{held}; Landlock ABI {abi}: files below the resolver's directories, to read"),
        ),
    }
}
