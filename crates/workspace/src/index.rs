//! git's index, read for the names in it and nothing else.
//!
//! Trust: a Body's index is any bytes. Every length is checked, and what makes no sense ends the reading with what was
//! understood so far.

use std::{collections::BTreeSet, path::Path};

use crate::error::{During, WorkspaceError};

/// Most names taken from one index.
const NAMES_MAX: usize = 4_000_000;
/// All names together.
const NAMES_LEN_MAX: usize = 256 << 20;
/// Longest name.
const NAME_LEN_MAX: usize = 4096;
/// Bytes of an entry before its flags: stat data and a SHA-1.
const FIXED_LEN: usize = 60;
/// Flags of an entry: there are more of them.
const EXTENDED: u16 = 0x4000;
/// Of those: its file is not looked for.
const SKIP_WORKTREE: u16 = 0x4000;

/// The names in an index of ours.
pub fn names(path: &Path) -> Result<BTreeSet<Vec<u8>>, WorkspaceError> {
    let bytes = std::fs::read(path).during("read an index")?;
    Ok(parse(&bytes).0.into_iter().collect())
}

/// The names in an index, as far as it can be understood, and whether that is all of it.
pub fn parse(bytes: &[u8]) -> (Vec<Vec<u8>>, bool) {
    parse_with(bytes, |_, _| ())
}

/// The names in an index whose files need not be there: `git sparse-checkout` took them away. A name that ends with `/`
/// stands for all below it.
pub fn skipped(bytes: &[u8]) -> BTreeSet<Vec<u8>> {
    let mut found = BTreeSet::new();
    parse_with(bytes, |name, at| {
        let flags = |at: usize| bytes.get(at..at + 2).and_then(|two| two.try_into().ok()).map_or(0, u16::from_be_bytes);
        if flags(at + FIXED_LEN) & EXTENDED != 0 && flags(at + FIXED_LEN + 2) & SKIP_WORKTREE != 0 {
            found.insert(name.to_owned());
        }
    });
    found
}

/// Whether a path is one of those.
pub fn is_skipped(skipped: &BTreeSet<Vec<u8>>, path: &[u8]) -> bool {
    let dirs = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| &path[..=at]);
    skipped.contains(path) || dirs.into_iter().any(|dir| skipped.contains(dir))
}

fn parse_with(bytes: &[u8], mut each: impl FnMut(&[u8], usize)) -> (Vec<Vec<u8>>, bool) {
    let mut names = Vec::new();
    let number = |at: usize| bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_be_bytes);
    let (Some(b"DIRC"), Some(version @ 2..=4), Some(count)) = (bytes.get(..4), number(4), number(8)) else { return (names, false) };
    let (mut at, mut room) = (12, NAMES_LEN_MAX);
    for _ in 0..(count as usize).min(NAMES_MAX) {
        let last: &[u8] = names.last().map_or(&[], Vec::as_slice);
        let Some((name, next)) = entry(bytes, at, version, last) else { break };
        // In version 4 a few bytes can stand for a long name.
        let Some(left) = room.checked_sub(name.len()) else { break };
        room = left;
        each(&name, at);
        names.push(name);
        at = next;
    }
    let whole = names.len() == count as usize;
    (names, whole)
}

fn entry(bytes: &[u8], at: usize, version: u32, last: &[u8]) -> Option<(Vec<u8>, usize)> {
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
        return (name.len() <= NAME_LEN_MAX).then_some((name, begin + used + tail.len() + 1));
    }
    let name = until_nul(begin)?;
    let len = begin + name.len() - at;
    // Padded with 1 to 8 zeroes to a multiple of eight.
    Some((name.to_owned(), at + len + 8 - len % 8))
}

/// The offset encoding of packs: seven bits a byte, most significant first, each step adding one.
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
        let mut bytes = vec![0; FIXED_LEN];
        bytes.extend(flags.to_be_bytes());
        bytes.extend(name.as_bytes());
        let len = bytes.len();
        bytes.extend(vec![0; 8 - len % 8]);
        bytes
    }

    fn index_of(version: u32, count: u32, entries: &[u8]) -> Vec<u8> {
        [b"DIRC".as_slice(), &version.to_be_bytes(), &count.to_be_bytes(), entries].concat()
    }

    #[test]
    fn files_that_need_not_be_there_are_known() {
        let skipped_entry = |name: &str| {
            let mut bytes = vec![0; FIXED_LEN];
            bytes.extend((EXTENDED | name.len() as u16).to_be_bytes());
            bytes.extend(SKIP_WORKTREE.to_be_bytes());
            bytes.extend(name.as_bytes());
            let len = bytes.len();
            bytes.extend(vec![0; 8 - len % 8]);
            bytes
        };
        let index = index_of(3, 3, &[entry_of("a", 1), skipped_entry("b/c"), skipped_entry("d/")].concat());
        let found = skipped(&index);
        assert_eq!(parse(&index), (vec![b"a".to_vec(), b"b/c".to_vec(), b"d/".to_vec()], true));
        let is = |path: &str| is_skipped(&found, path.as_bytes());
        assert!(is("b/c") && is("d/e") && is("d/e/f") && !is("a") && !is("b/d") && !is("dd"));
    }

    #[test]
    fn names_are_read_and_nonsense_ends_the_reading() {
        let entries = [entry_of("a", 1), entry_of("dir/some-longer-name", 20)].concat();
        let whole = index_of(2, 2, &entries);
        assert_eq!(parse(&whole), (vec![b"a".to_vec(), b"dir/some-longer-name".to_vec()], true));
        assert!(!parse(&index_of(2, u32::MAX, &entries)).1);
        assert_eq!(parse(&index_of(9, 2, &entries)), (Vec::new(), false));
        for len in 0..whole.len() - 8 {
            assert!(!parse(&whole[..len]).1, "cut at {len}");
        }
    }
}
