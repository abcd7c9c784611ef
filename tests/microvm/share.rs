//! A directory of the host that a microVM shares: all of it and nothing beside it, with the given access.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use fleet::{Create, ExecRequest, Status};
use proto::{
    BodyId, Kind, MechanismStatus,
    launch::GuestEnd,
    spec::{Access, Mount},
    vm::{Engine, Sharing},
};
use testkit::{Bodies, CommandOutput, body_test, explain, leaks, wait};

use crate::kills::program;

/// A directory that every user may write, so that only the share can refuse.
fn furnish(t: &Bodies, name: &str) -> PathBuf {
    let dir = t.dir().join(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), "of the host\n").unwrap();
    for path in [&dir, &dir.join("file")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    dir
}

fn sharing(t: &Bodies, shares: &[(&Path, &str, Access)]) -> Create {
    let mounts = shares
        .iter()
        .map(|(source, target, access)| Mount {
            source: source.to_path_buf(),
            target: target.into(),
            access: *access,
        })
        .collect();
    Create { mounts, share: Some(Sharing::Virtiofs), ..t.kept() }
}

async fn as_root(t: &Bodies, body: &BodyId, script: &str) -> CommandOutput {
    let request = ExecRequest { user: Some("root".into()), ..ExecRequest::new(["sh", "-c", script]) };
    t.exec(body, request).await
}

