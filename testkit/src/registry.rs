//! Registries on this host: Debian's own, filled by pushing, and one with scripted answers.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::TemporaryDir;

/// Media type of a plain layer.
pub const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
/// Media type of a manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of an index.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The user and password of a registry that requires them.
pub const USER: (&str, &str) = ("somebody", "secret");
const HTPASSWD: &str = "somebody:$2b$04$xj//hiH4RfhE3aGzXHAbduMAm6GzXyauRngcqCKuyS2NlobfOAYZa\n";

/// The digest of bytes, in the spelling of registries.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One layer: its media type and its bytes.
#[derive(Debug, Clone)]
pub struct ImageLayer(pub &'static str, pub Vec<u8>);

/// The parts of an image.
#[derive(Debug, Clone)]
pub struct ImageParts {
    /// The manifest.
    pub manifest: Vec<u8>,
    /// All other blobs, by digest.
    pub blobs: Vec<(String, Vec<u8>)>,
}

/// An image for this host's architecture, with these layers and this configuration.
pub fn image(layers: &[ImageLayer], config: Value) -> ImageParts {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    image_for(architecture, layers, config)
}

/// An image for an architecture, with these layers and this configuration.
pub fn image_for(architecture: &str, layers: &[ImageLayer], config: Value) -> ImageParts {
    let config = json!({ "architecture": architecture, "os": "linux", "config": config, "rootfs": { "type": "layers", "diff_ids": [] } }).to_string().into_bytes();
    let about =
        |kind: &str, bytes: &[u8]| json!({ "mediaType": kind, "digest": digest(bytes), "size": bytes.len() });
    let told: Vec<Value> = layers.iter().map(|ImageLayer(kind, bytes)| about(kind, bytes)).collect();
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": about(CONFIG, &config), "layers": told }).to_string().into_bytes();
    let blobs = layers
        .iter()
        .map(|ImageLayer(_, bytes)| bytes.clone())
        .chain([config])
        .map(|bytes| (digest(&bytes), bytes))
        .collect();
    ImageParts { manifest, blobs }
}

/// Debian's registry, on a port of its own, stopped at the end.
#[derive(Debug)]
pub struct TestRegistry {
    address: SocketAddr,
    child: Child,
    door: bool,
    _dir: TemporaryDir,
}

impl TestRegistry {
    /// A registry without authentication.
    pub fn open() -> Self {
        Self::start(false)
    }

    /// A registry that accepts only [`USER`].
    pub fn closed() -> Self {
        Self::start(true)
    }

    fn start(door: bool) -> Self {
        let dir = TemporaryDir::new("registry");
        // No other process takes a port that was just released.
        let address = TcpListener::bind("127.0.0.1:0")
            .and_then(|free| free.local_addr())
            .expect("there is a free port");
        let storage = json!({ "filesystem": { "rootdirectory": dir.join("storage") } });
        let mut config = json!({ "version": 0.1, "log": { "level": "error" }, "storage": storage, "http": { "addr": address.to_string() } });
        if door {
            fs::write(dir.join("htpasswd"), HTPASSWD).expect("the directory is ours");
            config["auth"] = json!({ "htpasswd": { "realm": "test", "path": dir.join("htpasswd") } });
        }
        fs::write(dir.join("config.yml"), config.to_string()).expect("the directory is ours");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.expect("the package docker-registry is needed: ./test installs it");
        let registry = Self { address, child, door, _dir: dir };
        let patience = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).is_err() {
            assert!(Instant::now() < patience, "the registry does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        registry
    }

    /// `HOST:PORT`.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Pushes an image under a tag.
    pub fn push(&self, repository: &str, tag: &str, parts: &ImageParts) {
        for (digest, bytes) in &parts.blobs {
            let begun =
                self.send("POST", &format!("/v2/{repository}/blobs/uploads/"), "application/json", b"");
            let place = begun.1.get("location").expect("a place to send it to").clone();
            let place = place
                .split_once("://")
                .map_or(place.clone(), |(_, rest)| rest[rest.find('/').unwrap_or(0)..].to_owned());
            let sent =
                self.send("PUT", &format!("{place}&digest={digest}"), "application/octet-stream", bytes);
            assert_eq!(sent.0, 201, "{:?}", String::from_utf8_lossy(&sent.2));
        }
        let kind = serde_json::from_slice::<Value>(&parts.manifest)
            .ok()
            .and_then(|manifest| manifest["mediaType"].as_str().map(str::to_owned))
            .expect("a manifest has a type");
        let sent = self.send("PUT", &format!("/v2/{repository}/manifests/{tag}"), &kind, &parts.manifest);
        assert_eq!(sent.0, 201, "{:?}", String::from_utf8_lossy(&sent.2));
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> (u16, HashMap<String, String>, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address).expect("the registry listens");
        // `somebody:secret`.
        let door = if self.door { "Authorization: Basic c29tZWJvZHk6c2VjcmV0\r\n" } else { "" };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{door}Content-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body))
            .expect("the registry listens");
        let mut reader = BufReader::new(stream);
        let (first, headers) = read_head(&mut reader).expect("the registry answers");
        let mut body = Vec::new();
        let _ = reader.read_to_end(&mut body);
        (first.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), headers, body)
    }
}

