//! Connections of a Body: one request each, which is judged, recorded, then forwarded.
//!
//! The proxy supports CONNECT, so the tunnel carries TLS between the program inside and the host that it named; the
//! name in the TLS ClientHello must be the requested one. Where a rule says `+plain`, the proxy sends plain HTTP
//! itself, one request at a time (`http_forward`).
//!
//! Invariant: the decision about a connection is in the spool before its first byte goes to the host; if it cannot be
//! written, the connection is refused.
//! Invariant: the proxy connects to the very address that it judged: each name is resolved once, and a name that no
//! rule allows is not resolved at all.
//! Trust: every byte from a Body is hostile: heads have a maximum length and a deadline, names are compared in
//! normalized form.

use std::{cell::RefCell, io, net::SocketAddr, rc::Rc, sync::Arc, time::Duration};

use proto::egress::{Decision, Policy, Rule, Transport, fit_to_show};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};

use crate::{address::is_inner, http_forward::ForwardRequest, journal::Journal, resolve, sni::server_name};

/// Longest head of a request.
const HEAD_LEN_MAX: usize = 8 << 10;
/// Longest TLS ClientHello.
const HELLO_LEN_MAX: usize = 16 << 10;
/// How long a head, a name lookup or a connect may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a connection may be idle.
const IDLE: Duration = Duration::from_secs(300);
/// How long a Body may take to read the end of an answer.
const LINGER: Duration = Duration::from_secs(5);
/// The pause after a failed accept, most often for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections at once; further ones wait.
const CONNECTIONS_MAX: usize = 128;
const BUFFER_LEN: usize = 32 << 10;

/// The state that all connections of one Body share.
pub struct Proxy {
    pub policy: Policy,
    pub journal: RefCell<Journal>,
}

