//! A tree of files as a stream: the format in which `pal cp` moves directories into and out of a Body.
//!
//! It is not tar, because names may be any bytes, a sender need not know sizes in advance, and a reader meets
//! no extension headers, devices or owners. The format can express only what may be copied.
//!
//! Guests of generation 1 know the first form, which has no holes, no hard links, no sizes and no entries that
//! were left out. A reader accepts both forms; a host sends the second one to guests that know it.
//!
//! Invariant: a path is relative, has no `..`, no empty part, no NUL, and at most [`DEPTH_MAX`] parts.
//! Invariant: a file is at most [`FILE_LEN_MAX`] long, holes included.
//! Trust: the sender is hostile; the reader checks everything as it arrives.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;

/// First bytes of a stream of the first form.
pub const MAGIC: &[u8; 8] = b"PALTREE1";
/// First bytes of a stream of the second form.
pub const MAGIC_2: &[u8; 8] = b"PALTREE2";
/// The first generation of guests that knows the second form.
pub const FORM_2_SINCE: u32 = 2;
/// Longest path.
pub const PATH_LEN_MAX: usize = 4095;
/// Deepest path.
pub const DEPTH_MAX: usize = 512;
/// Largest chunk of a file.
pub const CHUNK_LEN_MAX: usize = 256 * 1024;
/// Longest file.
pub const FILE_LEN_MAX: u64 = i64::MAX as u64;
const MESSAGE_LEN_MAX: usize = 4096;

const DIR: u8 = 1;
const FILE: u8 = 2;
const LINK: u8 = 3;
const SAME: u8 = 4;
const OMITTED: u8 = 5;
const SIZE: u8 = 6;
/// In place of a chunk's length: the length of a hole follows.
const HOLE: u32 = u32::MAX;
const END: u8 = 0;
const FAILED: u8 = 255;

/// Why a stream is not a valid tree.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TreeError {
    /// The stream does not begin with [`MAGIC`].
    #[error("the stream does not begin as a tree")]
    Magic,
    /// A path could lead out of the tree.
    #[error("the path {0:?} is not allowed in a tree")]
    Path(String),
    /// The kind of an entry is unknown.
    #[error("unknown entry of kind {0}")]
    Kind(u8),
    /// A field is longer than allowed.
    #[error("a field of {0} bytes is too long")]
    TooLong(usize),
    /// A file is longer than any file can be.
    #[error("a file is longer than {FILE_LEN_MAX} bytes")]
    FileTooLong,
    /// The stream ended early.
    #[error("the stream was cut")]
    Cut,
    /// The sender failed.
    #[error("the sender failed: {0}")]
    Sender(String),
}

/// One item of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeItem {
    /// A directory.
    Dir {
        /// The path below the root; empty for the root itself.
        path: Vec<u8>,
        /// Permission bits.
        mode: u32,
    },
    /// A file; its contents follow as [`TreeItem::Data`], then [`TreeItem::FileEnd`].
    File {
        /// The path below the root; empty if the whole tree is one file.
        path: Vec<u8>,
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Link {
        /// The path below the root.
        path: Vec<u8>,
        /// The target, unchecked: it is harmless text until a program follows the link.
        target: Vec<u8>,
    },
    /// Another name of a file that came before.
    Same {
        /// The path below the root.
        path: Vec<u8>,
        /// The path of the file that came before.
        first: Vec<u8>,
    },
    /// An entry that the sender leaves out.
    Omitted {
        /// The path below the root; empty for the root itself.
        path: Vec<u8>,
        /// Its kind.
        kind: OmittedKind,
    },
    /// How many bytes of data are about to follow; an estimate, before all other items.
    Size(u64),
    /// A chunk of the current file.
    Data(Bytes),
    /// A range of the current file without data, which reads as zeros.
    Hole(u64),
    /// The end of the current file.
    FileEnd,
    /// The end of the tree.
    End,
}

/// Why an entry is left out of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OmittedKind {
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A device.
    Device,
    /// A git directory, or a file that leads to one.
    Git,
}

impl OmittedKind {
    const ALL: [Self; 4] = [Self::Fifo, Self::Socket, Self::Device, Self::Git];
}

impl std::fmt::Display for OmittedKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fifo => "FIFO",
            Self::Socket => "socket",
            Self::Device => "device",
            Self::Git => "git directory",
        })
    }
}

/// Whether git takes a name for a repository. File systems that ignore case find `.GIT`, too.
pub fn is_git_name(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b".git")
}

