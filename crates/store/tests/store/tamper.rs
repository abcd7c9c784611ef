//! `verify` detects every change to the log from outside.

use std::{fs, os::unix::fs::FileExt};

use proto::{Event, event::hex};
use store::{ChainBreach, EventLog, EventQuery, LogVerdict, Store};

use crate::scene::{CHAIN, Random, SceneDir, append, draft};

fn after(sql: &str) -> LogVerdict {
    let dir = SceneDir::with_events(5);
    dir.meddler().execute_batch(sql).unwrap();
    dir.open().verify().unwrap()
}

fn broken(seq: u64, why: ChainBreach) -> LogVerdict {
    LogVerdict::Broken { chain: Some(CHAIN.to_owned()), seq: Some(seq), why }
}

/// A breach of no chain.
fn broken_anywhere(why: ChainBreach) -> LogVerdict {
    LogVerdict::Broken { chain: None, seq: None, why }
}

#[test]
fn a_log_that_nobody_touched_is_whole() {
    assert!(matches!(after("SELECT 1"), LogVerdict::Whole { events: 5, .. }));
}

#[test]
fn removed_events_show() {
    assert_eq!(after("DELETE FROM events WHERE seq = 1"), broken(1, ChainBreach::Missing));
    assert_eq!(after("DELETE FROM events WHERE seq = 3"), broken(3, ChainBreach::Missing));
    assert_eq!(after("DELETE FROM events WHERE seq > 3"), broken(4, ChainBreach::Missing));
    assert_eq!(after("DELETE FROM events"), broken(1, ChainBreach::Missing));
}

#[test]
fn a_change_of_any_field_shows() {
    for change in [
        "at = '2020-01-01T00:00:00.000000Z'",
        "type = 'body.stopped'",
        "body = 'other'",
        "body = NULL",
        "brain = 'other'",
        "brain = ''",
        "data = replace(data, '3', '4')",
        "data = data || ' '",
        "data = '{\"at\":9,' || substr(data, 2)",
        "prev = hash",
        "hash = prev",
    ] {
        assert_eq!(
            after(&format!("UPDATE events SET {change} WHERE seq = 3")),
            broken(3, ChainBreach::Changed),
            "{change}"
        );
    }
}

#[test]
fn what_is_no_event_shows() {
    for change in ["data = '{'", "data = ''", "body = 'Not An Id'", "type = CAST(x'ff' AS TEXT)"] {
        let verdict = after(&format!("UPDATE events SET {change} WHERE seq = 3"));
        assert!(
            matches!(verdict, LogVerdict::Broken { seq: Some(3), why: ChainBreach::Unreadable(_), .. }),
            "{change}: {verdict:?}"
        );
    }
    let negative = after(
        "INSERT INTO events SELECT 6, chain, -1, at, type, body, brain, exec, tag, data, prev, hash FROM events WHERE seq = 1",
    );
    assert!(
        matches!(negative, LogVerdict::Broken { seq: Some(1), why: ChainBreach::Unreadable(_), .. }),
        "{negative:?}"
    );
}

#[test]
fn events_that_changed_places_show() {
    let swap = "UPDATE events SET seq = 9 WHERE seq = 2; UPDATE events SET seq = 2 WHERE seq = 3; \
                UPDATE events SET seq = 3 WHERE seq = 9";
    assert_eq!(after(swap), broken(2, ChainBreach::Changed));
    let early = "INSERT INTO events SELECT 6, chain, 0, at, type, body, brain, exec, tag, data, prev, hash FROM events WHERE seq = 1";
    assert_eq!(after(early), broken(1, ChainBreach::Misplaced { found: 0 }));
}

