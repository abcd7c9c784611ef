//! An ordinary user with subordinate ids: files that only ids of the Body may read are saved like others.

use testkit::{Bodies, body_test, run_as_account};

use crate::repo::{HostRepo, save};

#[body_test(except(
    root = "it tests the ids of an ordinary user",
    user = "it tests the ids of an account",
    microvm = "a helper with the ids of the Body reads a microVM's disk for every caller"
))]
async fn what_only_the_body_may_read_is_saved_too(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "umask 077; echo secret > secret; mkdir closed; echo x > closed/x; chmod 700 closed; echo y > committed; git add committed; git commit -qm hidden; rm numbers").await.ok();
    let upper = t.body_dir(&body).join("disk/upper/workspace-app");
    // The control: the test's own user cannot read the file.
    assert_eq!(std::fs::read(upper.join("secret")).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    let saved = save(&t, &body).await;
    assert!(saved.is_whole(), "{saved:?}");
    for (path, text) in [("secret", "secret"), ("closed/x", "x"), ("committed", "y")] {
        assert_eq!(host.wip_file(&body, path).as_deref(), Some(text), "{path}");
    }
    assert_eq!(host.wip_file(&body, "numbers"), None);
    assert_eq!(
        t.sh(&body, "stat -c %a secret closed").await.ok(),
        "600\n700",
        "the Body's own are as they were"
    );
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
}

#[test]
fn hidden_files() {
    run_as_account("workspace::account::what_only_the_body_may_read_is_saved_too::process");
}
