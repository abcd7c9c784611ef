//! Files that are kept elsewhere by Git LFS: in the tree, and so in a Body, they are pointers.
//!
//! Absent on purpose: putting their contents in. Without LFS's own filters in the Body, git there would take each for
//! changed, and the next commit of an agent would hold the contents themselves.

use std::path::Path;

use crate::{error::WorkspaceError, git::Git, objects::Objects};

/// What a pointer begins with.
const BEGINS: &[u8] = b"version https://git-lfs.github.com/spec/";
/// How long one may be.
const LEN_MAX: u64 = 1024;
/// Most files that are looked at.
const LOOKED_AT_MAX: usize = 100_000;

/// The pointers in a tree, by their paths; none where the repository keeps nothing elsewhere.
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

/// `MODE blob ID LEN`, a tab and the path: one that may be a pointer.
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
