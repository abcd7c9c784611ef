//! The host's git, run one way: no hooks, no settings of others, no network, with limits on time, output and memory.
//!
//! Invariant: in a repository of ours git reads no configuration but ours. In the user's repository it reads that
//! repository's own, and the user's only where a [`GitIdentity`] is given: for identity and signing of what that person does.
//! Invariant: the repository is always named (`--git-dir`), never found by looking around.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Resource, Rlimit, Signal};

/// How long one git may take.
const TIME_MAX: Duration = Duration::from_secs(600);
/// How much it may say.
const OUTPUT_MAX: u64 = 1 << 30;
/// How much of its complaints is kept, of their beginning and of their end.
const COMPLAINT_MAX: usize = 4 << 10;
/// How long complaints may come after its end: what it started itself, such as a connection that it shares, may go on.
const COMPLAINT_PATIENCE: Duration = Duration::from_secs(2);
/// Memory of one that reads what a Body made.
const TIGHT_MEMORY: u64 = 3 << 30;
/// Largest file that such a one may write.
const TIGHT_FILE: u64 = 16 << 30;
/// What a pack begins with: a word, a version, how many objects.
const PACK_HEAD_LEN: usize = 12;
/// Where programs are.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Settings that hold in every repository, whatever it says itself.
const SETTINGS: &[&str] = &[
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.splitIndex=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.alternateRefsCommand=true",
    "core.pager=cat",
    "core.quotePath=false",
    "protocol.allow=never",
    "protocol.file.allow=always",
    "transfer.fsckObjects=true",
    "fetch.fsckObjects=true",
    "fetch.recurseSubmodules=false",
    "fetch.writeCommitGraph=false",
    "submodule.recurse=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "pack.threads=2",
    "advice.detachedHead=false",
];

/// Those that a person may set for all of their repositories.
const RULES: &[&str] = &["core.attributesFile=/dev/null", "core.excludesFile=/dev/null"];
/// Settings for what must outlive a loss of power.
const LASTING: &[&str] = &["core.fsync=all", "core.fsyncMethod=fsync"];
/// Settings for what can be made again.
const PASSING: &[&str] = &["core.fsync=none"];

/// Why git did not do it.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// There is no git.
    #[error("cannot run git")]
    Missing(#[source] io::Error),
    /// It said no.
    #[error("git {verb} failed: {said}")]
    Failed {
        /// What was asked of it.
        verb: String,
        /// Its exit code.
        code: Option<i32>,
        /// Its words, made fit for a terminal.
        said: String,
        /// What they mean to its callers.
        reason: GitReason,
    },
    /// It took too long, or said too much.
    #[error("git {verb} was ended: it took too long, or wrote too much")]
    Limit {
        /// What was asked of it.
        verb: String,
    },
    /// What it answered makes no sense.
    #[error("git {0} gave an answer that cannot be understood")]
    Answer(&'static str),
}

impl GitError {
    /// A git that ended with an error, and complained so.
    fn failed(verb: String, code: Option<i32>, complaint: &[u8]) -> Self {
        Self::Failed { verb, code, said: shown(complaint), reason: GitReason::of(complaint) }
    }

    /// Why git said no, if it did.
    pub fn reason(&self) -> Option<GitReason> {
        match self {
            Self::Failed { reason, .. } => Some(*reason),
            _ => None,
        }
    }
}

/// Why git said no, as far as its callers act on it. Git has one exit code for all of these and tells them apart by its
/// words alone, so they are read here, and nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GitReason {
    /// The disk is full.
    DiskFull,
    /// It knows no name or address of the person who commits.
    NoIdentity,
    /// There is no repository.
    NoRepository,
    /// The repository lacks objects, as a partial clone does on purpose.
    MissingObject,
    /// Something else.
    Other,
}

