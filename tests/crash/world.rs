//! A model of the promises that every answer of `pal` makes, whatever was killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::{Duration, Instant},
};

use serde_json::Value;
use testkit::{leaks, wait};

use crate::{
    leftovers,
    pal::{Pal, PalOutput},
};

/// How long a supervisor may take to end the Body of a killed `pal run`.
const PATIENCE: Duration = Duration::from_secs(10);

/// The commands of `pal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Create,
    Run,
    Exec,
    Copy,
    Snapshot,
    RemoveSnapshot,
    Fork,
    Remove,
    Stop,
    Start,
    Gc,
}

impl Verb {
    /// All commands; those that change most, more often.
    pub const ALL: [Verb; 15] = [
        Verb::Create,
        Verb::Create,
        Verb::Run,
        Verb::Run,
        Verb::Exec,
        Verb::Exec,
        Verb::Copy,
        Verb::Snapshot,
        Verb::Snapshot,
        Verb::RemoveSnapshot,
        Verb::Fork,
        Verb::Remove,
        Verb::Stop,
        Verb::Start,
        Verb::Gc,
    ];
}

/// One action on `pal`.
#[derive(Debug, Clone)]
pub struct Act {
    pub verb: Verb,
    /// The Body or snapshot.
    pub of: String,
    /// The file that it writes in the Body's home.
    mark: String,
}

/// A Body that `pal` acknowledged or listed.
#[derive(Debug, Clone, Default)]
struct KnownBody {
    /// Files in its home.
    marks: Vec<String>,
    /// Whether its removal has begun.
    going: bool,
}

/// Everything that was acknowledged.
pub struct World {
    pub pal: Pal,
    known: BTreeMap<String, KnownBody>,
    snapshots: BTreeSet<String>,
    /// All ids that ever existed.
    seen: BTreeSet<String>,
    removed: BTreeSet<String>,
    taken: BTreeSet<String>,
    done: Vec<String>,
    acts: usize,
}

impl World {
    pub fn new() -> Self {
        Self {
            pal: Pal::new(),
            known: BTreeMap::new(),
            snapshots: BTreeSet::new(),
            seen: BTreeSet::new(),
            removed: BTreeSet::new(),
            taken: BTreeSet::new(),
            done: Vec::new(),
            acts: 0,
        }
    }

    /// Bodies that certainly exist.
    pub fn bodies(&self) -> Vec<String> {
        self.known.keys().cloned().collect()
    }

    /// Creates Bodies if there are too few.
    pub fn have_some(&mut self) {
        while self.known.len() < 2 {
            let act = self.prepare(Verb::Create, String::new());
            let said = self.act(&act, None);
            assert_eq!(said.code, Some(0), "{said:?}");
        }
    }

    /// Snapshots that certainly exist.
    pub fn snapshots(&self) -> Vec<String> {
        self.snapshots.iter().cloned().collect()
    }

    /// Prepares an action, and brings its Body into a state in which the action has an effect.
    pub fn prepare(&mut self, verb: Verb, of: String) -> Act {
        match verb {
            Verb::Start => drop(self.pal.ok(&["stop", "--grace", "1s", &of])),
            Verb::Exec | Verb::Copy | Verb::Stop => drop(self.pal.ok(&["start", &of])),
            _ => {}
        }
        self.acts += 1;
        Act { verb, of, mark: format!("mark-{}", self.acts) }
    }

    /// Runs an action: to its end, or until it is killed.
    pub fn act(&mut self, act: &Act, kill: Option<Duration>) -> PalOutput {
        let write = format!("echo {0} > ~/{0}", act.mark);
        let target = format!("{}:/home/user/{}", act.of, act.mark);
        let source = self.pal.data().with_file_name(&act.mark);
        let source = source.to_string_lossy();
        let arguments: Vec<&str> = match act.verb {
            Verb::Create => vec!["create"],
            Verb::Run => vec!["run", "--", "sh", "-c", "echo ran; sleep 0.01"],
            Verb::Exec => vec!["exec", &act.of, "--", "sh", "-c", &write],
            Verb::Copy => {
                fs::write(&*source, &act.mark).expect("the home of the test can be written");
                vec!["cp", &source, &target]
            }
            Verb::Snapshot => vec!["snapshot", &act.of],
            Verb::RemoveSnapshot => vec!["snapshot", "rm", &act.of],
            Verb::Fork => vec!["fork", "-n", "2", &act.of],
            Verb::Remove => vec!["rm", "--force", &act.of],
            Verb::Stop => vec!["stop", "--grace", "1s", &act.of],
            Verb::Start => vec!["start", &act.of],
            Verb::Gc => vec!["gc"],
        };
        let said = match kill {
            Some(after) => self.pal.cut(&arguments, after),
            None => self.pal.run(&arguments),
        };
        self.heed(act, &said);
        said
    }

