//! Tests with a small corporate proxy, which keeps the heads that arrive.

use std::{cell::RefCell, time::Instant};

use proto::egress::Decision;
use tokio::{
    net::{TcpListener, UnixStream},
    task::LocalSet,
};

use super::*;
use crate::{
    journal::tests::{lines, spool},
    proxy::tests::{proxy, start_listener},
};

/// How a proxy answers CONNECT.
#[derive(Clone)]
enum Manner {
    /// It connects to this port of this host, whatever the name.
    Connects(u16),
    /// It says this and closes.
    Says(&'static [u8]),
    /// It sends one byte after the other, without an end.
    Drips,
    /// It sends a head without an end.
    Floods,
}

/// A corporate proxy, and the heads that arrived.
struct OfficeProxy {
    heads: Rc<RefCell<Vec<String>>>,
    address: String,
}

impl OfficeProxy {
    async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let heads = Rc::new(RefCell::new(Vec::new()));
        let kept = heads.clone();
        tokio::task::spawn_local(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::task::spawn_local(serve(stream, manner.clone(), kept.clone()));
            }
        });
        Self { heads, address }
    }

    fn take(&self) -> Vec<String> {
        self.heads.take()
    }
}

async fn serve(mut stream: TcpStream, manner: Manner, heads: Rc<RefCell<Vec<String>>>) {
    let head = read_head(&mut stream).await.unwrap();
    heads.borrow_mut().push(String::from_utf8(head).unwrap());
    match manner {
        Manner::Connects(port) => {
            let mut host = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            // The host may speak at once, in the same packet.
            stream.write_all(b"HTTP/1.0 200 OK\r\nvia: test\r\n\r\nFIRST ").await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut host).await;
        }
        Manner::Says(answer) => stream.write_all(answer).await.unwrap(),
        Manner::Drips => {
            while stream.write_all(b"H").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Manner::Floods => while stream.write_all(&[b'H'; 4096]).await.is_ok() {},
    }
}

/// Asks for a tunnel in a Body behind a corporate proxy, and returns what comes back and the last decision.
async fn ask(
    network: &OfficeProxy,
    rules: &[&str],
    direct: &str,
    login: &str,
    target: &str,
) -> (String, Decision) {
    let file = spool();
    let proxy = Rc::new(proxy(file.try_clone().unwrap(), rules));
    let key = SealKey::generate().unwrap();
    let direct = proto::egress::read_no_proxy(direct).unwrap();
    let sealed = key.seal("secret corporate", login.as_bytes()).unwrap();
    let login = (!login.is_empty()).then(|| CorporateLogin { name: "corporate".into(), sealed });
    let order = CorporateProxyOrder { address: network.address.clone(), direct, login };
    let corporate = CorporateProxy::open(Some(&order), Some(&key)).unwrap().and_then(Rc::into_inner).unwrap();
    let patience = Duration::from_millis(500);
    *proxy.corporate.borrow_mut() = Some(Rc::new(CorporateProxy { patience, ..corporate }));
    let (mut program, inside) = UnixStream::pair().unwrap();
    let asking = async move {
        let request = format!("CONNECT {target} HTTP/1.1\r\n\r\nhello\n");
        program.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        timeout(Duration::from_secs(10), program.read_to_end(&mut answer)).await.unwrap().unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    };
    let (_, answer) = tokio::join!(proxy.connection(inside), asking);
    (answer, lines(&file).pop().unwrap().data)
}

