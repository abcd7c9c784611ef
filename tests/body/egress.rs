//! A Body with an egress policy: which process connects it, what that process may do, and how long it lives.

use std::{fs, time::Duration};

use fleet::{Create, Force, GcMode};
use proto::{BodyId, Event, spec::Egress};
use rustix::process::{Pid, Signal, kill_process};
use testkit::{
    Bodies, body_test,
    leaks::{self, HostProcess},
    registry::{CannedResponse, ScriptedServer},
    wait,
};

/// Requests a path of a server through the egress proxy, and returns the answer.
async fn fetch(t: &Bodies, body: &BodyId, server: &str, path: &str) -> String {
    t.run(body, ["bash", "-c", &request(server, path)]).await.text()
}

fn request(server: &str, path: &str) -> String {
    format!(
        r"exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'GET http://{server}{path} HTTP/1.1\r\n\r\n' >&3 && cat <&3"
    )
}

fn server() -> (ScriptedServer, String) {
    let server = ScriptedServer::start(|asked| CannedResponse::ok(format!("GOT {}", asked.path)));
    let name = server.host().replace("127.0.0.1", "localhost");
    (server, name)
}

fn paths(server: &ScriptedServer) -> Vec<String> {
    server.asked().into_iter().map(|asked| asked.path).collect()
}

fn with_policy(t: &Bodies, servers: &[&str]) -> Create {
    let allow = servers.iter().map(|server| format!("{server}+plain+private")).collect();
    Create { egress: Some(Egress { allow, ..Egress::default() }), ..t.kept() }
}

/// The only egress process of this test.
fn serving() -> Option<HostProcess> {
    let mut found = leaks::descendants().into_iter().filter(|process| process.name == "pal-egress");
    let first = found.next();
    assert!(found.next().is_none(), "one for each Body");
    first
}

async fn started() -> HostProcess {
    wait::until("the egress process runs", serving).await
}

fn decisions(t: &Bodies, body: &BodyId) -> Vec<(String, String, Option<u64>)> {
    let shown = |event: Event| {
        (event.kind, event.data["to"].as_str().unwrap_or_default().to_owned(), event.data["count"].as_u64())
    };
    let events = t.fleet().log().events(0, Some(body), usize::MAX).unwrap();
    events.into_iter().filter(|event| event.kind.starts_with("network.")).map(shown).collect()
}

fn status_of(process: &HostProcess, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':').map(str::trim));
    line.unwrap_or_default().to_owned()
}

#[body_test(except(microvm = "a microVM has no egress proxy yet"))]
async fn a_body_reaches_what_its_policy_names_through_a_confined_process_of_its_own(t: Bodies) {
    let ((open, allowed), (shut, denied)) = (server(), server());
    let view = t.make(with_policy(&t, &[&allowed])).await;
    let body = view.id().clone();
    for path in ["/one", "/two"] {
        assert!(fetch(&t, &body, &allowed, path).await.ends_with(&format!("GOT {path}")));
    }
    let answer = fetch(&t, &body, &denied, "/three").await;
    assert!(
        answer.starts_with("HTTP/1.1 403")
            && answer.contains(&format!("palisade: {denied} may not be reached: no rule names {denied}")),
        "{answer}"
    );
    assert_eq!((paths(&open).len(), paths(&shut).len()), (2, 0));
    let allow = ("network.allowed".to_owned(), allowed.clone(), None);
    let deny = ("network.denied".to_owned(), denied.clone(), None);
    assert_eq!(decisions(&t, &body), [allow.clone(), deny.clone()], "the second time is counted");
    let of_record: Vec<_> = view.enforcement.mechanisms.iter().map(|held| held.name.as_str()).collect();
    assert!(of_record.contains(&"egress proxy") && of_record.contains(&"egress process"), "{of_record:?}");

    let process = serving().unwrap();
    let confined = ["NoNewPrivs", "Seccomp", "CapEff", "Threads"].map(|field| status_of(&process, field));
    assert_eq!(confined, ["1", "2", "0000000000000000", "1"]);
    if testkit::is_root() {
        assert!(status_of(&process, "Uid").starts_with("65534\t65534"), "{}", status_of(&process, "Uid"));
    }

    // It ends with the Body, its last decision is in the log, and it starts with the Body again.
    t.fleet().stop(&body, Duration::ZERO).await.unwrap();
    assert_eq!(serving(), None);
    let counted = ("network.counted".to_owned(), allowed.clone(), Some(2));
    assert_eq!(decisions(&t, &body), [allow.clone(), deny.clone(), counted.clone()]);
    t.fleet().start(&body).await.unwrap();
    assert!(fetch(&t, &body, &allowed, "/four").await.ends_with("GOT /four"));
    assert_eq!(decisions(&t, &body), [allow.clone(), deny, counted, allow]);
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(serving(), None);
    assert!(leaks::entries(&t.data().join("egress")).is_empty());
    assert_eq!(decisions(&t, &body).len(), 4, "the log keeps them");
}

