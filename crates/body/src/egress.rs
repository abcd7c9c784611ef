//! A way out for one Body: a proxy on the host that connects to the names a policy lists, and to nothing else.
//!
//! It speaks CONNECT, so what goes through is TLS between the program inside and the host it named; the name in the TLS
//! hello must be the one that was asked for. Where a rule says `+plain`, it asks plain HTTP itself, one question at a
//! time (`plain`). A decision is told before a byte is carried.
//!
//! Invariant: the address that was judged is the address that is connected to; a name is looked up once.
//! Invariant: an empty policy denies everything, and so does whatever is not understood.
//! Trust: every byte from a Body is hostile: heads have a size and a time, names are compared in one spelling.

mod hello;
mod plain;
mod policy;

use std::{
    io,
    net::SocketAddr,
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hello::server_name;
use plain::Question;
pub use policy::{Policy, RuleError};
use policy::{Rule, Wire, is_inner};
use serde::Serialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::timeout,
};

/// Longest head of a request.
const HEAD_LEN_MAX: usize = 8 << 10;
/// Longest TLS hello.
const HELLO_LEN_MAX: usize = 16 << 10;
/// How long a head, a lookup, a connection may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long nothing may flow.
const IDLE: Duration = Duration::from_secs(300);
/// How long a Body may take to read the end of an answer.
const LINGER: Duration = Duration::from_secs(5);
/// Connections at once.
const CONNECTIONS_MAX: usize = 128;
/// Connections of one way out in all: each is an event, and a log has an end.
const CONNECTIONS_IN_ALL_MAX: usize = 50_000;
/// The socket's name in its directory.
pub const SOCKET: &str = "egress.sock";

/// What was decided about one connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// Where to, as far as it was understood; made fit for a terminal.
    pub to: String,
    /// Whether it may.
    pub allowed: bool,
    /// Why.
    pub why: String,
}

fn fit_to_show(text: &str) -> String {
    proto::text::visible(&text.chars().take(200).collect::<String>())
}

/// A proxy that listens.
#[derive(Debug)]
pub struct Egress {
    dir: PathBuf,
    task: JoinHandle<()>,
    heard: mpsc::UnboundedReceiver<Decision>,
}

impl Egress {
    /// Listens in a directory of its own, which is made, and goes away with it.
    pub fn open(dir: &Path, policy: Policy) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        // By descriptor, because a socket's path may have no more than 107 bytes.
        let held = sys::fd::open_path(dir)?;
        let listener = UnixListener::bind(sys::fd::path_of(held.as_fd()).join(SOCKET))?;
        // The Body's ids are others than ours.
        std::fs::set_permissions(dir.join(SOCKET), std::fs::Permissions::from_mode(0o666))?;
        let (tell, heard) = mpsc::unbounded_channel();
        let task = tokio::spawn(serve(listener, Arc::new(policy), tell));
        Ok(Self { dir: dir.to_owned(), task, heard })
    }

    /// What was decided since the last time.
    pub fn decisions(&mut self) -> Vec<Decision> {
        std::iter::from_fn(|| self.heard.try_recv().ok()).collect()
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

async fn serve(listener: UnixListener, policy: Arc<Policy>, tell: mpsc::UnboundedSender<Decision>) {
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    for _ in 0..CONNECTIONS_IN_ALL_MAX {
        let Ok(turn) = free.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else { continue };
        let (policy, tell) = (policy.clone(), tell.clone());
        tokio::spawn(async move {
            let _ = one(stream, &policy, &tell).await;
            drop(turn);
        });
    }
    let _ = tell.send(Decision {
        to: "?".into(),
        allowed: false,
        why: format!("it has connected {CONNECTIONS_IN_ALL_MAX} times, and this way out is closed"),
    });
}

/// What a Body wants of this proxy.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Tunnel(String),
    Plain(Question),
}

