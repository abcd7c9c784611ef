//! Helper processes that read their task from standard input and work under other ids.
//!
//! Invariant: the caller waits for a helper even if it could not send the whole task; the helper's own
//! message explains a failure better than a broken pipe.

use std::{
    io::{self, Write},
    process::{Command, Stdio},
};

/// Why a helper failed.
#[derive(Debug)]
pub(crate) enum HelperError {
    /// The helper could not be started, or the task not be sent.
    Io(io::Error),
    /// The helper failed with these messages.
    Failed(Vec<u8>),
}

/// Runs a helper to its end.
pub(crate) fn run(command: &mut Command, order: &[u8]) -> Result<(), HelperError> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(HelperError::Io)?;
    let told = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(order));
    let output = child.wait_with_output().map_err(HelperError::Io)?;
    if !output.status.success() {
        return Err(HelperError::Failed(output.stderr));
    }
    told.map_err(HelperError::Io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<(), HelperError> {
        // The input exceeds a pipe's capacity, so the child must read it.
        run(Command::new("sh").args(["-c", script]), &vec![b'x'; 1 << 20])
    }

    #[test]
    fn one_that_fails_before_it_listens_says_why() {
        let failed = shell("exec <&-; echo no ids >&2; exit 1");
        assert!(matches!(&failed, Err(HelperError::Failed(said)) if said == b"no ids\n"), "{failed:?}");
        let deaf = shell("exit 0");
        assert!(
            matches!(&deaf, Err(HelperError::Io(error)) if error.kind() == io::ErrorKind::BrokenPipe),
            "{deaf:?}"
        );
        shell("cat >/dev/null").unwrap();
    }
}
