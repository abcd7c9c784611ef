//! A data directory of layout 1, as the version before records wrote it: migrated once, whole or not at all.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use fleet::{BuildState, Fleet, LogVerdict, Setting, records::KEYS};
use proto::{BodyId, Kind, Size};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use testkit::{TemporaryDir, explain, open};

use crate::{chance::Chance, pal::Pal, turn};

/// Made by that version: settings, keys, a leased Body, a snapshot, a home, a template, a build that failed. Its
/// large files were removed.
const LAYOUT_1: &[u8] = include_bytes!("../fixtures/layout-1.tar.gz");
const KILLS: usize = 60;
/// Everything that becomes a record.
const FILES: [&str; 8] = [
    "bodies/my6jp77wdvbs/lease.json",
    "config.json",
    "homes/notes.json",
    "keys.json",
    "templates/frex7hnpw7tu/builds/5cff2d10-4db5-442a-a193-b7d5d59da9bb.draft",
    "templates/frex7hnpw7tu/manifest.json",
    "templates/gnud3m2dcm3r/builds/ad57c5c0-6fa1-4429-ab8a-040ffc102574.json",
    "templates/gnud3m2dcm3r/manifest.json",
];

fn unpack(to: &Path) {
    fs::create_dir(to).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(LAYOUT_1)).unpack(to).unwrap();
}

fn body() -> BodyId {
    "my6jp77wdvbs".parse().unwrap()
}

fn version(data: &Path) -> String {
    fs::read_to_string(data.join("version")).unwrap()
}

/// The files that are in their places, with what they hold.
fn files(data: &Path) -> Vec<(&'static str, String)> {
    FILES.into_iter().filter_map(|file| Some((file, fs::read_to_string(data.join(file)).ok()?))).collect()
}

/// All that the records of a directory say.
fn contents(fleet: &Fleet) -> Value {
    let keys = fleet.records().list(KEYS, None).unwrap().records;
    let templates = fleet.templates().list().unwrap();
    let failed = templates.iter().find(|view| view.template.name == "app").unwrap();
    let build = "5cff2d10-4db5-442a-a193-b7d5d59da9bb".parse().unwrap();
    let (state, lines) = fleet.builds().status(&failed.template.id, &build, 0, 100).unwrap();
    json!({
        "settings": fleet.settings().read().unwrap(),
        "keys": keys.into_iter().map(|record| json!([record.key.as_str(), record.value])).collect::<Value>(),
        "leases": fleet.leases().all().unwrap().into_iter().map(|lease| json!(lease)).collect::<Value>(),
        "homes": fleet.homes().list().unwrap(),
        "templates": templates,
        "build": [json!(state), json!(lines)],
    })
}

#[test]
fn a_directory_of_layout_1_opens_with_all_it_had_and_can_be_changed() {
    let _turn = turn();
    let dir = TemporaryDir::new("layout");
    let data = dir.join("data");
    unpack(&data);
    let fleet = open(&data).unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(version(&data), "2\n");
    assert!(files(&data).is_empty(), "files of layout 1 are in their places");
    assert_eq!(files(&data.join("layout-1")).len(), FILES.len());

    let settings = fleet.settings().read().unwrap();
    assert_eq!((settings.budget, settings.pool_size()), (Some(Size(7 << 30)), 3));
    let lease = fleet.leases().get(&body()).unwrap().expect("the Body has its lease");
    assert_eq!((lease.timeout_ms, lease.metadata["team"].as_str()), (86_400_000, "blue"));
    assert_eq!(fleet.leases().all().unwrap().len(), 1);
    assert_eq!(fleet.list().unwrap().len(), 1);
    let keys = fleet.records().list(KEYS, None).unwrap().records;
    assert!(keys.len() == 2 && keys.iter().any(|key| lease.owner.as_deref() == Some(key.key.as_str())));
    let homes = fleet.homes().list().unwrap();
    assert_eq!((homes.len(), homes[0].record.name.as_str(), homes[0].bytes > 0), (1, "notes", true));
    let names: Vec<String> =
        fleet.templates().list().unwrap().into_iter().map(|view| view.template.name).collect();
    assert_eq!(names, ["app", "tiny"]);
    let build = fleet.templates().find_build("tiny").unwrap();
    assert_eq!(fleet.templates().find("app").unwrap().unwrap().tags.len(), 0);
    let said = contents(&fleet);
    let failed: BuildState = BuildState::Error {
        step: Some("1".into()),
        message: said["build"][0]["error"]["message"].as_str().unwrap().into(),
    };
    assert_eq!(said["build"][0], json!(failed));
    assert!(!said["build"][1].as_array().unwrap().is_empty(), "the log of the build is shown");
    assert_eq!(fleet.snapshots().list().unwrap()[0].name.as_deref(), Some("snap"));
    assert!(matches!(fleet.log().verify().unwrap(), LogVerdict::Whole { .. }));

    fleet.settings().set(Setting::PoolSize, "1").unwrap();
    fleet.leases().change(&body(), |lease| lease.metadata.clear()).unwrap();
    assert_eq!(fleet.templates().tag("tiny", &["v2".to_owned()]).unwrap(), build.id);
    fleet.homes().remove("notes").unwrap();
    drop(fleet);
    let fleet = open(&data).unwrap();
    let settings = fleet.settings().read().unwrap();
    assert_eq!((settings.budget, settings.pool_size()), (Some(Size(7 << 30)), 1));
    assert!(fleet.leases().get(&body()).unwrap().unwrap().metadata.is_empty());
    assert_eq!(fleet.templates().find_build("tiny:v2").unwrap(), build);
    assert!(fleet.homes().list().unwrap().is_empty());
}

