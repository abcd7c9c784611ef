//! Failures as users and clients see them: one type, and one table of exit codes and HTTP statuses.
//!
//! Inside a crate, errors are that crate's own enums; they become a `Failure` where a user or a client sees
//! them.

use std::{error::Error, fmt};

use serde::Serialize;

/// The class of a failure, which tells the caller whether to change the request, the host or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request is invalid.
    Usage,
    /// The named thing does not exist.
    NotFound,
    /// The request conflicts with the current state.
    Conflict,
    /// Policy or permissions deny it.
    Denied,
    /// A limit was reached.
    Limit,
    /// The host cannot do it.
    Host,
    /// A restored snapshot failed a check.
    RestoreIncomplete,
    /// The Body exists, but the command to run in it does not. Clients see it as `not_found`.
    #[serde(rename = "not_found")]
    CommandNotFound,
    /// The command exists but cannot be executed. Clients see it as `denied`.
    #[serde(rename = "denied")]
    CommandNotExecutable,
    /// A bug in Palisade.
    Internal,
}

/// The name of an incomplete restore in messages and records.
pub const RESTORE_INCOMPLETE: &str = "RESTORE_INCOMPLETE";

/// The exit code of `pal agent` if the agent waits for a person; no failure has it.
pub const WAITS_FOR_PERSON: u8 = 3;

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
        // The same codes as a shell's.
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

    /// The HTTP status.
    pub fn http_status(self) -> u16 {
        self.row().2
    }
}

/// A failure as a user or a client sees it: what failed, the cause, and what to do.
#[derive(Debug)]
pub struct Failure {
    /// The class.
    pub kind: Kind,
    /// The failed operation, in the terms of the caller.
    pub message: String,
    /// The cause, with its own causes.
    pub source: Option<Box<dyn Error + Send + Sync>>,
    /// Advice, each with a command where possible.
    pub hints: Vec<String>,
}

impl Failure {
    /// A failure without a cause.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, hints: Vec::new() }
    }

    /// Adds the cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Adds a hint.
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
        assert!(!codes.contains(&WAITS_FOR_PERSON));
        assert_eq!(Kind::Usage.exit_code(), 2);
        assert_eq!(Kind::NotFound.http_status(), 404);
        assert_eq!(Kind::Internal.exit_code(), 120);
    }
}
