//! Leases: there before their Body is one, gone after it, and changed by one process after the other.

use std::time::Duration;

use fleet::{Create, Force, GcMode, Lease, Then, records::LEASES};
use proto::{BodyId, Kind};
use testkit::{Bodies, body_test, explain, open};

fn lease() -> Lease {
    Lease::new(Duration::from_secs(3600), Then::Kill)
}

#[body_test]
async fn a_lease_lives_as_long_as_its_body(t: Bodies) {
    let view = t.fleet().create(Create { lease: Some(lease()), ..t.kept() }).await.unwrap();
    let unleased = t.create().await;
    let leases = t.fleet().leases();
    assert_eq!(leases.all().unwrap().into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [view.id().clone()]);
    assert_eq!(leases.get(&unleased).unwrap(), None);
    assert_eq!(leases.change(&unleased, |_| ()).unwrap_err().kind, Kind::Conflict);
    t.fleet().remove(view.id(), Force::Yes).await.unwrap();
    assert_eq!(leases.get(view.id()).unwrap(), None);
    assert_eq!(leases.change(view.id(), |_| ()).unwrap_err().kind, Kind::NotFound);
    assert_eq!(t.fleet().records().list(LEASES, None).unwrap().records, []);
}

#[body_test]
async fn a_lease_that_a_killed_pal_left_is_swept(t: Bodies) {
    let kept = t.fleet().create(Create { lease: Some(lease()), ..t.kept() }).await.unwrap();
    let gone: BodyId = "gone00000000".parse().unwrap();
    let text = serde_json::to_string(&lease()).unwrap();
    t.fleet().records().create(LEASES, &gone.as_str().parse().unwrap(), &text).unwrap();
    assert_eq!(t.fleet().leases().all().unwrap().len(), 1, "a lease without a Body is no leased Body");
    for mode in [GcMode::DryRun, GcMode::Remove] {
        let found = t.fleet().garbage().collect(mode).await.unwrap();
        let leases: Vec<&str> =
            found.iter().filter(|item| item.kind == "lease").map(|item| item.name.as_str()).collect();
        assert_eq!(leases, [gone.as_str()]);
    }
    assert_eq!(t.fleet().leases().get(&gone).unwrap(), None);
    assert!(t.fleet().leases().get(kept.id()).unwrap().is_some(), "a Body keeps its lease");
}

#[body_test]
async fn changes_of_two_fleets_are_both_kept(t: Bodies) {
    let view = t.fleet().create(Create { lease: Some(lease()), ..t.kept() }).await.unwrap();
    let other = open(t.fleet().data()).unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    std::thread::scope(|scope| {
        for (at, fleet) in [t.fleet(), &other].into_iter().enumerate() {
            let id = view.id();
            scope.spawn(move || {
                for change in 0..20 {
                    fleet
                        .leases()
                        .change(id, |lease| {
                            lease.metadata.insert(format!("{at}-{change}"), String::new());
                        })
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(t.fleet().leases().get(view.id()).unwrap().unwrap().metadata.len(), 40);
}
