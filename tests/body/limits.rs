//! Limits: each is reached from below first, and then not passed.

use std::time::{Duration, Instant};

use fleet::{Create, ExecRequest, Status};
use proto::{Kind, Size, launch::GuestEnd};
use testkit::{Bodies, body_test, wait};

const MIB: u64 = 1 << 20;

/// Holds so many MiB of memory, touches every page, and prints a word.
fn hold(mib: u64) -> [String; 3] {
    ["sh".into(), "-c".into(), format!("head -c {} /dev/zero | tail -c {} | wc -c", mib * MIB, mib * MIB)]
}

#[body_test(except(
    user = "without a delegated cgroup the memory limit applies to each process, which another test covers",
    microvm = "its own kernel kills processes, and the host does not learn of it; microvm::limits tests the limit"
))]
async fn a_body_out_of_memory_says_so(t: Bodies) {
    let mut request = t.kept();
    request.limits.memory = Some(Size::mib(64));
    let body = t.make(request).await.spec.id;
    let fits = t.run(&body, hold(16)).await;
    assert_eq!((fits.text(), fits.ended.out_of_memory), ((16 * MIB).to_string(), false));
    let killed = t.run(&body, hold(256)).await;
    assert!(killed.ended.out_of_memory, "{killed:?}");
    assert_ne!(killed.text(), (256 * MIB).to_string());
    assert_eq!(t.last_exit().out_of_memory, Some(true));
    assert_eq!(t.run(&body, ["echo", "well"]).await.ok(), "well", "the Body lives on");
}

#[body_test(except(
    root = "root has cgroups, which limit the whole Body",
    microvm = "a microVM has the same memory with a cgroup and without"
))]
async fn without_a_cgroup_each_process_is_bounded_and_the_record_says_so(t: Bodies) {
    let mut request = t.kept();
    request.limits.memory = Some(Size::mib(64));
    let view = t.make(request).await;
    assert_eq!(t.run(view.id(), hold(16)).await.ok(), (16 * MIB).to_string());
    let refused = t.run(view.id(), hold(256)).await;
    assert_ne!(refused.text(), (256 * MIB).to_string(), "{}", refused.complaint());
    assert!(refused.complaint().contains("memory exhausted"), "{}", refused.complaint());
    let record =
        view.enforcement.mechanisms.iter().find(|mechanism| mechanism.name == "memory limit").unwrap();
    assert_eq!(serde_json::json!(record)["state"], "degraded", "{record:?}");
}

#[body_test]
async fn no_more_processes_than_asked(t: Bodies) {
    let mut request = t.kept();
    request.limits.pids = Some(32);
    let body = t.make(request).await.spec.id;
    // Each process waits for the end of its input, which is the end of this shell.
    let forks = |count: u32| {
        let script = format!("for i in $(seq {count}); do cat <&3 & done; echo made");
        ["bash".to_owned(), "-c".to_owned(), format!("exec 3< <(sleep 2); {script}")]
    };
    assert_eq!(t.run(&body, forks(12)).await.ok(), "made");
    let bomb = t.run(&body, forks(100)).await;
    assert!(bomb.complaint().contains("fork"), "a hundred processes were made: {bomb:?}");
    let deadline = Instant::now() + Duration::from_secs(20);
    while t.try_exec(&body, ExecRequest::new(["true"])).await.is_err() {
        assert!(Instant::now() < deadline, "the Body does not recover");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[body_test]
async fn a_disk_in_memory_is_full_when_it_is_full(t: Bodies) {
    let mut request = t.passing();
    request.limits.disk = Some(Size::mib(16));
    let body = t.make(request).await.spec.id;
    assert_eq!(
        t.sh(&body, "head -c 8M /dev/zero > ~/fits && wc -c < ~/fits").await.ok(),
        (8 * MIB).to_string()
    );
    // Two files, so that the disk limit is reached and not the file size limit.
    let full = t.sh(&body, "head -c 12M /dev/zero > ~/one; head -c 12M /dev/zero > ~/two").await;
    assert_ne!(full.code, 0);
    assert!(full.complaint().contains("No space left on device"), "{}", full.complaint());
    assert_eq!(t.sh(&body, "rm ~/one ~/two; echo room > ~/again; cat ~/again").await.ok(), "room");
    // The same limit covers the overlays of host directories and /tmp.
    let elsewhere = t.sh(&body, "head -c 24M /dev/zero > /tmp/big").await;
    assert_ne!(elsewhere.code, 0);
}

#[body_test(except(
    microvm = "a file with holes may be longer than its disk; microvm::limits tests written bytes"
))]
async fn a_file_of_a_kept_body_is_no_longer_than_its_disk(t: Bodies) {
    let mut request = t.kept();
    request.limits.disk = Some(Size::mib(16));
    let body = t.make(request).await.spec.id;
    assert_eq!(
        t.sh(&body, "head -c 8M /dev/zero > ~/fits && wc -c < ~/fits").await.ok(),
        (8 * MIB).to_string()
    );
    let long = t.sh(&body, "head -c 24M /dev/zero > ~/long").await;
    assert_ne!(long.code, 0, "{}", long.complaint());
    let sparse = t.sh(&body, "truncate -s 1T ~/sparse").await;
    assert_ne!(sparse.code, 0, "{}", sparse.complaint());
}

