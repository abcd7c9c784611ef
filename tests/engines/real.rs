//! The real programs, if they are installed: started, configured, and asked to boot. On a host with a working
//! KVM the test goes on to the end; on any other it checks that the failure is reported and leaves nothing.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use fleet::{Create, Fleet, Setting};
use proto::{
    Kind,
    vm::{Accelerator, Engine},
};
use testkit::{Bodies, body_test, explain, skip::skip};

/// The program: from a variable, or on the usual path.
pub fn program(which: Engine) -> Option<PathBuf> {
    let variable = format!("PAL_{}", which.name().replace('-', "_").to_uppercase());
    let places = ["/usr/local/bin", "/usr/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(which.name()))
        .find(|path| path.is_file());
    std::env::var_os(variable).map(PathBuf::from).or(places)
}

/// Gives the test the parts of microVMs, with a record of its own.
pub fn own_record(t: &Bodies) {
    let shared = fs::canonicalize(t.data().join("vm")).unwrap();
    let own = t.data().join("vm");
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o700)).unwrap();
    for entry in fs::read_dir(&shared)
        .unwrap()
        .flatten()
        .filter(|entry| !["setup.json", "lock"].iter().any(|own| entry.file_name() == *own))
    {
        symlink(entry.path(), own.join(entry.file_name())).unwrap();
    }
    fs::copy(shared.join("setup.json"), own.join("setup.json")).unwrap();
}

pub fn nothing_is_left(fleet: &Fleet) {
    assert!(fleet.list().unwrap().is_empty());
}

async fn check(t: &Bodies, which: Engine, calls_itself: &str) {
    let Some(program) = program(which) else { return skip(&format!("under a real {which}")) };
    own_record(t);
    let known = t
        .fleet()
        .microvms()
        .setup_engine(which, Some(program), &mut |said: &str| eprintln!("{said}"))
        .unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert!(known.version.starts_with(calls_itself), "{}", known.version);
    let verdict = known.verdict.clone().unwrap();
    eprintln!("{}: {}: {}", known.version, verdict.accelerator.name(), verdict.why);
    nothing_is_left(t.fleet());
    let wanted = Create { engine: Some(which), ..t.kept() };
    if verdict.accelerator == Accelerator::Kvm {
        return it_works(t, wanted).await;
    }
    // The hypervisor must refuse no setting: it got as far as to boot, and the host could not.
    let refused = verdict.why.contains(": 400: ") || verdict.why.contains(": 500: ");
    let booting = ["PUT /actions:", "PUT /api/v1/vm.boot:"].iter().any(|asked| verdict.why.contains(asked));
    assert!(!refused || booting, "{}", verdict.why);
    assert!(!verdict.why.contains("cannot start the hypervisor"), "{}", verdict.why);
    let failure = t.fleet().create(wanted).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Host, "{}", explain(&failure));
    assert!(
        failure.to_string().contains(which.name())
            && failure.hints.iter().any(|hint| hint.contains("--engine qemu")),
        "{}",
        explain(&failure)
    );
    assert!(failure.causes().iter().any(|cause| cause.contains(&verdict.why)), "{}", explain(&failure));
    nothing_is_left(t.fleet());
}

/// On a host with a working KVM: a microVM runs, is suspended, resumes, and is forked.
async fn it_works(t: &Bodies, wanted: Create) {
    let view =
        t.fleet().create(wanted.clone()).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    let body = view.id().clone();
    t.sh(&body, "echo here > ~/file; (while sleep 0.2; do date +%s%N > ~/beat; done) >/dev/null 2>&1 &")
        .await
        .ok();
    let fork = t
        .fleet()
        .snapshots()
        .fork(&body, 1)
        .await
        .unwrap_or_else(|failure| panic!("{}", explain(&failure)))
        .remove(0);
    for id in [&body, fork.id()] {
        let beats = t
            .sh(id, "cat ~/file; one=$(cat ~/beat); sleep 1; [ \"$one\" != \"$(cat ~/beat)\" ] && echo beats")
            .await
            .ok();
        assert_eq!(beats, "here\nbeats", "its process goes on");
    }
    let snapshot = t.fleet().snapshots().create(&body, Some("frozen".into())).await.unwrap();
    let other = Create { engine: Some(Engine::Qemu), template: snapshot.id.to_string(), ..wanted };
    assert_eq!(
        t.fleet().create(other).await.unwrap_err().kind,
        Kind::RestoreIncomplete,
        "frozen under one, not thawed under another"
    );
}

#[body_test(except(process = "it tests microVMs"))]
async fn firecracker_is_started_told_everything_and_asked_to_boot(t: Bodies) {
    check(&t, Engine::Firecracker, "Firecracker v").await;
}

