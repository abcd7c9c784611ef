//! Reads the names, modes and object ids of a git index.
//!
//! Trust: a Body's index may hold any bytes. Every length is checked; parsing ends at the first malformed
//! entry and keeps the entries before it.

use std::{cmp::Ordering, collections::BTreeMap, path::Path};

use crate::{
    error::{ErrorContext, WorkspaceError},
    pack_writer::ObjectId,
};

/// Most names read from one index.
const NAMES_MAX: usize = 4_000_000;
/// Total length of all names.
const NAMES_LEN_MAX: usize = 256 << 20;
/// Longest name.
const NAME_LEN_MAX: usize = 4096;
/// Bytes of an entry before its object id.
const STAT_LEN: usize = 40;
/// Offset of the mode in an entry.
pub const MODE_AT: usize = 24;
/// Bytes of an entry before its flags: stat data and a SHA-1.
pub const FIXED_LEN: usize = 60;
/// Flag of an entry: extended flags follow.
const EXTENDED: u16 = 0x4000;
/// Extended flag: git does not expect the file in the work tree.
const SKIP_WORKTREE: u16 = 0x4000;
/// Length of the checksum at the end.
pub const END_LEN: usize = 20;
/// Length of the header.
pub const HEAD_LEN: usize = 12;

/// A sorted set of names, stored compactly.
#[derive(Debug, Default)]
pub struct IndexNames {
    text: Vec<u8>,
    entries: Vec<IndexName>,
}

#[derive(Debug, Clone, Copy)]
struct IndexName {
    begin: u32,
    len: u16,
    mode: u16,
    id: ObjectId,
}

/// Names that `git sparse-checkout` excludes from the work tree, each with mode and object id. A name that
/// ends with `/` stands for everything below it.
#[derive(Debug, Default)]
pub struct SparsePaths(BTreeMap<Vec<u8>, (u32, ObjectId)>);

impl SparsePaths {
    /// Reads them from an index, as far as it can be parsed.
    pub fn of(bytes: &[u8]) -> Self {
        let mut found = Self::default();
        let flags = |at: usize| {
            bytes.get(at..at + 2).and_then(|two| two.try_into().ok()).map_or(0, u16::from_be_bytes)
        };
        let number = |at: usize| {
            bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_be_bytes)
        };
        let (names, _) = IndexNames::read_with(bytes, |name, at| {
            if flags(at + FIXED_LEN) & EXTENDED != 0 && flags(at + FIXED_LEN + 2) & SKIP_WORKTREE != 0 {
                found.0.insert(name.to_owned(), (number(at + MODE_AT), [0; 20]));
            }
        });
        for (name, about) in &mut found.0 {
            about.1 = names.get(name).unwrap_or_default();
        }
        found
    }

    /// Whether a sparse checkout excludes a path.
    pub fn skips(&self, path: &[u8]) -> bool {
        let mut dirs = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| &path[..=at]);
        self.0.contains_key(path) || dirs.any(|dir| self.0.contains_key(dir))
    }

    /// All names with mode and object id.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u32, ObjectId)> {
        self.0.iter().map(|(name, (mode, id))| (name.as_slice(), *mode, *id))
    }
}

impl IndexNames {
    /// Reads the names of an index that Palisade made.
    pub fn of(path: &Path) -> Result<Self, WorkspaceError> {
        let bytes = std::fs::read(path).during("read an index")?;
        Ok(Self::read(&bytes).0)
    }

    /// Reads the names of an index as far as it can be parsed, and returns whether that is all of it.
    /// `shared` reads the file of a split index, which may hold most of the names.
    pub fn parse_with(bytes: &[u8], shared: impl FnOnce(&str) -> Option<Vec<u8>>) -> (Self, bool) {
        let (mut names, rest) = Self::read(bytes);
        match rest {
            SharedIndex::None => (names, true),
            SharedIndex::Unknown => (names, false),
            SharedIndex::Shared(id) => {
                // The split index may have deleted some of these since. Treating an untracked name as tracked
                // does no harm.
                let Some(bytes) = shared(&format!("sharedindex.{}", crate::pack_writer::hex(&id))) else {
                    return (names, false);
                };
                let (more, rest) = Self::read(&bytes);
                let taken = more.iter().all(|(name, id)| names.push(name, id, 0));
                names.sort();
                (names, taken && matches!(rest, SharedIndex::None))
            }
        }
    }

