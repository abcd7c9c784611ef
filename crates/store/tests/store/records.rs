//! The conformance suite of `Records`; [`conformance!`] runs it for each implementation.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use store::{
    Bucket, Durability, EmbeddedRecords, KEY_LEN_MAX, RECORD_LEN_MAX, RecordKey, RecordTable, Records,
    RecordsError, Revision, WATCH_LEN_MAX,
};

use crate::{
    child::{ACKNOWLEDGED, Appender},
    scene::{Random, SceneDir},
};

const FRUIT: Bucket = Bucket::new("fruit");
const OTHER: Bucket = Bucket::new("other");
const LONG: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Count {
    count: u64,
}

/// Opens one more handle on the records of a directory, as another process would.
type Opener = fn(&Path) -> Box<dyn Records>;

/// Opens an implementation by its name, which child processes get.
fn opener(name: &str) -> Opener {
    match name {
        "embedded" => |dir| Box::new(EmbeddedRecords::at(dir, Durability::Process)),
        _ => panic!("no implementation is called {name}"),
    }
}

macro_rules! conformance {
    ($name:ident: $($law:ident),* $(,)?) => {
        mod $name {
            $(#[test]
            fn $law() {
                super::$law(stringify!($name), super::opener(stringify!($name)));
            })*
        }
    };
}

conformance!(embedded:
    a_write_needs_the_expected_revision,
    a_record_that_was_created_again_is_another_one,
    buckets_and_keys_do_not_mix,
    values_and_keys_have_limits,
    a_value_of_another_type_is_an_error,
    one_of_many_threads_creates_a_record,
    threads_lose_no_update,
    processes_lose_no_update,
    kill_9_loses_no_acknowledged_update,
    a_restart_keeps_records_and_revisions,
    a_watch_sees_every_final_state,
    a_watch_waits_for_a_change_and_no_longer,
    a_watch_returns_a_bounded_number_of_changes,
    a_watch_never_hides_a_deletion,
);

fn key(text: &str) -> RecordKey {
    text.parse().unwrap()
}

fn conflict(result: Result<impl std::fmt::Debug, RecordsError>) -> Option<Revision> {
    match result {
        Err(RecordsError::Conflict { current, .. }) => current,
        other => panic!("a conflict was expected: {other:?}"),
    }
}

fn keys(records: &dyn Records, bucket: Bucket, below: Option<&str>) -> Vec<String> {
    let below = below.map(key);
    let listing = records.list(bucket, below.as_ref()).unwrap();
    listing.records.into_iter().map(|record| record.key.to_string()).collect()
}

fn a_write_needs_the_expected_revision(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let (records, apple) = (open(&dir), key("apple"));
    assert_eq!(records.get(FRUIT, &apple).unwrap(), None);
    assert_eq!(conflict(records.update(FRUIT, &apple, "1", Revision(7))), None);
    assert_eq!(conflict(records.delete(FRUIT, &apple, Revision(7))), None);

    let first = records.create(FRUIT, &apple, "1").unwrap();
    assert!(first > Revision::START);
    assert_eq!(conflict(records.create(FRUIT, &apple, "2")), Some(first));
    let second = records.update(FRUIT, &apple, "2", first).unwrap();
    assert!(second > first);
    assert_eq!(conflict(records.update(FRUIT, &apple, "3", first)), Some(second));
    assert_eq!(conflict(records.delete(FRUIT, &apple, first)), Some(second));
    let found = records.get(FRUIT, &apple).unwrap().unwrap();
    assert_eq!((found.key, found.revision, found.value.as_str()), (apple.clone(), second, "2"));

    records.delete(FRUIT, &apple, second).unwrap();
    assert_eq!(records.get(FRUIT, &apple).unwrap(), None);
    assert_eq!(conflict(records.update(FRUIT, &apple, "3", second)), None);
}

fn a_record_that_was_created_again_is_another_one(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let (records, apple) = (open(&dir), key("apple"));
    let first = records.create(FRUIT, &apple, "1").unwrap();
    records.delete(FRUIT, &apple, first).unwrap();
    let second = records.create(FRUIT, &apple, "1").unwrap();
    assert!(second > first);
    assert_eq!(conflict(records.update(FRUIT, &apple, "2", first)), Some(second));
    assert_eq!(conflict(records.delete(FRUIT, &apple, first)), Some(second));
}

