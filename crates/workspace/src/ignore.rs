//! Which untracked files are ignored: git's own `check-ignore`, asked about names in a tree of ours.
//!
//! Trust: patterns are a Body's. Some take long to match, so whoever answers is ended when the time is over.

use std::{
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::mpsc,
    thread::JoinHandle,
    time::Duration,
};

use rustix::process::{Pid, Signal};

use crate::{
    error::{During, WorkspaceError},
    git::{Git, GitError},
};

/// How long all answers together may take.
const TIME_MAX: Duration = Duration::from_secs(120);
/// A question that surely fits into a pipe.
const SHORT_LEN: usize = 4096;

/// Somebody who knows.
#[derive(Debug)]
pub struct Ignore {
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    over: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<()>>,
}

impl Ignore {
    /// Starts it for the tree that `git` has its files in.
    pub fn start(git: &Git) -> Result<Self, WorkspaceError> {
        let mut command = git.command(["check-ignore", "-z", "--stdin", "--verbose", "--non-matching", "--no-index"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map_err(GitError::Missing)?;
        let (questions, answers) = (child.stdin.take(), child.stdout.take().ok_or(GitError::Answer("check-ignore"))?);
        let (over, heard) = mpsc::channel::<()>();
        let handle = i32::try_from(child.id()).ok().and_then(Pid::from_raw).and_then(|pid| sys::process::open(pid).ok());
        let watchdog = std::thread::spawn(move || {
            if let (Err(mpsc::RecvTimeoutError::Timeout), Some(handle)) = (heard.recv_timeout(TIME_MAX), &handle) {
                let _ = sys::process::signal(std::os::fd::AsFd::as_fd(handle), Signal::KILL);
            }
        });
        Ok(Self { child, questions, answers: BufReader::new(answers), over: Some(over), watchdog: Some(watchdog) })
    }

    /// For each path, whether it is ignored.
    pub fn ask(&mut self, paths: &[Vec<u8>]) -> Result<Vec<bool>, WorkspaceError> {
        // Behind `./` a name is a name, whatever it begins with.
        let question: Vec<u8> = paths.iter().flat_map(|path| b"./".iter().chain(path).copied().chain([0])).collect();
        let Some(pipe) = self.questions.as_mut() else { return Err(GitError::Answer("check-ignore").into()) };
        let answers = &mut self.answers;
        if question.len() <= SHORT_LEN {
            pipe.write_all(&question).and_then(|()| pipe.flush()).during("ask what is ignored")?;
            return read(answers, paths.len()).during("hear what is ignored");
        }
        std::thread::scope(|scope| {
            scope.spawn(move || drop(pipe.write_all(&question).and_then(|()| pipe.flush())));
            read(answers, paths.len()).during("hear what is ignored")
        })
    }
}

/// Each answer is a source, a line, a pattern and the path; the first three are empty where nothing fits.
fn read(answers: &mut impl BufRead, count: usize) -> io::Result<Vec<bool>> {
    let mut field = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        answers.read_until(0, &mut bytes)?;
        bytes.pop().map(|_| bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    };
    (0..count)
        .map(|_| {
            let (source, _line, pattern, _path) = (field()?, field()?, field()?, field()?);
            Ok(!source.is_empty() && !pattern.starts_with(b"!"))
        })
        .collect()
}

impl Drop for Ignore {
    fn drop(&mut self) {
        drop(self.questions.take());
        drop(self.over.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.watchdog.take().map(JoinHandle::join);
    }
}
