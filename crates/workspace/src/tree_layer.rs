//! Tree layers: the files of one git tree, checked out once and shared by every Body on that commit.
//!
//! If a similar tree has a layer already, the new layer holds only the difference and depends on that layer.
//! Beside the files, invisible to Bodies, a layer has an index with matching stat data, so that the first
//! `git status` in a Body reads no file.
//!
//! Invariant: the files of a layer are older than the layer, so every change by a Body has another
//! modification time.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use body::{
    archive::{ArchiveError, Sink},
    layers::{self, LayerDraft},
};
use proto::{
    LayerId,
    event::hex,
    pack::{LayerEntry, LayerEntryKind},
    spec::{Ids, USER_ID},
    template::LayerRecord,
};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};
use sha2::{Digest, Sha256};

use crate::{
    LayerStore,
    bare_repo::{self, StageDir},
    error::{ErrorContext, WorkspaceError},
    git::Git,
    index::IndexNames,
};

/// Most files in a layer that holds a difference.
const DIFFERENCE_MAX: usize = 2000;
/// How many layers are compared to find a similar one.
const CANDIDATES_MAX: usize = 4;
/// How many seconds a file is older than its layer.
const AGE_SECS: i64 = 10;

/// Returns the layers of a tree, topmost first, and makes them if they are missing.
pub fn make(layer_store: LayerStore<'_>, objects: &Path, tree: &str) -> Result<Vec<LayerId>, WorkspaceError> {
    let id = id_of("tree", &[tree]);
    if let Some(stack) = find_layer(layer_store, &id) {
        return Ok(stack);
    }
    let stage = StageDir::make(layer_store.layers.join(format!("{id}.stage{}", std::process::id())))
        .during("create a directory for a checkout")?;
    bare_repo::make(&stage.join("git"), &[objects], None).during("make a repository to check out from")?;
    fs::create_dir(stage.join("files")).during("create a directory for a checkout")?;
    let checkout = Checkout {
        layer_store,
        git: Git::at(&stage.join("git")).index(&stage.join("index")),
        stage,
        tree,
        about: format!("tree {tree}"),
    };
    match checkout.find_similar()? {
        Some((base, changed)) => checkout.difference(id, base, changed),
        None => checkout.whole(id),
    }
}

/// Makes a layer with the files of a tree below a path.
pub fn make_at(
    layer_store: LayerStore<'_>,
    objects: &Path,
    tree: &str,
    at: &str,
) -> Result<LayerId, WorkspaceError> {
    let id = id_of("subtree", &[tree, at]);
    if find_layer(layer_store, &id).is_some() {
        return Ok(id);
    }
    let stage = StageDir::make(layer_store.layers.join(format!("{id}.stage{}", std::process::id())))
        .during("create a directory for a checkout")?;
    bare_repo::make(&stage.join("git"), &[objects], None).during("make a repository to check out from")?;
    let files = stage.join("files").join(at);
    fs::create_dir_all(&files).during("create a directory for a checkout")?;
    let git = Git::at(&stage.join("git")).index(&stage.join("index"));
    git.run(["read-tree", tree])?;
    git.clone().files(&files).run(["checkout-index", "--all", "--force", "--quiet"])?;
    Checkout { layer_store, git, stage, tree, about: format!("subtree {tree} {at}") }.finish(
        id.clone(),
        &[],
        Vec::new(),
    )?;
    Ok(id)
}

/// A layer id derived from the layer's contents.
pub fn id_of(kind: &str, parts: &[&str]) -> LayerId {
    let mut hasher = Sha256::new();
    for part in [kind].iter().chain(parts) {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let digest = hex(&hasher.finalize());
    digest[..32].parse().unwrap_or_else(|_| LayerId::from_random([0; 12]))
}

/// A complete layer with all layers that it depends on.
pub fn find_layer(layer_store: LayerStore<'_>, id: &LayerId) -> Option<Vec<LayerId>> {
    let record = layers::read(&layer_store.layers.join(id.as_str())).ok()?;
    let there = |id: &LayerId| layer_store.layers.join(id.as_str()).join("layer.json").exists();
    record.over.iter().all(there).then(|| [id.clone()].into_iter().chain(record.over).collect())
}

/// Records of the layers whose description begins with `about`, newest first.
pub fn records(layer_store: LayerStore<'_>, about: &str) -> Vec<LayerRecord> {
    let entries = fs::read_dir(layer_store.layers).into_iter().flatten().flatten();
    let mut found: Vec<LayerRecord> = entries
        .filter_map(|entry| layers::read(&entry.path()).ok())
        .filter(|record| record.about.starts_with(about))
        .collect();
    found.sort_by(|a, b| b.created_at.cmp(&a.created_at));
    found
}

/// The index of a tree layer's files.
pub fn index_of(layer_store: LayerStore<'_>, id: &LayerId) -> PathBuf {
    layer_store.layers.join(id.as_str()).join("index")
}

/// The owner of workspace files, as ids inside a layer.
pub fn owner(ids: &Ids) -> (u32, u32) {
    // A range with a single id has only id 0.
    if ids.has_root() { (USER_ID, USER_ID) } else { (0, 0) }
}

struct Checkout<'a> {
    layer_store: LayerStore<'a>,
    git: Git,
    stage: StageDir,
    tree: &'a str,
    /// The description in the layer's record.
    about: String,
}

