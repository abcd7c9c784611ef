//! A layer as a stream: how the process that reads an archive tells `pal-launch` what to write to disk.
//!
//! Each entry is a length, a JSON header, and for a file its contents. The process that reads the archive has
//! no access to the layer, and the process that writes the layer never reads the archive. Both check the
//! paths.

use serde::{Deserialize, Serialize};

/// Longest header.
pub const HEADER_LEN_MAX: usize = 64 << 10;

/// One entry of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerEntry {
    /// The path below the layer's root; empty for the root itself.
    pub path: Vec<u8>,
    /// The kind of the entry.
    pub what: LayerEntryKind,
    /// Permission bits, including setuid, setgid and sticky.
    pub mode: u32,
    /// User and group, as ids in the Body.
    pub owner: (u32, u32),
    /// The modification time, in seconds since 1970.
    pub mtime: i64,
}

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerEntryKind {
    /// A directory.
    Dir,
    /// A file, with the number of bytes that follow the header.
    File(u64),
    /// A symbolic link, with its target.
    Link(Vec<u8>),
    /// A hard link to an earlier file.
    Same(Vec<u8>),
    /// A whiteout: hides the path in lower layers.
    Gone,
    /// An opaque directory: hides the entries of lower layers.
    Opaque,
    /// The end of the layer.
    End,
}

impl LayerEntry {
    /// The entry that ends a layer.
    pub fn end() -> Self {
        Self { path: Vec::new(), what: LayerEntryKind::End, mode: 0, owner: (0, 0), mtime: 0 }
    }
}
