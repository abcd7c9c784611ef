//! What goes wrong at the edge: one type, one table of exit codes and HTTP statuses.
//!
//! Inside a room errors are that room's own enums; they become a `Failure` where a person or a client meets them.

use std::{error::Error, fmt};

use serde::Serialize;

/// Whose fault it is, and so what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request makes no sense.
    Usage,
    /// What it names is not there.
    NotFound,
    /// It clashes with what is there now.
    Conflict,
    /// Policy or permission says no.
    Denied,
    /// A limit was reached.
    Limit,
    /// The host cannot do it.
    Host,
    /// What was frozen could not be thawed whole.
    RestoreIncomplete,
    /// The Body is there; the command that it is asked to run is not. Clients read it as `not_found`.
    #[serde(rename = "not_found")]
    CommandNotFound,
    /// The command is there and cannot be run. Clients read it as `denied`.
    #[serde(rename = "denied")]
    CommandNotExecutable,
    /// A bug of ours.
    Internal,
}

/// What an incomplete restore is called wherever it is told.
pub const RESTORE_INCOMPLETE: &str = "RESTORE_INCOMPLETE";

impl Kind {
    /// The one table: kind, exit code of `pal`, HTTP status.
    const TABLE: [(Kind, u8, u16); 10] = [
        (Kind::Usage, 2, 400),
        (Kind::NotFound, 121, 404),
        (Kind::Conflict, 122, 409),
        (Kind::Denied, 123, 403),
        (Kind::Limit, 124, 429),
        (Kind::Host, 125, 503),
        (Kind::RestoreIncomplete, 119, 503),
        // As a shell gives it.
        (Kind::CommandNotFound, 127, 422),
        (Kind::CommandNotExecutable, 126, 403),
        (Kind::Internal, 120, 500),
    ];

    fn row(self) -> (Kind, u8, u16) {
        Self::TABLE.into_iter().find(|row| row.0 == self).unwrap_or(Self::TABLE[9])
    }

    /// The exit code of `pal`.
    pub fn exit_code(self) -> u8 {
        self.row().1
    }

    /// The status over HTTP.
    pub fn http_status(self) -> u16 {
        self.row().2
    }
}

/// A failure that a person or a client meets: what happened, why, and what to do.
#[derive(Debug)]
pub struct Failure {
    /// Whose fault.
    pub kind: Kind,
    /// What happened.
    pub message: String,
    /// Why: the chain of causes.
    pub source: Option<Box<dyn Error + Send + Sync>>,
    /// What to do.
    pub hints: Vec<String>,
}

impl Failure {
    /// What happened, without a cause.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, hints: Vec::new() }
    }

    /// With the cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// With something to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// The causes, outermost first.
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut next: Option<&(dyn Error + 'static)> = self.source.as_deref().map(|source| source as _);
        while let Some(cause) = next {
            causes.push(cause.to_string());
            next = cause.source();
        }
        causes
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_one_exit_code_of_its_own() {
        let mut codes: Vec<u8> = Kind::TABLE.iter().map(|row| row.1).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Kind::TABLE.len());
        assert_eq!(Kind::Usage.exit_code(), 2);
        assert_eq!(Kind::NotFound.http_status(), 404);
        assert_eq!(Kind::Internal.exit_code(), 120);
    }
}
