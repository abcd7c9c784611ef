//! `pal ls`.

use fleet::{BodyView, Fleet};
use proto::{Failure, Limits};

use crate::{
    age,
    output::{self, Format},
    table::Table,
};

/// Lists the Bodies.
pub fn list(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let views = fleet.list()?;
    if format == Format::Json {
        return output::json_lines(&views);
    }
    if views.is_empty() {
        output::talk("no Bodies\n  hint: create one with `pal create`");
        return Ok(());
    }
    output::data(table(&views).render("").as_bytes())
}

fn table(views: &[BodyView]) -> Table {
    let mut table = Table::new(&["ID", "STATUS", "LAYER", "TEMPLATE", "AGE", "LIMITS"]);
    for view in views {
        let spec = &view.spec;
        let (age, limits) = (age::since(&spec.created_at), limits(&spec.limits));
        table.row([spec.id.as_str(), view.status.name(), spec.layer.name(), &spec.template, &age, &limits]);
    }
    table
}

fn limits(limits: &Limits) -> String {
    format!(
        "{} memory, {} cpus, {} pids, {} disk",
        limits.memory,
        cpus(limits.cpu_milli),
        limits.pids,
        limits.disk
    )
}

/// A number of CPUs as text.
pub fn cpus(milli: u32) -> String {
    let text = format!("{}.{:03}", milli / 1000, milli % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_written_without_needless_zeros() {
        for (milli, text) in [(1000, "1"), (1500, "1.5"), (1, "0.001"), (20_000, "20")] {
            assert_eq!(cpus(milli), text);
        }
    }
}
