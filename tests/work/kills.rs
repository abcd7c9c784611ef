//! `pal` killed at any moment of up, land, stop and rm: what was synced inside is in the repository or in the Body.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use proto::BodyId;
use testkit::{Bodies, body_test};

use crate::repo::Host;

/// How often.
const KILLS: u64 = 40;

fn pal() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.parent()?.parent()?.join("pal");
    beside.exists().then_some(beside)
}

/// Runs `pal` and kills it after a while; true when it was done before.
fn killed(t: &Bodies, host: &Host, args: &[&str], after: Duration) -> bool {
    let mut command = Command::new(pal().expect("pal is built before its tests"));
    command.args(args).current_dir(&host.dir).env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").env("HOME", t.dir()).env("PAL_DATA", t.data());
    for (name, value) in [("GIT_AUTHOR_NAME", "Ann"), ("GIT_AUTHOR_EMAIL", "a@b"), ("GIT_COMMITTER_NAME", "Ann"), ("GIT_COMMITTER_EMAIL", "a@b")] {
        command.env(name, value);
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(after);
    let done = child.try_wait().unwrap().is_some();
    let _ = child.kill();
    child.wait().unwrap();
    done
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "a machine has no repositories in it yet"))]
async fn whatever_is_killed_no_synced_file_is_lost(t: Bodies) {
    let host = Host::plain(&t);
    let seed: u64 = std::env::var("PAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    let mut chance = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut interrupted = 0;
    for round in 0..KILLS {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        let body: BodyId = host.body(&t).await;
        t.sh(&body, &format!("echo {round} > work; echo c > committed; git add committed; git commit -qm c; sync work committed")).await.ok();
        let after = Duration::from_millis(chance % 120);
        let id = body.as_str();
        let done = match round % 4 {
            0 => killed(&t, &host, &["rm", "--force", id], after),
            1 => killed(&t, &host, &["stop", "--grace", "0s", id], after),
            2 => killed(&t, &host, &["land", "--onto", "main", id], after),
            _ => killed(&t, &host, &["wip", id], after),
        };
        interrupted += u32::from(!done);
        let told = format!("seed {seed} round {round}, killed after {after:?}");
        if t.body_dir(&body).join("spec.json").exists() {
            // Whoever comes next finds a Body that can be saved.
            t.fleet().remove(&body, fleet::Force::Yes).await.unwrap_or_else(|failure| panic!("{told}: {}", testkit::explain(&failure)));
        }
        assert_eq!(host.wip_file(&body, "work").as_deref(), Some(round.to_string().as_str()), "{told}");
        assert_eq!(host.wip_file(&body, "committed").as_deref(), Some("c"), "{told}");
        assert_eq!(host.git(&["fsck", "--no-dangling", "--no-progress"]), "", "{told}");
        // A landing that was cut short may have left a lock of git's or half of the files; the user's own are whole.
        host.sh("rm -f .git/*.lock .git/refs/heads/*.lock; git reset -q --hard");
    }
    assert!(interrupted > 10, "most of it was over before the kill: {interrupted}");
    t.fleet().gc(fleet::Sweep::Remove).await.unwrap();
}
