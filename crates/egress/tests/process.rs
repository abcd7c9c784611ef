//! The whole process in its cage: the kernel of a network namespace redirects connections to it, and it answers names,
//! connects, refuses, obeys and ends.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::panic, missing_docs, reason = "a test")]

use std::{
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    time::Duration,
};

use proto::egress::{
    DecisionKind, EgressAnswer, EgressControl, EgressOrders, EgressReply, EgressRule, EgressStart, Flush,
    PROGRAM, REDIRECT_PORT, RESOLVER, SpoolLine, TRANSPARENT,
};
use sys::redirect::{IpVersion, add_local_routes, listen, redirect};

/// Says to this program that it runs in its own namespaces, and where its files are.
const INSIDE: &str = "PALISADE_TEST_EGRESS";

fn main() -> ExitCode {
    if std::env::args().next().is_some_and(|program| program == PROGRAM) {
        return egress::main();
    }
    // A runner of tests asks for their names; none is ignored.
    if std::env::args().any(|word| word == "--list") {
        if !std::env::args().any(|word| word == "--ignored") {
            println!("the_whole_process: test");
        }
        return ExitCode::SUCCESS;
    }
    match std::env::var_os(INSIDE) {
        Some(dir) => {
            check_process(Path::new(&dir));
            ExitCode::SUCCESS
        }
        None => run_inside(),
    }
}

/// Runs this program again in namespaces of its own, where `a.test` is this host.
fn run_inside() -> ExitCode {
    let dir = std::env::temp_dir().join(format!("palisade-egress-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("hosts"), "127.0.0.1 a.test b.test\n").unwrap();
    let run = |script: &str| {
        let namespaces = ["--user", "--map-root-user", "--net", "--mount"];
        let mut unshare = Command::new("unshare");
        unshare.args(namespaces).args(["sh", "-c", script, "sh"]).arg(std::env::current_exe().unwrap());
        unshare.current_dir(&dir).env(INSIDE, &dir).status().unwrap().success()
    };
    let passed = if run("mount --bind hosts /etc/hosts") {
        run("mount --bind hosts /etc/hosts && exec \"$1\"")
    } else {
        println!("skipped: no namespaces here");
        true
    };
    std::fs::remove_dir_all(dir).unwrap();
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The sockets and files that a supervisor gives to the process.
struct Supervisor {
    dir: std::path::PathBuf,
    fds: Vec<OwnedFd>,
}

impl Supervisor {
    fn new(dir: &Path) -> Self {
        sys::namespace::loopback_up().unwrap();
        for version in [IpVersion::V4, IpVersion::V6] {
            redirect(version, REDIRECT_PORT).unwrap();
            add_local_routes(version).unwrap();
        }
        let tcp = |host: &str, port: u16| listen(SocketAddr::new(host.parse().unwrap(), port), 64).unwrap();
        let fds = vec![
            UnixListener::bind(dir.join("egress.sock")).unwrap().into(),
            File::options().append(true).create(true).open(dir.join("events")).unwrap().into(),
            UnixListener::bind(dir.join("control.sock")).unwrap().into(),
            UnixListener::bind(dir.join("peers.sock")).unwrap().into(),
            tcp("127.0.0.1", REDIRECT_PORT),
            tcp("::1", REDIRECT_PORT),
            UdpSocket::bind("127.0.0.1:53").unwrap().into(),
            tcp("127.0.0.1", 53),
        ];
        Self { dir: dir.to_owned(), fds }
    }

    /// Starts the process with these rules, for a Body of which `body` is the first process.
    fn start(&self, rules: &[String], body: &Child) -> Child {
        let (mut socket, far) = UnixStream::pair().unwrap();
        let egress = Command::new("/proc/self/exe")
            .arg0(PROGRAM)
            .arg(TRANSPARENT)
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(far)))
            .spawn()
            .unwrap();
        let pid = rustix::process::Pid::from_raw(i32::try_from(body.id()).unwrap()).unwrap();
        let body = sys::process::open(pid).unwrap();
        for fd in self.fds[..2].iter().chain([&body]).chain(&self.fds[2..]) {
            sys::fd::send(socket.as_fd(), fd.as_fd()).unwrap();
        }
        write_line(&mut socket, &EgressStart { orders: orders(rules, 1), key: None, bundle: None });
        let answer: EgressAnswer = read_line(&socket);
        assert!(matches!(answer, EgressAnswer::Ready { .. }), "{answer:?}");
        egress
    }

    fn control(&self, message: &EgressControl) -> EgressReply {
        let mut stream = UnixStream::connect(self.dir.join("control.sock")).unwrap();
        write_line(&mut stream, message);
        read_line(&stream)
    }

    fn decisions(&self) -> Vec<(DecisionKind, String)> {
        let text = std::fs::read_to_string(self.dir.join("events")).unwrap();
        let lines = text.lines().filter_map(|line| SpoolLine::parse(line.as_bytes()));
        lines.map(|line| (line.kind, line.data.to)).collect()
    }
}

fn orders(rules: &[String], generation: u64) -> EgressOrders {
    let rules = rules.iter().map(EgressRule::allow).collect();
    EgressOrders::new(rules, generation, Flush::Kernel)
}

fn write_line(stream: &mut UnixStream, message: &impl serde::Serialize) {
    let line = serde_json::to_string(message).unwrap() + "\n";
    stream.write_all(line.as_bytes()).unwrap();
}

fn read_line<T: serde::de::DeserializeOwned>(stream: &UnixStream) -> T {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

fn query(name: &str) -> Vec<u8> {
    let mut message = vec![7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(u8::try_from(label.len()).unwrap());
        message.extend(label.as_bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    message
}

/// The address in an answer, or its response code.
fn address(answer: &[u8]) -> Result<Ipv4Addr, u8> {
    match answer[7] {
        0 => Err(answer[3] & 15),
        _ => Ok(Ipv4Addr::from(*answer.last_chunk::<4>().unwrap())),
    }
}

/// Looks a name up as a program does that has its own idea of name servers.
fn look_up(name: &str) -> Result<Ipv4Addr, u8> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket.connect("8.8.8.8:53").unwrap();
    socket.send(&query(name)).unwrap();
    let mut answer = [0; 512];
    let len = socket.recv(&mut answer).unwrap();
    address(&answer[..len])
}

/// Looks a name up on a stream.
fn look_up_on(stream: &mut (impl Read + Write), name: &str) -> Result<Ipv4Addr, u8> {
    let message = query(name);
    stream.write_all(&[&(message.len() as u16).to_be_bytes()[..], &message].concat()).unwrap();
    let mut len = [0; 2];
    stream.read_exact(&mut len).unwrap();
    let mut answer = vec![0; usize::from(u16::from_be_bytes(len))];
    stream.read_exact(&mut answer).unwrap();
    address(&answer)
}

/// A server on this host that answers each connection with what it gets first.
fn start_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut first = [0; 4096];
                let len = stream.read(&mut first).unwrap_or(0);
                let _ = stream.write_all(&[b"REACHED ", &first[..len]].concat());
                if first.starts_with(b"stay") {
                    let _ = stream.read(&mut first);
                }
            });
        }
    });
    port
}

