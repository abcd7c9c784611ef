//! The supervisor's side of a Body's egress proxy: it starts `pal-egress`, restarts it when it dies, and ends it with
//! the Body.
//!
//! Invariant: the supervisor holds every socket on which the proxy accepts connections, so they wait while no proxy
//! runs; they go nowhere else.
//! Invariant: `pal-egress` holds a pidfd of the Body's first process, so it ends with the Body even if the supervisor
//! was killed; no process restarts it then.

use std::{
    fs::{File, Permissions},
    io::{self, Read, Write},
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
    egress::{
        CERTIFICATES, CONTROL, EgressAnswer, EgressOrders, EgressStart, PEERS, PROGRAM, SHARED, SOCKET,
        SPOOL, TRANSPARENT,
    },
    launch::{EgressPlan, LaunchPlan},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::SeekFrom,
    process::{Pid, Signal, WaitOptions},
};

use crate::{
    peers::{EgressLink, PeerConnector, read_orders},
    report::{StepError, StepExt},
};

const ANSWER_LEN_MAX: usize = 64 << 10;
const KEY_LEN_MAX: u64 = 1 << 10;
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
    files: EgressFiles,
    log: OwnedFd,
    /// A pidfd of the Body's first process.
    body: OwnedFd,
    /// The redirected sockets of a transparent network; empty without one.
    redirected: Vec<OwnedFd>,
    state: State,
    /// The pause before the next restart.
    pause: Duration,
}

/// The files that the proxy uses in its directory.
struct EgressFiles {
    /// The socket on which programs of the Body connect.
    listener: OwnedFd,
    /// The socket on which `pal` sends new orders.
    control: OwnedFd,
    /// The socket on which the egress processes of other Bodies connect.
    peers: OwnedFd,
    spool: OwnedFd,
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
    /// Takes its requests for connections; none once it has broken.
    link: Option<EgressLink>,
}

/// A proxy that was just started, and the supervisor's end of the socket to it.
struct StartedProxy {
    process: ProxyProcess,
    socket: UnixStream,
}

impl EgressProxy {
    /// Starts the proxy of the Body whose first process is `body`, if the plan has one, and waits until it has
    /// confined itself.
    pub fn start(
        plan: &LaunchPlan,
        body: BorrowedFd<'_>,
        redirected: Vec<OwnedFd>,
    ) -> Result<Option<(Self, Mechanism)>, StepError> {
        let Some(plan) = &plan.egress else { return Ok(None) };
        let step = "start the egress proxy";
        let files =
            EgressFiles::open(&plan.dir).step("open the sockets and the spool of the egress proxy")?;
        let log = File::options().append(true).create(true).open("guest.log").step("open the guest's log")?;
        let mut proxy = Self {
            plan: plan.clone(),
            files,
            log: log.into(),
            body: body.try_clone_to_owned().step(step)?,
            redirected,
            state: State::Waiting(Instant::now()),
            pause: PAUSE_MIN,
        };
        let StartedProxy { mut process, socket } = proxy.spawn().step(step)?;
        match read_answer(&socket).step(step)? {
            EgressAnswer::Ready { landlock } => {
                process.link = Some(EgressLink::new(socket).step(step)?);
                proxy.state = State::Running(process);
                Ok(Some((proxy, mechanism(landlock))))
            }
            EgressAnswer::Failed { step: at, cause } => {
                Err(StepError::new(step, format!("the egress proxy cannot {at}: {cause}")))
            }
        }
    }

