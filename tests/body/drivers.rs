//! A layer is a driver: a third one fits without a change of the fleet, and what it lacks is one clear error.

use std::time::Duration;

use fleet::{Create, Force, Status};
use proto::{
    Kind,
    spec::{Access, Mount},
    vm::Engine,
};
use testkit::{
    Bodies, body_test, ran,
    test_driver::{TEST_LAYER, open_with_test_driver},
};

#[body_test(except(microvm = "the test driver uses the machinery of the process layer"))]
async fn a_body_of_a_third_layer_lives_through_its_driver(t: Bodies) {
    let (fleet, calls) = open_with_test_driver(&t.data());
    let request = Create { layer: Some(TEST_LAYER), ..Create::kept() };
    let body = fleet.create(request).await.unwrap();
    assert_eq!((body.spec.layer, body.status), (TEST_LAYER, Status::Running));
    assert_eq!(calls.take(), ["check", "prepare"]);
    let hello = || fleet::ExecRequest::new(["sh", "-c", "echo hello | tee ~/file"]);
    assert_eq!(ran(&fleet, body.id(), hello(), &[]).await.unwrap().ok(), "hello");
    assert_eq!(fleet.pause(body.id()).await.unwrap().status, Status::Paused);
    assert_eq!(fleet.resume(body.id()).await.unwrap().status, Status::Running);
    assert_eq!(calls.take(), ["pause", "resume"]);
    let fork = fleet.snapshots().fork(body.id(), 1).await.unwrap().remove(0);
    assert_eq!(fork.spec.layer, TEST_LAYER);
    assert_eq!(calls.take(), ["snapshot", "check", "prepare"]);
    let read = || fleet::ExecRequest::new(["sh", "-c", "cat ~/file"]);
    assert_eq!(ran(&fleet, fork.id(), read(), &[]).await.unwrap().ok(), "hello");
    assert_eq!(fleet.stop(body.id(), Duration::from_secs(5)).await.unwrap().status, Status::Stopped);
    assert_eq!(fleet.start(body.id()).await.unwrap().status, Status::Running);
    assert_eq!(ran(&fleet, body.id(), read(), &[]).await.unwrap().ok(), "hello");
    assert_eq!(calls.take(), ["prepare"]);
    for view in [fork, body] {
        fleet.remove(view.id(), Force::Yes).await.unwrap();
        assert_eq!(calls.take().first(), Some(&"kill"));
    }
    assert!(fleet.list().unwrap().is_empty());
    let doctor = fleet.doctor().await.unwrap();
    assert!(doctor.layers.iter().any(|found| found.layer == TEST_LAYER && found.usable), "{doctor:?}");
}

#[body_test(except(microvm = "the test driver uses the machinery of the process layer"))]
async fn a_capability_that_a_layer_lacks_is_one_clear_error(t: Bodies) {
    let (fleet, calls) = open_with_test_driver(&t.data());
    let request = || Create { layer: Some(TEST_LAYER), ..Create::kept() };
    let body = fleet.create(request()).await.unwrap();
    calls.take();
    let events = t.events().len();
    let source = t.dir().join("shared");
    std::fs::create_dir(&source).unwrap();
    let mounts = vec![Mount { source, target: "/mnt/here".into(), access: Access::ReadOnly }];
    let refusals = [
        (
            fleet.create(Create { mounts, ..request() }).await.unwrap_err(),
            "layer container has no live mounts",
            "copy it in: pal cp",
        ),
        (
            fleet.create(Create { engine: Some(Engine::Qemu), ..request() }).await.unwrap_err(),
            "layer container has no engine qemu",
            "leave --engine out",
        ),
        (
            fleet.pause_to_disk(body.id()).await.unwrap_err(),
            "layer container has no memory snapshots",
            "pal pause BODY",
        ),
    ];
    for (failure, message, hint) in refusals {
        assert_eq!((failure.kind, failure.message.as_str()), (Kind::Usage, message));
        assert!(failure.hints.iter().any(|found| found.contains(hint)), "{:?}", failure.hints);
    }
    assert!(calls.take().is_empty(), "the fleet refuses before it asks the driver for anything");
    assert_eq!((t.events().len(), fleet.list().unwrap().len()), (events, 1), "nothing was made");
    assert_eq!(fleet.view(body.id()).unwrap().status, Status::Running);
    fleet.remove(body.id(), Force::Yes).await.unwrap();
    // A `pal` without the driver says so.
    let failure = t.fleet().create(request()).await.unwrap_err();
    assert_eq!(failure.message, "this pal cannot start a Body on layer container");
}
