//! `pal run`: a Body, a command in it, and nothing left.

use std::{pin::pin, time::Duration};

use fleet::{Create, ExecRequest, Fleet, Force, View};
use proto::{Failure, spec::Life};

use super::{events::Tail, inspect};
use crate::{
    args::Run,
    failure,
    output::{self, Format},
    session::{self, After, Impatience, Manner, Outcome, Signals, Wire},
};

/// How much longer than its command a Body may live, should the guest not keep the command's timeout.
const WALL_GRACE: Duration = Duration::from_secs(2);
/// How long an interrupted creation may take to come to an end that can be undone in order.
const CREATE_GRACE: Duration = Duration::from_secs(2);

/// Runs it.
pub async fn run(fleet: &Fleet, args: Run, wire: Wire, format: Format) -> Result<u8, Failure> {
    let mut tail = Tail::new(fleet, format)?;
    let life = if args.keep { Life::Kept } else { Life::Run };
    let timeout = args.body.timeout;
    let wall = timeout.filter(|_| life == Life::Run).map(|timeout| timeout + WALL_GRACE);
    let mut request = ExecRequest::new(args.command);
    request.timeout = timeout;
    wire.apply(&mut request)?;
    // With a terminal, it waits until ours is ready for it.
    let first = (wire != Wire::Terminal).then(|| request.clone());
    let made = create(fleet, Create { first, ..args.body.request(life, wall)? }).await?;
    let Made { view, mut signals, stopped } = made;
    let outcome = match stopped {
        Some(signal) => Ok(Outcome::Stopped(signal)),
        None => {
            tell(&view, life, args.record);
            let body = if life == Life::Run { After::Goes } else { After::Stays };
            let manner = Manner { format, impatience: Impatience::Ends, body };
            let started = async || tail.print(fleet, view.id());
            session::attend(fleet, view.id(), request, wire, &mut signals, manner, started).await
        }
    };
    if life == Life::Run {
        remove(fleet, &view, format).await;
    }
    tail.print(fleet, view.id())?;
    outcome?.exit_code(format)
}

struct Made {
    view: View,
    signals: Signals,
    /// The signal that came meanwhile.
    stopped: Option<i32>,
}

/// Makes the Body. Listening to signals begins while the kernel is at work, for it costs time too; a signal before
/// that ends us, and so the Body.
async fn create(fleet: &Fleet, request: Create) -> Result<Made, Failure> {
    let mut making = pin!(fleet.create(request));
    let signals = tokio::select! {
        biased;
        made = making.as_mut() => return Ok(Made { view: made?, signals: Signals::listen()?, stopped: None }),
        signals = async { Signals::listen() } => signals,
    };
    let mut signals = signals?;
    let stopped = tokio::select! {
        biased;
        made = making.as_mut() => return Ok(Made { view: made?, signals, stopped: None }),
        signal = signals.next() => signal,
    };
    match tokio::time::timeout(CREATE_GRACE, making).await {
        Ok(made) => Ok(Made { view: made?, signals, stopped: Some(stopped) }),
        // Our end is its end.
        Err(_) => std::process::exit(i32::from(session::stopped_code(stopped))),
    }
}

fn tell(view: &View, life: Life, record: bool) {
    if life == Life::Kept {
        output::talk(&format!("keeping body {}", view.id()));
    }
    if record {
        output::talk(&inspect::record(&view.enforcement));
    }
}

/// A Body that cannot be removed must not hide how its command ended.
async fn remove(fleet: &Fleet, view: &View, format: Format) {
    if let Err(failure) = fleet.remove(view.id(), Force::Yes).await {
        failure::warn(&failure.hint(format!("remove it later: `pal rm --force {}`", view.id())), format);
    }
}
