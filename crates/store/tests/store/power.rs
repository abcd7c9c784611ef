//! Loss of power: the data that must survive on a disk that keeps only what was synced.
//!
//! The test traces a process while it appends. From its system calls it generates states that the disk may be
//! in: all synced changes are there, and any part of the others, whole or torn at sectors of 512 bytes. A new
//! name is there once its directory was synced; before that, some of the newest changes of names are missing.
//! The test then opens each state like any log.
//!
//! All states omit the WAL's shared memory: the first process that opens a log creates it again.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    path::Path,
};

use proto::{BodyId, ChainId};
use serde_json::json;
use store::{ArtifactRef, Artifacts, Durability, EventLog, EventQuery, Store};

use crate::{
    child,
    disk::{DiskOp, SimulatedDisk},
    scene::{Random, SceneDir, events_of, odd_draft},
};

/// The number of simulated losses of power.
const LOSSES: u64 = 120;
const EVENT: &str = "stored event ";
const ARTIFACT: &str = "stored artifact ";

#[test]
fn an_acknowledged_event_survives_the_loss_of_power() {
    let lost = lose_power("power process power power");
    assert_eq!(lost, 0, "acknowledged under `power`, or before such an event, and not there");
}

/// These losses of power do lose changes that were not synced; otherwise the test above would prove nothing.
#[test]
fn what_is_only_promised_to_survive_the_process_may_be_lost_with_power_but_the_log_stays_whole() {
    let lost = lose_power("process process process");
    assert!(lost > 0, "nothing was lost that was not synced");
}

/// Cuts the power at random moments while a store is opened, written and closed with these durabilities;
/// counts the acknowledged items that are missing. If `power` is among them, only the items up to the last
/// acknowledgement under `power` count.
fn lose_power(lives: &str) -> usize {
    let mut random = Random::new();
    let dir = SceneDir::in_memory();
    let ops = DiskOp::recorded(&dir, &child::traced(&format!("lives {lives}"), &dir));
    let syncs = ops.iter().filter(|op| matches!(op, DiskOp::Sync(_))).count();
    assert!(syncs > 3, "{syncs} syncs: the store was not seen at work");
    let mut lost = 0;
    for loss in 0..LOSSES {
        // Also cuts at the end: all calls are done, and no sync followed.
        let cut = if loss == 0 { ops.len() } else { random.below(ops.len() as u64) as usize };
        let promised = Acknowledgements::by(&ops[..cut], lives.contains("power"));
        let left = SceneDir::in_memory();
        SimulatedDisk::at(&ops[..cut]).lose_power(&mut random).write_to(&left);
        lost += promised.missing_in(&left, &format!("loss {loss}, after {cut} calls of {}", ops.len()));
    }
    lost
}

/// The items that the process had acknowledged by some moment.
#[derive(Default)]
struct Acknowledgements {
    events: BTreeMap<u64, String>,
    artifacts: BTreeSet<(String, u64)>,
}

impl Acknowledgements {
    fn by(ops: &[DiskOp], power_alone: bool) -> Self {
        let said: Vec<u8> = ops.iter().filter_map(DiskOp::said).flatten().copied().collect();
        let mut promised = Self::default();
        let mut pending = Self::default();
        // A line that was cut short is ignored.
        for line in
            String::from_utf8(said).unwrap().split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
        {
            let words: Vec<&str> = line.split(' ').collect();
            let durability: Durability = match words.as_slice() {
                ["stored", _, durability, _, _] => durability.parse().unwrap(),
                _ => continue,
            };
            match words.as_slice() {
                [_, "event", _, pos, hash] => {
                    drop(pending.events.insert(pos.parse().unwrap(), (*hash).to_owned()))
                }
                // Each artifact is synced by itself, so only the durability of its own writer counts.
                [_, _, _, hash, len] if durability == Durability::Power || !power_alone => {
                    promised.artifacts.insert(((*hash).to_owned(), len.parse().unwrap()));
                }
                _ => continue,
            }
            if durability == Durability::Power || !power_alone {
                promised.events.append(&mut pending.events);
            }
        }
        promised
    }

    /// The number of items that are missing in that directory; the log there must verify in any case.
    fn missing_in(&self, dir: &Path, when: &str) -> usize {
        let store = Store::open(dir, Durability::Process).unwrap_or_else(|error| panic!("{when}: {error:?}"));
        let stored = store.read(&EventQuery::default()).unwrap_or_else(|error| panic!("{when}: {error:?}"));
        let verdict = store.verify().unwrap_or_else(|error| panic!("{when}: {error:?}"));
        assert_eq!(events_of(verdict), stored.len() as u64, "{when}");
        let stored: BTreeMap<u64, String> = stored.into_iter().map(|event| (event.pos, event.hash)).collect();
        let events = self.events.iter().filter(|(pos, hash)| stored.get(pos) != Some(hash)).count();
        let lost = |(sha256, bytes): &&(String, u64)| {
            store.verify_artifact(&ArtifactRef { sha256: sha256.clone(), bytes: *bytes }).is_err()
        };
        let artifacts = self.artifacts.iter().filter(lost).count();
        if events + artifacts > 0 {
            println!(
                "{when}: {events} of {} events and {artifacts} of {} artifacts are lost",
                self.events.len(),
                self.artifacts.len()
            );
        }
        events + artifacts
    }
}

/// Opens, writes and closes a store, once for each named durability, in one process.
pub fn live(dir: &Path, lives: &str) {
    let mut out = std::io::stdout();
    let id: BodyId = "lived".parse().unwrap();
    for (life, durability) in lives.split(' ').enumerate() {
        let store = Store::open(dir, durability.parse().unwrap()).unwrap();
        for at in 0..12 {
            // Short texts, and long ones that make SQLite write the WAL back and restart it.
            let text = "x".repeat([40, 900, 30_000][at % 3]);
            if at % 4 == 1 {
                let mut artifact = store.artifact().unwrap();
                artifact.write_all(format!("{life} {at} {text}").as_bytes()).unwrap();
                let ArtifactRef { sha256, bytes } = artifact.finish().unwrap();
                out.write_all(format!("\n{ARTIFACT}{durability} {sha256} {bytes}\n").as_bytes()).unwrap();
            }
            let data = json!({ "life": life, "text": text });
            let draft = odd_draft("life.lived".into(), Some(id.clone()), data);
            let stored = store.append_at_end(&ChainId::Body(id.clone()), vec![draft]).unwrap();
            let event = &stored[0];
            out.write_all(format!("\n{EVENT}{durability} {} {}\n", event.pos, event.hash).as_bytes())
                .unwrap();
        }
    }
}
