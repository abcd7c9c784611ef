//! Artifacts: what is too large for an event, kept once under its SHA-256.
//!
//! Invariant: a file under its final name is complete; it is written under another name and renamed.
//! Invariant: whoever writes holds a lock on the unfinished file, so [`Store::sweep_artifacts`] can tell what a killed
//! process left behind from what is being written.
//! Trust: a reference may come from an event that a Body caused; it becomes a path only if it is 64 hex digits.
//! Absent on purpose: knowing which artifacts are still wanted. The caller reads the log and removes the others, while
//! nobody writes.

use std::{
    collections::hash_map::RandomState,
    fs::{self, File, OpenOptions},
    hash::BuildHasher,
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use proto::event::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Store, open::Durability};

const UNFINISHED: &str = "tmp-";
const SHA256_LEN: usize = 64;
const READ_LEN: usize = 64 * 1024;

/// Names an artifact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ArtifactRef {
    /// Its SHA-256 in lower-case hexadecimal.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
}

/// Why an artifact could not be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// No such artifact.
    #[error("there is no artifact {sha256}")]
    Missing {
        /// Its hash.
        sha256: String,
    },
    /// The name is none.
    #[error("{0:?} does not name an artifact: 64 hexadecimal digits do")]
    Name(String),
    /// It is not what was written.
    #[error("artifact {sha256} is damaged")]
    Damaged {
        /// The hash that it should have.
        sha256: String,
    },
    /// No room.
    #[error("the disk of the artifacts is full")]
    DiskFull,
    /// Opened for reading.
    #[error("the store was opened for reading only")]
    ReadOnly,
    /// What the kernel said.
    #[error("cannot use {path}")]
    File {
        /// Which file or directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Where artifacts are and how safe they have to be.
#[derive(Debug)]
pub(crate) struct Artifacts {
    dir: PathBuf,
    durability: Durability,
}

impl Artifacts {
    pub(crate) fn new(data: &Path, durability: Durability) -> Self {
        Self { dir: data.join("artifacts"), durability }
    }

    fn path(&self, sha256: &str) -> Result<PathBuf, ArtifactError> {
        if !is_sha256(sha256) {
            return Err(ArtifactError::Name(sha256.chars().take(SHA256_LEN + 1).collect()));
        }
        Ok(self.dir.join(&sha256[..2]).join(sha256))
    }
}

impl Store {
    /// Begins an artifact. It is kept once [`ArtifactWriter::finish`] returns.
    pub fn artifact(&self) -> Result<ArtifactWriter, ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        ArtifactWriter::begin(&self.artifacts)
    }

    /// Opens an artifact for reading. Its length is checked, its contents are not: see [`Store::verify_artifact`].
    pub fn open_artifact(&self, wanted: &ArtifactRef) -> Result<File, ArtifactError> {
        let path = self.artifacts.path(&wanted.sha256)?;
        let file = File::open(&path).map_err(|source| failed(&path, &wanted.sha256, source))?;
        let found = file.metadata().map_err(|source| failed(&path, &wanted.sha256, source))?;
        if found.is_file() && found.len() == wanted.bytes { Ok(file) } else { Err(damaged(wanted)) }
    }

    /// Reads all of an artifact and compares it with its name.
    pub fn verify_artifact(&self, wanted: &ArtifactRef) -> Result<(), ArtifactError> {
        let mut file = self.open_artifact(wanted)?;
        let mut hasher = Sha256::new();
        let mut piece = vec![0; READ_LEN];
        loop {
            match file.read(&mut piece) {
                Ok(0) => break,
                Ok(len) => hasher.update(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(failed(&self.artifacts.path(&wanted.sha256)?, &wanted.sha256, error));
                }
            }
        }
        if hex(&hasher.finalize()) == wanted.sha256 { Ok(()) } else { Err(damaged(wanted)) }
    }

    /// All artifacts, in the order of their hashes.
    pub fn artifacts(&self) -> Result<Vec<ArtifactRef>, ArtifactError> {
        let mut found = Vec::new();
        for (name, dir) in entries(&self.artifacts.dir)? {
            if name.len() != 2 {
                continue;
            }
            for (sha256, path) in entries(&dir)? {
                // Whatever else lies here is not ours, and what is gone meanwhile was removed by somebody.
                let Ok(file) = path.symlink_metadata() else { continue };
                if is_sha256(&sha256) && sha256.starts_with(&name) && file.is_file() {
                    found.push(ArtifactRef { sha256, bytes: file.len() });
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes an artifact; one that is not there is removed already.
    pub fn remove_artifact(&self, unwanted: &ArtifactRef) -> Result<(), ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        let path = self.artifacts.path(&unwanted.sha256)?;
        remove(&path)
    }

    /// Removes what processes that were killed left unfinished, and says how many bytes that were.
    pub fn sweep_artifacts(&self) -> Result<u64, ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        let mut bytes = 0;
        for (name, path) in entries(&self.artifacts.dir)? {
            if !name.starts_with(UNFINISHED) {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            // Locked: somebody is writing it.
            if file.try_lock().is_ok() {
                bytes += file.metadata().map_or(0, |file| file.len());
                remove(&path)?;
            }
        }
        Ok(bytes)
    }
}

/// An artifact while it is written. Dropped before [`finish`](Self::finish), it leaves nothing behind.
#[derive(Debug)]
pub struct ArtifactWriter {
    file: File,
    unfinished: PartialArtifact,
    dir: PathBuf,
    durability: Durability,
    hasher: Sha256,
    bytes: u64,
}

impl ArtifactWriter {
    fn begin(artifacts: &Artifacts) -> Result<Self, ArtifactError> {
        let Artifacts { dir, durability } = artifacts;
        loop {
            // The randomness only avoids clashes; `create_new` is what decides.
            let random = RandomState::new().hash_one(std::process::id());
            let path = dir.join(format!("{UNFINISHED}{random:016x}"));
            // What is kept is never written again, and the mode says so; this descriptor may write all the same.
            match OpenOptions::new().write(true).create_new(true).mode(0o400).open(&path) {
                Ok(file) => {
                    let unfinished = PartialArtifact(path);
                    if is_swept(&file).map_err(|source| fault(&unfinished.0, source))? {
                        continue;
                    }
                    let (dir, durability) = (dir.clone(), *durability);
                    return Ok(Self { file, unfinished, dir, durability, hasher: Sha256::new(), bytes: 0 });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => make_dir(dir)?,
                Err(error) => return Err(fault(&path, error)),
            }
        }
    }

    /// Keeps the artifact under its hash.
    pub fn finish(self) -> Result<ArtifactRef, ArtifactError> {
        let Self { file, unfinished, dir, durability, hasher, bytes } = self;
        let sha256 = hex(&hasher.finalize());
        let shelf = dir.join(&sha256[..2]);
        let path = shelf.join(&sha256);
        if durability == Durability::Power {
            file.sync_all().map_err(|source| fault(&unfinished.0, source))?;
        }
        // Over an equal one, if there is: should that have been damaged, it no longer is.
        let made = match fs::rename(&unfinished.0, &path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_dir(&shelf)?;
                fs::rename(&unfinished.0, &path)
            }
            other => other,
        };
        made.map_err(|source| fault(&path, source))?;
        unfinished.forget();
        if durability == Durability::Power {
            // The name, and the directories above it, which may be new, whoever made them.
            for dir in path.ancestors().skip(1).take(3) {
                File::open(dir).and_then(|dir| dir.sync_all()).map_err(|source| fault(dir, source))?;
            }
        }
        Ok(ArtifactRef { sha256, bytes })
    }
}

impl Write for ArtifactWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.file.write(bytes)?;
        self.hasher.update(&bytes[..len]);
        self.bytes += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A path that goes away with this value.
#[derive(Debug)]
struct PartialArtifact(PathBuf);

impl PartialArtifact {
    fn forget(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for PartialArtifact {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            // Nobody is left to be told; the next sweep finds it.
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Takes the lock; says whether a sweep was faster.
fn is_swept(file: &File) -> io::Result<bool> {
    file.lock()?;
    Ok(file.metadata()?.nlink() == 0)
}

fn is_sha256(text: &str) -> bool {
    text.len() == SHA256_LEN && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Names and paths in a directory; none when it is not there. A name that is no text is none of ours.
fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, ArtifactError> {
    let listed = match fs::read_dir(dir) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        other => other.map_err(|source| fault(dir, source))?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let entry = entry.map_err(|source| fault(dir, source))?;
        if let Ok(name) = entry.file_name().into_string() {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}

fn make_dir(dir: &Path) -> Result<(), ArtifactError> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(fault(dir, error)),
        _ => Ok(()),
    }
}

fn remove(path: &Path) -> Result<(), ArtifactError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(fault(path, error)),
        _ => Ok(()),
    }
}

fn damaged(wanted: &ArtifactRef) -> ArtifactError {
    ArtifactError::Damaged { sha256: wanted.sha256.clone() }
}

fn failed(path: &Path, sha256: &str, source: io::Error) -> ArtifactError {
    match source.kind() {
        io::ErrorKind::NotFound => ArtifactError::Missing { sha256: sha256.to_owned() },
        _ => fault(path, source),
    }
}

fn fault(path: &Path, source: io::Error) -> ArtifactError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ArtifactError::DiskFull,
        _ => ArtifactError::File { path: path.to_owned(), source },
    }
}
