//! Runs the host's git in one fixed way: no hooks, no foreign settings, no network, and limits on time,
//! output and memory.
//!
//! Invariant: in a repository of Palisade git reads no configuration but the one written here. In the user's
//! repository it reads that repository's own configuration, and the user's only when a [`GitIdentity`] is
//! given, for the author and the signature of commits that the user makes.
//! Invariant: the caller always names the repository (`--git-dir`); git never searches for it.

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

/// Longest run time of one git command.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Most bytes of output read from one git command.
const OUTPUT_MAX: u64 = 1 << 30;
/// How many bytes of stderr are kept, each of its beginning and of its end.
const STDERR_MAX: usize = 4 << 10;
/// How long to wait for stderr to close after git has ended: a process that git left running, such as a
/// shared SSH connection, may hold it open.
const STDERR_WAIT: Duration = Duration::from_secs(2);
/// Address space of a git that reads objects made by a Body.
const RLIMIT_MEMORY: u64 = 3 << 30;
/// Largest file that such a git may write.
const RLIMIT_FILE: u64 = 16 << 30;
/// Length of a pack's header: signature, version, number of objects.
const PACK_HEADER_LEN: usize = 12;
/// `PATH` of a git that runs without a user's identity.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Settings for every repository; they override the repository's own configuration.
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

/// The settings of [`SETTINGS`] that [`Git::user_ignore_rules`] drops, because a user may set them globally.
const USER_RULES: &[&str] = &["core.attributesFile=/dev/null", "core.excludesFile=/dev/null"];
/// Settings for a repository whose contents must survive a power failure.
const FSYNC_SETTINGS: &[&str] = &["core.fsync=all", "core.fsyncMethod=fsync"];
/// Settings for a repository that can be made again.
const NO_FSYNC_SETTINGS: &[&str] = &["core.fsync=none"];

/// Why a git command failed.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// The git program cannot be started.
    #[error("cannot run git")]
    Missing(#[source] io::Error),
    /// git exited with an error.
    #[error("git {verb} failed: {said}")]
    Failed {
        /// The git subcommand.
        verb: String,
        /// git's exit code; none if a signal ended it.
        code: Option<i32>,
        /// git's stderr in one line, escaped for a terminal.
        said: String,
        /// The cause, as far as callers handle it.
        reason: GitReason,
    },
    /// git exceeded its limit of time or output and was killed.
    #[error("git {verb} was ended: it took too long, or wrote too much")]
    Limit {
        /// The git subcommand.
        verb: String,
    },
    /// git printed output that Palisade cannot parse.
    #[error("git {0} printed output that Palisade cannot parse")]
    Answer(&'static str),
}

impl GitError {
    /// The error for a git that exited with `code` and printed `complaint` to stderr.
    fn failed(verb: String, code: Option<i32>, complaint: &[u8]) -> Self {
        Self::Failed { verb, code, said: escape_lines(complaint), reason: GitReason::of(complaint) }
    }

    /// The cause of a git that exited with an error.
    pub fn reason(&self) -> Option<GitReason> {
        match self {
            Self::Failed { reason, .. } => Some(*reason),
            _ => None,
        }
    }
}

/// The cause of a failed git, as far as callers handle it. git has one exit code for all of these and
/// distinguishes them only by message, so this type alone parses the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GitReason {
    /// The disk is full.
    DiskFull,
    /// git knows no name or e-mail address of the committer.
    NoIdentity,
    /// The directory is not in a repository.
    NoRepository,
    /// The repository lacks objects, as a partial clone does on purpose.
    MissingObject,
    /// Any other cause.
    Other,
}

impl GitReason {
    /// Finds the cause in git's stderr. Every git here prints English (`LC_ALL=C`). A message may contain a
    /// file name chosen by a Body, but never at the end of a line.
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

/// The user whose settings git reads besides the repository's own.
#[derive(Debug, Clone)]
pub struct GitIdentity {
    /// The user's home directory, which holds their git configuration.
    pub home: PathBuf,
    /// The user's `PATH`; signing a commit starts other programs.
    pub path: OsString,
    /// Further variables for the user's git: SSH and GPG agents, terminal, identity.
    pub env: Vec<(OsString, OsString)>,
}

/// A git command line for one repository, without its subcommand.
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
    /// Uses the repository at `dir`.
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

    /// Sets the work tree.
    #[must_use]
    pub fn files(mut self, work_tree: &Path) -> Self {
        self.work_tree = Some(work_tree.to_owned());
        self
    }