impl Drop for TestRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_head(reader: &mut impl BufRead) -> Option<(String, HashMap<String, String>)> {
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|len| *len > 0).map(|_| line.trim_end().to_owned())
    };
    let first = line()?;
    let mut headers = HashMap::new();
    while let Some((name, value)) = line()?.split_once(':') {
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Some((first, headers))
}

/// A request that a [`ScriptedServer`] received.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    /// The path with its query.
    pub path: String,
    /// Headers, in lower case.
    pub headers: HashMap<String, String>,
    /// The body, if the request has a length.
    pub body: Vec<u8>,
}

/// An answer of a [`ScriptedServer`].
#[derive(Debug, Clone, Default)]
pub struct CannedResponse {
    /// The status.
    pub status: u16,
    /// Headers, one line each.
    pub headers: Vec<String>,
    /// The body.
    pub body: Vec<u8>,
    /// The claimed length, if it differs from the real one.
    pub claims: Option<usize>,
    /// Whether it repeats the body forever.
    pub endless: bool,
}

impl CannedResponse {
    /// An answer with status 200 and this body.
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, body: body.into(), ..Self::default() }
    }

    /// An answer with status 404.
    pub fn nothing() -> Self {
        Self { status: 404, ..Self::default() }
    }

    /// A redirect.
    pub fn elsewhere(place: &str) -> Self {
        Self { status: 307, headers: vec![format!("Location: {place}")], ..Self::default() }
    }
}

/// A server with scripted answers that records its requests.
#[derive(Debug)]
pub struct ScriptedServer {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<RecordedRequest>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ScriptedServer {
    /// Answers with this function until it is dropped.
    pub fn start(answer: impl Fn(&RecordedRequest) -> CannedResponse + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let address = listener.local_addr().expect("it has an address");
        let asked: Arc<Mutex<Vec<RecordedRequest>>> = Arc::default();
        let over: Arc<AtomicBool> = Arc::default();
        let (log, answer, stop) = (asked.clone(), Arc::new(answer), over.clone());
        let thread = std::thread::spawn(move || {
            let mut lies = Vec::new();
            for stream in listener.incoming().flatten().take_while(|_| !stop.load(Ordering::Relaxed)) {
                let (log, answer) = (log.clone(), answer.clone());
                let also = stream.try_clone();
                lies.push((also, std::thread::spawn(move || lie(stream, &log, &*answer))));
            }
            for (stream, lie) in lies {
                // Ends open connections.
                let _ = stream.map(|stream| stream.shutdown(Shutdown::Both));
                let _ = lie.join();
            }
        });
        Self { address, asked, over, thread: Some(thread) }
    }

    /// `HOST:PORT`.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// The requests so far.
    pub fn asked(&self) -> Vec<RecordedRequest> {
        self.asked.lock().expect("nobody panics here").clone()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lie(
    stream: TcpStream,
    log: &Mutex<Vec<RecordedRequest>>,
    answer: &dyn Fn(&RecordedRequest) -> CannedResponse,
) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    let (first, headers) = read_head(&mut reader)?;
    let mut body = vec![0; headers.get("content-length").and_then(|len| len.parse().ok()).unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let asked = RecordedRequest { path: first.split(' ').nth(1)?.to_owned(), headers, body };
    log.lock().ok()?.push(asked.clone());
    let answer = answer(&asked);
    let headers: String = answer.headers.iter().map(|line| format!("{line}\r\n")).collect();
    let length = if answer.endless {
        String::new()
    } else {
        format!("Content-Length: {}\r\n", answer.claims.unwrap_or(answer.body.len()))
    };
    stream
        .write_all(
            format!("HTTP/1.1 {} x\r\n{headers}{length}Connection: close\r\n\r\n", answer.status).as_bytes(),
        )
        .ok()?;
    stream.write_all(&answer.body).ok()?;
    if answer.endless {
        while stream.write_all(&answer.body).is_ok() {}
    }
    stream.shutdown(Shutdown::Both).ok()
}
