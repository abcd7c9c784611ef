//! A hostile guest: whatever it sends or withholds, the host gets a clear failure in bounded time and memory.
//!
//! If a caller still waits after a moment, the test advances tokio's clock by minutes: timeouts then pass at
//! once, and a caller that still waits would wait forever.

use std::{
    future::Future,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use fleet::{ExecRequest, Force, Status};
use proto::{BodyId, Failure, Kind, launch::RunRecord};
use testkit::{Bodies, body_test};

/// Real time to wait, and then virtual time: longer than any timeout of Palisade.
const MOMENT: Duration = Duration::from_millis(400);
const FOREVER_SECONDS: u32 = 300;
const MEMORY_KIB_MAX: u64 = 96 << 10;

/// Answers one request; the stream closes when it returns.
type Responder = fn(&mut HostileStream);

/// Behaviours by name. Each has read the head of the request already.
const MANNERS: &[(&str, Responder)] = &[
    ("closes at once", |_| {}),
    ("says nothing", |stream| stream.wait()),
    ("sends noise", |stream| stream.endless(&[0xde, 0xad, 0xbe, 0xef, 0x0a, 0xff, 0x00])),
    ("never ends its head", |stream| {
        stream.send(b"HTTP/1.1 200 OK\r\nx: ");
        stream.endless(b"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
    }),
    ("sends heads without end", |stream| stream.endless(b"HTTP/1.1 100 Continue\r\n\r\n")),
    ("says yes and no more", |stream| {
        stream.send(OK);
        stream.wait();
    }),
    ("claims a message of 4 GiB", |stream| {
        stream.send(OK);
        stream.chunk(&[0, 0xff, 0xff, 0xff, 0xff]);
        stream.wait();
    }),
    ("fills a message that is just allowed, forever", |stream| {
        stream.send(OK);
        stream.chunk(&[0, 0x00, 0xff, 0xff, 0xff]);
        stream.endless(&chunk(&[0; 4096]));
    }),
    ("sends messages of no bytes", |stream| {
        stream.send(OK);
        stream.endless(&chunk(&[0; 5]));
    }),
    ("sends flags that do not exist", |stream| {
        stream.send(OK);
        stream.chunk(&[0x80, 0, 0, 0, 0]);
        stream.wait();
    }),
    ("ends in the middle of a message", |stream| {
        stream.send(OK);
        stream.chunk(&[0, 0, 0, 1, 0, 1, 2, 3]);
        stream.send(b"0\r\n\r\n");
    }),
    ("sends messages that are none", |stream| {
        stream.send(OK);
        stream.chunk(&[0, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff]);
        stream.wait();
    }),
    ("ends before it began", |stream| {
        stream.send(OK);
        stream.chunk(b"\x02\x00\x00\x00\x02{}");
        stream.send(b"0\r\n\r\n");
    }),
    ("refuses in JSON of ten thousand levels", |stream| {
        let deep = [b"{\"code\":".repeat(10_000), b"1".to_vec(), b"}".repeat(10_000)].concat();
        stream.send(b"HTTP/1.1 500 No\r\ncontent-length: ");
        stream.send(format!("{}\r\n\r\n", deep.len()).as_bytes());
        stream.send(&deep);
        stream.wait();
    }),
    ("refuses at endless length", |stream| {
        stream.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n");
        stream.endless(&chunk(&[b'x'; 4096]));
    }),
    ("refuses with words for the terminal", |stream| {
        let said = "{\"code\":\"not_found\",\"message\":\"\\u001b]52;c;ZXZpbA==\\u0007\\u202e evil\"}";
        stream.send(format!("HTTP/1.1 404 No\r\ncontent-length: {}\r\n\r\n{said}", said.len()).as_bytes());
        stream.wait();
    }),
    ("switches protocols unasked", |stream| {
        stream.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: evil\r\nconnection: upgrade\r\n\r\n");
        stream.wait();
    }),
    ("sends one byte at a time", |stream| {
        for byte in OK.iter().chain(b"5\r\n").chain(&[0, 0, 1, 0, 0]) {
            stream.send(&[*byte]);
        }
        stream.wait();
    }),
];

const OK: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/connect+proto\r\ntransfer-encoding: chunked\r\n\r\n";

fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// One connection, until it breaks or the test ends.
struct HostileStream {
    stream: UnixStream,
    over: Arc<AtomicBool>,
    broken: bool,
}

impl HostileStream {
    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.ended() {
            match self.stream.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => self.broken = true,
            }
        }
    }

    fn chunk(&mut self, bytes: &[u8]) {
        self.send(&chunk(bytes));
    }

    fn endless(&mut self, bytes: &[u8]) {
        let many = bytes.repeat(1 + 65_536 / bytes.len());
        while !self.ended() {
            self.send(&many);
        }
    }

    fn wait(&mut self) {
        let mut buffer = [0; 4096];
        while !self.ended() {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.broken = true,
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => self.broken = true,
                _ => {}
            }
        }
    }

    fn ended(&self) -> bool {
        self.broken || self.over.load(Ordering::Relaxed)
    }

    fn read_head(&mut self) {
        let mut head = Vec::new();
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") && !self.ended() {
            match self.stream.read(&mut byte) {
                Ok(1) => head.push(byte[0]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => self.broken = true,
            }
        }
    }
}

/// A stopped Body whose record says that it runs, and whose socket belongs to the test.
struct FakeBody {
    body: BodyId,
    process: Child,
    over: Arc<AtomicBool>,
    threads: Option<JoinHandle<()>>,
}

