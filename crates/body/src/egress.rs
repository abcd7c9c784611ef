//! The directory of a Body's egress proxy: created before the Body starts, removed after its last decision is
//! in the log.
//!
//! ```text
//! events    the spool: lines of decisions, appended by `pal-egress`, which holds a shared lock on it
//! drained   how much of the spool is in the event log; locked by the `pal` that copies lines there
//! shared/   the directory that the Body sees: egress.sock, certificates.pem
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
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{DirBuilderExt, FileExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::{
    BodyId,
    egress::{LINE_LEN_MAX, SHARED, SPOOL, SpoolLine},
};
use rustix::{fs::FlockOperation, io::Errno};
use serde::{Deserialize, Serialize};

/// The directory in the data directory that holds one entry for each Body with an egress policy.
pub const EGRESS: &str = "egress";
/// The certificates that programs of the Body trust.
pub const CERTIFICATES: &str = "certificates.pem";
const DRAINED: &str = "drained";
/// How much of a spool is read at once: well over the longest line, and its events fit into one append.
const READ_LEN: u64 = 64 << 10;
/// How long to wait while another `pal` copies lines into the log.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How long an egress proxy may take to exit after its Body has ended.
const END_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(2);

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

    /// Creates the directory, with a copy of these certificates.
    pub fn prepare(&self, certificates: Option<&Path>) -> io::Result<()> {
        // The Body's ids differ from ours and must be able to read it.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(self.shared())?;
        if let Some(bundle) = certificates {
            let place = self.shared().join(CERTIFICATES);
            fs::copy(bundle, &place)?;
            fs::set_permissions(&place, fs::Permissions::from_mode(0o644))?;
        }
        Ok(())
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
    use std::io::Write;

    use proto::egress::{Decision, DecisionKind};

    use super::*;

    fn line(to: &str) -> (SpoolLine, Vec<u8>) {
        let data = Decision::allowed(to, "a rule names it");
        let line = SpoolLine { kind: DecisionKind::Allowed, at_us: 1, data };
        let mut text = serde_json::to_vec(&line).unwrap();
        text.push(b'\n');
        (line, text)
    }

    #[test]
    fn whole_lines_are_read_once_and_others_are_left_or_skipped() {
        let data = std::env::temp_dir().join(format!("palisade-drain-{}", std::process::id()));
        let body: BodyId = "b1".parse().unwrap();
        let dir = EgressDir::of(&data, &body);
        assert!(dir.drain().unwrap().is_none(), "no spool, no line");
        dir.prepare(None).unwrap();
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
