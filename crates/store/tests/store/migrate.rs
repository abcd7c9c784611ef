//! A data directory of the version with one chain opens, verifies and continues.

use std::{fs, path::Path, process::Command, time::Duration};

use proto::{
    BodyId, ChainHead, ChainId, Draft, Event,
    event_data::{BodyStopped, ExecDetached, LogSealed},
};
use store::{ChainBreach, Durability, EventLog, EventQuery, ExecFilter, LogVerdict, OpenError, Store};

use crate::scene::{SceneDir, odd_draft};

/// Written by the last version with one chain: two runs, a Body with two commands, a key.
const ONE_CHAIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/one-chain.tar.gz");
/// The output of `pal events verify` of that version.
const HEAD: &str = "f28d897ba35ab20b9bcf11c5ec85e3bd0ab09b573e24633af67fe709fdfc79cb";
const EVENTS: u64 = 18;
/// The Body that was not removed.
const BODY: &str = "ad8dmwbr75dn";

fn one_chain() -> SceneDir {
    let dir = SceneDir::new();
    let unpacked = Command::new("tar").arg("-xzf").arg(ONE_CHAIN).arg("-C").arg(&*dir).status().unwrap();
    assert!(unpacked.success());
    // The archive names no owner; files of a data directory are accessible only by their owner.
    dir
}

fn body() -> BodyId {
    BODY.parse().unwrap()
}

fn raw_rows(dir: &Path) -> Vec<(i64, String, String, String, String)> {
    let connection = rusqlite::Connection::open(dir.join(store::FILE)).unwrap();
    let mut statement =
        connection.prepare("SELECT seq, at, type, data, hash FROM events ORDER BY 1 LIMIT 18").unwrap();
    let rows = statement
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)))
        .unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn a_log_of_one_chain_opens_and_keeps_its_events_byte_for_byte() {
    let (dir, untouched) = (one_chain(), one_chain());
    let store = dir.open();
    let events = store.read(&EventQuery::default()).unwrap();
    assert_eq!(events.len() as u64, EVENTS);
    assert!(events.iter().zip(1..).all(|(event, at)| (event.seq, event.pos, event.v) == (at, at, 1)));
    assert!(events.iter().all(|event| event.chain == ChainId::OneChain && event.digest() == event.hash));
    assert_eq!(events.last().unwrap().hash, HEAD);
    let LogVerdict::Whole { events, chains: 1, .. } = store.verify().unwrap() else { panic!("not whole") };
    assert_eq!(events, EVENTS);
    drop(store);
    assert_eq!(raw_rows(&dir), raw_rows(&untouched));
    assert!(matches!(Store::open_read_only(&untouched), Err(OpenError::Older { found: 1, .. })));
}

#[test]
fn a_body_of_one_chain_goes_on_in_its_own_and_its_commands_keep_their_numbers() {
    let dir = one_chain();
    let store = dir.open();
    let (own, old_end) = (ChainId::Body(body()), ChainHead { seq: EVENTS, hash: HEAD.into() });
    assert_eq!(store.head(&own).unwrap(), old_end, "the chain of a Body that lived goes on");
    assert_eq!(store.head(&ChainId::Body("new".parse().unwrap())).unwrap(), ChainHead::genesis());
    let starts = EventQuery {
        exec: Some(ExecFilter::Any),
        kinds: vec!["exec.started"],
        ..EventQuery::of_body(&body())
    };
    let numbers: Vec<u64> = store.read(&starts).unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(numbers, [13, 15]);
    assert_eq!(store.read(&EventQuery::of_exec(&body(), 13)).unwrap().len(), 2, "its start and its end");
    // The end of a command that started before the migration is found with its start.
    let left = store.append_at_end(&own, vec![Draft::about(&body(), ExecDetached { exec: 15 })]).unwrap();
    assert_eq!((left[0].seq, left[0].v, left[0].prev.as_str()), (EVENTS + 1, 2, HEAD));
    let of_exec: Vec<u64> =
        store.read(&EventQuery::of_exec(&body(), 15)).unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(of_exec, [15, 16, EVENTS + 1]);
    // A new command gets a number that no command of the old chain has.
    let started = odd_draft("exec.started".into(), Some(body()), serde_json::json!({ "argv": ["true"] }));
    assert_eq!(store.append_at_end(&own, vec![started]).unwrap()[0].seq, EVENTS + 2);
    assert_eq!(store.read(&EventQuery::of_exec(&body(), EVENTS + 2)).unwrap().len(), 1);
    assert_eq!(store.read(&EventQuery::of_body(&body())).unwrap().len(), 7 + 2);
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { .. }));
}

