//! `pal completions`.

use clap::CommandFactory;
use proto::Failure;

use crate::{
    args::{Cli, Completions},
    output,
};

/// Prints them.
pub fn completions(args: &Completions) -> Result<u8, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pal", &mut text);
    output::data(&text).map(|()| 0)
}