/// One connection: one request, and then a tunnel, an answer or the end.
async fn one(
    mut inside: UnixStream,
    policy: &Policy,
    tell: &mpsc::UnboundedSender<Decision>,
) -> io::Result<()> {
    let (wanted, rest) =
        match timeout(PATIENCE, head(&mut inside)).await.map_err(|_| io::ErrorKind::TimedOut)?? {
            Ok(found) => found,
            Err(why) => return deny(&mut inside, tell, "?", 400, why).await,
        };
    let (target, wire) = match &wanted {
        Wanted::Tunnel(target) => (target, Wire::Tls),
        Wanted::Plain(question) => (&question.target, Wire::Plain),
    };
    let (host, port, rule) = match policy.judge(target, wire) {
        Ok(judged) => judged,
        Err(why) => return deny(&mut inside, tell, target, 403, &why).await,
    };
    let mut outside = match reach(&host, port, rule).await? {
        Ok(outside) => outside,
        Err((status, why)) => return deny(&mut inside, tell, target, status, &why).await,
    };
    let allowed = || Decision { to: format!("{host}:{port}"), allowed: true, why: "a rule names it".into() };
    if let Wanted::Plain(question) = &wanted {
        let _ = tell.send(allowed());
        outside.write_all(question.written(&host, port).as_bytes()).await?;
        return answer(inside, outside).await;
    }
    inside.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    let hello = timeout(PATIENCE, hello(&mut inside, rest)).await.map_err(|_| io::ErrorKind::TimedOut)??;
    match server_name(&hello) {
        Some(name) if name.eq_ignore_ascii_case(&host) => {}
        named => {
            let why = named.map_or_else(
                || "what it sent is no TLS with a name".to_owned(),
                |name| format!("its TLS names {}", fit_to_show(&name)),
            );
            let _ = tell.send(Decision { to: fit_to_show(target), allowed: false, why });
            return Ok(());
        }
    }
    let _ = tell.send(allowed());
    outside.write_all(&hello).await?;
    carry(inside, outside).await
}

/// Connects to a name that a rule lets through, or says with which status it is refused.
async fn reach(host: &str, port: u16, rule: &Rule) -> io::Result<Result<TcpStream, (u16, String)>> {
    let found = timeout(PATIENCE, tokio::net::lookup_host((host, port)))
        .await
        .map_err(|_| io::ErrorKind::TimedOut)?;
    let addresses: Vec<SocketAddr> = match found {
        Ok(found) => found.collect(),
        Err(error) => return Ok(Err((502, format!("its name leads nowhere: {error}")))),
    };
    // One bad address spoils all: a name that leads to both is playing games.
    if !rule.private && addresses.iter().any(|address| is_inner(address.ip())) {
        return Ok(Err((403, "its name leads to an address of this machine or its network".into())));
    }
    Ok(connect(&addresses).await.ok_or_else(|| (502, "nobody answers there".into())))
}

/// Passes an answer on. Whatever the Body says meanwhile is read and goes nowhere: a pipe that is closed with something
/// unread in it would take the end of the answer along.
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
        // Who asked has said all it will, and may still be reading.
        () = &mut drained => passed.await,
    }
}

async fn deny(
    inside: &mut UnixStream,
    tell: &mpsc::UnboundedSender<Decision>,
    to: &str,
    status: u16,
    why: &str,
) -> io::Result<()> {
    let _ = tell.send(Decision { to: fit_to_show(to), allowed: false, why: why.to_owned() });
    let text = format!("palisade: {} may not be reached: {why}\n", fit_to_show(to));
    let answer = format!(
        "HTTP/1.1 {status} Denied\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    inside.write_all(answer.as_bytes()).await
}

/// What is wanted, and what came behind the head.
async fn head(inside: &mut UnixStream) -> io::Result<Result<(Wanted, Vec<u8>), &'static str>> {
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
    Ok(wanted(&bytes).map(|wanted| (wanted, rest)))
}

fn wanted(head: &[u8]) -> Result<Wanted, &'static str> {
    let text = std::str::from_utf8(head).map_err(|_| "its head is no text")?;
    let line = text.split("\r\n").next().unwrap_or_default();
    if line.contains(|c: char| c.is_control()) {
        return Err("its head holds control characters");
    }
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["CONNECT", target, "HTTP/1.1" | "HTTP/1.0"] => Ok(Wanted::Tunnel(target.to_owned())),
        _ => Question::read(text).map(Wanted::Plain),
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

