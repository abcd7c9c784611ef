//! Tests of inspected connections: a host with a certificate of its own authority judges what arrives.

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    fs::File,
    io::Write,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode, body::Incoming, header, upgrade::OnUpgrade};
use proto::egress::{AuthorityOrder, EgressRule, Flush, Policy, SecretFields};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, UnixStream},
};
use tokio_rustls::TlsAcceptor;
use vault::{RootAuthority, SealKey};

use super::{body::AnyBody, *};
use crate::{
    journal::{
        Journal,
        tests::{lines, spool},
    },
    names::NameTable,
    secrets::{
        SecretTable,
        tests::{secret, table},
    },
};

/// A host `localhost`, a proxy that inspects it, and the authority that the Body trusts.
struct World {
    port: u16,
    proxy: Rc<Proxy>,
    spool: File,
    trusted: String,
    /// The host and the port that a program connects to.
    target: String,
    /// The requests that arrived, head and body.
    arrived: Rc<RefCell<Vec<String>>>,
    /// The number of connections that arrived.
    accepted: Rc<Cell<usize>>,
}

/// The certificates of an authority: its root, an order for names, and the key that opens it.
fn authority(names: Option<&[String]>) -> (String, AuthorityOrder, SealKey) {
    let key = SealKey::generate().unwrap();
    let root = RootAuthority::generate("b1").unwrap();
    let signing = root.sign_authority(names).unwrap();
    let order = AuthorityOrder {
        id: "b1".into(),
        names: names.map(<[String]>::to_vec),
        certificate: signing.certificate,
        sealed_key: key.seal("authority b1", &signing.key).unwrap(),
    };
    (root.certificate().unwrap(), order, key)
}

fn unlinked(text: &str) -> File {
    let mut file = spool();
    file.write_all(text.as_bytes()).unwrap();
    file
}

async fn echo(
    request: Request<Incoming>,
    arrived: Rc<RefCell<Vec<String>>>,
) -> Result<Response<AnyBody>, BodyError> {
    let (mut parts, body) = request.into_parts();
    if parts.headers.contains_key(header::UPGRADE) {
        let mut response = Response::new(boxed_text(""));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert(header::UPGRADE, "websocket".parse().unwrap());
        response.headers_mut().insert(header::CONNECTION, "upgrade".parse().unwrap());
        let upgraded = parts.extensions.remove::<OnUpgrade>().unwrap();
        tokio::task::spawn_local(async move {
            let mut stream = TokioIo::new(upgraded.await.unwrap());
            let mut word = [0; 4];
            stream.read_exact(&mut word).await.unwrap();
            stream.write_all(&word).await.unwrap();
        });
        return Ok(response);
    }
    let mut lines = vec![format!("{} {}", parts.method, parts.uri)];
    lines.extend(parts.headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())));
    let body = body.collect().await?.to_bytes();
    lines.push(format!("body={}", String::from_utf8_lossy(&body)));
    let text = lines.join("\n");
    arrived.borrow_mut().push(text.clone());
    let mut response = Response::new(boxed_text(&text));
    if let Some(value) = parts.headers.get("authorization") {
        response.headers_mut().insert("x-echo", value.clone());
    }
    Ok(response)
}

fn boxed_text(text: &str) -> AnyBody {
    Box::pin(
        Full::new(Bytes::from(text.to_owned())).map_err(|never: Infallible| -> BodyError { match never {} }),
    )
}

impl World {
    async fn new(rules: Vec<EgressRule>, secrets: SecretTable) -> Self {
        Self::with_protocols(rules, secrets, &[H2, HTTP1]).await
    }

