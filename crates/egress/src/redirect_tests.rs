//! Tests of redirected connections: the receiving side judges what arrives.

use std::{
    cell::RefCell,
    fs::File,
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use proto::egress::{Decision, EgressRule, Policy};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

use super::*;
use crate::{
    client_hello::tests::{hello_for, hiding_hello_for, torn_hello_for},
    journal::tests::{lines, spool},
    proxy::tests::proxy,
};

const ALERT: [u8; 7] = [21, 3, 1, 0, 2, 2, 49];

/// A server that keeps what arrives, and a Body whose connections to `localhost` lead to it.
struct World {
    arrived: Rc<RefCell<Vec<u8>>>,
    port: u16,
    spool: File,
    proxy: Rc<Proxy>,
}

impl World {
    /// A server that first says `greeting`, and answers as soon as something arrives.
    async fn new(mark: &str, greeting: &'static [u8]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let arrived = Rc::new(RefCell::new(Vec::new()));
        let kept = arrived.clone();
        tokio::task::spawn_local(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let kept = kept.clone();
                tokio::task::spawn_local(async move {
                    stream.write_all(greeting).await.unwrap();
                    let mut buffer = [0; 4096];
                    // Until the end, or a while after the first bytes.
                    let mut patience = Duration::from_secs(10);
                    while let Ok(Ok(len @ 1..)) = timeout(patience, stream.read(&mut buffer)).await {
                        kept.borrow_mut().extend_from_slice(&buffer[..len]);
                        patience = Duration::from_millis(500);
                    }
                    let answer: &[u8] = if kept.borrow().is_empty() { b"" } else { b"ANSWER" };
                    let _ = stream.write_all(answer).await;
                });
            }
        });
        let file = spool();
        let proxy = Rc::new(proxy(file.try_clone().unwrap(), &[&format!("localhost:{port}{mark}+private")]));
        proxy.names.borrow_mut().address_of("localhost", |_| Ok(())).unwrap();
        Self { arrived, port, spool: file, proxy }
    }

    /// Connects to an address, sends pieces, and returns what came back until the end.
    async fn dial(&self, to: impl Into<IpAddr>, pieces: &[&[u8]]) -> Vec<u8> {
        self.arrived.borrow_mut().clear();
        let (mut program, inside) = UnixStream::pair().unwrap();
        let destination = Ok((to.into(), self.port).into());
        let serving = self.proxy.redirected(inside, destination);
        let asking = async move {
            for piece in pieces {
                let _ = program.write_all(piece).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let mut answer = Vec::new();
            let _ = timeout(Duration::from_secs(10), program.read_to_end(&mut answer)).await.unwrap();
            answer
        };
        tokio::join!(serving, asking).1
    }

    async fn dial_name(&self, pieces: &[&[u8]]) -> Vec<u8> {
        self.dial(Ipv4Addr::new(198, 18, 0, 1), pieces).await
    }

    fn arrived(&self) -> String {
        String::from_utf8_lossy(&self.arrived.borrow()).into_owned()
    }

    fn last(&self) -> Decision {
        lines(&self.spool).pop().unwrap().data
    }
}