impl GitReason {
    /// Every git here speaks English (`LC_ALL=C`). A name of a file may stand in a complaint, but never ends its line.
    fn of(complaint: &[u8]) -> Self {
        let complaint = String::from_utf8_lossy(complaint);
        let says = |found: fn(&str) -> bool| complaint.lines().any(|line| found(line.trim_end()));
        if says(|line| line.ends_with(": No space left on device")) {
            Self::DiskFull
        } else if says(|line| {
            let begins = ["fatal: empty ident name", "fatal: no name was given", "fatal: no email was given"];
            line.ends_with("Please tell me who you are.")
                || begins.iter().any(|begin| line.starts_with(begin))
        }) {
            Self::NoIdentity
        } else if says(|line| line.starts_with("fatal: not a git repository")) {
            Self::NoRepository
        } else if says(|line| line.starts_with("fatal: did not receive expected object")) {
            Self::MissingObject
        } else {
            Self::Other
        }
    }
}

/// Whose settings git takes, besides the repository's own.
#[derive(Debug, Clone)]
pub struct GitIdentity {
    /// Where their settings are.
    pub home: PathBuf,
    /// Where programs are: signing needs some.
    pub path: OsString,
    /// What else their git should know: agents of keys, terminals, identity.
    pub env: Vec<(OsString, OsString)>,
}

/// git in one repository.
#[derive(Debug, Clone)]
pub struct Git {
    dir: PathBuf,
    work_tree: Option<PathBuf>,
    index: Option<PathBuf>,
    person: Option<GitIdentity>,
    env: Vec<(OsString, OsString)>,
    tight: bool,
    disk: &'static [&'static str],
    own_rules: bool,
    until: Option<Instant>,
}

