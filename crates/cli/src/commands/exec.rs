//! `pal exec` and `pal shell`.

use fleet::{ExecRequest, Fleet};
use proto::Failure;

use super::events::Tail;
use crate::{
    args::{Exec, Shell},
    output::Format,
    session::{self, After, Impatience, Manner, Signals, Wire},
};

/// A login shell, the better one if it is there.
const LOGIN: [&str; 3] = ["sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l"];

/// Runs a command.
pub async fn exec(fleet: &Fleet, args: Exec, wire: Wire, format: Format) -> Result<u8, Failure> {
    let env = args.env();
    let request = ExecRequest {
        env,
        user: args.user,
        workdir: args.workdir,
        timeout: args.timeout,
        ..ExecRequest::new(args.command)
    };
    join(fleet, &args.body, request, wire, format).await
}

/// Opens a shell.
pub async fn shell(fleet: &Fleet, args: Shell) -> Result<u8, Failure> {
    let wire = Wire::shell();
    let argv: &[&str] = if wire == Wire::Terminal { &LOGIN } else { &["sh"] };
    let request =
        ExecRequest { user: args.user, workdir: args.workdir, ..ExecRequest::new(argv.iter().copied()) };
    join(fleet, &args.body, request, wire, Format::Text).await
}

/// Runs a request in a Body that runs, joined to our own input and output.
pub async fn join(
    fleet: &Fleet,
    key: &str,
    mut request: ExecRequest,
    wire: Wire,
    format: Format,
) -> Result<u8, Failure> {
    wire.apply(&mut request)?;
    let view = fleet.find(key)?;
    let mut tail = Tail::new(fleet, format)?;
    let mut signals = Signals::listen()?;
    let manner = Manner { format, impatience: Impatience::Forwards, body: After::Stays };
    let started = async || tail.print(fleet, view.id());
    let outcome = session::attend(fleet, view.id(), request, wire, &mut signals, manner, started).await;
    tail.print(fleet, view.id())?;
    outcome?.exit_code(format)
}
