//! Creates and removes thousands of Bodies through the library, in one process, and checks that nothing is
//! left.
//!
//! `PALISADE_CYCLES` sets how many.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use fleet::{Create, Durability, ExecRequest, Fleet, FleetConfig, Force};
use testkit::{TemporaryDir, leaks, wait};

const CYCLES: usize = 2000;
/// The first Bodies, which fill caches and pools.
const WARM: usize = 50;
/// One Body in so many is a kept one.
const KEPT_EVERY: usize = 10;
/// How much the memory of the process may grow.
const GROWTH_KIB_MAX: u64 = 4 << 10;
/// Supervisors that are not reaped yet: the next creation does that.
const UNBURIED_MAX: usize = 2;
/// How long the last supervisors may take to end.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn cycles_of_create_exec_remove_leave_everything_as_it_was() {
    leaks::watch();
    let cycles = std::env::var("PALISADE_CYCLES")
        .map_or(CYCLES, |cycles| cycles.parse().expect("PALISADE_CYCLES is a number"));
    let home = TemporaryDir::new("leak");
    let fleet =
        Fleet::open(FleetConfig { data: home.join("data"), durability: Durability::Process }).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut ids = Vec::new();
    runtime.block_on(cycle(&fleet, WARM, &mut ids));
    let before = HeldResources::settled(&home.join("data"));
    let began = Instant::now();
    runtime.block_on(cycle(&fleet, cycles, &mut ids));
    eprintln!("{cycles} cycles in {:?}", began.elapsed());
    let after = HeldResources::settled(&home.join("data"));
    assert_eq!(after.but_memory(), before.but_memory());
    assert_eq!(leaks::cgroups(&ids), Vec::<String>::new(), "cgroups are left");
    eprintln!("memory before {} KiB, after {} KiB", before.memory_kib, after.memory_kib);
    assert!(
        after.memory_kib < before.memory_kib + GROWTH_KIB_MAX,
        "memory grew from {} to {} KiB",
        before.memory_kib,
        after.memory_kib
    );
    assert!(matches!(fleet.log().verify().unwrap(), fleet::LogVerdict::Whole { .. }));
}

/// Creates `pal run` Bodies and kept ones in turn.
async fn cycle(fleet: &Fleet, cycles: usize, ids: &mut Vec<String>) {
    for cycle in 0..cycles {
        let request = if cycle % KEPT_EVERY == 0 { Create::kept() } else { Create::run() };
        let body = fleet.create(request).await.unwrap();
        let mut exec = fleet.exec(body.id(), ExecRequest::new(["true"])).await.unwrap();
        while exec.next().await.unwrap().is_some() {}
        assert_eq!(exec.finish().await.unwrap().code, 0);
        fleet.remove(body.id(), Force::Yes).await.unwrap();
        ids.push(body.id().to_string());
    }
}

/// The resources of the process and of the host.
#[derive(Debug)]
struct HeldResources {
    /// Child processes that run, or are not reaped.
    unburied: usize,
    mounts: usize,
    descriptors: Vec<String>,
    files: BTreeMap<String, usize>,
    memory_kib: u64,
}

impl HeldResources {
    /// Counts after all descendants of this process have ended.
    fn settled(data: &Path) -> Self {
        wait::blocking(PATIENCE, "processes are left", || leaks::descendants().is_empty().then_some(()));
        let held = Self::now(data);
        assert!(held.unburied <= UNBURIED_MAX, "{} children were never waited for", held.unburied);
        held
    }

    fn now(data: &Path) -> Self {
        // The log grows, and its files always exist.
        let files = ["", "bin", "bodies", "snapshots", "ids", "artifacts"]
            .map(|dir| (dir.to_owned(), leaks::entries(&data.join(dir)).len()));
        Self {
            unburied: leaks::processes()
                .into_iter()
                .filter(|process| process.parent == std::process::id() as i32)
                .count(),
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count(),
            // A new pipe or socket has another number, so numbers are left out.
            descriptors: leaks::descriptors()
                .into_iter()
                .map(|name| name.split(":[").next().unwrap_or_default().to_owned())
                .collect(),
            files: files.into(),
            memory_kib: memory_kib(),
        }
    }

    fn but_memory(&self) -> (usize, &[String], &BTreeMap<String, usize>) {
        (self.mounts, &self.descriptors, &self.files)
    }
}

/// Private memory of this process.
fn memory_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
