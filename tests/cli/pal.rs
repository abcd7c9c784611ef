//! `pal` with a data directory for one test.

use std::{
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use testkit::{TemporaryDir, leaks, wait};

/// The environment of one test.
pub struct Pal {
    dir: TemporaryDir,
}

/// The output of one `pal`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PalOutput {
    pub code: i32,
    pub out: String,
    pub talk: String,
}

/// The path of `pal`.
pub fn program() -> PathBuf {
    testkit::user::pal(env!("CARGO_BIN_EXE_pal"))
}

/// Runs a test, removes its Bodies, and checks that nothing is left.
pub fn check(test: impl FnOnce(&Pal)) {
    let _turn = leaks::turn();
    leaks::watch();
    let pal = Pal { dir: TemporaryDir::new("cli") };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        test(&pal);
        pal.clear();
    }));
    if let Err(panic) = outcome {
        leaks::end(&leaks::descendants());
        leaks::reap();
        let _ = std::fs::remove_dir_all(&*pal.dir);
        std::mem::forget(pal);
        std::panic::resume_unwind(panic);
    }
}

impl Pal {
    /// A `pal` command with this data directory and without the environment of the tests.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(program());
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", &*self.dir)
            .env("PAL_DATA", self.data());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Runs it to its end.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> PalOutput {
        said(self.command(args).output().unwrap())
    }

    /// Runs the words of a line, split at blanks.
    pub fn line(&self, line: &str) -> PalOutput {
        self.run(line.split_whitespace())
    }

    /// The output of a command that succeeds and prints no message.
    #[track_caller]
    pub fn ok(&self, line: &str) -> String {
        let said = self.line(line);
        assert_eq!((said.code, said.talk.as_str()), (0, ""), "pal {line}\n{}", said.out);
        said.out.trim_end().to_owned()
    }

    /// Every event, oldest first, as `pal events --json` prints them, without the seals: those come by the clock.
    pub fn events(&self) -> Vec<serde_json::Value> {
        let shown = self.ok("events --json");
        let events = shown.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        events.filter(|event| event["type"] != "log.sealed").collect()
    }

    /// Runs it with standard input.
    pub fn feed<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>, input: &[u8]) -> Output {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_owned();
        let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        output
    }

    /// Ids of all Bodies with a directory.
    pub fn bodies(&self) -> Vec<String> {
        leaks::entries(&self.data().join("bodies"))
    }

    /// Waits until a Body runs, and returns its id.
    pub fn running(&self) -> String {
        let look = || {
            self.bodies()
                .into_iter()
                .find(|body| self.data().join("bodies").join(body).join("run.json").exists())
        };
        wait::blocking(Duration::from_secs(10), "a Body runs", look)
    }

    /// Asserts that everything of the Bodies is gone, or goes within five seconds.
    pub fn nothing_left(&self, ids: &[String]) {
        let data = self.data();
        let left = || {
            let places = ["bodies", "snapshots", "ids"].map(|place| leaks::entries(&data.join(place)));
            let processes = leaks::descendants().iter().map(|process| format!("{process:?}")).collect();
            [places.concat(), leaks::mounts(&self.dir), leaks::cgroups(ids), processes].concat()
        };
        let patience = std::time::Instant::now() + Duration::from_secs(5);
        while !left().is_empty() && std::time::Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
            leaks::reap();
        }
        assert_eq!(left(), Vec::<String>::new(), "left behind");
    }

    fn clear(&self) {
        if !self.data().exists() {
            return;
        }
        let ids = self.bodies();
        for body in &ids {
            let said = self.run(["rm", "--force", body]);
            // A directory that is no longer a Body is removed by itself, or found below.
            assert!([0, 121].contains(&said.code), "{said:?}");
        }
        let kept: Vec<String> = leaks::entries(&self.data().join("snapshots"));
        if !kept.is_empty() {
            panic!("a test removes its snapshots: {kept:?}");
        }
        self.nothing_left(&ids);
        let verdict = self.line("events verify");
        assert_eq!(verdict.code, 0, "{verdict:?}");
    }
}

pub fn said(output: Output) -> PalOutput {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    PalOutput { code: code(output.status), out: text(&output.stdout), talk: text(&output.stderr) }
}

fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 1000 + status.signal().unwrap_or(0))
}

/// Reads lines of a child's output until one contains `word`.
pub fn await_word(child: &mut Child, word: &str) -> String {
    use std::io::Read;
    let out = child.stdout.as_mut().unwrap();
    let mut text = Vec::new();
    let mut byte = [0; 1];
    while !String::from_utf8_lossy(&text).contains(word) {
        assert_eq!(
            out.read(&mut byte).unwrap(),
            1,
            "it ended before it said {word:?}: {:?}",
            String::from_utf8_lossy(&text)
        );
        text.push(byte[0]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Sends a signal to a child of ours.
pub fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

/// Turns a function into two tests.
macro_rules! cli_test {
    ($(#[doc = $doc:literal])* fn $name:ident($pal:ident) $body:block) => {
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            fn test($pal: &crate::pal::Pal) $body

            #[test]
            fn as_is() {
                crate::pal::check(test);
            }

            #[test]
            fn as_user() {
                crate::pal::program();
                testkit::run_as_user(concat!(module_path!(), "::as_is"));
            }
        }
    };
}
pub(crate) use cli_test;
