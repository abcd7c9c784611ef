//! Bad input for microVMs: it is reported, nothing is left, and snapshots stay unchanged.

use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use fleet::{Create, CustomKernel};
use proto::Kind;
use testkit::{Bodies, body_test, leaks};

use crate::kills::program;

#[body_test(except(process = "it tests microVMs"))]
async fn what_was_frozen_and_is_damaged_is_not_thawed(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo here > ~/file").await.ok();
    let snapshot = t.fleet().snapshots().create(&body, Some("s".into())).await.unwrap();
    let dir = t.data().join("snapshots").join(snapshot.id.as_str());
    let thaw = || async { t.fleet().create(Create { template: "s".into(), ..t.kept() }).await };
    let manifest = fs::read_to_string(dir.join("manifest.json")).unwrap();
    let damage = |name: &str, act: &dyn Fn(&Path)| {
        let (path, spare) = (dir.join(name), dir.join("spare"));
        body::vm::disks::copy(&path, &spare).unwrap();
        fs::set_permissions(&spare, fs::Permissions::from_mode(0o600)).unwrap();
        let kept = dir.join("kept");
        fs::rename(&path, &kept).unwrap();
        fs::rename(&spare, &path).unwrap();
        act(&path);
        (kept, path)
    };
    let cut = |path: &Path| fs::File::options().write(true).open(path).unwrap().set_len(1 << 20).unwrap();
    let flip = |path: &Path| {
        fs::File::options().write(true).open(path).unwrap().write_all_at(&[0xff; 64], 4000).unwrap()
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let cases: [Damage<'_>; 5] =
        [("ram", &cut), ("ram", &flip), ("state", &cut), ("state", &flip), ("upper.img", &cut)];
    for (name, act) in cases {
        let (kept, path) = damage(name, act);
        let failure = thaw().await.unwrap_err();
        assert_eq!(failure.kind, Kind::RestoreIncomplete, "{name}: {}", testkit::explain(&failure));
        assert!(
            failure.message.contains("RESTORE_INCOMPLETE") && failure.hints[0].contains("--boot"),
            "{failure}"
        );
        fs::rename(kept, path).unwrap();
    }
    for (from, to) in [
        ("\"engine\":\"engine-", "\"engine\":\"other-"),
        ("\"accelerator\":\"emulated\"", "\"accelerator\":\"kvm\""),
        ("\"ticks_khz\":", "\"ticks_khz\":9"),
        ("\"board\":", "\"board\":9"),
    ] {
        let changed = manifest.replace(from, to);
        assert_ne!(changed, manifest, "{from}");
        fs::write(dir.join("manifest.json"), changed).unwrap();
        assert_eq!(thaw().await.unwrap_err().kind, Kind::RestoreIncomplete, "{to}");
    }
    fs::write(dir.join("manifest.json"), manifest).unwrap();
    let mut request = Create { template: "s".into(), ..t.kept() };
    request.limits.memory = Some(proto::Size::mib(256));
    assert_eq!(t.fleet().create(request).await.unwrap_err().kind, Kind::Usage, "memory goes on as it was");
    let other = Create { template: "s".into(), layer: Some(proto::Layer::Process), ..t.kept() };
    assert_eq!(t.fleet().create(other).await.unwrap_err().kind, Kind::Usage, "and on its layer");
    assert_eq!(
        t.sh(thaw().await.unwrap().id(), "cat ~/file").await.ok(),
        "here",
        "as it was frozen it can be thawed"
    );
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_kernel_that_is_none_is_refused_or_told(t: Bodies) {
    let ground = fs::canonicalize(t.data().join("vm")).unwrap();
    let junk = t.dir().join("junk");
    fs::write(&junk, vec![0x5a; 1 << 20]).unwrap();
    let refused = t
        .fleet()
        .microvms()
        .setup(Some(CustomKernel { file: junk, modules: None }), &mut |_: &str| ())
        .unwrap_err();
    assert_eq!(refused.kind, Kind::Usage, "{}", testkit::explain(&refused));
    // A program that is no kernel, although it looks like one.
    let own = t.data().join("vm");
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    for entry in fs::read_dir(&ground)
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name() != "setup.json" && entry.file_name() != "warm")
    {
        symlink(entry.path(), own.join(entry.file_name())).unwrap();
    }
    let setup = fs::read_to_string(ground.join("setup.json")).unwrap();
    let mut setup: serde_json::Value = serde_json::from_str(&setup).unwrap();
    setup["kernel"] = "kernel-none".into();
    fs::create_dir_all(own.join("kernel-none/modules")).unwrap();
    fs::copy("/proc/self/exe", own.join("kernel-none/vmlinux")).unwrap();
    fs::write(own.join("setup.json"), setup.to_string()).unwrap();
    let failure = t.fleet().create(Create { cold: true, ..t.kept() }).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Host, "{}", testkit::explain(&failure));
    assert!(!failure.hints.is_empty() && t.fleet().list().unwrap().is_empty());
    for entry in fs::read_dir(ground.join("initrd"))
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("kernel-none"))
    {
        fs::remove_file(entry.path()).unwrap();
    }
}

#[body_test(except(process = "it tests microVMs"))]
async fn nothing_set_up_says_how(t: Bodies) {
    fs::remove_file(t.data().join("vm")).unwrap();
    let failure = t.fleet().create(t.kept()).await.unwrap_err();
    assert_eq!(
        (failure.kind, failure.hints[0].as_str()),
        (Kind::Host, "set it up once: pal setup microvm"),
        "{failure}"
    );
}

/// If the memory limit is reached, the failure says so, and nothing keeps running.
#[body_test(except(process = "it tests microVMs"))]
async fn memory_that_the_host_does_not_give_is_said(t: Bodies) {
    let run = |limit: &str| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={limit}")).arg(program()).arg("--data").arg(t.data());
        command.args(["run", "--layer", "microvm", "--", "echo", "here"]).output().unwrap()
    };
    let enough = run("unlimited");
    assert_eq!(String::from_utf8_lossy(&enough.stdout), "here\n", "{enough:?}");
    let little = run("700000000");
    let said = String::from_utf8_lossy(&little.stderr);
    assert_eq!(little.status.code(), Some(125), "{said}");
    assert!(said.contains("Cannot allocate memory") && said.contains("hint:"), "{said}");
    assert!(t.fleet().list().unwrap().is_empty());
    assert!(leaks::descendants().iter().all(|process| !process.name.starts_with("qemu-system")));
}
