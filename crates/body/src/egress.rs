//! The directory of a Body's egress proxy: created before the Body starts, removed after its last decision is
//! in the log.
//!
//! ```text
//! events    the spool: lines of decisions, appended by `pal-egress`, which holds a shared lock on it
//! policy.json   the newest orders, which the supervisor gives to each `pal-egress` that it starts
//! control.sock  the socket on which `pal-egress` takes new orders from `pal`
//! drained   how much of the spool is in the event log; locked by the `pal` that copies lines there
//! shared/   the directory that the Body sees: egress.sock, certificates.pem, certificates.p12
//! ```
//! The directory is next to the Body's directory and not in it: the decisions of a `pal run` that was killed
//! outlive the Body, and a reader of the log finds every spool without reading every Body's directory.
//!
//! Invariant: each line gets into the event log once. Its event names the end of the line in the spool, so a
//! line is not appended again after a `pal` was killed between the append and its note in `drained`.
//! Trust: the lines come from a process that parses input of a Body; the reader parses each line before it
//! uses it.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::AsFd,
        unix::{
            fs::{DirBuilderExt, FileExt, PermissionsExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::{
    BodyId, Mechanism, Spec,
    egress::{
        CONTROL, EgressControl, EgressOrders, EgressReply, JAVA_CERTIFICATES, LINE_LEN_MAX, MESSAGE_LEN_MAX,
        ORDERS, SHARED, SPOOL, SpoolLine, java_trust_store,
    },
};
use rustix::{fs::FlockOperation, io::Errno};
use serde::{Deserialize, Serialize};

/// The directory in the data directory that holds one entry for each Body with an egress policy.
pub const EGRESS: &str = "egress";
/// The certificates that programs of the Body trust, in the part that it sees.
pub use proto::egress::CERTIFICATES;
const DRAINED: &str = "drained";
/// How much of a spool is read at once: well over the longest line, and its events fit into one append.
const READ_LEN: u64 = 64 << 10;
/// How long to wait while another `pal` copies lines into the log.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How long an egress proxy may take to exit after its Body has ended.
const END_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long the supervisor may take to restart an egress proxy that `pal` wants to talk to.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const CONNECT_EVERY: Duration = Duration::from_millis(20);
/// How long an egress proxy may take to answer a control message.
const REPLY_PATIENCE: Duration = Duration::from_secs(10);
/// The number of rules that an enforcement record names.
const RULES_SHOWN: usize = 5;

/// The directory of one Body's egress proxy.
#[derive(Debug, Clone)]
pub struct EgressDir {
    path: PathBuf,
}

/// How much of a spool is in the event log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Bytes of the spool.
    pub spool: u64,
    /// A position in the event log: events of earlier lines that this does not count come after it.
    #[serde(alias = "seq")]
    pub pos: u64,
}

impl EgressDir {
    /// The directory of a Body, whether it exists or not.
    pub fn of(data: &Path, body: &BodyId) -> Self {
        Self { path: data.join(EGRESS).join(body.as_str()) }
    }

    /// Ids of all Bodies that have one.
    pub fn bodies(data: &Path) -> Vec<BodyId> {
        let entries = fs::read_dir(data.join(EGRESS)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The subdirectory that the Body sees.
    pub fn shared(&self) -> PathBuf {
        self.path.join(SHARED)
    }

    /// Creates the directory, with a copy of these certificates and the Body's own root certificate behind them.
    pub fn prepare(&self, certificates: Option<&Path>, root: &str) -> io::Result<()> {
        // The Body's ids differ from ours and must be able to read it.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(self.shared())?;
        if let Some(bundle) = certificates {
            let mut trusted = fs::read(bundle)?;
            trusted.extend_from_slice(b"\n");
            trusted.extend_from_slice(root.as_bytes());
            let for_java = java_trust_store(&String::from_utf8_lossy(&trusted));
            for (name, contents) in [(CERTIFICATES, trusted), (JAVA_CERTIFICATES, for_java)] {
                let place = self.shared().join(name);
                sys::fd::write_whole(&place, &contents)?;
                fs::set_permissions(&place, fs::Permissions::from_mode(0o644))?;
            }
        }
        Ok(())
    }

    /// Replaces the orders of the Body's egress proxy. A reader sees the old or the new ones.
    pub fn write_orders(&self, orders: &EgressOrders) -> io::Result<()> {
        sys::fd::write_whole(&self.path.join(ORDERS), &serde_json::to_vec(orders)?)
    }

    /// Whether an egress proxy was prepared for the Body's current or next start.
    pub fn has_orders(&self) -> bool {
        self.path.join(ORDERS).exists()
    }

    /// Sends a message to the running egress proxy, and reads its answer. Waits a few seconds for a proxy that its
    /// supervisor restarts.
    pub fn ask(&self, message: &EgressControl) -> io::Result<EgressReply> {
        let socket = self.connect()?;
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        socket.set_write_timeout(Some(REPLY_PATIENCE))?;
        (&socket).write_all(&line)?;
        let reply = read_line(&socket, Instant::now() + REPLY_PATIENCE)?;
        serde_json::from_slice(&reply).map_err(|_| io::Error::other("the egress proxy gave no answer"))
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let deadline = Instant::now() + CONNECT_PATIENCE;
        // The path goes through a descriptor, because a socket's path may have at most 107 bytes.
        let dir = sys::fd::open_path(&self.path)?;
        let path = sys::fd::path_of(dir.as_fd()).join(CONTROL);
        loop {
            let waits = |error: &io::Error| {
                matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
            };
            match UnixStream::connect(&path) {
                Err(error) if waits(&error) && Instant::now() < deadline => std::thread::sleep(CONNECT_EVERY),
                connected => return connected,
            }
        }
    }

    /// Waits until the egress proxy has exited, so that no line follows.
    pub fn wait_ended(&self) -> io::Result<()> {
        match File::open(self.path.join(SPOOL)) {
            Ok(spool) => lock(&spool, END_PATIENCE),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Locks the spool to copy its lines into the log; none if all lines are there.
    pub fn drain(&self) -> io::Result<Option<Drain>> {
        let spool = match File::open(self.path.join(SPOOL)) {
            Ok(spool) => spool,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let drained = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path.join(DRAINED))?;
        if read_position(&drained)?.spool == spool.metadata()?.len() {
            return Ok(None);
        }
        lock(&drained, DRAIN_PATIENCE)?;
        let position = read_position(&drained)?;
        Ok(Some(Drain { spool, drained, position }))
    }

    /// Removes the directory.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// A locked spool, while the caller copies its lines into the event log.
#[derive(Debug)]
pub struct Drain {
    spool: File,
    drained: File,
    position: Position,
}

/// Some lines of a spool.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    /// Each decision, with the end of its line in the spool.
    pub lines: Vec<(u64, SpoolLine)>,
    /// The position at which the next batch begins.
    pub end: u64,
}

impl Drain {
    /// The last noted position; the log may hold more.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The whole lines after a position in the spool, as many as one read gets; none at its end.
    pub fn read(&mut self, from: u64) -> io::Result<Option<Batch>> {
        self.spool.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        (&self.spool).take(READ_LEN).read_to_end(&mut bytes)?;
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => &bytes[..=last],
            // No process of ours writes such a line, and waiting for its end could take forever.
            None if bytes.len() as u64 == READ_LEN => &bytes[..],
            None => return Ok(None),
        };
        let mut end = from;
        let mut lines = Vec::new();
        for line in whole.split_inclusive(|byte| *byte == b'\n') {
            end += line.len() as u64;
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            lines.extend(
                (line.len() <= LINE_LEN_MAX)
                    .then(|| SpoolLine::parse(line))
                    .flatten()
                    .map(|line| (end, line)),
            );
        }
        Ok(Some(Batch { lines, end }))
    }

    /// Notes how much is in the log.
    pub fn note(&mut self, position: Position) -> io::Result<()> {
        let text = serde_json::to_vec(&position)?;
        self.drained.set_len(0)?;
        self.drained.write_all_at(&text, 0)?;
        self.position = position;
        Ok(())
    }
}

/// Reads a line of bounded length, until a deadline.
fn read_line(mut socket: &UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut chunk = [0; 4096];
    while !line.contains(&b'\n') && (line.len() as u64) < MESSAGE_LEN_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut chunk)? {
            0 => break,
            len => line.extend_from_slice(&chunk[..len]),
        }
    }
    Ok(line)
}

/// The entry of the enforcement record about a Body's policy; none without one.
pub fn policy_record(spec: &Spec) -> Option<Mechanism> {
    let rules = spec.egress.as_ref()?.all_rules();
    let shown: Vec<String> = rules.iter().take(RULES_SHOWN).map(|rule| rule.shown()).collect();
    let more = match rules.len().saturating_sub(RULES_SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let rules = if shown.is_empty() { "no rule: nothing is allowed".to_owned() } else { shown.join(", ") };
    let text = format!(
        "a process of the host connects it to what its policy allows, and records each decision before it forwards \
         a byte; the policy at its start: {rules}{more}"
    );
    Some(Mechanism::degraded("egress proxy", text))
}

/// Reads the noted position. A note that was cut short is ignored; then the log itself shows how much it has.
fn read_position(drained: &File) -> io::Result<Position> {
    let mut text = [0; 128];
    let len = drained.read_at(&mut text, 0)?;
    Ok(serde_json::from_slice(&text[..len]).unwrap_or_default())
}

fn lock(file: &File, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Err(Errno::WOULDBLOCK) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use proto::egress::{Decision, DecisionKind, EgressRule, Flush};

    use super::*;

    fn line(to: &str) -> (SpoolLine, Vec<u8>) {
        let data = Decision::allowed(to, "a rule names it");
        let line = SpoolLine { kind: DecisionKind::Allowed, at_us: 1, data };
        let mut text = serde_json::to_vec(&line).unwrap();
        text.push(b'\n');
        (line, text)
    }

    #[test]
    fn a_control_message_is_answered_also_while_the_proxy_restarts() {
        let top = std::env::temp_dir().join(format!("palisade-control-{}", std::process::id()));
        let dir = EgressDir::of(&top.join("long/".repeat(24)), &"b1".parse().unwrap());
        dir.prepare(None, "").unwrap();
        assert!(dir.path().join(CONTROL).as_os_str().len() > 107 && !dir.has_orders());
        let rules = vec![EgressRule::allow("pypi.org:443")];
        let orders = EgressOrders::new(rules, 2, Flush::Kernel);
        dir.write_orders(&orders).unwrap();
        assert!(dir.has_orders());
        let server = dir.clone();
        let proxy = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let shared = sys::fd::open_path(server.path()).unwrap();
            let listener = UnixListener::bind(sys::fd::path_of(shared.as_fd()).join(CONTROL)).unwrap();
            let (socket, _) = listener.accept().unwrap();
            let asked = read_line(&socket, Instant::now() + REPLY_PATIENCE).unwrap();
            let reply = EgressReply::State { generation: 2, open: 1, closed: 3 };
            (&socket).write_all(&serde_json::to_vec(&reply).unwrap()).unwrap();
            serde_json::from_slice::<EgressControl>(&asked).unwrap()
        });
        let asked = EgressControl::Replace(Box::new(orders.clone()));
        assert_eq!(dir.ask(&asked).unwrap(), EgressReply::State { generation: 2, open: 1, closed: 3 });
        assert_eq!(proxy.join().unwrap(), asked);
        let stored: EgressOrders =
            serde_json::from_slice(&fs::read(dir.path().join(ORDERS)).unwrap()).unwrap();
        assert_eq!(stored, orders);
        fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn whole_lines_are_read_once_and_others_are_left_or_skipped() {
        let data = std::env::temp_dir().join(format!("palisade-drain-{}", std::process::id()));
        let body: BodyId = "b1".parse().unwrap();
        let dir = EgressDir::of(&data, &body);
        assert!(dir.drain().unwrap().is_none(), "no spool, no line");
        dir.prepare(None, "").unwrap();
        let mut spool = File::options().append(true).create(true).open(dir.path().join(SPOOL)).unwrap();
        let ((one, first), (two, second)) = (line("a.test:443"), line("b.test:443"));
        spool.write_all(b"\n").unwrap();
        spool.write_all(&first).unwrap();
        spool.write_all(b"{\"kind\":\"body.removed\"}\n").unwrap();
        spool.write_all(&second[..20]).unwrap();
        let mut drain = dir.drain().unwrap().unwrap();
        assert_eq!(drain.position(), Position::default());
        let batch = drain.read(0).unwrap().unwrap();
        assert_eq!(batch.lines, [(1 + first.len() as u64, one)]);
        assert!(drain.read(batch.end).unwrap().is_none(), "half a line is none");
        drain.note(Position { spool: batch.end, pos: 7 }).unwrap();
        drop(drain);
        spool.write_all(&second[20..]).unwrap();
        let mut drain = dir.drain().unwrap().unwrap();
        assert_eq!(drain.position(), Position { spool: batch.end, pos: 7 });
        let batch = drain.read(batch.end).unwrap().unwrap();
        assert_eq!(batch.lines.into_iter().map(|(_, line)| line).collect::<Vec<_>>(), [two]);
        drain.note(Position { spool: batch.end, pos: 8 }).unwrap();
        drop(drain);
        assert!(dir.drain().unwrap().is_none(), "all is in the log");
        assert_eq!(EgressDir::bodies(&data), [body]);
        dir.wait_ended().unwrap();
        dir.remove().unwrap();
        fs::remove_dir_all(data).unwrap();
    }
}
