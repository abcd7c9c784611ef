//! Whatever is done to the log behind our back shows.

use std::{fs, os::unix::fs::FileExt};

use proto::{Event, event::hex};
use store::{ChainBreach, ChainVerdict, EventQuery, Store};

use crate::scene::{Random, SceneDir, draft};

fn after(sql: &str) -> ChainVerdict {
    let dir = SceneDir::with_events(5);
    dir.meddler().execute_batch(sql).unwrap();
    dir.open().verify().unwrap()
}

fn broken(seq: u64, why: ChainBreach) -> ChainVerdict {
    ChainVerdict::Broken { seq, why }
}

#[test]
fn a_log_that_nobody_touched_is_whole() {
    assert!(matches!(after("SELECT 1"), ChainVerdict::Whole { events: 5, .. }));
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
            matches!(verdict, ChainVerdict::Broken { seq: 3, why: ChainBreach::Unreadable(_) }),
            "{change}: {verdict:?}"
        );
    }
    let negative = after(
        "INSERT INTO events SELECT -1, at, type, body, brain, data, prev, hash FROM events WHERE seq = 1",
    );
    assert!(
        matches!(negative, ChainVerdict::Broken { seq: 1, why: ChainBreach::Unreadable(_) }),
        "{negative:?}"
    );
}

#[test]
fn events_that_changed_places_show() {
    let swap = "UPDATE events SET seq = 9 WHERE seq = 2; UPDATE events SET seq = 2 WHERE seq = 3; \
                UPDATE events SET seq = 3 WHERE seq = 9";
    assert_eq!(after(swap), broken(2, ChainBreach::Changed));
    let early =
        "INSERT INTO events SELECT 0, at, type, body, brain, data, prev, hash FROM events WHERE seq = 1";
    assert_eq!(after(early), broken(1, ChainBreach::Misplaced { found: 0 }));
}

#[test]
fn a_changed_event_with_a_fitting_hash_breaks_the_next() {
    let dir = SceneDir::with_events(5);
    let store = dir.open();
    let mut event: Event =
        store.events(&EventQuery { after: 2, ..EventQuery::default() }).unwrap().swap_remove(0);
    event.kind = "body.stopped".into();
    let change = "UPDATE events SET type = 'body.stopped', hash = ?1 WHERE seq = 3";
    dir.meddler().execute(change, [event.digest()]).unwrap();
    assert_eq!(store.verify().unwrap(), broken(4, ChainBreach::Unchained));
}

#[test]
fn a_head_that_lies_shows() {
    assert_eq!(after("DELETE FROM head"), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE head SET seq = 4"), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE head SET seq = -4"), broken(5, ChainBreach::Head));
    assert_eq!(after(&format!("UPDATE head SET hash = '{}'", hex(&[7; 32]))), broken(5, ChainBreach::Head));
    assert_eq!(after("UPDATE head SET seq = 6"), broken(6, ChainBreach::Missing));
}

#[test]
fn a_cut_together_with_the_head_shows_against_a_head_kept_elsewhere() {
    let dir = SceneDir::with_events(5);
    let store = dir.open();
    let ChainVerdict::Whole { head: kept, .. } = store.verify().unwrap() else { panic!("not whole") };
    let cut = "DELETE FROM events WHERE seq = 5; UPDATE head SET (seq, hash) = (SELECT seq, hash FROM events WHERE seq = 4)";
    dir.meddler().execute_batch(cut).unwrap();
    let ChainVerdict::Whole { events: 4, head } = store.verify().unwrap() else { panic!("not whole") };
    assert_ne!(head, kept);
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
        "DROP TABLE head",
    ] {
        assert_eq!(after(change), broken(1, ChainBreach::Schema), "{change}");
    }
}

#[test]
fn a_trigger_in_the_file_does_not_run() {
    let dir = SceneDir::with_events(2);
    dir.meddler()
        .execute_batch("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events WHERE seq = 1; END")
        .unwrap();
    let store = dir.open();
    store.append(draft(3)).unwrap();
    assert_eq!(store.events(&EventQuery::default()).unwrap().len(), 3);
}

/// A closed log of which everything is in the one file; and where its tables begin.
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
    // A cell is the length of its row, two bytes for ours, and its place.
    let cell = usize::from(u16::from_be_bytes([leaf[10], leaf[11]]));
    assert_eq!((leaf[cell] & 0x80, leaf[cell + 2]), (0x80, 2));
    file.write_all_at(&[1], root + cell as u64 + 2).unwrap();
    let verdict = dir.open().verify().unwrap();
    assert_eq!(verdict, broken(2, ChainBreach::Misplaced { found: 1 }));
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
            let found = Store::open_read_only(&dir)
                .map(|store| (store.verify(), store.events(&EventQuery::default())));
            assert!(!matches!(found, Ok((Ok(ChainVerdict::Whole { .. }), _))), "page {at} of {garbage:#x}");
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
        matches!(verdict, ChainVerdict::Whole { .. })
            .then(|| (verdict, store.events(&EventQuery::default()).unwrap(), store.events(&odd).unwrap()))
    };
    let before = read();
    assert!(before.is_some());
    for _ in 0..400 {
        let (at, flip) = (random.below(whole.len() as u64) as usize, random.below(255) as u8 + 1);
        let mut bytes = whole.clone();
        bytes[at] ^= flip;
        fs::write(dir.log(), bytes).unwrap();
        // Free room of a page, or a counter that only SQLite reads: then all events are what they were.
        let found = read();
        assert!(found.is_none() || found == before, "byte {at} changed by {flip:#x}: {found:?}");
    }
}
