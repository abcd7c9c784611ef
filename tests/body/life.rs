//! A Body's life: created, stopped, started, paused, resumed, removed.

use std::time::Duration;

use fleet::{Force, Status};
use proto::{Kind, launch::GuestEnd};
use testkit::{Bodies, body_test, wait};

const GRACE: Duration = Duration::from_secs(2);

#[body_test]
async fn what_is_written_outlives_a_stop_and_a_start(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file; mkdir -p ~/dir; echo gone > /dev/shm/file").await.ok();
    let stopped = t.fleet().stop(&body, GRACE).await.unwrap();
    assert_eq!((stopped.status, stopped.end, stopped.pid), (Status::Stopped, None, None));
    let refused = t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err();
    assert_eq!((refused.kind, refused.hints), (Kind::Conflict, vec![format!("start it: pal start {body}")]));
    assert_eq!(t.fleet().start(&body).await.unwrap().status, Status::Running);
    assert_eq!(t.sh(&body, "cat ~/file; ls -d ~/dir; ls /dev/shm").await.ok(), "kept\n/home/user/dir");
}

#[body_test]
async fn start_and_stop_may_be_said_twice(t: Bodies) {
    let body = t.create().await;
    let pid = t.view(&body).pid;
    assert_eq!(t.fleet().start(&body).await.unwrap().pid, pid, "a Body that runs is not started again");
    for _ in 0..2 {
        assert_eq!(t.fleet().stop(&body, GRACE).await.unwrap().status, Status::Stopped);
    }
}

#[body_test]
async fn a_stop_gives_processes_time_to_end_and_no_more(t: Bodies) {
    let body = t.create().await;
    let script = "(trap 'echo bye > /home/user/bye; exit' TERM; : > /home/user/ready; while :; do sleep 0.05; done) >/dev/null 2>&1 &
                  (trap '' TERM; while :; do sleep 0.05; done) >/dev/null 2>&1 &
                  while ! test -e /home/user/ready; do :; done";
    t.sh(&body, script).await.ok();
    t.fleet().stop(&body, Duration::from_millis(500)).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(
        t.sh(&body, "cat ~/bye; grep -l '^sleep' /proc/[0-9]*/cmdline | wc -l").await.text(),
        "bye\n0"
    );
}

#[body_test(except(
    microvm = "its files are on a disk of its own; microvm::pause tests the same from inside"
))]
async fn a_paused_body_stands_still(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "(i=0; while :; do i=$((i+1)); echo $i > /home/user/count; done) >/dev/null 2>&1 &")
        .await
        .ok();
    let count = || std::fs::read_to_string(t.body_dir(&body).join("disk/upper/root/home/user/count"));
    let number = || count().ok()?.trim().parse::<u64>().ok();
    wait::until("the counter counts", || number().filter(|count| *count > 10)).await;
    assert_eq!(t.fleet().pause(&body).await.unwrap().status, Status::Paused);
    let at_pause = count().unwrap();
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(count().unwrap(), at_pause, "nothing was counted while paused");
    let refused = t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err();
    assert_eq!(
        (refused.kind, refused.hints),
        (Kind::Conflict, vec![format!("resume it: pal resume {body}")])
    );
    assert_eq!(t.fleet().pause(&body).await.unwrap_err().kind, Kind::Conflict);
    assert_eq!(t.fleet().resume(&body).await.unwrap().status, Status::Running);
    let then = at_pause.trim().parse().unwrap_or(0);
    wait::until("the counter goes on", || number().filter(|count| *count > then + 10)).await;
}

#[body_test]
async fn a_paused_body_can_be_stopped_and_removed(t: Bodies) {
    let (one, two) = (t.create().await, t.create().await);
    for body in [&one, &two] {
        t.sh(body, "sleep 1000 >/dev/null 2>&1 &").await.ok();
        t.fleet().pause(body).await.unwrap();
    }
    assert_eq!(t.fleet().stop(&one, GRACE).await.unwrap().status, Status::Stopped);
    assert_eq!(t.fleet().start(&one).await.unwrap().status, Status::Running);
    t.fleet().remove(&two, Force::Yes).await.unwrap();
    assert_eq!(t.fleet().find(two.as_str()).unwrap_err().kind, Kind::NotFound);
}

#[body_test]
async fn what_runs_is_only_removed_by_force(t: Bodies) {
    let body = t.create().await;
    assert_eq!(t.fleet().remove(&body, Force::No).await.unwrap_err().kind, Kind::Conflict);
    assert_eq!(t.run(&body, ["true"]).await.code, 0, "the refusal did it no harm");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert!(!t.body_dir(&body).exists());
    assert_eq!(t.fleet().remove(&body, Force::Yes).await.unwrap_err().kind, Kind::NotFound);
}

#[body_test(except(
    microvm = "an emulated microVM takes minutes for such a tree, and removing it removes one file"
))]
async fn removing_ends_every_process_and_a_deep_tree(t: Bodies) {
    let body = t.create().await;
    let script = "for i in 1 2 3 4 5; do setsid sleep 1000 >/dev/null 2>&1 & done
                  cd /home/user; i=0; while [ $i -lt 2000 ]; do mkdir d; cd -P d; i=$((i+1)); done; echo done";
    assert_eq!(t.sh(&body, script).await.ok(), "done");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert!(!t.body_dir(&body).exists());
}

#[body_test]
async fn bodies_are_found_by_whole_ids_and_prefixes(t: Bodies) {
    let body = t.create().await;
    let found = t.fleet().find(&body.as_str()[..6]).unwrap();
    assert_eq!((found.id(), found.status), (&body, Status::Running));
    for bad in ["", "nosuchbody", "UPPER", "../..", "a\0b", "a/b", "ü", &"x".repeat(4096)] {
        let failure = t.fleet().find(bad).unwrap_err();
        assert_eq!(
            (failure.kind, failure.hints),
            (Kind::NotFound, vec!["list them: pal ls".to_owned()]),
            "{bad:?}"
        );
        assert!(failure.message.len() < 5000 && !failure.message.contains('\0'));
    }
}

#[body_test]
async fn a_body_of_a_run_ends_with_its_maker(t: Bodies) {
    let fleet = t.second();
    let request = t.passing();
    let view = fleet.create(request).await.unwrap();
    let dir = t.body_dir(view.id());
    assert!(dir.exists());
    drop(fleet);
    wait::until("the Body's directory goes with its maker", || (!dir.exists()).then_some(())).await;
    wait::until("its guest too", || {
        (!std::path::Path::new(&format!("/proc/{}/root", view.pid.unwrap())).exists()).then_some(())
    })
    .await;
}

#[body_test]
async fn a_body_of_a_run_cannot_be_started_again(t: Bodies) {
    let view = t.make(t.passing()).await;
    testkit::kill(view.pid.unwrap());
    wait::until("the death is noticed", || (t.view(view.id()).status == Status::Dead).then_some(())).await;
    assert_eq!(t.view(view.id()).end, Some(GuestEnd::Killed { signal: 9 }));
    assert_eq!(t.fleet().start(view.id()).await.unwrap_err().kind, Kind::Conflict);
}
