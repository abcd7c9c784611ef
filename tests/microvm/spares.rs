//! The pool of running microVMs of a fleet: equal to others, ready sooner, and unclaimed until a request.

use std::time::Duration;

use fleet::{
    Create, Durability, ExecRequest, Fleet, FleetConfig, Force, GcMode, OutputChunk, Setting, Status,
};
use proto::BodyId;
use testkit::{Bodies, body_test, leaks, wait};

/// An emulated microVM is slow on a busy host.
const SPARE_PATIENCE: Duration = Duration::from_secs(120);

fn serving(t: &Bodies) -> Fleet {
    let fleet =
        Fleet::open_to_serve(FleetConfig { data: t.data(), durability: Durability::Process }).unwrap();
    fleet.pool().unwrap().force_refill();
    fleet
}

/// A Body with a wall-clock limit does not use the pool, so this one has none.
fn asked(t: &Bodies) -> Create {
    let mut request = t.kept();
    request.limits.wall = None;
    request
}

async fn says(fleet: &Fleet, id: &BodyId, script: &str) -> String {
    let mut exec = fleet.execs().start(id, ExecRequest::new(["sh", "-c", script])).await.unwrap();
    let mut said = Vec::new();
    while let Some(output) = exec.next().await.unwrap() {
        if let OutputChunk::Stdout(bytes) = output {
            said.extend_from_slice(&bytes);
        }
    }
    exec.finish().await.unwrap();
    String::from_utf8(said).unwrap().trim().to_owned()
}

fn how(view: &fleet::BodyView) -> &str {
    view.receipt.as_ref().map_or("", |receipt| receipt.how.as_str())
}

/// Directories of pooled microVMs that no request has claimed.
fn waiting(t: &Bodies) -> Vec<String> {
    let entries = std::fs::read_dir(t.data().join("bodies")).unwrap().flatten();
    let nobodys = entries
        .filter(|entry| entry.path().join("run.json").exists() && !entry.path().join("spec.json").exists());
    nobodys.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

async fn one_waits(fleet: &Fleet) {
    wait::within(SPARE_PATIENCE, "a spare waits", || (fleet.pool().unwrap().ready() == 1).then_some(()))
        .await;
}

fn hypervisors() -> usize {
    leaks::reap();
    leaks::descendants().iter().filter(|process| process.name.starts_with("qemu-system")).count()
}

const WHO: &str = "hostname; cat /etc/hostname /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; \
                   echo $COLOUR; id -un; pwd; date +%s; ls -A ~";

#[body_test(except(process = "it tests microVMs"))]
async fn a_spare_becomes_whose_it_is_given_to(t: Bodies) {
    let fleet = serving(&t);
    let first = fleet.create(asked(&t)).await.unwrap();
    assert_eq!(how(&first), "thaw", "nobody had asked before");
    says(&fleet, first.id(), "true").await;
    one_waits(&fleet).await;
    let waited = waiting(&t);
    assert!(waited.len() == 1 && fleet.find(&waited[0]).is_err(), "it is no Body yet: {waited:?}");
    assert_eq!(fleet.list().unwrap().len(), 1);
    assert!(
        fleet.garbage().collect(GcMode::DryRun).await.unwrap().is_empty(),
        "and nothing that was left behind"
    );
    let ask = Create {
        env: [("COLOUR".into(), "green".into())].into(),
        user: Some("root".into()),
        workdir: Some("/tmp".into()),
        ..asked(&t)
    };
    let taken = fleet.create(ask).await.unwrap();
    assert_eq!((how(&taken), taken.id().as_str()), ("spare", waited[0].as_str()));
    let receipt = taken.receipt.clone().unwrap();
    assert!(receipt.receipt.reseeded && receipt.clock_offset_ms.abs() <= 500, "{receipt:?}");
    assert_eq!((&receipt.receipt.body, receipt.receipt.generation), (taken.id(), 1));
    let said = says(&fleet, taken.id(), WHO).await;
    let lines: Vec<&str> = said.lines().collect();
    let [host, name, machine_id, random, colour, user, place, now, ..] = lines[..] else { panic!("{said}") };
    assert_eq!((host, name, colour), (taken.id().as_str(), taken.id().as_str(), "green"), "{said}");
    assert_eq!((user, place), ("root", "/tmp"), "{said}");
    let behind = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH + Duration::from_secs(now.parse().unwrap()))
        .unwrap_or_default();
    assert!(behind < Duration::from_secs(60), "its clock goes on: {behind:?}");
    assert_ne!(machine_id, says(&fleet, first.id(), "cat /etc/machine-id").await);
    let kinds: Vec<String> =
        fleet.log().events(0, Some(taken.id()), 3).unwrap().into_iter().map(|event| event.kind).collect();
    assert_eq!(kinds, ["body.created", "body.started", "exec.started"]);
    // A snapshot works as for any other: the channel was never stopped in between.
    let fork = fleet.snapshots().fork(taken.id(), 1).await.unwrap().remove(0);
    assert_eq!(says(&fleet, fork.id(), "hostname").await, fork.id().as_str());
    one_waits(&fleet).await;
    let next = fleet.create(asked(&t)).await.unwrap();
    assert_eq!(how(&next), "spare");
    let other = says(&fleet, next.id(), WHO).await;
    assert_eq!((random.len(), other.lines().nth(3).map(str::len)), (32, Some(32)));
    assert!(!other.contains(random) && !other.contains(machine_id), "thawed from the same: {said}\n{other}");
    one_waits(&fleet).await;
    drop(fleet);
    assert!(waiting(&t).is_empty(), "the next spare goes with its fleet");
    assert_eq!(
        (t.fleet().list().unwrap().len(), hypervisors()),
        (4, 4),
        "and those that were given away stay"
    );
    for view in t.fleet().list().unwrap() {
        assert_eq!(view.status, Status::Running);
        t.fleet().remove(view.id(), Force::Yes).await.unwrap();
    }
}

