//! Templates: a root file system of its own below a Body; everything else stays the same.

use std::time::{Duration, Instant};

use fleet::{Create, ExecRequest, Force, GcMode};
use proto::{
    Kind, MechanismStatus,
    template::{StartCommand, TemplateSettings},
};
use testkit::{Bodies, body_test, roots, run_as_account};

fn import(t: &Bodies, name: &str, settings: TemplateSettings) {
    let built = t.fleet().builds().import_template(name, "a test", settings, &roots::small()[..]);
    built.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
}

fn of(template: &str, request: Create) -> Create {
    Create { template: template.into(), ..request }
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_body_has_the_templates_root_and_settings(t: Bodies) {
    let env = [("COLOUR".to_owned(), "green".to_owned())].into();
    import(
        &t,
        "small",
        TemplateSettings { env, workdir: Some("/tmp".into()), ..TemplateSettings::default() },
    );
    for request in [t.passing(), t.kept()] {
        let view = t.make(of("small", request)).await;
        let id = view.id();
        assert_eq!(
            t.sh(id, "id -u; echo $COLOUR; pwd; ls /").await.ok().lines().take(3).collect::<Vec<_>>(),
            ["1000", "green", "/tmp"]
        );
        // No file of the host's root is there.
        assert_eq!(t.sh(id, "ls /usr/bin /opt /home 2>/dev/null | cat").await.ok(), "/home:\nuser");
        assert_eq!(
            t.sh(id, "cat /etc/hostname; ls -d /proc/1 /dev/null /sys/devices; stat -c %a /tmp").await.ok(),
            format!("{id}\n/dev/null\n/proc/1\n/sys/devices\n1777")
        );
        assert_eq!(
            t.sh(id, "echo mine > ~/file && cat ~/file; stat -c %u:%g ~/file").await.ok(),
            "mine\n1000:1000"
        );
        let root = ExecRequest {
            user: Some("root".into()),
            ..ExecRequest::new(["sh", "-c", "id -u; touch /bin/new && stat -c %u /bin/new /bin/cat"])
        };
        assert_eq!(t.exec(id, root).await.ok(), "0\n0\n0");
        // The template itself is unchanged.
        let other = t.make(of("small", t.passing())).await;
        assert_eq!(t.sh(other.id(), "ls /bin/new ~/file 2>&1 | head -c 0; echo none").await.ok(), "none");
        t.fleet().remove(other.id(), Force::Yes).await.unwrap();
    }
}

#[body_test(except(
    user = "a root file system of its own needs subordinate ids",
    microvm = "root of a microVM has all rights over its own kernel; the boundary is around the microVM"
))]
async fn setuid_programs_work_only_where_the_template_says_so(t: Bodies) {
    import(&t, "plain", TemplateSettings::default());
    import(&t, "trusting", TemplateSettings { sudo: true, ..TemplateSettings::default() });
    let up = |id| {
        t.sh(id, "/bin/up -p -c 'id -u; cat /proc/self/status' | while read a b; do case $a in 0|1000) echo $a;; CapBnd:|CapEff:|Seccomp:|NoNewPrivs:) echo $a $b;; esac; done")
    };
    let plain = t.make(of("plain", t.passing())).await;
    assert!(up(plain.id()).await.ok().starts_with("1000\n"));
    assert_eq!(
        plain.enforcement.get("no new privileges").map(|held| held.state),
        Some(MechanismStatus::Enforced)
    );
    let trusting = t.make(of("trusting", t.passing())).await;
    let said = up(trusting.id()).await.ok();
    assert!(said.starts_with("0\n"), "{said}");
    assert!(said.contains("NoNewPrivs: 0") && said.contains("Seccomp: 2"), "{said}");
    // Eight capabilities over the Body's own resources: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
    // SETUID, NET_BIND_SERVICE.
    assert!(said.contains("CapBnd: 00000000000004fb") && said.contains("CapEff: 00000000000004fb"), "{said}");
    let record = trusting.enforcement.get("no new privileges").expect("it stands in the record");
    assert_eq!(record.state, MechanismStatus::Absent);
    assert!(record.reason.contains("sudo"), "{}", record.reason);
    // All other mechanisms are as without `sudo`.
    for held in &plain.enforcement.mechanisms {
        let with = trusting.enforcement.get(&held.name).expect("the same mechanisms");
        assert!(
            held.name == "no new privileges" || with.state == held.state,
            "{}: {:?}",
            held.name,
            with.state
        );
    }
    // The guest has dropped the capability that it needed to install its own filter.
    assert!(
        t.sh(trusting.id(), "cat /proc/1/status | head -60").await.ok().contains("CapEff:\t00000000000004fb")
    );
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn snapshots_forks_and_starts_stand_on_it_also_when_it_is_gone(t: Bodies) {
    import(&t, "small", TemplateSettings::default());
    let view = t.make(of("small", t.kept())).await;
    t.sh(view.id(), "echo kept > ~/file").await.ok();
    let fork = t.fleet().snapshots().fork(view.id(), 1).await.unwrap().remove(0);
    let snapshot = t.fleet().snapshots().create(view.id(), Some("shot".into())).await.unwrap();
    t.fleet().templates().remove("small").unwrap();
    assert_eq!(
        t.fleet()
            .garbage()
            .collect(GcMode::Remove)
            .await
            .unwrap()
            .iter()
            .filter(|found| found.kind == "layer")
            .count(),
        0
    );
    assert_eq!(t.fleet().create(of("small", t.passing())).await.unwrap_err().kind, Kind::NotFound);
    t.fleet().stop(view.id(), Duration::ZERO).await.unwrap();
    t.fleet().start(view.id()).await.unwrap();
    let again = t.make(of("shot", t.passing())).await;
    for id in [view.id(), fork.id(), again.id()] {
        assert_eq!(
            t.sh(id, "cat ~/file; ls /usr 2>/dev/null | head -c 0; cat /etc/hostname").await.ok(),
            format!("kept\n{id}")
        );
    }
    for id in [view.id(), fork.id(), again.id()] {
        t.fleet().remove(id, Force::Yes).await.unwrap();
    }
    t.fleet().snapshots().remove(snapshot.id.as_str()).unwrap();
    assert_eq!(
        t.fleet()
            .garbage()
            .collect(GcMode::Remove)
            .await
            .unwrap()
            .iter()
            .filter(|found| found.kind == "layer")
            .count(),
        1
    );
}

/// A Body's own upper is hostile at the next start: the launcher writes through no link in it.
#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn what_a_body_made_of_its_root_leads_nowhere_at_the_next_start(t: Bodies) {
    import(&t, "small", TemplateSettings::default());
    let view = t.make(of("small", t.kept())).await;
    let outside = format!("/var/tmp/palisade-escape-{}", std::process::id());
    std::fs::create_dir(&outside).unwrap();
    std::fs::set_permissions(&outside, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let swap = format!(
        "mv /etc /was && ln -s {outside} /etc && rm -rf /var /run && ln -s {outside} /var && ln -s {outside} /run; ls -d /etc"
    );
    let root = ExecRequest { user: Some("root".into()), ..ExecRequest::new(["sh", "-c", &swap]) };
    t.exec(view.id(), root).await.ok();
    t.fleet().stop(view.id(), Duration::ZERO).await.unwrap();
    let started = t.fleet().start(view.id()).await;
    let left: Vec<_> =
        std::fs::read_dir(&outside).unwrap().flatten().map(|entry| entry.file_name()).collect();
    std::fs::remove_dir_all(&outside).unwrap();
    assert!(left.is_empty(), "written outside: {left:?}");
    started.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn what_the_template_starts_runs_and_is_waited_for(t: Bodies) {
    let start = StartCommand {
        command: Some("sleep 0.3; touch /tmp/up; exec sleep 1000".into()),
        ready: Some("stat /tmp/up".into()),
    };
    import(&t, "server", TemplateSettings { start: Some(start), ..TemplateSettings::default() });
    let begun = Instant::now();
    let view = t.make(of("server", t.kept())).await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(t.sh(view.id(), "ls /tmp/up").await.ok(), "/tmp/up");
    t.fleet().stop(view.id(), Duration::ZERO).await.unwrap();
    t.fleet().start(view.id()).await.unwrap();
    let processes = t.sh(view.id(), "cat /proc/[0-9]*/comm").await.ok();
    assert!(processes.lines().any(|name| name == "sleep"), "{processes}");
    import(
        &t,
        "broken",
        TemplateSettings {
            start: Some(StartCommand { command: Some("no-such-program".into()), ready: None }),
            ..TemplateSettings::default()
        },
    );
    // A failing start command is the template's problem; only readiness is awaited.
    t.make(of("broken", t.passing())).await;
}

#[body_test(except(root = "root can map any ids"))]
async fn without_subordinate_ids_the_error_says_what_to_do(t: Bodies) {
    if body::ids::of_layers().is_ok() {
        return testkit::skip::skip("without subordinate ids");
    }
    let failure = t
        .fleet()
        .builds()
        .import_template("small", "a test", TemplateSettings::default(), &roots::small()[..])
        .unwrap_err();
    assert_eq!(failure.kind, Kind::Host);
    assert!(failure.hints.iter().any(|hint| hint.contains("subuid")), "{:?}", failure.hints);
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn names_and_tags_move_and_builds_stay(t: Bodies) {
    import(
        &t,
        "app",
        TemplateSettings { env: [("V".to_owned(), "1".to_owned())].into(), ..TemplateSettings::default() },
    );
    let first = t.fleet().templates().tag("app", &["one".into()]).unwrap();
    import(
        &t,
        "app",
        TemplateSettings { env: [("V".to_owned(), "2".to_owned())].into(), ..TemplateSettings::default() },
    );
    for (name, expected) in
        [("app", "2"), ("APP:one", "1"), ("app:default", "2"), (&format!("app:{first}"), "1")]
    {
        let view = t.make(of(name, t.passing())).await;
        assert_eq!(t.sh(view.id(), "echo $V").await.ok(), expected, "{name}");
    }
    assert_eq!(t.fleet().templates().view("app").unwrap().builds.len(), 2);
    t.fleet().templates().untag("app", &["one".into()]).unwrap();
    for (key, kind) in
        [("app:one", Kind::NotFound), ("app:../x", Kind::NotFound), ("no-such", Kind::NotFound)]
    {
        assert_eq!(t.fleet().create(of(key, t.passing())).await.unwrap_err().kind, kind, "{key}");
    }
    for bad in ["host", "", "a b", "a/b/c", "\u{1b}[31m"] {
        assert_eq!(t.fleet().templates().find_or_create(bad).unwrap_err().kind, Kind::Usage, "{bad:?}");
    }
    assert_eq!(t.fleet().templates().untag("app", &["one".into()]).unwrap_err().kind, Kind::NotFound);
    assert_eq!(t.fleet().templates().tag("app", &["a b".into()]).unwrap_err().kind, Kind::Usage);
}

/// Hostile archives stay inside their layer.
#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_hostile_archive_writes_nothing_outside(t: Bodies) {
    let mark = format!("palisade-mark-{}", std::process::id());
    let mut builder = tar::Builder::new(Vec::new());
    let mut link = |path: &str, target: &str, kind| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        header.set_cksum();
        builder.append_link(&mut header, path, target).unwrap();
    };
    link("out", "/tmp", tar::EntryType::Symlink);
    link("up", "../../../../../../../../tmp", tar::EntryType::Symlink);
    for path in ["out", "up"] {
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        builder.append_data(&mut header, format!("{path}/{mark}"), &b"x"[..]).unwrap();
    }
    let archive = builder.into_inner().unwrap();
    t.fleet()
        .builds()
        .import_template("hostile", "a test", TemplateSettings::default(), &archive[..])
        .unwrap();
    assert!(!std::path::Path::new("/tmp").join(&mark).exists());
    let names = testkit::leaks::entries(&t.data().join("layers"));
    assert_eq!(names.iter().filter(|name| !name.contains("lock")).count(), 1);
    // A truncated or too long archive leaves nothing.
    let cut = &roots::small()[..100_000];
    assert!(t.fleet().builds().import_template("cut", "a test", TemplateSettings::default(), cut).is_err());
    assert_eq!(testkit::leaks::entries(&t.data().join("layers")).len(), names.len());
}

#[test]
fn as_an_account_with_subordinate_ids() {
    for test in [
        "a_body_has_the_templates_root_and_settings",
        "setuid_programs_work_only_where_the_template_says_so",
        "snapshots_forks_and_starts_stand_on_it_also_when_it_is_gone",
    ] {
        run_as_account(&format!("body::templates::{test}::process"));
    }
}