impl Proxy {
    /// Serves connections forever.
    pub async fn serve(self: Rc<Self>, listener: UnixListener) {
        let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(turn) = free.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let proxy = Rc::clone(&self);
                    tokio::task::spawn_local(async move {
                        let _ = proxy.connection(stream).await;
                        drop(turn);
                    });
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    /// Serves one connection: one request, and then a tunnel, an answer or the end.
    async fn connection(&self, mut inside: UnixStream) -> io::Result<()> {
        let (request, rest) =
            match timeout(PATIENCE, read_head(&mut inside)).await.map_err(|_| io::ErrorKind::TimedOut)?? {
                Ok(found) => found,
                Err(why) => return self.deny(&mut inside, "?", 400, why).await,
            };
        let (target, transport) = match &request {
            Request::Tunnel(target) => (target, Transport::Tls),
            Request::Forward(forward) => (&forward.target, Transport::PlainHttp),
        };
        let (host, port, rule) = match self.policy.judge(target, transport) {
            Ok(judged) => judged,
            Err(why) => return self.deny(&mut inside, target, 403, &why).await,
        };
        let mut outside = match reach(&host, port, rule).await? {
            Ok(outside) => outside,
            Err((status, why)) => return self.deny(&mut inside, target, status, &why).await,
        };
        let allowed = Decision::allowed(&format!("{host}:{port}"), "a rule names it");
        if let Request::Forward(forward) = &request {
            if let Err(error) = self.record(allowed) {
                return refuse(&mut inside, target, 503, &record_failure(&error)).await;
            }
            outside.write_all(forward.for_host(&host, port).as_bytes()).await?;
            return answer(inside, outside).await;
        }
        inside.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
        let hello =
            timeout(PATIENCE, read_hello(&mut inside, rest)).await.map_err(|_| io::ErrorKind::TimedOut)??;
        match server_name(&hello) {
            Some(name) if name.eq_ignore_ascii_case(&host) => {}
            named => {
                let why = named.map_or_else(
                    || "its first bytes are not TLS with a server name".to_owned(),
                    |name| format!("its TLS server name is {}", fit_to_show(&name)),
                );
                return self.record(Decision::denied(target, &why));
            }
        }
        self.record(allowed)?;
        outside.write_all(&hello).await?;
        carry(inside, outside).await
    }

    fn record(&self, decision: Decision) -> io::Result<()> {
        self.journal.borrow_mut().record(decision)
    }

    /// Refuses a connection, and answers the program inside with the reason.
    async fn deny(&self, inside: &mut UnixStream, to: &str, status: u16, why: &str) -> io::Result<()> {
        match self.record(Decision::denied(to, why)) {
            Ok(()) => refuse(inside, to, status, why).await,
            Err(error) => refuse(inside, to, 503, &record_failure(&error)).await,
        }
    }
}

fn record_failure(error: &io::Error) -> String {
    format!("the decision about it cannot be recorded: {error}")
}

async fn refuse(inside: &mut UnixStream, to: &str, status: u16, why: &str) -> io::Result<()> {
    let text = format!("palisade: {} may not be reached: {why}\n", fit_to_show(to));
    let answer = format!(
        "HTTP/1.1 {status} Denied\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    inside.write_all(answer.as_bytes()).await
}

/// A request of a Body.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Tunnel(String),
    Forward(ForwardRequest),
}

/// Connects to a name that a rule allows, or returns the status and reason of a refusal.
async fn reach(host: &str, port: u16, rule: &Rule) -> io::Result<Result<TcpStream, (u16, String)>> {
    let found = timeout(PATIENCE, resolve::resolve(host))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let addresses = match found {
        Ok(found) => found,
        Err(error) => return Ok(Err((502, format!("its name cannot be resolved: {error}")))),
    };
    // A single inner address refuses all: a name with both kinds is suspicious.
    if !rule.private && addresses.iter().any(|address| is_inner(*address)) {
        return Ok(Err((403, "its name resolves to an address of this host or its network".into())));
    }
    let addresses: Vec<SocketAddr> = addresses.into_iter().map(|address| (address, port).into()).collect();
    Ok(connect(&addresses).await.ok_or_else(|| (502, "no address of it accepts the connection".into())))
}

/// Forwards an answer. Further bytes from the Body are read and discarded: closing a socket with unread bytes would
/// reset it and lose the end of the answer.
async fn answer(inside: UnixStream, outside: TcpStream) -> io::Result<()> {
    let (mut from_inside, to_inside) = inside.into_split();
    let (from_outside, _to_outside) = outside.into_split();
    let passed = flow(from_outside, to_inside);
    let drained = async {
        let _ = tokio::io::copy(&mut from_inside, &mut tokio::io::sink()).await;
    };
    let (mut passed, mut drained) = (std::pin::pin!(passed), std::pin::pin!(drained));
    tokio::select! {
        done = &mut passed => {
            done?;
            let _ = timeout(LINGER, drained).await;
            Ok(())
        }
        // The program inside has closed its side, and may still be reading.
        () = &mut drained => passed.await,
    }
}

/// Reads a request, and returns it with the bytes after its head.
async fn read_head(inside: &mut UnixStream) -> io::Result<Result<(Request, Vec<u8>), &'static str>> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        if bytes.len() > HEAD_LEN_MAX {
            return Ok(Err("its head is too long"));
        }
        let mut piece = [0; 1024];
        match inside.read(&mut piece).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => bytes.extend_from_slice(&piece[..len]),
        }
    };
    let rest = bytes.split_off(end + 4);
    bytes.truncate(end);
    Ok(parse_head(&bytes).map(|request| (request, rest)))
}

fn parse_head(head: &[u8]) -> Result<Request, &'static str> {
    let text = std::str::from_utf8(head).map_err(|_| "its head is not UTF-8")?;
    let line = text.split("\r\n").next().unwrap_or_default();
    if line.contains(|c: char| c.is_control()) {
        return Err("its head contains control characters");
    }
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["CONNECT", target, "HTTP/1.1" | "HTTP/1.0"] => Ok(Request::Tunnel(target.to_owned())),
        _ => ForwardRequest::parse(text).map(Request::Forward),
    }
}

