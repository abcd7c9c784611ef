//! Files that Git LFS stores outside of the repository. In the tree, and so in a Body, they are pointers.
//!
//! Absent on purpose: replacing pointers by the files' contents. Without the LFS filters in the Body, git
//! there would report each file as modified, and the agent's next commit would contain the contents.

use std::path::Path;

use crate::{error::WorkspaceError, git::Git, objects::Objects};

/// The first bytes of a pointer.
const BEGINS: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Longest pointer.
const LEN_MAX: u64 = 1024;
/// Most files of a tree that are checked.
const LOOKED_AT_MAX: usize = 100_000;

/// Paths of the pointers in a tree; none if the repository uses no LFS.
pub fn pointers(repository: &Path, tree: &str) -> Result<Vec<String>, WorkspaceError> {
    if !repository.join("lfs/objects").is_dir() {
        return Ok(Vec::new());
    }
    let git = Git::at(repository);
    let said = git.run(["ls-tree", "-r", "-z", "-l", "--full-tree", tree])?;
    let small: Vec<(&str, &[u8])> =
        said.split(|byte| *byte == 0).filter_map(small_file).take(LOOKED_AT_MAX).collect();
    let mut objects = Objects::start(&git)?;
    let mut found = Vec::new();
    for (id, path) in small {
        if objects.contents(id, "blob", LEN_MAX)?.starts_with(BEGINS) {
            found.push(String::from_utf8_lossy(path).into_owned());
        }
    }
    Ok(found)
}

/// Parses a line `MODE blob ID LEN`, tab, path; returns id and path of a file that is small enough to be a
/// pointer.
fn small_file(record: &[u8]) -> Option<(&str, &[u8])> {
    let tab = record.iter().position(|byte| *byte == b'\t')?;
    let mut fields = std::str::from_utf8(&record[..tab]).ok()?.split_ascii_whitespace();
    let (mode, _kind, id, len) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let len: u64 = len.parse().ok()?;
    let fits = mode.starts_with("100") && len > BEGINS.len() as u64 && len <= LEN_MAX;
    fits.then_some((id, &record[tab + 1..]))
}

#[cfg(test)]
mod tests {
    use super::small_file;

    #[test]
    fn only_small_files_are_looked_at() {
        assert_eq!(small_file(b"100644 blob ab      130\tdir/a b"), Some(("ab", &b"dir/a b"[..])));
        for other in [
            &b"100644 blob ab 9000\tx"[..],
            b"120000 blob ab 130\tx",
            b"160000 commit ab -\tx",
            b"100644 blob ab 10\tx",
            b"",
        ] {
            assert_eq!(small_file(other), None);
        }
    }
}
