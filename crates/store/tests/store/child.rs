//! Child processes: this test binary again, with a role in its environment.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
};

use store::{Durability, EventLog, Store};

use crate::scene::{chain, draft};

const ROLE: &str = "PALISADE_STORE_ROLE";
const DIR: &str = "PALISADE_STORE_DIR";
/// The output of a child that has completed its role.
pub const DONE: &str = "role done";
/// The prefix of a child's line about a stored event: a number and a word follow.
pub const ACKNOWLEDGED: &str = "acknowledged ";

/// The environment of a child.
#[derive(Clone, Copy)]
pub enum ChildPlace {
    /// The environment of the test.
    Here,
    /// A user and mount namespace of its own, prepared by this script; `$1` is the data directory.
    Behind(&'static str),
    /// Under `strace`, which records system calls to a file next to the data directory.
    Traced,
}

/// A command that runs this binary in another role: only the test below.
fn command(role: &str, dir: &Path, place: ChildPlace) -> Command {
    let me = env::current_exe().unwrap();
    let mut command = match place {
        ChildPlace::Here => Command::new(&me),
        ChildPlace::Behind(script) => {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-euc"]);
            command.arg(format!("{script}\nshift; exec \"$@\"")).arg("sh").arg(dir).arg(&me);
            command
        }
        ChildPlace::Traced => {
            let mut command = Command::new("strace");
            command.args([
                "-f",
                "-y",
                "-xx",
                "-s",
                "10000000",
                "-e",
                &format!("trace={}", crate::disk::CALLS),
                "-o",
            ]);
            command.arg(dir.with_extension("trace")).arg(&me);
            command
        }
    };
    command.args(["--exact", "child::a_child_plays_its_role", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(DIR, dir);
    command
}

/// Runs a role to its end and checks that it succeeds.
pub fn play(role: &str, dir: &Path, place: ChildPlace) {
    let output = command(role, dir, place).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains(DONE), "{role}: {}\n{out}\n{err}", output.status);
}

/// Runs a role to its end and returns its system calls.
pub fn traced(role: &str, dir: &Path) -> String {
    play(role, dir, ChildPlace::Traced);
    let trace = dir.with_extension("trace");
    let text = std::fs::read_to_string(&trace);
    std::fs::remove_file(&trace).unwrap();
    text.unwrap()
}

/// A process that appends until it is killed, or a given number of times.
pub struct Appender {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Appender {
    pub fn start(role: &str, dir: &Path) -> Self {
        let mut child =
            command(role, dir, ChildPlace::Here).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next event that it reports as stored: position and hash.
    pub fn next(&mut self) -> Option<(u64, String)> {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(event) = acknowledged(&line) {
                return Some(event);
            }
            line.clear();
        }
        None
    }

    /// Kills it and returns the events that it has reported.
    pub fn kill(mut self) -> Vec<(u64, String)> {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        rest.split_inclusive('\n').filter_map(acknowledged).collect()
    }

    /// Waits for its end and returns all events that it has reported.
    pub fn finish(mut self) -> Vec<(u64, String)> {
        let said = std::iter::from_fn(|| self.next()).collect();
        assert!(self.child.wait().unwrap().success());
        said
    }
}

impl Drop for Appender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parses a report; a line that was cut short is none.
fn acknowledged(line: &str) -> Option<(u64, String)> {
    let (_, event) = line.strip_suffix('\n')?.split_once(ACKNOWLEDGED)?;
    let (pos, hash) = event.split_once(' ')?;
    Some((pos.parse().unwrap(), hash.to_owned()))
}

/// Not a test of its own: the children of other tests run this.
#[test]
fn a_child_plays_its_role() {
    let Ok(role) = env::var(ROLE) else { return };
    let dir = env::var_os(DIR).unwrap();
    let dir = Path::new(&dir);
    match role.split_once(' ') {
        Some(("append", how)) => {
            let (durability, times) = how.split_once(' ').unwrap();
            append(&Store::open(dir, durability.parse().unwrap()).unwrap(), times.parse().unwrap());
        }
        Some(("records", part)) => crate::records::play(dir, part),
        Some(("lives", lives)) => crate::power::live(dir, lives),
        _ => crate::trouble::play(&role, dir),
    }
    println!("{DONE}");
}

/// Appends one event, then two at once, then one, and reports each append.
fn append(store: &Store, times: u64) {
    let mut out = std::io::stdout();
    for at in 0..times {
        let drafts = (0..=at % 2).map(draft).collect();
        for event in store.append_at_end(&chain(), drafts).unwrap() {
            out.write_all(format!("\n{ACKNOWLEDGED}{} {}\n", event.pos, event.hash).as_bytes()).unwrap();
        }
    }
}

/// The role that appends forever with this durability.
pub fn forever(durability: Durability) -> String {
    format!("append {durability} {}", u64::MAX)
}