    /// Records what was acknowledged: a complete line of output, or success.
    fn heed(&mut self, act: &Act, said: &PalOutput) {
        let printed: Vec<String> = said
            .out
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'))
            .map(str::to_owned)
            .collect();
        let good = said.code == Some(0);
        match act.verb {
            Verb::Create => self.known.extend(printed.into_iter().map(|id| (id, KnownBody::default()))),
            Verb::Fork => {
                let marks = self.known.get(&act.of).map(|parent| parent.marks.clone()).unwrap_or_default();
                self.known.extend(
                    printed.into_iter().map(|id| (id, KnownBody { marks: marks.clone(), going: false })),
                );
            }
            Verb::Exec | Verb::Copy if good => {
                self.known.entry(act.of.clone()).or_default().marks.push(act.mark.clone());
                if act.verb == Verb::Exec {
                    self.done.push(act.mark.clone());
                }
            }
            Verb::Snapshot => {
                self.taken.extend(printed.iter().cloned());
                self.snapshots.extend(printed);
            }
            Verb::RemoveSnapshot => drop(self.snapshots.remove(&act.of)),
            Verb::Remove if good => {
                self.known.remove(&act.of);
                self.removed.insert(act.of.clone());
            }
            Verb::Remove => self.known.entry(act.of.clone()).or_default().going = true,
            Verb::Stop if good => assert_eq!(
                self.status(&act.of).as_deref(),
                Some("stopped"),
                "it said it had stopped {}",
                act.of
            ),
            Verb::Start if good => assert_eq!(
                self.status(&act.of).as_deref(),
                Some("running"),
                "it said it had started {}",
                act.of
            ),
            Verb::Run if good => assert_eq!(said.out, "ran\n"),
            _ => {}
        }
        self.seen.extend(leaks::entries(&self.pal.data().join("bodies")));
        self.seen.extend(self.known.keys().cloned());
    }

    fn status(&self, id: &str) -> Option<String> {
        self.pal.bodies().into_iter().find(|(body, _)| body == id).map(|(_, status)| status)
    }

    /// Checks that every listed Body is usable, and that everything acknowledged exists.
    pub fn check(&mut self) {
        self.wait_for_runs();
        let listed: BTreeSet<String> = self.pal.bodies().into_iter().map(|(id, _)| id).collect();
        let gone =
            |(id, known): (&String, &KnownBody)| (!listed.contains(id)).then(|| (id.clone(), known.going));
        for (id, going) in self.known.iter().filter_map(gone).collect::<Vec<_>>() {
            assert!(going, "Body {id} is gone, and nobody removed it");
            self.known.remove(&id);
        }
        for id in &listed {
            assert!(!self.removed.contains(id), "Body {id} is there again");
            let inside = self.adopt(id);
            let known = self.known.entry(id.clone()).or_default();
            for mark in &known.marks {
                assert!(
                    inside.contains(mark),
                    "Body {id} lost {mark}; going: {}; inside: {inside:?}",
                    known.going
                );
            }
        }
        let snapshots = self.pal.snapshots();
        for snapshot in &self.snapshots {
            assert!(snapshots.contains(snapshot), "snapshot {snapshot} is gone, and nobody removed it");
        }
    }

    /// Waits until the Bodies of killed `pal run` processes are gone, without help.
    fn wait_for_runs(&self) {
        wait::blocking(PATIENCE, "the Body of a `pal run` that was killed is still listed", || {
            leaks::reap();
            let runs = |body: &Value| body["life"] == "run";
            (!self.pal.json_lines(&["ls", "--json"]).iter().any(runs)).then_some(())
        });
    }

