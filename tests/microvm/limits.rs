//! Limits of a microVM: memory, disk, processes. Excess ends inside, and the microVM survives.

use bytes::Bytes;
use fleet::{Create, ExecRequest, OutputChunk};
use proto::Size;
use testkit::{Bodies, body_test};

#[body_test(except(process = "it tests microVMs"))]
async fn what_is_over_fails_inside_and_the_machine_lives(t: Bodies) {
    let mut request: Create = t.kept();
    request.limits.disk = Some(Size::mib(64));
    request.limits.memory = Some(Size::mib(192));
    request.limits.pids = Some(64);
    let body = t.make(request).await.spec.id;
    let full = t
        .sh(&body, "head -c 100M /dev/zero > ~/big; echo $?; rm ~/big; echo fits > ~/small && cat ~/small")
        .await;
    assert_eq!(full.text(), "1\nfits", "{}", full.complaint());
    assert!(full.complaint().contains("No space left"), "{}", full.complaint());
    let hungry = t.sh(&body, "head -c 400M /dev/zero | tail -c 300M | wc -c").await;
    assert_ne!(hungry.text(), (300 << 20).to_string(), "there is not so much memory");
    let many = t.sh(&body, "sh -c 'n=0; while test $n -lt 100; do sleep 5 & n=$((n+1)); done; echo all' 2>&1 | tail -1; pkill sleep; true").await;
    assert!(many.text().contains("fork") && !many.text().contains("all"), "{}", many.text());
    assert_eq!(t.sh(&body, "echo alive").await.ok(), "alive");
    // Its processes are listed without the threads of its kernel, and its limits change at the next start.
    let list = t.fleet().access().processes(&body).await.unwrap().processes;
    assert!(
        list[0].pid == 1 && list.iter().all(|process| !process.command[0].contains("kthread")),
        "{list:?}"
    );
    let asked = fleet::LimitRequest { memory: Some(Size::mib(256)), ..Default::default() };
    let changed = fleet::LimitChanger::of(t.fleet()).change(&body, &asked).await.unwrap();
    assert_eq!(changed.at_next_start.iter().map(|limit| limit.limit).collect::<Vec<_>>(), ["memory"]);
    let total = "awk '/MemTotal/ { print ($2 > 200000) }' /proc/meminfo";
    assert_eq!(t.sh(&body, total).await.ok(), "0");
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, total).await.ok(), "1");
    let disk = fleet::LimitRequest { disk: Some(Size::mib(128)), ..Default::default() };
    assert_eq!(
        fleet::LimitChanger::of(t.fleet()).change(&body, &disk).await.unwrap_err().kind,
        proto::Kind::Usage
    );
}

/// A stream without a reader blocks only itself: others continue, and the host buffers no more than its
/// window.
#[body_test(except(process = "it tests microVMs"))]
async fn output_that_nobody_reads_keeps_nobody_waiting(t: Bodies) {
    let body = t.create().await;
    let mut flood = t
        .fleet()
        .execs()
        .start(&body, ExecRequest::new(["sh", "-c", "head -c 16M /dev/zero"]))
        .await
        .unwrap();
    for _ in 0..3 {
        assert_eq!(t.sh(&body, "echo through").await.ok(), "through");
    }
    let big: Vec<Bytes> = (0..32).map(|_| Bytes::from(vec![7; 64 << 10])).collect();
    assert_eq!(t.feed(&body, ["wc", "-c"], &big).await.ok(), (2 << 20).to_string());
    let mut len = 0;
    while let Some(output) = flood.next().await.unwrap() {
        if let OutputChunk::Stdout(bytes) = output {
            len += bytes.len();
        }
    }
    assert_eq!((len, flood.finish().await.unwrap().code), (16 << 20, 0), "and nothing of it is lost");
}
