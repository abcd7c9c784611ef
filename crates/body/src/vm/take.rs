//! Telling a machine that waited for nobody in particular whose it is now.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    time::Duration,
};

use proto::{
    guest::GuestConfig,
    vm::{Answer, Revival, TAKE},
};

use super::{Step, VmError, freeze::reach};

const ANSWER_LEN_MAX: u64 = 1 << 20;
/// It runs, and has little to do.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives the machine of the Body in `body` to whom that is for, and what it proved then.
pub fn take(body: &Path, config: &GuestConfig) -> Result<Revival, VmError> {
    let mut words = vec![TAKE];
    words.extend(serde_json::to_vec(config).map_err(std::io::Error::from).step("tell the machine")?);
    words.push(b'\n');
    let socket = reach(body)?;
    socket.set_read_timeout(Some(PATIENCE)).step("wait for the machine")?;
    (&socket).write_all(&words).step("tell the machine")?;
    let mut line = String::new();
    BufReader::new((&socket).take(ANSWER_LEN_MAX)).read_line(&mut line).step("hear of the machine")?;
    match serde_json::from_str(&line) {
        Ok(Answer::Taken { revival }) if revival.receipt.tree.is_sound() => {
            Ok(Revival { receipt: revival.receipt.tidy(), ..*revival })
        }
        Ok(Answer::Failed { why }) => {
            Err(VmError::Taken(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        _ => Err(VmError::Taken("who minds it gave no answer".into())),
    }
}