fn virtiofsd() -> Vec<leaks::HostProcess> {
    leaks::descendants().into_iter().filter(|process| process.name == "virtiofsd").collect()
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn a_directory_is_live_and_nothing_beside_it_is_reached(t: Bodies) {
    let (shown, shared) = (furnish(&t, "shown"), furnish(&t, "shared"));
    fs::write(t.dir().join("secret"), "secret").unwrap();
    for (name, target) in [("up", "../secret".into()), ("across", t.dir().join("secret"))] {
        symlink(target, shared.join(name)).unwrap();
        assert_eq!(fs::read_to_string(shared.join(name)).unwrap(), "secret", "the control: it leads there");
    }
    let request = sharing(
        &t,
        &[(&shown, "/mnt/shown", Access::ReadOnly), (&shared, "/mnt/deep/shared", Access::ReadWrite)],
    );
    let view = t.make(request).await;
    let body = view.id();
    let held = view.enforcement.mechanisms.iter().find(|held| held.name == "shared directories");
    assert!(held.is_some_and(|held| held.state == MechanismStatus::Enforced), "{:?}", view.enforcement);

    // Changes are visible at once, also in an open file.
    t.sh(body, "exec 3< /mnt/deep/shared/file; read line <&3; echo $line > ~/before").await.ok();
    for round in 0..5 {
        fs::write(shared.join("file"), format!("round {round}\n")).unwrap();
        assert_eq!(t.sh(body, "cat /mnt/deep/shared/file").await.ok(), format!("round {round}"));
        t.sh(body, &format!("echo back {round} > /mnt/deep/shared/new")).await.ok();
        assert_eq!(fs::read_to_string(shared.join("new")).unwrap(), format!("back {round}\n"));
    }
    fs::rename(shared.join("file"), shared.join("moved")).unwrap();
    assert_eq!(t.sh(body, "cd /mnt/deep/shared; [ ! -e file ] && cat moved").await.ok(), "round 4");

    for name in ["up", "across"] {
        let refused = t.sh(body, &format!("cat /mnt/deep/shared/{name}")).await;
        assert!(refused.complaint().contains("No such file"), "{name} leads out: {refused:?}");
    }

    // The guest cannot change a read-only share.
    as_root(&t, body, "mount -o remount,rw /mnt/shown").await.ok();
    for act in ["echo x > D/new2", "echo x >> D/file", "mkdir D/dir", "mv D/file D/elsewhere", "rm D/file"] {
        as_root(&t, body, &format!("touch /mnt/deep/shared/file; {}", act.replace('D', "/mnt/deep/shared")))
            .await
            .ok();
        let refused = as_root(&t, body, &act.replace('D', "/mnt/shown")).await;
        assert!(refused.complaint().contains("Read-only file system"), "{act}: {refused:?}");
    }
    assert_eq!(leaks::entries(&shown), ["file"]);
    assert_eq!(fs::read_to_string(shown.join("file")).unwrap(), "of the host\n");
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn git_directories_in_a_shared_directory_are_read_only(t: Bodies) {
    let shares = ["held", "open"].map(|name| {
        let dir = furnish(&t, name);
        for made in [".git/hooks", "deep/bald/.git", "bare/objects", "bare/refs"] {
            fs::create_dir_all(dir.join(made)).unwrap();
        }
        for (file, text) in
            [(".git/config", ""), ("sub/.git", "gitdir: ../.git/modules/sub\n"), ("bare/HEAD", "")]
        {
            fs::create_dir_all(dir.join(file).parent().unwrap()).unwrap();
            fs::write(dir.join(file), text).unwrap();
        }
        assert!(Command::new("chmod").args(["-R", "a+rwX"]).arg(&dir).status().unwrap().success());
        dir
    });
    let [held, open] = &shares;
    let request =
        sharing(&t, &[(held, "/mnt/held", Access::ReadWrite), (open, "/mnt/open", Access::Unprotected)]);
    let view = t.make(request).await;
    let body = view.id();
    let record = view.enforcement.mechanisms.iter().find(|held| held.name == "git directories").unwrap();
    assert!(record.reason.contains("4 in writable mounts are read-only"), "{record:?}");
    for act in [
        "echo evil >> D/.git/config",
        "echo evil > D/.git/hooks/pre-commit",
        "echo evil > D/.git/commondir",
        "mkdir D/deep/bald/.git/hooks",
        "echo evil > D/sub/.git",
        "echo evil > D/bare/config",
        "mv D/deep/bald D/deep/bald2",
        "mv D/.git D/.old",
    ] {
        as_root(&t, body, &act.replace('D', "/mnt/open")).await.ok();
        let refused = as_root(&t, body, &act.replace('D', "/mnt/held")).await;
        let why = refused.complaint();
        assert!(
            refused.code != 0 && ["Read-only file system", "busy"].iter().any(|word| why.contains(word)),
            "{act}: {refused:?}"
        );
    }
    as_root(&t, body, "echo written > /mnt/held/file; echo written > /mnt/held/deep/bald/new").await.ok();
    assert_eq!(fs::read_to_string(held.join("deep/bald/new")).unwrap(), "written\n");
    assert_eq!(fs::read_to_string(held.join(".git/config")).unwrap(), "");
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn a_share_lends_nothing_and_who_shares_it_is_held(t: Bodies) {
    let shared = furnish(&t, "shared");
    let view = t.make(sharing(&t, &[(&shared, "/mnt/shared", Access::ReadWrite)])).await;
    let body = view.id();

    // Each action first succeeds in a directory that is not shared.
    for act in ["chmod 4755 D/tool", "chmod 2755 D/tool", "mknod D/null c 1 3"] {
        let furnish = "cp /bin/true D/tool; chmod 755 D/tool; ";
        as_root(&t, body, &format!("mkdir -p /root/d; {furnish}{act}").replace('D', "/root/d")).await.ok();
        let refused = as_root(&t, body, &format!("{furnish}{act}").replace('D', "/mnt/shared")).await;
        let said = refused.complaint();
        assert!(
            refused.code != 0 && (said.contains("not permitted") || said.contains("Permission denied")),
            "{act}: {refused:?}"
        );
    }
    let made = fs::metadata(shared.join("tool")).unwrap();
    assert_eq!(made.mode() & 0o7777, 0o755, "nothing lends its owner's rights");
    assert_eq!(Some(made.uid()), view.spec.ids.user_outside(0), "it belongs to the Body's ids");
    // The owner of a file is hidden if the Body does not have that id.
    let seen = t.sh(body, "stat -c %u /mnt/shared/file").await.ok();
    let ours = fs::metadata(shared.join("file")).unwrap().uid();
    let mapped = (0..=proto::spec::USER_ID).find(|id| view.spec.ids.user_outside(*id) == Some(ours));
    assert_eq!(seen, mapped.unwrap_or(65534).to_string());

    let [sharer] = virtiofsd().try_into().unwrap_or_else(|all| panic!("one for one directory: {all:?}"));
    let status = fs::read_to_string(format!("/proc/{}/status", sharer.pid)).unwrap();
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    assert!(field("Uid:").split_whitespace().all(|id| id != "0"), "no id of the host's root");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    let qemu =
        leaks::descendants().into_iter().find(|process| process.name.starts_with("qemu-system")).unwrap();
    let link = |pid: i32, name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
    for name in ["user", "mnt", "pid", "ipc", "uts"] {
        assert_ne!(link(sharer.pid, name), link(qemu.pid, name), "its own {name} namespace");
    }
    assert_ne!(link(sharer.pid, "net"), link(std::process::id() as i32, "net"), "no network of the host");
    if testkit::is_root() {
        let mut root = leaks::entries(format!("/proc/{}/root", sharer.pid).as_ref());
        root.sort();
        assert_eq!(root, ["file", "tool"], "its root is what it shares");
        let seen = PathBuf::from(format!("/proc/{}/root{}", qemu.pid, proto::vm::SHARES));
        assert!(seen.is_dir(), "the place is there");
        assert_eq!(leaks::entries(&seen), [""; 0], "and its hypervisor sees nothing of what is shared");
    }
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn its_memory_is_never_frozen_and_its_files_are(t: Bodies) {
    let shared = furnish(&t, "shared");
    let body = t.make(sharing(&t, &[(&shared, "/mnt/shared", Access::ReadWrite)])).await.spec.id;
    t.sh(&body, "echo kept > ~/file; sync").await.ok();
    let refused = [
        t.fleet().snapshots().create(&body, None).await.map(drop),
        t.fleet().snapshots().fork(&body, 1).await.map(drop),
        t.fleet().pause_to_disk(&body).await.map(drop),
    ];
    for refused in refused {
        let failure = refused.unwrap_err();
        assert!(
            failure.kind == Kind::Usage && failure.hints[0].contains("pal stop"),
            "{}",
            explain(&failure)
        );
    }
    t.fleet().pause(&body).await.unwrap();
    t.fleet().resume(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat /mnt/shared/file").await.ok(), "of the host", "it went on all the while");

    t.fleet().stop(&body, Duration::from_secs(10)).await.unwrap();
    assert_eq!(t.view(&body).status, Status::Stopped, "{:?}", t.view(&body).end);
    assert!(virtiofsd().is_empty(), "it is gone with its machine");
    t.fleet().snapshots().create(&body, Some("files".into())).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    fs::write(shared.join("file"), "later\n").unwrap();
    assert_eq!(t.sh(&body, "cat ~/file /mnt/shared/file").await.ok(), "kept\nlater", "also after a restart");
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    let other =
        Create { template: "files".into(), ..sharing(&t, &[(&shared, "/mnt/other", Access::ReadOnly)]) };
    let other = t.make(other).await.spec.id;
    assert_eq!(t.sh(&other, "cat ~/file /mnt/other/file").await.ok(), "kept\nlater");
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn whoever_is_killed_leaves_nothing_and_the_reason_is_told(t: Bodies) {
    let shared = furnish(&t, "shared");
    let body = t.make(sharing(&t, &[(&shared, "/mnt/shared", Access::ReadWrite)])).await.spec.id;
    leaks::kill(virtiofsd()[0].pid);
    wait::until("its end is noticed", || (t.view(&body).status == Status::Dead).then_some(())).await;
    assert_eq!(t.view(&body).end, Some(GuestEnd::Exit { code: 75 }));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("its virtiofsd ended or was killed"), "{refused}");
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();

    let mut pal = Command::new(program())
        .arg("--data")
        .arg(t.data())
        .args(["run", "--layer", "microvm", "--mount"])
        .arg(format!("{}:/mnt/shared:rw,type=virtiofs", shared.display()))
        .args(["--", "sh", "-c", "echo here > /mnt/shared/here; sleep 100"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait::until("its command runs", || shared.join("here").exists().then_some(())).await;
    assert_eq!(virtiofsd().len(), 1);
    pal.kill().unwrap();
    pal.wait().unwrap();
    wait::until("all of it is gone", || {
        leaks::reap();
        (virtiofsd().is_empty() && t.fleet().list().unwrap().is_empty()).then_some(())
    })
    .await;
}

#[body_test(except(process = "mounts of this layer are always shared: tests/body/mounts.rs"))]
async fn what_cannot_be_shared_is_refused(t: Bodies) {
    let shared = furnish(&t, "shared");
    let one = || sharing(&t, &[(&shared, "/mnt/shared", Access::ReadOnly)]);
    let file = shared.join("file");
    let cases = [
        (Create { share: None, ..one() }, ",type=virtiofs"),
        (Create { mounts: Vec::new(), ..one() }, "--mount"),
        (sharing(&t, &[(&file, "/mnt/file", Access::ReadOnly)]), "pal cp"),
        (sharing(&t, &[(shared.as_path(), "/mnt/shared", Access::ReadOnly); 5]), "the directory above"),
        (sharing(&t, &[(&shared, "/proc/x", Access::ReadOnly)]), "/mnt"),
        (Create { layer: Some(proto::Layer::Process), ..one() }, "--layer microvm"),
    ];
    for (request, hint) in cases {
        let failure = t.fleet().create(request).await.unwrap_err();
        assert!(
            failure.kind == Kind::Usage && failure.hints.iter().any(|said| said.contains(hint)),
            "{hint}: {}",
            explain(&failure)
        );
    }
    let failure = t.fleet().create(Create { engine: Some(Engine::Firecracker), ..one() }).await.unwrap_err();
    assert!(!failure.hints.is_empty(), "{}", explain(&failure));
    let frozen = t.create().await;
    t.fleet().snapshots().create(&frozen, Some("running".into())).await.unwrap();
    let failure = t.fleet().create(Create { template: "running".into(), ..one() }).await.unwrap_err();
    assert!(failure.kind == Kind::Usage && failure.hints[0].contains("--boot"), "{}", explain(&failure));
    assert_eq!(t.fleet().list().unwrap().len(), 1, "nothing of what was refused is there");
}
