//! Starts a program and waits for it, as cheaply as possible: `posix_spawn` and `wait4`.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::namespace;

/// The directories that are searched for a program.
const PATH: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
const PATIENCE: Duration = Duration::from_secs(20);

/// The mount namespace of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunPlace {
    /// The caller's.
    Here,
    /// One without `/sys/fs/cgroup/unified`, which crun refuses.
    WithoutUnified,
}

/// A command line; `{id}` in it becomes a new name each time.
#[derive(Debug, Clone)]
pub struct CommandLine {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its mount namespace.
    pub place: RunPlace,
    /// Variables besides those of this process.
    pub env: Vec<(String, PathBuf)>,
}

impl CommandLine {
    /// A command line of these words.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self { argv: argv.into_iter().map(Into::into).collect(), place: RunPlace::Here, env: Vec::new() }
    }

    /// Appends words.
    pub fn and<S: Into<String>>(mut self, more: impl IntoIterator<Item = S>) -> Self {
        self.argv.extend(more.into_iter().map(Into::into));
        self
    }

    /// Sets the mount namespace.
    pub fn at(mut self, place: RunPlace) -> Self {
        self.place = place;
        self
    }

    /// Runs it without output and returns the time.
    pub fn time(&self) -> io::Result<Duration> {
        match self.place {
            RunPlace::Here => self.time_here(),
            RunPlace::WithoutUnified => namespace::without_unified(|| self.time_here()),
        }
    }

    /// Runs it in the caller's mount namespace and returns the time.
    pub fn time_here(&self) -> io::Result<Duration> {
        let mut command = self.command()?;
        let began = Instant::now();
        let status = command.spawn()?.wait()?;
        let took = began.elapsed();
        match status.success() {
            true => Ok(took),
            false => Err(io::Error::other(format!("{} ended with {status}", self.program()))),
        }
    }

    /// Runs it and returns its output.
    pub fn output(&self) -> io::Result<String> {
        match self.place {
            RunPlace::Here => self.output_here(),
            RunPlace::WithoutUnified => namespace::without_unified(|| self.output_here()),
        }
    }

    fn output_here(&self) -> io::Result<String> {
        let child = self.command()?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (good, out, errors) = gather(child)?;
        match good {
            true => Ok(out),
            false => Err(io::Error::other(
                last_words(&errors).unwrap_or_else(|| format!("{} failed silently", self.program())),
            )),
        }
    }

    /// Starts it; the caller must end it.
    pub fn start(&self) -> io::Result<Child> {
        match self.place {
            RunPlace::Here => self.command()?.spawn(),
            RunPlace::WithoutUnified => namespace::without_unified(|| self.command()?.spawn()),
        }
    }

    fn program(&self) -> &str {
        self.argv.first().map(String::as_str).unwrap_or_default()
    }

    fn command(&self) -> io::Result<Command> {
        let name = new_name();
        let mut words = self.argv.iter().map(|word| word.replace("{id}", &name));
        let program = words.next().ok_or_else(|| io::Error::other("no program"))?;
        let mut command = Command::new(
            find(&program).ok_or_else(|| io::Error::other(format!("{program} is not installed")))?,
        );
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

fn new_name() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("palbench{}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The path of a program, if it is installed.
pub fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| path.exists());
    }
    PATH.iter().map(|dir| Path::new(dir).join(program)).find(|path| path.is_file())
}

/// Waits with a time limit; kills a program that exceeds it, by its pid.
fn gather(mut child: Child) -> io::Result<(bool, String, String)> {
    let (out, errors) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!("it did not end within {} s", PATIENCE.as_secs())));
        }
        thread::sleep(Duration::from_millis(1));
    };
    let text = |reader: thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned()
    };
    Ok((status.success(), text(out), text(errors)))
}

fn reader(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.map(|mut from| from.read_to_end(&mut bytes));
        bytes
    })
}

fn last_words(errors: &str) -> Option<String> {
    let line = errors.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.trim().chars().take(160).collect())
}