/// Names that make a directory a repository for git, whatever it is called: `HEAD` with `commondir`, or with
/// `objects` and `refs`.
pub const GIT_MARKS: [&str; 4] = ["HEAD", "commondir", "objects", "refs"];

/// Whether git takes a directory with these entries for a repository.
pub fn is_git_dir(has: impl Fn(&str) -> bool) -> bool {
    has("HEAD") && (has("commondir") || has("objects") && has("refs"))
}

/// Writes one item.
pub fn write(item: &TreeItem, out: &mut BytesMut) {
    match item {
        TreeItem::Dir { path, mode } => head(out, DIR, *mode, path),
        TreeItem::File { path, mode } => head(out, FILE, *mode, path),
        TreeItem::Link { path, target } => {
            head(out, LINK, 0, path);
            out.put_u16(target.len() as u16);
            out.put_slice(target);
        }
        TreeItem::Same { path, first } => {
            head(out, SAME, 0, path);
            out.put_u16(first.len() as u16);
            out.put_slice(first);
        }
        TreeItem::Omitted { path, kind } => head(out, OMITTED, *kind as u32, path),
        TreeItem::Size(bytes) => {
            out.put_u8(SIZE);
            out.put_u64(*bytes);
        }
        TreeItem::Hole(len) => {
            out.put_u32(HOLE);
            out.put_u64(*len);
        }
        TreeItem::Data(bytes) => {
            for piece in bytes.chunks(CHUNK_LEN_MAX) {
                out.put_u32(piece.len() as u32);
                out.put_slice(piece);
            }
        }
        TreeItem::FileEnd => out.put_u32(0),
        TreeItem::End => out.put_u8(END),
    }
}

/// Writes the message of a sender that fails; nothing follows it.
pub fn write_failure(message: &str, out: &mut BytesMut) {
    let message = &message.as_bytes()[..message.len().min(MESSAGE_LEN_MAX)];
    out.put_u8(FAILED);
    out.put_u16(message.len() as u16);
    out.put_slice(message);
}

fn head(out: &mut BytesMut, kind: u8, mode: u32, path: &[u8]) {
    out.put_u8(kind);
    out.put_u32(mode);
    out.put_u16(path.len() as u16);
    out.put_slice(path);
}

/// Refuses a path that could lead out of the tree.
pub fn check_path(path: &[u8]) -> Result<(), TreeError> {
    let fits = path.len() <= PATH_LEN_MAX && path.split(|byte| *byte == b'/').count() <= DEPTH_MAX;
    let safe = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
    if path.is_empty() || fits && path.split(|byte| *byte == b'/').all(safe) {
        return Ok(());
    }
    Err(TreeError::Path(crate::text::visible_bytes(&path[..path.len().min(128)])))
}

/// Parses a tree that arrives in pieces.
#[derive(Debug, Default)]
pub struct TreeReader {
    held: BytesMut,
    state: TreePosition,
    form: TreeForm,
    /// The length of the current file so far.
    file_len: u64,
}

/// The form of a stream.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum TreeForm {
    /// Files, directories and symbolic links.
    #[default]
    First,
    /// Also holes, hard links, sizes and entries that were left out.
    Second,
}

impl TreeForm {
    /// The form that a guest of this generation knows.
    pub fn of_guest(generation: u32) -> Self {
        if generation >= FORM_2_SINCE { Self::Second } else { Self::First }
    }

    /// The first bytes of a stream.
    pub fn magic(self) -> &'static [u8; 8] {
        match self {
            Self::First => MAGIC,
            Self::Second => MAGIC_2,
        }
    }
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum TreePosition {
    #[default]
    Magic,
    Entry,
    Contents,
    Done,
}

impl TreeReader {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// The next item, if it has arrived completely.
    #[expect(clippy::should_implement_trait, reason = "none now is not the end: more may arrive")]
    pub fn next(&mut self) -> Result<Option<TreeItem>, TreeError> {
        match self.state {
            TreePosition::Magic => self.magic(),
            TreePosition::Entry => self.entry(),
            TreePosition::Contents => self.contents(),
            TreePosition::Done => Ok(None),
        }
    }

    /// Checks that the stream may end here.
    pub fn finish(&self) -> Result<(), TreeError> {
        if self.state == TreePosition::Done { Ok(()) } else { Err(TreeError::Cut) }
    }

    /// The form of the stream, once its beginning has arrived.
    pub fn form(&self) -> TreeForm {
        self.form
    }

