//! Operations on files of a Body, as agents make them.
//!
//! The guest carries them out with the rights of the Body's user. Nothing leaves the Body, so the Body's log has no
//! event of them, as it has none of an upload through the API; an agent's own log has its calls.
//!
//! Invariant: an operation that changes files is sent once. It may be repeated by the caller if it has a key.
//! Trust: answers come from the guest and are parsed with a limit.

use body::{driver::Capability, guest::GuestError};
use proto::{
    BodyId, Failure,
    file_call::{CONTENT_LEN_MAX, FileAnswer, FileCall, FileError},
};

use crate::{BodyFiles, blocking::run_blocking, failures};

impl BodyFiles<'_> {
    /// Carries out one operation on files of a running Body.
    pub async fn call(&self, id: &BodyId, call: &FileCall) -> Result<FileAnswer, Failure> {
        let len = call.operation.content_len();
        if len > CONTENT_LEN_MAX {
            // The guest would say so too, if the message reached it.
            let reason = FileError::TooLarge { len: len as u64 };
            return Ok(FileAnswer::Error { reason, path: String::new() });
        }
        let execs = self.fleet.execs();
        let target = run_blocking(|| self.fleet.exec_target(id))?;
        let (_, mut connection) = execs.reach_guest(id, target.running).await?;
        let answer = match connection.file_call(call).await {
            Ok(answer) => answer,
            Err(GuestError::Refused { code, .. }) if code == "404" => {
                return Err(failures::old_guest(id, "work on files for agents"));
            }
            Err(error) => return Err(execs.guest_failure(id, error).await),
        };
        // A memory snapshot would restore an open connection in every copy, so such a layer keeps none open.
        let driver = self.fleet.drivers.get(target.layer)?;
        if !driver.capabilities().contains(Capability::MemorySnapshots) {
            execs.connections.keep(id, connection);
        }
        Ok(answer)
    }
}
