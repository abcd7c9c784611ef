//! Input of a process: its standard input or its terminal.
//!
//! Invariant: writes to one process never interleave; when a caller leaves, its write stops.

use std::{io, os::fd::OwnedFd, rc::Rc};

use proto::wire::process::{ProcessInput, process_input, pty::Size};
use rustix::termios::Winsize;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Mutex,
};

use super::GuestProcess;
use crate::connect::{Code, ConnectError};

/// The guest's end of a process's input.
#[derive(Debug)]
pub enum StdinHandle {
    /// A pipe, until it is closed; `None` if the process never had one.
    Pipe(Mutex<Option<AsyncFd<OwnedFd>>>),
    /// A terminal.
    Terminal { master: Rc<AsyncFd<OwnedFd>>, turn: Mutex<()> },
}

impl StdinHandle {
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }
}

impl GuestProcess {
    /// Writes all of the input, waiting while the process does not read.
    pub async fn write(&self, input: Option<ProcessInput>) -> Result<(), ConnectError> {
        use process_input::Input::{Pty, Stdin};
        match (input.and_then(|input| input.input), &self.input) {
            (None, _) => Err(ConnectError::new(Code::Unimplemented, "no input is given")),
            (Some(Stdin(_)), StdinHandle::Terminal { .. }) => {
                Err(failed("tty assigned to process — input should be written to the pty, not the stdin"))
            }
            (Some(Pty(_)), StdinHandle::Pipe(_)) => {
                Err(failed("tty not assigned to process — input should be written to the stdin, not the tty"))
            }
            (Some(Pty(bytes)), StdinHandle::Terminal { master, turn }) => {
                let _turn = turn.lock().await;
                write_all(master, &bytes)
                    .await
                    .map_err(|error| failed(&format!("error writing to tty: {error}")))
            }
            (Some(Stdin(bytes)), StdinHandle::Pipe(pipe)) => {
                let pipe = pipe.lock().await;
                let pipe = pipe
                    .as_ref()
                    .ok_or_else(|| failed("error writing to stdin: stdin not enabled or closed"))?;
                write_all(pipe, &bytes)
                    .await
                    .map_err(|error| failed(&format!("error writing to stdin: {error}")))
            }
        }
    }

    /// Closes standard input; the process then reads end of file.
    pub async fn close_stdin(&self) -> Result<(), ConnectError> {
        match &self.input {
            StdinHandle::Terminal { .. } => Err(ConnectError::new(
                Code::FailedPrecondition,
                "cannot close stdin for PTY process — send Ctrl+D (0x04) instead",
            )),
            StdinHandle::Pipe(pipe) => {
                drop(pipe.lock().await.take());
                Ok(())
            }
        }
    }

    /// Changes the size of the terminal.
    pub fn resize(&self, size: Size) -> Result<(), ConnectError> {
        check_size(size)?;
        match &self.input {
            StdinHandle::Pipe(_) => Err(failed("error resizing tty: tty not assigned to process")),
            StdinHandle::Terminal { master, .. } => {
                rustix::termios::tcsetwinsize(master.get_ref(), window(size))
                    .map_err(|error| failed(&format!("error resizing tty: {error}")))
            }
        }
    }
}

/// Checks that a terminal has at least one cell and at most as many as the kernel can count.
pub fn check_size(size: Size) -> Result<(), ConnectError> {
    let fits = |cells: u32| (1..=u32::from(u16::MAX)).contains(&cells);
    if fits(size.cols) && fits(size.rows) {
        Ok(())
    } else {
        Err(ConnectError::invalid(format!(
            "a terminal of {} columns and {} rows cannot be made",
            size.cols, size.rows
        )))
    }
}

/// Converts a size into the kernel's form.
pub fn window(size: Size) -> Winsize {
    let limit = |cells: u32| u16::try_from(cells).unwrap_or(u16::MAX);
    Winsize { ws_row: limit(size.rows), ws_col: limit(size.cols), ws_xpixel: 0, ws_ypixel: 0 }
}

async fn write_all(fd: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = fd.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?)).await?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

fn failed(message: &str) -> ConnectError {
    ConnectError::internal(message)
}
