//! Attaches one command in a Body to our input, output, signals and terminal.
//!
//! Invariant: standard input is read only after the command has started, so that a failed start consumes none
//! of it.
//! Invariant: however a session ends, the terminal is restored.

mod input;
pub mod signals;
mod stdin;
mod stdio;

use std::time::Duration;

use fleet::{Exec, ExecControl, ExecEnd, ExecRequest, Fleet, OutputChunk};
use proto::{BodyId, Failure, Kind, launch::GuestEnd};
use tokio::time::timeout;

pub use input::SecondInterrupt;
pub use signals::StopSignals;
pub use stdio::StdioMode;

use crate::{
    failure,
    output::{Format, OutputStream},
    terminal::RawTerminal,
};

const SIGPIPE: i32 = 13;
const SIGKILL: i32 = 9;
/// How long a command has to end after it lost its reader or its terminal.
const WIND_DOWN: Duration = Duration::from_secs(1);

const OUT_OF_MEMORY: &str = "the kernel killed processes of the Body, because it was out of memory";

/// How a session ended.
pub enum SessionOutcome {
    /// The command ended.
    Ended(ExecEnd),
    /// A signal to `pal` ended the session.
    Stopped(i32),
}

impl SessionOutcome {
    /// The exit code, as a shell would set it.
    pub fn exit_code(&self, format: Format) -> Result<u8, Failure> {
        match self {
            SessionOutcome::Ended(ended) => exit_code_of(ended, format),
            SessionOutcome::Stopped(signal) => Ok(stopped_code(*signal)),
        }
    }
}

/// The exit code of a `pal` that a signal ended.
pub fn stopped_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// The options of a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionOptions {
    /// The output format; with JSON, output is only in the events.
    pub format: Format,
    /// The effect of a second interrupt.
    pub impatience: SecondInterrupt,
    /// Whether the Body ends with the command.
    pub body: BodyLifetime,
}

/// Whether a Body ends with its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLifetime {
    /// It stays.
    OutlivesCommand,
    /// It ends.
    EndsWithCommand,
}

/// Starts a command prepared by `wire`, and calls `started` before it forwards anything.
pub async fn run_attached(
    fleet: &Fleet,
    body: &BodyId,
    request: ExecRequest,
    wire: StdioMode,
    signals: &mut StopSignals,
    manner: SessionOptions,
    started: impl AsyncFnOnce() -> Result<(), Failure>,
) -> Result<SessionOutcome, Failure> {
    let raw = match wire {
        StdioMode::Terminal => Some(RawTerminal::enter()?),
        StdioMode::Open | StdioMode::Null => None,
    };
    let mut exec = fleet.execs().start(body, request).await?;
    let control = exec.control();
    let flow = match started().await {
        Err(failure) => FlowEnd::SinkBroken(failure),
        Ok(()) => tokio::select! {
            biased;
            flow = copy_output(&mut exec, manner.format) => flow,
            signal = input::join(&control, wire, signals, raw.as_ref(), manner.impatience) => FlowEnd::Stopped(signal),
        },
    };
    drop(raw);
    finish_session(exec, &control, flow, manner.body).await
}

/// Why a session stopped forwarding.
enum FlowEnd {
    Ended,
    Stopped(i32),
    /// The guest broke the protocol.
    GuestBroken(Failure),
    /// Writing the output failed.
    SinkBroken(Failure),
}