    /// Sets the index file.
    #[must_use]
    pub fn index(mut self, index: &Path) -> Self {
        self.index = Some(index.to_owned());
        self
    }

    /// Uses a user's identity and settings.
    #[must_use]
    pub fn identity(mut self, person: &GitIdentity) -> Self {
        self.person = Some(person.clone());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Limits memory and file size, for input that a Body made.
    #[must_use]
    pub fn rlimited(mut self) -> Self {
        self.tight = true;
        self
    }

    /// Syncs everything that git writes to disk before git ends.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.disk = FSYNC_SETTINGS;
        self
    }

    /// Writes without fsync.
    #[must_use]
    pub fn scratch(mut self) -> Self {
        self.disk = NO_FSYNC_SETTINGS;
        self
    }

    /// Kills git at the deadline `until`.
    #[must_use]
    pub fn deadline(mut self, until: Instant) -> Self {
        self.until = Some(until);
        self
    }

    /// Uses the user's global ignore file and attributes file.
    #[must_use]
    pub fn user_ignore_rules(mut self) -> Self {
        self.own_rules = true;
        self
    }

    /// The directory of the repository.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The complete command, for callers that manage its pipes themselves.
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
        let own = |setting: &&&str| !(self.own_rules && USER_RULES.contains(setting));
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

    /// Runs a subcommand and returns its stdout.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<Vec<u8>, GitError> {
        self.feed(args, Vec::new())
    }

    /// Runs a subcommand and returns its stdout as text, without the last line break.
    pub fn line<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<String, GitError> {
        let said = self.run(args)?;
        Ok(String::from_utf8_lossy(&said).trim_end_matches('\n').to_owned())
    }

    /// Runs a subcommand with bytes as its stdin.
    pub fn feed<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: Vec<u8>,
    ) -> Result<Vec<u8>, GitError> {
        let command = self.command(args);
        finish(command, GitInput::Bytes(input), None, self.bounds())
    }

    /// Runs a subcommand with a file as its stdin.
    pub fn feed_file<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: File,
    ) -> Result<Vec<u8>, GitError> {
        let command = self.command(args);
        finish(command, GitInput::File(input), None, self.bounds())
    }

    /// Runs a subcommand that writes its stdout to a file.
    pub fn fill<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: Vec<u8>,
        output: File,
    ) -> Result<(), GitError> {
        let command = self.command(args);
        finish(command, GitInput::Bytes(input), Some(output), self.bounds()).map(drop)
    }

    /// Runs a subcommand that prints a pack, and pipes the pack into a subcommand of `taker`. An empty pack
    /// starts no second git.
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
        let mut head = [0; PACK_HEADER_LEN];
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
        // The receiving git fails on a truncated pack, too; the error of the sending git explains why it was
        // truncated.
        match (late, status.success()) {
            (true, _) => Err(GitError::Limit { verb }),
            // A sender without an exit code was killed by SIGPIPE because the receiver failed: report the
            // receiver's error.
            (_, false) if status.code().is_some() => Err(GitError::failed(verb, status.code(), &complaint)),
            _ => taken,
        }
    }

    fn bounds(&self) -> GitLimits {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        GitLimits { tight: self.tight, time: left.unwrap_or(TIME_MAX).min(TIME_MAX) }
    }
}

/// Resource limits of one git.
#[derive(Debug, Clone, Copy)]
struct GitLimits {
    tight: bool,
    time: Duration,
}

/// Limits of a git that reads only the user's data.
const UNLIMITED_MEMORY: GitLimits = GitLimits { tight: false, time: TIME_MAX };

/// Runs git in a directory of the user and lets git find the repository, as the user's own command would.
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
    finish(command, GitInput::Bytes(Vec::new()), None, UNLIMITED_MEMORY)
}

/// git as the user would call it: with the user's settings and network access.
fn git_as_user(person: &GitIdentity) -> Command {
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
    // `ext::` addresses run a command, so git must refuse them.
    command.args(["-c", "protocol.ext.allow=never"]);
    command
}

/// Clones an address of the user's choice, with the user's credentials and network settings.
pub fn clone_bare(url: &str, to: &Path, person: &GitIdentity) -> Result<(), GitError> {
    let mut command = git_as_user(person);
    command.args(["clone", "--quiet", "--bare", "--"]).arg(url).arg(to);
    finish(command, GitInput::Bytes(Vec::new()), None, UNLIMITED_MEMORY).map(drop)
}

/// Updates a clone that Palisade made: fetches all branches of its remote and keeps Palisade's own refs.
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
    finish(command, GitInput::Bytes(Vec::new()), None, UNLIMITED_MEMORY).map(drop)
}

