//! Seals: the node's chain reveals a chain that is missing, lost its end or was rewritten.

use std::time::Duration;

use proto::{ChainId, Event, event_data::LogSealed};
use store::{ChainBreach, EventLog, EventQuery, LogVerdict, Store};

use crate::scene::{SceneDir, draft_of};

/// Chains `body/one` (3 events) and `body/two` (2 events), sealed; then one more event in `body/one`.
fn sealed() -> (SceneDir, Store) {
    let dir = SceneDir::new();
    let store = dir.open();
    for (name, count) in [("one", 3), ("two", 2)] {
        let drafts = (1..=count).map(|at| draft_of(name, at)).collect();
        store.append_at_end(&ChainId::Body(name.parse().unwrap()), drafts).unwrap();
    }
    assert!(store.seal(Duration::ZERO).unwrap());
    store.append_at_end(&ChainId::Body("one".parse().unwrap()), vec![draft_of("one", 4)]).unwrap();
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { events: 7, chains: 3, .. }));
    (dir, store)
}

/// Tampers with the database, and keeps the counts consistent, as an attacker would who knows the tables.
fn broken(sql: &str) -> (String, u64, ChainBreach) {
    let (dir, store) = sealed();
    dir.meddler().execute_batch(sql).unwrap();
    dir.meddler().execute_batch("UPDATE log SET pos = (SELECT count(*) FROM events)").unwrap();
    match store.verify().unwrap() {
        LogVerdict::Broken { chain: Some(chain), seq: Some(seq), why } => (chain, seq, why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_chain_that_vanished_whole_shows() {
    let gone = "DELETE FROM events WHERE chain = 'body/two'; DELETE FROM chains WHERE chain = 'body/two'";
    let (chain, seq, why) = broken(gone);
    assert_eq!((chain.as_str(), seq, &why), ("body/two", 2, &ChainBreach::Vanished { seal: 1, sealed: 2 }));
    assert_eq!(why.to_string(), "the whole chain is missing; seal 1 of the node names its event 2");
}

#[test]
fn a_chain_that_was_cut_below_a_seal_shows() {
    let cut = "DELETE FROM events WHERE chain = 'body/one' AND seq > 2; \
               UPDATE chains SET (seq, hash) = \
               (SELECT seq, hash FROM events WHERE chain = 'body/one' AND seq = 2) WHERE chain = 'body/one'";
    let (chain, seq, why) = broken(cut);
    assert_eq!((chain.as_str(), seq, &why), ("body/one", 3, &ChainBreach::Cut { seal: 1, sealed: 3 }));
    assert_eq!(why.to_string(), "the end of the chain is missing; seal 1 of the node names its event 3");
}

#[test]
fn a_chain_that_was_written_anew_shows() {
    let (dir, store) = sealed();
    let mut event: Event = store.read(&EventQuery::of_body(&"two".parse().unwrap())).unwrap().remove(1);
    event.kind = "body.stopped".into();
    let hash = event.digest();
    let meddler = dir.meddler();
    let change = "UPDATE events SET type = 'body.stopped', hash = ?1 WHERE chain = 'body/two' AND seq = 2";
    meddler.execute(change, [&hash]).unwrap();
    meddler.execute("UPDATE chains SET hash = ?1 WHERE chain = 'body/two'", [&hash]).unwrap();
    let why = ChainBreach::Resealed { seal: 1 };
    let broken = LogVerdict::Broken { chain: Some("body/two".into()), seq: Some(2), why };
    assert_eq!(store.verify().unwrap(), broken);
}

#[test]
fn a_seal_that_was_removed_or_changed_shows() {
    let node = |sql: &str| broken(sql);
    let (chain, _, why) = node("UPDATE events SET data = '{\"heads\":[]}' WHERE type = 'log.sealed'");
    assert!(chain.starts_with("node/") && why == ChainBreach::Changed, "{chain} {why}");
    let (chain, _, why) = node("DELETE FROM events WHERE type = 'log.sealed'");
    assert!(chain.starts_with("node/") && why == ChainBreach::Missing, "{chain} {why}");
}

#[test]
fn the_chain_of_the_node_cannot_vanish_with_its_seals() {
    let (dir, store) = sealed();
    let node = ChainId::Node(store.node().unwrap()).to_string();
    for table in ["events", "chains"] {
        dir.meddler().execute(&format!("DELETE FROM {table} WHERE chain = ?1"), [&node]).unwrap();
    }
    dir.meddler().execute_batch("UPDATE log SET pos = (SELECT count(*) FROM events)").unwrap();
    let broken = LogVerdict::Broken { chain: Some(node), seq: None, why: ChainBreach::Seal };
    assert_eq!(store.verify().unwrap(), broken);
}

#[test]
fn a_chain_that_vanished_before_its_first_seal_shows_in_the_count() {
    let (dir, store) = sealed();
    store.append_at_end(&ChainId::Body("three".parse().unwrap()), vec![draft_of("three", 1)]).unwrap();
    dir.meddler()
        .execute_batch(
            "DELETE FROM events WHERE chain = 'body/three'; DELETE FROM chains WHERE chain = 'body/three'",
        )
        .unwrap();
    let why = ChainBreach::Count { found: 7, stored: 8 };
    assert_eq!(store.verify().unwrap(), LogVerdict::Broken { chain: None, seq: None, why });
}

#[test]
fn an_append_seals_when_the_last_seal_is_old_or_of_a_clock_that_was_set_back() {
    let dir = SceneDir::new();
    let store = dir.open();
    let seals =
        || store.read(&EventQuery::default()).unwrap().iter().filter(|event| event.is::<LogSealed>()).count();
    let append =
        || store.append_at_end(&ChainId::Body("one".parse().unwrap()), vec![draft_of("one", 1)]).unwrap();
    append();
    assert_eq!(seals(), 0);
    for (seals_then, moved) in [(1, "- 60001"), (2, "+ 3600000"), (3, "- 3600000")] {
        dir.meddler().execute_batch(&format!("UPDATE log SET sealed_at_ms = sealed_at_ms {moved}")).unwrap();
        assert_eq!(append().len(), 1, "the caller gets its own events alone");
        assert_eq!(seals(), seals_then);
        append();
        assert_eq!(seals(), seals_then, "the seal is new again");
    }
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { events: 10, chains: 2, .. }));
}

#[test]
fn a_seal_of_very_many_chains_is_several_events() {
    let dir = SceneDir::in_memory();
    let store = dir.open();
    for at in 0..2500 {
        let name = format!("b{at}");
        store.append_at_end(&ChainId::Body(name.parse().unwrap()), vec![draft_of(&name, 1)]).unwrap();
    }
    assert!(store.seal(Duration::ZERO).unwrap());
    let node = ChainId::Node(store.node().unwrap());
    let seals: Vec<usize> = store
        .read(&EventQuery::of_chain(&node))
        .unwrap()
        .iter()
        .filter_map(Event::data_as::<LogSealed>)
        .map(|seal| seal.heads.len())
        .collect();
    assert_eq!(seals, [2000, 500]);
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { events: 2502, chains: 2501, .. }));
}
