//! Changes git trees path by path; reads and writes only the directories on the paths.
//!
//! Trust: the user's git or Palisade made the trees that are read. New names come from a Body and were
//! checked before.

use std::collections::BTreeMap;

use crate::{
    error::{ErrorContext, WorkspaceError},
    git::GitError,
    objects::Objects,
    pack_writer::{ObjectId, ObjectKind, PackWriter, hex},
};

/// Largest tree object.
const TREE_LEN_MAX: u64 = 256 << 20;
/// The mode of a directory.
const DIR: u32 = 0o40000;

/// A tree that is being changed.
#[derive(Debug)]
pub struct TreeWriter<'a> {
    objects: &'a mut Objects,
    root: TreeDir,
    /// The trees written so far, with their directories.
    pub written: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug, Default)]
struct TreeDir {
    was: Option<ObjectId>,
    entries: BTreeMap<Vec<u8>, TreeEntry>,
}

#[derive(Debug)]
enum TreeEntry {
    Same { mode: u32, id: ObjectId },
    Open(TreeDir),
}

impl<'a> TreeWriter<'a> {
    /// Starts with an existing tree.
    pub fn of(objects: &'a mut Objects, tree: &str) -> Result<Self, WorkspaceError> {
        let root = load(objects, tree)?;
        Ok(Self { objects, root, written: BTreeMap::new() })
    }

    /// Puts an entry at a path, and replaces any entry at the path or on the way to it.
    pub fn set(&mut self, path: &[u8], mode: u32, id: ObjectId) -> Result<(), WorkspaceError> {
        let (above, name) = split(path);
        let mut dir = &mut self.root;
        for part in above.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            dir = enter(self.objects, dir, part)?;
        }
        dir.entries.insert(name.to_owned(), TreeEntry::Same { mode, id });
        Ok(())
    }

    /// Removes the entry at a path.
    pub fn remove(&mut self, path: &[u8]) -> Result<(), WorkspaceError> {
        let (above, name) = split(path);
        let mut dir = &mut self.root;
        for part in above.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            match dir.entries.get(part) {
                Some(TreeEntry::Open(_) | TreeEntry::Same { mode: DIR, .. }) => {
                    dir = enter(self.objects, dir, part)?
                }
                _ => return Ok(()),
            }
        }
        dir.entries.remove(name);
        Ok(())
    }

    /// Writes the changed trees; returns the id of the top.
    pub fn write(&mut self, pack: &mut PackWriter) -> Result<String, WorkspaceError> {
        let id = write(&self.root, b"", pack, &mut self.written)?;
        // The top may be empty; git has an object for that.
        let id = match id {
            Some(id) => id,
            None => pack.add(ObjectKind::Tree, 0, std::io::empty()).during("write a tree")?,
        };
        Ok(hex(&id))
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    path.iter().rposition(|byte| *byte == b'/').map_or((&[], path), |at| (&path[..at], &path[at + 1..]))
}

fn enter<'d>(
    objects: &mut Objects,
    dir: &'d mut TreeDir,
    name: &[u8],
) -> Result<&'d mut TreeDir, WorkspaceError> {
    let entry = dir.entries.entry(name.to_owned()).or_insert_with(|| TreeEntry::Open(TreeDir::default()));
    if let TreeEntry::Same { mode, id } = entry {
        *entry = TreeEntry::Open(if *mode == DIR { load(objects, &hex(id))? } else { TreeDir::default() });
    }
    match entry {
        TreeEntry::Open(dir) => Ok(dir),
        TreeEntry::Same { .. } => Err(GitError::Answer("cat-file").into()),
    }
}

fn load(objects: &mut Objects, tree: &str) -> Result<TreeDir, WorkspaceError> {
    let bytes = objects.contents(tree, "tree", TREE_LEN_MAX)?;
    let was = crate::pack_writer::id_of(tree.as_bytes());
    parse(&bytes).map(|entries| TreeDir { was, entries }).ok_or_else(|| GitError::Answer("cat-file").into())
}

/// Parses a tree: `MODE NAME`, a zero byte and a 20-byte id, repeated.
fn parse(mut bytes: &[u8]) -> Option<BTreeMap<Vec<u8>, TreeEntry>> {
    let mut entries = BTreeMap::new();
    while !bytes.is_empty() {
        let space = bytes.iter().position(|byte| *byte == b' ')?;
        let mode = u32::from_str_radix(std::str::from_utf8(&bytes[..space]).ok()?, 8).ok()?;
        let rest = &bytes[space + 1..];
        let end = rest.iter().position(|byte| *byte == 0)?;
        let id: ObjectId = rest.get(end + 1..end + 21)?.try_into().ok()?;
        entries.insert(rest[..end].to_owned(), TreeEntry::Same { mode, id });
        bytes = &rest[end + 21..];
    }
    Some(entries)
}

