//! `pal limit`.

use fleet::{Fleet, LimitChanger};
use proto::Failure;

use crate::{
    args::LimitArgs,
    output::{self, Format},
};

/// Changes limits of a Body.
pub async fn limit(fleet: &Fleet, args: &LimitArgs, format: Format) -> Result<(), Failure> {
    let view = fleet.find(&args.body)?;
    let changed = LimitChanger::of(fleet).change(view.id(), &args.limits.request()).await?;
    if format == Format::Json {
        return output::json(&changed);
    }
    for deferred in &changed.at_next_start {
        output::talk(&format!("the limit of {} changes at the next start: {}", deferred.limit, deferred.why));
    }
    if !changed.at_next_start.is_empty() {
        output::talk(&format!("  hint: start it again: pal stop {0} && pal start {0}", changed.id));
    }
    output::line(&changed.id)
}
