//! Telling a machine that waited for nobody in particular whose it is now.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{io::Write, path::Path, time::Duration};

use proto::{
    guest::GuestConfig,
    vm::{ControlReply, StartReport, TAKE},
};

use super::{
    VmError, VmStepExt,
    freeze::{connect_control, read_reply},
};

const ANSWER_LEN_MAX: usize = 1 << 20;
/// It runs, and has little to do.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives the machine of the Body in `body` to whom that is for, and what it proved then.
pub fn assign(body: &Path, config: &GuestConfig) -> Result<StartReport, VmError> {
    let mut words = vec![TAKE];
    words.extend(serde_json::to_vec(config).map_err(std::io::Error::from).step("tell the machine")?);
    words.push(b'\n');
    let socket = connect_control(body)?;
    (&socket).write_all(&words).step("tell the machine")?;
    match serde_json::from_slice(&read_reply(&socket, ANSWER_LEN_MAX, PATIENCE).step("hear of the machine")?)
    {
        Ok(ControlReply::Taken { revival }) if revival.receipt.tree.is_sound() => {
            Ok(StartReport { receipt: revival.receipt.bounded(), ..*revival })
        }
        Ok(ControlReply::Failed { why }) => {
            Err(VmError::Taken(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        _ => Err(VmError::Taken("who minds it gave no answer".into())),
    }
}
