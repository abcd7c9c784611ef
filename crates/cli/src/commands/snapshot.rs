//! `pal snapshot` and `fork`.

use fleet::{Fleet, SnapshotView};
use proto::{Failure, Kind, Size};
use serde_json::json;

use crate::{
    age,
    args::{ForkArgs, SnapshotArgs, SnapshotCommand},
    output::{self, Format},
    progress,
    table::Table,
};

/// Takes a snapshot, lists the snapshots or removes some.
pub async fn snapshot(fleet: &Fleet, args: SnapshotArgs, format: Format) -> Result<(), Failure> {
    match (args.command, args.body) {
        (Some(SnapshotCommand::Ls), _) => list_or_remove(fleet, &[], format),
        (Some(SnapshotCommand::Rm { snapshots }), _) => list_or_remove(fleet, &snapshots, format),
        (None, Some(body)) => take(fleet, &body, args.name, format).await,
        (None, None) => {
            Err(Failure::new(Kind::Usage, "name a Body to take a snapshot of").hint("pal snapshot BODY"))
        }
    }
}

async fn take(fleet: &Fleet, body: &str, name: Option<String>, format: Format) -> Result<(), Failure> {
    let view = fleet.find(body)?;
    let taken = progress::watch("taking the snapshot", fleet.snapshots().create(view.id(), name)).await?;
    match format {
        Format::Text => output::line(&taken.id),
        Format::Json => output::json(&taken),
    }
}

/// Removes the named snapshots; lists all if none is named.
pub fn list_or_remove(fleet: &Fleet, remove: &[String], format: Format) -> Result<(), Failure> {
    if remove.is_empty() {
        return list(&fleet.snapshots().list()?, format);
    }
    for key in remove {
        let id = fleet.snapshots().remove(key)?;
        match format {
            Format::Text => output::line(id)?,
            Format::Json => output::json(&json!({ "id": id }))?,
        }
    }
    Ok(())
}

fn list(views: &[SnapshotView], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json_lines(views);
    }
    if views.is_empty() {
        output::talk("no snapshots\n  hint: take one with `pal snapshot BODY`");
        return Ok(());
    }
    let mut table = Table::new(&["ID", "NAME", "BODY", "SIZE", "AGE"]);
    for view in views {
        let name = view.name.as_deref().unwrap_or("-");
        let (size, age) = (Size(view.bytes).to_string(), age::since(&view.created_at));
        table.row([view.id.as_str(), name, view.body.as_str(), &size, &age]);
    }
    output::data(table.render("").as_bytes())
}

/// Forks a Body.
pub async fn fork(fleet: &Fleet, args: &ForkArgs, format: Format) -> Result<(), Failure> {
    let view = fleet.find(&args.body)?;
    let forks = progress::watch(
        "forking",
        fleet.snapshots().fork_leased(view.id(), args.count, args.name.as_ref(), None),
    )
    .await?;
    match format {
        Format::Text => forks.iter().try_for_each(|fork| output::line(fork.id())),
        Format::Json => output::json_lines(&forks),
    }
}
