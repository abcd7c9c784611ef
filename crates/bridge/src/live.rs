//! Live updates of a driver, as lines of JSON over a socket in the agent's directory.
//!
//! Invariant: a watcher that is slow, absent or gone never holds the driver up. Updates may be lost; the log has
//! everything that counts.
//! Invariant: the socket is bound with the first update. Only a driver that holds the agent's lock has updates, so a
//! process that finds the agent taken never takes the socket from the one that drives it.

use std::{
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use brain::agent::{LiveSink, LiveUpdate};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{UnixListener, UnixStream},
    sync::broadcast,
    task::AbortHandle,
};

/// The name of the socket.
const SOCKET: &str = "live.sock";
/// How many updates a slow watcher may lag behind.
const LAG_MAX: usize = 1024;

/// A channel for the updates of one agent.
pub fn live_channel() -> broadcast::Sender<Arc<str>> {
    broadcast::channel(LAG_MAX).0
}

/// Sends the updates of one driver to all its watchers, until it is dropped.
pub struct LiveSocket {
    directory: PathBuf,
    updates: broadcast::Sender<Arc<str>>,
    /// The task that accepts watchers; none if the socket could not be bound.
    accepting: OnceLock<Option<AbortHandle>>,
}

impl LiveSocket {
    /// Listens in the directory of an agent, which is created, from the first update on.
    pub fn listen(directory: &Path) -> io::Result<Arc<Self>> {
        Self::listen_through(directory, live_channel())
    }

    /// Listens in the directory of an agent; watchers of this process subscribe to the channel. Each update is JSON.
    pub fn listen_through(directory: &Path, updates: broadcast::Sender<Arc<str>>) -> io::Result<Arc<Self>> {
        std::fs::create_dir_all(directory)?;
        Ok(Arc::new(Self { directory: directory.to_owned(), updates, accepting: OnceLock::new() }))
    }

    fn accept(&self) -> io::Result<AbortHandle> {
        match std::fs::remove_file(self.directory.join(SOCKET)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = with_short_path(&self.directory, |path| UnixListener::bind(path))?;
        let sender = self.updates.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, sender.subscribe()));
            }
        });
        Ok(accepting.abort_handle())
    }
}

impl LiveSink for LiveSocket {
    fn update(&self, update: LiveUpdate) {
        self.accepting.get_or_init(|| self.accept().ok());
        if self.updates.receiver_count() == 0 {
            return;
        }
        if let Ok(line) = serde_json::to_string(&update) {
            let _ = self.updates.send(line.into());
        }
    }
}

impl Drop for LiveSocket {
    fn drop(&mut self) {
        // The task has a sender; without any sender the watchers see the end.
        if let Some(Some(accepting)) = self.accepting.get() {
            accepting.abort();
        }
    }
}

async fn serve(mut stream: UnixStream, mut updates: broadcast::Receiver<Arc<str>>) {
    loop {
        let line = match updates.recv().await {
            Ok(line) => line,
            Err(broadcast::error::RecvError::Lagged(_)) => continue,
            Err(broadcast::error::RecvError::Closed) => return,
        };
        if stream.write_all(format!("{line}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Connects to the driver of an agent; none if there is no driver.
pub fn watch_live(directory: &Path) -> Option<Lines<BufReader<UnixStream>>> {
    let stream = with_short_path(directory, |path| std::os::unix::net::UnixStream::connect(path)).ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(BufReader::new(UnixStream::from_std(stream).ok()?).lines())
}

/// Calls a function with a path of the socket that fits into a socket address, however deep the directory is.
fn with_short_path<T>(directory: &Path, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let opened = std::fs::File::open(directory)?;
    act(&PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd())))
}