#[test]
fn a_changed_event_with_a_fitting_hash_breaks_the_next() {
    let dir = SceneDir::with_events(5);
    let store = dir.open();
    let mut event: Event =
        store.read(&EventQuery { after: 2, ..EventQuery::default() }).unwrap().swap_remove(0);
    event.kind = "body.stopped".into();
    let change = "UPDATE events SET type = 'body.stopped', hash = ?1 WHERE seq = 3";
    dir.meddler().execute(change, [event.digest()]).unwrap();
    assert_eq!(store.verify().unwrap(), broken(4, ChainBreach::Unchained));
}

#[test]
fn a_head_that_lies_shows() {
    assert_eq!(after("DELETE FROM chains"), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE chains SET seq = 4"), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE chains SET seq = -4"), broken(5, ChainBreach::Head));
    assert_eq!(after(&format!("UPDATE chains SET hash = '{}'", hex(&[7; 32]))), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE chains SET seq = 6"), broken(6, ChainBreach::Missing));
}

#[test]
fn a_head_without_its_chain_and_a_log_without_its_state_show() {
    let gone = "DELETE FROM events; UPDATE log SET pos = 0";
    assert_eq!(after(gone), broken(1, ChainBreach::Missing));
    assert_eq!(after("DELETE FROM log"), broken_anywhere(ChainBreach::Schema));
    let why = ChainBreach::Count { found: 5, stored: 6 };
    assert_eq!(after("UPDATE log SET pos = 6"), broken_anywhere(why));
}

#[test]
fn columns_that_hide_an_event_from_a_query_show() {
    let dir = SceneDir::new();
    let store = dir.open();
    let started = serde_json::json!({ "argv": ["true"], "tag": "t" });
    append(&store, crate::scene::odd_draft("exec.started".into(), Some("odd".parse().unwrap()), started));
    for change in ["exec = NULL", "exec = 7", "tag = NULL", "tag = 'u'"] {
        dir.meddler().execute_batch(&format!("UPDATE events SET {change}")).unwrap();
        assert_eq!(store.verify().unwrap(), broken(1, ChainBreach::Index), "{change}");
        dir.meddler().execute_batch("UPDATE events SET exec = 1, tag = 't'").unwrap();
    }
    assert!(matches!(store.verify().unwrap(), LogVerdict::Whole { .. }));
}

#[test]
fn an_event_that_was_moved_in_the_order_of_storing_shows() {
    let moved = "UPDATE events SET pos = 9 WHERE seq = 2; UPDATE events SET pos = 2 WHERE seq = 3; \
                 UPDATE events SET pos = 3 WHERE seq = 2";
    assert_eq!(after(moved), broken(3, ChainBreach::Position));
}

#[test]
fn an_event_in_another_chain_shows() {
    let moved = "UPDATE events SET chain = 'body/other', seq = 1 WHERE seq = 5; \
                 INSERT INTO chains SELECT 'body/other', 1, hash FROM chains; \
                 UPDATE chains SET (seq, hash) = (SELECT seq, hash FROM events WHERE seq = 4) WHERE chain = 'body/odd'";
    let verdict = after(moved);
    let why = ChainBreach::Changed;
    assert_eq!(verdict, LogVerdict::Broken { chain: Some("body/other".into()), seq: Some(1), why });
    let nameless = after("UPDATE events SET chain = 'nonsense' WHERE seq = 5");
    assert!(matches!(nameless, LogVerdict::Broken { .. }), "{nameless:?}");
}

#[test]
fn changed_tables_show() {
    for change in [
        "DROP INDEX events_by_body",
        "DROP INDEX events_by_body; CREATE INDEX events_by_body ON events (body) WHERE body = 'odd'",
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END",
        "CREATE TABLE more (x)",
        "ALTER TABLE events RENAME TO other; CREATE VIEW events AS SELECT * FROM other",
        "ALTER TABLE events ADD COLUMN more TEXT",
        "DROP TABLE chains",
        "DROP TABLE log",
        "DROP INDEX events_by_exec",
    ] {
        assert_eq!(after(change), broken_anywhere(ChainBreach::Schema), "{change}");
    }
}