/// The difference between two trees.
struct TreeDifference {
    /// Files that were added or changed.
    there: Vec<Vec<u8>>,
    /// Files that were deleted.
    gone: Vec<Vec<u8>>,
}

impl Checkout<'_> {
    /// Finds a layer of a whole tree that differs little from this one.
    fn find_similar(&self) -> Result<Option<(LayerRecord, TreeDifference)>, WorkspaceError> {
        let whole = records(self.layer_store, "tree ").into_iter().filter(|record| record.over.is_empty());
        let mut best: Option<(LayerRecord, TreeDifference)> = None;
        for record in whole.take(CANDIDATES_MAX) {
            let old = record.about.trim_start_matches("tree ").to_owned();
            let args = ["diff-tree", "-r", "-z", "--name-status", "--no-renames", &old, self.tree];
            // git fails if the other tree belongs to another repository.
            let Ok(said) = self.git.run(args) else { continue };
            let changed = parse_changed(&said);
            let count = changed.there.len() + changed.gone.len();
            let fewest = best.as_ref().map_or(DIFFERENCE_MAX, |(_, best)| best.there.len() + best.gone.len());
            // A change of attributes may change how other files are checked out.
            let attributes =
                changed.there.iter().chain(&changed.gone).any(|path| path.ends_with(b".gitattributes"));
            if count < fewest && !attributes {
                best = Some((record, changed));
            }
        }
        Ok(best)
    }

    fn whole(self, id: LayerId) -> Result<Vec<LayerId>, WorkspaceError> {
        let files = self.stage.join("files");
        self.git.run(["read-tree", self.tree])?;
        let git = self.git.clone().files(&files);
        git.run(["checkout-index", "--all", "--force", "--quiet"])?;
        self.finish(id, &[], Vec::new())
    }

    fn difference(
        self,
        id: LayerId,
        base: LayerRecord,
        changed: TreeDifference,
    ) -> Result<Vec<LayerId>, WorkspaceError> {
        let files = self.stage.join("files");
        fs::copy(index_of(self.layer_store, &base.id), self.stage.join("index")).during("copy an index")?;
        self.git.run(["read-tree", "-m", "-i", self.tree])?;
        let wanted: Vec<u8> = changed.there.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
        self.git
            .clone()
            .files(&files)
            .feed(["checkout-index", "--force", "--quiet", "-z", "--stdin"], wanted)?;
        let names =
            IndexNames::of(&self.stage.join("index"))?.iter().map(|(name, _)| name.to_vec()).collect();
        let gone = topmost_gone(&changed.gone, &names);
        self.finish(id, &gone, vec![base.id])
    }

    fn finish(
        self,
        id: LayerId,
        gone: &[Vec<u8>],
        over: Vec<LayerId>,
    ) -> Result<Vec<LayerId>, WorkspaceError> {
        let files = self.stage.join("files");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let mtime = now - AGE_SECS;
        set_mtime(&files, mtime).during("set the times of a checkout")?;
        // Refreshes the entries of the difference. The others keep their stat data, and git reports their
        // files as missing.
        let _ = self.git.clone().files(&files).run(["update-index", "-q", "--refresh"]);
        let name = format!("{id}.part{}", std::process::id());
        let draft = LayerDraft::begin(
            self.layer_store.programs,
            self.layer_store.layers,
            &name,
            body::ids::of_trees(),
        )?;
        let owner = owner(draft.ids());
        draft.fill(|sink| {
            put(sink, b"", &root_entry(owner, mtime), &mut io::empty())?;
            send(&files, &mut Vec::new(), owner, mtime, sink)?;
            gone.iter().try_for_each(|path| {
                put(
                    sink,
                    path,
                    &LayerEntry { path: path.clone(), what: LayerEntryKind::Gone, mode: 0, owner, mtime },
                    &mut io::empty(),
                )
            })
        })?;
        fs::copy(self.stage.join("index"), draft.root().with_file_name("index")).during("keep an index")?;
        draft.finish_over(id.clone(), &self.about, self.layer_store.now.to_owned(), over.clone())?;
        Ok([id].into_iter().chain(over).collect())
    }
}