#[body_test(except(process = "it tests microVMs"))]
async fn cloud_hypervisor_is_started_told_everything_and_asked_to_boot(t: Bodies) {
    check(&t, Engine::CloudHypervisor, "cloud-hypervisor v").await;
}

#[body_test(except(process = "it tests microVMs"))]
async fn one_that_is_not_here_says_where_to_get_it(t: Bodies) {
    own_record(&t);
    for which in [Engine::Firecracker, Engine::CloudHypervisor] {
        let failure =
            t.fleet().microvms().setup_engine(which, Some("/nowhere".into()), &mut |_: &str| ()).unwrap_err();
        assert_eq!(failure.kind, Kind::NotFound, "{}", explain(&failure));
        assert!(
            failure.hints[0].contains("/releases") && failure.hints[0].contains(which.name()),
            "{}",
            explain(&failure)
        );
        // A program that is no hypervisor.
        let failure = t
            .fleet()
            .microvms()
            .setup_engine(which, Some("/bin/true".into()), &mut |_: &str| ())
            .unwrap_err();
        assert_eq!(failure.kind, Kind::Host, "{}", explain(&failure));
        if program(which).is_none() {
            let failure = t.fleet().create(Create { engine: Some(which), ..t.kept() }).await.unwrap_err();
            assert!(
                failure.kind == Kind::Host
                    && failure.to_string().contains("not installed")
                    && failure.hints[0].contains("/releases"),
                "{}",
                explain(&failure)
            );
        }
    }
    nothing_is_left(t.fleet());
}

#[body_test(except(process = "it tests microVMs"))]
async fn what_was_decided_drives_machines_that_ask_for_nothing(t: Bodies) {
    let body = t.create().await;
    assert_eq!(t.view(&body).spec.engine, Some(Engine::Qemu), "the control: without a decision");
    let snapshot = t.fleet().snapshots().create(&body, Some("s".into())).await.unwrap();
    t.fleet().settings().set(Setting::Engine, "firecracker").unwrap();
    // A program that exists but is no hypervisor is still the one that is tried.
    t.fleet().settings().set(Setting::Firecracker, "/bin/true").unwrap();
    let failure = t.fleet().create(t.kept()).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Host, "{}", explain(&failure));
    assert!(
        explain(&failure).contains("firecracker") || explain(&failure).contains("hypervisor"),
        "{}",
        explain(&failure)
    );
    let asked = Create { engine: Some(Engine::Qemu), ..t.kept() };
    t.fleet()
        .create(asked)
        .await
        .unwrap_or_else(|failure| panic!("asked for by name: {}", explain(&failure)));
    let thawed = Create { template: snapshot.id.to_string(), ..t.kept() };
    let thawed = t.fleet().create(thawed).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(thawed.spec.engine, Some(Engine::Qemu), "what was frozen goes on under who froze it");
    for (setting, wrong) in
        [(Setting::Engine, "xen"), (Setting::Firecracker, "firecracker"), (Setting::Budget, "much")]
    {
        let before = t.fleet().settings().read().unwrap();
        let failure = t.fleet().settings().set(setting, wrong).unwrap_err();
        assert!(!failure.hints.is_empty(), "{}", explain(&failure));
        assert_eq!(t.fleet().settings().read().unwrap(), before, "nothing was decided");
    }
    t.fleet().settings().set(Setting::Engine, "qemu").unwrap();
    t.fleet().create(t.kept()).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
}

#[body_test(except(process = "it tests microVMs"))]
async fn what_one_froze_is_not_thawed_by_another(t: Bodies) {
    let body = t.create().await;
    let snapshot = t.fleet().snapshots().create(&body, Some("s".into())).await.unwrap();
    let dir = t.data().join("snapshots").join(snapshot.id.as_str());
    let manifest = fs::read_to_string(dir.join("manifest.json")).unwrap();
    let changed = manifest.replace("\"hypervisor\":\"qemu\"", "\"hypervisor\":\"firecracker\"");
    assert_ne!(changed, manifest);
    fs::write(dir.join("manifest.json"), changed).unwrap();
    let asked = Create { template: "s".into(), engine: Some(Engine::Qemu), ..t.kept() };
    let failure = t.fleet().create(asked.clone()).await.unwrap_err();
    assert_eq!(failure.kind, Kind::RestoreIncomplete, "{}", explain(&failure));
    assert!(failure.message.contains("firecracker") && failure.message.contains("qemu"), "{failure}");
    fs::write(dir.join("manifest.json"), manifest).unwrap();
    t.fleet()
        .create(asked)
        .await
        .unwrap_or_else(|failure| panic!("as it was it can be thawed: {}", explain(&failure)));
}
