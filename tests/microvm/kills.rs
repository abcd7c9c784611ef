//! `kill -9` of `pal`, of the hypervisor and of the VMM process, at random moments of a boot, a snapshot and
//! a restore.
//!
//! Synced and acknowledged data survives, and nothing else is left. The seed is printed; `PALISADE_SEED` sets
//! it, `PALISADE_KILLS` sets the number of kills.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fleet::{Force, Status};
use proto::BodyId;
use testkit::{Bodies, body_test, leaks};

#[path = "../crash/chance.rs"]
mod chance;

use chance::Chance;

const KILLS: usize = 100;
/// How long a killed action may take to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The snapshot from which everything is restored.
const SNAPSHOT: &str = "whole";

/// The action that is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    /// A microVM boots.
    Boot,
    /// A snapshot is taken, and the microVM continues.
    Snapshot,
    /// A microVM is restored from a snapshot.
    Restore,
    /// A snapshot and a restore.
    Fork,
    /// A microVM is suspended to disk.
    Swap,
    /// A suspended microVM resumes.
    Resume,
}

impl Act {
    /// All actions; quick ones more often.
    const ALL: [Act; 10] = [
        Act::Boot,
        Act::Snapshot,
        Act::Snapshot,
        Act::Snapshot,
        Act::Restore,
        Act::Restore,
        Act::Restore,
        Act::Fork,
        Act::Swap,
        Act::Resume,
    ];

    fn words(self, body: &BodyId) -> Vec<&str> {
        match self {
            Act::Boot => vec!["create", "--layer", "microvm", "--boot"],
            Act::Snapshot => vec!["snapshot", body.as_str()],
            Act::Restore => vec!["create", "--layer", "microvm", "--template", SNAPSHOT],
            Act::Fork => vec!["fork", body.as_str()],
            Act::Swap => vec!["suspend", body.as_str()],
            Act::Resume => vec!["resume", body.as_str()],
        }
    }
}

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Pal,
    Hypervisor,
    Minder,
}

impl Victim {
    const ALL: [Victim; 5] =
        [Victim::Pal, Victim::Pal, Victim::Hypervisor, Victim::Hypervisor, Victim::Minder];
}

struct World {
    t: Bodies,
    pal: PathBuf,
    /// The Body of all actions.
    body: BodyId,
    /// Number of synced files in its home.
    marks: usize,
}

#[body_test(except(process = "it tests microVMs"))]
async fn kills_during_boot_snapshot_and_restore_lose_nothing_and_leave_nothing(t: Bodies) {
    let wanted = std::env::var("PALISADE_KILLS")
        .map_or(KILLS, |wanted| wanted.parse().expect("PALISADE_KILLS is a number"));
    let mut chance = Chance::new();
    let body = t.create().await;
    let mut world = World { pal: program(), body, marks: 0, t };
    world.mark().await;
    world.t.fleet().snapshots().create(&world.body, Some(SNAPSHOT.into())).await.unwrap();
    let mut typical: BTreeMap<Act, Duration> = BTreeMap::new();
    let mut kills: BTreeMap<(Act, Victim), usize> = BTreeMap::new();
    let mut rounds = 0;
    while kills.values().sum::<usize>() < wanted {
        rounds += 1;
        assert!(rounds < wanted * 4, "hardly anybody is killed on the way: {kills:?}");
        let act = *chance.of(&Act::ALL);
        let victim = *chance.of(&Victim::ALL);
        world.prepare(act).await;
        let began = Instant::now();
        let mut child = world.start(act);
        let Some(whole) = typical.get(&act).copied() else {
            // Run it once to its end, to measure it.
            assert!(child.wait().unwrap().success(), "{act:?}");
            typical.insert(act, began.elapsed());
            world.check(act).await;
            continue;
        };
        let after = chance.before(whole);
        eprintln!("round {rounds}: {act:?}, {victim:?} killed after {after:?}");
        tokio::time::sleep(after).await;
        if cut(&mut child, victim, &mut chance) {
            *kills.entry((act, victim)).or_default() += 1;
        } else if child.try_wait().unwrap().is_some() {
            // It was faster than before, so the next kill comes earlier.
            typical.insert(act, (whole + after) / 2);
        }
        over(&mut child).await;
        world.check(act).await;
    }
    eprintln!("{} of {rounds} were killed on the way: {kills:?}", kills.values().sum::<usize>());
    for act in [Act::Boot, Act::Snapshot, Act::Restore] {
        assert!(
            wanted < KILLS || Victim::ALL.iter().any(|victim| kills.contains_key(&(act, *victim))),
            "{act:?} was never cut short: {kills:?}"
        );
    }
}

/// Kills a process during the action; returns false if the action was over, or the process did not exist.
fn cut(child: &mut Child, victim: Victim, chance: &mut Chance) -> bool {
    if child.try_wait().unwrap().is_some() {
        return false;
    }
    let pid = match victim {
        Victim::Pal => Some(child.id() as i32),
        Victim::Hypervisor => one("qemu-system", chance),
        Victim::Minder => one("pal-vm", chance),
    };
    pid.is_some_and(|pid| {
        leaks::end(&[leaks::HostProcess { pid, parent: 0, name: String::new(), state: 'R' }]);
        true
    })
}