#[body_test(except(microvm = "its disk is full then, and nothing ends; microvm::limits tests that"))]
async fn a_kept_body_over_its_disk_is_ended_and_says_why(t: Bodies) {
    let mut request = t.kept();
    request.limits.disk = Some(Size::mib(8));
    let body = t.make(request).await.spec.id;
    t.sh(&body, "for i in 1 2 3; do head -c 6M /dev/zero > ~/f$i; done").await.ok();
    let ended = || Some(t.view(&body)).filter(|view| view.status == Status::Dead).map(|view| view.end);
    let end = wait::within(Duration::from_secs(20), "the keeper measures the disk", ended).await;
    assert_eq!(end, Some(GuestEnd::Disk));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("disk limit"), "{refused}");
}

#[body_test]
async fn a_disk_in_memory_has_only_so_many_files(t: Bodies) {
    let request = t.passing();
    let view = t.make(request).await;
    let inodes = view.spec.limits.inodes;
    let seen: u64 =
        t.sh(view.id(), "df --output=itotal /home/user | tail -1").await.ok().trim().parse().unwrap();
    assert!(seen <= inodes, "{seen} files are possible, {inodes} were allowed");
    let made =
        t.sh(view.id(), "mkdir ~/many && cd ~/many && seq 1000 | xargs touch && ls | wc -l").await.ok();
    assert_eq!(made, "1000");
}

#[body_test]
async fn a_body_makes_no_more_files_than_its_disk_allows(t: Bodies) {
    const MANY: &str = "mkdir ~/many; cd ~/many; seq 9000 | xargs touch 2>&1 | tail -1; ls | wc -l";
    let run = async |disk: Size, inodes: Option<u64>| {
        let mut request = t.passing();
        (request.limits.disk, request.limits.inodes) = (Some(disk), inodes);
        let view = t.make(request).await;
        let made = t.sh(view.id(), MANY).await.text();
        let held = view.enforcement.mechanisms.iter().find(|held| held.name == "inode limit").cloned();
        (view.spec.limits.inodes, made, held.expect("the record has it"))
    };
    // A sixteenth of the disk limit in KiB, and no more.
    let (inodes, made, held) = run(Size::mib(128), None).await;
    assert_eq!((inodes, held.state), (8192, proto::MechanismStatus::Enforced), "{held:?}");
    assert!(held.reason.contains("8192"), "{held:?}");
    let count: u64 = made.lines().last().unwrap().trim().parse().unwrap();
    assert!((7000..8192).contains(&count) && made.contains("No space left"), "{made}");
    // A control: with a larger limit all files can be created.
    let (inodes, made, _) = run(Size::mib(128), Some(20_000)).await;
    assert_eq!((inodes, made.trim()), (20_000, "9000"));
    let mut request = t.passing();
    (request.limits.disk, request.limits.inodes) = (Some(Size::mib(128)), Some(200_000));
    let refused = t.fleet().create(request).await.unwrap_err();
    assert!(refused.message.contains("inodes"), "{refused}");
}

