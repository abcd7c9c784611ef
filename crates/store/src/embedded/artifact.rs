//! Artifacts as files: in `artifacts/`, below the first two digits of the hash.
//!
//! Invariant: a file under its final name is complete; it is written under another name and renamed.
//! Invariant: a writer holds a lock on its unfinished file, so that a sweep can distinguish files of a killed
//! process from those that are being written.
//! Trust: a reference may come from an event that a Body caused; it becomes a path only if it is 64
//! hexadecimal digits.

use std::{
    collections::hash_map::RandomState,
    fs::{self, File, OpenOptions},
    hash::BuildHasher,
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{Store, open::Durability};
use crate::artifacts::{ArtifactError, ArtifactRef, ArtifactSink, ArtifactWriter, Artifacts};

const UNFINISHED: &str = "tmp-";
const SHA256_LEN: usize = 64;

/// The directory of artifacts and their durability.
#[derive(Debug)]
pub(crate) struct ArtifactDir {
    dir: PathBuf,
    durability: Durability,
}

impl ArtifactDir {
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

impl Artifacts for Store {
    fn artifact(&self) -> Result<ArtifactWriter, ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        Ok(ArtifactWriter::new(Box::new(FileSink::begin(&self.artifacts)?)))
    }

    fn open_artifact(&self, wanted: &ArtifactRef) -> Result<Box<dyn Read + Send>, ArtifactError> {
        let path = self.artifacts.path(&wanted.sha256)?;
        let file = File::open(&path).map_err(|source| failed(&path, &wanted.sha256, source))?;
        let found = file.metadata().map_err(|source| failed(&path, &wanted.sha256, source))?;
        if found.is_file() && found.len() == wanted.bytes { Ok(Box::new(file)) } else { Err(damaged(wanted)) }
    }

    fn artifacts(&self) -> Result<Vec<ArtifactRef>, ArtifactError> {
        let mut found = Vec::new();
        for (name, dir) in entries(&self.artifacts.dir)? {
            if name.len() != 2 {
                continue;
            }
            for (sha256, path) in entries(&dir)? {
                // Other files here are not ours; a file that is gone was removed by another process.
                let Ok(file) = path.symlink_metadata() else { continue };
                if is_sha256(&sha256) && sha256.starts_with(&name) && file.is_file() {
                    found.push(ArtifactRef { sha256, bytes: file.len() });
                }
            }
        }
        found.sort();
        Ok(found)
    }

    fn remove_artifact(&self, unwanted: &ArtifactRef) -> Result<(), ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        let path = self.artifacts.path(&unwanted.sha256)?;
        remove(&path)
    }

    fn sweep_artifacts(&self) -> Result<u64, ArtifactError> {
        if self.is_read_only() {
            return Err(ArtifactError::ReadOnly);
        }
        let mut bytes = 0;
        for (name, path) in entries(&self.artifacts.dir)? {
            if !name.starts_with(UNFINISHED) {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            // A locked file is being written.
            if file.try_lock().is_ok() {
                bytes += file.metadata().map_or(0, |file| file.len());
                remove(&path)?;
            }
        }
        Ok(bytes)
    }
}

/// The unfinished file of one artifact.
#[derive(Debug)]
struct FileSink {
    file: File,
    unfinished: PartialArtifact,
    dir: PathBuf,
    durability: Durability,
}

impl FileSink {
    fn begin(artifacts: &ArtifactDir) -> Result<Self, ArtifactError> {
        let ArtifactDir { dir, durability } = artifacts;
        loop {
            // The random name only avoids collisions; `create_new` detects them.
            let random = RandomState::new().hash_one(std::process::id());
            let path = dir.join(format!("{UNFINISHED}{random:016x}"));
            // A stored artifact is never written again, which its mode shows; this descriptor can still
            // write.
            match OpenOptions::new().write(true).create_new(true).mode(0o400).open(&path) {
                Ok(file) => {
                    let unfinished = PartialArtifact(path);
                    if is_swept(&file).map_err(|source| fault(&unfinished.0, source))? {
                        continue;
                    }
                    let (dir, durability) = (dir.clone(), *durability);
                    return Ok(Self { file, unfinished, dir, durability });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => make_dir(dir)?,
                Err(error) => return Err(fault(&path, error)),
            }
        }
    }
}

impl ArtifactSink for FileSink {
    fn keep(self: Box<Self>, name: &ArtifactRef) -> Result<(), ArtifactError> {
        let Self { file, unfinished, dir, durability } = *self;
        let sha256 = &name.sha256;
        let shelf = dir.join(&sha256[..2]);
        let path = shelf.join(sha256);
        if durability == Durability::Power {
            file.sync_all().map_err(|source| fault(&unfinished.0, source))?;
        }
        // Replaces an existing artifact with the same hash, which repairs it if it was damaged.
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
            // Syncs the name, and the directories above it, which may be new.
            for dir in path.ancestors().skip(1).take(3) {
                File::open(dir).and_then(|dir| dir.sync_all()).map_err(|source| fault(dir, source))?;
            }
        }
        Ok(())
    }
}

impl Write for FileSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A path that is removed when this value is dropped.
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
            // There is no caller to report a failure to; the next sweep finds the file.
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Takes the lock; returns whether a sweep removed the file first.
fn is_swept(file: &File) -> io::Result<bool> {
    file.lock()?;
    Ok(file.metadata()?.nlink() == 0)
}

fn is_sha256(text: &str) -> bool {
    text.len() == SHA256_LEN && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Names and paths in a directory; empty if it does not exist. A name that is not UTF-8 is not ours and is
/// skipped.
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
