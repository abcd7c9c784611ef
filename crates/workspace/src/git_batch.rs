//! A long-lived git that answers many requests over its stdin and stdout, with a limit on its total time.
//!
//! Trust: it may read objects that a Body made, so its memory is limited and a watchdog kills it at its time
//! limit.

use std::{
    io::{self, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::mpsc,
    thread::JoinHandle,
    time::Duration,
};

use rustix::process::{Pid, Signal};

use crate::git::{self, Git, GitError};

/// A request up to this length surely fits into the pipe's buffer.
const SHORT_LEN: usize = 4096;

/// A running git in a batch mode.
#[derive(Debug)]
pub struct GitBatch {
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    over: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<()>>,
}

impl GitBatch {
    /// Starts git; `time_max` limits its whole run time.
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

    /// Sends a request and reads its answer with `hear`.
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
        // git may answer before it has read the whole request. Writing from a second thread avoids a deadlock
        // on two full pipes.
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