    /// A world whose host speaks these protocols.
    async fn with_protocols(
        rules: Vec<EgressRule>,
        secrets: SecretTable,
        protocols: &'static [&'static [u8]],
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let arrived = Rc::new(RefCell::new(Vec::new()));
        // The host's own authority, which this machine trusts.
        let (host_root, order, key) = authority(None);
        let host = Certificates::new(None);
        host.set_authority(Some(&order), Some(&key)).unwrap();
        let (kept, accepted) = (Rc::clone(&arrived), Rc::new(Cell::new(0)));
        let count = Rc::clone(&accepted);
        tokio::task::spawn_local(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.set(count.get() + 1);
                let mut config = Arc::unwrap_or_clone(host.server("localhost", None).unwrap());
                config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
                let kept = Rc::clone(&kept);
                tokio::task::spawn_local(async move {
                    let stream = TlsAcceptor::from(Arc::new(config)).accept(stream).await.unwrap();
                    let is_h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
                    let service = service_fn(move |request| echo(request, Rc::clone(&kept)));
                    let stream = TokioIo::new(stream);
                    let (tasks, _guard) = ConnectionTasks::guarded();
                    if is_h2 {
                        let _ = hyper::server::conn::http2::Builder::new(tasks)
                            .serve_connection(stream, service)
                            .await;
                    } else {
                        let serving = hyper::server::conn::http1::Builder::new();
                        let _ = serving.serve_connection(stream, service).with_upgrades().await;
                        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
                    }
                });
            }
        });
        let rules: Vec<EgressRule> = rules
            .into_iter()
            .map(|rule| EgressRule {
                to: rule.to.replace("PORT", &port.to_string()),
                forward: rule.forward.map(|host| host.replace("PORT", &port.to_string())),
                ..rule
            })
            .collect();
        let policy = Policy::new(&rules).unwrap();
        let (trusted, order, key) = authority(policy.inspected_names().as_deref());
        let certificates = Certificates::new(Some(unlinked(&host_root)));
        certificates.set_authority(Some(&order), Some(&key)).unwrap();
        let file = spool();
        let journal = Journal::new(file.try_clone().unwrap(), Flush::Kernel);
        let proxy = Proxy::new(policy, 1, journal, NameTable::default());
        let proxy = Proxy { certificates, secrets: RefCell::new(Rc::new(secrets)), key: Some(key), ..proxy };
        let target = format!("localhost:{port}");
        Self { port, proxy: Rc::new(proxy), spool: file, trusted, target, arrived, accepted }
    }

    /// Connects as a program does, with these protocols.
    async fn connect(&self, protocols: &[&[u8]]) -> io::Result<tokio_rustls::client::TlsStream<UnixStream>> {
        let (program, inside) = UnixStream::pair().unwrap();
        let (proxy, target) = (Rc::clone(&self.proxy), self.target.clone());
        tokio::task::spawn_local(async move { proxy.connection(inside).await });
        let mut program = program;
        program.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes()).await?;
        let mut established = [0; ESTABLISHED.len()];
        program.read_exact(&mut established).await?;
        assert_eq!(established, ESTABLISHED);
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(CertificateDer::pem_slice_iter(self.trusted.as_bytes()).flatten());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsConnector::from(Arc::new(config)).connect(self.name().try_into().unwrap(), program).await
    }

    /// Sends one request, and returns status, headers and body of the answer.
    async fn ask(&self, protocol: &[u8], request: Request<AnyBody>) -> (StatusCode, String, String) {
        let stream = self.connect(&[protocol]).await.unwrap();
        let (status, response) = Self::send(protocol, stream, request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (status, format!("{:?}", parts.headers), String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends one request on a connection.
    async fn send(
        protocol: &[u8],
        stream: tokio_rustls::client::TlsStream<UnixStream>,
        request: Request<AnyBody>,
    ) -> hyper::Result<(StatusCode, Response<Incoming>)> {
        let stream = TokioIo::new(stream);
        let response = if protocol == H2 {
            let (tasks, _guard) = ConnectionTasks::guarded();
            let (mut sender, connection) =
                hyper::client::conn::http2::Builder::new(tasks).handshake(stream).await.unwrap();
            tokio::task::spawn_local(connection);
            sender.send_request(request).await?
        } else {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
            tokio::task::spawn_local(connection);
            sender.send_request(request).await?
        };
        Ok((response.status(), response))
    }

    fn name(&self) -> String {
        self.target.split(':').next().unwrap().to_owned()
    }

    fn request(&self, protocol: &[u8], method: Method, path: &str, body: &str) -> Request<AnyBody> {
        let host = &self.target;
        let uri = if protocol == H2 { format!("https://{host}{path}") } else { path.to_owned() };
        let request = Request::builder().method(method).uri(uri);
        let request = if protocol == H2 { request } else { request.header("host", host) };
        request.body(boxed_text(body)).unwrap()
    }

    fn decisions(&self) -> Vec<String> {
        lines(&self.spool)
            .into_iter()
            .map(|line| format!("{} {}: {}", line.data.allowed, line.data.to, line.data.why))
            .collect()
    }
}

async fn local(test: impl Future<Output = ()>) {
    tokio::task::LocalSet::new().run_until(test).await;
}

fn fields(headers: &[&str]) -> SecretFields {
    SecretFields { headers: headers.iter().map(|name| (*name).to_owned()).collect(), ..Default::default() }
}

#[tokio::test]
async fn requests_are_judged_one_by_one_in_both_protocols() {
    local(async {
        let rules = vec![
            EgressRule::allow("GET,POST localhost:PORT/repos/**+private"),
            EgressRule::deny("POST localhost:PORT/repos/b"),
        ];
        let world = World::new(rules, SecretTable::default()).await;
        for protocol in [HTTP1, H2] {
            world.arrived.borrow_mut().clear();
            let ask = async |method: Method, path: &str| {
                world.ask(protocol, world.request(protocol, method, path, "x")).await
            };
            let (status, _, text) = ask(Method::POST, "/repos/a?q=1").await;
            assert_eq!(status, 200, "{text}");
            assert!(text.contains("/repos/a?q=1\n") && text.ends_with("body=x"), "{text}");
            assert_eq!(world.arrived.borrow().len(), 1);
            for (method, path) in [
                (Method::DELETE, "/repos/a"),
                (Method::POST, "/repos/b"),
                (Method::GET, "/other"),
                (Method::GET, "/repos/../other"),
                (Method::GET, "/repos/%2e%2e/other"),
                (Method::GET, "/repos//other"),
            ] {
                let (status, _, text) = ask(method.clone(), path).await;
                assert_eq!(status, 403, "{method} {path}: {text}");
                assert!(text.starts_with(&format!("palisade: {method} localhost:{}/", world.port)), "{text}");
            }
            assert_eq!(world.arrived.borrow().len(), 1, "nothing that was refused arrived");
        }
        let decisions = world.decisions();
        assert!(decisions[0].starts_with("true localhost:"), "{decisions:?}");
        assert!(
            decisions.iter().any(|line| line.contains("no rule names DELETE localhost")),
            "{decisions:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn a_request_for_another_host_is_misdirected() {
    local(async {
        let world =
            World::new(vec![EgressRule::allow("localhost:PORT+private+inspect")], SecretTable::default())
                .await;
        let mut request = world.request(HTTP1, Method::GET, "/", "");
        request.headers_mut().insert(header::HOST, "evil.io".parse().unwrap());
        assert_eq!(world.ask(HTTP1, request).await.0, 421);
        assert!(world.arrived.borrow().is_empty());
        let request = world.request(HTTP1, Method::GET, "/", "");
        assert_eq!(world.ask(HTTP1, request).await.0, 200, "the same request for the host of the connection");
    })
    .await;
}

#[tokio::test]
async fn a_secret_arrives_at_its_host_and_never_comes_back() {
    local(async {
        for protocol in [HTTP1, H2] {
            let all = SecretFields { body: true, ..fields(&["authorization"]) };
            let secrets = table(vec![
                secret("key", &["localhost:1-65535"], all),
                secret("far", &["far.test"], fields(&["authorization"])),
            ]);
            let rule = EgressRule::allow("localhost:PORT+private+inspect");
            let world = World::new(vec![rule], secrets).await;
            let with = |value: &str| {
                let mut request = world.request(protocol, Method::POST, "/v1", "a key-palph0aaaa b");
                request.headers_mut().insert("authorization", value.parse().unwrap());
                request
            };
            let (status, headers, text) = world.ask(protocol, with("Bearer key-palph0aaaa")).await;
            assert_eq!(status, 200, "{text}");
            let arrived = world.arrived.borrow()[0].clone();
            assert!(arrived.contains("authorization: Bearer value-of-key\n"), "{arrived}");
            assert!(arrived.ends_with("body=a value-of-key b"), "{arrived}");
            for back in [&headers, &text] {
                assert!(!back.contains("value-of-key") && back.contains("************"), "{back}");
            }
            assert!(
                world.decisions()[0].contains("with the secret key: the rule"),
                "{:?}",
                world.decisions()
            );
            let (status, _, text) = world.ask(protocol, with("Bearer far-palph0aaaa")).await;
            assert_eq!(status, 403, "{text}");
            assert!(text.contains("does not belong to"), "{text}");
            assert_eq!(world.arrived.borrow().len(), 1);
        }
    })
    .await;
}

#[tokio::test]
async fn a_rule_sets_a_header() {
    local(async {
        let mut rule = EgressRule::allow("localhost:PORT+private");
        rule.set_headers.insert("authorization".into(), "Bearer ${key}".into());
        let secrets = table(vec![secret("key", &["localhost:1-65535"], SecretFields::default())]);
        let world = World::new(vec![rule], secrets).await;
        assert_eq!(world.ask(HTTP1, world.request(HTTP1, Method::GET, "/", "")).await.0, 200);
        assert!(world.arrived.borrow()[0].contains("authorization: Bearer value-of-key"));
    })
    .await;
}

#[tokio::test]
async fn a_websocket_goes_through() {
    local(async {
        let world = World::new(vec![EgressRule::allow("GET localhost:PORT/ws+private")], SecretTable::default()).await;
        let mut stream = world.connect(&[HTTP1]).await.unwrap();
        let head = |path: &str, protocol: &str| {
            format!("GET {path} HTTP/1.1\r\nHost: localhost:{}\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n", world.port)
        };
        stream.write_all(head("/ws", "websocket").as_bytes()).await.unwrap();
        let mut answer = vec![0; 1024];
        let len = stream.read(&mut answer).await.unwrap();
        assert!(answer[..len].starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer[..len]));
        stream.write_all(b"ping").await.unwrap();
        let mut word = [0; 4];
        stream.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"ping");
        for (path, protocol) in [("/other", "websocket"), ("/ws", "h2c")] {
            let mut stream = world.connect(&[HTTP1]).await.unwrap();
            stream.write_all(head(path, protocol).as_bytes()).await.unwrap();
            let len = stream.read(&mut answer).await.unwrap();
            assert!(answer[..len].starts_with(b"HTTP/1.1 403"), "{path} {protocol}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_host_that_this_machine_does_not_trust_is_refused_before_the_program_has_a_certificate() {
    local(async {
        let world =
            World::new(vec![EgressRule::allow("localhost:PORT+private+inspect")], SecretTable::default())
                .await;
        let (other_root, order, key) = authority(Some(&["localhost".into()]));
        let certificates = Certificates::new(Some(unlinked(&other_root)));
        certificates.set_authority(Some(&order), Some(&key)).unwrap();
        let journal = Journal::new(world.spool.try_clone().unwrap(), Flush::Kernel);
        let policy = world.proxy.policy.borrow().clone();
        let proxy = Proxy { certificates, ..Proxy::new(policy, 1, journal, NameTable::default()) };
        let world = World { proxy: Rc::new(proxy), ..world };
        assert!(world.connect(&[HTTP1]).await.is_err());
        let decisions = world.decisions();
        assert!(
            decisions.last().unwrap().contains("no TLS connection to the host that this machine trusts"),
            "{decisions:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn a_program_that_trusts_another_certificate_learns_of_tunnel() {
    local(async {
        let world =
            World::new(vec![EgressRule::allow("localhost:PORT+private+inspect")], SecretTable::default())
                .await;
        let world = World { trusted: authority(None).0, ..world };
        assert!(world.connect(&[HTTP1]).await.is_err());
        for _ in 0..100 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            if world.decisions().iter().any(|line| line.contains("`+tunnel`")) {
                return;
            }
        }
        panic!("{:?}", world.decisions());
    })
    .await;
}

#[tokio::test]
async fn an_authority_signs_only_for_the_names_of_its_policy() {
    local(async {
        let world =
            World::new(vec![EgressRule::allow("localhost:PORT+private+inspect")], SecretTable::default())
                .await;
        // As if the process were tricked into another name: the program refuses the certificate.
        let (trusted, order, key) = authority(Some(&["other.test".into()]));
        world.proxy.certificates.set_authority(Some(&order), Some(&key)).unwrap();
        let world = World { trusted, ..world };
        let error = world.connect(&[HTTP1]).await.unwrap_err().to_string();
        assert!(error.contains("NameConstraint"), "{error}");
    })
    .await;
}

#[path = "bad_input_tests.rs"]
mod bad_input_tests;
#[path = "rule_tests.rs"]
mod rule_tests;
