//! Errors in files of the library: the file, the line, the fault and how to mend it.

use proto::{Failure, Kind};

/// A fault in a file of the library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {fault}")]
pub struct LibraryError {
    /// The file, as the caller named it.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The fault.
    pub fault: String,
    /// How to mend it.
    pub mend: String,
}

impl LibraryError {
    /// A fault in a line of a file.
    pub fn new(file: &str, line: usize, fault: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, fault: fault.into(), mend: mend.into() }
    }

    /// The error as a failure at the edge.
    pub fn into_failure(self) -> Failure {
        let mend = self.mend.clone();
        Failure::new(Kind::Usage, self.to_string()).hint(mend)
    }

    /// An error of the TOML parser.
    pub(crate) fn from_toml(file: &str, text: &str, error: &toml::de::Error) -> Self {
        let line = error.span().map_or(1, |span| line_at(text, span.start));
        let message = error.message().lines().next().unwrap_or("not valid TOML").to_owned();
        Self::new(file, line, message, format!("mend line {line} of {file}"))
    }
}

/// The line of a byte of a text, from 1.
pub(crate) fn line_at(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// Refuses a text that is longer than it may be.
pub(crate) fn check_len(file: &str, text: &str, max: usize) -> Result<(), LibraryError> {
    if text.len() <= max {
        return Ok(());
    }
    Err(LibraryError::new(
        file,
        1,
        format!("the file has {} bytes; at most {max} are read", text.len()),
        "make the file shorter",
    ))
}