#[body_test(except(
    microvm = "its disk has no more inodes then, and nothing ends; the test above covers that"
))]
async fn a_kept_body_over_its_inodes_is_ended_and_says_why(t: Bodies) {
    let mut request = t.kept();
    request.limits.disk = Some(Size::mib(64));
    let view = t.make(request).await;
    assert_eq!(view.spec.limits.inodes, 4096);
    let body = view.spec.id;
    // A control: within its limit it keeps running past the next measurement.
    t.sh(&body, "mkdir ~/few; cd ~/few; seq 3000 | xargs touch; sleep 6").await.ok();
    assert_eq!(t.view(&body).status, Status::Running);
    t.sh(&body, "mkdir ~/many; cd ~/many; seq 3000 | xargs touch").await.ok();
    let ended = || Some(t.view(&body)).filter(|view| view.status == Status::Dead).map(|view| view.end);
    let end = wait::within(Duration::from_secs(20), "the keeper counts the files", ended).await;
    assert_eq!(end, Some(GuestEnd::Inodes));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("inode limit"), "{refused}");
}

#[body_test(except(
    user = "without a delegated cgroup nothing limits CPU time, and the record says so",
    microvm = "a twentieth of a CPU does not boot a microVM"
))]
async fn a_twentieth_of_a_processor_is_no_more(t: Bodies) {
    const BUSY: &str = "end=$(($(date +%s%N) + 1000000000)); while [ $(date +%s%N) -lt $end ]; do :; done";
    let used = async |milli: Option<u32>| {
        let mut request = t.kept();
        request.limits.cpu_milli = milli;
        let view = t.make(request).await;
        // The CPU time of its own processes, which no other process of the host changes.
        let times = format!("for i in 1 2; do ({BUSY}) & done; wait; times");
        let text = t.run(view.id(), ["bash", "-c", &times]).await.ok();
        seconds(text.lines().last().unwrap())
    };
    let free = used(None).await;
    let bound = used(Some(50)).await;
    // Two loops of one second; even a busy host gives far more than a twentieth.
    assert!(bound < 0.2, "{bound:.2} s of processor time in a second, 0.05 were allowed");
    assert!(free > 1.5 * bound, "without a limit {free:.2} s, with one {bound:.2} s");
}

/// Parses `0m1.234s 0m0.567s` as one number.
fn seconds(times: &str) -> f64 {
    let one = |text: &str| {
        let (minutes, seconds) = text.trim_end_matches('s').split_once('m').unwrap();
        minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap()
    };
    times.split_whitespace().map(one).sum()
}

#[body_test]
async fn no_more_open_files_than_asked(t: Bodies) {
    let mut request = t.kept();
    request.limits.files = Some(80);
    let body = t.make(request).await.spec.id;
    let open = |count: u32| {
        [
            "bash".to_owned(),
            "-c".to_owned(),
            format!("for i in $(seq {count}); do exec {{fd}}</dev/null || exit 9; done; echo all"),
        ]
    };
    assert_eq!(t.run(&body, open(40)).await.ok(), "all");
    let refused = t.run(&body, open(100)).await;
    assert_ne!(refused.code, 0);
    assert!(refused.complaint().contains("Too many open files"), "{}", refused.complaint());
    assert_ne!(t.sh(&body, "ulimit -n 1000").await.code, 0, "the limit cannot be lifted from inside");
    let mut least = t.kept();
    least.limits.files = Some(64);
    let body = t.make(least).await.spec.id;
    assert_eq!(t.sh(&body, "ulimit -n").await.ok(), "64");
}

#[body_test]
async fn a_body_ends_when_its_time_is_over(t: Bodies) {
    let mut request = t.kept();
    request.limits.wall = Some(Duration::from_millis(700));
    let body = t.make(request).await.spec.id;
    assert_eq!(t.run(&body, ["echo", "in time"]).await.ok(), "in time");
    let began = Instant::now();
    let ran = t.run(&body, ["sleep", "1000"]).await;
    assert_eq!((ran.code, ran.ended.body_end), (137, Some(GuestEnd::Timeout)));
    assert!(began.elapsed() < Duration::from_secs(30));
    let view = t.view(&body);
    assert_eq!((view.status, view.end), (Status::Dead, Some(GuestEnd::Timeout)));
}

#[body_test]
async fn time_is_over_also_for_a_paused_body_whose_maker_is_gone(t: Bodies) {
    let fleet = t.second();
    let mut request = t.kept();
    request.limits.wall = Some(Duration::from_millis(600));
    let body = fleet.create(request).await.unwrap().spec.id;
    fleet.pause(&body).await.unwrap();
    drop(fleet);
    wait::until("its time is over", || (t.view(&body).end == Some(GuestEnd::Timeout)).then_some(())).await;
}

