//! The spool of decisions: one line for each, written before a byte is forwarded.
//!
//! The first decision about a target is a line; repetitions of it are counted, and the count is a line at the end.
//!
//! Invariant: [`Journal::record`] returns `Ok` only if the whole line of the decision is in the file.
//! Invariant: the length of the file is limited, so a Body cannot fill the host's disk with names.
//! Direction of failure: a decision that cannot be written is an error, and the caller refuses the connection. Counts
//! may be lost, because the decision that they count is recorded.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, Read, Write},
    net::IpAddr,
    time::{SystemTime, UNIX_EPOCH},
};

use proto::egress::{Decision, DecisionKind, Flush, LINE_LEN_MAX, SpoolLine, WAITS};

/// Most different targets that one process allows; further ones are refused.
const ALLOWED_MAX: usize = 4096;
/// Most different refusals with a line of their own; further ones are counted together.
const DENIED_MAX: usize = 1024;
/// Longest spool: beyond it no connection is allowed.
const SPOOL_LEN_MAX: u64 = 64 << 20;

/// The decisions of one process.
pub struct Journal {
    file: File,
    flush: Flush,
    /// How often each decision was made.
    made: HashMap<Decision, u64>,
    /// How many of them are refusals.
    denied: usize,
    /// Whether the last line in the file may be incomplete.
    torn: bool,
}

impl Journal {
    /// Continues a spool that is open for appending.
    pub fn new(file: File, flush: Flush) -> Self {
        // An earlier process that was killed may have left an incomplete line.
        Self { file, flush, made: HashMap::new(), denied: 0, torn: true }
    }

    /// Records a decision. After an error it is not recorded, and must not take effect.
    pub fn record(&mut self, decision: Decision) -> io::Result<()> {
        let decision = if !decision.allowed && self.denied >= DENIED_MAX && !self.made.contains_key(&decision)
        {
            Decision::denied("?", "further targets, which are counted together")
        } else {
            decision
        };
        if let Some(count) = self.made.get_mut(&decision) {
            *count += 1;
            return Ok(());
        }
        if decision.allowed && self.made.len() - self.denied >= ALLOWED_MAX {
            return Err(io::Error::other(format!("the limit of {ALLOWED_MAX} different targets is reached")));
        }
        let kind = if decision.allowed { DecisionKind::Allowed } else { DecisionKind::Denied };
        self.append(kind, &decision)?;
        self.denied += usize::from(!decision.allowed);
        self.made.insert(decision, 1);
        Ok(())
    }

    /// Records a decision that allows something, also if it was made before. After an error it must not take effect.
    pub fn record_each(&mut self, decision: &Decision) -> io::Result<()> {
        self.append(DecisionKind::Allowed, decision)
    }

    /// Records the address that stands for a name from now on.
    pub fn record_name(&mut self, name: &str, address: IpAddr) -> io::Result<()> {
        self.append(DecisionKind::Named, &Decision::named(name, address))
    }

    /// Records that a connection waits for a decision.
    pub fn record_question(&mut self, to: &str, rule: &str) -> io::Result<()> {
        self.append(DecisionKind::Asked, &Decision::denied(to, &format!("the rule `{rule}` {WAITS}")))
    }

    /// Records what a rule has spent of its budget.
    pub fn record_spent(&mut self, spent: &Decision) -> io::Result<()> {
        self.append(DecisionKind::Spent, spent)
    }

    /// Changes when further decisions count as recorded.
    pub fn set_flush(&mut self, flush: Flush) {
        self.flush = flush;
    }

    /// Writes the count of each decision that was made more than once.
    pub fn finish(&mut self) -> io::Result<()> {
        for (decision, count) in std::mem::take(&mut self.made).into_iter().filter(|(_, count)| *count > 1) {
            self.append(DecisionKind::Counted, &Decision { count: Some(count), ..decision })?;
        }
        Ok(())
    }

    fn append(&mut self, kind: DecisionKind, data: &Decision) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = SpoolLine { kind, at_us: now.as_micros() as u64, data: data.clone() };
        let mut text = Vec::new();
        if self.torn {
            text.push(b'\n');
        }
        serde_json::to_writer(&mut text, &line)?;
        text.push(b'\n');
        if self.file.metadata()?.len() + text.len() as u64 > SPOOL_LEN_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.torn = true;
        self.file.write_all(&text)?;
        self.torn = false;
        match self.flush {
            Flush::Kernel => Ok(()),
            Flush::Disk => self.file.sync_data(),
        }
    }
}