    #[cfg(test)]
    fn parse(bytes: &[u8]) -> (Self, bool) {
        Self::parse_with(bytes, |_| None)
    }

    fn read(bytes: &[u8]) -> (Self, SharedIndex) {
        Self::read_with(bytes, |_, _| ())
    }

    fn read_with(bytes: &[u8], mut each: impl FnMut(&[u8], usize)) -> (Self, SharedIndex) {
        let mut names = Self::default();
        let number =
            |at: usize| bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_be_bytes);
        let (Some(b"DIRC"), Some(version @ 2..=4), Some(count)) = (bytes.get(..4), number(4), number(8))
        else {
            return (names, SharedIndex::Unknown);
        };
        let mut at = HEAD_LEN;
        for _ in 0..(count as usize).min(NAMES_MAX) {
            let last = names.entries.last().map_or(&[][..], |last| names.text_of(last));
            let Some((name, id, next)) = entry(bytes, at, version, last) else { break };
            // In version 4 a few bytes can encode a long name, so the total length needs a limit.
            if !names.push(&name, id, number(at + MODE_AT).unwrap_or(0)) {
                break;
            }
            each(&name, at);
            at = next;
        }
        let rest = if names.entries.len() == count as usize {
            shared_index(bytes, at)
        } else {
            SharedIndex::Unknown
        };
        names.sort();
        (names, rest)
    }

    /// Adds a name; returns false if a limit is reached.
    pub fn push(&mut self, name: &[u8], id: ObjectId, mode: u32) -> bool {
        let (Ok(begin), Ok(len)) = (u32::try_from(self.text.len()), u16::try_from(name.len())) else {
            return false;
        };
        if self.text.len() + name.len() > NAMES_LEN_MAX {
            return false;
        }
        self.text.extend_from_slice(name);
        self.entries.push(IndexName { begin, len, mode: u16::try_from(mode).unwrap_or(0), id });
        true
    }

    /// Sorts the names; every lookup needs that.
    pub fn sort(&mut self) {
        let text = &self.text;
        let of = |name: &IndexName| &text[name.begin as usize..][..usize::from(name.len)];
        if !self.entries.is_sorted_by(|a, b| of(a) <= of(b)) {
            self.entries.sort_by(|a, b| of(a).cmp(of(b)));
        }
    }

    fn text_of(&self, name: &IndexName) -> &[u8] {
        &self.text[name.begin as usize..][..usize::from(name.len)]
    }

    fn find(&self, name: &[u8]) -> Result<usize, usize> {
        self.entries.binary_search_by(|other| self.text_of(other).cmp(name))
    }

    /// Whether it has a name.
    pub fn contains(&self, name: &[u8]) -> bool {
        self.find(name).is_ok()
    }

    /// The object id of a name.
    pub fn get(&self, name: &[u8]) -> Option<ObjectId> {
        self.find(name).ok().map(|at| self.entries[at].id)
    }

    /// The mode and the object id of a name.
    pub fn mode_and_id(&self, name: &[u8]) -> Option<(u32, ObjectId)> {
        self.find(name).ok().map(|at| (u32::from(self.entries[at].mode), self.entries[at].id))
    }

    /// All names with their object ids.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], ObjectId)> {
        self.entries.iter().map(|name| (self.text_of(name), name.id))
    }

    /// The names of regular files.
    pub fn files(&self) -> impl Iterator<Item = (&[u8], ObjectId)> {
        self.entries.iter().filter(|name| name.mode >> 12 == 0o10).map(|name| (self.text_of(name), name.id))
    }

    /// The names below a directory.
    pub fn below(&self, dir: &[u8]) -> impl Iterator<Item = &[u8]> {
        let begin = [dir, b"/"].concat();
        let first = self.find(&begin).unwrap_or_else(|at| at);
        self.entries[first..]
            .iter()
            .map(|name| self.text_of(name))
            .take_while(move |name| name.starts_with(&begin))
    }

    /// Whether it has a name below a directory.
    pub fn holds(&self, dir: &[u8]) -> bool {
        self.below(dir).next().is_some()
    }

    /// The names that `others` lacks.
    pub fn without<'a>(&'a self, others: &'a Self) -> Vec<&'a [u8]> {
        let mut theirs = others.iter().map(|(name, _)| name).peekable();
        let mut left = Vec::new();
        for (name, _) in self.iter() {
            while theirs.next_if(|other| *other < name).is_some() {}
            if theirs.peek().is_none_or(|other| name.cmp(other) != Ordering::Equal) {
                left.push(name);
            }
        }
        left
    }
}