#[body_test(except(microvm = "a microVM has no egress proxy yet"))]
async fn a_killed_egress_process_is_started_again_and_connections_wait_for_it(t: Bodies) {
    let (server, name) = server();
    let body = t.make(with_policy(&t, &[&name])).await.spec.id;
    let first = started().await;
    assert!(fetch(&t, &body, &name, "/one").await.ends_with("GOT /one"));
    // The proxy is stopped: requests wait, and no other process answers.
    kill_process(Pid::from_raw(first.pid).unwrap(), Signal::STOP).unwrap();
    let (waiting, killing) = (fetch(&t, &body, &name, "/two"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(paths(&server), ["/one"], "nothing goes elsewhere");
        leaks::kill(first.pid);
    });
    let (answer, ()) = tokio::join!(waiting, killing);
    assert!(answer.ends_with("GOT /two"), "{answer}");
    assert_ne!(started().await.pid, first.pid);
    // Kill it repeatedly.
    for round in 0..3 {
        leaks::kill(started().await.pid);
        let path = format!("/again{round}");
        assert!(fetch(&t, &body, &name, &path).await.ends_with(&format!("GOT {path}")));
    }
    let allowed = ("network.allowed".to_owned(), name.clone(), None);
    assert_eq!(decisions(&t, &body), vec![allowed; 5], "each process records its first decision");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "a microVM has no egress proxy yet"))]
async fn an_egress_process_outlives_its_supervisor_and_ends_with_the_body(t: Bodies) {
    let (_server, name) = server();
    let view = t.make(with_policy(&t, &[&name])).await;
    let body = view.id().clone();
    let process = started().await;
    let supervisor = process.parent;
    leaks::kill(supervisor);
    wait::until("the supervisor is gone", || {
        (!leaks::descendants().iter().any(|other| other.pid == supervisor)).then_some(())
    })
    .await;
    assert!(fetch(&t, &body, &name, "/one").await.ends_with("GOT /one"));
    leaks::kill(view.pid.unwrap());
    wait::until("the egress process ends with the Body", || serving().is_none().then_some(())).await;
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(decisions(&t, &body), [("network.allowed".to_owned(), name, None)]);
    assert!(leaks::entries(&t.data().join("egress")).is_empty());
}

#[body_test(except(microvm = "a microVM has no egress proxy yet"))]
async fn without_room_for_its_decision_a_connection_is_refused(t: Bodies) {
    let ((first, one), (second, two)) = (server(), server());
    let body = t.make(with_policy(&t, &[&one, &two])).await.spec.id;
    assert!(fetch(&t, &body, &one, "/").await.ends_with("GOT /"));
    let spool = fs::File::options()
        .write(true)
        .open(t.data().join("egress").join(body.as_str()).join("events"))
        .unwrap();
    let len = spool.metadata().unwrap().len();
    // The maximum length of a spool.
    spool.set_len(64 << 20).unwrap();
    let answer = fetch(&t, &body, &two, "/").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("cannot be recorded"), "{answer}");
    assert_eq!((paths(&first).len(), paths(&second).len()), (1, 0));
    spool.set_len(len).unwrap();
    assert!(fetch(&t, &body, &two, "/").await.ends_with("GOT /"), "with room it gets through");
    let allowed = |name: &str| ("network.allowed".to_owned(), name.to_owned(), None);
    assert_eq!(decisions(&t, &body), [allowed(&one), allowed(&two)]);
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "a microVM has no egress proxy yet"))]
async fn a_line_is_one_event_whoever_takes_it_and_gc_takes_what_is_left(t: Bodies) {
    let (_server, name) = server();
    let body = t.make(with_policy(&t, &[&name])).await.spec.id;
    assert!(fetch(&t, &body, &name, "/").await.ends_with("GOT /"));
    // Several fleets read at once.
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let (fleet, body) = (t.second(), body.clone());
            std::thread::spawn(move || {
                for _ in 0..10 {
                    fleet.log().events(0, Some(&body), usize::MAX).unwrap();
                    fleet.log().events(0, None, usize::MAX).unwrap();
                }
            })
        })
        .collect();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    let allowed = ("network.allowed".to_owned(), name, None);
    assert_eq!(decisions(&t, &body), std::slice::from_ref(&allowed));
    // The state after a `pal` was killed between the append and the note.
    let dir = t.data().join("egress").join(body.as_str());
    fs::write(dir.join("drained"), b"{\"spool\":0,\"seq\":0}").unwrap();
    assert_eq!(decisions(&t, &body), std::slice::from_ref(&allowed));
    fs::write(dir.join("drained"), b"{\"sp").unwrap();
    assert_eq!(decisions(&t, &body), std::slice::from_ref(&allowed));
    // The state after a user removed the Body's directory by hand.
    let orphan = t.data().join("egress").join("zzzz");
    fs::create_dir_all(&orphan).unwrap();
    fs::copy(dir.join("events"), orphan.join("events")).unwrap();
    let found = t.fleet().garbage().collect(GcMode::Remove).await.unwrap();
    assert!(
        found.iter().any(|garbage| garbage.kind == "egress proxy" && garbage.name == "zzzz")
            && !orphan.exists(),
        "{found:?}"
    );
    assert_eq!(decisions(&t, &"zzzz".parse().unwrap()), [allowed]);
    assert!(dir.exists(), "the one of a Body that runs stays");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}
