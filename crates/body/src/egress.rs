//! A way out for one Body: a proxy on the host that connects to the names a policy lists, and to nothing else.
//!
//! It speaks CONNECT, so what goes through is TLS between the program inside and the host it named; the name in the TLS
//! hello must be the one that was asked for. Where a rule says `+plain`, it asks plain HTTP itself, one question at a
//! time (`plain`). A decision is told before a byte is carried.
//!
//! Invariant: the address that was judged is the address that is connected to; a name is looked up once.
//! Invariant: an empty policy denies everything, and so does whatever is not understood.
//! Trust: every byte from a Body is hostile: heads have a size and a time, names are compared in one spelling.

mod plain;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use plain::Question;
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
/// Most rules of a policy.
const RULES_MAX: usize = 256;
/// The socket's name in its directory.
pub const SOCKET: &str = "egress.sock";

/// Why a text is no rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is no rule: write a name and a port such as `pypi.org:443` or `*.example.org:443`, with `+private` behind it for a host of your own network, or `+plain` for plain http"
)]
pub struct RuleError(String);

/// One name that may be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    host: String,
    /// Names below it, instead of it.
    below: bool,
    port: u16,
    /// Also where it leads to an address of this machine or its network.
    private: bool,
    wire: Wire,
}

/// What is spoken with a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wire {
    /// TLS, which this proxy only carries.
    Tls,
    /// Plain HTTP, which this proxy asks itself.
    Plain,
}

/// Names that may be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy(Vec<Rule>);

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

impl Policy {
    /// Reads rules.
    pub fn parse<S: AsRef<str>>(rules: &[S]) -> Result<Self, RuleError> {
        if rules.len() > RULES_MAX {
            return Err(RuleError(format!("{} rules", rules.len())));
        }
        rules.iter().map(|rule| rule_of(rule.as_ref())).collect::<Result<_, _>>().map(Self)
    }

    /// The rule that lets a target through, if it is one this proxy understands.
    fn judge(&self, target: &str, wire: Wire) -> Result<(String, u16, &Rule), String> {
        let (host, port) = target.rsplit_once(':').ok_or("it names no port")?;
        let port: u16 = if port.bytes().all(|byte| byte.is_ascii_digit()) {
            port.parse().map_err(|_| "its port is none")?
        } else {
            return Err("its port is none".into());
        };
        let host = host.to_ascii_lowercase();
        if !is_name(&host) {
            return Err("it is no plain name: addresses and other spellings are not let through".into());
        }
        let fits = |rule: &&Rule| {
            rule.wire == wire
                && rule.port == port
                && if rule.below {
                    host.strip_suffix(&rule.host).is_some_and(|front| front.ends_with('.') && front.len() > 1)
                } else {
                    rule.host == host
                }
        };
        match self.0.iter().find(fits) {
            Some(rule) => Ok((host, port, rule)),
            None if wire == Wire::Plain => Err(format!("no rule lets plain http to {host}:{port}")),
            None => Err(format!("no rule names {host}:{port}")),
        }
    }
}

fn rule_of(text: &str) -> Result<Rule, RuleError> {
    let bad = || RuleError(crate_visible(text));
    let mut marks = text.split('+');
    let text = marks.next().unwrap_or_default();
    let (mut private, mut wire) = (false, Wire::Tls);
    for mark in marks {
        match mark {
            "private" => private = true,
            "plain" => wire = Wire::Plain,
            _ => return Err(bad()),
        }
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let (host, below) = host.strip_prefix("*.").map_or((host, false), |rest| (rest, true));
    let host = host.to_ascii_lowercase();
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port != 0).ok_or_else(bad)?;
    // Nobody means all of a top-level domain.
    if !is_name(&host) || (below && !host.contains('.')) {
        Err(bad())
    } else {
        Ok(Rule { host, below, port, private, wire })
    }
}

fn crate_visible(text: &str) -> String {
    proto::text::visible(&text.chars().take(200).collect::<String>())
}

/// One spelling of a name: lower-case labels, no dot at the end, and not what some resolver takes for an address.
fn is_name(host: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
    };
    let numeric = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit()) || label.starts_with("0x");
    let last = host.rsplit('.').next().unwrap_or(host);
    host.len() <= 253 && host.split('.').all(label) && !numeric(last)
}