#[test]
fn a_migration_that_was_cut_short_begins_again_from_the_files() {
    let _turn = turn();
    let dir = TemporaryDir::new("layout");
    let (data, whole) = (dir.join("data"), dir.join("whole"));
    unpack(&data);
    unpack(&whole);
    let expected = contents(&open(&whole).unwrap());
    // As if it had been killed before the version changed: records are there, and the earlier version went on to
    // change the files.
    drop(open(&data).unwrap());
    for file in FILES {
        fs::rename(data.join("layout-1").join(file), data.join(file)).unwrap();
    }
    fs::write(data.join("version"), "1\n").unwrap();
    fs::write(data.join("config.json"), r#"{"store.budget":7516192768,"microvm.spares":5}"#).unwrap();
    fs::remove_file(data.join("homes/notes.json")).unwrap();
    let again = contents(&open(&data).unwrap());
    assert_eq!(again["settings"], json!({ "store.budget": 7_516_192_768_u64, "microvm.pool_size": 5 }));
    assert_eq!(again["homes"], json!([]), "a record of the attempt before is gone");
    for same in ["keys", "leases", "templates", "build"] {
        assert_eq!(again[same], expected[same], "{same}");
    }
}

#[test]
fn files_that_were_left_in_their_places_are_not_read_again() {
    let _turn = turn();
    let dir = TemporaryDir::new("layout");
    let data = dir.join("data");
    unpack(&data);
    let before = contents(&open(&data).unwrap());
    // As if it had been killed before it had moved them.
    for file in FILES {
        fs::write(data.join(file), "{ damaged").unwrap();
    }
    assert_eq!(contents(&open(&data).unwrap()), before);
}

#[test]
fn a_file_that_cannot_be_read_stops_the_migration_and_is_named() {
    let _turn = turn();
    let dir = TemporaryDir::new("layout");
    let data = dir.join("data");
    unpack(&data);
    for file in FILES {
        let good = fs::read(data.join(file)).unwrap();
        fs::write(data.join(file), "{ damaged").unwrap();
        let before = files(&data);
        let failure = open(&data).unwrap_err();
        assert!(
            failure.kind == Kind::Host && failure.message.contains(file) && !failure.hints.is_empty(),
            "{}",
            explain(&failure)
        );
        assert_eq!((version(&data), files(&data)), ("1\n".to_owned(), before), "nothing has changed");
        fs::write(data.join(file), good).unwrap();
    }
    assert_eq!(contents(&open(&data).unwrap())["homes"].as_array().unwrap().len(), 1);
}

#[test]
fn a_server_of_the_earlier_version_is_not_migrated_under() {
    let _turn = turn();
    let dir = TemporaryDir::new("layout");
    let data = dir.join("data");
    unpack(&data);
    let server = fs::File::create(data.join("serve.lock")).unwrap();
    flock(&server, FlockOperation::LockExclusive).unwrap();
    let failure = open(&data).unwrap_err();
    assert!(failure.kind == Kind::Conflict && failure.hints[0].contains("stop"), "{}", explain(&failure));
    assert_eq!((version(&data), files(&data).len()), ("1\n".to_owned(), FILES.len()));
    drop(server);
    assert_eq!(open(&data).unwrap().leases().all().unwrap().len(), 1);
}

#[test]
fn kill_9_during_the_migration_leaves_one_whole_form() {
    let _turn = turn();
    let mut chance = Chance::new();
    let read = ["config", "get", "store.budget"];
    let (expected, typical) = {
        let pal = Pal::new();
        unpack(&pal.data());
        let began = Instant::now();
        pal.ok(&read);
        let typical = began.elapsed();
        (contents(&open(&pal.data()).unwrap()), typical)
    };
    let mut forms = [0; 2];
    for kill in 0..KILLS {
        let pal = Pal::new();
        let data: PathBuf = pal.data();
        unpack(&data);
        let before = files(&data);
        let after = chance.before(typical * 6 / 5);
        pal.cut(&read, after);
        let migrated = version(&data) == "2\n";
        forms[usize::from(migrated)] += 1;
        if !migrated {
            assert_eq!(files(&data), before, "kill {kill} after {after:?}: the files are whole");
        }
        let fleet = open(&data).unwrap_or_else(|failure| panic!("kill {kill}: {}", explain(&failure)));
        assert_eq!(contents(&fleet), expected, "kill {kill} after {after:?}");
    }
    assert!(forms.iter().all(|count| *count > 0), "the kills hit one form only: {forms:?}");
}
