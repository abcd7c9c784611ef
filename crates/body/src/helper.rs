//! Helpers that are told what to do on their standard input, and do it under other ids.
//!
//! Invariant: a helper is waited for, whatever becomes of what it is told; why it failed is its own word, and not that it
//! no longer listens.

use std::{
    io::{self, Write},
    process::{Command, Stdio},
};

/// Why a helper did not do it.
#[derive(Debug)]
pub(crate) enum HelperError {
    /// It could not be run, or not be told.
    Io(io::Error),
    /// It failed, with these complaints.
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
        // More than a pipe holds, so that it must be read.
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