    fn magic(&mut self) -> Result<Option<TreeItem>, TreeError> {
        let seen = self.held.len().min(MAGIC.len());
        let begins = |form: &TreeForm| self.held[..seen] == form.magic()[..seen];
        let form = [TreeForm::First, TreeForm::Second].into_iter().find(begins).ok_or(TreeError::Magic)?;
        if seen < MAGIC.len() {
            return Ok(None);
        }
        self.form = form;
        self.held.advance(MAGIC.len());
        self.state = TreePosition::Entry;
        self.entry()
    }

    fn entry(&mut self) -> Result<Option<TreeItem>, TreeError> {
        match self.held.first().copied() {
            None => Ok(None),
            Some(END) => {
                self.state = TreePosition::Done;
                Ok(Some(TreeItem::End))
            }
            Some(FAILED) => self.failed(),
            Some(kind @ (DIR | FILE | LINK)) => self.named(kind),
            Some(kind @ (SAME | OMITTED)) if self.form == TreeForm::Second => self.named(kind),
            Some(SIZE) if self.form == TreeForm::Second => {
                let Some(bytes) = self.u64_at(1) else { return Ok(None) };
                self.held.advance(9);
                Ok(Some(TreeItem::Size(bytes)))
            }
            Some(kind) => Err(TreeError::Kind(kind)),
        }
    }

    fn failed(&mut self) -> Result<Option<TreeItem>, TreeError> {
        let Some(len) = self.u16_at(1) else { return Ok(None) };
        if len > MESSAGE_LEN_MAX {
            return Err(TreeError::TooLong(len));
        }
        match self.held.get(3..3 + len) {
            Some(message) => Err(TreeError::Sender(crate::text::visible_bytes(message))),
            None => Ok(None),
        }
    }

    fn named(&mut self, kind: u8) -> Result<Option<TreeItem>, TreeError> {
        let Some(path_len) = self.u16_at(5) else { return Ok(None) };
        if path_len > PATH_LEN_MAX {
            return Err(TreeError::TooLong(path_len));
        }
        let mut whole = 7 + path_len;
        let Some(path) = self.held.get(7..whole).map(<[u8]>::to_vec) else { return Ok(None) };
        check_path(&path)?;
        let mode = u32::from_be_bytes([self.held[1], self.held[2], self.held[3], self.held[4]]);
        let item = match kind {
            DIR => TreeItem::Dir { path, mode: mode & 0o7777 },
            FILE => TreeItem::File { path, mode: mode & 0o7777 },
            OMITTED => match OmittedKind::ALL.into_iter().find(|kind| *kind as u32 == mode) {
                Some(kind) => TreeItem::Omitted { path, kind },
                None => return Err(TreeError::Kind(OMITTED)),
            },
            _ => {
                let Some(len) = self.u16_at(whole) else { return Ok(None) };
                if len > PATH_LEN_MAX {
                    return Err(TreeError::TooLong(len));
                }
                let Some(target) = self.held.get(whole + 2..whole + 2 + len) else { return Ok(None) };
                let target = target.to_vec();
                whole += 2 + len;
                if kind == SAME {
                    check_path(&target)?;
                    TreeItem::Same { path, first: target }
                } else {
                    TreeItem::Link { path, target }
                }
            }
        };
        self.held.advance(whole);
        if kind == FILE {
            self.state = TreePosition::Contents;
            self.file_len = 0;
        }
        Ok(Some(item))
    }

    fn contents(&mut self) -> Result<Option<TreeItem>, TreeError> {
        let Some(head) = self.held.get(..4) else { return Ok(None) };
        let len = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        if len == HOLE && self.form == TreeForm::Second {
            return self.hole();
        }
        let len = len as usize;
        if len > CHUNK_LEN_MAX {
            return Err(TreeError::TooLong(len));
        }
        if self.held.len() < 4 + len {
            return Ok(None);
        }
        self.held.advance(4);
        if len == 0 {
            self.state = TreePosition::Entry;
            return Ok(Some(TreeItem::FileEnd));
        }
        self.grow(len as u64)?;
        Ok(Some(TreeItem::Data(self.held.split_to(len).freeze())))
    }

    fn hole(&mut self) -> Result<Option<TreeItem>, TreeError> {
        let Some(len) = self.u64_at(4) else { return Ok(None) };
        self.grow(len)?;
        self.held.advance(12);
        Ok(Some(TreeItem::Hole(len)))
    }