/// Fetches objects that a partial clone lacks; `ids` has one on each line. git itself does the same when it
/// needs one.
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
    finish(command, GitInput::Bytes(ids.into_bytes()), None, UNLIMITED_MEMORY).map(drop)
}

/// git in a repository of the host, with the user's credentials and network settings.
fn network_git(dir: &Path, person: &GitIdentity) -> Command {
    let mut command = git_as_user(person);
    let mut place = OsString::from("--git-dir=");
    place.push(dir);
    command.arg(place);
    command
}

enum GitInput {
    Bytes(Vec<u8>),
    File(File),
    /// A pack whose header was read already.
    Pack([u8; PACK_HEADER_LEN], ChildStdout),
}

/// A thread that kills a git which exceeds its time limit.
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

    /// Stops the thread; returns whether it killed the process.
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

/// Reads git's stderr to its end while git runs: if nothing read the pipe, git would block on it or die of
/// SIGPIPE.
struct StderrReader {
    heard: Arc<Mutex<HeadAndTail>>,
    /// Disconnects when stderr has been read to its end.
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

    /// Returns stderr after git has ended. A process that git left running may hold the pipe open, so this
    /// waits only briefly and returns the text read so far.
    fn finish(self) -> Vec<u8> {
        let _ = self.over.recv_timeout(STDERR_WAIT);
        lock(&self.heard).text()
    }
}

/// Keeps the beginning and the end of a text, because git prints the reason of a failure last.
#[derive(Default)]
struct HeadAndTail {
    begin: Vec<u8>,
    end: Vec<u8>,
    left_out: bool,
}

impl HeadAndTail {
    fn push(&mut self, said: &[u8]) {
        let (first, rest) = said.split_at(said.len().min(STDERR_MAX - self.begin.len()));
        self.begin.extend_from_slice(first);
        self.end.extend_from_slice(rest);
        if let Some(more) = self.end.len().checked_sub(STDERR_MAX).filter(|more| *more > 0) {
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

/// Joins the lines of stderr, escaped for a terminal.
fn escape_lines(complaint: &[u8]) -> String {
    String::from_utf8_lossy(complaint).lines().map(proto::text::visible).collect::<Vec<_>>().join("; ")
}

/// Reads at most `max` bytes; returns false if there were more.
fn read_up_to(mut pipe: impl Read, max: u64) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let read = pipe.by_ref().take(max).read_to_end(&mut bytes);
    let more = read.is_ok() && bytes.len() as u64 == max && matches!(pipe.read(&mut [0]), Ok(1));
    (bytes, !more)
}

/// Limits a child right after its start; it has read no input yet, because its stdin is written later.
pub fn limit_resources(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    for (resource, value) in
        [(Resource::As, RLIMIT_MEMORY), (Resource::Fsize, RLIMIT_FILE), (Resource::Core, 0)]
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
        finish(command, GitInput::Bytes(Vec::new()), None, UNLIMITED_MEMORY)
    }

    #[test]
    fn long_stderr_is_read_to_its_end() {
        // The shell's builtin `echo` writes, so the shell itself would die of SIGPIPE if its stderr were not
        // read.
        let warnings = "n=0; while [ $n -lt 20000 ]; do n=$((n+1)); echo $n >&2; done";
        assert_eq!(shell(&format!("{warnings}; echo done")).unwrap(), b"done\n");
        let refused = shell(&format!("echo first >&2; {warnings}; echo fatal: last >&2; exit 128"));
        let Err(GitError::Failed { code, said, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(code, Some(128));
        assert!(said.starts_with("first; 1; 2; ") && said.ends_with("; 20000; fatal: last"), "{said}");
        assert!(said.contains("; ...; ") && said.len() < 4 * STDERR_MAX, "{} bytes", said.len());
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
    fn real_failures_have_their_reason() {
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
    fn a_background_child_is_not_waited_for() {
        let said = shell("sleep 600 >/dev/null & echo $!").unwrap();
        let pid = String::from_utf8(said).unwrap().trim().parse().ok().and_then(Pid::from_raw).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).expect("it is still there");
    }

    #[test]
    fn a_failure_is_reported_despite_a_background_child() {
        let refused = shell("sleep 600 >/dev/null & echo fatal: $! >&2; exit 128");
        let Err(GitError::Failed { said, .. }) = refused else { panic!("{refused:?}") };
        let pid = said.strip_prefix("fatal: ").and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
        rustix::process::kill_process(pid.expect(&said), Signal::KILL).expect("it is still there");
    }
}
