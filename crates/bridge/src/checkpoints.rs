//! Checkpoints: a place in the log together with a snapshot of the Body, taken after turns that changed it.
//!
//! The first one is taken before the first answer, so that a replay can begin where the agent began. A snapshot copies the
//! files that the Body has changed since it began, so its cost grows with them: checkpoints take at most a share of the
//! agent's time, and only some of the older ones are kept.
//!
//! Invariant: a checkpoint that cannot be taken does not stop the agent; the driver tries again after the next turn.
//! Invariant: the first checkpoint and the newest one are never removed while their agent exists.
//! Invariant: a checkpoint that another agent took is not removed here, although a fork of that agent has it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use brain::agent::{AgentView, BoxFuture, CallContext, CallResult, Checkpoint, Middleware};
use fleet::Fleet;
use proto::{
    AgentId, EventData, Kind, SnapshotId,
    event_data::{CallRisk, CallVenue, CheckpointRemoved, CheckpointTaken},
};

use crate::host::AgentSettings;

/// Snapshots take at most this share of the agent's time: one hundredth parts.
const SHARE_MAX: u32 = 5;
/// How many of an agent's newest checkpoints are kept.
const NEWEST_KEPT: usize = 50;
/// Of the older ones, one of so many turns is kept.
const OLDER_TURNS: u64 = 10;
/// How much the checkpoints of one agent may take on the disk.
const BYTES_MAX: u64 = 4 << 30;
/// After how many checkpoints their sizes are added up.
const WEIGH_EVERY: usize = 5;

/// Takes a snapshot after a turn that changed the Body, if enough time has passed since the one before.
pub struct BodyCheckpoints {
    fleet: Arc<Fleet>,
    least_between: Duration,
    /// Whether the agent has any: the Body of a sub-agent is a fork or its parent's, and has none of its own.
    is_on: bool,
    /// Whether a call may have changed the Body since the newest checkpoint. Calls of an earlier driver may have.
    is_changed: AtomicBool,
    newest: Mutex<Option<Newest>>,
}

struct Newest {
    ended: Instant,
    took: Duration,
}

impl BodyCheckpoints {
    /// Takes checkpoints as the settings of the agent say.
    pub fn new(fleet: Arc<Fleet>, settings: AgentSettings) -> Self {
        Self {
            fleet,
            least_between: Duration::from_millis(settings.checkpoint_every_ms),
            is_on: !settings.is_subagent(),
            is_changed: AtomicBool::new(true),
            newest: Mutex::new(None),
        }
    }

    fn is_due(&self, view: &AgentView) -> bool {
        if view.checkpoints.is_empty() {
            return true;
        }
        let Ok(newest) = self.newest.lock() else { return false };
        let Some(newest) = newest.as_ref() else { return self.is_changed.load(Ordering::Relaxed) };
        // A time that a person chose counts as it is; without one the share decides.
        let share = newest.took * (100 / SHARE_MAX);
        let between = if self.least_between.is_zero() { share } else { self.least_between };
        self.is_changed.load(Ordering::Relaxed) && newest.ended.elapsed() >= between
    }

    async fn take(&self, view: &AgentView) -> Vec<EventData> {
        let wanted = self.is_on && self.is_due(view);
        let (Some(body), Some(spec), true) = (&view.body, &view.spec, wanted) else { return Vec::new() };
        let began = Instant::now();
        let taken = self.fleet.snapshots().create_checkpoint(body, &spec.id).await;
        let took = began.elapsed();
        if let Ok(mut newest) = self.newest.lock() {
            *newest = Some(Newest { ended: Instant::now(), took });
        }
        let Ok(taken) = taken else { return Vec::new() };
        self.is_changed.store(false, Ordering::Relaxed);
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let mut events: Vec<EventData> =
            vec![CheckpointTaken { turn: view.turn, snapshot: taken.id, took_ms }.into()];
        events.extend(self.remove_surplus(view));
        events
    }

    /// Removes the checkpoints that are too many. One that is in use stays.
    fn remove_surplus(&self, view: &AgentView) -> Vec<EventData> {
        let own = own_checkpoints(view);
        if own.len() < NEWEST_KEPT && !own.len().is_multiple_of(WEIGH_EVERY) {
            return Vec::new();
        }
        let snapshots = self.fleet.snapshots();
        let sizes: BTreeMap<SnapshotId, u64> =
            snapshots.list().unwrap_or_default().into_iter().map(|view| (view.id, view.bytes)).collect();
        let surplus = find_surplus(&own, &sizes, BYTES_MAX);
        let is_gone = |snapshot: &SnapshotId| match snapshots.remove(snapshot.as_str()) {
            Ok(_) => true,
            Err(failure) => failure.kind == Kind::NotFound,
        };
        let removed = surplus.into_iter().filter(is_gone);
        removed.map(|snapshot| CheckpointRemoved { snapshot }.into()).collect()
    }
}

