//! `pal run`: creates a Body, runs a command in it and removes the Body.

use std::{pin::pin, time::Duration};

use fleet::{BodyView, Create, ExecRequest, Fleet, Force};
use proto::{Failure, spec::Life};

use super::{create::warn_of_mounts, events::EventTail, inspect};
use crate::{
    args::RunArgs,
    failure,
    output::{self, Format},
    session::{self, BodyLifetime, SecondInterrupt, SessionOptions, SessionOutcome, StdioMode, StopSignals},
};

/// How much longer than its command a Body may run, in case the guest does not enforce the command's timeout.
const WALL_GRACE: Duration = Duration::from_secs(2);
/// How long an interrupted creation may take to reach a state that can be undone.
const CREATE_GRACE: Duration = Duration::from_secs(2);

/// Runs the command in a new Body.
pub async fn run(fleet: &Fleet, args: RunArgs, wire: StdioMode, format: Format) -> Result<u8, Failure> {
    let mut tail = EventTail::new(fleet, format)?;
    let life = if args.keep { Life::Kept } else { Life::Run };
    let timeout = args.body.timeout;
    let wall = timeout.filter(|_| life == Life::Run).map(|timeout| timeout + WALL_GRACE);
    let mut request = ExecRequest::new(args.command);
    request.timeout = timeout;
    wire.apply(&mut request)?;
    let network = args.body.network();
    let mut create = args.body.request(life, wall)?;
    create.egress = super::create::network(fleet, &network, format)?;
    warn_of_mounts(&create.mounts, format);
    let made = create_body(fleet, create).await?;
    let CreatedBody { view, mut signals, stopped } = made;
    let outcome = match stopped {
        Some(signal) => Ok(SessionOutcome::Stopped(signal)),
        None => {
            print_notes(&view, life, args.record);
            let body =
                if life == Life::Run { BodyLifetime::EndsWithCommand } else { BodyLifetime::OutlivesCommand };
            let manner = SessionOptions { format, impatience: SecondInterrupt::Ends, body };
            let started = async || tail.print(fleet, view.id());
            session::run_attached(fleet, view.id(), request, wire, &mut signals, manner, started).await
        }
    };
    if life == Life::Run {
        remove(fleet, &view, format).await;
    }
    tail.print(fleet, view.id())?;
    outcome?.exit_code(format)
}

struct CreatedBody {
    view: BodyView,
    signals: StopSignals,
    /// The signal that arrived meanwhile.
    stopped: Option<i32>,
}

/// Creates the Body. Signal handlers are installed while the kernel works, because that takes time, too; a
/// signal before that ends `pal`, and so the Body.
async fn create_body(fleet: &Fleet, request: Create) -> Result<CreatedBody, Failure> {
    let mut making = pin!(fleet.create(request));
    let signals = tokio::select! {
        biased;
        made = making.as_mut() => return Ok(CreatedBody { view: made?, signals: StopSignals::listen()?, stopped: None }),
        signals = async { StopSignals::listen() } => signals,
    };
    let mut signals = signals?;
    let stopped = tokio::select! {
        biased;
        made = making.as_mut() => return Ok(CreatedBody { view: made?, signals, stopped: None }),
        signal = signals.next() => signal,
    };
    match tokio::time::timeout(CREATE_GRACE, making).await {
        Ok(made) => Ok(CreatedBody { view: made?, signals, stopped: Some(stopped) }),
        // The Body ends with this process.
        Err(_) => std::process::exit(i32::from(session::stopped_code(stopped))),
    }
}

fn print_notes(view: &BodyView, life: Life, record: bool) {
    if life == Life::Kept {
        output::talk(&format!("kept Body {}", view.id()));
    }
    if record {
        output::talk(&inspect::record(&view.enforcement));
    }
}

/// Removes the Body; a failure is only a warning, so that it does not hide how the command ended.
async fn remove(fleet: &Fleet, view: &BodyView, format: Format) {
    if let Err(failure) = fleet.remove(view.id(), Force::Yes).await {
        failure::warn(&failure.hint(format!("remove it later: `pal rm --force {}`", view.id())), format);
    }
}