#[test]
fn the_first_append_after_the_migration_seals_the_old_chain() {
    let dir = one_chain();
    let store = dir.open();
    let stopped = || Draft::about(&body(), BodyStopped { grace_ms: 1 });
    store.append_at_end(&ChainId::Body(body()), vec![stopped()]).unwrap();
    let node = ChainId::Node(store.node().unwrap());
    let seals = store.read(&EventQuery::of_chain(&node)).unwrap();
    let heads = seals[0].data_as::<LogSealed>().unwrap().heads;
    let names: Vec<String> = heads.iter().map(|head| head.chain.to_string()).collect();
    assert_eq!((seals.len(), names), (1, vec![format!("body/{BODY}"), "log".to_owned()]));
    assert_eq!((heads[1].seq, heads[1].hash.as_str()), (EVENTS, HEAD));
    assert_eq!((seals[0].seq, seals[0].prev.as_str()), (EVENTS + 1, HEAD), "the node's chain goes on, too");
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { events: 20, chains: 3, .. }));
    // The old chain cannot lose its end undetected any more, not even together with its head.
    let cut = "DELETE FROM events WHERE chain = 'log' AND seq = 18; \
               UPDATE chains SET (seq, hash) = (SELECT seq, hash FROM events WHERE chain = 'log' AND seq = 17) \
               WHERE chain = 'log'; UPDATE log SET pos = pos - 1";
    dir.meddler().execute_batch(cut).unwrap();
    assert!(matches!(store.verify().unwrap(), LogVerdict::Broken { why: ChainBreach::Missing, .. }));
}

#[test]
fn a_migration_that_is_cut_short_is_done_by_the_next_process() {
    let dir = one_chain();
    // SQLite rolls back the transaction of a process that was killed before its commit.
    let meddler = dir.meddler();
    meddler.execute_batch("BEGIN IMMEDIATE; ALTER TABLE events RENAME TO events_v1").unwrap();
    drop(meddler);
    let stores: Vec<Event> = std::thread::scope(|scope| {
        let opened: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let draft = Draft::about(&body(), BodyStopped { grace_ms: 1 });
                    dir.open().append_at_end(&ChainId::Body(body()), vec![draft]).unwrap().remove(0)
                })
            })
            .collect();
        opened.into_iter().map(|opened| opened.join().unwrap()).collect()
    });
    let mut seqs: Vec<u64> = stores.iter().map(|event| event.seq).collect();
    seqs.sort();
    assert_eq!(seqs, [19, 20, 21, 22]);
    assert!(matches!(dir.open().verify().unwrap(), LogVerdict::Whole { events: 23, .. }));
}

#[test]
fn a_damaged_log_of_one_chain_opens_and_shows() {
    for (damage, seq) in [
        ("DELETE FROM events WHERE seq = 5", 5),
        ("UPDATE events SET type = 'body.stopped' WHERE seq = 5", 5),
        ("DELETE FROM events WHERE seq = 18", 18),
        ("DELETE FROM head", 18),
        ("UPDATE events SET data = '{' WHERE seq = 3", 3),
    ] {
        let dir = one_chain();
        dir.meddler().execute_batch(damage).unwrap();
        match dir.open().verify().unwrap() {
            LogVerdict::Broken { chain, seq: found, .. } => {
                assert_eq!((chain.as_deref(), found), (Some("log"), Some(seq)), "{damage}");
            }
            whole => panic!("{damage}: {whole:?}"),
        }
    }
}

#[test]
fn a_migrated_log_is_as_durable_and_as_private_as_a_new_one() {
    use std::os::unix::fs::PermissionsExt;
    let dir = one_chain();
    let store = Store::open(&dir, Durability::Power).unwrap();
    assert!(store.follow(&EventQuery::of_body(&body()), Duration::ZERO).unwrap().len() == 7);
    for name in ["events.db", "events.db-wal"] {
        assert_eq!(fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
}