    fn spawn(&self) -> io::Result<StartedProxy> {
        let orders = read_orders(&self.plan.dir)?;
        let (socket, far) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg0(PROGRAM)
            .args((!self.redirected.is_empty()).then_some(TRANSPARENT))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(far)))
            .stdout(Stdio::null())
            .stderr(Stdio::from(self.log.try_clone()?))
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let process =
            ProxyProcess { pid, handle: sys::process::open(pid)?, since: Instant::now(), link: None };
        let told = self.tell(&socket, orders);
        if told.is_err() {
            end(&process);
        }
        told.map(|()| StartedProxy { process, socket })
    }

    fn tell(&self, mut socket: &UnixStream, orders: EgressOrders) -> io::Result<()> {
        self.files.rewind()?;
        let EgressFiles { listener, control, peers, spool } = &self.files;
        for fd in [listener, spool, &self.body, control, peers].into_iter().chain(&self.redirected) {
            sys::fd::send(socket.as_fd(), fd.as_fd())?;
        }
        let bundle = Some(self.plan.dir.join(SHARED).join(CERTIFICATES)).filter(|bundle| bundle.exists());
        let start = EgressStart { orders, key: read_key(&self.plan.key)?, bundle };
        let mut line = serde_json::to_vec(&start)?;
        line.push(b'\n');
        socket.write_all(&line)
    }

    /// The descriptors to poll: one for the proxy's end, and one for its requests for connections.
    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let process = match &self.state {
            State::Running(process) => Some(process),
            State::Waiting(_) => None,
        };
        let link = process.and_then(|process| process.link.as_ref()).map(AsFd::as_fd);
        process.map(|process| process.handle.as_fd()).into_iter().chain(link)
    }

    /// How long until [`EgressProxy::tend`] must be called again if nothing else happens.
    pub fn next_check(&self) -> Option<Duration> {
        match &self.state {
            State::Running(_) => None,
            State::Waiting(until) => Some(until.saturating_duration_since(Instant::now())),
        }
    }

    /// Opens the connections that the proxy asks for, and restarts a proxy that has died, once its pause is over.
    pub fn tend(&mut self) {
        if let State::Running(process) = &mut self.state
            && let Some(link) = &mut process.link
        {
            let connector = PeerConnector { dir: &self.plan.dir, token: self.plan.token.as_deref() };
            if link.answer(&connector).is_err() {
                process.link = None;
            }
        }
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
                Ok(StartedProxy { process, socket }) => {
                    let link = EgressLink::new(socket).ok();
                    self.state = State::Running(ProxyProcess { link, ..process });
                }
                Err(_) => self.wait_a_while(),
            }
        }
    }

    fn wait_a_while(&mut self) {
        self.state = State::Waiting(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(PAUSE_MAX);
    }

    /// Waits until the proxy has ended, and removes its sockets; called after the end of its Body.
    pub fn end(self) {
        if let State::Running(process) = &self.state {
            let mut watched = [PollFd::new(&process.handle, PollFlags::IN)];
            let _ = rustix::event::poll(&mut watched, Some(&END_PATIENCE));
            end(process);
        }
        let _ = std::fs::remove_file(self.plan.dir.join(SHARED).join(SOCKET));
        let _ = std::fs::remove_file(self.plan.dir.join(CONTROL));
        let _ = std::fs::remove_file(self.plan.dir.join(PEERS));
    }
}

fn end(process: &ProxyProcess) {
    let _ = sys::process::signal(process.handle.as_fd(), Signal::KILL);
    let _ = rustix::process::waitpid(Some(process.pid), WaitOptions::empty());
}

impl EgressFiles {
    fn open(dir: &Path) -> io::Result<Self> {
        // Read by a restarted proxy, which gives a name the address that it had.
        let spool = File::options().read(true).append(true).create(true).open(dir.join(SPOOL))?;
        spool.set_permissions(Permissions::from_mode(0o600))?;
        Ok(Self {
            // Programs of the Body connect with ids other than ours.
            listener: listen(&dir.join(SHARED), SOCKET, 0o666)?,
            control: listen(dir, CONTROL, 0o600)?,
            peers: listen(dir, PEERS, 0o600)?,
            spool: spool.into(),
        })
    }