impl Git {
    /// In the repository whose directory that is.
    pub fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            work_tree: None,
            index: None,
            person: None,
            env: Vec::new(),
            tight: false,
            disk: &[],
            own_rules: false,
            until: None,
        }
    }

    /// With files there.
    #[must_use]
    pub fn files(mut self, work_tree: &Path) -> Self {
        self.work_tree = Some(work_tree.to_owned());
        self
    }

    /// With that index.
    #[must_use]
    pub fn index(mut self, index: &Path) -> Self {
        self.index = Some(index.to_owned());
        self
    }

    /// With a person's identity and settings.
    #[must_use]
    pub fn identity(mut self, person: &GitIdentity) -> Self {
        self.person = Some(person.clone());
        self
    }

    /// With a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// With little memory, for what a Body made.
    #[must_use]
    pub fn rlimited(mut self) -> Self {
        self.tight = true;
        self
    }

    /// What it writes is on the disk when it ends.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.disk = LASTING;
        self
    }

    /// What it writes is not waited for.
    #[must_use]
    pub fn scratch(mut self) -> Self {
        self.disk = PASSING;
        self
    }

    /// Not longer than until then, whatever it does.
    #[must_use]
    pub fn deadline(mut self, until: Instant) -> Self {
        self.until = Some(until);
        self
    }

    /// With what the person ignores everywhere, and how they have files treated.
    #[must_use]
    pub fn user_ignore_rules(mut self) -> Self {
        self.own_rules = true;
        self
    }

    /// Its repository.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The command, for callers who talk with it themselves.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("git");
        command
            .env_clear()
            .current_dir("/")
            .env("LC_ALL", "C")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_NO_LAZY_FETCH", "1");
        command
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_ATTR_NOSYSTEM", "1")
            .env("GIT_NO_REPLACE_OBJECTS", "1");
        match &self.person {
            Some(person) => {
                command
                    .env("HOME", &person.home)
                    .env("PATH", &person.path)
                    .envs(person.env.iter().map(|(name, value)| (name, value)));
            }
            None => {
                command
                    .env("PATH", PATH)
                    .env("HOME", "/nonexistent")
                    .env("GIT_CONFIG_NOSYSTEM", "1")
                    .env("GIT_CONFIG_GLOBAL", "/dev/null");
            }
        }
        if let Some(index) = &self.index {
            command.env("GIT_INDEX_FILE", index);
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let own = |setting: &&&str| !(self.own_rules && RULES.contains(setting));
        for setting in SETTINGS.iter().filter(own).chain(self.disk) {
            command.arg("-c").arg(setting);
        }
        let mut dir = OsString::from("--git-dir=");
        dir.push(&self.dir);
        command.arg(dir);
        if let Some(work_tree) = &self.work_tree {
            let mut files = OsString::from("--work-tree=");
            files.push(work_tree);
            command.arg(files).current_dir(work_tree);
        }
        command.args(args);
        command
    }

    /// Runs it; gives its output.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<Vec<u8>, GitError> {
        self.feed(args, Vec::new())
    }

    /// The same as one line of text.
    pub fn line<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<String, GitError> {
        let said = self.run(args)?;
        Ok(String::from_utf8_lossy(&said).trim_end_matches('\n').to_owned())
    }

    /// The same with something to read.
    pub fn feed<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: Vec<u8>,
    ) -> Result<Vec<u8>, GitError> {
        let command = self.command(args);
        finish(command, GitInput::Bytes(input), None, self.bounds())
    }

    /// The same with a file to read.
    pub fn feed_file<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: File,
    ) -> Result<Vec<u8>, GitError> {
        let command = self.command(args);
        finish(command, GitInput::File(input), None, self.bounds())
    }

    /// The same with its output in a file.
    pub fn fill<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: Vec<u8>,
        output: File,
    ) -> Result<(), GitError> {
        let command = self.command(args);
        finish(command, GitInput::Bytes(input), Some(output), self.bounds()).map(drop)
    }

    /// Runs one git whose pack another takes. Where there is nothing in the pack, the other is not run.
    pub fn pipe_pack(
        &self,
        args: &[&str],
        input: Vec<u8>,
        taker: &Self,
        taker_args: &[&str],
    ) -> Result<(), GitError> {
        let mut command = self.command(args);
        let verb = verb_of(&command);
        let mut giver = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(GitError::Missing)?;
        if self.tight {
            limit_resources(&giver);
        }
        let writer =
            giver.stdin.take().map(|mut pipe| std::thread::spawn(move || drop(pipe.write_all(&input))));
        let complaints = giver.stderr.take().map(StderrReader::of);
        let watch = GitWatchdog::start(&giver, self.bounds().time);
        let mut head = [0; PACK_HEAD_LEN];
        let mut pipe = giver.stdout.take().ok_or(GitError::Answer("pack-objects"))?;
        let has_some = pipe.read_exact(&mut head).is_ok() && head[8..] != [0; 4];
        let taken = if has_some {
            finish(taker.command(taker_args), GitInput::Pack(head, pipe), None, taker.bounds()).map(drop)
        } else {
            Ok(())
        };
        let status = giver.wait().map_err(GitError::Missing)?;
        let late = watch.stop();
        writer.map(JoinHandle::join);
        let complaint = complaints.map(StderrReader::finish).unwrap_or_default();
        // Whoever takes a pack that is cut complains, too; why it was cut is the better word.
        match (late, status.success()) {
            (true, _) => Err(GitError::Limit { verb }),
            // Unless it stopped because nobody took it.
            (_, false) if status.code().is_some() => Err(GitError::failed(verb, status.code(), &complaint)),
            _ => taken,
        }
    }

    fn bounds(&self) -> GitLimits {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        GitLimits { tight: self.tight, time: left.unwrap_or(TIME_MAX).min(TIME_MAX) }
    }
}

/// How much one git may use.
#[derive(Debug, Clone, Copy)]
struct GitLimits {
    tight: bool,
    time: Duration,
}

/// For one that works for the user alone.
const LOOSE: GitLimits = GitLimits { tight: false, time: TIME_MAX };

/// Runs a git that looks for its repository from a directory of the user's, as the user's own would.
pub fn run_in_directory<S: AsRef<OsStr>>(
    dir: &Path,
    person: &GitIdentity,
    args: impl IntoIterator<Item = S>,
) -> Result<Vec<u8>, GitError> {
    let mut command = Command::new("git");
    command
        .env_clear()
        .current_dir(dir)
        .env("HOME", &person.home)
        .env("PATH", &person.path)
        .env("LC_ALL", "C");
    command
        .env("GIT_TERMINAL_PROMPT", "0")
        .env("GIT_OPTIONAL_LOCKS", "0")
        .envs(person.env.iter().map(|(name, value)| (name, value)));
    for setting in SETTINGS.iter().filter(|setting| {
        !setting.starts_with("core.excludesFile") && !setting.starts_with("core.attributesFile")
    }) {
        command.arg("-c").arg(setting);
    }
    command.args(args);
    finish(command, GitInput::Bytes(Vec::new()), None, LOOSE)
}