/// The checkpoints of an agent that it took itself.
fn own_checkpoints(view: &AgentView) -> Vec<&Checkpoint> {
    let id: Option<&AgentId> = view.spec.as_ref().map(|spec| &spec.id);
    view.checkpoints.iter().filter(|checkpoint| checkpoint.agent.as_ref() == id).collect()
}

/// The snapshots of checkpoints that are too many, oldest first.
fn find_surplus(own: &[&Checkpoint], sizes: &BTreeMap<SnapshotId, u64>, bytes_max: u64) -> Vec<SnapshotId> {
    let mut surplus = Vec::new();
    let mut kept: Vec<&Checkpoint> = Vec::new();
    let newest = own.len().saturating_sub(NEWEST_KEPT);
    for (index, checkpoint) in own.iter().enumerate() {
        let era = |checkpoint: &Checkpoint| checkpoint.turn / OLDER_TURNS;
        let is_first_of_era = kept.last().is_none_or(|before| era(before) != era(checkpoint));
        if index >= newest || is_first_of_era {
            kept.push(checkpoint);
        } else {
            surplus.push(checkpoint.snapshot.clone());
        }
    }
    let size = |checkpoint: &&Checkpoint| sizes.get(&checkpoint.snapshot).copied().unwrap_or(0);
    let mut bytes: u64 = kept.iter().map(size).sum();
    // The first one is where a replay begins, and the newest one is the way back from a mistake.
    let last = kept.len().saturating_sub(1);
    for checkpoint in kept.get(1..last).unwrap_or_default() {
        if bytes <= bytes_max {
            break;
        }
        bytes -= size(checkpoint);
        surplus.push(checkpoint.snapshot.clone());
    }
    surplus
}

impl Middleware for BodyCheckpoints {
    fn name(&self) -> &'static str {
        "checkpoints"
    }

    fn before_request<'a>(&'a self, view: &'a AgentView, _: bool) -> BoxFuture<'a, Vec<EventData>> {
        Box::pin(async move {
            if view.turn == 0 && view.checkpoints.is_empty() { self.take(view).await } else { Vec::new() }
        })
    }

    fn refine<'a>(&'a self, context: &'a CallContext, result: CallResult) -> BoxFuture<'a, CallResult> {
        let reads = matches!(context.plan.risk, CallRisk::Pure | CallRisk::Read);
        if !reads && matches!(context.plan.venue, CallVenue::Body) {
            self.is_changed.store(true, Ordering::Relaxed);
        }
        Box::pin(async { result })
    }

    fn after_turn<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Vec<EventData>> {
        Box::pin(self.take(view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoints(turns: impl IntoIterator<Item = u64>) -> Vec<Checkpoint> {
        let make = |turn: u64| Checkpoint {
            agent: None,
            seq: turn,
            turn,
            snapshot: format!("s{turn}").parse().unwrap(),
        };
        turns.into_iter().map(make).collect()
    }

    fn surplus(all: &[Checkpoint], bytes_max: u64) -> Vec<String> {
        let sizes = all.iter().map(|one| (one.snapshot.clone(), 10)).collect();
        let all: Vec<&Checkpoint> = all.iter().collect();
        find_surplus(&all, &sizes, bytes_max).into_iter().map(|id| id.to_string()).collect()
    }

    #[test]
    fn the_first_the_newest_and_one_of_ten_turns_are_kept() {
        assert_eq!(surplus(&checkpoints(0..50), u64::MAX), Vec::<String>::new());
        let all = checkpoints(0..75);
        let kept: Vec<String> = all
            .iter()
            .map(|one| one.snapshot.to_string())
            .filter(|id| !surplus(&all, u64::MAX).contains(id))
            .collect();
        assert_eq!(kept.len(), 50 + 3);
        assert_eq!(kept[..4], ["s0", "s10", "s20", "s25"]);
        // Removing again and again keeps the same ones.
        let left: Vec<Checkpoint> =
            all.iter().filter(|one| kept.contains(&one.snapshot.to_string())).cloned().collect();
        assert_eq!(surplus(&left, u64::MAX), Vec::<String>::new());
        let far = surplus(&checkpoints(0..1_000), u64::MAX);
        assert_eq!(1_000 - far.len(), 50 + 95);
    }

    #[test]
    fn room_on_the_disk_is_a_limit_for_all_but_the_first_and_the_newest() {
        assert_eq!(surplus(&checkpoints(0..5), 30), ["s1", "s2"]);
        assert_eq!(surplus(&checkpoints(0..5), 0), ["s1", "s2", "s3"]);
        assert_eq!(surplus(&checkpoints(0..1), 0), Vec::<String>::new());
    }
}