async fn finish_session(
    mut exec: Exec<'_>,
    control: &ExecControl,
    flow: FlowEnd,
    body: BodyLifetime,
) -> Result<SessionOutcome, Failure> {
    match flow {
        FlowEnd::Ended if body == BodyLifetime::EndsWithCommand => {
            exec.finish_last().await.map(SessionOutcome::Ended)
        }
        FlowEnd::Ended => exec.finish().await.map(SessionOutcome::Ended),
        FlowEnd::GuestBroken(failure) => Err(failure),
        FlowEnd::Stopped(signal) => {
            if wait_end(&mut exec).await {
                exec.finish().await?;
            }
            Ok(SessionOutcome::Stopped(signal))
        }
        FlowEnd::SinkBroken(failure) => {
            // A writer without a reader gets SIGPIPE from the kernel, so does the command; if it ignores
            // that, it is killed.
            for signal in [SIGPIPE, SIGKILL] {
                let sent = timeout(WIND_DOWN, control.signal(signal)).await;
                if matches!(sent, Ok(Ok(()))) && wait_end(&mut exec).await {
                    exec.finish().await?;
                    break;
                }
            }
            Err(failure)
        }
    }
}

async fn copy_output(exec: &mut Exec<'_>, format: Format) -> FlowEnd {
    let (mut stdout, mut stderr) = (OutputStream::stdout(), OutputStream::stderr());
    loop {
        let (sink, bytes) = match exec.next().await {
            Ok(Some(OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes))) => (&mut stdout, bytes),
            Ok(Some(OutputChunk::Stderr(bytes))) => (&mut stderr, bytes),
            Ok(None) => return FlowEnd::Ended,
            Err(failure) => return FlowEnd::GuestBroken(failure),
        };
        if format == Format::Text
            && let Err(failure) = sink.write(&bytes).await
        {
            return FlowEnd::SinkBroken(failure);
        }
    }
}

/// Waits briefly for the end and drops output; returns whether it came.
async fn wait_end(exec: &mut Exec<'_>) -> bool {
    let end = async { while let Ok(Some(_)) = exec.next().await {} };
    timeout(WIND_DOWN, end).await.is_ok()
}

/// The exit code of a command that ended by itself; a failure if a limit or the end of the Body ended it.
fn exit_code_of(ended: &ExecEnd, format: Format) -> Result<u8, Failure> {
    if ended.timed_out {
        return Err(Failure::new(Kind::Limit, "the command was killed at its timeout")
            .hint("give it longer: `--timeout 10m`"));
    }
    match &ended.body_end {
        // The command may have survived, so its exit code stays; the warning explains a strange one.
        None if ended.out_of_memory => {
            failure::warn(
                &Failure::new(Kind::Limit, OUT_OF_MEMORY).hint("give it more: `--memory 2GiB`"),
                format,
            );
            Ok(ended.code.to_le_bytes()[0])
        }
        None => Ok(ended.code.to_le_bytes()[0]),
        Some(end) => Err(body_ended(end)),
    }
}

fn body_ended(end: &GuestEnd) -> Failure {
    let limit = |why: &str, hint: &str| {
        Failure::new(Kind::Limit, format!("the Body ended while the command ran: {why}")).hint(hint)
    };
    let other = |kind, why: String| {
        Failure::new(kind, format!("the Body ended while the command ran: {why}"))
            .hint("`pal events` shows what happened")
    };
    match end {
        GuestEnd::Oom => limit("it was out of memory", "give it more: `--memory 2GiB`"),
        GuestEnd::Timeout => limit("it reached its time limit", "give it longer: `--timeout 10m`"),
        GuestEnd::Disk => limit("its files exceeded the disk limit", "give it more: `--disk 2GiB`"),
        GuestEnd::Inodes => limit("it exceeded its inode limit", "allow more: `--inodes 100000`"),
        GuestEnd::Exit { code } if proto::vm::EXITS.iter().any(|(known, _)| known == code) => {
            other(Kind::Conflict, fleet::describe_end(end))
        }
        GuestEnd::Exit { code } => {
            other(Kind::Conflict, format!("its guest exited with code {code}, as after a stop"))
        }
        GuestEnd::Killed { signal } => {
            other(Kind::Conflict, format!("its guest was killed by signal {signal}"))
        }
        GuestEnd::Owner => other(Kind::Conflict, "the `pal` that created it ended".into()),
        GuestEnd::Unknown => {
            other(Kind::Host, "the cause is unknown, because its supervisor was killed, too".into())
        }
    }
}
