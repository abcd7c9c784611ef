//! Connections from Body to Body: what both policies name works, and nothing else arrives.

use std::time::{Duration, Instant};

use fleet::{Create, Force, Lease, PolicyChanger};
use proto::{BodyId, Event, spec::Egress};
use testkit::{Bodies, body_test};

/// A server that answers each line with `got LINE`, and keeps the lines of each port in a file.
const SERVER: &str = "import socketserver,sys,threading\n\
class H(socketserver.StreamRequestHandler):\n    def handle(self):\n        for line in self.rfile:\n            open('/tmp/got%d' % self.server.server_address[1], 'ab').write(line)\n            self.wfile.write(b'got ' + line)\n\
class S(socketserver.ThreadingTCPServer):\n    allow_reuse_address = True\n\
all = [S(('127.0.0.1', port), H) for port in (7000, 7001)]\n\
for one in all:\n    threading.Thread(target=one.serve_forever).start()\n\
print('listening', flush=True)\n";

fn named(t: &Bodies, name: &str, allow: &[&str], accept: &[&str]) -> Create {
    let strings = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect();
    let egress = Egress { allow: strings(allow), accept: strings(accept), ..Egress::default() };
    Create { name: Some(name.parse().unwrap()), egress: Some(egress), ..t.kept() }
}

async fn serve(t: &Bodies, body: &BodyId) {
    let start = format!(
        "rm -f /tmp/said; nohup python3 -c \"{SERVER}\" >/tmp/said 2>&1 & until test -s /tmp/said; do sleep 0.1; done; cat /tmp/said"
    );
    assert_eq!(t.sh(body, &start).await.ok().trim(), "listening");
}

/// Sends a line as every program does, and returns the answer.
async fn ask(t: &Bodies, body: &BodyId, host: &str, port: u16, line: &str) -> String {
    let script =
        format!("exec 3<>/dev/tcp/{host}/{port} && printf '{line}\\n' >&3 && timeout 20 head -n 1 <&3");
    t.run(body, ["bash", "-c", &script]).await.text().trim().to_owned()
}

async fn received(t: &Bodies, body: &BodyId, port: u16) -> String {
    t.sh(body, &format!("cat /tmp/got{port} 2>/dev/null || true")).await.ok()
}

/// The decisions about connections between Bodies in the log of a Body: kind, target, and the Body that connected.
fn decisions(t: &Bodies, body: &BodyId) -> Vec<(String, String, String)> {
    let shown = |event: Event| {
        let field = |name: &str| event.data[name].as_str().unwrap_or_default().to_owned();
        (event.kind.clone(), field("to"), field("from"))
    };
    let events = t.fleet().log().events(0, Some(body), usize::MAX).unwrap();
    let kinds = ["network.allowed", "network.denied"];
    events.into_iter().filter(|event| kinds.contains(&event.kind.as_str())).map(shown).collect()
}

fn decision(kind: &str, port: u16, from: &str) -> (String, String, String) {
    (format!("network.{kind}"), format!("db.body.internal:{port}"), from.to_owned())
}

#[body_test]
async fn a_body_reaches_the_port_that_both_policies_name_and_nothing_else(t: Bodies) {
    let db = t.make(named(&t, "db", &[], &["app:7000"])).await.spec.id;
    let app = t.make(named(&t, "app", &["db.body.internal:7000-7001"], &[])).await.spec.id;
    serve(&t, &db).await;
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "one").await, "got one");
    // The port that only the caller's policy names, the port that only the other one could name, and a name of no Body.
    assert_eq!(ask(&t, &app, "db.body.internal", 7001, "accepted by nothing").await, "");
    assert_eq!(ask(&t, &app, "db.body.internal", 7002, "no rule").await, "");
    assert_eq!(ask(&t, &app, "other.body.internal", 7000, "no rule").await, "");
    // Not without a rule of its own, although the other Body accepts it, and `*` is no such rule.
    let changer = PolicyChanger::of(t.fleet());
    changer.deny(&app, &["db.body.internal:7000-7001".into()]).unwrap();
    changer.allow(&app, &["*:*".into()]).unwrap();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "no rule").await, "");
    changer.allow(&app, &["db.body.internal:7000-7001".into()]).unwrap();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "two").await, "got two");
    // By its id, too.
    changer.allow(&app, &[format!("{db}.body.internal:7000")]).unwrap();
    assert_eq!(ask(&t, &app, &format!("{db}.body.internal"), 7000, "three").await, "got three");

    let third = t.make(named(&t, "third", &["db.body.internal:7000"], &[])).await.spec.id;
    assert_eq!(ask(&t, &third, "db.body.internal", 7000, "not accepted").await, "");
    // Bodies of other owners, of which one has the right name by now.
    t.fleet().remove(&third, Force::Yes).await.unwrap();
    let lease = || Some(Lease { owner: Some("other".into()), ..Lease::endless() });
    t.fleet().remove(&app, Force::Yes).await.unwrap();
    let thief = Create { lease: lease(), ..named(&t, "app", &["db.body.internal:7000"], &[]) };
    let thief = t.make(thief).await.spec.id;
    let why = t.fleet().log().events(0, Some(&thief), usize::MAX).unwrap().len();
    assert_eq!(ask(&t, &thief, "db.body.internal", 7000, "stolen name").await, "");
    let events = t.fleet().log().events(0, Some(&thief), usize::MAX).unwrap();
    let denial = events[why..].iter().find(|event| event.kind == "network.denied").unwrap();
    assert_eq!(
        denial.data["why"],
        "no Body that you may reach by this name runs and accepts connections: db"
    );

    assert_eq!(received(&t, &db, 7000).await.trim(), "one\ntwo\nthree", "the receiving end judges");
    assert_eq!(received(&t, &db, 7001).await.trim(), "");
    assert_eq!(
        decisions(&t, &db),
        [
            decision("allowed", 7000, "app"),
            decision("denied", 7001, "app"),
            ("network.allowed".into(), format!("{db}.body.internal:7000"), "app".into()),
            decision("denied", 7000, "third"),
            decision("denied", 7000, "app"),
        ]
    );
    let of_app = decisions(&t, &app);
    for (kind, port) in [("allowed", 7000), ("denied", 7001), ("denied", 7002)] {
        assert!(of_app.contains(&decision(kind, port, "")), "{kind} {port}: {of_app:?}");
    }
    for id in [thief, db] {
        t.fleet().remove(&id, Force::Yes).await.unwrap();
    }
}

