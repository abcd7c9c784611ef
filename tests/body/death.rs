//! Unexpected deaths: of the guest, of the supervisor, of both, of the whole host.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use fleet::{ExecRequest, Force, Status};
use proto::{
    BodyId, Kind,
    launch::{GuestEnd, RunRecord},
};
use rustix::{
    process::{Pid, Signal, kill_process, setpriority_process},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use testkit::{Bodies, body_test, kill, wait};

fn running(t: &Bodies, body: &BodyId) -> RunRecord {
    serde_json::from_slice(&std::fs::read(t.body_dir(body).join("run.json")).unwrap()).unwrap()
}

async fn dead(t: &Bodies, body: &BodyId) -> Option<GuestEnd> {
    wait::until("the death is noticed", || Some(t.view(body)).filter(|view| view.status == Status::Dead))
        .await
        .end
}

#[body_test(except(
    microvm = "a kill of a microVM is like a power failure: data that it has not synced is gone; microvm::death tests the rest"
))]
async fn a_guest_that_was_killed_is_dead_and_its_files_are_not(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file; sleep 1000 >/dev/null 2>&1 &").await.ok();
    kill(running(&t, &body).pid);
    assert_eq!(dead(&t, &body).await, Some(GuestEnd::Killed { signal: 9 }));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict);
    assert!(
        refused.message.contains("killed by signal 9") && refused.hints[0].contains("pal start"),
        "{refused}"
    );
    t.fleet().start(&body).await.unwrap();
    assert_eq!(
        t.sh(&body, "cat ~/file; grep -l '^sleep' /proc/[0-9]*/cmdline | wc -l").await.text(),
        "kept\n0"
    );
}

/// Keeps one CPU busy as long as it lives.
struct BusyCpu {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyCpu {
    fn on(processors: CpuSet) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let thread = std::thread::spawn(move || {
            sched_setaffinity(None, &processors).unwrap();
            while !seen.load(Ordering::Relaxed) {}
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for BusyCpu {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

#[body_test(except(microvm = "its first process is not the guest, and ends in the same way"))]
async fn a_guest_that_was_killed_and_waits_for_a_processor_is_not_taken_to_run(t: Bodies) {
    let body = t.create().await;
    let allowed = sched_getaffinity(None).unwrap();
    let mut last = CpuSet::new();
    last.set((0..CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap());
    let _busy = BusyCpu::on(last);
    for _ in 0..8 {
        let at = running(&t, &body);
        let guest = Pid::from_raw(at.pid);
        // The guest has to wait for a CPU that another process uses.
        sched_setaffinity(guest, &last).unwrap();
        setpriority_process(guest, 19).unwrap();
        kill(at.pid);
        let started = t.fleet().start(&body).await.unwrap();
        assert_ne!(started.pid, Some(at.pid), "one that was killed is taken to run");
        assert_eq!(t.sh(&body, "echo here").await.ok(), "here");
    }
}

#[body_test(except(microvm = "its first process is not the guest, and gets no such request"))]
async fn a_guest_that_was_told_to_end_is_not_taken_to_run(t: Bodies) {
    let body = t.create().await;
    t.sh(
        &body,
        "(trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done) >/dev/null 2>&1 & echo kept > ~/file",
    )
    .await
    .ok();
    let at = running(&t, &body);
    // A `pal stop` does this if it is killed before the guest has ended.
    kill_process(Pid::from_raw(at.pid).unwrap(), Signal::TERM).unwrap();
    let socket = t.body_dir(&body).join("guest.sock");
    wait::until("it has heard of that", || UnixStream::connect(&socket).err()).await;
    let started = t.fleet().start(&body).await.unwrap();
    assert_ne!(started.pid, Some(at.pid), "one that is ending is taken to run");
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
    let again = t.fleet().start(&body).await.unwrap();
    assert_eq!(again.pid, started.pid, "one that runs is left alone");
}

#[body_test(except(
    microvm = "a kill of a microVM is like a power failure: data that it has not synced is gone; microvm::death tests the rest"
))]
async fn guest_and_keeper_killed_together_leave_an_unknown_end(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file").await.ok();
    let at = running(&t, &body);
    kill(at.supervisor);
    kill(at.pid);
    assert_eq!(dead(&t, &body).await, Some(GuestEnd::Unknown));
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
}

#[body_test]
async fn without_its_keeper_a_body_is_used_stopped_started_and_removed(t: Bodies) {
    let (body, other) = (t.create().await, t.create().await);
    for body in [&body, &other] {
        kill(running(&t, body).supervisor);
    }
    assert_eq!(t.sh(&body, "echo still here").await.ok(), "still here");
    t.fleet().pause(&body).await.unwrap();
    t.fleet().resume(&body).await.unwrap();
    assert_eq!(
        t.fleet().stop(&body, std::time::Duration::from_secs(1)).await.unwrap().status,
        Status::Stopped
    );
    assert_eq!(t.fleet().start(&body).await.unwrap().status, Status::Running);
    assert_eq!(t.sh(&body, "echo again").await.ok(), "again");
    t.fleet().remove(&other, Force::Yes).await.unwrap();
}

#[body_test]
async fn a_body_whose_directory_was_removed_ends_by_itself(t: Bodies) {
    let (moved, removed, paused) = (t.create().await, t.create().await, t.create().await);
    t.fleet().pause(&paused).await.unwrap();
    let elsewhere = t.dir().join("elsewhere");
    std::fs::rename(t.body_dir(&moved), &elsewhere).unwrap();
    let gone = [&removed, &paused].map(|body| (running(&t, body), t.body_dir(body)));
    for (_, dir) in &gone {
        // Files of the Body's ids may stay if the user is not root.
        let _ = std::process::Command::new("rm")
            .arg("-rf")
            .arg(dir)
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(!dir.join("spec.json").exists());
    }
    let lives = |at: &RunRecord| {
        body::dir::alive(at.pid, at.ticks).is_some_and(|state| !matches!(state, 'Z' | 'X'))
            || body::dir::supervisor_lives(at)
    };
    wait::within(
        t.with_time(std::time::Duration::from_secs(15)),
        "both Bodies end with their keepers",
        || {
            testkit::leaks::reap();
            (!gone.iter().any(|(at, _)| lives(at))).then_some(())
        },
    )
    .await;
    assert_eq!(testkit::leaks::cgroups(&[removed.to_string(), paused.to_string()]), Vec::<String>::new());
    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
    assert!(gone.iter().all(|(_, dir)| !dir.exists()));
    // The supervisor checked the directory meanwhile, too.
    std::fs::rename(&elsewhere, t.body_dir(&moved)).unwrap();
    assert_eq!(t.sh(&moved, "echo still here").await.ok(), "still here");
}

#[body_test(except(
    microvm = "a kill of a microVM is like a power failure: data that it has not synced is gone; microvm::death tests the rest"
))]
async fn a_body_of_an_earlier_boot_is_interrupted_and_can_be_started(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file").await.ok();
    let mut at = running(&t, &body);
    kill(at.supervisor);
    kill(at.pid);
    dead(&t, &body).await;
    // After a restart there are no processes and no cgroups, the files are unchanged, and the boot id is
    // another one.
    for group in &at.cgroups {
        wait::until("the group is empty", || std::fs::remove_dir(&group.path).ok()).await;
    }
    at.boot_id = "00000000-0000-0000-0000-000000000000".into();
    std::fs::write(t.body_dir(&body).join("run.json"), serde_json::to_vec(&at).unwrap()).unwrap();
    assert_eq!(t.view(&body).status, Status::Interrupted);
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.kind == Kind::Conflict && refused.message.contains("interrupted"), "{refused}");
    assert_eq!(t.fleet().start(&body).await.unwrap().status, Status::Running);
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
}

