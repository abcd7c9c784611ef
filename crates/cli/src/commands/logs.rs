//! `pal logs`.

use fleet::{ExecLogEntry, Fleet};
use proto::{Failure, text::visible};
use serde_json::{Value, json};

use crate::output::{self, Format};

/// Prints the output of a Body's commands to standard output, and the commands themselves to standard error.
pub fn logs(fleet: &Fleet, key: &str, format: Format) -> Result<(), Failure> {
    let view = fleet.find(key)?;
    let entries = fleet.logs(view.id())?;
    if entries.is_empty() && format == Format::Text {
        output::talk(&format!("no commands yet\n  hint: run one with `pal exec {} -- CMD`", view.id()));
    }
    for entry in &entries {
        match format {
            Format::Json => output::json(&object(entry))?,
            Format::Text => text(entry)?,
        }
    }
    Ok(())
}

fn text(entry: &ExecLogEntry) -> Result<(), Failure> {
    let end = entry.code.map_or("not ended".into(), |code| format!("exit {code}"));
    output::talk(&format!("# {} {} ({end})", entry.at, visible(&entry.argv.join(" "))));
    output::data(&entry.output)?;
    if entry.truncated {
        output::talk("# the rest exceeded the Body's output limit and was not recorded");
    }
    Ok(())
}

/// Output has the form that events have: `text`, or `hex` if it is not UTF-8.
fn object(entry: &ExecLogEntry) -> Value {
    json!({
        "at": entry.at, "argv": entry.argv, "code": entry.code, "truncated": entry.truncated,
        "output": output::text_or_hex(&entry.output),
    })
}
