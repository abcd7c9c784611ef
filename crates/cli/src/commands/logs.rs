//! `pal logs`.

use fleet::{ExecLogEntry, Fleet, LogRange};
use proto::{Failure, text::visible};
use serde_json::{Value, json};

use crate::{
    args::LogsArgs,
    output::{self, Format},
};

/// Prints the output of a Body's commands to stdout, and which commands those were to stderr.
pub fn logs(fleet: &Fleet, args: &LogsArgs, format: Format) -> Result<(), Failure> {
    let id = fleet.execs().find_logged(&args.body)?;
    // One more than is shown says whether older commands are left out.
    let range = if args.all { LogRange::All } else { LogRange::Newest(args.last.saturating_add(1)) };
    let mut entries = fleet.execs().logs(&id, range)?;
    if entries.is_empty() && format == Format::Text {
        output::talk(&format!("no commands yet\n  hint: run one with `pal exec {id} -- CMD`"));
    }
    if !args.all && entries.len() > args.last {
        entries.remove(0);
        output::talk(&format!("# older commands are not shown; `pal logs --all {id}` shows them"));
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