/// Whether an address belongs to this machine, its network, or nobody.
fn is_inner(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_inner_v4(v4),
        IpAddr::V6(v6) => match v6.to_ipv4_mapped().or_else(|| embedded(v6)) {
            Some(v4) => is_inner_v4(v4),
            None => {
                v6.is_loopback()
                    || v6.is_unspecified()
                    || v6.is_multicast()
                    || v6.segments()[0] & 0xfe00 == 0xfc00
                    || v6.segments()[0] & 0xffc0 == 0xfe80
            }
        },
    }
}

fn is_inner_v4(v4: Ipv4Addr) -> bool {
    let [a, b, ..] = v4.octets();
    v4.is_loopback()
        || v4.is_private()
        || v4.is_link_local()
        || v4.is_unspecified()
        || v4.is_broadcast()
        || v4.is_multicast()
        || a == 0
        || (a == 100 && b & 0xc0 == 64)
        || a >= 240
        || (a == 192 && b == 0 && v4.octets()[2] == 0)
        || (a == 198 && b & 0xfe == 18)
}

/// IPv4 addresses in the clothes of 6to4 and NAT64.
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let at = |one: u16, two: u16| Ipv4Addr::from((u32::from(one) << 16) | u32::from(two));
    match s {
        [0x2002, one, two, ..] => Some(at(one, two)),
        [0x64, 0xff9b, _, _, _, _, one, two] => Some(at(one, two)),
        [0, 0, 0, 0, 0, 0, one, two] if one != 0 => Some(at(one, two)),
        _ => None,
    }
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
                |name| format!("its TLS names {}", crate_visible(&name)),
            );
            let _ = tell.send(Decision { to: crate_visible(target), allowed: false, why });
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
    let _ = tell.send(Decision { to: crate_visible(to), allowed: false, why: why.to_owned() });
    let text = format!("palisade: {} may not be reached: {why}\n", crate_visible(to));
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