    fn grow(&mut self, len: u64) -> Result<(), TreeError> {
        let grown = self.file_len.checked_add(len).filter(|len| *len <= FILE_LEN_MAX);
        self.file_len = grown.ok_or(TreeError::FileTooLong)?;
        Ok(())
    }

    fn u64_at(&self, at: usize) -> Option<u64> {
        self.held.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes)
    }

    fn u16_at(&self, at: usize) -> Option<usize> {
        self.held.get(at..at + 2).map(|two| usize::from(u16::from_be_bytes([two[0], two[1]])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<TreeItem> {
        vec![
            TreeItem::Size(1 << 40),
            TreeItem::Dir { path: b"d".to_vec(), mode: 0o755 },
            TreeItem::File { path: b"d/\xff name".to_vec(), mode: 0o4644 },
            TreeItem::Data(Bytes::from_static(b"hello")),
            TreeItem::Hole(1 << 40),
            TreeItem::Data(Bytes::from_static(b"end")),
            TreeItem::FileEnd,
            TreeItem::Same { path: b"s".to_vec(), first: b"d/\xff name".to_vec() },
            TreeItem::Omitted { path: b"p".to_vec(), kind: OmittedKind::Fifo },
            TreeItem::Omitted { path: b".git".to_vec(), kind: OmittedKind::Git },
            TreeItem::Link { path: b"l".to_vec(), target: b"../../etc".to_vec() },
            TreeItem::End,
        ]
    }

    #[test]
    fn a_tree_survives_any_cutting() {
        let mut sent = BytesMut::from(&MAGIC_2[..]);
        sample().iter().for_each(|item| write(item, &mut sent));
        for cut in 1..sent.len() {
            let mut reader = TreeReader::default();
            let mut got = Vec::new();
            for piece in sent.chunks(cut) {
                reader.push(piece);
                while let Some(item) = reader.next().unwrap() {
                    got.push(item);
                }
            }
            assert_eq!(got, sample());
            reader.finish().unwrap();
        }
    }

    fn read_all(magic: &[u8], items: &[TreeItem]) -> Result<Vec<TreeItem>, TreeError> {
        let mut sent = BytesMut::from(magic);
        items.iter().for_each(|item| write(item, &mut sent));
        let mut reader = TreeReader::default();
        reader.push(&sent);
        let mut got = Vec::new();
        while let Some(item) = reader.next()? {
            got.push(item);
        }
        Ok(got)
    }

    #[test]
    fn the_first_form_has_no_items_of_the_second_and_no_file_is_endless() {
        let file = TreeItem::File { path: b"f".to_vec(), mode: 0o644 };
        let only_second = [
            vec![TreeItem::Size(1)],
            vec![TreeItem::Same { path: b"a".to_vec(), first: b"b".to_vec() }],
            vec![TreeItem::Omitted { path: b"a".to_vec(), kind: OmittedKind::Socket }],
            vec![file.clone(), TreeItem::Hole(1)],
        ];
        for items in only_second {
            assert_eq!(read_all(MAGIC_2, &items).unwrap(), items);
            assert!(read_all(MAGIC, &items).is_err(), "{items:?}");
        }
        let endless = [file, TreeItem::Hole(FILE_LEN_MAX), TreeItem::Hole(1)];
        assert_eq!(read_all(MAGIC_2, &endless), Err(TreeError::FileTooLong));
        let away = [TreeItem::Same { path: b"a".to_vec(), first: b"../b".to_vec() }];
        assert!(matches!(read_all(MAGIC_2, &away), Err(TreeError::Path(_))));
    }

    #[test]
    fn paths_that_could_leave_are_refused() {
        for bad in
            [&b"/etc"[..], b"a/../b", b"..", b"a//b", b"a/", b"a\0b", b".", &b"x/".repeat(600), &[b'x'; 5000]]
        {
            assert!(check_path(bad).is_err(), "{bad:?}");
        }
        for good in [&b""[..], b"a", b"a/b", b"..a", b"\xff\xfe"] {
            check_path(good).unwrap();
        }
    }

    #[test]
    fn a_failing_sender_is_heard_and_a_cut_stream_is_noticed() {
        let mut sent = BytesMut::from(&MAGIC[..]);
        write_failure("disk \x1b gone", &mut sent);
        let mut reader = TreeReader::default();
        reader.push(&sent);
        assert_eq!(reader.next(), Err(TreeError::Sender("disk \\u{1b} gone".into())));
        assert_eq!(TreeReader::default().finish(), Err(TreeError::Cut));
    }
}
