//! `pal df` and `pal config`.

use fleet::Fleet;
use proto::{Failure, Kind, Size};
use serde_json::json;

use crate::{
    args::ConfigCommand,
    output::{self, Format},
    table::Table,
};

/// The one setting there is.
const BUDGET: &str = "store.budget";

/// Shows where the space went.
pub fn df(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let (shares, budget) = fleet.df()?;
    if format == Format::Json {
        return output::json(&json!({ "shares": shares, "budget": budget }));
    }
    let mut table = Table::new(&["WHAT", "COUNT", "SIZE"]);
    for share in &shares {
        table.row([share.kind, &share.count.to_string(), &Size(share.bytes).to_string()]);
    }
    output::data(table.render("").as_bytes())?;
    let total = Size(shares.iter().map(|share| share.bytes).sum());
    output::talk(&format!("{total} in all; layers, snapshots and dependencies may take {budget}"));
    Ok(())
}

/// Shows or changes a setting.
pub fn config(fleet: &Fleet, command: &ConfigCommand, format: Format) -> Result<(), Failure> {
    let (ConfigCommand::Get { name } | ConfigCommand::Set { name, .. }) = command;
    if name != BUDGET {
        let shown = proto::text::visible(name);
        return Err(Failure::new(Kind::Usage, format!("there is no setting {shown}"))
            .hint(format!("there is one: {BUDGET}")));
    }
    if let ConfigCommand::Set { value, .. } = command {
        fleet.set_budget(*value)?;
    }
    let budget = fleet.budget()?;
    match format {
        Format::Text => output::line(budget),
        Format::Json => output::json(&json!({ BUDGET: budget })),
    }
}
