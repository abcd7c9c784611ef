//! The interface of the artifact store: contents that are too large for an event, stored once under their
//! SHA-256.
//!
//! Invariant: an artifact exists completely or not at all, and never changes.
//! Absent on purpose: knowing which artifacts are still in use. The caller reads the log and removes the
//! others, while no process writes.

use std::{
    io::{self, Read, Write},
    path::PathBuf,
};

use proto::event::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const READ_LEN: usize = 64 * 1024;

/// A store of artifacts.
pub trait Artifacts: Send + Sync {
    /// Begins an artifact. It is stored once [`ArtifactWriter::finish`] returns.
    fn artifact(&self) -> Result<ArtifactWriter, ArtifactError>;

    /// Opens an artifact for reading. Its length is checked, its contents are not: see
    /// [`Artifacts::verify_artifact`].
    fn open_artifact(&self, wanted: &ArtifactRef) -> Result<Box<dyn Read + Send>, ArtifactError>;

    /// All artifacts, in the order of their hashes.
    fn artifacts(&self) -> Result<Vec<ArtifactRef>, ArtifactError>;

    /// Removes an artifact; succeeds if it does not exist.
    fn remove_artifact(&self, unwanted: &ArtifactRef) -> Result<(), ArtifactError>;

    /// Removes unfinished artifacts of processes that were killed; returns their total size.
    fn sweep_artifacts(&self) -> Result<u64, ArtifactError>;

    /// Stores these bytes.
    fn put_artifact(&self, bytes: &[u8]) -> Result<ArtifactRef, ArtifactError> {
        let mut writer = self.artifact()?;
        writer.write_all(bytes).map_err(ArtifactError::from_write)?;
        writer.finish()
    }

    /// All bytes of an artifact, verified by its hash.
    fn get_artifact(&self, wanted: &ArtifactRef) -> Result<Vec<u8>, ArtifactError> {
        let mut bytes = Vec::new();
        copy_checked(self.open_artifact(wanted)?, wanted, |piece| bytes.extend_from_slice(piece))?;
        Ok(bytes)
    }

    /// Reads all of an artifact and verifies it by its hash.
    fn verify_artifact(&self, wanted: &ArtifactRef) -> Result<(), ArtifactError> {
        copy_checked(self.open_artifact(wanted)?, wanted, |_| ())
    }
}

/// The name of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ArtifactRef {
    /// Its SHA-256 in lower-case hexadecimal.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
}

/// The destination of one artifact's bytes in an implementation. Dropping it before `keep` leaves nothing
/// behind.
pub trait ArtifactSink: Write + Send {
    /// Stores the written bytes under this name.
    fn keep(self: Box<Self>, name: &ArtifactRef) -> Result<(), ArtifactError>;
}

/// An artifact that is being written. Dropping it before [`finish`](Self::finish) leaves nothing behind.
pub struct ArtifactWriter {
    sink: Box<dyn ArtifactSink>,
    hasher: Sha256,
    bytes: u64,
}

impl ArtifactWriter {
    /// A writer into that sink.
    pub fn new(sink: Box<dyn ArtifactSink>) -> Self {
        Self { sink, hasher: Sha256::new(), bytes: 0 }
    }

    /// Stores the artifact under its hash.
    pub fn finish(self) -> Result<ArtifactRef, ArtifactError> {
        let name = ArtifactRef { sha256: hex(&self.hasher.finalize()), bytes: self.bytes };
        self.sink.keep(&name)?;
        Ok(name)
    }
}

impl std::fmt::Debug for ArtifactWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArtifactWriter").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Write for ArtifactWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.sink.write(bytes)?;
        self.hasher.update(&bytes[..len]);
        self.bytes += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Why an artifact could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// There is no such artifact.
    #[error("there is no artifact {sha256}")]
    Missing {
        /// Its hash.
        sha256: String,
    },
    /// The name is invalid.
    #[error("{0:?} is not the name of an artifact (64 hexadecimal digits)")]
    Name(String),
    /// The contents differ from what was written.
    #[error("artifact {sha256} is damaged")]
    Damaged {
        /// The hash that it should have.
        sha256: String,
    },
    /// The disk is full.
    #[error("the disk of the artifacts is full")]
    DiskFull,
    /// The store was opened for reading only.
    #[error("the store was opened for reading only")]
    ReadOnly,
    /// The kernel refused a file or directory.
    #[error("cannot use {path}")]
    File {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The bytes could not be read or written.
    #[error("cannot read or write an artifact")]
    Transfer(#[source] io::Error),
}

impl ArtifactError {
    fn from_write(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ArtifactError::DiskFull,
            _ => ArtifactError::Transfer(source),
        }
    }
}

/// Copies all bytes, and verifies them by the name at the end.
fn copy_checked(
    mut from: Box<dyn Read + Send>,
    wanted: &ArtifactRef,
    mut take: impl FnMut(&[u8]),
) -> Result<(), ArtifactError> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; READ_LEN];
    loop {
        match from.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => {
                hasher.update(&piece[..len]);
                take(&piece[..len]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ArtifactError::Transfer(error)),
        }
    }
    if hex(&hasher.finalize()) == wanted.sha256 {
        Ok(())
    } else {
        Err(ArtifactError::Damaged { sha256: wanted.sha256.clone() })
    }
}
