//! What a machine uses, asked of who minds it over the socket in its directory.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use proto::vm::{Answer, MEASURE, Metrics};

use super::freeze::{hear, reach};

const ANSWER_LEN_MAX: usize = 64 << 10;
/// One that is busy with something else is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);

/// Measures the machine of the Body in `body`.
pub fn measure(body: &Path) -> io::Result<Metrics> {
    let socket = reach(body).map_err(io::Error::other)?;
    (&socket).write_all(&[MEASURE])?;
    match serde_json::from_slice(&hear(&socket, ANSWER_LEN_MAX, PATIENCE)?)? {
        Answer::Measured { metrics } => Ok(metrics.tidy()),
        Answer::Failed { why } => {
            Err(io::Error::other(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        Answer::Saved { .. } | Answer::Taken { .. } => Err(io::ErrorKind::InvalidData.into()),
    }
}
