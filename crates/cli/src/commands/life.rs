//! `pal start`, `stop`, `pause`, `suspend`, `resume` and `rm`.

use std::time::Duration;

use fleet::{BodyView, Discard, Fleet, Force};
use proto::{BodyId, Failure};
use serde_json::json;

use crate::{
    args::{PauseArgs, RemoveArgs},
    failure,
    output::{self, Format},
    progress,
};

/// Starts Bodies.
pub async fn start(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| {
        print_body(&progress::watch("starting", fleet.start(id)).await?, format)
    })
    .await
}

/// Stops Bodies.
pub async fn stop(fleet: &Fleet, keys: &[String], grace: Duration, format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| {
        print_body(&progress::watch("stopping", fleet.stop(id, grace)).await?, format)
    })
    .await
}

/// Freezes Bodies.
pub async fn pause(fleet: &Fleet, args: &PauseArgs, format: Format) -> Result<(), Failure> {
    if args.swap {
        return suspend(fleet, &args.of.bodies, format).await;
    }
    each(fleet, &args.of.bodies, format, async |id| {
        print_body(&progress::watch("pausing", fleet.pause(id)).await?, format)
    })
    .await
}

/// Suspends microVMs to the disk.
pub async fn suspend(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| {
        print_body(&progress::watch("suspending", fleet.pause_to_disk(id)).await?, format)
    })
    .await
}

/// Resumes Bodies.
pub async fn resume(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    each(fleet, keys, format, async |id| {
        print_body(&progress::watch("resuming", fleet.resume(id)).await?, format)
    })
    .await
}

/// Removes Bodies.
pub async fn remove(fleet: &Fleet, args: &RemoveArgs, format: Format) -> Result<(), Failure> {
    let force = if args.force { Force::Yes } else { Force::No };
    let discard = if args.discard { Discard::Yes } else { Discard::No };
    each(fleet, &args.of.bodies, format, async |id| {
        if args.discard {
            super::work::print_unsaved(fleet, id)?;
        }
        progress::watch("removing", fleet.remove_with(id, force, discard)).await?;
        match format {
            Format::Text => output::line(id),
            Format::Json => output::json(&json!({ "id": id })),
        }
    })
    .await
}

/// Runs an action on each Body; a failure does not stop the others.
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

fn print_body(view: &BodyView, format: Format) -> Result<(), Failure> {
    match format {
        Format::Text => output::line(view.id()),
        Format::Json => output::json(view),
    }
}