impl FakeBody {
    async fn new(t: &Bodies, manner: Responder) -> Self {
        let body = t.create().await;
        t.fleet().stop(&body, Duration::ZERO).await.unwrap();
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = process.id() as i32;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let ticks = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
        let running = RunRecord {
            boot_id,
            pid,
            ticks,
            supervisor: i32::MAX,
            supervisor_ticks: None,
            cgroups: Vec::new(),
        };
        std::fs::write(t.body_dir(&body).join("run.json"), serde_json::to_vec(&running).unwrap()).unwrap();
        assert_eq!(t.view(&body).status, Status::Running);
        let over = Arc::new(AtomicBool::new(false));
        // The path is relative to its directory, because a socket's path may have at most 107 bytes.
        let link = t.dir().join("s");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(t.body_dir(&body), &link).unwrap();
        let listener = UnixListener::bind(link.join("guest.sock")).unwrap();
        let threads = std::thread::spawn({
            let over = over.clone();
            move || listen(&listener, manner, &over)
        });
        Self { body, process, over, threads: Some(threads) }
    }

    async fn end(mut self, t: &Bodies) {
        self.over.store(true, Ordering::Relaxed);
        self.threads.take().map(JoinHandle::join).unwrap().unwrap();
        t.fleet().remove(&self.body, Force::Yes).await.unwrap();
        assert!(
            self.process.wait().is_ok_and(|status| !status.success()),
            "removing the Body ended what it took for its guest"
        );
    }
}

fn listen(listener: &UnixListener, manner: Responder, over: &Arc<AtomicBool>) {
    listener.set_nonblocking(true).unwrap();
    let mut threads = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut stream = HostileStream { stream, over: over.clone(), broken: false };
        threads.push(std::thread::spawn(move || {
            stream.read_head();
            manner(&mut stream);
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}

/// The result of an operation, unless it lasts forever.
async fn in_time<T>(act: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(act);
    if let Ok(done) = tokio::time::timeout(MOMENT, &mut act).await {
        return Some(done);
    }
    tokio::time::pause();
    let mut outcome = None;
    for _ in 0..FOREVER_SECONDS {
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::select! {
            biased;
            done = &mut act => outcome = Some(done),
            () = std::future::ready(()) => {}
        }
        if outcome.is_some() {
            break;
        }
    }
    tokio::time::resume();
    outcome
}

/// Checks that the outcome is a failure with a message that can be shown.
fn clear(what: &str, outcome: Option<Result<(), Failure>>) {
    let outcome = outcome.unwrap_or_else(|| panic!("{what}: it is waited for forever"));
    let Err(failure) = outcome else { panic!("{what}: it was believed") };
    let told = testkit::explain(&failure);
    assert!(
        [Kind::Host, Kind::Internal, Kind::NotFound, Kind::Limit].contains(&failure.kind),
        "{what}: {:?} {told}",
        failure.kind
    );
    assert!(told.len() < 2000, "{what}: {} bytes of words", told.len());
    assert!(!told.contains(['\u{1b}', '\u{202e}', '\u{7}']), "{what}: {told:?}");
}

#[body_test]
async fn a_lying_guest_cannot_hold_or_fill_who_runs_a_command(t: Bodies) {
    for (what, manner) in MANNERS {
        let fake = FakeBody::new(&t, *manner).await;
        let before = memory_kib();
        let outcome = in_time(t.try_exec(&fake.body, ExecRequest::new(["true"]))).await;
        clear(what, outcome.map(|ran| ran.map(drop)));
        let grown = memory_kib() - before;
        assert!(grown < MEMORY_KIB_MAX, "{what}: memory grew by {grown} KiB");
        fake.end(&t).await;
    }
}

#[body_test]
async fn a_lying_guest_cannot_hold_or_fill_who_copies(t: Bodies) {
    std::fs::write(t.dir().join("file"), "x").unwrap();
    for (what, manner) in MANNERS {
        let fake = FakeBody::new(&t, *manner).await;
        let before = memory_kib();
        let out = t.dir().join("out");
        let outcome = in_time(t.fleet().files().copy_out(&fake.body, "/home/user", &out)).await;
        clear(&format!("out: {what}"), outcome.map(|copied| copied.map(drop)));
        let outcome =
            in_time(t.fleet().files().copy_in(&fake.body, &t.dir().join("file"), "/home/user/file")).await;
        clear(&format!("in: {what}"), outcome.map(|copied| copied.map(drop)));
        let grown = memory_kib() - before;
        assert!(grown < MEMORY_KIB_MAX, "{what}: memory grew by {grown} KiB");
        let _ = std::fs::remove_dir_all(out);
        fake.end(&t).await;
    }
}

#[body_test]
async fn a_lying_guest_can_be_stopped(t: Bodies) {
    for (what, manner) in MANNERS {
        let mut fake = FakeBody::new(&t, *manner).await;
        let stopped = in_time(t.fleet().stop(&fake.body, Duration::from_millis(10))).await;
        let stopped = stopped.unwrap_or_else(|| panic!("{what}: it is waited for forever"));
        assert_eq!(
            stopped.unwrap_or_else(|failure| panic!("{what}: {}", testkit::explain(&failure))).status,
            Status::Stopped,
            "{what}"
        );
        assert!(fake.process.try_wait().unwrap().is_some(), "{what}: its process is gone");
        fake.over.store(true, Ordering::Relaxed);
        fake.threads.take().map(JoinHandle::join).unwrap().unwrap();
        t.fleet().remove(&fake.body, Force::Yes).await.unwrap();
    }
}
