//! Checks that nothing is left after every Body was removed.

use std::{collections::BTreeSet, time::Duration};

use testkit::{leaks, wait};

use crate::pal::Pal;

/// The entries of a data directory without Bodies.
const KEPT: [&str; 8] = ["artifacts", "bin", "bodies", "events.db", "ids", "key", "snapshots", "version"];
/// The number of programs: the guest and the launcher.
const PROGRAMS: usize = 2;

/// Asserts that nothing is left of these Bodies.
pub fn none(pal: &Pal, bodies: &BTreeSet<String>) {
    on_its_own_disk(pal, bodies);
    assert_eq!(leaks::mounts(&pal.data()), Vec::<String>::new(), "mounts are left");
}

/// Asserts that nothing is left of these Bodies, if the data directory is a mount.
pub fn on_its_own_disk(pal: &Pal, bodies: &BTreeSet<String>) {
    let data = pal.data();
    let gone = wait_for_nobody();
    assert!(gone.is_empty(), "these processes are left: {gone:?}");
    for dir in ["bodies", "snapshots", "ids"] {
        assert_eq!(leaks::entries(&data.join(dir)), Vec::<String>::new(), "entries are left in {dir}/");
    }
    let known = |name: &String| KEPT.contains(&name.as_str()) || name.starts_with("events.db-");
    let strange: Vec<String> = leaks::entries(&data).into_iter().filter(|name| !known(name)).collect();
    assert_eq!(strange, Vec::<String>::new(), "the data directory holds files of nobody");
    let programs = leaks::entries(&data.join("bin"));
    assert!(programs.len() <= PROGRAMS, "bin/ holds more than the programs: {programs:?}");
    let unfinished = leaks::entries(&data.join("artifacts")).into_iter().filter(|name| name.len() != 2);
    assert_eq!(unfinished.collect::<Vec<_>>(), Vec::<String>::new(), "unfinished artifacts are left");
    let bodies: Vec<String> = bodies.iter().cloned().collect();
    assert_eq!(leaks::cgroups(&bodies), Vec::<String>::new(), "cgroups are left");
}

/// Waits for processes that are ending; returns those that stay.
fn wait_for_nobody() -> Vec<leaks::HostProcess> {
    let look = || {
        leaks::reap();
        leaks::descendants().is_empty().then_some(())
    };
    let waited =
        std::panic::catch_unwind(|| wait::blocking(Duration::from_secs(5), "processes are left", look));
    if waited.is_ok() { Vec::new() } else { leaks::descendants() }
}
