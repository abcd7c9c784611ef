//! Homes: part of snapshots and forks like every file, and kept by name across Bodies.

use fleet::{Discard, Force, UpRequest};
use proto::Kind;
use testkit::{Bodies, body_test};

use crate::{
    ecosystems::{asked, prepared},
    repo::{HostRepo, up},
};

#[body_test]
async fn the_home_goes_with_forks_snapshots_and_restarts(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "mkdir -p ~/.agent && echo one > ~/.agent/memory").await.ok();
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    assert_eq!(t.sh(&fork, "cat ~/.agent/memory; echo two >> ~/.agent/memory").await.ok(), "one");
    t.fleet().snapshots().create(&fork, Some("mind".into())).await.unwrap();
    let later =
        t.fleet().create(fleet::Create { template: "mind".into(), ..t.kept() }).await.unwrap().spec.id;
    assert_eq!(t.sh(&later, "cat ~/.agent/memory").await.ok(), "one\ntwo");
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat ~/.agent/memory").await.ok(), "one", "the first one has its own");
}

#[body_test]
async fn a_named_home_is_kept_across_bodies_and_one_at_a_time_has_it(t: Bodies) {
    let host = HostRepo::plain(&t);
    let asked = || UpRequest { home: Some("claude".into()), ..host.up(&t) };
    let first = up(&t, asked()).await.spec.id;
    t.sh(&first, "mkdir -m 700 ~/.claude && echo one > ~/.claude/memory && echo gone > ~/gone && mkdir ~/.cache && echo big > ~/.cache/big; ln -s /etc/passwd ~/link").await.ok();
    let refused = t.fleet().workspaces().up(asked()).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{refused}");
    assert!(refused.message.contains(first.as_str()), "{refused}");
    let many = t.fleet().workspaces().up(UpRequest { count: 2, ..asked() }).await.unwrap_err();
    assert_eq!(many.kind, Kind::Usage);
    // A fork has a copy, which belongs to the fork alone.
    let fork = t.fleet().snapshots().fork(&first, 1).await.unwrap().remove(0).spec.id;
    assert_eq!(t.sh(&fork, "cat ~/.claude/memory; echo fork >> ~/.claude/memory").await.ok(), "one");
    t.fleet().stop(&first, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&first).await.unwrap();
    assert_eq!(t.sh(&first, "cat ~/.claude/memory; stat -c %a ~/.claude").await.ok(), "one\n700");
    t.fleet().remove(&first, Force::Yes).await.unwrap();
    t.fleet().remove(&fork, Force::Yes).await.unwrap();
    let second = up(&t, asked()).await.spec.id;
    let look = "cat ~/.claude/memory; readlink ~/link; stat -c %U:%a ~/.claude; ls ~/.cache 2>/dev/null; touch ~/.claude/new && rm ~/gone && echo two >> ~/.claude/memory";
    assert_eq!(
        t.sh(&second, look).await.ok(),
        "one\n/etc/passwd\nuser:700",
        "with its modes, and without caches"
    );
    t.fleet().remove(&second, Force::Yes).await.unwrap();
    let third = up(&t, asked()).await.spec.id;
    assert_eq!(
        t.sh(&third, "cat ~/.claude/memory; ls ~").await.ok(),
        "one\ntwo\nlink",
        "what was removed stays so"
    );
    assert_eq!(t.fleet().homes().list().unwrap()[0].body.as_ref(), Some(&third));
    assert_eq!(t.fleet().homes().remove("claude").unwrap_err().kind, Kind::Conflict);
    t.fleet().remove_with(&third, Force::Yes, Discard::Yes).await.unwrap();
    t.fleet().homes().remove("claude").unwrap();
    assert_eq!(t.fleet().homes().list().unwrap().len(), 0);
    let records = std::fs::read_dir(t.data().join("layers"))
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("layer.json")).ok());
    assert_eq!(records.filter(|record| record.contains("home claude")).count(), 0, "its layers go with it");
}

#[body_test(except(user = "npm of this host may belong to another user"))]
async fn a_home_stands_on_what_is_installed_there(t: Bodies) {
    let make = "mkdir .devcontainer; echo '{ \"postCreateCommand\": \"mkdir -p ~/tool && echo 1 > ~/tool/version\" }' > .devcontainer/devcontainer.json";
    let host = HostRepo::make(&t, "app", make);
    let with_home = || UpRequest { home: Some("mine".into()), ..asked(&t, &host) };
    let (first, _) = prepared(&t, with_home()).await;
    assert_eq!(t.sh(&first, "cat ~/tool/version; echo note > ~/note").await.ok(), "1");
    t.fleet().remove(&first, Force::Yes).await.unwrap();
    host.commit("sed -i 's/echo 1/echo 2/' .devcontainer/devcontainer.json", "a newer tool");
    let (second, _) = prepared(&t, with_home()).await;
    assert_eq!(t.sh(&second, "cat ~/tool/version ~/note").await.ok(), "2\nnote");
}
