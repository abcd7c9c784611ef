//! The two boundaries of a microVM: a kernel of its own, and around its hypervisor that of every process
//! Body.

use proto::{
    MechanismStatus,
    spec::{Access, Mount},
};
use testkit::{Bodies, body_test, leaks};

#[body_test(except(process = "it tests microVMs"))]
async fn its_kernel_is_another_and_its_hypervisor_is_held(t: Bodies) {
    let view = t.make(t.kept()).await;
    let inside = t.run(view.id(), ["uname", "-r"]).await.ok();
    let host = rustix::system::uname();
    assert_ne!(inside, host.release().to_string_lossy(), "another kernel");
    let held = |name: &str| {
        view.enforcement
            .mechanisms
            .iter()
            .find(|held| held.name == name)
            .unwrap_or_else(|| panic!("{name} is not in the record"))
    };
    assert!(
        held("own kernel").reason.contains(&inside) && held("hypervisor").state == MechanismStatus::Enforced
    );
    assert!(
        held("hypervisor").reason.starts_with("emulated") || held("hypervisor").reason.starts_with("kvm")
    );
    let qemu = leaks::descendants()
        .into_iter()
        .find(|process| process.name.starts_with("qemu-system"))
        .expect("a hypervisor runs");
    let status = std::fs::read_to_string(format!("/proc/{}/status", qemu.pid)).unwrap();
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    assert!(
        field("Uid:").split_whitespace().all(|id| id != "0"),
        "no id of the host's root: {}",
        field("Uid:")
    );
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    let link = |name: &str| std::fs::read_link(format!("/proc/{}/ns/{name}", qemu.pid)).unwrap();
    for name in ["user", "mnt", "pid", "net", "ipc", "uts"] {
        assert_ne!(
            link(name),
            std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap(),
            "its own {name} namespace"
        );
    }
    if testkit::is_root() {
        let root = leaks::entries(format!("/proc/{}/root", qemu.pid).as_ref());
        for secret in ["home", "root", "var", "srv", "opt"] {
            assert!(
                !root.iter().any(|name| name == secret),
                "its root has nothing of the host but itself: {root:?}"
            );
        }
        let images = format!("/proc/{}/root/disks/image0", qemu.pid);
        let refused = std::fs::File::options().write(true).open(images).unwrap_err();
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::ReadOnlyFilesystem,
            "read-only by the mount, also for root"
        );
    }
}

#[body_test(except(process = "it tests microVMs"))]
async fn the_host_is_not_there(t: Bodies) {
    let body = t.make(t.with_probe(t.kept())).await.spec.id;
    let secret = t.dir().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let listener = std::os::unix::net::UnixListener::bind(t.dir().join("sock")).unwrap();
    t.denied(&body, "host-directory", &[format!("hostdir={}", t.dir().display())]).await;
    t.denied(&body, "host-file", &[format!("secret={}", secret.display())]).await;
    t.denied(&body, "unix-path", &[format!("unix_path={}", t.dir().join("sock").display())]).await;
    drop(listener);
    let own = std::process::id();
    t.denied(
        &body,
        "see-comm",
        &[format!("comm={}", std::fs::read_to_string(format!("/proc/{own}/comm")).unwrap().trim())],
    )
    .await;
    let shown = Mount { source: t.dir().into(), target: "/mnt/x".into(), access: Access::ReadOnly };
    let refused = t.fleet().create(fleet::Create { mounts: vec![shown], ..t.kept() }).await.unwrap_err();
    assert!(refused.kind == proto::Kind::Usage && refused.hints[0].contains("pal cp"), "{refused}");
}
