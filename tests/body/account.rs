//! An ordinary user with subordinate ids: root of the Body is that user on the host.

use fleet::ExecRequest;
use testkit::{Bodies, body_test, run_as_account};

#[body_test(except(root = "it tests the ids of an ordinary user", user = "it tests the ids of an account"))]
async fn root_inside_is_the_account_outside(t: Bodies) {
    let view = t.make(t.kept()).await;
    assert!(view.spec.ids.has_root());
    let root =
        |script: &str| ExecRequest { user: Some("root".into()), ..ExecRequest::new(["sh", "-c", script]) };
    assert_eq!(
        t.exec(view.id(), root("id -u; touch /root/of-root /etc/of-root && echo made")).await.ok(),
        "0\nmade"
    );
    assert_eq!(
        t.sh(view.id(), "id -u; touch ~/of-user && echo made; echo x > /etc/of-root || echo refused")
            .await
            .ok(),
        "1000\nmade\nrefused"
    );
    let owner = |path: &str| {
        std::os::unix::fs::MetadataExt::uid(
            &t.body_dir(view.id()).join("disk/upper").join(path).metadata().unwrap(),
        )
    };
    let own = rustix::process::getuid().as_raw();
    assert_eq!(owner("etc/of-root"), own);
    assert_ne!(owner("root/home/user/of-user"), own, "`user` has an id of its own");
    assert_ne!(owner("root/home/user/of-user"), 0);
}

#[test]
fn root_inside() {
    run_as_account("body::account::root_inside_is_the_account_outside::process");
}

#[test]
fn forks_with_every_kind_of_file() {
    run_as_account("body::fork::a_fork_has_every_file_as_it_was::process");
}

#[test]
fn forks_of_what_the_host_shows() {
    run_as_account("body::fork::changes_to_what_the_host_shows_are_forked_too::process");
}

#[test]
fn a_deep_tree_is_removed() {
    run_as_account("body::life::removing_ends_every_process_and_a_deep_tree::process");
}

#[test]
fn a_run_on_a_snapshot() {
    run_as_account("body::fork::a_snapshot_is_a_template_by_id_and_by_name::process");
}

#[test]
fn mounts_that_belong_to_another_id() {
    run_as_account("body::mounts::a_read_only_mount_is_read_and_never_written::process");
}

/// Files of subordinate ids stay when the user removes the directory; `pal gc` removes them.
#[test]
fn a_directory_that_was_removed() {
    run_as_account("body::death::a_body_whose_directory_was_removed_ends_by_itself::process");
}