async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn names_arrive_as_names_and_denied_ones_do_not_arrive() {
    local(async {
        let network = OfficeProxy::start(Manner::Connects(start_listener().await)).await;
        // No name server knows `.invalid`.
        let rules = ["api.invalid:7", "93.184.216.34:7", "intern.invalid:7+private"];
        for (target, login) in [
            ("api.invalid:7", ""),
            ("api.invalid:7", "me:hunter2"),
            ("93.184.216.34:7", ""),
            ("intern.invalid:7", ""),
        ] {
            let (answer, decision) = ask(&network, &rules, "", login, target).await;
            assert!(answer.ends_with("\r\n\r\nFIRST REACHED") && decision.allowed, "{answer} {decision:?}");
            let header = match login {
                "" => "",
                _ => "proxy-authorization: Basic bWU6aHVudGVyMg==\r\n",
            };
            assert_eq!(
                network.take(),
                [format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n{header}\r\n")]
            );
        }
        for target in
            ["other.invalid:7", "api.invalid:8", "93.184.216.35:7", "10.0.0.1:7", "169.254.169.254:7"]
        {
            let (answer, decision) = ask(&network, &rules, "", "", target).await;
            assert!(answer.starts_with("HTTP/1.1 403") && !decision.allowed, "{answer}");
            assert_eq!(network.take(), [""; 0], "{target}");
        }
        // A rule about everything means no inner address.
        let (_, decision) = ask(&network, &["*:7"], "", "", "169.254.169.254:7").await;
        assert!(!decision.allowed && network.take().is_empty(), "{decision:?}");
        let (_, decision) = ask(&network, &["*:7"], "", "", "93.184.216.34:7").await;
        assert!(decision.allowed && network.take().len() == 1, "{decision:?}");
    })
    .await;
}

#[tokio::test]
async fn hosts_of_the_own_network_are_reached_directly() {
    local(async {
        let port = start_listener().await;
        let network = OfficeProxy::start(Manner::Says(b"HTTP/1.1 403 no\r\n\r\n")).await;
        let (private, public) = (format!("localhost:{port}+tcp+private"), format!("localhost:{port}+tcp"));
        let target = format!("localhost:{port}");
        let (answer, decision) = ask(&network, &[&private], "", "", &target).await;
        assert!(answer.ends_with("\r\n\r\nREACHED") && decision.allowed, "{answer}");
        assert_eq!(network.take(), [""; 0]);
        // Without the proxy a name leads to inner addresses only by such a rule.
        for direct in ["localhost", "a.test,LOCALHOST,.b.test"] {
            let (_, decision) = ask(&network, &[&public], direct, "", &target).await;
            assert!(decision.why.contains("address of this host"), "{decision:?}");
            assert_eq!(network.take(), [""; 0]);
        }
        let (_, decision) = ask(&network, &[&public], ".localhost,host", "", &target).await;
        assert!(!decision.allowed && network.take().len() == 1, "{decision:?}");
        let (_, decision) =
            ask(&network, &["x.corp.invalid:7"], ".corp.invalid", "", "x.corp.invalid:7").await;
        assert!(decision.why.starts_with("its name cannot be resolved") && network.take().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_refusal_has_its_reason_and_no_login() {
    local(async {
        for (answer, shown) in [
            (
                &b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"[..],
                "refuses: 407 Proxy Authentication Required",
            ),
            (b"HTTP/1.1 407 not hunter2\r\n\r\n", "refuses: 407"),
            (b"HTTP/1.1 407 not bWU6aHVudGVyMg==\r\n\r\n", "refuses: 407"),
            (b"HTTP/1.1 403 \x1b[2J\r\n\r\n", "refuses: 403 \\u{1b}[2J"),
            (b"HTTP/1.1 201 Created\r\n\r\n", "refuses: 201 Created"),
            (b"HTTP/1.1 2000\r\n\r\n", "refuses: 2000"),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "refuses: 100 Continue"),
            (b"SSH-2.0-x\r\n\r\n", "gives no usable answer: it is not HTTP"),
            (b"HTTP/1.1 200 OK\r\n", "gives no usable answer"),
            (b"", "gives no usable answer"),
        ] {
            let network = OfficeProxy::start(Manner::Says(answer)).await;
            let (page, decision) = ask(&network, &["api.invalid:7"], "", "me:hunter2", "api.invalid:7").await;
            let why = format!("the corporate proxy {} {shown}", network.address);
            assert!(!decision.allowed && decision.why.starts_with(&why), "{decision:?} is not {why}");
            assert!(page.starts_with("HTTP/1.1 502") && page.contains(&why), "{page}");
            assert!(!page.contains("hunter2") && !page.contains("bWU6"), "{page}");
            assert!(proto::egress::is_unreachable(&decision.why));
        }
    })
    .await;
}

#[tokio::test]
async fn a_slow_or_endless_answer_ends() {
    local(async {
        for (manner, shown) in
            [(Manner::Drips, "no answer in time"), (Manner::Floods, "its head is too long")]
        {
            let (network, began) = (OfficeProxy::start(manner).await, Instant::now());
            let (_, decision) = ask(&network, &["api.invalid:7"], "", "", "api.invalid:7").await;
            assert!(!decision.allowed && decision.why.ends_with(shown), "{decision:?}");
            assert!(began.elapsed() < Duration::from_secs(5), "{shown}");
        }
    })
    .await;
}

#[test]
fn a_login_that_cannot_be_opened_is_said() {
    let login = Some(CorporateLogin { name: "corporate".into(), sealed: "AAAA".into() });
    let order = CorporateProxyOrder { address: "proxy.test:3128".into(), direct: Vec::new(), login };
    let key = SealKey::generate().unwrap();
    let why = CorporateProxy::open(Some(&order), Some(&key)).err().unwrap();
    assert!(why.starts_with("the secret corporate cannot be opened"), "{why}");
    assert!(
        CorporateProxy::open(Some(&CorporateProxyOrder { login: None, ..order }), None).unwrap().is_some()
    );
}