fn one(name: &str, chance: &mut Chance) -> Option<i32> {
    let found: Vec<i32> = leaks::descendants()
        .iter()
        .filter(|process| process.name.starts_with(name))
        .map(|process| process.pid)
        .collect();
    (!found.is_empty()).then(|| *chance.of(&found))
}

/// Waits until a surviving `pal` reports how the action ended.
async fn over(child: &mut Child) {
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "pal hangs");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl World {
    fn start(&self, act: Act) -> Child {
        let mut command = Command::new(&self.pal);
        command.args(act.words(&self.body)).env("PAL_DATA", self.t.data());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("pal can be run")
    }

    /// Brings the microVM into a state in which the action has an effect.
    async fn prepare(&mut self, act: Act) {
        if act == Act::Resume {
            self.t.fleet().pause_to_disk(&self.body).await.unwrap();
        }
    }

    /// Writes and syncs a file that must survive.
    async fn mark(&mut self) {
        self.marks += 1;
        let mark = self.marks;
        self.t.sh(&self.body, &format!("echo {mark} > ~/mark-{mark} && sync")).await.ok();
    }

    /// Checks that the microVM has its files, that its snapshot can be restored, and that nothing else is
    /// left.
    async fn check(&mut self, act: Act) {
        let listed: Vec<BodyId> =
            self.t.fleet().list().unwrap().iter().map(|view| view.id().clone()).collect();
        assert!(listed.contains(&self.body), "the machine is gone after {act:?}");
        for other in listed.iter().filter(|id| **id != self.body) {
            self.t.fleet().remove(other, Force::Yes).await.unwrap();
        }
        self.awake().await;
        let marks: Vec<String> = (1..=self.marks).map(|mark| mark.to_string()).collect();
        let found = self
            .t
            .sh(&self.body, "for n in $(ls ~ | sed -n 's/^mark-//p' | sort -n); do cat ~/mark-$n; done")
            .await
            .ok();
        assert_eq!(found.lines().collect::<Vec<_>>(), marks, "files that were synced are lost after {act:?}");
        let snapshots = self.t.fleet().snapshots().list().unwrap();
        assert!(
            snapshots.iter().any(|snapshot| snapshot.name.as_deref() == Some(SNAPSHOT)),
            "the snapshot is gone after {act:?}"
        );
        for snapshot in snapshots.iter().filter(|snapshot| snapshot.name.is_none()) {
            self.t.fleet().snapshots().remove(snapshot.id.as_str()).unwrap();
        }
        if self.marks < 20 {
            self.mark().await;
        }
        self.nothing_else().await;
    }

    /// Starts the microVM from whatever state it is in.
    async fn awake(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            leaks::reap();
            let status = self.t.view(&self.body).status;
            let tried = match status {
                Status::Running => {
                    self.t.try_exec(&self.body, fleet::ExecRequest::new(["true"])).await.map(drop)
                }
                Status::Paused => self.t.fleet().resume(&self.body).await.map(drop),
                _ => self.t.fleet().start(&self.body).await.map(drop),
            };
            match tried {
                Ok(()) if status == Status::Running => return,
                Ok(()) => {}
                Err(failure) => assert!(
                    Instant::now() < deadline,
                    "it was {status:?} and cannot be used: {}",
                    testkit::explain(&failure)
                ),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Checks that there is one microVM, one hypervisor and one directory.
    async fn nothing_else(&self) {
        self.t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
        let only = || {
            leaks::reap();
            let family = leaks::descendants();
            let count = |name: &str| family.iter().filter(|process| process.name.starts_with(name)).count();
            let strays: Vec<String> = leaks::entries(&self.t.data().join("bodies"))
                .into_iter()
                .filter(|name| name != self.body.as_str() && !name.ends_with("lock"))
                .collect();
            let ids = leaks::entries(&self.t.data().join("ids"));
            let claims = ids.iter().filter(|name| !name.ends_with("lock")).count();
            let halves: Vec<String> = leaks::entries(&self.t.body_dir(&self.body))
                .into_iter()
                .filter(|name| name.ends_with(".part") || name == "swap")
                .collect();
            let one = (count("qemu-system"), count("pal-vm")) == (1, 1) && claims <= 1;
            if one && strays.is_empty() && halves.is_empty() {
                Ok(())
            } else {
                Err(format!("{family:?} {ids:?} {strays:?} {halves:?}"))
            }
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Err(left) = only() {
            assert!(Instant::now() < deadline, "there is more than one machine: {left}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The path of `pal`: where cargo put it, or as the environment says.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let built = test.ancestors().nth(2).unwrap_or(Path::new("/")).join("pal");
    let found = testkit::user::pal(&built.to_string_lossy());
    assert!(
        found.is_file(),
        "there is no {}: run cargo build -p cli first, or set TESTKIT_PAL",
        found.display()
    );
    found
}
