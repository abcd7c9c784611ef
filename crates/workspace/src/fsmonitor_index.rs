//! Writes an index that tells git all files are unchanged since a named moment (extension `FSMN`). git then
//! asks its fsmonitor for changes since that moment, instead of reading every file.
//!
//! The extension has version 1, because git before 2.26 refuses an index with version 2. Every git that knows
//! the extension reads the token of version 1 as a time, and newer ones pass it on unchanged.
//!
//! Invariant: an entry without known stat data is marked as changed.

use sha1::{Digest, Sha1};

use crate::index::{END_LEN, FIXED_LEN, HEAD_LEN, MODE_AT, entry};

/// Offset of the modification time in an entry.
const MTIME_AT: usize = 8;
/// The mode of a submodule's commit.
const LINK: u32 = 0o160_000;
/// Most entries; far below the number that one run-length word of the bitmap can hold.
const ENTRIES_MAX: u32 = 4_000_000;
const NAME: &[u8; 4] = b"FSMN";
const VERSION: u32 = 1;

/// Adds the extension with a token to an index; none if the index cannot be parsed.
pub fn with_unchanged(index: &[u8], token: u64) -> Option<Vec<u8>> {
    let entries = IndexEntries::read(index)?;
    let mut all = index.get(..entries.end)?.to_vec();
    all.extend(kept_extensions(index.get(entries.end..index.len().checked_sub(END_LEN)?)?)?);
    let mut bytes = VERSION.to_be_bytes().to_vec();
    bytes.extend(token.to_be_bytes());
    let bitmap = bitmap(&entries.unknown);
    bytes.extend(u32::try_from(bitmap.len()).ok()?.to_be_bytes());
    bytes.extend(bitmap);
    all.extend(NAME);
    all.extend(u32::try_from(bytes.len()).ok()?.to_be_bytes());
    all.extend(bytes);
    let sum = Sha1::digest(&all);
    all.extend(sum);
    Some(all)
}

/// The entries of an index.
struct IndexEntries {
    /// Offset behind the last entry.
    end: usize,
    /// For each entry, whether git must check its file.
    unknown: Vec<bool>,
}

impl IndexEntries {
    fn read(index: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u32::from_be_bytes(index.get(at..at + 4)?.try_into().ok()?));
        let (version, count) = (number(4)?, number(8)?);
        if index.get(..4)? != b"DIRC" || !(2..=4).contains(&version) || count > ENTRIES_MAX {
            return None;
        }
        let mut found = Self { end: HEAD_LEN, unknown: Vec::new() };
        let mut last = Vec::new();
        for _ in 0..count {
            let (name, _, next) = entry(index, found.end, version, &last)?;
            // A submodule's HEAD may change without a change in this work tree.
            let link = number(found.end + MODE_AT)? == LINK;
            // Two bits of the flags hold the stage of a conflict; one says that extended flags follow.
            let flags = index.get(found.end + FIXED_LEN)?;
            found.unknown.push(link || number(found.end + MTIME_AT)? == 0 || flags & 0x70 != 0);
            (last, found.end) = (name, next);
        }
        Some(found)
    }
}

/// Keeps the extensions that stay valid without the others: the cache of written trees.
fn kept_extensions(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut kept = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_be_bytes(rest.get(4..8)?.try_into().ok()?) as usize;
        let extension = rest.get(..8 + len)?;
        match &extension[..4] {
            b"TREE" => kept.extend_from_slice(extension),
            // A lower-case name marks an extension that a reader must understand.
            [b'a'..=b'z', ..] => return None,
            _ => {}
        }
        rest = &rest[8 + len..];
    }
    Some(kept)
}

