//! Tells git what was changed in a workspace, so that it need not look at every file (`core.fsmonitor`).
//!
//! git runs a small program ([`ask`]), which asks the guest over a socket that has a name and no file. The guest looks at
//! the area's upper through a mount of its own that may not be written and is in no table.
//!
//! Invariant: the direction of failure is slow and right. Whoever is not sure says that all may have changed.
//! Trust: whoever asks is hostile, and learns names only of files that it could list itself: the workspace's owner and
//! root are answered, nobody else.

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

/// The socket's name.
const SOCKET: &str = "palisade-changes";
/// Questions at once; more wait.
const QUESTIONS_MAX: usize = 4;
/// Longest question: where it is asked, and a name that this guest or git gave.
const QUESTION_LEN_MAX: u64 = 1024;
/// How long a question may take to be asked, and an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(1);

/// An area that is to be followed.
#[derive(Debug)]
pub struct FollowedOverlay {
    /// Where it is, without a leading `/`.
    pub at: String,
    /// What the state of its layers is called.
    pub token: String,
    /// Its upper.
    pub upper: OwnedFd,
    /// What lies below it, nearest first.
    pub lowers: Vec<OwnedFd>,
    /// How many of those lie above its layers.
    pub above: usize,
}

#[derive(Debug)]
struct TrackedOverlay {
    followed: FollowedOverlay,
    memory: Mutex<OverlayHistory>,
}

/// Answers for as long as the guest lives. Where it cannot, git looks at every file.
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

/// One question: device and inode of where it is asked, a zero, the name of a moment. Nothing is said to one that makes no
/// sense.
async fn answer(
    areas: Arc<Vec<TrackedOverlay>>,
    mut stream: UnixStream,
    turn: OwnedSemaphorePermit,
) -> io::Result<()> {
    let user = stream.peer_cred()?.uid();
    let mut question = Vec::new();
    (&mut stream).take(QUESTION_LEN_MAX).read_to_end(&mut question).await?;
    let said = tokio::task::spawn_blocking(move || {
        // Whether anybody still waits for it or not, nobody else begins before this one has ended.
        let _turn = turn;
        let (place, token) = parse(&question)?;
        let area = areas.iter().find(|area| area.is_at(place, user))?;
        area.answer_query(token)
    });
    if let Some(said) = said.await.ok().flatten() {
        // How long it is comes first, so that a part is never taken for the whole.
        stream.write_all(&(said.len() as u64).to_be_bytes()).await?;
        stream.write_all(&said).await?;
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

    /// Whether that place is this area, and somebody's who may list it.
    fn is_at(&self, place: (u64, u64), user: u32) -> bool {
        let found = std::fs::metadata(format!("/{}", self.followed.at));
        found.is_ok_and(|found| (found.dev(), found.ino()) == place && (user == 0 || found.uid() == user))
    }

    /// What git is told: the name of this moment and paths, each with a zero behind it.
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
            // It never changes, and git remembers no names of it before it has asked.
            more.extend(walk::look(layer.as_fd(), &lowers[below..], CoveredDirs::Nothing, begun).ok()?.paths);
        }
        Some((upper, more))
    }
}

fn life() -> io::Result<String> {
    let mut drawn = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut drawn)?;
    Ok(format!("{:016x}", u64::from_be_bytes(drawn)))
}

fn now() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i128)
}
