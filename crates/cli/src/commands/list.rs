//! `pal ls`.

use fleet::{BodyView, Fleet, WorkState};
use proto::{Failure, Limits, workspace::Workspace};
use serde_json::{Value, json};

use super::{choose, inspect};
use crate::{
    age,
    output::{self, Format},
    table::Table,
};

/// How much of a commit's id names a workspace without a branch.
const COMMIT_LEN: usize = 8;

/// Lists the Bodies, those of the current repository first.
pub fn list(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let mut views = fleet.list()?;
    // Starts git only if an answer could change the order.
    if views.iter().any(|view| !view.spec.workspaces.is_empty())
        && let Some(repository) = choose::repository_here(fleet)
    {
        views.sort_by_key(|view| !choose::is_of(view, &repository));
    }
    if format == Format::Json {
        return output::json_lines(views.iter().map(|view| shown(fleet, view)));
    }
    if views.is_empty() {
        output::talk("no Bodies\n  hint: create one with `pal create`");
        return Ok(());
    }
    output::data(table(fleet, &views).render("").as_bytes())
}

/// A Body as JSON, with the state of the work in each of its workspaces.
pub fn shown(fleet: &Fleet, view: &BodyView) -> Value {
    let mut shown = serde_json::to_value(view).unwrap_or_default();
    if !view.spec.workspaces.is_empty() {
        let states = view.spec.workspaces.iter().zip(fleet.workspaces().states(view));
        shown["work"] = states.map(|(workspace, state)| (workspace.name.clone(), json!(state))).collect();
    }
    shown
}

fn table(fleet: &Fleet, views: &[BodyView]) -> Table {
    let mut table =
        Table::new(&["ID", "NAME", "STATUS", "WORKSPACE", "WORK", "LAYER", "TEMPLATE", "AGE", "LIMITS"]);
    for view in views {
        let spec = &view.spec;
        let states = if spec.workspaces.is_empty() { Vec::new() } else { fleet.workspaces().states(view) };
        let usual = fleet.creator().default_limits(spec).ok();
        table.row([
            spec.id.as_str(),
            spec.name.as_ref().map_or("-", |name| name.as_str()),
            &inspect::status(view),
            &or_dash(spec.workspaces.iter().map(workspace).collect()),
            &or_dash(
                states
                    .iter()
                    .filter(|state| **state != WorkState::None)
                    .map(|state| state.name().into())
                    .collect(),
            ),
            spec.layer.name(),
            &spec.template,
            &age::since(&spec.created_at),
            &or_dash(usual.map_or_else(Vec::new, |usual| requested(&spec.limits, &usual))),
        ]);
    }
    table.drop_blank_columns();
    table
}

/// A repository and the branch that it began on: `flask@main`.
pub fn workspace(workspace: &Workspace) -> String {
    let commit = || workspace.commit.chars().take(COMMIT_LEN).collect();
    format!("{}@{}", workspace.name, workspace.branch.clone().unwrap_or_else(commit))
}

fn or_dash(cells: Vec<String>) -> String {
    if cells.is_empty() { "-".to_owned() } else { cells.join(", ") }
}

/// The limits that differ from the usual ones.
fn requested(limits: &Limits, usual: &Limits) -> Vec<String> {
    let wall = limits.wall_ms.map(|ms| format!("{} time", age::short(ms / 1000)));
    let own_inodes = limits.inodes != Limits::inodes_of(limits.disk) && limits.inodes != usual.inodes;
    let cells = [
        (limits.memory != usual.memory).then(|| format!("{} memory", limits.memory)),
        (limits.cpu_milli != usual.cpu_milli).then(|| format!("{} cpus", cpus(limits.cpu_milli))),
        (limits.pids != usual.pids).then(|| format!("{} pids", limits.pids)),
        (limits.disk != usual.disk).then(|| format!("{} disk", limits.disk)),
        own_inodes.then(|| format!("{} inodes", limits.inodes)),
        (limits.files != usual.files).then(|| format!("{} files", limits.files)),
        wall,
        (limits.output != usual.output).then(|| format!("{} output", limits.output)),
    ];
    cells.into_iter().flatten().collect()
}

/// A number of CPUs as text.
pub fn cpus(milli: u32) -> String {
    let text = format!("{}.{:03}", milli / 1000, milli % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use proto::{Size, limits::HostCapacity};

    use super::*;

    #[test]
    fn processors_are_written_without_needless_zeros() {
        for (milli, text) in [(1000, "1"), (1500, "1.5"), (1, "0.001"), (20_000, "20")] {
            assert_eq!(cpus(milli), text);
        }
    }

    #[test]
    fn only_limits_that_were_asked_for_are_shown() {
        let host = HostCapacity { memory: Size::gib(8), cpus: 2, disk: Size::gib(100) };
        let usual = Limits::default_on(host);
        let shown = |limits: Limits| requested(&limits, &usual).join(", ");
        assert_eq!(shown(usual.clone()), "");
        assert_eq!(shown(Limits { memory: Size::mib(512), ..usual.clone() }), "512MiB memory");
        let disk = Size::gib(1);
        assert_eq!(
            shown(Limits { disk, inodes: Limits::inodes_of(disk), wall_ms: Some(90_000), ..usual.clone() }),
            "1GiB disk, 1m time"
        );
        assert_eq!(shown(Limits { inodes: 100, cpu_milli: 500, ..usual.clone() }), "0.5 cpus, 100 inodes");
    }
}
