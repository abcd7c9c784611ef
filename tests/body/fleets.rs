//! Several processes that use one data directory at once.

use fleet::{Force, Status};
use proto::Kind;
use testkit::{Bodies, body_test, ran};

#[body_test]
async fn two_fleets_use_the_same_body(t: Bodies) {
    let body = t.create().await;
    let other = t.second();
    let request = |script: &str| fleet::ExecRequest::new(["sh", "-c", script]);
    let (one, two) = tokio::join!(
        ran(
            t.fleet(),
            &body,
            request("echo one >> ~/log; while ! grep -q two ~/log; do sleep 0.01; done"),
            &[]
        ),
        ran(&other, &body, request("echo two >> ~/log; while ! grep -q one ~/log; do sleep 0.01; done"), &[]),
    );
    assert_eq!((one.unwrap().code, two.unwrap().code), (0, 0), "both ran at the same time");
    other.stop(&body, std::time::Duration::from_secs(1)).await.unwrap();
    assert_eq!(t.view(&body).status, Status::Stopped);
    other.start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "sort ~/log").await.ok(), "one\ntwo");
    other.remove(&body, Force::Yes).await.unwrap();
    assert_eq!(t.fleet().find(body.as_str()).unwrap_err().kind, Kind::NotFound);
}

#[body_test]
async fn a_line_that_a_command_left_leads_to_the_guest_that_is_there(t: Bodies) {
    let body = t.create().await;
    let other = t.second();
    let said = async |script: &str| t.sh(&body, script).await.ok();
    assert_eq!(said("echo one").await, "one");
    assert_eq!(said("echo two").await, "two");
    // Another guest starts, without this fleet noticing: its runtime does not run meanwhile.
    let again = async || {
        other.stop(&body, std::time::Duration::from_secs(1)).await.unwrap();
        other.start(&body).await.unwrap();
    };
    std::thread::scope(|scope| scope.spawn(|| block(again())).join().unwrap());
    assert_eq!(said("echo again").await, "again");
    other.stop(&body, std::time::Duration::from_secs(1)).await.unwrap();
    let refused = t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{}", testkit::explain(&refused));
    other.start(&body).await.unwrap();
    assert_eq!(said("echo three").await, "three");
    // A paused and resumed Body.
    other.pause(&body).await.unwrap();
    let refused = t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("paused"), "{}", testkit::explain(&refused));
    other.resume(&body).await.unwrap();
    assert_eq!(said("echo four").await, "four");
    // A runtime of its own has no connections of another, and may be gone at the next command.
    for word in ["five", "six"] {
        let script = format!("echo {word}");
        let request = fleet::ExecRequest::new(["sh", "-c", &script]);
        let told = std::thread::scope(|scope| {
            scope.spawn(|| block(ran(t.fleet(), &body, request, &[])).unwrap().text()).join().unwrap()
        });
        assert_eq!(told, word);
        assert_eq!(said(&format!("echo {word}")).await, word);
    }
    // A Body that died without an event.
    let pid = t.view(&body).pid.unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let refused = t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{}", testkit::explain(&refused));
    other.start(&body).await.unwrap();
    assert_eq!(said("echo seven").await, "seven");
}

#[body_test]
async fn of_removes_at_the_same_time_one_succeeds_and_none_harms(t: Bodies) {
    let body = t.create().await;
    let fleets: Vec<_> = (0..4).map(|_| t.second()).collect();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> =
            fleets.iter().map(|fleet| scope.spawn(|| block(fleet.remove(&body, Force::Yes)))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
    for failure in outcomes.into_iter().filter_map(Result::err) {
        assert!([Kind::NotFound, Kind::Conflict].contains(&failure.kind), "{}", testkit::explain(&failure));
    }
    assert!(!t.body_dir(&body).exists());
}

fn block<T>(future: impl std::future::Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[body_test]
async fn bodies_made_at_the_same_time_differ_in_everything_that_tells_them_apart(t: Bodies) {
    let fleets: Vec<_> = (0..4).map(|_| t.second()).collect();
    let request = t.kept();
    let views: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = fleets
            .iter()
            .map(|fleet| scope.spawn(|| block(fleet.create(request.clone())).unwrap()))
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    let mut seen = Vec::new();
    for view in &views {
        let told = t
            .sh(view.id(), "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1")
            .await
            .ok();
        assert!(!seen.contains(&told), "{told}");
        seen.push(told);
    }
    if testkit::is_root() {
        let mut ids: Vec<u32> = views.iter().map(|view| view.spec.ids.users[0].outside).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), views.len(), "each has host ids of its own");
    }
}

/// The symbolic link that claims these ids on the whole host.
fn host_wide(view: &fleet::BodyView) -> std::path::PathBuf {
    let claims = body::ids::claims_of(std::path::Path::new("/nowhere"), &view.spec.ids, view.id());
    claims.into_iter().next_back().expect("root's Bodies have claims").link
}