    /// Lets the next proxy read the spool from its beginning: all proxies share one position in it. Lines are appended
    /// wherever it is.
    fn rewind(&self) -> io::Result<()> {
        Ok(rustix::fs::seek(&self.spool, SeekFrom::Start(0)).map(drop)?)
    }
}

/// Opens a listening socket, in place of one that an earlier run of the Body left.
fn listen(dir: &Path, name: &str, mode: u32) -> io::Result<OwnedFd> {
    let path = dir.join(name);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Bound through a descriptor, because a socket's path may have at most 107 bytes.
    let dir = sys::fd::open_path(dir)?;
    let listener = UnixListener::bind(sys::fd::path_of(dir.as_fd()).join(name))?;
    std::fs::set_permissions(&path, Permissions::from_mode(mode))?;
    Ok(listener.into())
}

/// Reads the key of the sealed parts of orders; none where no secret was ever stored.
fn read_key(path: &Path) -> io::Result<Option<String>> {
    match sys::fd::read_small(path, KEY_LEN_MAX) {
        Ok(key) => Ok(Some(key.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_answer(mut socket: &UnixStream) -> io::Result<EgressAnswer> {
    socket.set_read_timeout(Some(ANSWER_PATIENCE))?;
    // Byte by byte, because requests may follow.
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < ANSWER_LEN_MAX && socket.read(&mut byte)? == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    serde_json::from_slice(&line).map_err(|_| io::Error::other("the egress proxy ended without an answer"))
}

fn mechanism(landlock: i64) -> Mechanism {
    let name = "egress process";
    let held = "no new privileges, an allow-list of system calls: no exec, no file opened for writing, no socket but of \
                the Internet; connections to other Bodies come from its supervisor";
    match landlock {
        0 => Mechanism::degraded(name, format!("{held}; this kernel has no Landlock")),
        abi => Mechanism::enforced(
            name,
            format!("{held}; Landlock ABI {abi}: files below the resolver's directories, to read"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use proto::egress::{Flush, MESSAGE_LEN_MAX, ORDERS};

    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("palisade-{name}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join(SHARED)).unwrap();
        dir
    }

    #[test]
    fn the_sockets_of_an_earlier_run_are_replaced() {
        // Longer than the path of a socket may be.
        let dir = scratch(&"long".repeat(30));
        for _ in 0..2 {
            let files = EgressFiles::open(&dir).unwrap();
            for (path, mode) in
                [(dir.join(SHARED).join(SOCKET), 0o666), (dir.join(CONTROL), 0o600), (dir.join(PEERS), 0o600)]
            {
                let found = path.metadata().unwrap();
                assert!(found.file_type().is_socket());
                assert_eq!(found.permissions().mode() & 0o777, mode, "{path:?}");
            }
            File::from(files.spool).write_all(b"one\n").unwrap();
        }
        let files = EgressFiles::open(&dir).unwrap();
        for _ in 0..2 {
            files.rewind().unwrap();
            // As a proxy does, which has a duplicate.
            let mut spool = File::from(files.spool.try_clone().unwrap());
            let mut first = [0; 4];
            spool.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"one\n");
            spool.write_all(b"two\n").unwrap();
        }
        assert_eq!(std::fs::read(dir.join(SPOOL)).unwrap(), b"one\none\ntwo\ntwo\n");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn orders_are_the_newest_and_bounded() {
        let dir = scratch("orders");
        assert_eq!(read_orders(&dir).unwrap_err().kind(), io::ErrorKind::NotFound);
        for generation in 1..3 {
            let orders = EgressOrders::new(Vec::new(), generation, Flush::Kernel);
            sys::fd::write_whole(&dir.join(ORDERS), &serde_json::to_vec_pretty(&orders).unwrap()).unwrap();
            assert_eq!(read_orders(&dir).unwrap(), orders);
        }
        std::fs::write(dir.join(ORDERS), vec![b' '; MESSAGE_LEN_MAX as usize + 1]).unwrap();
        assert_eq!(read_orders(&dir).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
