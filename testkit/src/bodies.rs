//! The fleet of one test.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use fleet::{
    BodyView, Create, Durability, ExecEnd, ExecRequest, Fleet, FleetConfig, Force, OutputChunk, Stdin,
};
use proto::{
    BodyId, Event, Failure, Layer,
    event_data::{BodyCreated, ExecEnded, ExecExit, ExecOutcome, LogSealed},
    spec::{Access, Mount},
};

use crate::{
    TemporaryDir, leaks,
    probe::{self, ProbeVerdict},
};

/// The path of the probe in a Body of [`Bodies::with_probe`].
pub const PROBE_INSIDE: &str = "/mnt/probe/probe";

const MACHINE_LIFE_MAX: std::time::Duration = std::time::Duration::from_secs(400);

/// A fleet on a data directory of its own, on one layer. Copies share it.
#[derive(Clone)]
pub struct Bodies(Arc<BodiesShared>);

struct BodiesShared {
    layer: Layer,
    fleet: Option<Fleet>,
    dir: Mutex<Option<TemporaryDir>>,
    path: PathBuf,
}

/// The output of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOutput {
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Its exit code.
    pub code: i32,
    /// How it ended.
    pub ended: ExecEnd,
}

impl CommandOutput {
    /// Its output as text, without the last newline.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    /// Its standard error as text.
    pub fn complaint(&self) -> String {
        String::from_utf8_lossy(&self.stderr).trim_end().to_owned()
    }

    /// Its output; panics if it failed.
    #[track_caller]
    pub fn ok(&self) -> String {
        assert_eq!(self.code, 0, "{}\n{}", self.text(), self.complaint());
        self.text()
    }
}

impl Bodies {
    pub(crate) fn new(layer: Layer) -> Self {
        let dir = TemporaryDir::new("test");
        let path = dir.to_path_buf();
        if layer == Layer::Microvm {
            crate::microvm_setup::share(&path.join("data"));
        }
        let fleet = open(&path.join("data")).expect("a fresh data directory can be opened");
        Self(Arc::new(BodiesShared { layer, fleet: Some(fleet), dir: Mutex::new(Some(dir)), path }))
    }

    /// The fleet.
    pub fn fleet(&self) -> &Fleet {
        self.0.fleet.as_ref().expect("the fleet lives as long as the test")
    }

    /// Another fleet on the same data directory, as another `pal` would open it.
    pub fn second(&self) -> Fleet {
        open(&self.data()).expect("the data directory can be opened twice")
    }

    /// The test's own directory, which contains the data directory.
    pub fn dir(&self) -> &Path {
        &self.0.path
    }

    /// The data directory.
    pub fn data(&self) -> PathBuf {
        self.0.path.join("data")
    }

    /// A Body's directory.
    pub fn body_dir(&self, id: &BodyId) -> PathBuf {
        self.data().join("bodies").join(id.as_str())
    }

    /// A request for a kept Body on this test's layer.
    pub fn kept(&self) -> Create {
        let mut request = Create { layer: Some(self.0.layer), ..Create::kept() };
        if self.0.layer == Layer::Microvm {
            // A test that is killed leaves its microVMs behind, and those keep a CPU busy.
            request.limits.wall = Some(MACHINE_LIFE_MAX);
        }
        request
    }

    /// A request for a Body that ends with the process that created it.
    pub fn passing(&self) -> Create {
        Create { layer: Some(self.0.layer), ..Create::run() }
    }

    /// A request for a Body with the probe at [`PROBE_INSIDE`].
    pub fn with_probe(&self, mut request: Create) -> Create {
        let source = self.dir().join("probe");
        if !source.exists() {
            fs::create_dir(&source).expect("a directory for the probe");
            fs::copy(probe::path(), source.join("probe")).expect("the probe can be copied");
        }
        request.mounts.push(Mount { source, target: "/mnt/probe".into(), access: Access::ReadOnly });
        request
    }

    /// Creates a kept Body.
    pub async fn create(&self) -> BodyId {
        self.make(self.kept()).await.spec.id
    }