/// git as the person would call it, with its own way of reaching others.
fn as_person(person: &GitIdentity) -> Command {
    let mut command = Command::new("git");
    command
        .env_clear()
        .current_dir("/")
        .env("HOME", &person.home)
        .env("PATH", &person.path)
        .env("LC_ALL", "C")
        .env("GIT_TERMINAL_PROMPT", "0");
    command.envs(person.env.iter().map(|(name, value)| (name, value)));
    for setting in SETTINGS.iter().filter(|setting| !setting.starts_with("protocol.")) {
        command.arg("-c").arg(setting);
    }
    // A command dressed up as an address is none.
    command.args(["-c", "protocol.ext.allow=never"]);
    command
}

/// Clones from wherever the user said, with the user's own way of reaching it.
pub fn clone_bare(url: &str, to: &Path, person: &GitIdentity) -> Result<(), GitError> {
    let mut command = as_person(person);
    command.args(["clone", "--quiet", "--bare", "--"]).arg(url).arg(to);
    finish(command, GitInput::Bytes(Vec::new()), None, LOOSE).map(drop)
}

/// Brings a clone of ours up to date: what its remote has, beside what is ours.
pub fn fetch_all(dir: &Path, person: &GitIdentity) -> Result<(), GitError> {
    let mut command = network_git(dir, person);
    command.args([
        "fetch",
        "--quiet",
        "--force",
        "--prune",
        "origin",
        "+refs/heads/*:refs/remotes/origin/*",
        "+refs/tags/*:refs/tags/*",
    ]);
    finish(command, GitInput::Bytes(Vec::new()), None, LOOSE).map(drop)
}

/// Fetches objects that a partial clone was promised, named one on a line, as git itself does when it needs one.
pub fn fetch_objects(dir: &Path, remote: &str, ids: String, person: &GitIdentity) -> Result<(), GitError> {
    let mut command = network_git(dir, person);
    command.args([
        "-c",
        "fetch.negotiationAlgorithm=noop",
        "fetch",
        "--quiet",
        "--no-tags",
        "--no-write-fetch-head",
        "--recurse-submodules=no",
        "--filter=blob:none",
        "--stdin",
        "--",
        remote,
    ]);
    finish(command, GitInput::Bytes(ids.into_bytes()), None, LOOSE).map(drop)
}

/// git in a repository of the host, with the person's own way of reaching others.
fn network_git(dir: &Path, person: &GitIdentity) -> Command {
    let mut command = as_person(person);
    let mut place = OsString::from("--git-dir=");
    place.push(dir);
    command.arg(place);
    command
}

enum GitInput {
    Bytes(Vec<u8>),
    File(File),
    /// A pack whose first bytes were read already.
    Pack([u8; PACK_HEAD_LEN], ChildStdout),
}

/// Ends a process that takes too long.
struct GitWatchdog {
    over: mpsc::Sender<()>,
    thread: JoinHandle<bool>,
}

impl GitWatchdog {
    fn start(child: &Child, time: Duration) -> Self {
        let (over, heard) = mpsc::channel::<()>();
        let handle = i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .and_then(|pid| sys::process::open(pid).ok());
        let thread = std::thread::spawn(move || {
            let late = matches!(heard.recv_timeout(time), Err(mpsc::RecvTimeoutError::Timeout));
            if let (true, Some(handle)) = (late, &handle) {
                let _ = sys::process::signal(std::os::fd::AsFd::as_fd(handle), Signal::KILL);
            }
            late
        });
        Self { over, thread }
    }

    /// Stops watching; whether it had to end it.
    fn stop(self) -> bool {
        drop(self.over);
        self.thread.join().unwrap_or(false)
    }
}

