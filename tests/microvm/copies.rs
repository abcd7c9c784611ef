//! An emulated machine goes on in a copy of the process that it was frozen in, or without one.

use std::{
    fs,
    os::unix::fs::{FileExt, symlink},
    path::{Path, PathBuf},
};

use testkit::{Bodies, body_test, leaks};

/// Whether each hypervisor is a copy of a process, and not a program that was started.
fn copies() -> Vec<bool> {
    let is_copy = |pid: i32| {
        let place = format!("/proc/{pid}");
        let said = fs::read_to_string(format!("{place}/cmdline")).unwrap();
        assert!(
            said.contains("qemu-system") && said.contains("-nodefaults"),
            "who it is can be read: {said}"
        );
        let program = fs::read_link(format!("{place}/exe")).unwrap();
        program.to_string_lossy().contains("memfd:palisade")
    };
    let hypervisors =
        leaks::descendants().into_iter().filter(|process| process.name.starts_with("qemu-system"));
    hypervisors.map(|process| is_copy(process.pid)).collect()
}

#[body_test(except(process = "it is about machines"))]
async fn a_machine_and_its_forks_go_on_in_copies_of_one_process(t: Bodies) {
    let body = t.create().await;
    assert_eq!(t.sh(&body, "echo mine > ~/file; echo done").await.ok(), "done");
    let fork = t.fleet().fork(&body, 1).await.unwrap().remove(0);
    let grandchildren = t.fleet().fork(fork.id(), 2).await.unwrap();
    assert_eq!(copies(), [true; 4]);
    for fork in grandchildren.iter().chain([&fork]) {
        assert_eq!(t.sh(fork.id(), "cat ~/file").await.ok(), "mine");
    }
}

/// A processor that is emulated would draw from its hypervisor's memory, and that is the same in every copy.
#[body_test(except(process = "it is about machines"))]
async fn a_machine_has_no_randomness_but_what_it_is_given(t: Bodies) {
    let body = t.create().await;
    let flags = t.sh(&body, "grep -m1 ^flags /proc/cpuinfo").await.ok();
    let has = |wanted: &str| flags.split_ascii_whitespace().any(|flag| flag == wanted);
    assert!(has("sse4_2") && !has("rdrand") && !has("rdseed"), "{flags}");
}

/// What machines are made from, with warm ones of its own.
fn own_ground(t: &Bodies) -> PathBuf {
    let (own, shared) = (t.data().join("vm"), fs::canonicalize(t.data().join("vm")).unwrap());
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    for entry in fs::read_dir(shared).unwrap().flatten().filter(|entry| entry.file_name() != "warm") {
        symlink(entry.path(), own.join(entry.file_name())).unwrap();
    }
    own.join("warm")
}

/// The only warm machine.
fn the_warm_one(warm: &Path) -> PathBuf {
    let dirs: Vec<_> = fs::read_dir(warm)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    let [dir] = &dirs[..] else { panic!("{dirs:?}") };
    dir.clone()
}

/// Puts other contents in place of a file that others may read from.
fn change(path: &Path, act: impl FnOnce(&mut Vec<u8>)) {
    let mut contents = fs::read(path).unwrap();
    act(&mut contents);
    fs::remove_file(path).unwrap();
    fs::write(path, contents).unwrap();
}

#[body_test(except(process = "it is about machines"))]
async fn a_machine_without_a_sound_copy_is_thawed_all_the_same(t: Bodies) {
    let warm = own_ground(&t);
    let runs = |is_copy: bool, why: &'static str| {
        let t = &t;
        async move {
            let body = t.create().await;
            assert_eq!(copies(), [is_copy], "{why}");
            assert_eq!(t.view(&body).receipt.map(|receipt| receipt.how), Some("thaw".to_owned()));
            assert_eq!(t.sh(&body, "echo here").await.ok(), "here", "{why}");
            t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
        }
    };
    runs(true, "as it was made").await;
    let imprint = the_warm_one(&warm).join("imprint");
    let whole = fs::read(&imprint).unwrap();
    change(&imprint, |contents| {
        let len = contents.len();
        contents[len - 8..].fill(0xff);
    });
    runs(false, "it does not say how long it is").await;
    change(&imprint, |contents| {
        *contents = whole.clone();
        let len = contents.len();
        contents[len - 4096..len - 8].fill(b'{');
    });
    runs(false, "what it says is nothing").await;
    change(&imprint, |contents| {
        *contents = whole.clone();
        contents[..whole.len() / 2].fill(0);
    });
    runs(false, "its pages are nothing").await;
    let file = fs::File::options().write(true).open(&imprint).unwrap();
    file.write_all_at(&whole, 0).unwrap();
    runs(true, "as it was").await;
    file.set_len(1 << 20).unwrap();
    runs(true, "one that was cut short is made anew").await;
    let record = the_warm_one(&warm).join("warm.json");
    change(&record, |contents| {
        let text = String::from_utf8(contents.clone()).unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert!(text.contains(boot.trim()), "{text}");
        *contents = text.replace(boot.trim(), "another").into_bytes();
    });
    runs(true, "one of an earlier boot is made anew").await;
    assert!(!fs::read_to_string(the_warm_one(&warm).join("warm.json")).unwrap().contains("another"));
    change(&imprint, |contents| translated(contents).for_each(|range| contents[range].fill(0xcc)));
    runs(false, "it answers, and dies when its machine goes on").await;
    assert!(!imprint.exists(), "and nobody tries it again");
    runs(false, "it is thawed without from then on").await;
}

/// Where an imprint has what its hypervisor has translated: pages that are written to and executed.
fn translated(imprint: &[u8]) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let end = imprint.len() - 8;
    let len = u64::from_le_bytes(imprint[end..].try_into().unwrap()) as usize;
    let rest: serde_json::Value = serde_json::from_slice(&imprint[end - len..end]).unwrap();
    let pieces = rest["process"]["pieces"].as_array().unwrap().clone();
    assert!(pieces.iter().any(|piece| piece["access"] == 7), "something was translated");
    pieces.into_iter().filter(|piece| piece["access"] == 7).map(|piece| {
        let number = |name: &str| piece[name].as_u64().unwrap() as usize;
        number("at")..number("at") + number("to") - number("from")
    })
}

/// What a machine was thawed from may go while it runs: warm machines are few, and kept for a week.
#[body_test(except(process = "it is about machines"))]
async fn a_machine_is_forked_in_a_copy_when_what_it_came_from_is_gone(t: Bodies) {
    let warm = own_ground(&t);
    let body = t.create().await;
    t.sh(&body, "echo mine > ~/file; head -c 4M /dev/urandom > /dev/shm/own").await.ok();
    let sum = t.sh(&body, "sha256sum < /dev/shm/own").await.ok();
    fs::remove_dir_all(the_warm_one(&warm)).unwrap();
    let fork = t.fleet().fork(&body, 1).await.unwrap().remove(0);
    assert_eq!(copies(), [true; 2]);
    assert_eq!(t.sh(fork.id(), "cat ~/file; sha256sum < /dev/shm/own").await.ok(), format!("mine\n{sum}"));
}
