//! `pal home`.

use fleet::{Fleet, HomeView};
use proto::{Failure, Size};
use serde_json::json;

use crate::{
    age,
    args::{HomeArgs, HomeCommand},
    output::{self, Format},
    table::Table,
};

/// Lists the homes, or removes some.
pub fn home(fleet: &Fleet, args: HomeArgs, format: Format) -> Result<(), Failure> {
    match args.command {
        None | Some(HomeCommand::Ls) => list_or_remove(fleet, &[], format),
        Some(HomeCommand::Rm { homes }) => list_or_remove(fleet, &homes, format),
    }
}

/// Removes the named homes; lists all if none is named.
pub fn list_or_remove(fleet: &Fleet, remove: &[String], format: Format) -> Result<(), Failure> {
    if remove.is_empty() {
        return list(&fleet.homes().list()?, format);
    }
    for name in remove {
        fleet.homes().remove(name)?;
        match format {
            Format::Text => output::line(name)?,
            Format::Json => output::json(&json!({ "name": name }))?,
        }
    }
    Ok(())
}

fn list(views: &[HomeView], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json_lines(views);
    }
    if views.is_empty() {
        output::talk("no homes\n  hint: create one with `pal up --home NAME`; removing the Body keeps it");
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "SIZE", "KEPT", "BODY"]);
    for view in views {
        let body = view.body.as_ref().map_or("-", |body| body.as_str());
        let (size, age) = (Size(view.bytes).to_string(), age::since(&view.record.kept_at));
        table.row([view.record.name.as_str(), &size, &age, body]);
    }
    output::data(table.render("").as_bytes())
}