#[body_test]
async fn another_process_with_the_guests_pid_is_not_the_guest(t: Bodies) {
    let body = t.create().await;
    let mut at = running(&t, &body);
    kill(at.supervisor);
    kill(at.pid);
    dead(&t, &body).await;
    let mut innocent = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    at.pid = innocent.id() as i32;
    std::fs::write(t.body_dir(&body).join("run.json"), serde_json::to_vec(&at).unwrap()).unwrap();
    assert_eq!(t.view(&body).status, Status::Dead, "its start differs");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(innocent.try_wait().unwrap(), None, "it was left alone");
    innocent.kill().unwrap();
    innocent.wait().unwrap();
}

#[body_test]
async fn the_keeper_of_another_body_with_the_keepers_pid_is_not_the_keeper(t: Bodies) {
    let body = t.create().await;
    // Start times are counted in clock ticks of 10 ms, and two Bodies can be created within one. The kernel
    // gives a pid away again much later than that.
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    let other = t.create().await;
    let (mut at, its) = (running(&t, &body), running(&t, &other));
    assert!(body::dir::supervisor_lives(&at) && body::dir::supervisor_lives(&its));
    kill(at.supervisor);
    kill(at.pid);
    dead(&t, &body).await;
    // The kernel gave the pid to the next supervisor: the name is the same, the start time is not.
    at.supervisor = its.supervisor;
    std::fs::write(t.body_dir(&body).join("run.json"), serde_json::to_vec(&at).unwrap()).unwrap();
    let recorded = running(&t, &body);
    assert!(recorded.supervisor_ticks.is_some() && recorded.supervisor == its.supervisor, "{recorded:?}");
    assert!(!body::dir::supervisor_lives(&recorded), "its start differs");
    assert_eq!(t.view(&body).status, Status::Dead);
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert!(body::dir::supervisor_lives(&its), "it was left alone");
}

#[body_test]
async fn a_damaged_record_is_said_and_can_be_cleared_away(t: Bodies) {
    let body = t.create().await;
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    let spec = t.body_dir(&body).join("spec.json");
    let whole = std::fs::read(&spec).unwrap();
    for damage in [&b""[..], b"{", b"null", b"[[[[[[[", &vec![b'['; 100_000]] {
        std::fs::write(&spec, damage).unwrap();
        assert!(t.fleet().find(body.as_str()).is_err());
        assert!(t.fleet().list().unwrap().is_empty());
        assert!(t.fleet().start(&body).await.is_err());
    }
    std::fs::write(&spec, whole).unwrap();
    assert_eq!(t.view(&body).status, Status::Stopped);
}

#[body_test]
async fn a_stopped_guest_that_is_asked_to_end_is_ended(t: Bodies) {
    let body = t.create().await;
    // SIGSTOP to the guest alone: it accepts no connection, like a guest that hangs.
    let at = running(&t, &body);
    let pid = rustix::process::Pid::from_raw(at.pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    wait::until("it stands still", || (t.view(&body).status == Status::Paused).then_some(())).await;
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}