/// Reads the lines of a spool.
pub fn read_lines(spool: impl Read, mut take: impl FnMut(SpoolLine)) -> io::Result<()> {
    let mut spool = io::BufReader::new(spool);
    let mut line = Vec::new();
    loop {
        line.clear();
        let len = (&mut spool).take(LINE_LEN_MAX as u64 + 1).read_until(b'\n', &mut line)?;
        if len == 0 {
            return Ok(());
        }
        // The rest of a line that is too long is a line of its own, and none that could be parsed.
        if let Some(line) = SpoolLine::parse(line.trim_ascii_end()) {
            take(line);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::io::Seek;

    use super::*;

    /// An unlinked spool file.
    pub fn spool() -> File {
        let place = std::env::temp_dir().join(format!(
            "palisade-spool-{}-{}",
            std::process::id(),
            proto::event::hex(&sys::random::bytes::<4>().unwrap())
        ));
        let file = File::options().read(true).append(true).create_new(true).open(&place).unwrap();
        std::fs::remove_file(place).unwrap();
        file
    }

    /// The decisions in a spool.
    pub fn lines(mut file: &File) -> Vec<SpoolLine> {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text.lines().filter_map(|line| SpoolLine::parse(line.as_bytes())).collect()
    }

    fn shown(lines: &[SpoolLine]) -> Vec<(&'static str, &str, Option<u64>)> {
        lines.iter().map(|line| (line.kind.event(), line.data.to.as_str(), line.data.count)).collect()
    }

    #[test]
    fn a_decision_is_a_line_once_and_a_count_at_the_end() {
        let file = spool();
        let mut journal = Journal::new(file.try_clone().unwrap(), Flush::Disk);
        for _ in 0..3 {
            journal.record(Decision::allowed("a.test:443", "a rule names it")).unwrap();
        }
        journal.record(Decision::denied("b.test:443", "no rule names it")).unwrap();
        let before = [("network.allowed", "a.test:443", None), ("network.denied", "b.test:443", None)];
        assert_eq!(shown(&lines(&file)), before);
        journal.finish().unwrap();
        assert_eq!(shown(&lines(&file))[2..], [("network.counted", "a.test:443", Some(3))]);
    }

    #[test]
    fn a_part_of_a_line_takes_none_of_the_next_along() {
        let file = spool();
        (&file).write_all(br#"{"kind":"network.allow"#).unwrap();
        let mut journal = Journal::new(file.try_clone().unwrap(), Flush::Kernel);
        journal.record(Decision::allowed("a.test:443", "a rule names it")).unwrap();
        assert_eq!(shown(&lines(&file)), [("network.allowed", "a.test:443", None)]);
    }

    #[test]
    fn a_full_disk_and_a_full_spool_are_errors() {
        let full = File::options().append(true).open("/dev/full").unwrap();
        let mut journal = Journal::new(full, Flush::Kernel);
        let allowed = || Decision::allowed("a.test:443", "a rule names it");
        for _ in 0..2 {
            assert!(
                journal.record(allowed()).is_err(),
                "a decision that was not written is never a known one"
            );
        }
        let file = spool();
        file.set_len(SPOOL_LEN_MAX).unwrap();
        assert!(Journal::new(file, Flush::Kernel).record(allowed()).is_err());
    }

    #[test]
    fn a_flood_of_names_has_an_end() {
        let file = spool();
        let mut journal = Journal::new(file.try_clone().unwrap(), Flush::Kernel);
        for number in 0..2 * DENIED_MAX {
            journal.record(Decision::denied(&format!("{number}.test:443"), "no rule names it")).unwrap();
        }
        assert_eq!(lines(&file).len(), DENIED_MAX + 1);
        for number in 0..ALLOWED_MAX {
            journal.record(Decision::allowed(&format!("{number}.test:443"), "a rule names it")).unwrap();
        }
        assert!(journal.record(Decision::allowed("more.test:443", "a rule names it")).is_err());
        assert!(journal.record(Decision::allowed("0.test:443", "a rule names it")).is_ok());
    }
}
