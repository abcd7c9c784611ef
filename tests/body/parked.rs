//! Pooled Bodies: equal to other Bodies, ready sooner, and unclaimed until a request.

use fleet::{Create, Durability, ExecRequest, Fleet, FleetConfig, Force, GcMode, Status};
use proto::{BodyId, Event};
use testkit::{Bodies, body_test, wait};

fn serving(t: &Bodies) -> Fleet {
    Fleet::open_to_serve(FleetConfig { data: t.data(), durability: Durability::Process }).unwrap()
}

/// Directories of pooled Bodies that no request has claimed.
fn waiting(t: &Bodies) -> Vec<String> {
    let entries = std::fs::read_dir(t.data().join("bodies")).unwrap().flatten();
    let parked = entries
        .filter(|entry| entry.path().join("run.json").exists() && !entry.path().join("spec.json").exists());
    parked.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// Waits for a Body that the pool can hand out, and gives its id.
async fn one_waits(fleet: &Fleet, t: &Bodies) -> String {
    let pool = fleet.pool().unwrap();
    wait::until("a Body waits", || if pool.ready() == 1 { waiting(t).pop() } else { None }).await
}

async fn says(fleet: &Fleet, id: &BodyId, script: &str) -> String {
    let mut exec = fleet.execs().start(id, ExecRequest::new(["sh", "-c", script])).await.unwrap();
    let mut said = Vec::new();
    while let Some(output) = exec.next().await.unwrap() {
        if let fleet::OutputChunk::Stdout(bytes) = output {
            said.extend_from_slice(&bytes);
        }
    }
    exec.finish().await.unwrap();
    String::from_utf8(said).unwrap().trim().to_owned()
}

#[body_test(except(microvm = "microVMs have a pool of their own: tests/microvm/spares.rs"))]
async fn a_body_that_waited_is_a_body_like_any_other(t: Bodies) {
    let fleet = serving(&t);
    let ask = || Create { env: [("COLOUR".into(), "green".into())].into(), ..t.kept() };
    for _ in 0..2 {
        let made = fleet.create(ask()).await.unwrap();
        fleet.remove(made.id(), Force::Yes).await.unwrap();
    }
    let waited = one_waits(&fleet, &t).await;
    assert!(fleet.list().unwrap().is_empty() && fleet.find(&waited).is_err(), "it is no Body yet");
    let made = fleet.create(ask()).await.unwrap();
    assert_eq!(made.id().as_str(), waited, "it is taken");
    let script = "echo $COLOUR $(hostname) $(id -un)";
    assert_eq!(says(&fleet, made.id(), script).await, format!("green {waited} user"));
    assert_eq!(t.second().find(&waited).unwrap().status, Status::Running);
    assert!(!made.enforcement.mechanisms.is_empty());
    let kinds: Vec<String> = fleet
        .log()
        .events(0, Some(made.id()), 10)
        .unwrap()
        .into_iter()
        .map(|event: Event| event.kind)
        .collect();
    assert_eq!(kinds[..3], ["body.created", "body.started", "exec.started"]);
    drop(fleet);
    assert_eq!(t.second().list().unwrap().len(), 1, "it stays when its maker goes");
    t.second().remove(made.id(), Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "microVMs have a pool of their own: tests/microvm/spares.rs"))]
async fn who_asks_for_something_else_gets_something_else(t: Bodies) {
    let fleet = serving(&t);
    for _ in 0..2 {
        let made = fleet.create(t.passing()).await.unwrap();
        fleet.remove(made.id(), Force::Yes).await.unwrap();
    }
    let waited = one_waits(&fleet, &t).await;
    let other = Create { env: [("COLOUR".into(), "blue".into())].into(), ..t.passing() };
    let made = fleet.create(other).await.unwrap();
    assert_ne!(made.id().as_str(), waited);
    assert_eq!(says(&fleet, made.id(), "echo $COLOUR").await, "blue");
    fleet.remove(made.id(), Force::Yes).await.unwrap();
    assert_eq!(waiting(&t), [waited.as_str()], "the pooled Body still waits for a request of its shape");
    let made = fleet.create(t.passing()).await.unwrap();
    assert_eq!(made.id().as_str(), waited);
    fleet.remove(made.id(), Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "microVMs have a pool of their own: tests/microvm/spares.rs"))]
async fn what_waits_is_nobodys_garbage_and_ends_with_its_owner(t: Bodies) {
    let fleet = serving(&t);
    for _ in 0..2 {
        let made = fleet.create(t.passing()).await.unwrap();
        fleet.remove(made.id(), Force::Yes).await.unwrap();
    }
    let waited = one_waits(&fleet, &t).await;
    assert!(t.second().garbage().collect(GcMode::Remove).await.unwrap().is_empty());
    assert_eq!(waiting(&t), [waited]);
    drop(fleet);
    assert!(waiting(&t).is_empty());
}

#[body_test(except(microvm = "microVMs have a pool of their own: tests/microvm/spares.rs"))]
async fn one_that_died_while_it_waited_is_not_handed_out(t: Bodies) {
    let fleet = serving(&t);
    for _ in 0..2 {
        let made = fleet.create(t.passing()).await.unwrap();
        fleet.remove(made.id(), Force::Yes).await.unwrap();
    }
    let waited = one_waits(&fleet, &t).await;
    let dir = t.data().join("bodies").join(&waited);
    let run: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("run.json")).unwrap()).unwrap();
    let guest = run["pid"].as_i64().unwrap().to_string();
    let name = || std::fs::read_to_string(format!("/proc/{guest}/comm")).ok();
    wait::until("it is the guest", || name().filter(|name| name.trim() == "pal-guest")).await;
    assert!(std::process::Command::new("kill").args(["-9", &guest]).status().unwrap().success());
    wait::until("its keeper has noticed", || (dir.join("end.json").exists() || !dir.exists()).then_some(()))
        .await;
    let made = fleet.create(t.passing()).await.unwrap();
    assert_ne!(made.id().as_str(), waited);
    assert_eq!(says(&fleet, made.id(), "echo alive").await, "alive");
    fleet.remove(made.id(), Force::Yes).await.unwrap();
    drop(fleet);
}
