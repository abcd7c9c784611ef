//! Writes results to standard output and messages to standard error.
//!
//! Invariant: a failed write of results is a failure; a failed write of messages is ignored.
//! Invariant: if the reader of a pipe is gone, `pal` prints no error and ends like other tools in a pipe.

use std::{error::Error, ffi::OsString, fmt, os::fd::BorrowedFd, time::Duration};

use proto::{Failure, Kind};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::FileType,
    io::Errno,
    stdio,
};
use serde::Serialize;

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Format {
    /// Guesses the format of arguments that cannot be parsed.
    pub fn guess(argv: &[OsString]) -> Self {
        let asked = argv.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json");
        if asked { Format::Json } else { Format::Text }
    }
}

/// The cause of a failed write to a pipe without a reader.
#[derive(Debug)]
struct BrokenOutput;

impl fmt::Display for BrokenOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader has gone")
    }
}

impl Error for BrokenOutput {}

/// Whether a failure only means that the reader of standard output is gone.
pub fn is_reader_gone(failure: &Failure) -> bool {
    failure.source.as_ref().is_some_and(|source| source.is::<BrokenOutput>())
}

/// Writes bytes to standard output.
pub fn data(bytes: &[u8]) -> Result<(), Failure> {
    write_all(stdio::stdout(), bytes).map_err(|errno| cannot_write("standard output", errno))
}

/// Writes a line to standard output.
pub fn line(text: impl fmt::Display) -> Result<(), Failure> {
    data(format!("{text}\n").as_bytes())
}

/// Writes an object as one line of JSON, escaped for a terminal.
pub fn json(object: &impl Serialize) -> Result<(), Failure> {
    line(json_line(object)?)
}

/// Writes each item of a list as one line of JSON; an empty list writes nothing.
pub fn json_lines(items: impl IntoIterator<Item = impl Serialize>) -> Result<(), Failure> {
    let mut lines = String::new();
    for item in items {
        lines.push_str(&json_line(&item)?);
        lines.push('\n');
    }
    data(lines.as_bytes())
}

/// Encodes a line; every line is an object: docs/reference/json.md.
fn json_line(object: &impl Serialize) -> Result<String, Failure> {
    let internal = || Failure::new(Kind::Internal, "cannot write the answer as JSON");
    let text = serde_json::to_string(object).map_err(|error| internal().because(error))?;
    if !text.starts_with('{') {
        return Err(internal().because("the answer is not an object"));
    }
    Ok(proto::text::visible_json(&text).to_string())
}

/// Bytes as JSON: `{"text": …}`, or `{"hex": …}` if they are not UTF-8.
pub fn text_or_hex(bytes: &[u8]) -> serde_json::Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => serde_json::json!({ "text": text }),
        Err(_) => serde_json::json!({ "hex": proto::event::hex(bytes) }),
    }
}

/// Writes a message to standard error, with a line end.
pub fn talk(text: &str) {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    // There is no place to report a failed write to standard error.
    let _ = write_all(stdio::stderr(), format!("{text}{end}").as_bytes());
}

/// Overwrites the last line of a terminal.
pub fn draw(text: &str) {
    let _ = write_all(stdio::stderr(), text.as_bytes());
}

fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another process made the shared file description non-blocking.
            Err(Errno::AGAIN) => {
                wait_writable(fd, None);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn cannot_write(what: &str, errno: Errno) -> Failure {
    let failure = Failure::new(Kind::Host, format!("cannot write to {what}"));
    match errno {
        Errno::PIPE => failure.because(BrokenOutput),
        errno => failure.because(std::io::Error::from(errno)),
    }
}

fn wait_writable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> bool {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(ready) if ready > 0)
}

/// How many bytes a writable pipe accepts without blocking.
const PIPE_LEN: usize = 4096;
/// How long a slow reader may block the session.
const STALL: Duration = Duration::from_millis(20);

/// Standard output or standard error, for the bytes of a command.
pub struct OutputStream {
    fd: BorrowedFd<'static>,
    name: &'static str,
    len_max: usize,
}

impl OutputStream {
    /// Standard output.
    pub fn stdout() -> Self {
        Self::of(stdio::stdout(), "standard output")
    }

    /// Standard error.
    pub fn stderr() -> Self {
        Self::of(stdio::stderr(), "standard error")
    }

    fn of(fd: BorrowedFd<'static>, name: &'static str) -> Self {
        Self { fd, name, len_max: 0 }
    }

    /// Writes bytes unchanged.
    ///
    /// A slow reader blocks the command (that is backpressure), but not the signals for it: a write starts
    /// only when it will not block.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        if self.len_max == 0 {
            self.len_max = len_max(self.fd);
        }
        while !bytes.is_empty() {
            if self.len_max == PIPE_LEN && !wait_writable(self.fd, Some(Duration::ZERO)) {
                while !wait_writable(self.fd, Some(STALL)) {
                    tokio::task::yield_now().await;
                }
            }
            let (piece, rest) = bytes.split_at(bytes.len().min(self.len_max));
            write_all(self.fd, piece).map_err(|errno| cannot_write(self.name, errno))?;
            bytes = rest;
        }
        Ok(())
    }
}

fn len_max(fd: BorrowedFd<'_>) -> usize {
    match rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::RegularFile) => usize::MAX,
        _ => PIPE_LEN,
    }
}
