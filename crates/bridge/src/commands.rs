//! Commands that Palisade itself runs for an agent: checks of phases, and hooks of the user.
//!
//! Invariant: a command runs in the agent's Body, unless the user's own `hooks.toml` says that it runs on the host.
//! Invariant: output and time are bounded; a command that takes too long is ended.

use std::{process::Stdio, sync::Arc, time::Duration};

use brain::agent::{
    BoxFuture,
    middleware::{CheckResult, HookOutput, HookPlace, HookRun, HookRunner, PhaseChecks},
};
use bytes::Bytes;
use fleet::{ExecRequest, OutputChunk, Stdin};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{Workplace, explain, guest_key};

/// The longest output of a command that is kept; the rest is dropped.
const OUTPUT_LEN_MAX: usize = 256 << 10;
/// How long a check may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs the checks and hooks of one agent.
pub struct AgentCommands {
    workplace: Arc<Workplace>,
}

/// The end of a command.
struct HelperCommandEnd {
    code: i32,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl AgentCommands {
    /// Runs commands in the Body of this workplace.
    pub fn new(workplace: Arc<Workplace>) -> Self {
        Self { workplace }
    }

    /// Runs a shell command in the Body. The guest runs each key once.
    async fn run_in_body(
        &self,
        command: &str,
        key: &str,
        input: Option<String>,
        timeout: Duration,
    ) -> Result<HelperCommandEnd, String> {
        let mut request = ExecRequest::new(["/bin/sh", "-c", command]);
        request.workdir = Some(self.workplace.workdir().to_owned());
        request.timeout = Some(timeout);
        request.tag = Some(guest_key(key));
        request.keep = true;
        request.stdin = if input.is_some() { Stdin::Open } else { Stdin::Null };
        let mut exec = self.workplace.start(request).await.map_err(|error| explain(&error.into()))?;
        let control = exec.control();
        let feed = async {
            if let Some(input) = input {
                // A command that does not read its input may end first.
                let _ = control.send(Bytes::from(input)).await;
                let _ = control.close_stdin().await;
            }
        };
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let follow = async {
            while let Some(chunk) = exec.next().await.map_err(|failure| explain(&failure))? {
                match chunk {
                    OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes) => keep(&mut stdout, &bytes),
                    OutputChunk::Stderr(bytes) => keep(&mut stderr, &bytes),
                }
            }
            Ok::<(), String>(())
        };
        let (followed, ()) = tokio::join!(follow, feed);
        followed?;
        let end = exec.finish().await.map_err(|failure| explain(&failure))?;
        if end.timed_out {
            return Err(format!("it took longer than {} s", timeout.as_secs()));
        }
        Ok(HelperCommandEnd { code: end.code, stdout, stderr })
    }
}

impl PhaseChecks for AgentCommands {
    fn run<'a>(&'a self, command: &'a str, key: &'a str) -> BoxFuture<'a, Result<CheckResult, String>> {
        Box::pin(async move {
            let mut end = self.run_in_body(command, key, None, CHECK_TIMEOUT).await?;
            end.stdout.extend_from_slice(&end.stderr);
            let output = String::from_utf8_lossy(&end.stdout).into_owned();
            Ok(CheckResult { exit_code: end.code, output })
        })
    }
}

impl HookRunner for AgentCommands {
    fn run<'a>(&'a self, run: HookRun<'a>) -> BoxFuture<'a, Result<HookOutput, String>> {
        Box::pin(async move {
            let end = match run.place {
                HookPlace::Body => {
                    self.run_in_body(run.command, &run.key, Some(run.input), run.timeout).await?
                }
                HookPlace::Host => run_on_host(run.command, run.input, run.timeout).await?,
            };
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            Ok(HookOutput { exit_code: end.code, stdout: text(end.stdout), stderr: text(end.stderr) })
        })
    }
}

/// Runs a hook of the user on the host, with the rights of the user.
async fn run_on_host(command: &str, input: String, timeout: Duration) -> Result<HelperCommandEnd, String> {
    let cannot = |error: std::io::Error| format!("it cannot run on the host: {error}");
    let mut child = tokio::process::Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(cannot)?;
    let (stdin, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = async {
        if let Some(mut stdin) = stdin {
            let _ = stdin.write_all(input.as_bytes()).await;
        }
    };
    let work = async {
        let (stdout, stderr, ()) = tokio::join!(read_some(out), read_some(err), feed);
        let status = child.wait().await.map_err(cannot)?;
        Ok(HelperCommandEnd { code: status.code().unwrap_or(137), stdout, stderr })
    };
    tokio::time::timeout(timeout, work)
        .await
        .unwrap_or_else(|_| Err(format!("it took longer than {} s", timeout.as_secs())))
}

/// Reads a stream to its end, and keeps its beginning.
async fn read_some(stream: Option<impl AsyncReadExt + Unpin>) -> Vec<u8> {
    let mut kept = Vec::new();
    let Some(mut stream) = stream else { return kept };
    let mut buffer = vec![0; 16 << 10];
    while let Ok(len @ 1..) = stream.read(&mut buffer).await {
        keep(&mut kept, &buffer[..len]);
    }
    kept
}

fn keep(kept: &mut Vec<u8>, bytes: &[u8]) {
    let room = OUTPUT_LEN_MAX.saturating_sub(kept.len());
    kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
}
