//! Full disks, missing permissions and foreign files cause specific errors.

use std::{
    error::Error,
    fs,
    io::{ErrorKind, Write},
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
};

use store::{
    AppendError, ArtifactError, Artifacts, Durability, EventLog, EventQuery, OpenError, SCHEMA_VERSION, Store,
};

use crate::{
    child::{ChildPlace, play as play_in_child},
    scene::{SceneDir, append, chain, draft, events_of},
};

fn open(dir: &Path) -> Result<Store, OpenError> {
    Store::open(dir, Durability::Process)
}

/// The roles of children; the tests below start them.
pub fn play(role: &str, dir: &Path) {
    match role {
        "fill the disk" => fill(dir),
        "meet a read-only log" => {
            refused(dir, ErrorKind::ReadOnlyFilesystem, &dir.join("events.db"));
            let store = Store::open_read_only(dir).unwrap();
            assert_eq!(store.read(&EventQuery::default()).unwrap().len(), 3);
            assert_eq!(events_of(store.verify().unwrap()), 3);
        }
        "meet a read-only directory" => {
            refused(dir, ErrorKind::ReadOnlyFilesystem, dir);
            assert!(matches!(Store::open_read_only(dir), Err(OpenError::Missing { .. })));
        }
        "meet the log of another" => {
            refused(dir, ErrorKind::PermissionDenied, &dir.join("events.db"));
            assert!(matches!(Store::open_read_only(dir), Err(OpenError::Access { .. })));
        }
        _ => panic!("no role {role:?}"),
    }
}

fn refused(dir: &Path, why: ErrorKind, what: &Path) {
    match open(dir) {
        Err(error @ OpenError::Access { .. }) => {
            let cause = error.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
            assert_eq!(cause.kind(), why);
            assert_eq!(error.to_string(), format!("cannot open the event log {}", what.display()));
        }
        other => panic!("{other:?}"),
    }
}

