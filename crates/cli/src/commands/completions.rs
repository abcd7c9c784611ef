//! `pal completions`.

use clap::CommandFactory;
use proto::Failure;

use crate::{
    args::{Cli, CompletionsArgs},
    output::{self, Format},
};

/// Prints the completions.
pub fn completions(args: &CompletionsArgs, format: Format) -> Result<u8, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pal", &mut text);
    match format {
        Format::Text => output::data(&text)?,
        Format::Json => output::json(&serde_json::json!({
            "shell": args.shell.to_string(), "script": String::from_utf8_lossy(&text),
        }))?,
    }
    Ok(0)
}
