//! Why a repository could not come in, or its work could not go out.

use std::io;

use body::layers::LayerError;

use crate::git::{GitError, GitReason};

/// Why not.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The host's repository is not as it must be.
    #[error("{0}")]
    Repository(String),
    /// What was asked for does not fit what is there now.
    #[error("{0}")]
    Conflict(String),
    /// git's fsck has something against what would land.
    #[error("{0}")]
    Unsound(String),
    /// What was asked for is not there.
    #[error("{0}")]
    NotFound(String),
    /// What the Body holds is refused.
    #[error("{0}")]
    Hostile(String),
    /// git said no.
    #[error(transparent)]
    Git(#[from] GitError),
    /// A layer could not be made.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A file could not be read or written.
    #[error("cannot {0}")]
    Io(&'static str, #[source] io::Error),
}

impl WorkspaceError {
    /// The host has no room left.
    pub fn is_full(&self) -> bool {
        let full = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        };
        match self {
            Self::Io(_, error) | Self::Layer(LayerError::Io(_, error)) => full(error),
            Self::Git(error) => error.reason() == Some(GitReason::DiskFull),
            _ => false,
        }
    }
}

/// Adds what was being done to an error of the kernel.
pub(crate) trait ErrorContext<T> {
    /// Adds it.
    fn during(self, what: &'static str) -> Result<T, WorkspaceError>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for Result<T, E> {
    fn during(self, what: &'static str) -> Result<T, WorkspaceError> {
        self.map_err(|error| WorkspaceError::Io(what, error.into()))
    }
}