    /// Creates the requested Body.
    pub async fn make(&self, request: Create) -> BodyView {
        self.try_make(request).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)))
    }

    /// Creates the requested Body, or returns the failure. The probe is copied into a microVM, which has no
    /// mounts.
    pub async fn try_make(&self, mut request: Create) -> Result<BodyView, Failure> {
        let is_probe =
            |mount: &Mount| self.0.layer == Layer::Microvm && mount.target == Path::new("/mnt/probe");
        let probe = request.mounts.extract_if(.., |mount| is_probe(mount)).next();
        let view = self.fleet().create(request).await?;
        if let Some(probe) = probe {
            let bytes = fs::read(probe.source.join("probe")).expect("the probe can be read");
            let pieces: Vec<Bytes> = bytes.chunks(256 << 10).map(Bytes::copy_from_slice).collect();
            let put =
                ["sh", "-c", "mkdir -p /mnt/probe && cat > /mnt/probe/probe && chmod 755 /mnt/probe/probe"];
            let request = ExecRequest {
                stdin: Stdin::Open,
                user: Some("root".into()),
                workdir: Some("/".into()),
                ..ExecRequest::new(put)
            };
            let ran = ran(self.fleet(), view.id(), request, &pieces).await?;
            assert_eq!(ran.code, 0, "{}", ran.complaint());
        }
        Ok(view)
    }

    /// Gives another data directory what this layer needs besides programs.
    pub fn prepare(&self, data: &Path) {
        if self.0.layer == Layer::Microvm {
            crate::microvm_setup::share(data);
        }
    }

    /// A time limit for this layer: an emulated microVM is slower.
    pub fn with_time(&self, time: std::time::Duration) -> std::time::Duration {
        if self.0.layer == Layer::Microvm { time * 15 } else { time }
    }

    /// The tested layer.
    pub fn layer(&self) -> Layer {
        self.0.layer
    }

    /// The current state of a Body.
    pub fn view(&self, id: &BodyId) -> BodyView {
        self.fleet().find(id.as_str()).unwrap_or_else(|failure| panic!("{}", explain(&failure)))
    }

    /// Runs a command to its end.
    pub async fn run<S: Into<String>>(
        &self,
        id: &BodyId,
        argv: impl IntoIterator<Item = S>,
    ) -> CommandOutput {
        self.exec(id, ExecRequest::new(argv)).await
    }

    /// Runs a line of shell to its end.
    pub async fn sh(&self, id: &BodyId, script: &str) -> CommandOutput {
        self.run(id, ["sh", "-c", script]).await
    }

    /// Runs a request to its end.
    pub async fn exec(&self, id: &BodyId, request: ExecRequest) -> CommandOutput {
        self.try_exec(id, request).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)))
    }

    /// Runs a request to its end, or returns the failure.
    pub async fn try_exec(&self, id: &BodyId, request: ExecRequest) -> Result<CommandOutput, Failure> {
        ran(self.fleet(), id, request, &[]).await
    }

    /// Runs a command that reads `input`, which is sent while its output is read.
    pub async fn feed<S: Into<String>>(
        &self,
        id: &BodyId,
        argv: impl IntoIterator<Item = S>,
        input: &[Bytes],
    ) -> CommandOutput {
        let request = ExecRequest { stdin: Stdin::Open, ..ExecRequest::new(argv) };
        ran(self.fleet(), id, request, input).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)))
    }

    /// Shows that a probe succeeds on the host, and then that it is denied in a Body of
    /// [`Bodies::with_probe`].
    pub async fn denied(&self, id: &BodyId, name: &str, words: &[String]) {
        let arguments = || ["run", name].into_iter().map(str::to_owned).chain(words.iter().cloned());
        let output = Command::new(probe::path())
            .args(arguments())
            .stdin(Stdio::null())
            .output()
            .expect("the probe can be run");
        let control = probe::report(&output.stdout);
        assert_eq!(
            control.verdict,
            ProbeVerdict::Reached,
            "{name}: a denial proves nothing, its door is not open: {}",
            control.detail
        );
        let ran = self.run(id, [PROBE_INSIDE.to_owned()].into_iter().chain(arguments())).await;
        let inside = probe::report(&ran.stdout);
        assert_eq!(inside.verdict, ProbeVerdict::Denied, "{name}: {}", inside.detail);
    }

    /// Every event, oldest first, without the seals: those come by the clock.
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.fleet().log().events(0, None, usize::MAX).expect("the log can be read");
        events.retain(|event| !event.is::<LogSealed>());
        events
    }

    /// The kinds of a Body's events, oldest first.
    pub fn kinds(&self, id: &BodyId) -> Vec<String> {
        let events = self.fleet().log().events(0, Some(id), usize::MAX).expect("the log can be read");
        events.into_iter().map(|event| event.kind).collect()
    }

    /// How the last recorded command ended.
    pub fn last_exit(&self) -> ExecExit {
        let ended = self.events().iter().rev().find_map(Event::data_as::<ExecEnded>);
        match ended.map(|ended| ended.outcome) {
            Some(ExecOutcome::Ended(exit)) => exit,
            other => panic!("the log tells of no command that ran last: {other:?}"),
        }
    }

    /// Removes every Body and snapshot, and checks what is left of them.
    pub(crate) async fn clear(&self) {
        let made = self.events().into_iter().filter(Event::is::<BodyCreated>);
        let made: Vec<String> = made.filter_map(|event| Some(event.body?.to_string())).collect();
        for view in self.fleet().list().expect("Bodies can be listed") {
            let removed = self.fleet().remove(view.id(), Force::Yes).await;
            removed.unwrap_or_else(|failure| panic!("cannot remove {}: {}", view.id(), explain(&failure)));
        }
        self.clear_snapshots();
        self.clear_templates();
        self.clear_homes();
        self.fleet()
            .garbage()
            .remove_unused_layers(proto::Size(0))
            .expect("layers that nobody stands on can be removed");
        let left = || {
            let mut places = ["bodies", "snapshots", "ids", "layers", "templates"]
                .map(|place| leaks::entries(&self.data().join(place)))
                .concat();
            places.retain(|name| !name.ends_with("lock"));
            let claims = body::ids::orphans(&self.data())
                .into_iter()
                .map(|(body, _)| format!("ids of {body}"))
                .collect();
            [places, claims, leaks::mounts(self.dir()), leaks::cgroups(&made)].concat()
        };
        // A supervisor may still be ending.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while !left().is_empty() && std::time::Instant::now() < deadline {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(left(), Vec::<String>::new(), "claims, mounts, cgroups or files are left");
    }

    /// Newest first, because those depend on the others.
    fn clear_snapshots(&self) {
        for snapshot in self.fleet().snapshots().list().expect("snapshots can be listed").iter().rev() {
            match self.fleet().snapshots().remove(snapshot.id.as_str()) {
                // One that was taken for forks goes with the last snapshot above it.
                Err(failure) if failure.kind == proto::Kind::NotFound => {}
                removed => drop(removed.unwrap_or_else(|failure| {
                    panic!("cannot remove {}: {}", snapshot.id, explain(&failure))
                })),
            }
        }
    }

    fn clear_templates(&self) {
        for view in self.fleet().templates().list().expect("templates can be listed") {
            let removed = self.fleet().templates().remove(view.template.id.as_str());
            removed.unwrap_or_else(|failure| {
                panic!("cannot remove {}: {}", view.template.name, explain(&failure))
            });
        }
    }

    fn clear_homes(&self) {
        for home in self.fleet().homes().list().expect("homes can be listed") {
            let removed = self.fleet().homes().remove(&home.record.name);
            removed.unwrap_or_else(|failure| {
                panic!("cannot remove {}: {}", home.record.name, explain(&failure))
            });
        }
    }

    /// After a failure: ends what is left, without a report.
    pub(crate) fn give_up(&self) {
        leaks::end(&leaks::descendants());
        if let Some(dir) = self.0.dir.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() {
            let _ = fs::remove_dir_all(&*dir);
            // Its files may belong to ids that this user cannot remove; the failure was reported already.
            std::mem::forget(dir);
        }
    }
}