/// Writes a directory; none if it is empty, because git stores no empty directory.
fn write(
    dir: &TreeDir,
    path: &[u8],
    pack: &mut PackWriter,
    written: &mut BTreeMap<String, Vec<u8>>,
) -> Result<Option<ObjectId>, WorkspaceError> {
    let mut lines: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for (name, entry) in &dir.entries {
        let (mode, id) = match entry {
            TreeEntry::Same { mode, id } => (*mode, *id),
            TreeEntry::Open(below) => match write(below, &join(path, name), pack, written)? {
                Some(id) => (DIR, id),
                None => continue,
            },
        };
        // git sorts directories as if their names ended with a slash.
        let order = if mode == DIR { [name.as_slice(), b"/"].concat() } else { name.clone() };
        lines.push((order, [format!("{mode:o} ").as_bytes(), name, b"\0", &id].concat()));
    }
    if lines.is_empty() {
        return Ok(None);
    }
    lines.sort();
    let bytes: Vec<u8> = lines.into_iter().flat_map(|(_, line)| line).collect();
    let same = dir.was.filter(|was| name_of(&bytes) == *was);
    let id = match same {
        Some(id) => id,
        None => pack.add(ObjectKind::Tree, bytes.len() as u64, bytes.as_slice()).during("write a tree")?,
    };
    written.insert(hex(&id), path.to_owned());
    Ok(Some(id))
}

fn name_of(tree: &[u8]) -> ObjectId {
    use sha1::Digest;
    let mut name = sha1::Sha1::new();
    name.update(format!("tree {}\0", tree.len()));
    name.update(tree);
    name.finalize().into()
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_owned() } else { [path, b"/", name].concat() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Git, bare_repo};

    /// A test repository, to compare with the trees that git writes from an index.
    struct TreeScene(std::path::PathBuf);

    impl TreeScene {
        fn make(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pal-trees-{name}-{}", std::process::id()));
            bare_repo::make(&dir, &[], None).unwrap();
            Self(dir)
        }

        fn git(&self) -> Git {
            Git::at(&self.0).index(&self.0.join("index"))
        }

        fn blob(&self, text: &str) -> ObjectId {
            let said = self.git().feed(["hash-object", "-w", "--stdin"], text.as_bytes().to_vec()).unwrap();
            crate::pack_writer::id_of(said.trim_ascii_end()).unwrap()
        }

        /// The tree that git writes for these names.
        fn native(&self, names: &[&str]) -> String {
            let _ = std::fs::remove_file(self.0.join("index"));
            let lines: String =
                names.iter().map(|name| format!("100644 {}\t{name}\n", hex(&self.blob(name)))).collect();
            self.git().feed(["update-index", "--add", "--index-info"], lines.into_bytes()).unwrap();
            self.git().line(["write-tree"]).unwrap()
        }
    }

    impl Drop for TreeScene {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn changes_give_the_tree_that_git_gives() {
        let place = TreeScene::make("same");
        let check = |begin: &[&str], gone: &[&str], new: &[&str], expected: &[&str]| {
            let (base, expected) = (place.native(begin), place.native(expected));
            let mut objects = Objects::start(&place.git()).unwrap();
            let path = place.0.join("objects/pack/pack-0000000000000000000000000000000000000000.pack");
            let mut pack = PackWriter::begin(&path).unwrap();
            let mut trees = TreeWriter::of(&mut objects, &base).unwrap();
            gone.iter().for_each(|name| trees.remove(name.as_bytes()).unwrap());
            new.iter().for_each(|name| trees.set(name.as_bytes(), 0o100644, place.blob(name)).unwrap());
            assert_eq!(trees.write(&mut pack).unwrap(), expected, "{begin:?} - {gone:?} + {new:?}");
            std::fs::remove_file(&path).unwrap();
        };
        check(&["a"], &[], &[], &["a"]);
        check(&["a", "d/x", "d/y"], &["d/x"], &["b"], &["a", "b", "d/y"]);
        check(&["a", "d/e/f"], &["d/e/f"], &[], &["a"]);
        check(&["a"], &["a"], &[], &[]);
        check(&["a"], &[], &["a/b/c"], &["a/b/c"]);
        check(&["a/b/c", "z"], &[], &["a"], &["a", "z"]);
        check(&["a-b", "a/x"], &[], &["a.c", "a0"], &["a-b", "a.c", "a/x", "a0"]);
        check(&["a"], &["b", "a/x", "b/c"], &["c/d/e/f/g"], &["a", "c/d/e/f/g"]);
    }
}
