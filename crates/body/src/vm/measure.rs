//! What a machine uses, asked of who minds it over the socket in its directory.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use proto::vm::{Answer, CONTROL, MEASURE, Metrics};

const ANSWER_LEN_MAX: u64 = 64 << 10;
/// One that is busy with something else is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);

/// Measures the machine of the Body in `body`.
pub fn measure(body: &Path) -> io::Result<Metrics> {
    let dir = sys::fd::open_path(body)?;
    let socket = UnixStream::connect(sys::fd::path_of(dir.as_fd()).join(CONTROL))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    (&socket).write_all(&[MEASURE])?;
    let mut line = String::new();
    BufReader::new((&socket).take(ANSWER_LEN_MAX)).read_line(&mut line)?;
    match serde_json::from_str(&line)? {
        Answer::Measured { metrics } => Ok(metrics.tidy()),
        Answer::Failed { why } => {
            Err(io::Error::other(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        Answer::Saved { .. } | Answer::Taken { .. } => Err(io::ErrorKind::InvalidData.into()),
    }
}
