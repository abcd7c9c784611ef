//! The data directory: its owner, its permissions, the version that wrote it.

use std::{fs, os::unix::fs::PermissionsExt};

use proto::Kind;
use testkit::{Bodies, body_test, open};

#[body_test]
async fn a_data_directory_is_made_for_its_owner_alone(t: Bodies) {
    let data = t.dir().join("deep/er/data");
    drop(open(&data).unwrap());
    assert_eq!(fs::metadata(&data).unwrap().permissions().mode() & 0o777, 0o700);
    fs::set_permissions(&data, fs::Permissions::from_mode(0o777)).unwrap();
    drop(open(&data).unwrap());
    assert_eq!(
        fs::metadata(&data).unwrap().permissions().mode() & 0o777,
        0o700,
        "what was opened to others is closed"
    );
}

#[body_test]
async fn somebody_elses_directory_is_refused(t: Bodies) {
    // Root can give the directory away; an ordinary user finds root's.
    let data = if testkit::is_root() {
        let data = t.dir().join("others");
        fs::create_dir(&data).unwrap();
        std::os::unix::fs::chown(&data, Some(12_345), Some(12_345)).unwrap();
        data
    } else {
        "/usr".into()
    };
    let failure = open(&data).unwrap_err();
    assert_eq!(failure.kind, Kind::Denied, "{}", testkit::explain(&failure));
    assert!(
        failure.message.contains("another user") && failure.hints[0].contains("--data"),
        "{}",
        testkit::explain(&failure)
    );
}

#[body_test]
async fn what_is_no_directory_or_out_of_reach_is_refused(t: Bodies) {
    let file = t.dir().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(open(&file).unwrap_err().kind, Kind::Usage);
    let failure = open(&file.join("below")).unwrap_err();
    assert!(!failure.hints.is_empty(), "{}", testkit::explain(&failure));
    assert_eq!(fs::read_to_string(&file).unwrap(), "x");
    let long = t.dir().join("x".repeat(300));
    assert!(open(&long).is_err());
}

#[body_test(except(root = "root may write everywhere, whatever the mode says"))]
async fn a_directory_that_cannot_be_written_is_refused(t: Bodies) {
    let data = t.dir().join("read-only");
    drop(open(&data).unwrap());
    fs::set_permissions(data.join("version"), fs::Permissions::from_mode(0o000)).unwrap();
    assert_eq!(open(&data).unwrap_err().kind, Kind::Host);
    fs::set_permissions(data.join("version"), fs::Permissions::from_mode(0o600)).unwrap();
    let fresh = t.dir().join("closed");
    fs::create_dir(&fresh).unwrap();
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o500)).unwrap();
    let failure = open(&fresh).unwrap_err();
    assert!(failure.kind == Kind::Host && !failure.hints.is_empty(), "{}", testkit::explain(&failure));
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o700)).unwrap();
}

#[body_test]
async fn a_newer_or_unknown_layout_is_left_alone(t: Bodies) {
    let data = t.dir().join("newer");
    drop(open(&data).unwrap());
    for (version, words) in [
        ("3\n", "newer pal"),
        ("4294967295\n", "newer pal"),
        ("x\n", "layout version"),
        ("", "layout version"),
        ("-1", "layout version"),
        ("\0\u{1b}[31m", "layout version"),
    ] {
        fs::write(data.join("version"), version).unwrap();
        let failure = open(&data).unwrap_err();
        assert!(
            failure.kind == Kind::Host
                && failure.message.contains(words)
                && failure.hints[0].contains("--data"),
            "{version:?}: {}",
            testkit::explain(&failure)
        );
        assert_eq!(fs::read_to_string(data.join("version")).unwrap(), version);
    }
}

#[body_test]
async fn a_path_longer_than_a_sockets_name_works(t: Bodies) {
    let data = t.dir().join("d".repeat(120)).join("e".repeat(120));
    t.prepare(&data);
    let fleet = open(&data).unwrap();
    let body = fleet.create(t.passing()).await.unwrap().spec.id;
    let ran = testkit::ran(&fleet, &body, fleet::ExecRequest::new(["echo", "far"]), &[]).await.unwrap();
    assert_eq!(ran.ok(), "far");
    fleet.remove(&body, fleet::Force::Yes).await.unwrap();
}

#[body_test]
async fn a_path_that_is_no_text_works(t: Bodies) {
    let data = t.dir().join(std::ffi::OsStr::from_bytes(b"odd\xff: ,\\name"));
    let fleet = match open(&data) {
        Ok(fleet) => fleet,
        // JSON cannot hold such a path, so `pal` may refuse it, with a message.
        Err(failure) => {
            assert!(
                failure.kind == Kind::Usage && !failure.hints.is_empty(),
                "{}",
                testkit::explain(&failure)
            );
            return;
        }
    };
    let body = fleet.create(t.kept()).await.unwrap().spec.id;
    let ran = testkit::ran(&fleet, &body, fleet::ExecRequest::new(["echo", "odd"]), &[]).await.unwrap();
    assert_eq!(ran.ok(), "odd");
    fleet.remove(&body, fleet::Force::Yes).await.unwrap();
}

use std::os::unix::ffi::OsStrExt;
