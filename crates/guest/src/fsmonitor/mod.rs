//! Reports changed files of a workspace to git (`core.fsmonitor`), so that git does not have to stat every file.
//!
//! git runs a small program ([`ask`]), which queries the guest over an abstract Unix socket. The guest reads the
//! overlay's upper through a read-only detached mount of its own, which is in no mount table.
//!
//! Invariant: it fails towards slow and correct: in doubt, it answers that every file may have changed.
//! Trust: callers are hostile. Only the workspace's owner and root get an answer, so a caller learns only names of
//! files that it could list itself.

mod ask;
mod since;
mod walk;

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::MetadataExt,
            net::{SocketAddr, UnixListener as StdListener},
        },
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use since::{FsmonitorAnswer, OverlayHistory};
use walk::CoveredDirs;

pub use ask::main as ask;

/// The abstract name of the socket.
const SOCKET: &str = "palisade-changes";
/// Queries at once; further ones wait.
const QUESTIONS_MAX: usize = 4;
/// Longest query: device, inode, and a token that this guest or git generated.
const QUESTION_LEN_MAX: u64 = 1024;
/// How long a caller may take to send its query, and to read the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// An overlay whose changes the guest reports.
#[derive(Debug)]
pub struct FollowedOverlay {
    /// Its mount point, without the leading `/`.
    pub at: String,
    /// The token for the unmodified state of its layers.
    pub token: String,
    /// Its upper directory.
    pub upper: OwnedFd,
    /// Its lower directories, nearest first.
    pub lowers: Vec<OwnedFd>,
    /// How many of the lower directories lie above the repository's own layers.
    pub above: usize,
}

#[derive(Debug)]
struct TrackedOverlay {
    followed: FollowedOverlay,
    memory: Mutex<OverlayHistory>,
}

/// Answers queries for as long as the guest runs. If it cannot, git stats every file.
pub async fn serve(followed: Vec<FollowedOverlay>) {
    let Ok(listener) = listen() else { return };
    let areas: Result<Vec<TrackedOverlay>, io::Error> =
        followed.into_iter().map(TrackedOverlay::begin).collect();
    let Ok(areas) = areas.map(Arc::new) else { return };
    let free = Arc::new(Semaphore::new(QUESTIONS_MAX));
    loop {
        let Ok(turn) = free.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let areas = areas.clone();
                tokio::task::spawn_local(async move {
                    let _ = tokio::time::timeout(PATIENCE, answer(areas, stream, turn)).await;
                });
            }
            Err(_) => tokio::time::sleep(PATIENCE).await,
        }
    }
}

fn listen() -> io::Result<UnixListener> {
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Answers one query: device and inode of the caller's directory, a zero byte, a token. A malformed query gets no
/// answer.
async fn answer(
    areas: Arc<Vec<TrackedOverlay>>,
    mut stream: UnixStream,
    turn: OwnedSemaphorePermit,
) -> io::Result<()> {
    let user = stream.peer_cred()?.uid();
    let mut question = Vec::new();
    (&mut stream).take(QUESTION_LEN_MAX).read_to_end(&mut question).await?;
    let reply = tokio::task::spawn_blocking(move || {
        // The next query waits until this one has ended, even if its caller has left meanwhile.
        let _turn = turn;
        let (place, token) = parse(&question)?;
        let area = areas.iter().find(|area| area.is_at(place, user))?;
        area.answer_query(token)
    });
    if let Some(reply) = reply.await.ok().flatten() {
        // The length comes first, so that the caller never takes a part of the answer for the whole.
        stream.write_all(&(reply.len() as u64).to_be_bytes()).await?;
        stream.write_all(&reply).await?;
    }
    Ok(())
}

fn parse(question: &[u8]) -> Option<((u64, u64), &str)> {
    let (place, token) = std::str::from_utf8(question).ok()?.split_once('\0')?;
    let (device, inode) = place.split_once(' ')?;
    Some(((device.parse().ok()?, inode.parse().ok()?), token))
}

impl TrackedOverlay {
    fn begin(followed: FollowedOverlay) -> io::Result<Self> {
        let memory = OverlayHistory::new(followed.token.clone(), life()?, now());
        Ok(Self { followed, memory: Mutex::new(memory) })
    }

    /// Whether the directory is this overlay's mount point and the user may list it.
    fn is_at(&self, place: (u64, u64), user: u32) -> bool {
        let found = std::fs::metadata(format!("/{}", self.followed.at));
        found.is_ok_and(|found| (found.dev(), found.ino()) == place && (user == 0 || found.uid() == user))
    }

    /// The answer for git: the token of this moment, then the paths, each followed by a zero byte.
    fn answer_query(&self, token: &str) -> Option<Vec<u8>> {
        let mut memory = self.remember();
        let answer = match self.look() {
            Some((upper, above)) => memory.answer(token, now(), upper, &above),
            None => {
                memory.forget(life().ok()?);
                FsmonitorAnswer::All
            }
        };
        if memory.is_full() {
            memory.forget(life().ok()?);
        }
        Some(ask::encode_token(&memory.token(), &answer))
    }

    fn remember(&self) -> MutexGuard<'_, OverlayHistory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) -> Option<(walk::UpperListing, Vec<Vec<u8>>)> {
        let begun = Instant::now();
        let FollowedOverlay { upper, lowers, above, .. } = &self.followed;
        let upper = walk::look(upper.as_fd(), lowers, CoveredDirs::Dirs, begun).ok()?;
        let mut more = Vec::new();
        for (layer, below) in lowers.iter().zip(1..).take(*above) {
            // Lower layers never change, and git remembers no names in them before its first query.
            more.extend(walk::look(layer.as_fd(), &lowers[below..], CoveredDirs::Nothing, begun).ok()?.paths);
        }
        Some((upper, more))
    }
}

fn life() -> io::Result<String> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_be_bytes(bytes)))
}

fn now() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i128)
}