async fn local(test: impl Future<Output = ()>) {
    tokio::task::LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn tls_reaches_the_host_that_it_names_and_no_other() {
    local(async {
        let world = World::new("+tls", b"").await;
        for hello in [hello_for(&["localhost"]), torn_hello_for("LOCALHOST"), hiding_hello_for("localhost")] {
            assert_eq!(world.dial_name(&[&hello]).await, b"ANSWER");
            assert_eq!(*world.arrived.borrow(), hello, "byte for byte");
            assert!(world.last().allowed);
        }
        let torn = torn_hello_for("localhost");
        let bytes: Vec<&[u8]> = torn.chunks(1).collect();
        assert_eq!(world.dial_name(&bytes).await, b"ANSWER");
        for (what, first) in [
            ("another name", hello_for(&["evil.io"])),
            ("another name in many records", torn_hello_for("evil.io")),
            ("another outer name of a hidden hello", hiding_hello_for("evil.io")),
            ("no name", hello_for(&[])),
            ("two names", hello_for(&["localhost", "evil.io"])),
            ("no TLS", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ] {
            assert_eq!(world.dial_name(&[&first]).await, ALERT, "{what}");
            assert_eq!(world.arrived(), "", "{what}");
            assert!(!world.last().allowed, "{what}");
        }
    })
    .await;
}

#[tokio::test]
async fn one_request_of_http_reaches_the_host_that_it_names() {
    local(async {
        let world = World::new("+http", b"").await;
        let request = |rest: &str| format!("POST /x HTTP/1.1\r\nHost: localhost\r\n{rest}");
        let smuggled = request("Content-Length: 2\r\n\r\nabGET /second HTTP/1.1\r\nHost: evil.io\r\n\r\n");
        let sent = format!(
            "POST /x HTTP/1.1\r\nhost: localhost:{}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nab",
            world.port
        );
        let bytes: Vec<&[u8]> = smuggled.as_bytes().chunks(1).collect();
        for pieces in [vec![smuggled.as_bytes()], bytes] {
            assert_eq!(world.dial_name(&pieces).await, b"ANSWER");
            assert_eq!(world.arrived(), sent, "nothing behind the request");
        }
        let chunked = request("Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nGET");
        assert_eq!(world.dial_name(&[chunked.as_bytes()]).await, b"ANSWER");
        assert!(world.arrived().ends_with("\r\n\r\n2\r\nab\r\n0\r\n\r\n"), "{}", world.arrived());
        let expecting = request("Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
        let answer = world.dial_name(&[expecting.as_bytes(), b"", b"ab"]).await;
        assert!(answer.starts_with(b"HTTP/1.1 100 Continue\r\n\r\n") && answer.ends_with(b"ANSWER"));
        for (what, head) in [
            ("another host", "GET / HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_owned()),
            ("two hosts", request("host: localhost\r\n\r\n")),
            ("a URL of another host", "GET http://evil.io/ HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned()),
            ("an upgrade", request("Upgrade: websocket\r\n\r\n")),
            ("two lengths", request("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n")),
            ("a tunnel", format!("CONNECT localhost:{} HTTP/1.1\r\nHost: localhost\r\n\r\n", world.port)),
            ("no HTTP", "EHLO me\r\n\r\n".to_owned()),
        ] {
            let answer = String::from_utf8(world.dial_name(&[head.as_bytes()]).await).unwrap();
            assert!(answer.starts_with("HTTP/1.1 40") && answer.contains("palisade:"), "{what}: {answer}");
            assert_eq!(world.arrived(), "", "{what}");
            assert!(!world.last().allowed, "{what}");
        }
        let bad = request("Transfer-Encoding: chunked\r\n\r\nzz\r\n");
        let answer = world.dial_name(&[bad.as_bytes()]).await;
        assert!(answer.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&answer));
        assert!(!world.arrived().contains("zz"));
    })
    .await;
}

#[tokio::test]
async fn any_protocol_passes_but_names_of_other_hosts() {
    local(async {
        let world = World::new("+tcp", b"220 hello\r\n").await;
        let passes: [&[&[u8]]; 6] = [
            &[b"EHLO me\r\n"],
            &[&hello_for(&["localhost"])],
            &[&hello_for(&[])],
            &[b"\0\x01\x02"],
            &[b"JDWP-Handshake"],
            &[b"GE", b"T / HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"],
        ];
        for pieces in passes {
            let answer = world.dial_name(pieces).await;
            assert!(answer.starts_with(b"220 hello\r\n"), "the server speaks first");
            assert_eq!(*world.arrived.borrow(), pieces.concat());
        }
        let denied: [&[&[u8]]; 4] = [
            &[&hello_for(&["evil.io"])],
            &[&torn_hello_for("evil.io")],
            &[b"GE", b"T / HTTP/1.1\r\nHost: evil.io\r\n", b"\r\n"],
            &[b"\r\nGET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.io\r\n\r\n"],
        ];
        for pieces in denied {
            world.dial_name(pieces).await;
            assert_eq!(world.arrived(), "");
            assert!(!world.last().allowed);
        }
    })
    .await;
}

#[tokio::test]
async fn only_addresses_that_stand_for_names_or_have_a_rule_are_reached() {
    local(async {
        let world = World::new("+tcp", b"").await;
        assert_eq!(world.dial_name(&[b"hi\n"]).await, b"ANSWER");
        let here = format!("*:{}", world.port);
        *world.proxy.policy.borrow_mut() = Policy::parse(&[here.as_str()]).unwrap();
        for address in [
            "198.18.0.2",
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "::ffff:127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "fe80::1",
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert!(!world.dial(address, &[b"hi\n"]).await.starts_with(b"ANSWER"), "{address}");
            assert_eq!(world.arrived(), "", "{address}");
            assert!(!world.last().allowed, "{address}");
        }
        // The name still exists, and the rule for every name does not lead to this host.
        world.dial_name(&[b"hi\n"]).await;
        assert_eq!((world.arrived().as_str(), world.last().allowed), ("", false));
        // A connection to the listener itself.
        let (mut program, inside) = UnixStream::pair().unwrap();
        world.proxy.redirected(inside, Err(io::ErrorKind::NotFound.into())).await.unwrap();
        assert_eq!((program.read(&mut [0; 9]).await.unwrap_or(0), world.last().allowed), (0, false));
    })
    .await;
}

#[tokio::test]
async fn a_refusal_has_the_form_of_its_port() {
    local(async {
        let world = World::new("+tcp", b"").await;
        let refused = |port: u16| {
            let (mut program, inside) = UnixStream::pair().unwrap();
            let proxy = world.proxy.clone();
            async move {
                let serving = proxy.redirected(inside, Ok(([198, 18, 0, 1], port).into()));
                let reading = async move {
                    let mut answer = Vec::new();
                    let _ = program.read_to_end(&mut answer).await;
                    answer
                };
                String::from_utf8_lossy(&tokio::join!(serving, reading).1).into_owned()
            }
        };
        let page = refused(80).await;
        assert!(
            page.ends_with("no rule names localhost:80\nallow it: pal net allow <body> localhost:80\n"),
            "{page}"
        );
        assert_eq!(refused(443).await.as_bytes(), ALERT);
        assert_eq!(refused(22).await, "");
    })
    .await;
}

#[tokio::test]
async fn a_refused_program_sees_a_reset() {
    local(async {
        let world = World::new("+tcp", b"").await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut program = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (inside, _) = listener.accept().await.unwrap();
        world.proxy.redirected(inside, Ok(([198, 18, 0, 9], 22).into())).await.unwrap();
        let ended = program.read(&mut [0; 9]).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::ConnectionReset);
    })
    .await;
}

#[tokio::test]
async fn nothing_goes_out_where_its_decision_cannot_be_recorded() {
    local(async {
        for (mark, first) in [
            ("+tls", hello_for(&["localhost"])),
            ("+http", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
            ("+tcp", b"hi\n".to_vec()),
        ] {
            let world = World::new(mark, b"").await;
            let full = File::options().append(true).open("/dev/full").unwrap();
            let flush = proto::egress::Flush::Kernel;
            let whole = world.proxy.journal.replace(crate::journal::Journal::new(full, flush));
            assert!(!world.dial_name(&[&first]).await.ends_with(b"ANSWER"), "{mark}");
            assert_eq!(world.arrived(), "", "{mark}");
            world.proxy.journal.replace(whole);
            assert_eq!(world.dial_name(&[&first]).await, b"ANSWER", "{mark}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_rule_answers_plain_requests_or_sends_them_to_another_host() {
    local(async {
        let world = World::new("+http", b"").await;
        let response = proto::egress::RuleResponse {
            status: 200,
            headers: [("x-own".to_owned(), "yes".to_owned())].into(),
            body: "CANNED".into(),
        };
        let here = format!("localhost:{}", world.port);
        let rule = |to: String| EgressRule { forward: Some(here.clone()), ..EgressRule::allow(to) };
        let rules = [
            EgressRule { respond: Some(response), ..EgressRule::allow(format!("GET a.test:{}/own+http", world.port)) },
            rule(format!("a.test:{}+http+private", world.port)),
            rule(format!("plain.test:{}+plain+private", world.port)),
        ];
        *world.proxy.policy.borrow_mut() = Policy::new(&rules).unwrap();
        let address = |name: &str| world.proxy.names.borrow_mut().address_of(name, |_| Ok(())).unwrap().unwrap();
        let (a, plain) = (address("a.test"), address("plain.test"));
        let get = |path: &str, host: &str| format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nForwarded: host=liar\r\n\r\n");
        let answer = world.dial(a, &[get("/own", "a.test").as_bytes()]).await;
        assert_eq!(
            String::from_utf8(answer).unwrap(),
            "HTTP/1.1 200 OK\r\nx-own: yes\r\ncontent-length: 6\r\nconnection: close\r\n\r\nCANNED"
        );
        assert_eq!((world.arrived().as_str(), world.last().allowed), ("", true));
        for (address, name) in [(a, "a.test"), (plain, "plain.test")] {
            assert_eq!(world.dial(address, &[get("/x", name).as_bytes()]).await, b"ANSWER");
            assert_eq!(
                world.arrived(),
                format!("GET /x HTTP/1.1\r\nhost: {here}\r\nforwarded: host=\"{name}:{}\"\r\nconnection: close\r\n\r\n", world.port)
            );
            assert!(world.last().why.ends_with(&format!("sends the request to {here}")));
        }
        let public = EgressRule { forward: Some(here.clone()), ..EgressRule::allow(format!("a.test:{}+http", world.port)) };
        *world.proxy.policy.borrow_mut() = Policy::new(&[public]).unwrap();
        let answer = world.dial(a, &[get("/x", "a.test").as_bytes()]).await;
        assert!(String::from_utf8_lossy(&answer).contains("address of this host"));
        assert_eq!(world.arrived(), "");
    })
    .await;
}

#[tokio::test]
async fn requests_to_addresses_are_refused_where_requests_are_judged() {
    local(async {
        let world = World::new("+http", b"").await;
        let to = std::net::Ipv4Addr::new(192, 0, 2, 7);
        let rule = format!("GET *:{}+http", world.port);
        *world.proxy.policy.borrow_mut() = Policy::parse(&[rule.as_str()]).unwrap();
        let target =
            crate::target::Target { host: crate::target::Host::Address(to.into()), port: world.port };
        let permit = target.judge(&world.proxy.policy.borrow()).unwrap();
        assert!(permit.inspect, "its requests are judged");
        let request = crate::http_head::HttpRequest::parse(b"POST / HTTP/1.1\r\nHost: x").unwrap();
        let denial = world.proxy.judge_plain(&target, &permit, &request).unwrap_err();
        assert!(denial.why.contains("needs a name"), "{}", denial.why);
    })
    .await;
}

#[tokio::test]
async fn a_spent_budget_ends_connections_and_denies_new_ones() {
    local(async {
        for mark in ["+tcp", "+http"] {
            let world = World::new(mark, b"").await;
            let limit = proto::egress::RuleLimit { rate: None, bytes: Some("100KiB".into()) };
            let rule = EgressRule::allow(format!("localhost:{}{mark}+private", world.port));
            let rule = EgressRule { limit: Some(limit), ..rule };
            *world.proxy.policy.borrow_mut() = Policy::new(&[rule]).unwrap();
            let head =
                |len: usize| format!("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n");
            let send = async |len: usize| {
                let head = if mark == "+http" { head(len) } else { String::new() };
                world.dial_name(&[head.as_bytes(), &vec![0; len]]).await
            };
            assert_eq!(send(10 << 10).await, b"ANSWER", "{mark}");
            // A quiet connection of the same rule.
            let address = (Ipv4Addr::new(198, 18, 0, 1), world.port);
            let (mut quiet, inside) = UnixStream::pair().unwrap();
            let proxy = world.proxy.clone();
            tokio::task::spawn_local(async move { proxy.redirected(inside, Ok(address.into())).await });
            quiet.write_all(if mark == "+http" { b"GET" } else { b"\0" }).await.unwrap();
            let answer = send(200 << 10).await;
            assert!(!answer.ends_with(b"ANSWER"), "{mark}");
            let arrived = world.arrived.borrow().len();
            assert!(arrived <= 90 << 10, "{mark}: {arrived}");
            assert!(arrived >= 20 << 10, "{mark}: {arrived} of 90 KiB");
            let ended = timeout(Duration::from_secs(5), quiet.read(&mut [0; 9])).await.unwrap();
            assert_eq!(ended.unwrap_or(0), 0, "{mark}");
            assert!(!send(1).await.ends_with(b"ANSWER"), "{mark}");
            assert_eq!(world.arrived(), "", "{mark}");
            assert!(world.last().why.ends_with("has spent its budget of 100KiB"), "{}", world.last().why);
        }
    })
    .await;
}

#[tokio::test]
async fn a_rate_counts_connections() {
    local(async {
        let world = World::new("+tcp", b"").await;
        let limit = proto::egress::RuleLimit { rate: Some("2/h".into()), bytes: None };
        let rule = EgressRule::allow(format!("localhost:{}+tcp+private", world.port));
        *world.proxy.policy.borrow_mut() = Policy::new(&[EgressRule { limit: Some(limit), ..rule }]).unwrap();
        for _ in 0..2 {
            assert_eq!(world.dial_name(&[b"hi\n"]).await, b"ANSWER");
        }
        world.dial_name(&[b"hi\n"]).await;
        assert_eq!(world.arrived(), "");
        assert!(world.last().why.ends_with("has spent its rate of 2/h"), "{}", world.last().why);
    })
    .await;
}

#[tokio::test]
async fn a_connection_ends_with_the_window_of_its_rule() {
    local(async {
        let world = World::new("+tcp", b"").await;
        let rule = EgressRule {
            window: Some("mon-fri 08:00-18:00".into()),
            ..EgressRule::allow(format!("localhost:{}+tcp+private", world.port))
        };
        let at = |hour: u64| std::time::UNIX_EPOCH + Duration::from_secs(1_767_571_200 + hour * 3600);
        let policy = Policy::new(&[rule]).unwrap();
        *world.proxy.policy.borrow_mut() = policy.clone().at(at(17));
        let (mut program, inside) = UnixStream::pair().unwrap();
        let (proxy, port) = (world.proxy.clone(), world.port);
        tokio::task::spawn_local(async move {
            proxy.redirected(inside, Ok((Ipv4Addr::new(198, 18, 0, 1), port).into())).await
        });
        while world.proxy.flows.len() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.proxy.flows.close_denied(&world.proxy.policy.borrow()), 0);
        *world.proxy.policy.borrow_mut() = policy.at(at(18));
        assert_eq!(world.proxy.flows.close_denied(&world.proxy.policy.borrow()), 1);
        let ended = timeout(Duration::from_secs(5), program.read(&mut [0; 9])).await.unwrap();
        assert_eq!(ended.unwrap_or(0), 0);
        world.dial_name(&[b"hi\n"]).await;
        assert!(world.last().why.contains("counts only in its window"), "{}", world.last().why);
    })
    .await;
}