fn fill(dir: &Path) {
    fs::write(dir.join("ballast"), vec![0; 64 * 1024]).unwrap();
    let store = open(dir).unwrap();
    let mut stored = 0;
    let error = loop {
        match store.append_at_end(&chain(), vec![draft(stored)]) {
            Ok(events) => stored = events[0].seq,
            Err(error) => break error,
        }
    };
    assert!(stored > 10, "{stored} events fit");
    assert!(matches!(error, AppendError::DiskFull), "{error:?}");
    assert_eq!(error.to_string(), "the disk of the event log is full; the event was not stored");
    assert_eq!(store.last_pos().unwrap(), stored);
    assert_eq!(events_of(store.verify().unwrap()), stored);
    // Of many events at once, none is stored.
    assert!(matches!(store.append_at_end(&chain(), (0..9).map(draft).collect()), Err(AppendError::DiskFull)));
    // When there is space again, the store need not be opened again.
    fs::remove_file(dir.join("ballast")).unwrap();
    assert_eq!(append(&store, draft(0)).seq, stored + 1);
    assert_eq!(events_of(store.verify().unwrap()), stored + 1);
    // An artifact that does not fit leaves no file.
    let mut writer = store.artifact().unwrap();
    let error = writer.write_all(&vec![1; 1024 * 1024]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    drop(writer);
    assert_eq!(fs::read_dir(dir.join("artifacts")).unwrap().count(), 0);
    // A new log does not fit either, and its remains do not disturb the next attempt.
    let new = dir.join("new");
    fs::create_dir(&new).unwrap();
    fs::write(dir.join("ballast"), vec![0; 1024 * 1024]).unwrap_err();
    open(&new).unwrap_err();
    fs::remove_file(dir.join("ballast")).unwrap();
    append(&open(&new).unwrap(), draft(1));
}

#[test]
fn a_full_disk_is_named_and_stores_nothing_by_half() {
    let dir = SceneDir::new();
    play_in_child("fill the disk", &dir, ChildPlace::Behind("mount -t tmpfs -o size=320k tmpfs \"$1\""));
}

const READ_ONLY: ChildPlace =
    ChildPlace::Behind("mount --bind \"$1\" \"$1\"; mount -o remount,bind,ro \"$1\"");

#[test]
fn a_read_only_disk_is_named_and_can_be_read() {
    let dir = SceneDir::with_events(3);
    assert!(dir.join("events.db-wal").metadata().unwrap().len() > 0, "events are still in the WAL");
    play_in_child("meet a read-only log", &dir, READ_ONLY);
    // Another program's close writes the WAL back and removes it.
    dir.meddler().query_row("SELECT count(*) FROM events", [], |_| Ok(())).unwrap();
    assert!(!dir.join("events.db-wal").exists());
    play_in_child("meet a read-only log", &dir, READ_ONLY);
}

#[test]
fn a_read_only_directory_is_named() {
    play_in_child("meet a read-only directory", &SceneDir::new(), READ_ONLY);
}

#[test]
fn the_log_of_another_is_named() {
    let dir = SceneDir::with_events(1);
    fs::set_permissions(dir.log(), fs::Permissions::from_mode(0o000)).unwrap();
    // Root can read every file, except in a user namespace that does not map the file's owner.
    let place = match chown(dir.log(), Some(12345), Some(12345)) {
        Ok(()) => ChildPlace::Behind(":"),
        Err(_) => ChildPlace::Here,
    };
    play_in_child("meet the log of another", &dir, place);
}

#[test]
fn a_file_that_is_no_database_is_named() {
    for bytes in [
        &b"hello, I am a text and longer than the head of a database could ever be, which is 100 bytes, so"[..],
        &[7; 5000],
    ] {
        let dir = SceneDir::new();
        fs::write(dir.log(), bytes).unwrap();
        for opened in [open(&dir), Store::open_read_only(&dir)] {
            let error = opened.unwrap_err();
            assert!(matches!(error, OpenError::NotADatabase { .. }), "{error:?}");
            assert_eq!(error.to_string(), format!("{} is not a database", dir.log().display()));
        }
        assert_eq!(fs::read(dir.log()).unwrap(), bytes, "it was left alone");
    }
}

#[test]
fn a_database_of_another_program_is_named() {
    let dir = SceneDir::new();
    dir.meddler().execute_batch("CREATE TABLE notes (text)").unwrap();
    for opened in [open(&dir), Store::open_read_only(&dir)] {
        assert!(matches!(opened, Err(OpenError::Foreign { .. })), "{opened:?}");
    }
}

#[test]
fn a_newer_log_is_left_alone() {
    let dir = SceneDir::with_events(1);
    let newer = SCHEMA_VERSION + 1;
    dir.meddler().execute_batch(&format!("PRAGMA user_version = {newer}")).unwrap();
    for opened in [open(&dir), Store::open_read_only(&dir)] {
        let error = opened.unwrap_err();
        assert!(
            matches!(error, OpenError::Newer { found, known: SCHEMA_VERSION } if found == newer),
            "{error:?}"
        );
        let told = format!("the event log has version {newer}, and this program knows only {SCHEMA_VERSION}");
        assert_eq!(error.to_string(), told);
    }
}

#[test]
fn a_directory_in_place_of_the_log_or_none_around_it_is_an_error() {
    let dir = SceneDir::new();
    assert!(matches!(open(&dir.join("nowhere")), Err(OpenError::Access { .. })));
    assert!(matches!(Store::open_read_only(&dir), Err(OpenError::Missing { .. })));
    fs::create_dir(dir.log()).unwrap();
    assert!(matches!(open(&dir), Err(OpenError::Database { .. })));
}

#[test]
fn making_a_log_is_finished_by_the_next_one_after_a_kill() {
    // The worst remains of a killed process: an empty file, or an empty database.
    let leave: [fn(&SceneDir); 2] = [
        |dir| drop(fs::File::create(dir.log()).unwrap()),
        |dir| dir.meddler().query_row("PRAGMA journal_mode=WAL", [], |_| Ok(())).unwrap(),
    ];
    for leave in leave {
        let dir = SceneDir::new();
        leave(&dir);
        assert!(matches!(Store::open_read_only(&dir), Err(OpenError::Missing { .. })));
        append(&open(&dir).unwrap(), draft(1));
    }
}

#[test]
fn a_log_without_a_head_or_with_a_wrong_one_takes_no_event() {
    for change in [
        "DELETE FROM chains",
        "UPDATE chains SET seq = 1",
        "UPDATE log SET pos = 1",
        "UPDATE log SET pos = 0",
    ] {
        let dir = SceneDir::with_events(3);
        dir.meddler().execute_batch(change).unwrap();
        let store = open(&dir).unwrap();
        assert!(
            matches!(store.append_at_end(&chain(), vec![draft(4)]), Err(AppendError::Damaged(_))),
            "{change}"
        );
        assert_eq!(store.read(&EventQuery::default()).unwrap().len(), 3);
    }
}

#[test]
fn an_artifact_below_a_file_is_an_error_that_names_it() {
    let dir = SceneDir::new();
    fs::write(dir.join("artifacts"), "").unwrap();
    match open(&dir).unwrap().artifact() {
        Err(ArtifactError::File { path, .. }) => assert!(path.starts_with(dir.join("artifacts"))),
        other => panic!("{other:?}"),
    }
}