fn buckets_and_keys_do_not_mix(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    let all = ["A", "a", "a-b", "a.B", "a.b", "a.b.c", "a=2Eb", "a_b", "ab", "b.a"];
    for text in all {
        records.create(FRUIT, &key(text), &format!("{text:?}")).unwrap();
        records.create(OTHER, &key(text), "0").unwrap();
    }
    let mut sorted = all.map(str::to_owned).to_vec();
    sorted.sort();
    assert_eq!(keys(&*records, FRUIT, None), sorted);
    assert_eq!(keys(&*records, FRUIT, Some("a")), ["a.B", "a.b", "a.b.c"]);
    assert_eq!(keys(&*records, FRUIT, Some("a.b")), ["a.b.c"]);
    assert!(keys(&*records, FRUIT, Some("c")).is_empty());
    for text in all {
        let found = records.get(FRUIT, &key(text)).unwrap().unwrap();
        assert_eq!(found.value, format!("{text:?}"));
        records.delete(FRUIT, &key(text), found.revision).unwrap();
    }
    assert!(keys(&*records, FRUIT, None).is_empty());
    assert_eq!(keys(&*records, OTHER, None).len(), all.len());
}

fn values_and_keys_have_limits(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let (records, longest) = (open(&dir), key(&"k".repeat(KEY_LEN_MAX)));
    let most = "x".repeat(RECORD_LEN_MAX);
    let revision = records.create(FRUIT, &longest, &most).unwrap();
    assert_eq!(records.get(FRUIT, &longest).unwrap().unwrap().value, most);
    let more = format!("{most}x");
    for result in [
        records.create(FRUIT, &key("b"), &more).map(drop),
        records.update(FRUIT, &longest, &more, revision).map(drop),
    ] {
        assert!(matches!(result, Err(RecordsError::TooLarge { len, .. }) if len == more.len()));
    }
    assert_eq!(records.get(FRUIT, &longest).unwrap().unwrap().revision, revision);
    // A value is any text.
    records.update(FRUIT, &longest, "ä\0\"'; DROP TABLE records; --", revision).unwrap();
    assert_eq!(records.get(FRUIT, &longest).unwrap().unwrap().value, "ä\0\"'; DROP TABLE records; --");
}

fn a_value_of_another_type_is_an_error(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    records.create(FRUIT, &key("apple"), "[1").unwrap();
    let table = RecordTable::<Count>::new(&*records, FRUIT);
    for error in [table.get(&key("apple")).map(drop), table.list(None).map(drop)] {
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), "fruit record apple cannot be read");
        assert!(std::error::Error::source(&error).is_some());
    }
    assert!(table.remove(&key("apple")).unwrap(), "what cannot be read can be removed");
    assert!(!table.remove(&key("apple")).unwrap());
}

