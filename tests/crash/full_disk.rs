//! A full disk: every command fails with a message, and nothing incomplete is left when there is space again.
//!
//! The disk is a small tmpfs in a mount namespace, in which the test runs again.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
};

use testkit::leaks;

use crate::{
    leftovers,
    pal::{Pal, PalOutput},
    turn,
};

/// Set inside the namespace.
const INSIDE: &str = "PALISADE_FULL_DISK";
/// Space for the programs and a few Bodies.
const DISK: &str = "size=48m";
/// The exit code of failures of the host.
const HOST: i32 = 125;

#[test]
fn a_full_disk_refuses_and_nothing_half_made_is_left() {
    let _turn = turn();
    if std::env::var_os(INSIDE).is_some() {
        return on_a_small_disk();
    }
    if !testkit::is_root() {
        return testkit::skip::skip("as root");
    }
    let test = "full_disk::a_full_disk_refuses_and_nothing_half_made_is_left";
    let mut again = Command::new("unshare");
    again
        .args(["--mount", "--propagation", "private", "--"])
        .arg(std::env::current_exe().expect("this program has a path"));
    again.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
    let output = again.output().expect("unshare (util-linux) can be run");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn on_a_small_disk() {
    let pal = Pal::new();
    let data = pal.data();
    fs::create_dir(&data).expect("the directory is ours");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", DISK, "palisade-test"])
        .arg(&data)
        .status()
        .expect("mount can be run");
    assert!(mounted.success());
    every_verb(&pal);
    fresh_directory(&pal);
    let unmounted = Command::new("umount").arg(&data).status().expect("umount can be run");
    assert!(unmounted.success(), "somebody still uses the disk");
}

fn every_verb(pal: &Pal) {
    let body = pal.ok(&["create"]);
    pal.ok(&["exec", &body, "--", "sh", "-c", "echo before > ~/before"]);
    let file = pal.data().with_file_name("file");
    fs::write(&file, vec![7; 1 << 20]).expect("the other disk has room");
    let target = format!("{body}:/home/user/copied");
    let verbs: [&[&str]; 7] = [
        &["create"],
        &["run", "--", "true"],
        &["exec", &body, "--", "true"],
        &["snapshot", &body],
        &["fork", &body],
        &["cp", &file.to_string_lossy(), &target],
        &["stop", &body],
    ];
    let full = fill(&pal.data());
    for verb in verbs {
        refused(verb, &pal.run(verb));
    }
    // Reading needs no space.
    assert_eq!(pal.bodies(), [(body.clone(), "running".to_owned())]);
    fs::remove_file(full).expect("what was filled can be emptied");
    pal.log();
    assert_eq!(pal.ok(&["exec", &body, "--", "sh", "-c", "cat ~/before"]), "before");
    assert_eq!(pal.snapshots(), Vec::<String>::new(), "a snapshot that was refused is there");
    for verb in verbs {
        pal.ok(verb);
    }
    let bodies: Vec<String> = pal.bodies().into_iter().map(|(id, _)| id).collect();
    assert_eq!(bodies.len(), 3, "the first, one made and one forked: {bodies:?}");
    for body in &bodies {
        pal.ok(&["rm", "--force", body]);
    }
    for snapshot in pal.snapshots() {
        pal.ok(&["snapshot", "rm", &snapshot]);
    }
    leaks::reap();
    // Nothing was killed, so there is nothing to remove.
    assert_eq!(pal.ok(&["gc", "--json"]), "");
    leftovers::on_its_own_disk(pal, &bodies.into_iter().collect());
    pal.log();
}

/// The first `pal` on a disk without any space.
fn fresh_directory(pal: &Pal) {
    for name in leaks::entries(&pal.data()) {
        let path = pal.data().join(name);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("nobody uses it");
    }
    let full = fill(&pal.data());
    refused(&["run", "--", "true"], &pal.run(&["run", "--", "true"]));
    fs::remove_file(full).expect("what was filled can be emptied");
    pal.ok(&["run", "--", "true"]);
    assert_eq!(pal.ok(&["gc", "--json"]), "");
    leftovers::on_its_own_disk(pal, &Default::default());
    pal.log();
}

/// Fills the disk completely.
fn fill(data: &Path) -> std::path::PathBuf {
    let path = data.join("full");
    let mut file = File::create(&path).expect("there is room yet");
    let mut len = 1 << 20;
    while len > 0 {
        match file.write(&vec![0; len]) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => len /= 2,
            Err(error) => panic!("cannot fill the disk: {error}"),
        }
    }
    path
}

fn refused(verb: &[&str], said: &PalOutput) {
    assert_eq!(said.code, Some(HOST), "pal {verb:?} on a full disk: {said:?}");
    assert!(
        said.err.starts_with("error: ") && said.err.contains("hint: "),
        "pal {verb:?} on a full disk: {said:?}"
    );
    let words = ["full", "No space left", "no space left"];
    assert!(words.iter().any(|word| said.err.contains(word)), "pal {verb:?} does not say why: {}", said.err);
}
