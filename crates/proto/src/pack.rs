//! A layer as a stream: how whoever reads an archive tells `pal-launch` what to put on disk.
//!
//! Each entry is a length, a header as JSON, and for a file its contents. The reader of the archive has no rights over
//! the layer; the writer of the layer has no part in reading the archive. Both check the paths.

use serde::{Deserialize, Serialize};

/// Longest header.
pub const HEADER_LEN_MAX: usize = 64 << 10;

/// One entry of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerEntry {
    /// Where, below the layer's root; empty for the root itself.
    pub path: Vec<u8>,
    /// What.
    pub what: LayerEntryKind,
    /// Permission bits, setuid and its kin among them.
    pub mode: u32,
    /// Whose, as ids inside.
    pub owner: (u32, u32),
    /// When it was changed last, in seconds.
    pub mtime: i64,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerEntryKind {
    /// A directory.
    Dir,
    /// A file; so many bytes follow the header.
    File(u64),
    /// A symbolic link to there.
    Link(Vec<u8>),
    /// Another name of a file that came before.
    Same(Vec<u8>),
    /// What lower layers have here is gone.
    Gone,
    /// What lower layers have in this directory is gone.
    Opaque,
    /// Nothing follows: the layer is complete.
    End,
}

impl LayerEntry {
    /// The last entry.
    pub fn end() -> Self {
        Self { path: Vec::new(), what: LayerEntryKind::End, mode: 0, owner: (0, 0), mtime: 0 }
    }
}
