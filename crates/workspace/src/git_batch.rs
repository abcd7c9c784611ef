//! A git that answers questions for as long as it is asked, and not longer than it may.
//!
//! Trust: what it reads may be a Body's, so it has little memory, and is ended when its time is over.

use std::{
    io::{self, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::mpsc,
    thread::JoinHandle,
    time::Duration,
};

use rustix::process::{Pid, Signal};

use crate::git::{self, Git, GitError};

/// A question that surely fits into a pipe.
const SHORT_LEN: usize = 4096;

/// Somebody who answers.
#[derive(Debug)]
pub struct GitBatch {
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    over: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<()>>,
}

impl GitBatch {
    /// Starts it; all its answers together may take so long.
    pub fn start(git: &Git, args: &[&str], time_max: Duration) -> Result<Self, GitError> {
        let mut command = git.command(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(GitError::Missing)?;
        git::limit_resources(&child);
        let (questions, answers) =
            (child.stdin.take(), child.stdout.take().ok_or(GitError::Answer("questions"))?);
        let (over, heard) = mpsc::channel::<()>();
        let handle = i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .and_then(|pid| sys::process::open(pid).ok());
        let watchdog = std::thread::spawn(move || {
            if let (Err(mpsc::RecvTimeoutError::Timeout), Some(handle)) =
                (heard.recv_timeout(time_max), &handle)
            {
                let _ = sys::process::signal(std::os::fd::AsFd::as_fd(handle), Signal::KILL);
            }
        });
        Ok(Self {
            child,
            questions,
            answers: BufReader::new(answers),
            over: Some(over),
            watchdog: Some(watchdog),
        })
    }

    /// Asks, and hears the answer.
    pub fn ask<T: Send>(
        &mut self,
        question: &[u8],
        hear: impl FnOnce(&mut BufReader<ChildStdout>) -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(pipe) = self.questions.as_mut() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let answers = &mut self.answers;
        if question.len() <= SHORT_LEN {
            pipe.write_all(question).and_then(|()| pipe.flush())?;
            return hear(answers);
        }
        // Whoever answers while it is being asked must not have to wait for us.
        std::thread::scope(|scope| {
            scope.spawn(move || drop(pipe.write_all(question).and_then(|()| pipe.flush())));
            hear(answers)
        })
    }
}

impl Drop for GitBatch {
    fn drop(&mut self) {
        drop(self.questions.take());
        drop(self.over.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.watchdog.take().map(JoinHandle::join);
    }
}
