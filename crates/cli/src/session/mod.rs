//! One command in one Body, joined to our own input, output, signals and terminal.
//!
//! Invariant: nothing of ours is read before the command has started, so a failed start eats no input.
//! Invariant: however a session ends, the terminal is as it was.

mod hands;
mod signals;
mod stdin;
mod wire;

use std::time::Duration;

use fleet::{Control, Ended, Exec, ExecRequest, Fleet, Output};
use proto::{BodyId, Failure, Kind, launch::End};
use tokio::time::timeout;

pub use hands::Impatience;
pub use signals::Signals;
pub use wire::Wire;

use crate::{
    failure,
    output::{Format, Stream},
    terminal::Raw,
};

const SIGPIPE: i32 = 13;
const SIGKILL: i32 = 9;
/// How long a command has to end after it lost its reader or its terminal.
const WIND_DOWN: Duration = Duration::from_secs(1);

const OUT_OF_MEMORY: &str = "the kernel killed processes of the Body, which was out of memory";

/// How a session ended.
pub enum Outcome {
    /// The command ended.
    Ended(Ended),
    /// A signal to us ended the session.
    Stopped(i32),
}

impl Outcome {
    /// The exit code that stands for it, as a shell would give it.
    pub fn exit_code(&self, format: Format) -> Result<u8, Failure> {
        match self {
            Outcome::Ended(ended) => judge(ended, format),
            Outcome::Stopped(signal) => Ok(stopped_code(*signal)),
        }
    }
}

/// The exit code of a `pal` that a signal ended.
pub fn stopped_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// What becomes of the command's output, and of our impatience.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// As JSON, output is only in the events.
    pub format: Format,
    /// What a second interrupt does.
    pub impatience: Impatience,
    /// What becomes of the Body when the command ends.
    pub body: After,
}

/// What becomes of a Body when its command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// It stays.
    Stays,
    /// It goes.
    Goes,
}

/// Starts a command that `wire` was applied to; `started` hears of it before anything else happens.
pub async fn attend(
    fleet: &Fleet,
    body: &BodyId,
    request: ExecRequest,
    wire: Wire,
    signals: &mut Signals,
    manner: Manner,
    started: impl AsyncFnOnce() -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    let raw = match wire {
        Wire::Terminal => Some(Raw::enter()?),
        Wire::Open | Wire::Null => None,
    };
    let mut exec = fleet.exec(body, request).await?;
    let control = exec.control();
    let flow = match started().await {
        Err(failure) => Flow::SinkBroken(failure),
        Ok(()) => tokio::select! {
            biased;
            flow = drain(&mut exec, manner.format) => flow,
            signal = hands::join(&control, wire, signals, raw.as_ref(), manner.impatience) => Flow::Stopped(signal),
        },
    };
    drop(raw);
    conclude(exec, &control, flow, manner.body).await
}

/// Why nothing flows any more.
enum Flow {
    Ended,
    Stopped(i32),
    /// The guest does not speak as it should.
    GuestBroken(Failure),
    /// We cannot pass output on.
    SinkBroken(Failure),
}

async fn conclude(
    mut exec: Exec<'_>,
    control: &Control,
    flow: Flow,
    body: After,
) -> Result<Outcome, Failure> {
    match flow {
        Flow::Ended if body == After::Goes => exec.finish_last().await.map(Outcome::Ended),
        Flow::Ended => exec.finish().await.map(Outcome::Ended),
        Flow::GuestBroken(failure) => Err(failure),
        Flow::Stopped(signal) => {
            if wind_down(&mut exec).await {
                exec.finish().await?;
            }
            Ok(Outcome::Stopped(signal))
        }
        Flow::SinkBroken(failure) => {
            // As the kernel does to a writer without a reader; who ignores that is killed.
            for signal in [SIGPIPE, SIGKILL] {
                let sent = timeout(WIND_DOWN, control.signal(signal)).await;
                if matches!(sent, Ok(Ok(()))) && wind_down(&mut exec).await {
                    exec.finish().await?;
                    break;
                }
            }
            Err(failure)
        }
    }
}

async fn drain(exec: &mut Exec<'_>, format: Format) -> Flow {
    let (mut stdout, mut stderr) = (Stream::stdout(), Stream::stderr());
    loop {
        let (sink, bytes) = match exec.next().await {
            Ok(Some(Output::Stdout(bytes) | Output::Tty(bytes))) => (&mut stdout, bytes),
            Ok(Some(Output::Stderr(bytes))) => (&mut stderr, bytes),
            Ok(None) => return Flow::Ended,
            Err(failure) => return Flow::GuestBroken(failure),
        };
        if format == Format::Text
            && let Err(failure) = sink.write(&bytes).await
        {
            return Flow::SinkBroken(failure);
        }
    }
}

/// Waits a little for the end, unheard; says whether it came.
async fn wind_down(exec: &mut Exec<'_>) -> bool {
    let end = async { while let Ok(Some(_)) = exec.next().await {} };
    timeout(WIND_DOWN, end).await.is_ok()
}

/// The command's own end is its exit code; an end that was done to it is a failure.
fn judge(ended: &Ended, format: Format) -> Result<u8, Failure> {
    if ended.timed_out {
        return Err(Failure::new(Kind::Limit, "the command was killed at its timeout")
            .hint("give it longer: `--timeout 10m`"));
    }
    match &ended.body_end {
        // The command may have lived on, so its code stands; but nobody should have to guess.
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

fn body_ended(end: &End) -> Failure {
    let limit = |why: &str, hint: &str| {
        Failure::new(Kind::Limit, format!("the Body ended under the command: {why}")).hint(hint)
    };
    let other = |kind, why: String| {
        Failure::new(kind, format!("the Body ended under the command: {why}"))
            .hint("`pal events` shows what happened")
    };
    match end {
        End::Oom => limit("it was out of memory", "give it more: `--memory 2GiB`"),
        End::Timeout => limit("its time was over", "give it longer: `--timeout 10m`"),
        End::Disk => limit("its files grew over their limit", "give it more: `--disk 2GiB`"),
        End::Exit { code } if proto::vm::EXITS.iter().any(|(known, _)| known == code) => {
            other(Kind::Conflict, fleet::describe(end))
        }
        End::Exit { code } => {
            other(Kind::Conflict, format!("its guest ended with {code}, as when it is stopped"))
        }
        End::Killed { signal } => other(Kind::Conflict, format!("its guest was killed by signal {signal}")),
        End::Owner => other(Kind::Conflict, "the `pal` that made it ended".into()),
        End::Unknown => other(Kind::Host, "it is gone without a trace".into()),
    }
}
