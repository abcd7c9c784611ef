//! Assigns a pooled microVM to a Body.
//!
//! Trust: the reply comes from a process inside the sandbox boundary. It is one line with a length limit and
//! a deadline, parsed into a `proto` type.

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
/// The microVM already runs, and has little to do.
const PATIENCE: Duration = Duration::from_secs(10);

/// Assigns the microVM in the directory `body` to the Body of this configuration; returns its start report.
pub fn assign(body: &Path, config: &GuestConfig) -> Result<StartReport, VmError> {
    let mut words = vec![TAKE];
    words.extend(
        serde_json::to_vec(config)
            .map_err(std::io::Error::from)
            .step("send the microVM its configuration")?,
    );
    words.push(b'\n');
    let socket = connect_control(body)?;
    (&socket).write_all(&words).step("send the microVM its configuration")?;
    match serde_json::from_slice(
        &read_reply(&socket, ANSWER_LEN_MAX, PATIENCE).step("read the reply of the VMM process")?,
    ) {
        Ok(ControlReply::Taken { revival }) if revival.receipt.tree.is_sound() => {
            Ok(StartReport { receipt: revival.receipt.bounded(), ..*revival })
        }
        Ok(ControlReply::Failed { why }) => {
            Err(VmError::Taken(proto::text::visible(&why.chars().take(400).collect::<String>())))
        }
        _ => Err(VmError::Taken("its VMM process sent an invalid reply".into())),
    }
}
