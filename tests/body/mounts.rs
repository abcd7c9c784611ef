//! Mounts: the Body sees the given directories, with the given access, and nothing beside them.

use std::fs;

use proto::spec::{Access, Mount};
use testkit::{Bodies, body_test};

fn mount(t: &Bodies, name: &str, target: &str, access: Access) -> Mount {
    Mount { source: t.dir().join(name), target: target.into(), access }
}

/// A directory that every user may write, so that only the mount can refuse.
fn furnish(t: &Bodies, name: &str) {
    let dir = t.dir().join(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), "of the host\n").unwrap();
    for path in [dir.clone(), dir.join("file")] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn a_read_only_mount_is_read_and_never_written(t: Bodies) {
    furnish(&t, "shown");
    furnish(&t, "shared");
    for mut request in [t.passing(), t.kept()] {
        request.mounts.push(mount(&t, "shown", "/mnt/shown", Access::ReadOnly));
        request.mounts.push(mount(&t, "shared", "/mnt/shared", Access::ReadWrite));
        let spec = t.make(request).await.spec;
        let (body, owns) = (spec.id, !spec.ids.has_root());
        assert_eq!(t.sh(&body, "cat /mnt/shown/file").await.ok(), "of the host");
        // Each action first succeeds on the writable mount.
        for act in [
            "echo x > D/new",
            "echo x >> D/file",
            "chmod 755 D/file",
            "mkdir D/dir",
            "mv D/file D/moved",
            "rm -f D/file D/moved",
        ] {
            if act.starts_with("chmod") && !owns {
                continue; // Not the file of the Body's user, whose id is another's on the host.
            }
            t.sh(&body, &act.replace('D', "/mnt/shared")).await.ok();
            let refused = t.sh(&body, &act.replace('D', "/mnt/shown")).await;
            assert!(
                refused.code != 0 && refused.complaint().contains("Read-only file system"),
                "{act}: {refused:?}"
            );
        }
        for name in ["shared/new", "shared/dir"] {
            let path = t.dir().join(name);
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        }
        fs::write(t.dir().join("shared/file"), "again").unwrap();
        fs::set_permissions(t.dir().join("shared/file"), std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
    }
    assert_eq!(fs::read_to_string(t.dir().join("shown/file")).unwrap(), "of the host\n");
    assert_eq!(fs::read_dir(t.dir().join("shown")).unwrap().count(), 1);
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn what_is_written_to_a_shared_mount_is_on_the_host_and_stays(t: Bodies) {
    furnish(&t, "shared");
    let mut request = t.kept();
    request.mounts.push(mount(&t, "shared", "/mnt/deep/er/shared", Access::ReadWrite));
    let body = t.make(request).await.spec.id;
    t.sh(&body, "cd /mnt/deep/er/shared && echo inside > new && mkdir dir").await.ok();
    assert_eq!(fs::read_to_string(t.dir().join("shared/new")).unwrap(), "inside\n");
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat /mnt/deep/er/shared/new").await.ok(), "inside", "also after a restart");
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    assert_eq!(
        fs::read_to_string(t.dir().join("shared/new")).unwrap(),
        "inside\n",
        "removing a Body removes nothing of the host"
    );
    assert!(t.dir().join("shared/dir").is_dir());
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn a_single_file_can_be_shown(t: Bodies) {
    furnish(&t, "shown");
    let mut request = t.passing();
    request.mounts.push(mount(&t, "shown/file", "/etc/of-the-host.conf", Access::ReadOnly));
    let body = t.make(request).await.spec.id;
    assert_eq!(t.sh(&body, "cat /etc/of-the-host.conf; ls /mnt").await.ok(), "of the host");
    assert_ne!(t.sh(&body, "echo x > /etc/of-the-host.conf").await.code, 0);
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn devices_and_programs_of_a_mount_have_no_power(t: Bodies) {
    furnish(&t, "shown");
    let tool = t.dir().join("shown/tool");
    fs::copy("/usr/bin/id", &tool).unwrap();
    fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o6755)).unwrap();
    let mut request = t.passing();
    request.mounts.push(mount(&t, "shown", "/mnt/shown", Access::ReadOnly));
    let body = t.make(request).await.spec.id;
    assert_eq!(t.sh(&body, "/mnt/shown/tool -u").await.ok(), "1000", "it runs, as whoever runs it");
}

/// An overlay would slow every access to the Body's own files by a third, and a mount of its own would reveal
/// its host path.
#[body_test(except(microvm = "its root is the overlay of a kernel of its own"))]
async fn a_kept_root_is_a_directory_of_its_disk_and_no_table_tells_which(t: Bodies) {
    let body = t.make(t.kept()).await.spec.id;
    let kind = |path: &std::path::Path| rustix::fs::statfs(path).unwrap().f_type;
    let upper = t.body_dir(&body).join("disk/upper/root");
    assert_eq!(t.sh(&body, "stat -f -c %t /").await.ok(), format!("{:x}", kind(&upper)));
    t.sh(&body, "echo mine > ~/mine").await.ok();
    assert_eq!(fs::read_to_string(upper.join("home/user/mine")).unwrap(), "mine\n");
    for table in ["mountinfo", "mounts", "mountstats"] {
        let table = t.sh(&body, &format!("cat /proc/self/{table}")).await.ok();
        // The control: the mount table shows other mounts of its disk.
        assert!(table.contains(" /etc "), "{table}");
        assert!(!table.contains(&t.data().display().to_string()) && !table.contains("upper/root"), "{table}");
    }
    // The parent of the root is the root.
    assert_eq!(
        t.sh(&body, "cd / && cd .. && ls -di . /.. / | awk '{print $1}' | uniq | wc -l").await.ok(),
        "1"
    );
}

/// Repositories of every kind below one directory that every user may write, so that only the mounts can
/// refuse.
fn furnish_repositories(t: &Bodies, name: &str) {
    let dir = t.dir().join(name);
    let script = r#"
        set -e; umask 0; mkdir "$1"; cd "$1"
        export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
        me="-c user.name=me -c user.email=me@example.org -c init.defaultBranch=main -c protocol.file.allow=always"
        git $me init -q .; echo one > file; git $me add file; git $me commit -qm one
        git $me clone -q . deep/er/nested
        git $me clone -q --bare . bare.git
        git $me submodule --quiet add ./deep/er/nested sub
        git $me worktree add -q -b other tree
        mkdir apart; git $me init -q --separate-git-dir=apart/store apart/work
        git $me clone -q . bald; rm -rf bald/.git/hooks bald/.git/info
        chmod -R a+rwX ."#;
    let made = std::process::Command::new("sh").args(["-c", script, "sh"]).arg(dir).output().unwrap();
    assert!(made.status.success(), "{made:?}");
}

/// Changes with which the host's git would run programs of a Body, each with the file that it leaves if it
/// works.
const PLANTS: &[(&str, &str)] = &[
    ("echo '[core] fsmonitor = evil' >> .git/config", ".git/config"),
    ("echo evil > .git/hooks/pre-commit", ".git/hooks/pre-commit"),
    (
        "mv .git/hooks .git/hooks2 && mkdir .git/hooks && echo evil > .git/hooks/post-commit",
        ".git/hooks/post-commit",
    ),
    ("echo '[core] pager = evil' > .git/config.worktree", ".git/config.worktree"),
    ("echo '* filter=evil' > .git/info/attributes", ".git/info/attributes"),
    ("echo ../file > .git/commondir", ".git/commondir"),
    (
        "mkdir -p .git/rebase-merge && echo 'exec evil' > .git/rebase-merge/git-rebase-todo",
        ".git/rebase-merge/git-rebase-todo",
    ),
    ("echo '[core] pager = evil' >> .git/modules/sub/config", ".git/modules/sub/config"),
    (
        "mkdir -p .git/modules/sub/hooks; echo evil > .git/modules/sub/hooks/pre-commit",
        ".git/modules/sub/hooks/pre-commit",
    ),
    ("echo evil > .git/worktrees/tree/config.worktree", ".git/worktrees/tree/config.worktree"),
    ("echo ../../.. > .git/worktrees/tree/commondir", ".git/worktrees/tree/commondir"),
    ("echo 'gitdir: /evil' > sub/.git", "sub/.git"),
    (
        "rm sub/.git && mkdir -p sub/.git/hooks && echo evil > sub/.git/hooks/pre-commit",
        "sub/.git/hooks/pre-commit",
    ),
    ("echo 'gitdir: /evil' > tree/.git", "tree/.git"),
    ("echo evil > bald/.git/config.worktree", "bald/.git/config.worktree"),
    ("mkdir bald/.git/hooks && echo evil > bald/.git/hooks/pre-commit", "bald/.git/hooks/pre-commit"),
    ("mkdir bald/.git/info && echo evil > bald/.git/info/attributes", "bald/.git/info/attributes"),
    ("echo evil > bare.git/hooks/update", "bare.git/hooks/update"),
    ("echo evil >> bare.git/config", "bare.git/config"),
    ("echo evil >> apart/store/config", "apart/store/config"),
    ("echo evil >> deep/er/nested/.git/config", "deep/er/nested/.git/config"),
    // Move the git directory away, and put another in its place.
    ("mv bald/.git bald/.old && mkdir bald/.git && echo evil > bald/.git/config", "bald/.old/config"),
    ("mv bald bald2 && mkdir -p bald/.git && echo evil > bald/.git/config", "bald2/file"),
    (
        "mv deep/er deep/er2 && mkdir -p deep/er/nested/.git && echo evil > deep/er/nested/.git/config",
        "deep/er2/nested/file",
    ),
    ("mv bare.git bare2.git && mkdir bare.git && echo evil > bare.git/config", "bare2.git/HEAD"),
    ("mv .git .old && mkdir .git && echo evil > .git/config", ".old/config"),
];

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn git_directories_in_a_writable_mount_are_read_only_unless_that_is_said(t: Bodies) {
    for (number, mut request) in [t.passing(), t.kept()].into_iter().enumerate() {
        let (held, open) = (format!("held{number}"), format!("open{number}"));
        furnish_repositories(&t, &held);
        furnish_repositories(&t, &open);
        let before = tree_of(&t.dir().join(&held));
        request.mounts.push(mount(&t, &held, "/mnt/held", Access::ReadWrite));
        request.mounts.push(mount(&t, &open, "/mnt/open", Access::Unprotected));
        let view = t.make(request).await;
        let body = view.id().clone();
        let record = view.enforcement.mechanisms.iter().find(|held| held.name == "git directories").unwrap();
        assert!(
            record.state == proto::MechanismStatus::Degraded
                && record.reason.contains("unprotected as asked for: /mnt/open")
                && !record.reason.contains("could not be read"),
            "{record:?}"
        );
        for (plant, left) in PLANTS {
            // Each action first succeeds on the unprotected mount.
            t.sh(&body, &format!("cd /mnt/open && {plant} && test -e {left}")).await.ok();
            let refused = t.sh(&body, &format!("cd /mnt/held && {plant}")).await;
            let why = refused.complaint();
            assert!(
                refused.code != 0 && ["Read-only file system", "busy"].iter().any(|word| why.contains(word)),
                "{plant}: {refused:?}"
            );
        }
        assert_eq!(tree_of(&t.dir().join(&held)), before, "the host's git finds what it left");
        // All other files are writable, and git can read.
        let work = "cd /mnt/held && echo two > file && mkdir -p new/dir && echo x > deep/er/nested/new && mv new new2 \
                    && git -c safe.directory='*' status --porcelain";
        let status = t.sh(&body, work).await.ok();
        assert!(status.contains("M file"), "{status}");
        t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    }
}

/// Every name below a directory, with the contents of files.
fn tree_of(dir: &std::path::Path) -> Vec<(std::path::PathBuf, Option<Vec<u8>>)> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .flat_map(|path| match path.symlink_metadata().unwrap().is_dir() {
            true => std::iter::once((path.clone(), None)).chain(tree_of(&path)).collect::<Vec<_>>(),
            false => vec![(path.clone(), fs::read(&path).ok())],
        })
        .collect();
    found.sort();
    found
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn the_record_tells_of_git_directories_and_a_repository_itself_is_refused(t: Bodies) {
    furnish_repositories(&t, "repo");
    furnish(&t, "plain");
    let record = async |name: &str| {
        let mut request = t.passing();
        request.mounts.push(mount(&t, name, "/mnt/x", Access::ReadWrite));
        let view = t.make(request).await;
        let held = view.enforcement.mechanisms.into_iter().find(|held| held.name == "git directories");
        held.map(|held| (held.state, held.reason)).unwrap()
    };
    let (state, reason) = record("repo").await;
    assert_eq!(state, proto::MechanismStatus::Enforced, "{reason}");
    assert!(reason.contains("in writable mounts are read-only"), "{reason}");
    assert_eq!(
        record("plain").await,
        (proto::MechanismStatus::Enforced, "none is in a writable mount".to_owned())
    );
    for source in ["repo/.git", "repo/.git/hooks", "repo/bare.git", "repo/apart/store"] {
        let with = |access| {
            let mut request = t.passing();
            request.mounts.push(mount(&t, source, "/mnt/x", access));
            request
        };
        let refused = t.fleet().create(with(Access::ReadWrite)).await.unwrap_err();
        assert!(refused.hints[0].contains("rw,unprotected"), "{source}: {refused}");
        for access in [Access::ReadOnly, Access::Unprotected] {
            t.make(with(access)).await;
        }
    }
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn a_mount_point_is_made_wherever_it_is(t: Bodies) {
    furnish(&t, "shown");
    let places = [
        "/opt/pal-new/deep",
        "/usr/local/pal-new",
        "/usr/local/bin/pal-new",
        "/usr/share/pal-new/deep",
        "/usr/bin/pal-new",
        "/bin/pal-newer",
        "/etc/ssl/pal-new",
        "/srv/pal-new",
        "/pal-new/deep",
    ];
    for mut request in [t.passing(), t.kept()] {
        for place in places {
            request.mounts.push(mount(&t, "shown", place, Access::ReadOnly));
        }
        request.mounts.push(mount(&t, "shown/file", "/usr/share/pal-file", Access::ReadOnly));
        let life = request.life;
        let body = t.make(request).await.spec.id;
        let check = async || {
            for place in places {
                assert_eq!(t.sh(&body, &format!("cat {place}/file")).await.ok(), "of the host", "{place}");
            }
            let seen = "cat /usr/share/pal-file; test -x /usr/bin/env && test -d /usr/share/doc && test -s /etc/passwd";
            assert_eq!(t.sh(&body, seen).await.ok(), "of the host");
        };
        check().await;
        if life == proto::spec::Life::Kept {
            t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
            t.fleet().start(&body).await.unwrap();
            check().await;
        }
    }
    for place in places {
        assert!(!std::path::Path::new(place).exists(), "{place} is on the host");
    }
}

#[body_test(except(microvm = "a microVM shares directories through virtiofs: tests/microvm/share.rs"))]
async fn the_data_directory_and_what_no_body_can_write_are_refused(t: Bodies) {
    furnish(&t, "open");
    let attempt = async |source: std::path::PathBuf, access| {
        let mut request = t.passing();
        request.mounts.push(Mount { source, target: "/mnt/x".into(), access });
        t.fleet().create(request).await.map(|view| view.spec.id)
    };
    // The control: another directory beside it.
    let body = attempt(t.dir().join("open"), Access::ReadWrite).await.unwrap();
    t.sh(&body, "touch /mnt/x/new").await.ok();
    for source in [t.data(), t.data().join("bodies"), t.dir().to_owned()] {
        for access in [Access::ReadWrite, Access::Unprotected] {
            let refused = attempt(source.clone(), access).await.unwrap_err();
            assert_eq!(refused.kind, proto::Kind::Denied, "{}", source.display());
        }
    }
    let closed = t.dir().join("closed");
    fs::create_dir(&closed).unwrap();
    match attempt(closed, Access::ReadWrite).await {
        Ok(body) => drop(t.sh(&body, "touch /mnt/x/new").await.ok()),
        // The first hint makes a directory of its own, and none opens what is there already.
        Err(refused) => assert!(
            refused.hints[0].contains("mkdir -m 777")
                && refused.hints.iter().all(|hint| !hint.contains("chmod")),
            "{:?}",
            refused.hints
        ),
    }
}

/// Roots that were made when the host had other directories: the mount point of `/opt` is missing or something
/// else, and there is one of `/gnu`, which the host does not have.
#[body_test(except(microvm = "its root is an image, which has its own directories"))]
async fn a_root_starts_whatever_the_host_gained_or_lost(t: Bodies) {
    assert!(std::path::Path::new("/opt").is_dir() && !std::path::Path::new("/gnu").exists());
    let body = t.create().await;
    t.sh(&body, "echo mine > ~/mine").await.ok();
    let snapshot = t.fleet().snapshots().create(&body, None).await.unwrap();
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    let snapshot_dir = t.data().join("snapshots").join(snapshot.id.as_str());
    let roots = [t.body_dir(&body).join("disk/upper/root"), snapshot_dir.join("root")];
    for root in &roots {
        // As if the host had gained /opt, and lost /gnu.
        fs::remove_dir(root.join("opt")).unwrap();
        fs::create_dir(root.join("gnu")).unwrap();
    }
    let check = async |id: &proto::BodyId| {
        assert_eq!(
            t.sh(id, "cat ~/mine; ls -d /opt; ls /usr/bin/env").await.ok(),
            "mine\n/opt\n/usr/bin/env"
        );
        let view = t.view(id);
        let lost = view.enforcement.get("host /gnu").expect("the record tells of it");
        assert_eq!(lost.state, proto::MechanismStatus::Degraded);
    };
    check(t.fleet().start(&body).await.unwrap().id()).await;
    let mut request = t.kept();
    request.template = snapshot.id.to_string();
    check(&t.make(request).await.spec.id).await;
    // The Body's own link where the host has a directory: it is neither followed nor a reason not to start.
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    fs::remove_dir(roots[0].join("opt")).unwrap();
    std::os::unix::fs::symlink("/etc", roots[0].join("opt")).unwrap();
    let view = t.fleet().start(&body).await.unwrap();
    assert!(view.enforcement.get("host /opt").is_some(), "{:?}", view.enforcement);
    assert_eq!(t.sh(&body, "readlink /opt; test -s /etc/passwd && echo whole").await.ok(), "/etc\nwhole");
}