#[body_test(except(process = "it tests microVMs"))]
async fn who_asks_for_another_machine_gets_another_and_none_means_none(t: Bodies) {
    let fleet = serving(&t);
    let first = fleet.create(asked(&t)).await.unwrap();
    says(&fleet, first.id(), "true").await;
    one_waits(&fleet).await;
    let memory = proto::Size::mib(256);
    let limits = fleet::LimitRequest { memory: Some(memory), ..asked(&t).limits };
    let other = fleet.create(Create { limits, ..asked(&t) }).await.unwrap();
    assert_eq!((how(&other), other.spec.limits.memory), ("thaw", memory));
    fleet.settings().set(Setting::PoolSize, "0").unwrap();
    wait::within(SPARE_PATIENCE, "the spare goes", || {
        (fleet.pool().unwrap().ready() == 0 && waiting(&t).is_empty()).then_some(())
    })
    .await;
    let third = fleet.create(asked(&t)).await.unwrap();
    assert_eq!(how(&third), "thaw");
    says(&fleet, third.id(), "true").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((fleet.pool().unwrap().ready(), hypervisors()), (0, 3), "nobody makes one any more");
    assert!(
        fleet.settings().set(Setting::PoolSize, "99").is_err()
            && fleet.settings().set(Setting::PoolSize, "-1").is_err()
    );
    for view in [first, other, third] {
        fleet.remove(view.id(), Force::Yes).await.unwrap();
    }
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_spare_that_died_is_not_given_away(t: Bodies) {
    let fleet = serving(&t);
    let first = fleet.create(asked(&t)).await.unwrap();
    says(&fleet, first.id(), "true").await;
    one_waits(&fleet).await;
    let spare = waiting(&t).pop().unwrap();
    let run = std::fs::read_to_string(t.data().join("bodies").join(&spare).join("run.json")).unwrap();
    let pid = serde_json::from_str::<serde_json::Value>(&run).unwrap()["pid"].as_i64().unwrap();
    leaks::end(&[leaks::HostProcess { pid: pid as i32, parent: 0, name: String::new(), state: 'R' }]);
    let taken = fleet.create(asked(&t)).await.unwrap();
    assert_eq!(how(&taken), "thaw", "it is made as if there had been none");
    assert_ne!(taken.id().as_str(), spare);
    assert_eq!(says(&fleet, taken.id(), "hostname").await, taken.id().as_str());
    for view in [first, taken] {
        fleet.remove(view.id(), Force::Yes).await.unwrap();
    }
    drop(fleet);
    assert!(waiting(&t).is_empty());
}
