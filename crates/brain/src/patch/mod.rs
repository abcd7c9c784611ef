//! Patches of files, in the grammar of codex's `apply_patch`.
//!
//! ```text
//! *** Begin Patch
//! *** Update File: src/login.py
//! *** Move to: src/auth.py
//! @@ def login(name, password):
//!      if not name:
//!          return False
//! +    if not password:
//! +        return False
//! *** Add File: notes.md
//! +one line
//! *** Delete File: old.py
//! *** End Patch
//! ```
//!
//! [`FilePatch::parse`] reads the text, [`apply_chunks`] computes the new content of one file. Neither touches a file
//! system.
//!
//! Invariant: lines that a patch does not change keep their bytes, also their line ends.
//! Invariant: the work is bounded by the length of the patch and of the file: see [`SEARCH_COST_MAX`].
//! Trust: the text comes from a model. Each text that does not match the grammar is an error that says where.

mod apply;
mod parse;
mod seek;

pub use apply::apply_chunks;
pub use seek::SEARCH_COST_MAX;

/// The longest patch in bytes.
pub const PATCH_LEN_MAX: usize = 4 << 20;
/// The most files of one patch.
pub const PATCH_FILES_MAX: usize = 1000;
/// How much of a line or of a chunk an error quotes.
const QUOTE_LEN_MAX: usize = 2000;

/// Changes of files, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch {
    /// The changes.
    pub changes: Vec<PatchChange>,
}

/// The change of one file. Paths are as the model wrote them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchChange {
    /// A new file, or new content for an existing one.
    Add {
        /// Its path.
        path: String,
        /// Its content.
        content: String,
    },
    /// A file that is removed.
    Delete {
        /// Its path.
        path: String,
    },
    /// A file that is edited, and moved if `move_to` says so.
    Update {
        /// Its path.
        path: String,
        /// Its new path.
        move_to: Option<String>,
        /// The edits, from the top of the file to its end.
        chunks: Vec<PatchChunk>,
    },
}

/// Adjacent lines of a file that are edited together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PatchChunk {
    /// A line above the chunk, most often the head of a function.
    pub context: Option<String>,
    /// The lines.
    pub lines: Vec<PatchLine>,
    /// Whether the chunk is at the end of the file.
    pub at_end: bool,
}

/// One line of a chunk, without its line end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchLine {
    /// A line that stays.
    Context(String),
    /// A new line.
    Added(String),
    /// A line that goes.
    Removed(String),
}

/// Why a patch cannot be read or applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// The text is no patch.
    #[error("Invalid patch: {0}")]
    Text(String),
    /// A line does not fit its place.
    #[error("Invalid patch hunk on line {line}: {message}")]
    Line {
        /// The number of the line in the patch, from 1.
        line: usize,
        /// The reason.
        message: String,
    },
    /// The file does not have the lines that the patch expects.
    #[error("{0}")]
    Mismatch(String),
}

impl FilePatch {
    /// Reads the text of a patch.
    pub fn parse(text: &str) -> Result<Self, PatchError> {
        parse::parse(text).map(|changes| Self { changes })
    }
}

/// The beginning of a text, for an error.
fn quote(text: &str) -> String {
    if text.len() <= QUOTE_LEN_MAX {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(QUOTE_LEN_MAX);
    format!("{}…", &text[..end])
}
