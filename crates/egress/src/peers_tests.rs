//! Tests of connections from Body to Body, with a supervisor that opens what it is told.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::{fd::AsFd, unix::net::UnixStream as StdUnixStream},
    time::Duration,
};

use proto::egress::{Flush, PeerRefusal, SpoolLine};
use tokio::task::LocalSet;

use super::*;
use crate::{
    journal::tests::{lines, spool},
    proxy::tests::proxy,
    supervisor::SupervisorLink,
};

fn identity(id: &str, name: &str) -> BodyIdentity {
    BodyIdentity { id: id.parse().unwrap(), name: Some(name.parse().unwrap()), owner: None }
}

fn orders(accept: &[&str]) -> EgressOrders {
    EgressOrders {
        body: Some(identity("db1", "db")),
        accept: accept.iter().map(|one| (*one).to_owned()).collect(),
        ..EgressOrders::new(Vec::new(), 1, Flush::Kernel)
    }
}

/// The proxy of `db` with a supervisor that answers each request with `answer`.
fn accepting(
    spool: File,
    accept: &[&str],
    answer: impl Fn(&PeerRequest) -> Result<StdUnixStream, String> + Send + 'static,
) -> Rc<Proxy> {
    let (near, mut far) = StdUnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let requests = BufReader::new(far.try_clone().unwrap());
        for line in requests.lines().map_while(Result::ok) {
            match answer(&serde_json::from_str(&line).unwrap()) {
                Ok(stream) => {
                    stream.set_nonblocking(true).unwrap();
                    sys::fd::send(far.as_fd(), stream.as_fd()).unwrap();
                }
                Err(why) => {
                    let line = serde_json::to_string(&PeerRefusal { why }).unwrap() + "\n";
                    far.write_all(line.as_bytes()).unwrap();
                }
            }
        }
    });
    let mut proxy = proxy(spool, &["db.body.internal:5432", "*:*"]);
    proxy.link = Rc::new(SupervisorLink::new(Rc::new(near)).unwrap());
    proxy.peers.replace(orders(accept).body, PeerTable::read(&orders(accept)).unwrap());
    tokio::task::spawn_local(proxy.link.clone().serve());
    Rc::new(proxy)
}

