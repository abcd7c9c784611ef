//! File operations of agents, as the guest carries them out at `POST /v1/files/call`.
//!
//! Invariant: an operation with a key has at most one effect: the guest answers a repeated key from its ledger.
//! Invariant: paths are absolute; every answer has a limit.

use serde::{Deserialize, Serialize};

/// The path of a [`FileCall`]; guests before generation 3 do not have it.
pub const PATH: &str = "/v1/files/call";

/// The longest content of a file that a call reads or writes, in bytes.
pub const CONTENT_LEN_MAX: usize = 8 << 20;
/// The most matches of a search for text.
pub const MATCHES_MAX: u64 = 1000;
/// The most paths of a search for names, and of a listing.
pub const PATHS_MAX: usize = 10_000;
/// The longest text of a match in bytes; a longer line is cut.
pub const LINE_LEN_MAX: usize = 4096;
/// The longest message of a call or an answer. Most text takes little more room in JSON; a text of control characters
/// may not fit.
pub const MESSAGE_LEN_MAX: usize = 2 * CONTENT_LEN_MAX + (1 << 20);
/// The longest idempotency key in bytes.
pub const KEY_LEN_MAX: usize = 256;
/// How many answers to keyed calls the guest keeps.
pub const LEDGER_MAX: usize = 1024;

/// One operation on files of a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCall {
    /// The idempotency key. Operations that only read need none, and ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The operation.
    pub operation: FileOperation,
}

/// The operations on files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum FileOperation {
    /// Lists a directory, without its subdirectories.
    List {
        /// The directory.
        path: String,
    },
    /// Reads lines of a text file, or a whole file that is no text.
    Read {
        /// The file.
        path: String,
        /// The number of lines to skip.
        offset: u64,
        /// The most lines to return.
        limit: u64,
    },
    /// Creates or replaces files, and creates their directories; `None` removes a file. All of them or, if one cannot
    /// be written, none of those that follow it.
    Write {
        /// The files.
        files: Vec<WrittenFile>,
    },
    /// Replaces text in a file.
    Edit {
        /// The file.
        path: String,
        /// The text to find.
        old: String,
        /// The text to put in its place.
        new: String,
        /// Whether each occurrence is replaced. Without it the text must occur once.
        replace_all: bool,
    },
    /// Removes a file, or a directory with its contents.
    Delete {
        /// The path.
        path: String,
    },
    /// Finds regular files by a pattern of their names, as Deep Agents' `glob` does.
    Glob {
        /// The pattern.
        pattern: String,
        /// The directory to search.
        path: String,
    },
    /// Finds lines that contain a text.
    Grep {
        /// The literal text.
        pattern: String,
        /// The file or directory to search.
        path: String,
        /// A pattern of the names of the files to search.
        glob: Option<String>,
        /// The most matches.
        limit: u64,
    },
    /// Finds out what a call with this key did; the answer is `Unknown` if the guest has not seen the key.
    Recall {
        /// The key.
        key: String,
    },
}

impl FileOperation {
    /// Whether it changes files. The guest keeps the answers of such operations by their keys.
    pub fn changes_files(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Edit { .. } | Self::Delete { .. })
    }

    /// The length of all text that it has to write or to find.
    pub fn content_len(&self) -> usize {
        match self {
            Self::Write { files } => files.iter().filter_map(|file| Some(file.content.as_ref()?.len())).sum(),
            Self::Edit { old, new, .. } => old.len().saturating_add(new.len()),
            Self::Grep { pattern, .. } => pattern.len(),
            _ => 0,
        }
    }
}

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    /// The path.
    pub path: String,
    /// The new content; `None` removes the file.
    pub content: Option<String>,
}

/// The answer to a [`FileCall`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FileAnswer {
    /// The entries of a directory, by name.
    Entries {
        /// The entries.
        entries: Vec<FileEntry>,
        /// Whether there are more.
        truncated: bool,
    },
    /// Lines of a text file.
    Text {
        /// The lines with their line ends.
        content: String,
        /// The number of lines of the whole file.
        total_lines: u64,
        /// The number of the first line, from 1; 0 if there is none: the file has no line behind the offset, or none
        /// were requested.
        start_line: u64,
        /// The number of the last line.
        end_line: u64,
    },
    /// A file that is no UTF-8 text.
    Binary {
        /// The bytes in base64.
        base64: String,
        /// The length of the file in bytes.
        len: u64,
    },
    /// The files were written or removed.
    Written,
    /// The text was replaced.
    Edited {
        /// How many times.
        occurrences: u64,
    },
    /// The path was removed.
    Deleted,
    /// Absolute paths, in order.
    Paths {
        /// The paths.
        paths: Vec<String>,
        /// Whether the search stopped early.
        truncated: bool,
        /// Whether directories could not be read.
        unreadable: bool,
    },
    /// Lines that contain the text, by path and line.
    Matches {
        /// The matches.
        matches: Vec<TextMatch>,
        /// Whether there are more.
        truncated: bool,
    },
    /// The operation was not carried out.
    Error {
        /// The reason.
        reason: FileError,
        /// The path that it concerns.
        path: String,
    },
    /// The guest has not seen the key: the call did not begin in this life of the Body.
    Unknown,
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The absolute path.
    pub path: String,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// The length of a file in bytes.
    pub len: u64,
    /// When it was changed, in seconds since 1970.
    pub modified_s: i64,
}

/// A line that contains a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextMatch {
    /// The absolute path.
    pub path: String,
    /// The number of the line, from 1.
    pub line: u64,
    /// The line without its end; at most [`LINE_LEN_MAX`] bytes of it.
    pub text: String,
}

/// Why an operation on files was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FileError {
    /// The path does not exist.
    NotFound,
    /// The path is a directory.
    IsDirectory,
    /// The path is no directory.
    NotDirectory,
    /// The user may not do that.
    PermissionDenied,
    /// The path is not absolute, or has `..` in it.
    InvalidPath,
    /// The pattern cannot be read.
    InvalidPattern {
        /// The reason.
        why: String,
    },
    /// The file is no UTF-8 text.
    NotText,
    /// The file is longer than a call may read or write.
    TooLarge {
        /// Its length in bytes.
        len: u64,
    },
    /// The text to replace does not occur.
    NoOccurrence,
    /// The text to replace occurs more than once.
    Ambiguous {
        /// How many times.
        occurrences: u64,
    },
    /// The text to replace is empty.
    EmptyPattern,
    /// Another error of the file system.
    Other {
        /// The kernel's message.
        why: String,
    },
}
