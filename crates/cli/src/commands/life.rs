//! `pal start`, `stop`, `pause`, `resume` and `rm`.

use std::time::Duration;

use fleet::{Discard, Fleet, Force, View};
use proto::{BodyId, Failure};
use serde_json::json;

use crate::{
    args::{Pause, Remove},
    failure,
    output::{self, Format},
    progress,
};

/// Starts Bodies.
pub async fn start(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| told(&progress::watch("starting", fleet.start(id)).await?, format))
        .await
}

/// Stops Bodies.
pub async fn stop(fleet: &Fleet, keys: &[String], grace: Duration, format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| {
        told(&progress::watch("stopping", fleet.stop(id, grace)).await?, format)
    })
    .await
}

/// Freezes Bodies.
pub async fn pause(fleet: &Fleet, args: &Pause, format: Format) -> Result<(), Failure> {
    each(fleet, &args.of.bodies, format, async |id| {
        let paused = async { if args.swap { fleet.pause_to_disk(id).await } else { fleet.pause(id).await } };
        told(&progress::watch("pausing", paused).await?, format)
    })
    .await
}

/// Thaws Bodies.
pub async fn resume(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| told(&progress::watch("resuming", fleet.resume(id)).await?, format))
        .await
}

/// Removes Bodies.
pub async fn remove(fleet: &Fleet, args: &Remove, format: Format) -> Result<(), Failure> {
    let force = if args.force { Force::Yes } else { Force::No };
    let discard = if args.discard { Discard::Yes } else { Discard::No };
    each(fleet, &args.of.bodies, format, async |id| {
        if args.discard {
            super::work::tell_losses(fleet, id)?;
        }
        progress::watch("removing", fleet.remove_with(id, force, discard)).await?;
        match format {
            Format::Text => output::line(id),
            Format::Json => output::json(&json!({ "id": id })),
        }
    })
    .await
}

/// Does it to each Body; one that fails does not keep the others from it.
async fn each(
    fleet: &Fleet,
    keys: &[String],
    format: Format,
    act: impl AsyncFn(&BodyId) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut last = None;
    for key in keys {
        let done = match fleet.find(key) {
            Ok(view) => act(view.id()).await,
            Err(failure) => Err(failure),
        };
        let Err(failure) = done else { continue };
        if let Some(before) = last.replace(failure) {
            failure::report(&before, format);
        }
    }
    last.map_or(Ok(()), Err)
}

fn told(view: &View, format: Format) -> Result<(), Failure> {
    match format {
        Format::Text => output::line(view.id()),
        Format::Json => output::json(view),
    }
}
