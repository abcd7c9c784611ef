//! Keys and lines that a person types while an agent works.
//!
//! Invariant: the terminal is as it was when the keyboard is dropped, and after `kill -9`.
//! Invariant: standard input is read only while somebody waits for a key or a line, so that an editor gets its own keys.

use std::{io, time::Duration};

use proto::Failure;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::getpgrp,
    stdio,
    termios::{isatty, tcgetpgrp},
};

use crate::terminal::RawTerminal;

/// The longest line that is read.
const LINE_LEN_MAX: usize = 64 << 10;
/// How often the terminal is asked for a key: people do not notice.
const LOOK_EVERY: Duration = Duration::from_millis(30);

/// A person at the terminal.
pub struct Keyboard {
    terminal: RawTerminal,
}

impl Keyboard {
    /// The terminal that standard input is; none if it is none, or another job has it.
    pub fn open() -> Result<Option<Self>, Failure> {
        let stdin = stdio::stdin();
        if !isatty(stdin) || tcgetpgrp(stdin).is_ok_and(|group| group != getpgrp()) {
            return Ok(None);
        }
        Ok(Some(Self { terminal: RawTerminal::enter_keys()? }))
    }

    /// Sets the terminal again after a shell had it.
    pub fn reenter(&self) {
        self.terminal.reenter();
    }

    /// The next key; `None` once the terminal is gone.
    pub async fn key(&self) -> Option<u8> {
        let mut key = [0; 1];
        match self.read(&mut key).await {
            Ok(1) => Some(key[0]),
            _ => None,
        }
    }

    /// A line that the person edits and sees; `None` at its end of input.
    pub async fn line(&self) -> Option<String> {
        self.terminal.leave();
        let line = self.read_line().await;
        self.terminal.reenter();
        line
    }

    /// Leaves the terminal to another program.
    pub fn lend<T>(&self, act: impl FnOnce() -> T) -> T {
        self.terminal.leave();
        let done = act();
        self.terminal.reenter();
        done
    }

    async fn read_line(&self) -> Option<String> {
        let mut line = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let len = self.read(&mut piece).await.ok().filter(|len| *len > 0);
            let Some(len) = len else { return (!line.is_empty()).then(|| text_of(&line)) };
            line.extend_from_slice(&piece[..len]);
            if line.ends_with(b"\n") || line.len() > LINE_LEN_MAX {
                return Some(text_of(&line));
            }
        }
    }

    /// Reads what is there, once there is something. A caller that drops the future loses no key. The descriptor stays
    /// blocking, because other processes share it.
    async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match poll(&mut [PollFd::new(&stdio::stdin(), PollFlags::IN)], Some(&Timespec::default())) {
                Ok(0) => tokio::time::sleep(LOOK_EVERY).await,
                Ok(_) => match rustix::io::read(stdio::stdin(), &mut *buffer) {
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    read => return Ok(read?),
                },
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn text_of(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim_end_matches(['\n', '\r']).to_owned()
}