#[test]
fn a_trigger_in_the_file_does_not_run() {
    let dir = SceneDir::with_events(2);
    dir.meddler()
        .execute_batch("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events WHERE seq = 1; END")
        .unwrap();
    let store = dir.open();
    append(&store, draft(3));
    assert_eq!(store.read(&EventQuery::default()).unwrap().len(), 3);
}

/// A closed log with everything in one file; and the offset of its table.
fn at_rest(events: u64) -> (SceneDir, u64, u64) {
    let dir = SceneDir::with_events(events);
    let meddler = dir.meddler();
    let number = |sql: &str| meddler.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap() as u64;
    number("PRAGMA wal_checkpoint(TRUNCATE)");
    let page = number("PRAGMA page_size");
    let root = (number("SELECT rootpage FROM sqlite_schema WHERE name = 'events'") - 1) * page;
    drop(meddler);
    (dir, page, root)
}

#[test]
fn a_place_given_twice_shows() {
    let (dir, page, root) = at_rest(2);
    let file = fs::File::options().read(true).write(true).open(dir.log()).unwrap();
    let mut leaf = vec![0; page as usize];
    file.read_exact_at(&mut leaf, root).unwrap();
    assert_eq!((leaf[0], leaf[4]), (0x0d, 2), "one leaf with two rows");
    // A cell begins with the length of its row, two bytes for ours, and its rowid.
    let cell = usize::from(u16::from_be_bytes([leaf[10], leaf[11]]));
    assert_eq!((leaf[cell] & 0x80, leaf[cell + 2]), (0x80, 2));
    file.write_all_at(&[1], root + cell as u64 + 2).unwrap();
    let verdict = dir.open().verify().unwrap();
    // The index that the walk uses points to a row that does not exist.
    let damaged = |why: &ChainBreach| matches!(why, ChainBreach::Database(_));
    assert!(matches!(&verdict, LogVerdict::Broken { why, .. } if damaged(why)), "{verdict:?}");
}

#[test]
fn a_broken_page_is_a_finding_and_never_a_panic() {
    let (dir, page, _) = at_rest(40);
    let whole = fs::read(dir.log()).unwrap();
    for at in 0..whole.len() / page as usize {
        for garbage in [0x00, 0xff, 0x0d] {
            let mut bytes = whole.clone();
            bytes[at * page as usize..][..page as usize].fill(garbage);
            fs::write(dir.log(), bytes).unwrap();
            let found =
                Store::open_read_only(&dir).map(|store| (store.verify(), store.read(&EventQuery::default())));
            assert!(!matches!(found, Ok((Ok(LogVerdict::Whole { .. }), _))), "page {at} of {garbage:#x}");
        }
    }
}

#[test]
fn any_changed_byte_is_found_or_means_nothing() {
    let mut random = Random::new();
    let (dir, _, _) = at_rest(12);
    let whole = fs::read(dir.log()).unwrap();
    let read = || {
        let store = Store::open_read_only(&dir).ok()?;
        let verdict = store.verify().ok()?;
        let odd = EventQuery { body: Some("odd".parse().unwrap()), ..EventQuery::default() };
        matches!(verdict, LogVerdict::Whole { .. })
            .then(|| (verdict, store.read(&EventQuery::default()).unwrap(), store.read(&odd).unwrap()))
    };
    let before = read();
    assert!(before.is_some());
    for _ in 0..400 {
        let (at, flip) = (random.below(whole.len() as u64) as usize, random.below(255) as u8 + 1);
        let mut bytes = whole.clone();
        bytes[at] ^= flip;
        fs::write(dir.log(), bytes).unwrap();
        // The byte is unused space of a page, or a counter that only SQLite reads: then all events are
        // unchanged.
        let found = read();
        assert!(found.is_none() || found == before, "byte {at} changed by {flip:#x}: {found:?}");
    }
}