#[body_test(except(
    user = "only root gives each Body ids of its own",
    microvm = "ids are claimed before the layer matters"
))]
async fn bodies_of_two_data_directories_have_different_ids(t: Bodies) {
    let view = t.make(t.kept()).await;
    let first = view.spec.ids.users[0].outside;
    let record = |view: &fleet::BodyView| {
        view.enforcement.mechanisms.iter().find(|known| known.name == "own ids").unwrap().clone()
    };
    assert_eq!(record(&view).state, proto::MechanismStatus::Enforced);
    // The id of the Body decides which range is tried first, so the same id wants the same range.
    let other = t.dir().join("other");
    let there = other.join("bodies").join(view.id().as_str());
    std::fs::create_dir_all(&there).unwrap();
    let claimed = body::ids::claim(&other, view.id(), body::ids::MapRoot::Yes).unwrap();
    assert_ne!(claimed.users[0].outside, first, "they belong to a Body of another data directory");
    body::ids::release(&other, &claimed, view.id());

    // `/run` is empty after a restart; then another Body may get the ids of a stopped one.
    t.fleet().stop(view.id(), std::time::Duration::from_secs(1)).await.unwrap();
    std::fs::remove_file(host_wide(&view)).unwrap();
    let claimed = body::ids::claim(&other, view.id(), body::ids::MapRoot::Yes).unwrap();
    assert_eq!(claimed.users[0].outside, first);
    let refused = t.fleet().start(view.id()).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{}", testkit::explain(&refused));
    assert!(refused.hints[0].contains("pal fork"), "{}", testkit::explain(&refused));
    let forks = t.fleet().snapshots().fork(view.id(), 1).await.unwrap();
    assert_ne!(forks[0].spec.ids.users[0].outside, first);
    assert_eq!(t.sh(forks[0].id(), "id -u").await.ok(), "1000");

    // The other owner is gone, so the ids are free again.
    std::fs::remove_dir(&there).unwrap();
    assert_eq!(t.fleet().start(view.id()).await.unwrap().status, Status::Running);
    assert_eq!(std::fs::read_link(host_wide(&view)).unwrap(), t.body_dir(view.id()));
    t.fleet().remove(view.id(), Force::Yes).await.unwrap();
    assert!(
        std::fs::read_link(host_wide(&view)).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    );
}

#[body_test(except(
    user = "only root gives each Body ids of its own",
    microvm = "ids are claimed before the layer matters"
))]
async fn claims_of_a_data_directory_that_is_gone_are_cleared_away_and_no_others(t: Bodies) {
    if !testkit::sees_every_process() {
        return testkit::skip::skip("what data directories that are gone have left");
    }
    let view = t.make(t.kept()).await;
    let claimed = |name: &str| {
        let data = t.dir().join(name);
        let id: proto::BodyId = format!("{name}{}", std::process::id()).parse().unwrap();
        std::fs::create_dir_all(data.join("bodies").join(id.as_str())).unwrap();
        let ids = body::ids::claim(&data, &id, body::ids::MapRoot::Yes).unwrap();
        let link = body::ids::claims_of(&data, &ids, &id).into_iter().next_back().unwrap().link;
        (data, id, ids, link)
    };
    let (_, there, there_ids, of_there) = claimed("there");
    let (gone, left, _, of_gone) = claimed("gone");
    let (used, _, used_ids, of_used) = claimed("used");
    let user = used_ids.users[0].outside + 1000;
    let mut process = std::process::Command::new("setpriv")
        .args([&format!("--reuid={user}"), "--clear-groups", "sleep", "600"])
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", process.id());
    let has_it =
        || std::fs::read_to_string(&status).unwrap().contains(&format!("Uid:\t{user}")).then_some(());
    testkit::wait::until("the process has the id", has_it).await;

    // Other tests also run gc; the lock keeps them out, so that the result is certain.
    let claims = std::fs::File::open(of_gone.parent().unwrap()).unwrap();
    rustix::fs::flock(&claims, rustix::fs::FlockOperation::LockExclusive).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    std::fs::remove_dir_all(&used).unwrap();
    let found = t.fleet().garbage().collect(fleet::GcMode::DryRun).await.unwrap();
    let said: Vec<_> = found.iter().map(|one| (one.kind, one.name.as_str(), one.why.as_str())).collect();
    assert!(said.contains(&("ids", left.as_str(), "its data directory is gone")), "{said:?}");
    assert!(of_gone.is_symlink(), "looking takes nothing");
    drop(claims);

    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
    assert!(!of_gone.is_symlink());
    assert!(of_there.is_symlink() && host_wide(&view).is_symlink(), "their Bodies are there");
    assert!(of_used.is_symlink(), "a process has an id of it");
    assert_eq!(t.sh(view.id(), "id -u").await.ok(), "1000");

    process.kill().unwrap();
    process.wait().unwrap();
    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
    assert!(!of_used.is_symlink());
    body::ids::release(&t.dir().join("there"), &there_ids, &there);
}

#[body_test]
async fn a_body_under_change_is_waited_for(t: Bodies) {
    let body = t.create().await;
    let other = t.second();
    let (paused, stopped) =
        tokio::join!(t.fleet().pause(&body), other.stop(&body, std::time::Duration::from_secs(1)));
    assert!(stopped.is_ok(), "{stopped:?}");
    assert!(paused.is_ok() || paused.is_err_and(|failure| failure.kind == Kind::Conflict));
    assert_eq!(t.view(&body).status, Status::Stopped);
}