fn one_of_many_threads_creates_a_record(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    for round in 0..20 {
        let name = key(&format!("k{round}"));
        let winners: Vec<usize> = thread::scope(|scope| {
            let create = |at: usize| open(&dir).create(FRUIT, &name, &at.to_string()).is_ok().then_some(at);
            let threads: Vec<_> = (0..4).map(|at| scope.spawn(move || create(at))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        let stored = open(&dir).get(FRUIT, &name).unwrap().unwrap().value;
        assert_eq!(winners.iter().map(usize::to_string).collect::<Vec<_>>(), [stored], "round {round}");
    }
}

/// Adds one to a counter, `times` times.
fn count(records: &dyn Records, name: &str, times: u64, mut done: impl FnMut(u64)) {
    let table = RecordTable::<Count>::new(records, FRUIT);
    for _ in 0..times {
        let changed = table.change::<RecordsError>(&key(name), |found| {
            Ok(Some(Count { count: found.map_or(0, |found| found.count) + 1 }))
        });
        done(changed.unwrap().unwrap().count);
    }
}

fn counted(records: &dyn Records, name: &str) -> u64 {
    RecordTable::<Count>::new(records, FRUIT).get(&key(name)).unwrap().map_or(0, |found| found.value.count)
}

fn threads_lose_no_update(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let shared = open(&dir);
    thread::scope(|scope| {
        // Two threads share one handle, two have handles of their own.
        for _ in 0..2 {
            scope.spawn(|| count(&*shared, "hits", 100, |_| ()));
            scope.spawn(|| count(&*open(&dir), "hits", 100, |_| ()));
        }
    });
    assert_eq!(counted(&*shared, "hits"), 400);
}

fn processes_lose_no_update(name: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    // The directory is empty: the processes also race to create the store.
    let counters: Vec<_> = (0..2).map(|_| Appender::start(&format!("records {name} 200"), &dir)).collect();
    let seen: BTreeSet<u64> =
        counters.into_iter().flat_map(Appender::finish).map(|(count, _)| count).collect();
    assert_eq!(seen, (1..=400).collect(), "no count was given twice");
    assert_eq!(counted(&*open(&dir), "hits"), 400);
}

fn kill_9_loses_no_acknowledged_update(name: &str, open: Opener) {
    let mut random = Random::new();
    let dir = SceneDir::new();
    let mut acknowledged = 0;
    for round in 0..20 {
        let mut counter = Appender::start(&format!("records {name} {}", u64::MAX), &dir);
        for _ in 0..random.below(30).saturating_sub(3) {
            acknowledged = counter.next().expect("a counter never stops by itself").0;
        }
        // The random moment is the purpose; there is no condition to wait for.
        thread::sleep(Duration::from_micros(random.below(4000)));
        acknowledged = counter.kill().into_iter().map(|(count, _)| count).fold(acknowledged, u64::max);
        let stored = counted(&*open(&dir), "hits");
        // The last one may have been stored without being reported.
        assert!(
            stored == acknowledged || stored == acknowledged + 1,
            "round {round}: {stored} {acknowledged}"
        );
        acknowledged = stored;
    }
    assert!(acknowledged > 20, "hardly anything was counted: {acknowledged}");
}

/// The role of a child: counts, and reports each count that is stored.
pub fn play(dir: &Path, part: &str) {
    let (name, times) = part.split_once(' ').unwrap();
    let mut out = std::io::stdout();
    count(&*opener(name)(dir), "hits", times.parse().unwrap(), |count| {
        out.write_all(format!("\n{ACKNOWLEDGED}{count} counted\n").as_bytes()).unwrap();
    });
}

fn a_restart_keeps_records_and_revisions(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    for at in 0..10 {
        records.create(FRUIT, &key(&format!("k{at}")), &at.to_string()).unwrap();
    }
    let found = records.get(FRUIT, &key("k9")).unwrap().unwrap();
    records.delete(FRUIT, &key("k9"), found.revision).unwrap();
    let before = records.list(FRUIT, None).unwrap();
    drop(records);
    let records = open(&dir);
    assert_eq!(records.list(FRUIT, None).unwrap(), before);
    assert_eq!(before.records.len(), 9);
    let next = records.create(FRUIT, &key("k9"), "9").unwrap();
    assert!(next > before.revision && before.revision > found.revision);
}

/// Applies changes to a watcher's copy; returns the revision to continue from.
fn apply(
    records: &dyn Records,
    known: &mut BTreeMap<String, String>,
    since: Revision,
    wait: Duration,
) -> Revision {
    let changes = match records.watch(FRUIT, since, wait) {
        Ok(changes) => changes,
        Err(RecordsError::Compacted { .. }) => {
            let listing = records.list(FRUIT, None).unwrap();
            *known =
                listing.records.into_iter().map(|record| (record.key.to_string(), record.value)).collect();
            return listing.revision;
        }
        Err(error) => panic!("{error}"),
    };
    assert!(changes.iter().all(|change| change.revision > since));
    assert!(changes.is_sorted_by_key(|change| change.revision));
    let last = changes.last().map_or(since, |change| change.revision);
    for change in changes {
        match change.value {
            Some(value) => known.insert(change.key.to_string(), value),
            None => known.remove(change.key.as_str()),
        };
    }
    last
}

fn a_watch_sees_every_final_state(_: &str, open: Opener) {
    let mut random = Random::new();
    let seeds: Vec<u64> = (0..3).map(|_| random.below(u64::MAX)).collect();
    let dir = SceneDir::in_memory();
    let over = AtomicBool::new(false);
    let (known, from) = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let records = open(&dir);
            let (mut known, mut since) = (BTreeMap::new(), Revision::START);
            while !over.load(Ordering::SeqCst) {
                since = apply(&*records, &mut known, since, Duration::from_millis(5));
            }
            // All writes before the end flag are stored; one more watch returns the rest of them.
            let mut before = None;
            while before != Some(since) {
                before = Some(since);
                since = apply(&*records, &mut known, since, Duration::ZERO);
            }
            (known, since)
        });
        let writers: Vec<_> = seeds
            .iter()
            .map(|seed| {
                let dir = &dir;
                scope.spawn(move || {
                    let (records, mut random) = (open(dir), Random::from_seed(*seed | 1));
                    for at in 0..300 {
                        let name = key(&format!("k{}", random.below(12)));
                        let found = records.get(FRUIT, &name).unwrap();
                        // Some of these writes lose against the other writers, as they may.
                        let _ = match found {
                            Some(found) if random.below(2) == 0 => {
                                records.delete(FRUIT, &name, found.revision).map(drop)
                            }
                            Some(found) => {
                                records.update(FRUIT, &name, &at.to_string(), found.revision).map(drop)
                            }
                            None => records.create(FRUIT, &name, &at.to_string()).map(drop),
                        };
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        over.store(true, Ordering::SeqCst);
        watcher.join().unwrap()
    });
    let listing = open(&dir).list(FRUIT, None).unwrap();
    let stored: BTreeMap<_, _> =
        listing.records.into_iter().map(|record| (record.key.to_string(), record.value)).collect();
    assert_eq!((known, from), (stored, listing.revision));
}

fn a_watch_waits_for_a_change_and_no_longer(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    let since = records.create(FRUIT, &key("a"), "1").unwrap();
    assert_eq!(records.watch(FRUIT, since, Duration::ZERO).unwrap(), []);
    let begun = Instant::now();
    assert_eq!(records.watch(FRUIT, since, Duration::from_millis(50)).unwrap(), []);
    assert!(begun.elapsed() >= Duration::from_millis(50));

    let seen = thread::scope(|scope| {
        let watcher = scope.spawn(|| open(&dir).watch(FRUIT, since, LONG).unwrap());
        // A change in another bucket does not appear in this one.
        records.create(OTHER, &key("b"), "2").unwrap();
        let written = records.update(FRUIT, &key("a"), "2", since).unwrap();
        let seen = watcher.join().unwrap();
        assert_eq!(seen[0].revision, written);
        seen
    });
    assert_eq!((seen.len(), seen[0].key.as_str(), seen[0].value.as_deref()), (1, "a", Some("2")));
    assert!(begun.elapsed() < LONG);
}

fn a_watch_returns_a_bounded_number_of_changes(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    let count = WATCH_LEN_MAX + 7;
    for at in 0..count {
        records.create(FRUIT, &key(&format!("k{at}")), "1").unwrap();
    }
    let first = records.watch(FRUIT, Revision::START, LONG).unwrap();
    let rest = records.watch(FRUIT, first.last().unwrap().revision, LONG).unwrap();
    assert_eq!((first.len(), rest.len()), (WATCH_LEN_MAX, 7));
}

fn a_watch_never_hides_a_deletion(_: &str, open: Opener) {
    let dir = SceneDir::in_memory();
    let records = open(&dir);
    let first = records.create(FRUIT, &key("kept"), "1").unwrap();
    for at in 0..900 {
        let name = key(&format!("k{at}"));
        let revision = records.create(FRUIT, &name, "1").unwrap();
        records.delete(FRUIT, &name, revision).unwrap();
    }
    match records.watch(FRUIT, first, Duration::ZERO) {
        Ok(changes) => assert_eq!(changes.iter().filter(|change| change.value.is_none()).count(), 900),
        Err(error) => assert!(matches!(error, RecordsError::Compacted { .. }), "{error}"),
    }
    // A watcher that knows no record yet, and one that is nearly up to date, need no list.
    let all = records.watch(FRUIT, Revision::START, Duration::ZERO).unwrap();
    let live: Vec<_> = all.iter().filter(|change| change.value.is_some()).collect();
    assert_eq!((live.len(), live[0].key.as_str()), (1, "kept"));
    let last = records.list(FRUIT, None).unwrap().revision;
    assert_eq!(records.watch(FRUIT, Revision(last.0 - 1), Duration::ZERO).unwrap().len(), 1);
    // A record that was created again counts as live.
    records.create(FRUIT, &key("k1"), "2").unwrap();
    assert_eq!(keys(&*records, FRUIT, None), ["k1", "kept"]);
}

/// For the embedded implementation only: deleted records do not fill the disk, and the table is not part of
/// the log.
#[test]
fn deletions_are_dropped_and_the_log_stays_whole() {
    let dir = SceneDir::in_memory();
    let log = dir.open();
    let records = EmbeddedRecords::at(&dir, Durability::Process);
    let first = records.create(FRUIT, &key("kept"), "1").unwrap();
    for at in 0..1500 {
        let name = key(&format!("k{at}"));
        let revision = records.create(FRUIT, &name, "1").unwrap();
        records.delete(FRUIT, &name, revision).unwrap();
    }
    let rows: i64 = dir.meddler().query_row("SELECT count(*) FROM records", [], |row| row.get(0)).unwrap();
    assert!(rows <= 514, "{rows} rows are left");
    assert!(matches!(
        records.watch(FRUIT, first, Duration::ZERO),
        Err(RecordsError::Compacted { since, .. }) if since == first
    ));
    crate::scene::append(&log, crate::scene::draft(1));
    assert_eq!(crate::scene::events_of(store::EventLog::verify(&log).unwrap()), 1);
}

/// For the embedded implementation only: an invalid key that another program wrote is an error.
#[test]
fn a_key_that_was_tampered_with_is_found() {
    let dir = SceneDir::in_memory();
    let records = EmbeddedRecords::at(&dir, Durability::Process);
    records.create(FRUIT, &key("a"), "1").unwrap();
    dir.meddler().execute("UPDATE records SET key = '../a'", []).unwrap();
    let error = records.list(FRUIT, None).unwrap_err();
    assert!(matches!(&error, RecordsError::Damaged(why) if why.contains("../a")), "{error}");
}
