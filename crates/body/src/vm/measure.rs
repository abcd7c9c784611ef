//! Metrics and console output of a microVM: asks its VMM process over the control socket in the Body's
//! directory.
//!
//! Trust: the reply comes from a process inside the sandbox boundary. It is one line with a length limit and
//! a deadline, parsed into a `proto` type.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use proto::vm::{CONSOLE, ControlReply, MEASURE, VmMetrics};

use super::freeze::{connect_control, read_reply};

const ANSWER_LEN_MAX: usize = 64 << 10;
/// A VMM process that is busy is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Measures the microVM of the Body in `body`.
pub fn measure(body: &Path) -> io::Result<VmMetrics> {
    match ask(body, MEASURE)? {
        ControlReply::Measured { metrics } => Ok(metrics.bounded()),
        answer => Err(refused(answer)),
    }
}

/// The last lines on the console of the microVM of the Body in `body`.
pub fn console(body: &Path) -> io::Result<Vec<String>> {
    match ask(body, CONSOLE)? {
        ControlReply::Console { lines } => Ok(lines.iter().map(|line| proto::text::visible(line)).collect()),
        answer => Err(refused(answer)),
    }
}

fn ask(body: &Path, what: u8) -> io::Result<ControlReply> {
    let socket = connect_control(body).map_err(io::Error::other)?;
    (&socket).write_all(&[what])?;
    Ok(serde_json::from_slice(&read_reply(&socket, ANSWER_LEN_MAX, PATIENCE)?)?)
}

fn refused(answer: ControlReply) -> io::Error {
    match answer {
        ControlReply::Failed { why } => {
            io::Error::other(proto::text::visible(&why.chars().take(400).collect::<String>()))
        }
        _ => io::ErrorKind::InvalidData.into(),
    }
}
