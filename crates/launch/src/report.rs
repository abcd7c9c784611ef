//! Errors of the launcher, with the step that failed.

use std::{fmt, io};

use proto::launch::{FailedKind, LaunchFailure};

/// A step that failed.
#[derive(Debug)]
pub struct StepError {
    step: String,
    cause: io::Error,
    hint: Option<String>,
    kind: FailedKind,
}

impl StepError {
    /// A step that failed for a reason that is not a kernel error.
    pub fn new(step: &str, cause: impl Into<String>) -> Self {
        Self {
            step: step.to_owned(),
            cause: io::Error::other(cause.into()),
            hint: None,
            kind: FailedKind::Host,
        }
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.to_owned());
        self
    }

    /// Marks the failure of a microVM that could not be restored completely.
    pub fn restore_incomplete(self) -> Self {
        Self { kind: FailedKind::RestoreIncomplete, ..self }
    }

    /// The failure as it is reported.
    pub fn failed(&self) -> LaunchFailure {
        LaunchFailure {
            step: self.step.clone(),
            cause: self.cause.to_string(),
            hint: self.hint.clone(),
            kind: self.kind,
        }
    }

    /// The cause: most often the kernel's error.
    pub fn cause(&self) -> &io::Error {
        &self.cause
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.step, self.cause)
    }
}

/// Names the step that a result belongs to: `mount(…).step("mount the root")`.
pub trait StepExt<T> {
    /// The step, worded to follow "cannot".
    fn step(self, step: impl Into<String>) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> StepExt<T> for Result<T, E> {
    fn step(self, step: impl Into<String>) -> Result<T, StepError> {
        self.map_err(|cause| StepError {
            step: step.into(),
            cause: cause.into(),
            hint: None,
            kind: FailedKind::Host,
        })
    }
}