/// Parses the entry at an offset: its name, its object id, and the offset of the next entry.
pub fn entry(bytes: &[u8], at: usize, version: u32, last: &[u8]) -> Option<(Vec<u8>, ObjectId, usize)> {
    let id: ObjectId = bytes.get(at + STAT_LEN..at + FIXED_LEN)?.try_into().ok()?;
    let flags = u16::from_be_bytes(bytes.get(at + FIXED_LEN..at + FIXED_LEN + 2)?.try_into().ok()?);
    let extended = version >= 3 && flags & EXTENDED != 0;
    let begin = at + FIXED_LEN + if extended { 4 } else { 2 };
    let until_nul = |from: usize| {
        let rest = bytes.get(from..)?;
        let len = rest.iter().take(NAME_LEN_MAX + 1).position(|byte| *byte == 0)?;
        Some(&rest[..len])
    };
    if version == 4 {
        let (strip, used) = varint(bytes.get(begin..)?)?;
        let tail = until_nul(begin + used)?;
        let kept = last.len().checked_sub(strip)?;
        let name = [&last[..kept], tail].concat();
        return (name.len() <= NAME_LEN_MAX).then_some((name, id, begin + used + tail.len() + 1));
    }
    let name = until_nul(begin)?;
    let len = begin + name.len() - at;
    // Entries are padded with 1 to 8 zero bytes to a multiple of eight.
    Some((name.to_owned(), id, at + len + 8 - len % 8))
}

/// Names that a split index stores in another file.
enum SharedIndex {
    None,
    /// The shared index, by its checksum.
    Shared(ObjectId),
    Unknown,
}

/// Parses the extensions behind the entries. A lower-case name marks an extension that a reader must
/// understand.
fn shared_index(bytes: &[u8], mut at: usize) -> SharedIndex {
    let end = bytes.len().saturating_sub(END_LEN);
    while at + 8 <= end {
        let Some(len) =
            bytes.get(at + 4..at + 8).and_then(|four| four.try_into().ok()).map(u32::from_be_bytes)
        else {
            return SharedIndex::Unknown;
        };
        let shared = bytes.get(at + 8..at + 28).and_then(|id| ObjectId::try_from(id).ok());
        match (&bytes[at..at + 4], shared) {
            (b"link", Some(id)) => return SharedIndex::Shared(id),
            ([b'a'..=b'z', ..], _) => return SharedIndex::Unknown,
            _ => at = at.saturating_add(8).saturating_add(len as usize),
        }
    }
    SharedIndex::None
}