    /// Uses a Body in any state; returns the names in its home.
    fn adopt(&self, id: &str) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // A guest that was just killed may be listed as running for another moment.
            let status = self.status(id);
            match status.as_deref() {
                Some("running") => {}
                Some("paused") => panic!("Body {id} is paused, and nobody asked for that"),
                Some(_) => drop(self.pal.ok(&["start", id])),
                None => panic!("Body {id} was listed and is gone"),
            }
            let said = self.pal.run(&["exec", id, "--", "sh", "-c", "ls -A ~"]);
            if said.code == Some(0) {
                return said.out.lines().map(str::to_owned).collect();
            }
            assert!(Instant::now() < deadline, "Body {id} was {status:?} and cannot be used: {}", said.err);
            std::thread::sleep(Duration::from_millis(20));
            leaks::reap();
        }
    }

    /// Removes everything and checks that only the log is left.
    pub fn clear_and_check(&mut self) {
        self.check_log();
        self.clear();
        self.check_log();
    }

    fn clear(&mut self) {
        for (id, _) in self.pal.bodies() {
            self.pal.ok(&["rm", "--force", &id]);
            self.removed.insert(id);
        }
        self.known.clear();
        self.snapshots.clear();
        leaks::reap();
        while let snapshots @ [_, ..] = &*self.pal.snapshots() {
            // A snapshot in use is refused until its users are gone.
            let removed = snapshots
                .iter()
                .filter(|snapshot| self.pal.run(&["snapshot", "rm", snapshot]).code == Some(0));
            assert!(removed.count() > 0, "none of the snapshots {snapshots:?} can be removed");
        }
        self.pal.ok(&["gc"]);
        leftovers::none(&self.pal, &self.seen);
        self.check_ends();
        assert_eq!(
            self.pal.json_lines(&["gc", "--json"]),
            Vec::<Value>::new(),
            "gc leaves something to itself"
        );
    }

    /// Checks that every Body that ever began has one end in the log. All of them are gone.
    fn check_ends(&self) {
        let log = self.pal.log();
        let bodies = |kinds: &[&str]| -> Vec<&str> {
            let of_kind = |event: &&Value| kinds.iter().any(|kind| event["type"] == *kind);
            log.iter().filter(of_kind).filter_map(|event| event["body"].as_str()).collect()
        };
        let ends = bodies(&["body.removed", "body.failed"]);
        for id in bodies(&["body.created"]) {
            let count = ends.iter().filter(|end| **end == id).count();
            assert_eq!(count, 1, "Body {id} is gone, and has {count} ends in the log");
        }
    }

    /// Checks that the log is valid and holds everything acknowledged.
    fn check_log(&self) {
        let log = self.pal.log();
        let of = |kind: &str| -> BTreeSet<&str> {
            log.iter()
                .filter(|event| event["type"] == kind)
                .filter_map(|event| event["body"].as_str())
                .collect()
        };
        let (created, removed) = (of("body.created"), of("body.removed"));
        for id in self.known.keys().chain(&self.removed) {
            assert!(
                created.contains(id.as_str()),
                "Body {id} was there, and the log knows nothing of its creation"
            );
        }
        for id in &self.removed {
            assert!(
                removed.contains(id.as_str()),
                "Body {id} was removed, and the log knows nothing of that"
            );
        }
        let data = |kind: &str, name: &str| -> Vec<&Value> {
            log.iter().filter(|event| event["type"] == kind).map(|event| &event["data"][name]).collect()
        };
        let taken = data("snapshot.created", "snapshot");
        for snapshot in &self.taken {
            assert!(
                taken.iter().any(|id| **id == snapshot.as_str()),
                "the log knows nothing of snapshot {snapshot}"
            );
        }
        for mark in &self.done {
            let began = log.iter().find(|event| {
                event["type"] == "exec.started"
                    && event["data"]["argv"].to_string().contains(&format!("~/{mark}\""))
            });
            let began = began.unwrap_or_else(|| panic!("the log knows nothing of the exec of {mark}"));
            let ended = log.iter().any(|event| {
                event["type"] == "exec.ended"
                    && event["body"] == began["body"]
                    && event["data"]["exec"] == began["seq"]
            });
            assert!(ended, "the log does not know how the exec of {mark} ended");
        }
    }
}