/// An EWAH bitmap as git stores it: number of bits, number of words, a run-length word that counts the
/// literal words, those words, and the position of the run-length word.
fn bitmap(bits: &[bool]) -> Vec<u8> {
    let count = bits.iter().rposition(|bit| *bit).map_or(0, |last| last + 1);
    let words = bits[..count]
        .chunks(64)
        .map(|bits| bits.iter().rev().fold(0u64, |word, bit| word << 1 | u64::from(*bit)));
    let words: Vec<u64> = words.collect();
    let plain = (words.len() as u64) << 33;
    let numbers = [count as u32, words.len() as u32 + 1].into_iter().flat_map(u32::to_be_bytes);
    let words = [plain].into_iter().chain(words).flat_map(u64::to_be_bytes);
    numbers.chain(words).chain(0u32.to_be_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf, process::Command};

    use super::*;

    struct MonitorScene(PathBuf);

    impl MonitorScene {
        /// A repository with files, and an fsmonitor hook that reports no change.
        fn make(name: &str, count: usize) -> Self {
            let place = Self(std::env::temp_dir().join(format!("pal-monitor-{name}-{}", std::process::id())));
            fs::create_dir_all(&place.0).unwrap();
            place.git(&["init", "-q"]);
            (0..count).for_each(|n| fs::write(place.0.join(format!("f{n}")), "old").unwrap());
            place.git(&["add", "."]);
            place.git(&["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]);
            let hook = place.0.join(".git/hook");
            fs::write(&hook, "#!/bin/sh\nprintf '%s\\n' \"$1 $2\" >.git/asked\nprintf 'next\\0'\n").unwrap();
            fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            place
        }

        fn git(&self, args: &[&str]) -> String {
            let mut git = Command::new("git");
            git.current_dir(&self.0).env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_OPTIONAL_LOCKS", "0");
            let said = git.args(args).output().unwrap();
            assert!(said.status.success(), "{args:?} {said:?}");
            String::from_utf8(said.stdout).unwrap()
        }

        fn index(&self) -> PathBuf {
            self.0.join(".git/index")
        }
    }

    impl Drop for MonitorScene {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn git_believes_what_the_index_says_and_looks_at_what_it_does_not_know() {
        let place = MonitorScene::make("believed", 130);
        let mut index = fs::read(place.index()).unwrap();
        // One file in the second word has no stat data. The index sorts names as f0, f1, f10, f100, …
        let names: Vec<String> = place.git(&["ls-files"]).lines().map(str::to_owned).collect();
        let unknown = 100;
        let mut at = HEAD_LEN;
        for _ in 0..unknown {
            at = entry(&index, at, 2, &[]).unwrap().2;
        }
        index[at..at + 16].fill(0);
        fs::write(place.index(), with_unchanged(&index, 1 << 63 | 7).unwrap()).unwrap();
        (0..130).for_each(|n| fs::write(place.0.join(format!("f{n}")), "changed").unwrap());
        let hooked =
            ["-c", "core.fsmonitor=.git/hook", "-c", "core.fsmonitorHookVersion=2", "status", "--porcelain"];
        assert_eq!(place.git(&hooked), format!(" M {}\n", names[unknown]));
        assert_eq!(
            fs::read_to_string(place.0.join(".git/asked")).unwrap(),
            format!("2 {}\n", 1u64 << 63 | 7)
        );
        // Without an fsmonitor, git checks every file.
        assert_eq!(place.git(&["status", "--porcelain"]).lines().count(), 130);
        assert!(place.git(&["fsck", "--no-dangling"]).is_empty());
    }

    #[test]
    fn an_index_that_makes_no_sense_stays_what_it_is() {
        let place = MonitorScene::make("sense", 3);
        let index = fs::read(place.index()).unwrap();
        assert!(with_unchanged(&index, 1).is_some());
        let end = IndexEntries::read(&index).unwrap().end;
        for len in 0..end + END_LEN {
            assert!(with_unchanged(&index[..len], 1).is_none(), "cut at {len}");
        }
        let mut other = index.clone();
        other[7] = 9;
        assert!(with_unchanged(&other, 1).is_none(), "an unknown version");
    }
}