fn connect(to: impl Into<SocketAddr>) -> TcpStream {
    let stream = TcpStream::connect(to.into()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// Sends bytes, and reads until the end.
fn ask(to: impl Into<SocketAddr>, bytes: &[u8]) -> Result<String, ErrorKind> {
    let mut stream = connect(to);
    stream.write_all(bytes).map_err(|error| error.kind())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|error| error.kind())?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn check_process(dir: &Path) {
    let supervisor = Supervisor::new(dir);
    let port = start_server();
    let rules =
        [format!("a.test:{port}+tcp+private"), format!("b.test:{port}+http+private"), "c.test".into()];
    let mut body = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut egress = supervisor.start(&rules, &body);
    let a = check_names(&supervisor);
    check_connections(a, look_up("b.test").unwrap(), port);
    check_socket(dir, a, port);
    check_control(&supervisor, &rules, a, port);
    check_end(&mut egress, &mut body);
    check_restart(&supervisor, &rules, a);
    println!("the whole process: ok");
}

fn check_names(supervisor: &Supervisor) -> Ipv4Addr {
    let a = look_up("A.test").unwrap();
    assert_eq!(a, Ipv4Addr::new(198, 18, 0, 1));
    assert_eq!(look_up("evil.test"), Err(3));
    assert_eq!(look_up_on(&mut connect(([9, 9, 9, 9], 53)), "a.test"), Ok(a));
    let decided = supervisor.decisions();
    let expected = [(DecisionKind::Named, "a.test".into()), (DecisionKind::Denied, "evil.test".into())];
    assert_eq!(decided, expected);
    a
}

fn check_connections(a: Ipv4Addr, b: Ipv4Addr, port: u16) {
    assert_eq!(ask((a, port), b"hi\n").unwrap(), "REACHED hi\n");
    let get = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let page = ask((b, port), get("b.test").as_bytes()).unwrap();
    assert_eq!(page, format!("REACHED GET / HTTP/1.1\r\nhost: b.test:{port}\r\nconnection: close\r\n\r\n"));
    assert!(ask((b, port), get("evil.test").as_bytes()).unwrap().starts_with("HTTP/1.1 403 Denied"));
    let page = ask(([203, 0, 113, 1], 80), get("x").as_bytes()).unwrap();
    assert!(
        page.contains("no rule names 203.0.113.1:80\nallow it: pal net allow <body> 203.0.113.1:80"),
        "{page}"
    );
    for to in [
        (a, 22).into(),
        ([203, 0, 113, 1], 22).into(),
        (Ipv4Addr::new(198, 18, 0, 99), port).into(),
        (Ipv4Addr::LOCALHOST, REDIRECT_PORT).into(),
        "[2001:db8::1]:22".parse::<SocketAddr>().unwrap(),
        SocketAddr::new("::1".parse().unwrap(), REDIRECT_PORT),
    ] {
        let ended = ask(to, b"hi\n").unwrap_err();
        assert!(matches!(ended, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{to}: {ended}");
    }
}

/// The proxy's socket, as the guest of a microVM uses it.
fn check_socket(dir: &Path, a: Ipv4Addr, port: u16) {
    let tunnel = |target: &str| {
        let mut stream = UnixStream::connect(dir.join("egress.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
        let mut head = [0; 39];
        stream.read_exact(&mut head).unwrap();
        (stream, String::from_utf8_lossy(&head).into_owned())
    };
    let (mut resolver, _) = tunnel(RESOLVER);
    assert_eq!(look_up_on(&mut resolver, "a.test"), Ok(a));
    assert_eq!(look_up_on(&mut resolver, "evil.test"), Err(3));
    let (mut stream, head) = tunnel(&format!("{a}:{port}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    stream.write_all(b"hi\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "REACHED hi\n");
    for target in [
        format!("{a}:22"),
        format!("198.18.0.99:{port}"),
        format!("127.0.0.1:{port}"),
        "203.0.113.1:80".into(),
    ] {
        assert!(tunnel(&target).1.starts_with("HTTP/1.1 403"), "{target}");
    }
}

fn check_control(supervisor: &Supervisor, rules: &[String], a: Ipv4Addr, port: u16) {
    let mut stream = connect((a, port));
    stream.write_all(b"stay").unwrap();
    stream.read_exact(&mut [0; 12]).unwrap();
    let state = |generation, open, closed| EgressReply::State { generation, open, closed };
    assert_eq!(supervisor.control(&EgressControl::Status), state(1, 1, 0));
    let bad = supervisor.control(&EgressControl::Replace(Box::new(orders(&["no rule".into()], 2))));
    assert!(matches!(bad, EgressReply::Refused { .. }), "{bad:?}");
    assert_eq!(supervisor.control(&EgressControl::Replace(Box::new(orders(rules, 2)))), state(2, 1, 0));
    assert_eq!(supervisor.control(&EgressControl::Replace(Box::new(orders(&[], 3)))), state(3, 0, 1));
    assert_eq!(stream.read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(look_up("a.test"), Err(3));
    assert!(ask((a, port), b"hi\n").is_err());
}

fn check_end(egress: &mut Child, body: &mut Child) {
    body.kill().unwrap();
    body.wait().unwrap();
    assert!(egress.wait().unwrap().success(), "it ends with the Body");
}

/// A process that replaces another one knows its names.
fn check_restart(supervisor: &Supervisor, rules: &[String], a: Ipv4Addr) {
    let mut body = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut egress = supervisor.start(rules, &body);
    assert_eq!(look_up("c.test"), Ok(Ipv4Addr::new(198, 18, 0, 3)));
    assert_eq!(look_up("a.test"), Ok(a));
    check_end(&mut egress, &mut body);
}
