//! Several Bodies: compared, landed in order, within a disk budget.

use fleet::GcMode;
use proto::Size;
use testkit::{Bodies, body_test, explain};

use crate::repo::{HostRepo, person, save};

#[body_test]
async fn bodies_are_compared_and_conflicts_are_known_before_they_land(t: Bodies) {
    let host = HostRepo::plain(&t);
    let mut ids = Vec::new();
    for work in [
        "sed -i 1s/.*/one/ numbers; echo a > a",
        "sed -i 1s/.*/two/ numbers",
        "sed -i '900s/.*/far/' numbers; exit 0",
    ] {
        let body = host.body(&t).await;
        t.sh(&body, work).await.ok();
        ids.push(body);
    }
    let test = "echo begin; test -e a || { echo no a is there >&2; exit 1; }";
    let compared = t.fleet().workspaces().compare(&ids, Some(test)).await.unwrap();
    let seen: Vec<(usize, Option<i32>, Option<&str>)> =
        compared.bodies.iter().map(|body| (body.files.len(), body.test, body.last_line.as_deref())).collect();
    let failed = Some("no a is there");
    assert_eq!(seen, [(2, Some(0), None), (1, Some(1), failed), (1, Some(1), failed)]);
    let overlaps: Vec<(bool, usize)> = compared
        .overlaps
        .iter()
        .map(|overlap| (overlap.conflicts == ["numbers"], overlap.files.len()))
        .collect();
    assert_eq!(
        overlaps,
        [(true, 1), (false, 1), (false, 1)],
        "the first two conflict, the third touches another place"
    );
}

#[body_test]
async fn a_queue_lands_what_is_green_and_keeps_the_rest_with_its_reason(t: Bodies) {
    let host = HostRepo::plain(&t);
    let mut ids = Vec::new();
    for work in [
        "sed -i 1s/.*/one/ numbers; git commit -qam one",
        "sed -i 1s/.*/two/ numbers; git commit -qam two",
        "touch broken; git add broken; git commit -qm broken",
        "echo fine > fine",
    ] {
        let body = host.body(&t).await;
        t.sh(&body, work).await.ok();
        ids.push(body);
    }
    let queued = t
        .fleet()
        .workspaces()
        .land_queue(&ids, "main", Some("test ! -e broken"), &person(), &mut |_| ())
        .await
        .unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    let landed: Vec<bool> = queued.iter().map(|one| one.landed.is_some()).collect();
    assert_eq!(landed, [true, false, false, true], "{queued:?}");
    assert!(
        queued[1].why.as_ref().unwrap().contains("conflicts in numbers")
            && queued[2].why.as_ref().unwrap().contains("code 1"),
        "{queued:?}"
    );
    assert_eq!(
        host.sh("head -1 numbers; cat fine; ls broken 2>/dev/null; git status --porcelain"),
        "one\nfine"
    );
    assert_eq!(
        host.git(&["for-each-ref", "--format=%(refname)", "refs/heads/"]),
        "refs/heads/main",
        "no trial is left"
    );
    assert_eq!(t.fleet().list().unwrap().len(), 4, "nor a Body of one");
    // Again: landed work and an idle Body have nothing to land, and no test runs for them.
    let mut again = vec![ids[0].clone(), ids[3].clone(), host.body(&t).await];
    let main = host.git(&["rev-parse", "main"]);
    let queue = t.fleet().workspaces();
    let queued = queue.land_queue(&again, "main", Some("false"), &person(), &mut |_| ()).await.unwrap();
    assert!(queued.iter().all(|one| one.nothing && one.landed.is_none() && one.why.is_none()), "{queued:?}");
    assert_eq!(host.git(&["rev-parse", "main"]), main);
    // The control: with new work the same test runs, and fails.
    again.truncate(1);
    t.sh(&again[0], "echo new > new").await.ok();
    let queued = queue.land_queue(&again, "main", Some("false"), &person(), &mut |_| ()).await.unwrap();
    assert!(queued[0].why.as_ref().is_some_and(|why| why.contains("code 1")), "{queued:?}");
}

#[body_test]
async fn the_store_keeps_within_its_budget_and_takes_nothing_that_is_used(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    host.commit("head -c 3000000 /dev/urandom > big", "big");
    let other = host.body(&t).await;
    t.fleet().remove(&other, fleet::Force::Yes).await.unwrap();
    let layers = || {
        t.fleet()
            .garbage()
            .disk_usage()
            .unwrap()
            .0
            .iter()
            .filter(|share| matches!(share.kind, "trees" | "histories"))
            .map(|share| share.count)
            .sum::<usize>()
    };
    let all = layers();
    t.fleet().garbage().collect(GcMode::Remove).await.unwrap();
    assert_eq!(layers(), all, "within the budget nothing goes");
    t.fleet().settings().set_budget(Size(1 << 20)).unwrap();
    let told = t.fleet().garbage().collect(GcMode::DryRun).await.unwrap().len();
    assert!(told > 0 && layers() == all, "a dry run only says so");
    t.fleet().garbage().collect(GcMode::Remove).await.unwrap();
    assert!(layers() < all, "what nobody stands on went");
    assert_eq!(
        t.sh(&body, "git status --porcelain; tail -1 numbers").await.ok(),
        "1000",
        "what somebody stands on did not"
    );
}

#[body_test]
async fn plain_git_fetches_what_a_body_did(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo work > work; git add work; git commit -qm work").await.ok();
    save(&t, &body).await;
    host.git(&["fetch", "--quiet", &format!("pal/{body}")]);
    assert_eq!(host.git(&["show", &format!("pal/{body}/heads/main:work")]), "work");
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    assert!(
        host.try_git(&["config", &format!("remote.pal/{body}.url")]).is_none(),
        "the remote goes with the Body"
    );
}
