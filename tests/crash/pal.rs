//! `pal` as a program: runs to its end, or is killed on the way.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::Value;
use testkit::TemporaryDir;

/// A longer run counts as a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// The output of one run.
#[derive(Debug)]
pub struct PalOutput {
    /// Its exit code; none if it was killed.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// `pal` on a data directory of its own.
pub struct Pal {
    program: PathBuf,
    home: TemporaryDir,
}

impl Pal {
    /// A new data directory.
    pub fn new() -> Self {
        Self { program: program(), home: TemporaryDir::new("crash") }
    }

    /// The path of the data directory.
    pub fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("PAL_DATA", self.data())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, arguments: &[&str]) -> PalOutput {
        let mut child = self.command(arguments).spawn().expect("pal can be run");
        let (pid, (ended, end)) = (child.id(), mpsc::channel());
        let watch = thread::spawn(move || {
            let hangs = end.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout);
            if hangs {
                testkit::kill(pid as i32);
            }
            hangs
        });
        let (mut out, mut err) = (String::new(), Vec::new());
        let mut talk = child.stderr.take().expect("it is piped");
        let talk = thread::spawn(move || talk.read_to_end(&mut err).map(|_| err));
        child.stdout.take().expect("it is piped").read_to_string(&mut out).expect("pal prints text");
        let status = child.wait().expect("a child can be waited for");
        let _ = ended.send(());
        let err = talk.join().expect("reading does not fail").expect("it is a pipe");
        let err = String::from_utf8_lossy(&err).into_owned();
        assert!(!watch.join().expect("watching does not fail"), "pal {arguments:?} hangs: {out}{err}");
        PalOutput { code: status.code(), out, err }
    }

    /// Runs it and asserts success; returns its output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments);
        assert_eq!(said.code, Some(0), "pal {arguments:?}: {}{}", said.out, said.err);
        said.out.trim_end().to_owned()
    }

    /// Runs it and asserts success; returns its output as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).expect("--json prints JSON")
    }

    /// Runs it and asserts success; returns each line of output as JSON.
    pub fn json_lines(&self, arguments: &[&str]) -> Vec<Value> {
        let said = self.ok(arguments);
        said.lines().map(|line| serde_json::from_str(line).expect("--json prints JSON Lines")).collect()
    }

    /// Runs it and kills it after a time, unless it is faster.
    pub fn cut(&self, arguments: &[&str], after: Duration) -> PalOutput {
        let mut child = self.command(arguments).spawn().expect("pal can be run");
        std::thread::sleep(after);
        child.kill().expect("a child that was not waited for is there");
        said(&child.wait_with_output().expect("a child can be waited for"))
    }

    /// Ids and status of the listed Bodies.
    pub fn bodies(&self) -> Vec<(String, String)> {
        let text = |body: &Value, name: &str| body[name].as_str().expect("a Body has it").to_owned();
        self.json_lines(&["ls", "--json"])
            .iter()
            .map(|body| (text(body, "id"), text(body, "status")))
            .collect()
    }

    /// Ids of the listed snapshots.
    pub fn snapshots(&self) -> Vec<String> {
        self.json_lines(&["snapshot", "ls", "--json"])
            .iter()
            .map(|snapshot| snapshot["id"].as_str().expect("an id").to_owned())
            .collect()
    }

    /// The whole log, after it was verified.
    pub fn log(&self) -> Vec<Value> {
        assert_eq!(self.json(&["events", "verify", "--json"])["log"], "whole");
        self.json_lines(&["events", "--json"])
    }
}

fn said(output: &std::process::Output) -> PalOutput {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    PalOutput { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// The path of `pal`: where cargo put it, or as the environment says.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let built = test.ancestors().nth(2).unwrap_or(Path::new("/")).join("pal");
    let found = testkit::user::pal(&built.to_string_lossy());
    assert!(
        found.is_file(),
        "there is no {}: run cargo build -p cli first, or set TESTKIT_PAL",
        found.display()
    );
    found
}
