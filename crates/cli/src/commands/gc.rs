//! `pal gc`.

use fleet::{Fleet, GarbageItem, GcMode};
use proto::{Failure, Size};

use crate::{
    output::{self, Format},
    progress,
    table::Table,
};

/// Removes unused data, or lists it.
pub async fn gc(fleet: &Fleet, dry_run: bool, format: Format) -> Result<(), Failure> {
    let sweep = if dry_run { GcMode::DryRun } else { GcMode::Remove };
    let garbage = progress::watch("looking for unused data", fleet.garbage().collect(sweep)).await?;
    if format == Format::Json {
        return output::json_lines(&garbage);
    }
    if !garbage.is_empty() {
        output::data(table(&garbage).render("").as_bytes())?;
    }
    let total = Size(garbage.iter().map(|item| item.bytes).sum());
    let verb = if dry_run { "would remove" } else { "removed" };
    let things = if garbage.len() == 1 { "thing" } else { "things" };
    output::talk(&format!("{verb} {} {things}, {total}", garbage.len()));
    Ok(())
}

fn table(garbage: &[GarbageItem]) -> Table {
    let mut table = Table::new(&["KIND", "NAME", "SIZE", "WHY"]);
    for item in garbage {
        table.row([item.kind, &item.name, &Size(item.bytes).to_string(), &item.why]);
    }
    table
}
