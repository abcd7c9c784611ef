//! Runs a test again as an ordinary user.
//!
//! `setpriv` drops privileges before the test binary starts; this process keeps its own.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{TemporaryDir, probe, skip::skip};

/// An account with a name, a home directory and subordinate ids.
pub const ACCOUNT: &str = "palisade-test";
/// The first id that no account has; the test's pid is added, so that concurrent tests differ.
const NOBODYS_IDS: u32 = 300_000_000;

/// The path of `pal` for a suite that needs it.
static PAL: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// The path of `pal`: from the build, or as the environment says.
pub fn pal(built: &str) -> PathBuf {
    PAL.get_or_init(|| std::env::var_os("TESTKIT_PAL").map_or_else(|| built.into(), PathBuf::from)).clone()
}

/// Runs a test again as a user who has nothing but an id.
pub fn run_as_user(test: &str) {
    if !sys::caps::is_host_root() {
        return skip("as an ordinary user");
    }
    let id = NOBODYS_IDS + std::process::id();
    again(test, &TestUser { uid: id, gid: id, name: None }, &[]);
    nobody_left(id);
}

/// Waits until no process of the user is left.
fn nobody_left(id: u32) {
    let lives = |process: &crate::leaks::HostProcess| {
        !matches!(process.state, 'Z' | 'X') && owner(process.pid) == Some(id)
    };
    let left = || crate::leaks::processes().into_iter().filter(lives).collect::<Vec<_>>();
    crate::wait::blocking(
        std::time::Duration::from_secs(5),
        &format!("processes of user {id} are left: {:?}", left()),
        || left().is_empty().then_some(()),
    );
}

/// Runs a test again as this user and group, or as an unused id, with supplementary groups.
pub fn run_with_groups(test: &str, who: Option<(u32, u32)>, groups: &[u32]) {
    if !sys::caps::is_host_root() {
        return skip("as an ordinary user");
    }
    let id = NOBODYS_IDS + std::process::id();
    let (uid, gid) = who.unwrap_or((id, id));
    again(test, &TestUser { uid, gid, name: Some("") }, groups);
}

/// Runs a test again as [`ACCOUNT`], which it creates if it is missing.
pub fn run_as_account(test: &str) {
    if !sys::caps::is_host_root() {
        return skip("as an ordinary user");
    }
    let (uid, gid) = account();
    again(test, &TestUser { uid, gid, name: Some(ACCOUNT) }, &[]);
}

/// Whether this process runs as a chosen user: then it also runs tests that others skip.
pub fn is_chosen() -> bool {
    std::env::var_os("TESTKIT_CHOSEN").is_some()
}

struct TestUser {
    uid: u32,
    gid: u32,
    /// The name of the chosen user.
    name: Option<&'static str>,
}

fn owner(pid: i32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(format!("/proc/{pid}")).ok().map(|found| found.uid())
}

fn again(test: &str, user: &TestUser, groups: &[u32]) {
    let _turn = crate::leaks::turn();
    let home = TemporaryDir::new("user");
    chown(&*home, Some(user.uid), Some(user.gid)).expect("root may give a directory away");
    // The path of a test begins with its crate, which the harness leaves out.
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let binary = reachable(&std::env::current_exe().expect("this program has a path"), &home);
    let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={}", user.uid)).arg(format!("--regid={}", user.gid));
    match groups.as_slice() {
        [] => command.arg("--clear-groups"),
        groups => command.arg(format!("--groups={}", groups.join(","))),
    };
    command.arg("--").arg(binary).args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", &*home)
        .env("TMPDIR", &*home);
    command.env("TESTKIT_PROBE", reachable(&probe::path(), &home));
    if let Some(name) = user.name {
        command.env("USER", name).env("TESTKIT_CHOSEN", name);
    }
    if let Some(program) = PAL.get() {
        command.env("TESTKIT_PAL", reachable(program, &home));
    }
    command.current_dir(&*home).stdin(Stdio::null());
    let output = command.output().expect("setpriv (util-linux) can be run");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "as user {}: {}\n{out}\n{err}", user.uid, output.status);
    assert!(out.contains("1 passed"), "no test called {test} was run:\n{out}");
}

/// The file itself if every user can read it, else a readable copy.
fn reachable(file: &Path, dir: &Path) -> PathBuf {
    let open = |path: &Path, bits: u32| {
        fs::metadata(path).is_ok_and(|found| found.permissions().mode() & bits == bits)
    };
    if open(file, 0o005) && file.ancestors().skip(1).all(|above| open(above, 0o001)) {
        return file.to_owned();
    }
    let copy = dir.join(file.file_name().expect("a file has a name"));
    fs::copy(file, &copy).expect("a program can be copied");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("the copy is ours");
    copy
}

/// Finds or creates the account; one test at a time.
pub fn account() -> (u32, u32) {
    let lock = File::create(std::env::temp_dir().join("palisade-account.lock")).expect("a lock");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
    if ids().is_none() {
        let made = Command::new("useradd")
            .args(["--create-home", "--shell", "/bin/sh", ACCOUNT])
            .output()
            .expect("useradd (passwd) can be run");
        assert!(made.status.success(), "useradd: {}", String::from_utf8_lossy(&made.stderr));
    }
    for file in ["/etc/subuid", "/etc/subgid"] {
        let text = fs::read_to_string(file).unwrap_or_default();
        if !text.lines().any(|line| line.starts_with(&format!("{ACCOUNT}:"))) {
            let mut file = File::options().append(true).create(true).open(file).expect("root may write it");
            writeln!(file, "{ACCOUNT}:{}:65536", 400_000_000).expect("root may write it");
        }
    }
    ids().expect("the account was just made")
}

fn ids() -> Option<(u32, u32)> {
    let text = fs::read_to_string("/etc/passwd").ok()?;
    let line = text.lines().find(|line| line.starts_with(&format!("{ACCOUNT}:")))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}
