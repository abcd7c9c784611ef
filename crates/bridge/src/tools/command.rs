//! Commands in the Body for tools: started, followed, and killed if their call is interrupted.

use std::{sync::Arc, time::Duration};

use fleet::{Exec, ExecRequest, OutputChunk, describe_end};
use proto::{Failure, Kind};
use tokio::runtime::Handle;

use super::{live::LiveOutput, output::OutputExcerpt};
use crate::Workplace;

/// The longest command: the kernel passes no longer argument to a program.
const COMMAND_LEN_MAX: usize = 120 << 10;
/// How long one question about the end of a command waits.
const END_WAIT: Duration = Duration::from_secs(20);
/// The exit code of a command that ran into its timeout.
const TIMED_OUT: i32 = 124;
/// Runs the command in bash if there is one.
const CHOOSE_SHELL: &str = "[ -x /bin/bash ] && exec /bin/bash -c \"$1\"\nexec /bin/sh -c \"$1\"";

/// How a command ended.
#[derive(Debug)]
pub struct FinishedCommand {
    /// Standard output and standard error in the order of their arrival.
    pub output: OutputExcerpt,
    /// The exit code.
    pub code: i32,
    /// Whether it was killed at its timeout.
    pub timed_out: bool,
    /// Whether a process was killed because memory ran out.
    pub out_of_memory: bool,
    /// Why the Body ended before the command, if it did.
    pub body_end: Option<String>,
}

/// The program and the arguments for a shell command; an error is a text for the model.
pub fn shell_argv(command: &str) -> Result<[String; 5], String> {
    if command.trim().is_empty() {
        return Err("Error: Command must be a non-empty string.".to_owned());
    }
    if command.contains('\0') {
        return Err("Error: Command must not contain a NUL character.".to_owned());
    }
    if command.len() > COMMAND_LEN_MAX {
        return Err(format!(
            "Error: Command is longer than {} KiB. Write it to a file with write_file, and run the file.",
            COMMAND_LEN_MAX >> 10
        ));
    }
    Ok(["/bin/sh", "-c", CHOOSE_SHELL, "sh", command].map(str::to_owned))
}

/// Starts a kept command and follows it to its end.
pub async fn follow_command(
    workplace: &Workplace,
    request: ExecRequest,
    tag: &str,
    mut live: LiveOutput,
) -> Result<FinishedCommand, Failure> {
    let mut exec = workplace.start(request).await.map_err(Failure::from)?;
    let mut output = OutputExcerpt::default();
    while let Some(chunk) = exec.next().await? {
        let (OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes) | OutputChunk::Tty(bytes)) = chunk;
        live.push(&bytes);
        if !output.push(&bytes) {
            drop(exec);
            return read_on(workplace, tag, output).await?.ok_or_else(vanished);
        }
    }
    finish(exec, output).await
}

async fn finish(exec: Exec<'_>, output: OutputExcerpt) -> Result<FinishedCommand, Failure> {
    let end = exec.finish().await?;
    Ok(FinishedCommand {
        output,
        code: end.code,
        timed_out: end.timed_out,
        out_of_memory: end.out_of_memory,
        body_end: end.body_end.as_ref().map(describe_end),
    })
}

/// Waits for the end of a kept command, and reads the output that the guest has; `None` if it does not know the command.
pub async fn read_to_end(workplace: &Workplace, tag: &str) -> Result<Option<FinishedCommand>, Failure> {
    read_on(workplace, tag, OutputExcerpt::default()).await
}

/// Waits for the end of a kept command, and adds the newest output to that which is there.
async fn read_on(
    workplace: &Workplace,
    tag: &str,
    mut output: OutputExcerpt,
) -> Result<Option<FinishedCommand>, Failure> {
    // No process reads the output meanwhile: the guest drops what it does not keep.
    let code = loop {
        let Some(news) = workplace.read_kept(tag, u64::MAX, END_WAIT).await? else { return Ok(None) };
        if let Some(code) = news.exit_code {
            break code;
        }
    };
    let mut from = output.head_end();
    loop {
        let Some(piece) = workplace.read_kept(tag, from, Duration::ZERO).await? else { break };
        output.push_at(piece.from, &piece.bytes);
        if piece.exit_code.is_some() || piece.bytes.is_empty() {
            break;
        }
        from = piece.next;
    }
    let timed_out = code == TIMED_OUT;
    Ok(Some(FinishedCommand { output, code, timed_out, out_of_memory: false, body_end: None }))
}

fn vanished() -> Failure {
    Failure::new(Kind::Internal, "the guest has forgotten the command while it ran")
}

/// Kills the command of a call whose future is dropped.
///
/// A driver that is killed drops nothing: its command goes on, and the next driver finds it.
pub struct KillGuard {
    target: Option<(Arc<Workplace>, String)>,
}

impl KillGuard {
    /// Guards the kept command with this tag.
    pub fn new(workplace: &Arc<Workplace>, tag: &str) -> Self {
        Self { target: Some((Arc::clone(workplace), tag.to_owned())) }
    }

    /// Lets the command go on.
    pub fn disarm(mut self) {
        self.target = None;
    }
}

impl Drop for KillGuard {
    fn drop(&mut self) {
        let Some((workplace, tag)) = self.target.take() else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        // A Body that does not answer has its own end; there is no place to report this to.
        runtime.spawn(async move { workplace.kill_kept(&tag).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_no_kernel_takes_are_refused_with_advice() {
        assert!(shell_argv("echo hi").is_ok());
        assert_eq!(shell_argv(" \n").unwrap_err(), "Error: Command must be a non-empty string.");
        assert!(shell_argv("a\0b").unwrap_err().contains("NUL"));
        assert!(shell_argv(&"x".repeat(200 << 10)).unwrap_err().contains("write_file"));
    }
}