impl Drop for BodiesShared {
    fn drop(&mut self) {
        drop(self.fleet.take());
    }
}

/// Opens a data directory as the command line would.
pub fn open(data: &Path) -> Result<Fleet, Failure> {
    Fleet::open(FleetConfig { data: data.to_owned(), durability: Durability::Process })
}

/// Runs a request in a fleet to its end.
pub async fn ran(
    fleet: &Fleet,
    id: &BodyId,
    request: ExecRequest,
    input: &[Bytes],
) -> Result<CommandOutput, Failure> {
    let feed = request.stdin == Stdin::Open;
    let mut exec = fleet.execs().start(id, request).await?;
    let control = exec.control();
    let sent = async {
        if feed {
            for piece in input {
                // A command may end before it has read its whole input.
                if control.send(piece.clone()).await.is_err() {
                    return;
                }
            }
            let _ = control.close_stdin().await;
        }
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let heard = async {
        while let Some(output) = exec.next().await? {
            match output {
                OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes) => stdout.extend_from_slice(&bytes),
                OutputChunk::Stderr(bytes) => stderr.extend_from_slice(&bytes),
            }
        }
        Ok::<(), Failure>(())
    };
    let (heard, ()) = tokio::join!(heard, sent);
    heard?;
    let ended = exec.finish().await?;
    Ok(CommandOutput { stdout, stderr, code: ended.code, ended })
}

/// A failure with its causes and hints.
pub fn explain(failure: &Failure) -> String {
    format!("{failure} (causes: {:?}; hints: {:?})", failure.causes(), failure.hints)
}