fn root_entry(owner: (u32, u32), mtime: i64) -> LayerEntry {
    LayerEntry { path: Vec::new(), what: LayerEntryKind::Dir, mode: 0o755, owner, mtime }
}

fn parse_changed(said: &[u8]) -> TreeDifference {
    let mut changed = TreeDifference { there: Vec::new(), gone: Vec::new() };
    let mut fields = said.split(|byte| *byte == 0).filter(|field| !field.is_empty());
    while let (Some(status), Some(path)) = (fields.next(), fields.next()) {
        if status == b"D" { changed.gone.push(path.to_owned()) } else { changed.there.push(path.to_owned()) }
    }
    changed
}

/// The topmost deleted directories and files. A path whose place a new file takes needs no whiteout.
fn topmost_gone(gone: &[Vec<u8>], names: &BTreeSet<Vec<u8>>) -> Vec<Vec<u8>> {
    let holds = |dir: &[u8]| {
        let begin = [dir, b"/"].concat();
        names.range(begin.clone()..).next().is_some_and(|name| name.starts_with(&begin))
    };
    let mut found = BTreeSet::new();
    'paths: for path in gone {
        let cuts = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        for dir in cuts.map(|at| &path[..at]) {
            if names.contains(dir) {
                continue 'paths;
            }
            if !holds(dir) {
                found.insert(dir.to_owned());
                continue 'paths;
            }
        }
        // A new directory hides the old file by itself.
        if !holds(path) {
            found.insert(path.clone());
        }
    }
    found.into_iter().collect()
}

/// Sets the modification time of every file and directory below a directory.
fn set_mtime(dir: &Path, mtime: i64) -> io::Result<()> {
    let time = Timespec { tv_sec: mtime, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            set_mtime(&entry.path(), mtime)?;
        }
        rustix::fs::utimensat(CWD, entry.path(), &times, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// Writes a checkout into the layer, directory by directory.
fn send(
    dir: &Path,
    below: &mut Vec<u8>,
    owner: (u32, u32),
    mtime: i64,
    sink: &mut dyn Sink,
) -> Result<(), ArchiveError> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<_>>()
        })
        .map_err(ArchiveError::Sink)?;
    names.sort();
    for name in names {
        let path = dir.join(&name);
        let len = below.len();
        if len > 0 {
            below.push(b'/');
        }
        below.extend(name.as_bytes());
        let found = fs::symlink_metadata(&path).map_err(ArchiveError::Sink)?;
        let entry = |what, mode| LayerEntry { path: below.clone(), what, mode, owner, mtime };
        if found.is_dir() {
            put(sink, below, &entry(LayerEntryKind::Dir, 0o755), &mut io::empty())?;
            send(&path, below, owner, mtime, sink)?;
        } else if found.is_symlink() {
            let target = fs::read_link(&path).map_err(ArchiveError::Sink)?;
            put(
                sink,
                below,
                &entry(LayerEntryKind::Link(target.as_os_str().as_bytes().to_owned()), 0o777),
                &mut io::empty(),
            )?;
        } else {
            let mode = if found.permissions().mode() & 0o100 != 0 { 0o755 } else { 0o644 };
            let mut file = File::open(&path).map_err(ArchiveError::Sink)?;
            put(sink, below, &entry(LayerEntryKind::File(found.size()), mode), &mut file)?;
        }
        below.truncate(len);
    }
    Ok(())
}

/// Writes one entry.
pub fn put(
    sink: &mut dyn Sink,
    _path: &[u8],
    entry: &LayerEntry,
    contents: &mut dyn Read,
) -> Result<(), ArchiveError> {
    sink.take(entry.clone(), contents).map_err(ArchiveError::Sink)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_goes_by_its_highest_directory() {
        let set = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect::<BTreeSet<_>>();
        let check = |gone: &[&str], left: &[&str], expected: &[&str]| {
            let gone: Vec<Vec<u8>> = gone.iter().map(|name| name.as_bytes().to_vec()).collect();
            let expected: Vec<Vec<u8>> = expected.iter().map(|name| name.as_bytes().to_vec()).collect();
            assert_eq!(topmost_gone(&gone, &set(left)), expected, "{gone:?}");
        };
        check(&["a/b/c", "a/b/d"], &["a/x"], &["a/b"]);
        check(&["a/b"], &[], &["a"]);
        check(&["a/b"], &["a"], &[]);
        check(&["a"], &["a/b"], &[]);
        check(&["x"], &["y"], &["x"]);
        check(&["a-b/c"], &["a"], &["a-b"]);
    }
}