#[body_test]
async fn a_connection_ends_with_its_permission_and_works_again_after_a_restart(t: Bodies) {
    let db = t.make(named(&t, "db", &[], &["app:7000"])).await.spec.id;
    let app = t.make(named(&t, "app", &["db.body.internal:*"], &[])).await.spec.id;
    serve(&t, &db).await;
    let hold = "rm -f /tmp/held; nohup bash -c 'exec 3<>/dev/tcp/db.body.internal/7000; echo hi >&3; cat <&3 >>/tmp/held; echo ended >>/tmp/held' \
                >/dev/null 2>&1 & until grep -q 'got hi' /tmp/held; do sleep 0.1; done";
    let ended = "timeout 60 sh -c 'until grep -q ended /tmp/held; do sleep 0.1; done'";
    let changer = PolicyChanger::of(t.fleet());
    // The accepting side takes it back, and then the other side.
    t.sh(&app, hold).await.ok();
    assert_eq!(changer.show(&db).unwrap().open, Some(1));
    assert_eq!(changer.reject(&db, &["app:7000".into()]).unwrap().closed, Some(1));
    t.sh(&app, ended).await.ok();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "taken back").await, "");
    changer.accept(&db, &["app:7000".into()]).unwrap();
    t.sh(&app, hold).await.ok();
    assert_eq!(changer.deny(&app, &["db.body.internal:*".into()]).unwrap().closed, Some(1));
    t.sh(&app, ended).await.ok();
    changer.allow(&app, &["db.body.internal:*".into()]).unwrap();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "again").await, "got again");

    // While the other Body is stopped a connection is refused at once; afterwards it works without a change.
    t.fleet().stop(&db, Duration::ZERO).await.unwrap();
    let since = Instant::now();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "stopped").await, "");
    assert!(since.elapsed() < t.with_time(Duration::from_secs(5)), "{:?}", since.elapsed());
    t.fleet().start(&db).await.unwrap();
    serve(&t, &db).await;
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "started").await, "got started");
    // So it does after a restart of the caller.
    t.fleet().stop(&app, Duration::ZERO).await.unwrap();
    t.fleet().start(&app).await.unwrap();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "caller").await, "got caller");

    // No rule leads to the ports of Palisade.
    changer.accept(&db, &["app:*".into()]).unwrap();
    for port in [53, 3128, 15001] {
        assert_eq!(
            ask(&t, &app, "db.body.internal", port, "GET http://x.test/ HTTP/1.1\\r\\n\\r").await,
            "",
            "{port}"
        );
    }
    assert_eq!(ask(&t, &app, "db.body.internal", 7001, "any").await, "got any");
    t.fleet().remove(&db, Force::Yes).await.unwrap();
    assert_eq!(ask(&t, &app, "db.body.internal", 7000, "removed").await, "");
    let events = t.fleet().log().events(0, Some(&app), usize::MAX).unwrap();
    let last = events.iter().rfind(|event| event.kind == "network.denied").unwrap();
    assert_eq!(last.data["why"], "no Body that you may reach by this name runs and accepts connections: db");
    t.fleet().remove(&app, Force::Yes).await.unwrap();
}
