//! `pal exec` and `pal shell`.

use fleet::{Disconnect, ExecRequest, Fleet};
use proto::Failure;

use super::{choose, events::EventTail};
use crate::{
    args::{ExecArgs, ShellArgs},
    output::Format,
    session::{self, BodyLifetime, SecondInterrupt, SessionOptions, StdioMode, StopSignals},
};

/// Starts a login shell: bash if the Body has it, else sh.
const LOGIN: [&str; 3] = ["sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l"];

/// Runs a command.
pub async fn exec(fleet: &Fleet, args: ExecArgs, wire: StdioMode, format: Format) -> Result<u8, Failure> {
    let env = args.env();
    let request = ExecRequest {
        env,
        user: args.user,
        workdir: args.workdir,
        timeout: args.timeout,
        on_disconnect: if wire == StdioMode::Terminal { Disconnect::HangUp } else { Disconnect::Continue },
        ..ExecRequest::new(args.command)
    };
    join(fleet, Some(&args.body), request, wire, format).await
}

/// Opens a shell.
pub async fn shell(fleet: &Fleet, args: ShellArgs, wire: StdioMode, format: Format) -> Result<u8, Failure> {
    let argv: &[&str] = if wire == StdioMode::Terminal { &LOGIN } else { &["sh"] };
    let request = ExecRequest {
        user: args.user,
        workdir: args.workdir,
        on_disconnect: Disconnect::HangUp,
        ..ExecRequest::new(argv.iter().copied())
    };
    join(fleet, args.body.as_deref(), request, wire, format).await
}

/// Runs a request in a running Body, attached to our standard input and output.
pub async fn join(
    fleet: &Fleet,
    key: Option<&str>,
    mut request: ExecRequest,
    wire: StdioMode,
    format: Format,
) -> Result<u8, Failure> {
    wire.apply(&mut request)?;
    let view = choose::body(fleet, key)?;
    let mut tail = EventTail::new(fleet, format)?;
    let mut signals = StopSignals::listen()?;
    let manner =
        SessionOptions { format, impatience: SecondInterrupt::Forwards, body: BodyLifetime::OutlivesCommand };
    let started = async || tail.print(fleet, view.id());
    let outcome = session::run_attached(fleet, view.id(), request, wire, &mut signals, manner, started).await;
    tail.print(fleet, view.id())?;
    outcome?.exit_code(format)
}
