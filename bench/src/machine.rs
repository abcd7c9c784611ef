//! A description of the host.

use std::{fs, path::Path};

use crate::{context::BenchContext, run::CommandLine};

/// The host, as pairs of name and value.
pub fn describe(context: &BenchContext) -> Vec<(&'static str, String)> {
    let who = if rustix::process::geteuid().is_root() {
        "root".into()
    } else {
        format!("user id {}", rustix::process::geteuid().as_raw())
    };
    let mut about = vec![
        ("kernel", read("/proc/sys/kernel/osrelease")),
        ("processors", processors()),
        ("memory", field("/proc/meminfo", "MemTotal")),
        ("cgroups", cgroups().into()),
        ("file system of the data", file_system(&context.data)),
        ("load before", read("/proc/loadavg")),
        ("run as", who),
        ("rounds", context.args.rounds.to_string()),
        ("pal", version(&context.pal.to_string_lossy())),
    ];
    let peers = ["bwrap", "crun", "runc", "runsc", "podman", "firejail", "systemd-nspawn", "unshare"];
    let versions: Vec<String> =
        peers.iter().map(|peer| version(peer)).filter(|version| !version.is_empty()).collect();
    about.push(("peers", versions.join(" · ")));
    about
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field(path: &str, name: &str) -> String {
    let text = read(path);
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn processors() -> String {
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{count} × {}", field("/proc/cpuinfo", "model name"))
}

fn cgroups() -> &'static str {
    let at = Path::new("/sys/fs/cgroup");
    match (at.join("cgroup.controllers").exists(), at.join("memory").exists(), at.join("unified").exists()) {
        (true, _, _) => "v2",
        (_, true, true) => "v1, and v2 beside it without controllers",
        (_, true, false) => "v1",
        _ => "none",
    }
}

fn file_system(data: &Path) -> String {
    let parent = data.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let printed = CommandLine::new(["stat", "-f", "-c", "%T"]).and([parent.to_string_lossy()]).output();
    printed.map(|text| text.trim().to_owned()).unwrap_or_default()
}

fn version(program: &str) -> String {
    let printed = CommandLine::new([program, "--version"]).output().unwrap_or_default();
    printed.lines().next().unwrap_or_default().replace(" version", "").trim().to_owned()
}