async fn connect(addresses: &[SocketAddr]) -> Option<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(PATIENCE, TcpStream::connect(address)).await {
            let _ = stream.set_nodelay(true);
            return Some(stream);
        }
    }
    None
}

/// Reads the whole first TLS record.
async fn read_hello(inside: &mut UnixStream, mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    loop {
        if bytes.first().is_some_and(|kind| *kind != 22) {
            return Ok(bytes);
        }
        if let [_, _, _, high, low, ..] = bytes[..] {
            let len = 5 + usize::from(u16::from_be_bytes([high, low]));
            if bytes.len() >= len || len > HELLO_LEN_MAX {
                return Ok(bytes);
            }
        }
        let mut piece = [0; 4096];
        match inside.read(&mut piece).await? {
            0 => return Ok(bytes),
            len => bytes.extend_from_slice(&piece[..len]),
        }
    }
}

async fn carry(inside: UnixStream, outside: TcpStream) -> io::Result<()> {
    let (from_inside, to_inside) = inside.into_split();
    let (from_outside, to_outside) = outside.into_split();
    let (up, down) = tokio::join!(flow(from_inside, to_outside), flow(from_outside, to_inside));
    up.and(down)
}

async fn flow(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_LEN];
    loop {
        match timeout(IDLE, from.read(&mut buffer)).await.map_err(|_| io::ErrorKind::TimedOut)?? {
            0 => return to.shutdown().await,
            len => to.write_all(&buffer[..len]).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use proto::egress::Flush;

    use super::*;
    use crate::{
        journal::tests::{lines, spool},
        sni::tests::hello_for,
    };

    #[test]
    fn a_connect_and_a_plain_question_are_understood_and_nothing_else_is() {
        assert_eq!(
            parse_head(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: evil.io"),
            Ok(Request::Tunnel("pypi.org:443".into())),
            "the target counts, whatever Host says"
        );
        assert!(
            matches!(parse_head(b"GET http://pypi.org/ HTTP/1.1\r\nHost: evil.io"), Ok(Request::Forward(forward)) if forward.target == "pypi.org:80")
        );
        for head in [
            &b"GET / HTTP/1.1\r\nHost: pypi.org"[..],
            b"CONNECT  pypi.org:443 HTTP/1.1",
            b"CONNECT pypi.org:443",
            b"connect pypi.org:443 HTTP/1.1",
            b"CONNECT pypi.org:443 HTTP/2",
            b"CONNECT a b HTTP/1.1",
            b"CONNECT pypi.org:443\n HTTP/1.1",
            b"CONNECT pypi.org:443\0 HTTP/1.1",
            b"\xff",
            b"",
        ] {
            assert!(parse_head(head).is_err(), "{:?}", String::from_utf8_lossy(head));
        }
    }

    /// Sends a request to a proxy and then `first`; returns the answer and the decisions.
    async fn ask(rules: &[&str], request: &str, first: &[u8]) -> (String, Vec<Decision>) {
        let file = spool();
        let reply = ask_with(file.try_clone().unwrap(), rules, request, first).await;
        (reply, lines(&file).into_iter().map(|line| line.data).collect())
    }

    async fn ask_with(spool: File, rules: &[&str], request: &str, first: &[u8]) -> String {
        let policy = Policy::parse(rules).unwrap();
        let proxy = Proxy { policy, journal: RefCell::new(Journal::new(spool, Flush::Kernel)) };
        let (mut stream, inside) = UnixStream::pair().unwrap();
        let asking = async move {
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = vec![0; 4096];
            let len = stream.read(&mut answer).await.unwrap();
            let mut text = String::from_utf8_lossy(&answer[..len]).into_owned();
            if text.starts_with("HTTP/1.1 200") {
                // A proxy that has refused may have closed the connection already.
                let _ = stream.write_all(first).await;
                let len =
                    timeout(Duration::from_secs(5), stream.read(&mut answer)).await.unwrap().unwrap_or(0);
                text.push_str(&String::from_utf8_lossy(&answer[..len]));
            }
            text
        };
        tokio::join!(proxy.connection(inside), asking).1
    }

    /// A listener that answers every connection, and its port.
    async fn start_listener() -> u16 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut first = [0; 512];
                let _ = stream.read(&mut first).await;
                let _ = stream.write_all(b"REACHED").await;
            }
        });
        port
    }

    #[tokio::test]
    async fn a_named_host_is_reached_and_nothing_else_is() {
        let port = start_listener().await;
        let (open, closed) = (format!("localhost:{port}+private"), format!("localhost:{port}"));
        let connect = |target: &str| format!("CONNECT {target} HTTP/1.1\r\n\r\n");
        let hello = hello_for(&["localhost"]);
        // The listener answers every connection that gets through.
        let (reply, decided) = ask(&[&open], &connect(&format!("localhost:{port}")), &hello).await;
        assert!(
            reply.ends_with("REACHED") && decided.last().is_some_and(|decision| decision.allowed),
            "{reply} {decided:?}"
        );
        for (what, rules, target, first) in [
            ("an address of this host", vec![closed.as_str()], format!("localhost:{port}"), hello.clone()),
            ("no rule", vec![], format!("localhost:{port}"), hello.clone()),
            ("another port", vec![open.as_str()], format!("localhost:{}", port ^ 1), hello.clone()),
            ("the address itself", vec![open.as_str()], format!("127.0.0.1:{port}"), hello.clone()),
            (
                "another name inside",
                vec![open.as_str()],
                format!("localhost:{port}"),
                hello_for(&["evil.io"]),
            ),
            ("no name inside", vec![open.as_str()], format!("localhost:{port}"), hello_for(&[])),
            (
                "a relayed CONNECT",
                vec![open.as_str()],
                format!("localhost:{port}"),
                b"CONNECT evil.io:443 HTTP/1.1\r\n\r\n".to_vec(),
            ),
            (
                "plain HTTP inside",
                vec![open.as_str()],
                format!("localhost:{port}"),
                b"GET / HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_vec(),
            ),
        ] {
            let (reply, decided) = ask(&rules, &connect(&target), &first).await;
            assert!(!reply.contains("REACHED"), "{what}: {reply}");
            assert!(
                decided.iter().all(|decision| !decision.allowed) && !decided.is_empty(),
                "{what}: {decided:?}"
            );
        }
        let (reply, _) = ask(
            &[&open],
            "GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\nCONNECT x:1 HTTP/1.1\r\n\r\n",
            b"",
        )
        .await;
        assert!(reply.starts_with("HTTP/1.1 403"), "a rule for TLS does not allow plain http: {reply}");
    }

    /// A plain HTTP server that echoes its request, with a count of connections that sent a byte.
    async fn start_echo_server() -> (u16, Arc<std::sync::atomic::AtomicUsize>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, count) =
            (listener.local_addr().unwrap().port(), Arc::new(std::sync::atomic::AtomicUsize::new(0)));
        let counted = count.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut asked = vec![0; 4096];
                let len = stream.read(&mut asked).await.unwrap();
                if len == 0 {
                    continue;
                }
                counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                // Any further bytes would be a second request.
                let more = timeout(Duration::from_millis(50), stream.read(&mut asked[len..]))
                    .await
                    .map_or(0, Result::unwrap);
                let reply = String::from_utf8_lossy(&asked[..len + more]).into_owned();
                let _ = stream
                    .write_all(
                        format!(
                            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{reply}",
                            reply.len()
                        )
                        .as_bytes(),
                    )
                    .await;
            }
        });
        (port, count)
    }

    #[tokio::test]
    async fn plain_http_reaches_who_may_be_asked_so_one_question_at_a_time() {
        let (port, count) = start_echo_server().await;
        let reached = || count.load(std::sync::atomic::Ordering::SeqCst);
        let (plain, tls, closed) = (
            format!("localhost:{port}+plain+private"),
            format!("localhost:{port}+private"),
            format!("localhost:{port}+plain"),
        );
        let get = |target: &str| {
            format!(
                "GET http://{target}/pool/a.deb HTTP/1.1\r\nHost: evil.io\r\nRange: bytes=1-\r\nCookie: secret\r\n\r\n"
            )
        };
        let here = format!("localhost:{port}");
        let smuggled = format!("{}GET http://{here}/second HTTP/1.1\r\n\r\n", get(&here));
        for request in [get(&here), smuggled] {
            let (reply, decided) = ask(&[&plain], &request, b"").await;
            assert!(
                reply.ends_with(&format!(
                    "GET /pool/a.deb HTTP/1.1\r\nhost: {here}\r\nrange: bytes=1-\r\nconnection: close\r\n\r\n"
                )),
                "{reply}"
            );
            assert!(decided.len() == 1 && decided[0].allowed, "{decided:?}");
        }
        assert_eq!(reached(), 2, "the second question went nowhere");
        for (what, rules, request) in [
            ("a rule for TLS", vec![tls.as_str()], get(&here)),
            ("no rule", vec![], get(&here)),
            ("an address of this host", vec![closed.as_str()], get(&here)),
            ("another port", vec![plain.as_str()], get(&format!("localhost:{}", port ^ 1))),
            ("the address itself", vec![plain.as_str()], get(&format!("127.0.0.1:{port}"))),
            ("a name before an @", vec![plain.as_str()], get(&format!("{here}@localhost:{port}"))),
            (
                "a question with a body",
                vec![plain.as_str()],
                format!("POST http://{here}/ HTTP/1.1\r\nContent-Length: 1\r\n\r\nx"),
            ),
            ("a tunnel", vec![plain.as_str()], format!("CONNECT {here} HTTP/1.1\r\n\r\n")),
        ] {
            let (reply, decided) = ask(&rules, &request, b"").await;
            assert!(
                reply.starts_with("HTTP/1.1 40")
                    && decided.iter().all(|decision| !decision.allowed)
                    && !decided.is_empty(),
                "{what}: {reply} {decided:?}"
            );
        }
        assert_eq!(reached(), 2, "no other request got through");
    }

    #[tokio::test]
    async fn not_a_byte_goes_out_where_its_decision_cannot_be_recorded() {
        let (port, count) = start_echo_server().await;
        let reached = || count.load(std::sync::atomic::Ordering::SeqCst);
        let here = format!("localhost:{port}");
        let (plain, tls) = (format!("{here}+plain+private"), format!("{here}+private"));
        let cases = [
            (plain, format!("GET http://{here}/ HTTP/1.1\r\n\r\n"), Vec::new(), "HTTP/1.1 503 Denied"),
            (tls, format!("CONNECT {here} HTTP/1.1\r\n\r\n"), hello_for(&["localhost"]), "HTTP/1.1 200"),
        ];
        for (rule, request, first, expected) in &cases {
            let full = File::options().append(true).open("/dev/full").unwrap();
            let reply = ask_with(full, &[rule], request, first).await;
            assert!(reply.starts_with(expected) && !reply.contains("GET /"), "{reply}");
            assert_eq!(reached(), 0, "{request}");
            // With room for the decision, this request gets through.
            ask(&[rule], request, first).await;
            assert_eq!(reached(), 1, "{request}");
            count.store(0, std::sync::atomic::Ordering::SeqCst);
        }
        let full = File::options().append(true).open("/dev/full").unwrap();
        let denied = ask_with(full, &[], &format!("CONNECT {here} HTTP/1.1\r\n\r\n"), b"").await;
        assert!(denied.starts_with("HTTP/1.1 503") && denied.contains("cannot be recorded"), "{denied}");
    }
}
