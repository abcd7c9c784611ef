//! Telling a machine that waited for nobody in particular whose it is now.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{io::Write, path::Path, time::Duration};

use proto::{
    guest::GuestConfig,
    vm::{Answer, Revival, TAKE},
};

use super::{
    Step, VmError,
    freeze::{hear, reach},
};

const ANSWER_LEN_MAX: usize = 1 << 20;
/// It runs, and has little to do.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives the machine of the Body in `body` to whom that is for, and what it proved then.
pub fn take(body: &Path, config: &GuestConfig) -> Result<Revival, VmError> {
    let mut words = vec![TAKE];
    words.extend(serde_json::to_vec(config).map_err(std::io::Error::from).step("tell the machine")?);
    words.push(b'\n');
    let socket = reach(body)?;
    (&socket).write_all(&words).step("tell the machine")?;
    match serde_json::from_slice(&hear(&socket, ANSWER_LEN_MAX, PATIENCE).step("hear of the machine")?) {
        Ok(Answer::Taken { revival }) if revival.receipt.tree.is_sound() => {
            Ok(Revival { receipt: revival.receipt.tidy(), ..*revival })
        }
        Ok(Answer::Failed { why }) => {
            Err(VmError::Taken(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        _ => Err(VmError::Taken("who minds it gave no answer".into())),
    }
}