/// The variable-length offset encoding of packs: seven bits per byte, most significant first, each step adds
/// one.
fn varint(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut value = usize::from(bytes.first()? & 127);
    let mut used = 1;
    while bytes[used - 1] & 128 != 0 {
        value = value.checked_add(1)?.checked_mul(128)? | usize::from(bytes.get(used)? & 127);
        used += 1;
        if used > 8 {
            return None;
        }
    }
    Some((value, used))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry_of(name: &str, flags: u16) -> Vec<u8> {
        let mut bytes = vec![0; STAT_LEN];
        bytes.extend([name.len() as u8; 20]);
        bytes.extend(flags.to_be_bytes());
        bytes.extend(name.as_bytes());
        let len = bytes.len();
        bytes.extend(vec![0; 8 - len % 8]);
        bytes
    }

    fn index_of(version: u32, count: u32, entries: &[u8]) -> Vec<u8> {
        [b"DIRC".as_slice(), &version.to_be_bytes(), &count.to_be_bytes(), entries].concat()
    }

    fn named(names: &[&str]) -> IndexNames {
        let mut all = IndexNames::default();
        names.iter().for_each(|name| assert!(all.push(name.as_bytes(), [0; 20], 0o100_644)));
        all.sort();
        all
    }

    fn texts<'a>(names: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        names.into_iter().map(|name| String::from_utf8(name.to_vec()).unwrap()).collect()
    }

    #[test]
    fn names_are_read_and_nonsense_ends_the_reading() {
        let entries = [entry_of("a", 1), entry_of("dir/some-longer-name", 20)].concat();
        let whole = index_of(2, 2, &entries);
        let (names, all) = IndexNames::parse(&whole);
        assert!(all && names.iter().eq([(&b"a"[..], [1; 20]), (b"dir/some-longer-name", [20; 20])]));
        assert!(!IndexNames::parse(&index_of(2, u32::MAX, &entries)).1);
        assert!(!IndexNames::parse(&index_of(9, 2, &entries)).1);
        for len in 0..whole.len() - 8 {
            assert!(!IndexNames::parse(&whole[..len]).1, "cut at {len}");
        }
    }

    #[test]
    fn files_that_need_not_be_there_are_known() {
        let skipped_entry = |name: &str| {
            let mut bytes = vec![0; STAT_LEN];
            bytes.extend([name.len() as u8; 20]);
            bytes.extend((EXTENDED | name.len() as u16).to_be_bytes());
            bytes.extend(SKIP_WORKTREE.to_be_bytes());
            bytes.extend(name.as_bytes());
            let len = bytes.len();
            bytes.extend(vec![0; 8 - len % 8]);
            bytes
        };
        let index = index_of(3, 3, &[entry_of("a", 1), skipped_entry("b/c"), skipped_entry("d/")].concat());
        let found = SparsePaths::of(&index);
        assert_eq!(
            found.iter().map(|(name, _, id)| (name, id)).collect::<Vec<_>>(),
            [(&b"b/c"[..], [3; 20]), (b"d/", [2; 20])]
        );
        let is = |path: &str| found.skips(path.as_bytes());
        assert!(is("b/c") && is("d/e") && is("d/e/f") && !is("a") && !is("b/d") && !is("dd"));
    }

    #[test]
    fn an_index_whose_names_are_elsewhere_is_not_whole() {
        let with = |name: &[u8; 4]| {
            [
                index_of(2, 1, &entry_of("a", 1)),
                name.to_vec(),
                4u32.to_be_bytes().to_vec(),
                vec![0; 4 + END_LEN],
            ]
            .concat()
        };
        assert!(IndexNames::parse(&with(b"TREE")).1);
        assert!(!IndexNames::parse(&with(b"sdir")).1);
        let split = [
            index_of(2, 1, &entry_of("a", 1)),
            b"link".to_vec(),
            20u32.to_be_bytes().to_vec(),
            vec![7; 20],
            vec![0; END_LEN],
        ]
        .concat();
        assert!(!IndexNames::parse(&split).1, "the rest is missing");
        let (names, whole) = IndexNames::parse_with(&split, |name| {
            assert_eq!(name, format!("sharedindex.{}", "07".repeat(20)));
            Some(index_of(2, 1, &entry_of("b", 1)))
        });
        assert!(whole && names.contains(b"a") && names.contains(b"b"));
    }

    #[test]
    fn questions_are_answered_whatever_the_order() {
        let all = named(&["b", "a/x", "a-b", "a/y/z", "a0"]);
        assert_eq!(texts(all.below(b"a")), ["a/x", "a/y/z"]);
        assert!(all.holds(b"a/y") && !all.holds(b"b") && all.contains(b"b") && !all.contains(b"a"));
        assert_eq!(texts(all.without(&named(&["a/x", "b", "c", "a"]))), ["a-b", "a/y/z", "a0"]);
        assert_eq!(texts(all.without(&IndexNames::default())).len(), 5);
    }
}