/// The first record of TLS, whole.
async fn hello(inside: &mut UnixStream, mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
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
    let mut buffer = vec![0; 32 << 10];
    loop {
        match timeout(IDLE, from.read(&mut buffer)).await.map_err(|_| io::ErrorKind::TimedOut)?? {
            0 => return to.shutdown().await,
            len => to.write_all(&buffer[..len]).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{hello::tests::hello_for, *};

    #[test]
    fn a_connect_and_a_plain_question_are_understood_and_nothing_else_is() {
        assert_eq!(
            wanted(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: evil.io"),
            Ok(Wanted::Tunnel("pypi.org:443".into())),
            "the target counts, whatever Host says"
        );
        assert!(
            matches!(wanted(b"GET http://pypi.org/ HTTP/1.1\r\nHost: evil.io"), Ok(Wanted::Plain(question)) if question.target == "pypi.org:80")
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
            assert!(wanted(head).is_err(), "{:?}", String::from_utf8_lossy(head));
        }
    }

    /// Asks a proxy for a target, sends `first`, and gives what came back and what was decided.
    async fn ask(rules: &[&str], request: &str, first: &[u8]) -> (String, Vec<Decision>) {
        let dir = std::env::temp_dir().join(format!(
            "palisade-egress-{}-{}",
            std::process::id(),
            proto::event::hex(&sys::random::bytes::<4>().unwrap())
        ));
        let mut egress = Egress::open(&dir, Policy::parse(rules).unwrap()).unwrap();
        let mut stream = UnixStream::connect(dir.join(SOCKET)).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let len = stream.read(&mut answer).await.unwrap();
        let mut text = String::from_utf8_lossy(&answer[..len]).into_owned();
        if text.starts_with("HTTP/1.1 200") {
            stream.write_all(first).await.unwrap();
            let len = timeout(Duration::from_secs(5), stream.read(&mut answer)).await.unwrap().unwrap_or(0);
            text.push_str(&String::from_utf8_lossy(&answer[..len]));
        }
        (text, egress.decisions())
    }

    /// A listener that answers whoever comes, and its port.
    async fn door() -> u16 {
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
        let port = door().await;
        let (open, closed) = (format!("localhost:{port}+private"), format!("localhost:{port}"));
        let connect = |target: &str| format!("CONNECT {target} HTTP/1.1\r\n\r\n");
        let hello = hello_for(&["localhost"]);
        // The door is open to whoever is let through.
        let (said, decided) = ask(&[&open], &connect(&format!("localhost:{port}")), &hello).await;
        assert!(
            said.ends_with("REACHED") && decided.last().is_some_and(|decision| decision.allowed),
            "{said} {decided:?}"
        );
        for (what, rules, target, first) in [
            ("an address of this machine", vec![closed.as_str()], format!("localhost:{port}"), hello.clone()),
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
            let (said, decided) = ask(&rules, &connect(&target), &first).await;
            assert!(!said.contains("REACHED"), "{what}: {said}");
            assert!(
                decided.iter().all(|decision| !decision.allowed) && !decided.is_empty(),
                "{what}: {decided:?}"
            );
        }
        let (said, _) = ask(
            &[&open],
            "GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\nCONNECT x:1 HTTP/1.1\r\n\r\n",
            b"",
        )
        .await;
        assert!(said.starts_with("HTTP/1.1 403"), "a rule for TLS is none for plain http: {said}");
    }

    /// A plain server that says back what it was asked, and how often it was connected to.
    async fn mirror() -> (u16, Arc<std::sync::atomic::AtomicUsize>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, count) =
            (listener.local_addr().unwrap().port(), Arc::new(std::sync::atomic::AtomicUsize::new(0)));
        let counted = count.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                let mut asked = vec![0; 4096];
                let len = stream.read(&mut asked).await.unwrap();
                // Whatever else came would be a second question.
                let more = timeout(Duration::from_millis(50), stream.read(&mut asked[len..]))
                    .await
                    .map_or(0, Result::unwrap);
                let said = String::from_utf8_lossy(&asked[..len + more]).into_owned();
                let _ = stream
                    .write_all(
                        format!(
                            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{said}",
                            said.len()
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
        let (port, count) = mirror().await;
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
            let (said, decided) = ask(&[&plain], &request, b"").await;
            assert!(
                said.ends_with(&format!(
                    "GET /pool/a.deb HTTP/1.1\r\nhost: {here}\r\nrange: bytes=1-\r\nconnection: close\r\n\r\n"
                )),
                "{said}"
            );
            assert!(decided.len() == 1 && decided[0].allowed, "{decided:?}");
        }
        assert_eq!(reached(), 2, "the second question went nowhere");
        for (what, rules, request) in [
            ("a rule for TLS", vec![tls.as_str()], get(&here)),
            ("no rule", vec![], get(&here)),
            ("an address of this machine", vec![closed.as_str()], get(&here)),
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
            let (said, decided) = ask(&rules, &request, b"").await;
            assert!(
                said.starts_with("HTTP/1.1 40")
                    && decided.iter().all(|decision| !decision.allowed)
                    && !decided.is_empty(),
                "{what}: {said} {decided:?}"
            );
        }
        assert_eq!(reached(), 2, "nobody else came through");
    }
}