#[body_test]
async fn impossible_limits_are_refused_and_leave_nothing(t: Bodies) {
    type Ask = fn(&mut Create);
    let asked: [(&str, Ask); 12] = [
        ("memory", |c| c.limits.memory = Some(Size(0))),
        ("memory", |c| c.limits.memory = Some(Size(1))),
        ("memory", |c| c.limits.memory = Some(Size(u64::MAX))),
        ("disk", |c| c.limits.disk = Some(Size(0))),
        ("disk", |c| c.limits.disk = Some(Size(u64::MAX))),
        ("cpus", |c| c.limits.cpu_milli = Some(0)),
        ("cpus", |c| c.limits.cpu_milli = Some(u32::MAX)),
        ("pids", |c| c.limits.pids = Some(0)),
        ("pids", |c| c.limits.pids = Some(u32::MAX)),
        ("files", |c| c.limits.files = Some(63)),
        ("files", |c| c.limits.files = Some(u32::MAX)),
        ("timeout", |c| c.limits.wall = Some(Duration::ZERO)),
    ];
    for (name, ask) in asked {
        for mut request in [t.kept(), t.passing()] {
            ask(&mut request);
            let failure = t
                .fleet()
                .create(request)
                .await
                .err()
                .unwrap_or_else(|| panic!("an impossible limit on {name} was taken"));
            assert_eq!(failure.kind, Kind::Usage, "{failure}");
            assert!(
                failure.message.contains(name) && !failure.hints.is_empty(),
                "{failure} {:?}",
                failure.hints
            );
        }
    }
    assert_eq!(t.events().len(), 0, "what is refused did not happen");
}

#[body_test]
async fn odd_requests_are_refused_and_leave_nothing(t: Bodies) {
    let mount = |target: &str| proto::spec::Mount {
        source: t.dir().into(),
        target: target.into(),
        access: proto::spec::Access::ReadOnly,
    };
    let asked: Vec<(Kind, Create)> = vec![
        (Kind::NotFound, Create { template: "no-such".into(), ..t.kept() }),
        (Kind::NotFound, Create { template: "../../etc".into(), ..t.kept() }),
        (Kind::NotFound, Create { template: String::new(), ..t.kept() }),
        (Kind::NotFound, Create { template: "x".repeat(4096), ..t.kept() }),
        (Kind::Host, Create { layer: Some(proto::Layer::Wasm), ..t.kept() }),
        (Kind::Usage, Create { workdir: Some("relative".into()), ..t.kept() }),
        (Kind::Usage, Create { workdir: Some("/a/../b".into()), ..t.kept() }),
        (Kind::Usage, Create { workdir: Some("/a\0b".into()), ..t.kept() }),
        (Kind::Usage, Create { workdir: Some(format!("/{}", "x".repeat(5000))), ..t.kept() }),
        (Kind::Usage, Create { env: [("A=B".into(), "x".into())].into(), ..t.kept() }),
        (Kind::Usage, Create { env: [(String::new(), "x".into())].into(), ..t.kept() }),
        (Kind::Usage, Create { env: [("A".into(), "x\0".into())].into(), ..t.kept() }),
        (Kind::Usage, Create { env: [("A".into(), "x".repeat(1 << 20))].into(), ..t.kept() }),
        (Kind::Usage, Create { mounts: vec![mount("/")], ..t.kept() }),
        (Kind::Usage, Create { mounts: vec![mount("/proc/self")], ..t.kept() }),
        (Kind::Usage, Create { mounts: vec![mount("relative")], ..t.kept() }),
        (Kind::Usage, Create { mounts: vec![mount("/mnt/../etc")], ..t.kept() }),
    ];
    for (kind, request) in asked {
        let shown = format!("{request:.200?}");
        let failure = t.fleet().create(request).await.err().unwrap_or_else(|| panic!("taken: {shown}"));
        assert_eq!(failure.kind, kind, "{failure} for {shown}");
        assert!(failure.message.len() < 6000, "{}", failure.message);
    }
    let odd = t.dir().join(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    let odd = proto::spec::Mount { source: odd, ..mount("/mnt/x") };
    assert_eq!(
        t.fleet().create(Create { mounts: vec![odd], ..t.kept() }).await.unwrap_err().kind,
        Kind::Usage
    );
    let missing = proto::spec::Mount { source: t.dir().join("missing"), ..mount("/mnt/x") };
    assert_eq!(
        t.fleet().create(Create { mounts: vec![missing], ..t.kept() }).await.unwrap_err().kind,
        Kind::NotFound
    );
    assert_eq!(t.events().len(), 0, "what is refused did not happen");
}
