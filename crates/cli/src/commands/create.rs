//! `pal create`.

use fleet::Fleet;
use proto::{Failure, spec::Life};

use crate::{
    args::BodyArgs,
    output::{self, Format},
    progress,
};

/// Creates a Body that stays.
pub async fn create(fleet: &Fleet, args: BodyArgs, format: Format) -> Result<(), Failure> {
    let wall = args.timeout;
    let view = progress::watch("creating the Body", fleet.create(args.request(Life::Kept, wall)?)).await?;
    match format {
        Format::Text => output::line(view.id()),
        Format::Json => output::json(&view),
    }
}
