//! `pal df` and `pal config`.

use fleet::{Fleet, Setting};
use proto::{Failure, Size};
use serde_json::json;

use crate::{
    args::ConfigCommand,
    output::{self, Format},
    table::Table,
};

/// Shows how much disk space each part takes.
pub fn df(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let (shares, budget) = fleet.garbage().disk_usage()?;
    if format == Format::Json {
        return output::json(&json!({ "shares": shares, "budget": budget }));
    }
    let mut table = Table::new(&["WHAT", "COUNT", "SIZE"]);
    for share in &shares {
        table.row([share.kind, &share.count.to_string(), &Size(share.bytes).to_string()]);
    }
    output::data(table.render("").as_bytes())?;
    let total = Size(shares.iter().map(|share| share.bytes).sum());
    output::talk(&format!("{total} in total; the budget of layers, snapshots and dependencies is {budget}"));
    Ok(())
}

/// Shows or changes a setting.
pub fn config(fleet: &Fleet, command: &ConfigCommand, format: Format) -> Result<(), Failure> {
    let (ConfigCommand::Get { name } | ConfigCommand::Set { name, .. }) = command;
    let setting = Setting::find(name)?;
    let settings = match command {
        ConfigCommand::Set { value, .. } => fleet.settings().set(setting, value)?,
        ConfigCommand::Get { .. } => fleet.settings().read()?,
    };
    match format {
        Format::Text => output::line(setting.value(&settings).unwrap_or_default()),
        Format::Json => output::json(&json!({ setting.name(): setting.json(&settings) })),
    }
}
