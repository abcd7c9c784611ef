//! Forwards input, signals and the terminal size to the command.

use std::{
    convert::Infallible,
    future::pending,
    time::{Duration, Instant},
};

use fleet::ExecControl;
use proto::Failure;
use tokio::time::timeout;

use super::{
    SIGKILL, StdioMode, StopSignals,
    signals::{SIGHUP, SIGINT, listen_to},
    stdin,
};
use crate::terminal::{self, RawTerminal};

/// The effect of a second interrupt within [`IMPATIENT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondInterrupt {
    /// Ends the session, and so the Body.
    Ends,
    /// Goes to the command, as the first one did.
    Forwards,
}

const IMPATIENT: Duration = Duration::from_secs(2);
/// How long the delivery of a signal may take.
const DELIVERY: Duration = Duration::from_secs(1);
const SIGWINCH: i32 = 28;
const SIGCONT: i32 = 18;

/// Forwards everything to the command until a signal to `pal` ends the session.
pub async fn join(
    control: &ExecControl,
    wire: StdioMode,
    signals: &mut StopSignals,
    raw: Option<&RawTerminal>,
    impatience: SecondInterrupt,
) -> i32 {
    tokio::select! {
        signal = forward(control, wire, signals, impatience) => signal,
        never = send_input(control, wire) => match never {},
        never = resize(control, raw) => match never {},
    }
}

/// Forwards signals. With a terminal, keys reach the command as bytes, so a signal to `pal` means that the
/// terminal is closing.
async fn forward(
    control: &ExecControl,
    wire: StdioMode,
    signals: &mut StopSignals,
    impatience: SecondInterrupt,
) -> i32 {
    let mut interrupted: Option<Instant> = None;
    loop {
        let signal = signals.next().await;
        if wire == StdioMode::Terminal {
            let _ = timeout(DELIVERY, control.signal(SIGHUP)).await;
            return signal;
        }
        let again = interrupted.is_some_and(|at| at.elapsed() < IMPATIENT);
        if signal == SIGINT && again && impatience == SecondInterrupt::Ends {
            let _ = timeout(DELIVERY, control.signal(SIGKILL)).await;
            return signal;
        }
        if signal == SIGINT {
            interrupted = Some(Instant::now());
        }
        // A command that has just ended cannot be signalled; its end arrives next.
        let _ = timeout(DELIVERY, control.signal(signal)).await;
    }
}

/// Forwards input until it ends, or until the command stops reading.
async fn send_input(control: &ExecControl, wire: StdioMode) -> Infallible {
    if wire != StdioMode::Null {
        // A command may end or close its input early; that is no failure.
        let _ = send_all(control, wire).await;
    }
    pending().await
}

async fn send_all(control: &ExecControl, wire: StdioMode) -> Result<(), Failure> {
    let mut pieces = stdin::read()?;
    while let Some(piece) = pieces.recv().await {
        control.send(piece).await?;
    }
    // A terminal has no end of file: `^D` is a byte like others.
    if wire == StdioMode::Open { control.close_stdin().await } else { Ok(()) }
}

/// Keeps the command's terminal as large as ours, and makes ours raw again after `pal` was stopped.
async fn resize(control: &ExecControl, raw: Option<&RawTerminal>) -> Infallible {
    let Some(raw) = raw else { return pending().await };
    let (Ok(mut changed), Ok(mut continued)) = (listen_to(SIGWINCH), listen_to(SIGCONT)) else {
        return pending().await;
    };
    loop {
        // Set the size at once: it may have changed since the request.
        let _ = control.resize(terminal::size()).await;
        tokio::select! {
            _ = changed.recv() => {}
            _ = continued.recv() => raw.reenter(),
        }
    }
}