/// A guest that answers a dial with this head and text, and returns what it read after its request.
fn guest(head: &'static str) -> StdUnixStream {
    let (near, mut far) = StdUnixStream::pair().unwrap();
    std::thread::spawn(move || {
        far.write_all(head.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(far.try_clone().unwrap()).read_line(&mut line).unwrap();
        far.write_all(format!("got {line}").as_bytes()).unwrap();
    });
    near
}

fn call(to: &str, port: u16) -> String {
    let call = PeerCall { from: identity("app1", "app"), to: to.parse().unwrap(), port };
    serde_json::to_string(&call).unwrap() + "\n"
}

/// Connects as another egress process, and returns everything that comes back.
async fn connect(proxy: &Rc<Proxy>, bytes: &str) -> String {
    let (mut stream, far) = UnixStream::pair().unwrap();
    let (bytes, proxy) = (bytes.to_owned(), proxy.clone());
    let asking = async move {
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut text = String::new();
        let _ = timeout(Duration::from_secs(5), stream.read_to_string(&mut text)).await.unwrap();
        text
    };
    tokio::join!(proxy.peer(far), asking).1
}

fn shown(lines: &[SpoolLine]) -> Vec<(&'static str, &str, &str)> {
    let from =
        |line: &SpoolLine| line.data.from.as_ref().map(|from| from.as_str().to_owned()).unwrap_or_default();
    lines
        .iter()
        .map(|line| (line.kind.event(), line.data.to.as_str(), String::leak(from(line)) as &str))
        .collect()
}

#[tokio::test]
async fn an_accepted_connection_is_recorded_and_reaches_the_port() {
    let file = spool();
    let spool = file.try_clone().unwrap();
    LocalSet::new()
        .run_until(async move {
            let proxy = accepting(spool, &["app:5432"], |request| match request {
                PeerRequest::Own { port: 5432 } => {
                    Ok(guest("HTTP/1.1 101 Switching Protocols\r\n\r\nhello\n"))
                }
                other => Err(format!("{other:?}")),
            });
            let answer = connect(&proxy, &(call("db", 5432) + "question\n")).await;
            assert_eq!(answer, "\"ready\"\nhello\ngot question\n", "a server may speak first");
            // The same name on the port that no rule accepts, and a Body that no rule names.
            let refused = connect(&proxy, &call("db", 5433)).await;
            assert!(
                refused.contains("refused") && refused.contains("pal net accept db app:5433"),
                "{refused}"
            );
            assert_eq!(proxy.peers.len(), 0, "nothing stays open");
            assert!(connect(&proxy, "nonsense\n").await.is_empty());
        })
        .await;
    let to = "db.body.internal:5432";
    let lines = lines(&file);
    assert_eq!(
        shown(&lines),
        [("network.allowed", to, "app"), ("network.denied", "db.body.internal:5433", "app")]
    );
}

#[tokio::test]
async fn a_port_that_does_not_answer_is_a_refusal_with_a_reason() {
    let file = spool();
    let spool = file.try_clone().unwrap();
    LocalSet::new()
        .run_until(async move {
            let proxy = accepting(spool, &["app:*"], |request| match request {
                PeerRequest::Own { port: 1 } => Ok(guest("HTTP/1.1 502 Bad Gateway\r\n\r\n")),
                _ => Err("the Body does not answer".into()),
            });
            let closed = connect(&proxy, &call("db", 1)).await;
            assert!(
                closed.contains("no program in the Body listens on port 1")
                    && closed.contains("\"unreachable\":true")
            );
            assert!(connect(&proxy, &call("db", 2)).await.contains("the Body does not answer"));
        })
        .await;
    assert!(lines(&file).iter().all(|line| line.kind.event() == "network.denied"));
}

#[tokio::test]
async fn a_change_closes_connections_that_are_no_longer_accepted() {
    LocalSet::new()
        .run_until(async {
            let proxy =
                accepting(spool(), &["app:1-2"], |_| Ok(guest("HTTP/1.1 101 Switching Protocols\r\n\r\n")));
            let open = async |port| {
                let (mut stream, far) = UnixStream::pair().unwrap();
                let served = proxy.clone();
                tokio::task::spawn_local(async move { served.peer(far).await });
                stream.write_all(call("db", port).as_bytes()).await.unwrap();
                assert_eq!(read_answer(&mut stream).await, Some(PeerAnswer::Ready));
                stream
            };
            let (mut kept, mut ended) = (open(1).await, open(2).await);
            assert_eq!(proxy.peers.len(), 2);
            let orders = orders(&["app:1"]);
            assert_eq!(proxy.peers.replace(orders.body.clone(), PeerTable::read(&orders).unwrap()), 1);
            assert_eq!(timeout(Duration::from_secs(5), ended.read(&mut [0; 9])).await.unwrap().unwrap(), 0);
            kept.write_all(b"still\n").await.unwrap();
            let mut text = [0; 10];
            kept.read_exact(&mut text).await.unwrap();
            assert_eq!(&text, b"got still\n");
            // A Body without an identity accepts none.
            assert!(PeerTable::default().judge(&serde_json::from_str(&call("db", 1)).unwrap()).is_err());
        })
        .await;
}

#[tokio::test]
async fn the_calling_process_understands_each_answer() {
    LocalSet::new()
        .run_until(async {
            for (answer, end) in [
                ("\"ready\"\nbytes", Ok("bytes")),
                ("{\"refused\":{\"why\":\"no\\u001b\",\"unreachable\":false}}\n", Err((403, "no\\u{1b}"))),
                ("{\"refused\":{\"why\":\"closed\",\"unreachable\":true}}\n", Err((502, "closed"))),
                ("nonsense\n", Err((502, NO_ANSWER))),
                ("\"ready\"", Err((502, NO_ANSWER))),
            ] {
                let proxy = accepting(spool(), &[], move |request| {
                    assert_eq!(*request, PeerRequest::Body { to: "db".parse().unwrap(), port: 5432 });
                    let (near, mut far) = StdUnixStream::pair().unwrap();
                    far.write_all(answer.as_bytes()).unwrap();
                    Ok(near)
                });
                let target = |name: &str| Target { host: Host::Name(name.into()), port: 5432 };
                let permit = proxy.policy.borrow().judge_name("db.body.internal", 5432).unwrap();
                match (proxy.reach(&target("db.body.internal"), permit.private).await, end) {
                    (Ok(mut stream), Ok(rest)) => {
                        let mut text = String::new();
                        stream.read_to_string(&mut text).await.unwrap();
                        assert_eq!(text, rest);
                    }
                    (Err(denial), Err((status, why))) => {
                        assert_eq!((denial.status, denial.why.as_str()), (status, why));
                    }
                    (found, _) => panic!("{answer:?}: {:?}", found.err()),
                }
                let odd = proxy.reach(&target("a.b.body.internal"), permit.private).await;
                assert_eq!(odd.err().unwrap().status, 403, "no name server is asked about it");
            }
            // `*` means public names.
            let policy = proto::egress::Policy::parse(&["*:*"]).unwrap();
            assert!(
                policy.judge_name("db.body.internal", 5432).is_err() && !policy.resolves("db.body.internal")
            );
        })
        .await;
}
