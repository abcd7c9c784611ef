//! Artifacts: stored once, found by hash, removed on request.

use std::{
    fs,
    io::{Read, Write},
};

use store::{ArtifactError, ArtifactRef, Artifacts, Durability, Store};

use crate::scene::SceneDir;

fn keep(store: &Store, bytes: &[u8]) -> ArtifactRef {
    let mut writer = store.artifact().unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn an_artifact_comes_back_and_equal_ones_are_one_file() {
    for durability in [Durability::Power, Durability::Process] {
        let dir = SceneDir::new();
        let store = Store::open(&dir, durability).unwrap();
        let large: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        let (one, two, none) = (keep(&store, &large), keep(&store, &large), keep(&store, b""));
        assert_eq!((&one, one.bytes), (&two, 300_000));
        assert_eq!(none, ArtifactRef { sha256: EMPTY.into(), bytes: 0 });
        let mut back = Vec::new();
        store.open_artifact(&one).unwrap().read_to_end(&mut back).unwrap();
        assert!(back == large);
        store.verify_artifact(&one).unwrap();
        let mut all = vec![one.clone(), none.clone()];
        all.sort();
        assert_eq!(store.artifacts().unwrap(), all);
        assert!(dir.join("artifacts").join(&EMPTY[..2]).join(EMPTY).is_file());
        store.remove_artifact(&one).unwrap();
        store.remove_artifact(&one).unwrap();
        assert_eq!(store.artifacts().unwrap(), [none]);
        assert!(matches!(store.open_artifact(&one), Err(ArtifactError::Missing { .. })));
    }
}

#[test]
fn an_unfinished_artifact_leaves_nothing_and_one_of_a_killed_process_is_swept() {
    let dir = SceneDir::new();
    let store = dir.open();
    let count = || fs::read_dir(dir.join("artifacts")).unwrap().count();
    let mut writer = store.artifact().unwrap();
    writer.write_all(b"half").unwrap();
    assert_eq!(count(), 1);
    // A sweep keeps files that a writer has locked, and removes the others.
    fs::write(dir.join("artifacts/tmp-0123"), "left").unwrap();
    assert_eq!((store.sweep_artifacts().unwrap(), count()), (4, 1));
    drop(writer);
    assert_eq!((count(), store.artifacts().unwrap().len()), (0, 0));
}

#[test]
fn a_damaged_artifact_is_found_and_healed_by_writing_it_again() {
    let dir = SceneDir::new();
    let store = dir.open();
    let kept = keep(&store, b"four");
    let path = dir.join("artifacts").join(&kept.sha256[..2]).join(&kept.sha256);
    for (bytes, opens) in [("fool", true), ("fo", false), ("", false)] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        assert_eq!(store.open_artifact(&kept).is_ok(), opens, "{bytes:?}");
        assert!(matches!(store.verify_artifact(&kept), Err(ArtifactError::Damaged { .. })), "{bytes:?}");
    }
    keep(&store, b"four");
    store.verify_artifact(&kept).unwrap();
}

#[test]
fn a_reference_is_no_path() {
    let dir = SceneDir::with_events(1);
    let store = dir.open();
    let upper = EMPTY.to_uppercase();
    for name in ["", "..", "../events.db", "e3", &upper, &EMPTY[1..], &format!("{EMPTY}0"), &"é".repeat(32)]
    {
        let wanted = ArtifactRef { sha256: name.to_owned(), bytes: 0 };
        assert!(matches!(store.open_artifact(&wanted), Err(ArtifactError::Name(_))), "{name}");
        assert!(matches!(store.remove_artifact(&wanted), Err(ArtifactError::Name(_))), "{name}");
    }
    assert!(dir.log().exists());
}

#[test]
fn a_store_without_artifacts_has_none() {
    let dir = SceneDir::with_events(1);
    assert_eq!(dir.open().artifacts().unwrap(), []);
    assert_eq!(dir.open().sweep_artifacts().unwrap(), 0);
    assert!(!dir.join("artifacts").exists());
}
