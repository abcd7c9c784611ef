//! Errors of importing a repository and of saving or landing its work.

use std::io;

use body::layers::LayerError;

use crate::git::{GitError, GitReason};

/// Why an operation on a workspace failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The host's repository cannot be used: it is missing, unsupported or broken.
    #[error("{0}")]
    Repository(String),
    /// The request conflicts with the current state of the repository.
    #[error("{0}")]
    Conflict(String),
    /// git's fsck refuses a commit that would land.
    #[error("{why}")]
    Unsound {
        /// The output of git's fsck.
        why: String,
        /// Whether the Body's commits alone would pass.
        committed: bool,
    },
    /// The repository has no such commit, branch or file.
    #[error("{0}")]
    NotFound(String),
    /// The Body's files exceed a limit or are malformed.
    #[error("{0}")]
    Hostile(String),
    /// A git command failed.
    #[error(transparent)]
    Git(#[from] GitError),
    /// A layer could not be made.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A system call on a file failed.
    #[error("cannot {0}")]
    Io(&'static str, #[source] io::Error),
}

impl WorkspaceError {
    /// Whether the operation failed because the host's disk or quota is full.
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

/// Adds the operation that failed to an error of the kernel.
pub(crate) trait ErrorContext<T> {
    /// Wraps the error with `what`, a verb phrase that completes "cannot …".
    fn during(self, what: &'static str) -> Result<T, WorkspaceError>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for Result<T, E> {
    fn during(self, what: &'static str) -> Result<T, WorkspaceError> {
        self.map_err(|error| WorkspaceError::Io(what, error.into()))
    }
}