fn finish(
    mut command: Command,
    input: GitInput,
    output: Option<File>,
    bounds: GitLimits,
) -> Result<Vec<u8>, GitError> {
    let verb = verb_of(&command);
    let stdin = match &input {
        GitInput::Bytes(bytes) if bytes.is_empty() => Stdio::null(),
        GitInput::File(file) => Stdio::from(file.try_clone().map_err(GitError::Missing)?),
        GitInput::Bytes(_) | GitInput::Pack(..) => Stdio::piped(),
    };
    command.stdin(stdin).stdout(output.map_or_else(Stdio::piped, Stdio::from)).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(GitError::Missing)?;
    if bounds.tight {
        limit_resources(&child);
    }
    let writer = child.stdin.take().map(|pipe| std::thread::spawn(move || feed(pipe, input)));
    let complaints = child.stderr.take().map(StderrReader::of);
    let watch = GitWatchdog::start(&child, bounds.time);
    let (said, whole) = match child.stdout.take() {
        Some(pipe) => read_up_to(pipe, OUTPUT_MAX),
        None => (Vec::new(), true),
    };
    if !whole {
        let _ = child.kill();
    }
    let status = child.wait().map_err(GitError::Missing)?;
    let late = watch.stop();
    let complaint = complaints.map(StderrReader::finish).unwrap_or_default();
    writer.map(JoinHandle::join);
    if late || !whole {
        return Err(GitError::Limit { verb });
    }
    if status.success() {
        return Ok(said);
    }
    Err(GitError::failed(verb, status.code(), &complaint))
}

fn feed(mut pipe: ChildStdin, input: GitInput) {
    let _ = match input {
        GitInput::Bytes(bytes) => pipe.write_all(&bytes),
        GitInput::Pack(head, mut rest) => {
            pipe.write_all(&head).and_then(|()| io::copy(&mut rest, &mut pipe).map(drop))
        }
        GitInput::File(_) => Ok(()),
    };
}

/// What it complains of, heard while it runs. All of it is read: the kernel ends whoever is not listened to.
struct StderrReader {
    heard: Arc<Mutex<HeadAndTail>>,
    /// Says nothing, and ends when there is nothing more to hear.
    over: mpsc::Receiver<()>,
}

impl StderrReader {
    fn of(mut pipe: ChildStderr) -> Self {
        let (end, over) = mpsc::channel::<()>();
        let heard = Arc::<Mutex<HeadAndTail>>::default();
        let listener = heard.clone();
        std::thread::spawn(move || {
            let (_end, mut piece) = (end, [0; 4096]);
            loop {
                match pipe.read(&mut piece) {
                    Ok(len) if len > 0 => lock(&listener).push(&piece[..len]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    _ => return,
                }
            }
        });
        Self { heard, over }
    }

    /// After its end. Whoever it left behind may still hold the pipe; what was said until now is what it said.
    fn finish(self) -> Vec<u8> {
        let _ = self.over.recv_timeout(COMPLAINT_PATIENCE);
        lock(&self.heard).text()
    }
}

/// The beginning and the end of what was said: why it failed is said last.
#[derive(Default)]
struct HeadAndTail {
    begin: Vec<u8>,
    end: Vec<u8>,
    left_out: bool,
}

impl HeadAndTail {
    fn push(&mut self, said: &[u8]) {
        let (first, rest) = said.split_at(said.len().min(COMPLAINT_MAX - self.begin.len()));
        self.begin.extend_from_slice(first);
        self.end.extend_from_slice(rest);
        if let Some(more) = self.end.len().checked_sub(COMPLAINT_MAX).filter(|more| *more > 0) {
            self.end.drain(..more);
            self.left_out = true;
        }
    }

    fn text(&self) -> Vec<u8> {
        let between: &[u8] = if self.left_out { b"\n...\n" } else { b"" };
        [&self.begin, between, &self.end].concat()
    }
}

fn lock(heard: &Mutex<HeadAndTail>) -> MutexGuard<'_, HeadAndTail> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Complaints in one line, made fit for a terminal.
fn shown(complaint: &[u8]) -> String {
    String::from_utf8_lossy(complaint).lines().map(proto::text::visible).collect::<Vec<_>>().join("; ")
}

/// Reads so much; false when there was more.
fn read_up_to(mut pipe: impl Read, max: u64) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let read = pipe.by_ref().take(max).read_to_end(&mut bytes);
    let more = read.is_ok() && bytes.len() as u64 == max && matches!(pipe.read(&mut [0]), Ok(1));
    (bytes, !more)
}

