//! Downloads of blobs: into a file next to the layers, resumable after an interruption, verified by digest at the end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hyper::{StatusCode, header};
use oci_spec::image::Digest;
use proto::{Size, event::hex};
use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};

use super::{
    registry::{RegistryClient, RegistryError, sha256},
    web::{self, WebError},
};
use crate::templates::ProgressFn;

/// Most consecutive attempts that bring no new byte.
const ATTEMPTS_MAX: u32 = 5;
const ATTEMPTS_IN_ALL_MAX: u32 = 100;
const PAUSE: Duration = Duration::from_millis(500);
const TOLD_EVERY: Duration = Duration::from_secs(3);
const LOCK_PAUSE: Duration = Duration::from_millis(100);
const CHUNK: usize = 256 << 10;

/// A blob's file, locked against every other `pal` on this data directory.
pub struct Blob {
    file: File,
    path: PathBuf,
}

/// The bytes of a blob that are on disk, and their digest so far.
#[derive(Default)]
struct BlobProgress {
    bytes: u64,
    hasher: Sha256,
}

impl BlobProgress {
    fn take(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        self.bytes += piece.len() as u64;
    }
}

impl Blob {
    /// Opens and locks the file of a blob, with the bytes that an earlier attempt left. Waits while another process
    /// holds the lock. Each registry has its own file, so a registry that never finishes does not block the same blob
    /// from another.
    pub async fn take(dir: &Path, host: &str, digest: &Digest) -> Result<Self, RegistryError> {
        fs::create_dir_all(dir)?;
        let from = hex(&Sha256::digest(host)[..8]);
        let path = dir.join(format!("{}.{from}.part", sha256(digest)?));
        loop {
            let file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous holder may have removed the file: then the path has another file, or none.
                Ok(()) if is_at(&file, &path) => return Ok(Self { file, path }),
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => tokio::time::sleep(LOCK_PAUSE).await,
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
    }

    /// Downloads the whole blob and verifies its digest.
    pub async fn fetch(
        &mut self,
        registry: &RegistryClient,
        digest: &Digest,
        size: u64,
        what: &str,
        say: ProgressFn<'_>,
    ) -> Result<(), RegistryError> {
        let resumed = self.file.metadata()?.len() > 0;
        if self.fetch_once(registry, digest, size, what, say).await? {
            return Ok(());
        }
        // The bytes of an earlier attempt may be the corrupt ones, so one more attempt starts from the beginning.
        if resumed && self.fetch_once(registry, digest, size, what, say).await? {
            return Ok(());
        }
        Err(registry.forged(digest.as_ref()))
    }

    /// Downloads the rest and returns whether the digest matches; if not, it empties the file.
    async fn fetch_once(
        &mut self,
        registry: &RegistryClient,
        digest: &Digest,
        size: u64,
        what: &str,
        say: ProgressFn<'_>,
    ) -> Result<bool, RegistryError> {
        let mut arrived = BlobProgress::default();
        self.read_back(&mut arrived, size)?;
        let (mut attempt, mut all) = (1, 0);
        while arrived.bytes < size {
            let before = arrived.bytes;
            all += 1;
            match self
                .more(registry, digest, size, &mut arrived, &mut |have| {
                    say(&format!("{what}: {} of {}", Size(have), Size(size)))
                })
                .await
            {
                Ok(()) => {}
                Err(error) if error.may_pass() && attempt < ATTEMPTS_MAX && all < ATTEMPTS_IN_ALL_MAX => {
                    say(&format!("{what}: {error}; going on from {}", Size(arrived.bytes)));
                    attempt = if arrived.bytes > before { 1 } else { attempt + 1 };
                    tokio::time::sleep(PAUSE * attempt).await;
                }
                Err(error) => return Err(error),
            }
        }
        let proved = hex(&arrived.hasher.finalize()) == sha256(digest)?;
        if !proved {
            self.file.set_len(0)?;
        }
        Ok(proved)
    }

    /// Hashes the bytes that an earlier attempt left.
    fn read_back(&mut self, arrived: &mut BlobProgress, size: u64) -> io::Result<()> {
        if self.file.metadata()?.len() > size {
            self.file.set_len(0)?;
        }
        self.file.rewind()?;
        let mut buffer = vec![0; CHUNK];
        loop {
            match self.file.read(&mut buffer)? {
                0 => return Ok(()),
                len => arrived.take(&buffer[..len]),
            }
        }
    }

    async fn more(
        &mut self,
        registry: &RegistryClient,
        digest: &Digest,
        size: u64,
        arrived: &mut BlobProgress,
        tell: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), RegistryError> {
        let response = registry.blob(digest, arrived.bytes).await?;
        let from = response
            .headers()
            .get(header::CONTENT_RANGE)
            .and_then(|range| range.to_str().ok())
            .and_then(begins_at);
        let goes_on = response.status() == StatusCode::PARTIAL_CONTENT && from == Some(arrived.bytes);
        if arrived.bytes > 0 && !goes_on {
            self.file.set_len(0)?;
            *arrived = BlobProgress::default();
        }
        let host = registry.host().to_owned();
        let mut body = response.into_body();
        let mut told = Instant::now();
        while let Some(piece) = web::piece(&mut body, &host).await? {
            if arrived.bytes + piece.len() as u64 > size {
                self.remove();
                return Err(WebError::TooMuch(host).into());
            }
            self.file.write_all(&piece)?;
            arrived.take(&piece);
            if told.elapsed() >= TOLD_EVERY {
                tell(arrived.bytes);
                told = Instant::now();
            }
        }
        // An answer that ends too early is a broken connection, even if it ended cleanly.
        if arrived.bytes < size { Err(WebError::Silent(host).into()) } else { Ok(()) }
    }

    /// Opens the file for reading from its beginning.
    pub fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Removes the file.
    pub fn remove(&self) {
        let _ = self.file.set_len(0);
        let _ = fs::remove_file(&self.path);
    }
}

/// Parses the offset at which a part of a blob begins: `bytes 5-9/10`.
fn begins_at(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}

fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs::metadata(path).ok()).is_some_and(|(a, b)| same(a, b))
}
