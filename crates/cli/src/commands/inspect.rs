//! `pal inspect`.

use fleet::{BodyView, Fleet};
use proto::{Enforcement, Failure, MechanismStatus, Size, launch::GuestEnd, spec::Mount, vm::VmMetrics};

use super::{
    choose,
    list::{self, cpus},
};
use crate::{
    age,
    output::{self, Format},
    table::Table,
};

/// Shows a Body.
pub fn inspect(fleet: &Fleet, key: Option<&str>, format: Format) -> Result<(), Failure> {
    let view = choose::body(fleet, key)?;
    let metrics = fleet.access().metrics(view.id());
    match format {
        Format::Json => {
            let mut shown = list::shown(fleet, &view);
            if let Some(metrics) = metrics {
                shown["metrics"] = serde_json::json!(metrics);
            }
            output::json(&shown)
        }
        Format::Text => output::data(text(fleet, &view, metrics.as_ref()).as_bytes()),
    }
}

fn text(fleet: &Fleet, view: &BodyView, metrics: Option<&VmMetrics>) -> String {
    let mut table = facts(view);
    workspaces(fleet, view, &mut table);
    if let Some(metrics) = metrics {
        used(metrics, &mut table);
    }
    format!("{}\nenforcement: {}", table.render(""), record(&view.enforcement))
}

/// Each repository in it: where it is, where it came from, and the state of the work.
fn workspaces(fleet: &Fleet, view: &BodyView, table: &mut Table) {
    let all = &view.spec.workspaces;
    let states = if all.is_empty() { Vec::new() } else { fleet.workspaces().states(view) };
    for (workspace, state) in all.iter().zip(states) {
        let repository = &workspace.repository;
        let files =
            if repository.ends_with(".git") { repository.parent().unwrap_or(repository) } else { repository };
        table.row(["workspace", &format!("{} at {}", list::workspace(workspace), workspace.path())]);
        table.row(["repository", &files.display().to_string()]);
        table.row(["commit", &workspace.commit]);
        table.row(["work", state.name()]);
    }
}

/// The resource use of its microVM.
fn used(metrics: &VmMetrics, table: &mut Table) {
    let (seconds, ms) = (metrics.cpu_ms / 1000, metrics.cpu_ms % 1000);
    let of =
        metrics.machine_bytes.map_or(String::new(), |bytes| format!(" (the microVM has {})", Size(bytes)));
    table.row([
        "uses",
        &format!("{} memory{of}, {seconds}.{ms:03} s of CPU time", Size(metrics.memory_bytes)),
    ]);
    for (name, disk) in &metrics.disks {
        let (read, written) = (Size(disk.read_bytes), Size(disk.written_bytes));
        table.row(["disk traffic", &format!("{name}: {read} read, {written} written")]);
    }
}

fn facts(view: &BodyView) -> Table {
    let spec = &view.spec;
    let mut table = Table::bare();
    table.row(["id", spec.id.as_str()]);
    spec.name.iter().for_each(|name| table.row(["name", name.as_str()]));
    table.row(["status", &status(view)]);
    table.row(["layer", spec.layer.name()]);
    table.row(["template", &spec.template]);
    table.row(["created", &format!("{} ({} ago)", spec.created_at, age::since(&spec.created_at))]);
    table.row(["user", &spec.user]);
    table.row(["workdir", spec.workdir.as_deref().unwrap_or("the user's home")]);
    let optional = [
        ("engine", spec.engine.map(|engine| engine.to_string())),
        ("pid", view.pid.map(|pid| pid.to_string())),
        ("parent", spec.parent.as_ref().map(ToString::to_string)),
        ("home", spec.home.as_ref().and_then(|home| home.name.clone())),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            table.row([name, &value]);
        }
    }
    for missing in &view.missing_steps {
        let why = proto::text::visible(&missing.why);
        table.row(["prepared", &format!("in part, without {}: {why}", missing.title())]);
    }
    spec.snapshots.iter().for_each(|snapshot| table.row(["snapshot", snapshot.as_str()]));
    limits(view, &mut table);
    spec.mounts.iter().for_each(|shown| table.row(["mount", &mount(shown)]));
    spec.env.keys().for_each(|name| table.row(["env", name]));
    spec.ports.iter().for_each(|port| table.row(["port", &format!("{port}, reached through pal serve")]));
    spec.at_start.iter().for_each(|line| table.row(["at start", &proto::text::visible(line)]));
    table
}

fn limits(view: &BodyView, table: &mut Table) {
    let limits = &view.spec.limits;
    let wall =
        limits.wall_ms.map_or("until it is stopped".into(), |ms| format!("{}.{:03} s", ms / 1000, ms % 1000));
    table.row(["memory", &limits.memory.to_string()]);
    table.row(["cpus", &cpus(limits.cpu_milli)]);
    table.row(["pids", &limits.pids.to_string()]);
    table.row(["disk", &limits.disk.to_string()]);
    table.row(["inodes", &limits.inodes.to_string()]);
    table.row(["files", &limits.files.to_string()]);
    table.row(["output", &limits.output.to_string()]);
    table.row(["timeout", &wall]);
}

fn mount(mount: &Mount) -> String {
    format!("{} at {} ({})", mount.source.display(), mount.target.display(), mount.access.name())
}

/// The status, and why a dead Body died.
pub fn status(view: &BodyView) -> String {
    let name = view.status.name();
    match &view.end {
        None => name.to_owned(),
        Some(end) => format!("{name} ({})", why(end)),
    }
}

fn why(end: &GuestEnd) -> String {
    match end {
        GuestEnd::Exit { code } if proto::vm::EXITS.iter().any(|(known, _)| known == code) => {
            fleet::describe_end(end)
        }
        GuestEnd::Exit { code } => format!("its guest ended with {code}"),
        GuestEnd::Killed { signal } => format!("killed by signal {signal}"),
        GuestEnd::Oom => "out of memory".into(),
        GuestEnd::Timeout => "it reached its time limit".into(),
        GuestEnd::Disk => "its files exceeded the disk limit".into(),
        GuestEnd::Inodes => "it exceeded its inode limit".into(),
        GuestEnd::Owner => "the `pal` that created it ended".into(),
        GuestEnd::Unknown => "unknown: its supervisor was killed, too".into(),
    }
}

/// The enforcement record as text: a line of counts, then each mechanism.
pub fn record(enforcement: &Enforcement) -> String {
    let count = |state| format!("{} {state}", enforcement.count(state));
    let states = [MechanismStatus::Enforced, MechanismStatus::Degraded, MechanismStatus::Absent].map(count);
    let mut table = Table::bare();
    for mechanism in &enforcement.mechanisms {
        table.row([mechanism.state.name(), &mechanism.name, &mechanism.reason]);
    }
    format!("{}\n{}", states.join(", "), table.render("  "))
}

#[cfg(test)]
mod tests {
    use proto::Mechanism;

    use super::*;

    #[test]
    fn the_record_counts_and_lists() {
        let mechanisms =
            vec![Mechanism::enforced("seccomp", "filter"), Mechanism::absent("memory limit", "no cgroup")];
        let expected = "1 enforced, 0 degraded, 1 absent\n  enforced  seccomp       filter\n  absent    memory limit  no cgroup\n";
        assert_eq!(record(&Enforcement { mechanisms }), expected);
    }
}