/// Before it has read anything: its input comes later.
pub fn limit_resources(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    for (resource, value) in
        [(Resource::As, TIGHT_MEMORY), (Resource::Fsize, TIGHT_FILE), (Resource::Core, 0)]
    {
        let _ =
            rustix::process::prlimit(pid, resource, Rlimit { current: Some(value), maximum: Some(value) });
    }
}

fn verb_of(command: &Command) -> String {
    let mut args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-c" | "-C" => drop(args.next()),
            arg if arg.starts_with("--git-dir=") || arg.starts_with("--work-tree=") => {}
            _ => return arg,
        }
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Vec<u8>, GitError> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        finish(command, GitInput::Bytes(Vec::new()), None, LOOSE)
    }

    #[test]
    fn one_that_complains_a_lot_is_heard_to_its_end() {
        // By the shell itself, which is ended where nobody listens.
        let warnings = "n=0; while [ $n -lt 20000 ]; do n=$((n+1)); echo $n >&2; done";
        assert_eq!(shell(&format!("{warnings}; echo done")).unwrap(), b"done\n");
        let refused = shell(&format!("echo first >&2; {warnings}; echo fatal: last >&2; exit 128"));
        let Err(GitError::Failed { code, said, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(code, Some(128));
        assert!(said.starts_with("first; 1; 2; ") && said.ends_with("; 20000; fatal: last"), "{said}");
        assert!(said.contains("; ...; ") && said.len() < 4 * COMPLAINT_MAX, "{} bytes", said.len());
    }

    #[test]
    fn why_git_said_no_is_read_from_its_own_words() {
        let cases: [(&str, GitReason); 8] = [
            (
                "error: file write error: No space left on device\nfatal: index-pack failed",
                GitReason::DiskFull,
            ),
            ("fatal: pathspec 'x: No space left on device.txt' did not match", GitReason::Other),
            ("Author identity unknown\n\n*** Please tell me who you are.\n\nRun\n", GitReason::NoIdentity),
            ("fatal: empty ident name (for <a@b>) not allowed", GitReason::NoIdentity),
            ("fatal: no email was given and auto-detection is disabled", GitReason::NoIdentity),
            ("fatal: not a git repository (or any of the parent directories): .git", GitReason::NoRepository),
            ("fatal: did not receive expected object 0123", GitReason::MissingObject),
            ("fatal: bad object HEAD", GitReason::Other),
        ];
        for (complaint, reason) in cases {
            assert_eq!(GitReason::of(complaint.as_bytes()), reason, "{complaint}");
        }
    }

    #[test]
    fn a_git_that_is_asked_gives_the_reason() {
        let dir = std::env::temp_dir();
        let env = vec![("GIT_CONFIG_NOSYSTEM".into(), "1".into())];
        let person = GitIdentity { home: "/nonexistent".into(), path: "/usr/bin:/bin".into(), env };
        let outside = run_in_directory(Path::new("/proc"), &person, ["rev-parse", "--git-dir"]).unwrap_err();
        assert_eq!(outside.reason(), Some(GitReason::NoRepository), "{outside}");
        let settings = ["-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"];
        let unnamed = run_in_directory(&dir, &person, settings).unwrap_err();
        assert_eq!(unnamed.reason(), Some(GitReason::NoIdentity), "{unnamed}");
    }

    #[test]
    fn whom_it_left_behind_is_not_waited_for() {
        let said = shell("sleep 600 >/dev/null & echo $!").unwrap();
        let pid = String::from_utf8(said).unwrap().trim().parse().ok().and_then(Pid::from_raw).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).expect("it is still there");
    }

    #[test]
    fn why_it_failed_is_told_also_where_it_left_somebody_behind() {
        let refused = shell("sleep 600 >/dev/null & echo fatal: $! >&2; exit 128");
        let Err(GitError::Failed { said, .. }) = refused else { panic!("{refused:?}") };
        let pid = said.strip_prefix("fatal: ").and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
        rustix::process::kill_process(pid.expect(&said), Signal::KILL).expect("it is still there");
    }
}