/// The name that a TLS hello asks for.
fn server_name(record: &[u8]) -> Option<String> {
    let mut at = Reader(record);
    (at.take(1)? == [22]).then_some(())?;
    at.take(2)?;
    let mut hello = Reader(at.sized(2)?);
    (hello.take(1)? == [1]).then_some(())?;
    let mut hello = Reader(hello.sized(3)?);
    hello.take(34)?;
    hello.sized(1)?;
    hello.sized(2)?;
    hello.sized(1)?;
    let mut extensions = Reader(hello.sized(2)?);
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.take(2)?;
        let body = extensions.sized(2)?;
        if kind == [0, 0] {
            // Two names would be two readings.
            if found.is_some() {
                return None;
            }
            let mut names = Reader(Reader(body).sized(2)?);
            (names.take(1)? == [0]).then_some(())?;
            let name = names.sized(2)?;
            names.0.is_empty().then_some(())?;
            found = Some(String::from_utf8(name.to_owned()).ok()?);
        }
    }
    found
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// What a length of so many bytes stands before.
    fn sized(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let len = self.take(bytes)?.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
        self.take(len)
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
    use super::*;

    fn policy(rules: &[&str]) -> Policy {
        Policy::parse(rules).unwrap()
    }

    #[test]
    fn names_are_let_through_in_one_spelling_only() {
        let policy = policy(&["pypi.org:443", "*.pythonhosted.org:443"]);
        for target in
            ["pypi.org:443", "PyPI.org:443", "files.pythonhosted.org:443", "a.b.pythonhosted.org:443"]
        {
            assert!(
                policy.judge(target, Wire::Tls).is_ok() && policy.judge(target, Wire::Plain).is_err(),
                "{target}"
            );
        }
        for target in [
            "pypi.org:80",
            "pypi.org:4430",
            "pypi.org",
            "pypi.org:",
            "pypi.org:+443",
            "pypi.org.:443",
            "pypi.org.evil.io:443",
            "evilpypi.org:443",
            "pythonhosted.org:443",
            ".pythonhosted.org:443",
            "xpythonhosted.org:443",
            "user@pypi.org:443",
            "pypi.org@evil.io:443",
            "pypi.org\0.evil.io:443",
            "evil.io\0.pypi.org:443",
            "evil.io#pypi.org:443",
            "evil.io/pypi.org:443",
            "[::1]:443",
            "127.0.0.1:443",
            "2130706433:443",
            "0x7f000001:443",
            "0177.0.0.1:443",
            "127.1:443",
            "[::ffff:127.0.0.1]:443",
            "1.2.3.0x4:443",
            "",
            ":443",
            "..:443",
            "-x.org:443",
            "pypi.org:443:443",
            "pypi .org:443",
            "pypi.org:65979",
            "xn--pypi\u{202e}.org:443",
            "pypi\u{3002}org:443",
        ] {
            assert!(policy.judge(target, Wire::Tls).is_err(), "{target:?}");
        }
        assert!(Policy::default().judge("pypi.org:443", Wire::Tls).is_err(), "an empty list denies");
    }

    #[test]
    fn rules_that_mean_too_much_or_nothing_are_refused() {
        for rule in [
            "",
            "pypi.org",
            "*:443",
            "*.org:443",
            "*.:443",
            "pypi.org:0",
            "127.0.0.1:443",
            "pypi.org.:443",
            "a b:1",
            "https://pypi.org:443",
            "pypi.org:443 +private",
            "pypi.org:443+",
            "pypi.org:443+tls",
            "pypi.org:+443",
            "+plain",
        ] {
            assert!(Policy::parse(&[rule]).is_err(), "{rule:?}");
        }
        assert!(policy(&["registry.corp:8443+private"]).0[0].private);
        let both = policy(&["mirror.corp:80+plain+private"]);
        assert!(
            both.0[0].private
                && both.judge("mirror.corp:80", Wire::Plain).is_ok()
                && both.judge("mirror.corp:80", Wire::Tls).is_err()
        );
    }

    #[test]
    fn addresses_of_this_machine_and_its_network_are_known_in_every_dress() {
        for inner in [
            "127.0.0.1",
            "127.255.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "0.1.2.3",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "198.18.0.1",
            "192.0.0.1",
            "::1",
            "::",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "2002:7f00:1::",
            "64:ff9b::7f00:1",
            "::127.0.0.1",
        ] {
            assert!(is_inner(inner.parse().unwrap()), "{inner}");
        }
        for outer in
            ["1.1.1.1", "151.101.0.223", "2a04:4e42::223", "100.128.0.1", "172.32.0.1", "::ffff:1.1.1.1"]
        {
            assert!(!is_inner(outer.parse().unwrap()), "{outer}");
        }
    }

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

    /// A TLS hello that asks for these names.
    fn hello_for(names: &[&str]) -> Vec<u8> {
        let sized =
            |bytes: &[u8], width: usize| [&(bytes.len() as u32).to_be_bytes()[4 - width..], bytes].concat();
        let extension = |name: &&str| {
            [&[0, 0][..], &sized(&sized(&[&[0][..], &sized(name.as_bytes(), 2)].concat(), 2), 2)].concat()
        };
        let extensions: Vec<u8> = names.iter().flat_map(extension).collect();
        let body = [
            &[3, 3][..],
            &[0; 32],
            &sized(&[], 1),
            &sized(&[0x13, 1], 2),
            &sized(&[0], 1),
            &sized(&extensions, 2),
        ]
        .concat();
        [&[22, 3, 1][..], &sized(&[&[1][..], &sized(&body, 3)].concat(), 2)].concat()
    }

    #[test]
    fn the_name_of_a_hello_is_read_and_nonsense_has_none() {
        let hello = hello_for(&["pypi.org"]);
        assert_eq!(server_name(&hello).as_deref(), Some("pypi.org"));
        assert_eq!(server_name(&hello_for(&[])), None);
        assert_eq!(server_name(&hello_for(&["pypi.org", "evil.io"])), None);
        for len in 0..hello.len() {
            assert_eq!(server_name(&hello[..len]), None, "cut at {len}");
        }
    }

    /// Asks a proxy for a target, sends `first`, and gives what came back and what was decided.
    async fn ask(rules: &[&str], request: &str, first: &[u8]) -> (String, Vec<Decision>) {
        let dir = std::env::temp_dir().join(format!(
            "palisade-egress-{}-{}",
            std::process::id(),
            proto::event::hex(&sys::random::bytes::<4>().unwrap())
        ));
        let mut egress = Egress::open(&dir, policy(rules)).unwrap();
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
