//! A Body's files as a git tree: the tree that the Body began with, and the changes found in its upper.
//!
//! Invariant: the tree equals the one that git would write for the same files; every path that git cannot
//! hold is listed.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use crate::{
    BodyWorkspace,
    error::{ErrorContext, WorkspaceError},
    git::{Git, GitError, GitReason},
    ignore::IgnoreChecker,
    import_objects,
    index::{IndexNames, SparsePaths},
    objects::Objects,
    overlay_diff::{Change, Changes, LEFT_OUT_MAX, OverlayWalk, SkippedPath, is_dot_git},
    overlay_reader::OverlayDir,
    pack_writer::{ObjectId, ObjectKind, PackWriter, id_of},
    quarantine::QuarantineView,
    submodules::SubmoduleWork,
    tree_writer::TreeWriter,
    upper::UpperFiles,
};

/// Longest `info/exclude` read from a Body.
const EXCLUDE_LEN_MAX: u64 = 1 << 20;
/// Largest index read from a Body.
const INDEX_LEN_MAX: u64 = 512 << 20;
/// Longest `.gitignore` or `.gitattributes` of the base that is read.
const RULE_LEN_MAX: u64 = 100 << 20;
/// Why a path is skipped that a sparse checkout in the Body excludes.
const SPARSE_MISSING: &str = "a sparse checkout excludes it, and its object is missing";
/// The mode of a directory in a tree.
const DIR: u32 = 0o40_000;
/// The mode of a submodule's commit in a tree.
const LINK: u32 = 0o160_000;
/// The attribute by which git converts a file's encoding before it stores the file; the conversion can fail.
const ENCODING: &str = "working-tree-encoding";

/// The files of a Body as a tree.
#[derive(Debug)]
pub struct WorkFiles {
    /// The id of the tree.
    pub tree: String,
    /// Paths that are not in the tree.
    pub skipped: Vec<SkippedPath>,
}

/// Where [`read`] reads a Body's files from.
#[derive(Debug, Clone, Copy)]
pub struct ReadContext<'a> {
    /// The workspace of the Body.
    pub source: &'a BodyWorkspace,
    /// The quarantine in which the files become objects.
    pub view: &'a QuarantineView,
    /// The Body's upper.
    pub(crate) upper: &'a UpperFiles,
    /// The Body's `.git`; none if it has none that can be read.
    pub git_dir: Option<&'a OverlayDir>,
    /// The submodules, which are read separately.
    pub apart: &'a SubmoduleWork,
}

impl ReadContext<'_> {
    /// Imports the objects of the Body's git into the quarantine, as far as fsck accepts them.
    fn take_objects(&self, objects: &mut Objects) -> Result<(), WorkspaceError> {
        let Some(own) = self.git_dir.map(|git| self.upper.own_objects(git)).transpose()?.flatten() else {
            return Ok(());
        };
        match import_objects::import(&self.view.quarantine, objects, &own) {
            Err(error) if error.is_full() => Err(error),
            _ => Ok(()),
        }
    }
}

/// Reads the files and writes new objects to `pack`.
pub fn read(
    given: &ReadContext<'_>,
    objects: &mut Objects,
    pack: &mut PackWriter,
) -> Result<WorkFiles, WorkspaceError> {
    let ReadContext { source, view, upper, git_dir, apart } = *given;
    let place = view.join("files");
    fs::create_dir(&place).during("create a directory for copies")?;
    let base = base_names(source, view)?;
    let (mut rules, attributes) = copy_rules(objects, &base, &place)?;
    rules |= copy_excludes(view, git_dir)?;
    let index = |name: &str| git_dir.and_then(|git| git.small(name, INDEX_LEN_MAX));
    let own = index("index").unwrap_or_default();
    let (tracked, all_tracked) = IndexNames::parse_with(&own, index);
    let ignore = IgnoreChecker::new(&view.git().files(&place), rules)?;
    let walk = OverlayWalk {
        base: &base,
        tracked: &tracked,
        all_tracked,
        ignore,
        attributes,
        apart: &apart.links,
        pack,
        changes: Changes::default(),
    };
    let ours = File::open(&place).during("open a copy")?;
    let mut changes = match upper.visible_files()? {
        Some(seen) => walk.run(&seen, ours.as_fd())?,
        None => Changes::default(),
    };
    let unseen = skip_worktree_paths(given, objects, &base, &SparsePaths::of(&own), &mut changes)?;
    convert_files(source, view, &place, pack, &mut changes.files)?;
    let tree = base_tree(source, objects)?;
    let mut trees = TreeWriter::of(objects, &tree)?;
    unseen.iter().try_for_each(|(path, mode, id)| trees.set(path, *mode, *id))?;
    changes.gone.iter().try_for_each(|path| trees.remove(path))?;
    for change in &changes.files {
        let id = change.id.ok_or(GitError::Answer("update-index"))?;
        trees.set(&change.path, change.mode, id)?;
    }
    // If the Body ran `git init` in a submodule, the tree links to that repository's HEAD.
    for (path, head) in &apart.links {
        if let Some(head) = head.filter(|_| base.contains(path)) {
            trees.set(path, LINK, head)?;
        }
    }
    Ok(WorkFiles { tree: trees.write(pack)?, skipped: changes.skipped })
}

/// A file that `git sparse-checkout` removed from the work tree is not deleted: the Body's index holds its
/// content. Returns such paths whose content differs from the base.
fn skip_worktree_paths(
    given: &ReadContext<'_>,
    objects: &mut Objects,
    base: &IndexNames,
    skipped: &SparsePaths,
    changes: &mut Changes,
) -> Result<Vec<(Vec<u8>, u32, ObjectId)>, WorkspaceError> {
    let mut unseen = BTreeSet::new();
    changes.gone.retain(|path| {
        let skips = skipped.skips(path);
        if skips {
            unseen.insert(path.clone());
        }
        !skips
    });
    let mut wanted = Vec::new();
    for (name, mode, id) in skipped.iter() {
        let (path, kind) = match mode {
            DIR if name.ends_with(b"/") => (&name[..name.len() - 1], "tree"),
            0o100_644 | 0o100_755 | 0o120_000 => (name, "blob"),
            _ => continue,
        };
        // A file that exists in the work tree counts as it is there, whatever the index says.
        let hidden = kind == "tree" || unseen.contains(path) || !base.contains(path);
        if hidden && base.mode_and_id(path) != Some((mode, id)) && is_valid_path(path) {
            wanted.push((path.to_vec(), mode, id, kind));
        }
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let asked: Vec<String> = wanted.iter().map(|(_, _, id, _)| crate::pack_writer::hex(id)).collect();
    let mut there = objects.about(&asked)?;
    if there.iter().any(Option::is_none) {
        given.take_objects(objects)?;
        there = objects.about(&asked)?;
    }
    let mut found = Vec::new();
    for ((path, mode, id, kind), there) in wanted.into_iter().zip(there) {
        match there {
            Some(there) if there.kind == kind => found.push((path, mode, id)),
            _ if changes.skipped.len() >= LEFT_OUT_MAX => {}
            _ => changes
                .skipped
                .push(SkippedPath { path: proto::text::visible_bytes(&path), why: SPARSE_MISSING }),
        }
    }
    Ok(found)
}

/// Whether git accepts a path from an index.
fn is_valid_path(path: &[u8]) -> bool {
    let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !is_dot_git(part);
    path.split(|byte| *byte == b'/').all(plain)
}

fn base_tree(source: &BodyWorkspace, objects: &mut Objects) -> Result<String, WorkspaceError> {
    let found = objects.about(&[format!("{}^{{tree}}", source.workspace.base)])?.pop().flatten();
    let gone = || {
        WorkspaceError::NotFound("the repository no longer has the commit that the Body began with".into())
    };
    found.map(|tree| tree.id).ok_or_else(gone)
}

/// The paths of the tree that the Body began with.
fn base_names(source: &BodyWorkspace, view: &QuarantineView) -> Result<IndexNames, WorkspaceError> {
    if !source.workspace.included {
        return IndexNames::of(&source.base_index()?);
    }
    // Ignored files that the user included are in the index but not in the base commit.
    let said = view.git().run(["ls-tree", "-r", "-z", &source.workspace.base])?;
    let mut names = IndexNames::default();
    for line in said.split(|byte| *byte == 0).filter(|line| !line.is_empty()) {
        let (about, name) = line
            .iter()
            .position(|byte| *byte == b'\t')
            .map(|at| (&line[..at], &line[at + 1..]))
            .ok_or(GitError::Answer("ls-tree"))?;
        let mut fields = about.split(|byte| *byte == b' ');
        let mode =
            fields.next().and_then(|mode| u32::from_str_radix(std::str::from_utf8(mode).ok()?, 8).ok());
        let (mode, id) = mode.zip(fields.nth(1).and_then(id_of)).ok_or(GitError::Answer("ls-tree"))?;
        names.push(name, id, mode);
    }
    names.sort();
    Ok(names)
}

/// Copies the base's `.gitignore` and `.gitattributes` files to where git reads them; returns whether there
/// are any of each kind.
fn copy_rules(
    objects: &mut Objects,
    base: &IndexNames,
    place: &Path,
) -> Result<(bool, bool), WorkspaceError> {
    let (mut ignores, mut attributes) = (false, false);
    for (path, id) in base.files() {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        match name {
            b".gitignore" => ignores = true,
            b".gitattributes" => attributes = true,
            _ => continue,
        }
        let to = place.join(OsStr::from_bytes(path));
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).during("copy a rule")?;
        }
        // git ignores a longer file, too.
        let bytes = objects.contents(&crate::pack_writer::hex(&id), "blob", RULE_LEN_MAX)?;
        fs::write(to, bytes).during("copy a rule")?;
    }
    Ok((ignores, attributes))
}

/// Copies the Body's `info/exclude` to the quarantine; returns whether it holds any pattern.
fn copy_excludes(view: &QuarantineView, git_dir: Option<&OverlayDir>) -> Result<bool, WorkspaceError> {
    let text = git_dir.and_then(|git| git.small("info/exclude", EXCLUDE_LEN_MAX)).unwrap_or_default();
    let dir = view.quarantine.dir().join("info");
    fs::create_dir_all(&dir).during("copy info/exclude")?;
    sys::fd::write_whole(&dir.join("exclude"), &text).during("copy info/exclude")?;
    Ok(text.split(|byte| *byte == b'\n').any(|line| !line.is_empty() && line[0] != b'#'))
}

/// Lets git store the files whose content attributes may convert. A file that git cannot convert is stored
/// unconverted, because losing it would be worse.
fn convert_files(
    source: &BodyWorkspace,
    view: &QuarantineView,
    place: &Path,
    pack: &mut PackWriter,
    files: &mut [Change],
) -> Result<(), WorkspaceError> {
    let paths: Vec<&[u8]> =
        files.iter().filter(|change| change.id.is_none()).map(|change| change.path.as_slice()).collect();
    if paths.is_empty() {
        return Ok(());
    }
    let index = view.join("index");
    let git = view.writing().files(place).index(&index).scratch();
    let refused = |error: &GitError| error.reason().is_some_and(|reason| reason != GitReason::DiskFull);
    let done = match add_all(source, &git, &index, &paths) {
        Err(WorkspaceError::Git(error)) if refused(&error) => {
            let odd = paths_with_encoding(&git, &paths)?;
            let plain: Vec<&[u8]> = paths.iter().copied().filter(|path| !odd.contains(*path)).collect();
            match add_all(source, &git, &index, &plain) {
                Err(WorkspaceError::Git(error)) if refused(&error) => IndexNames::default(),
                done => done?,
            }
        }
        done => done?,
    };
    let asked: BTreeSet<Vec<u8>> = paths.into_iter().map(<[u8]>::to_vec).collect();
    for change in files.iter_mut().filter(|change| asked.contains(&change.path)) {
        // git skips some files without an error; they are stored unconverted, too.
        change.id = match done.get(&change.path) {
            Some(id) => Some(id),
            None => Some(pack_unconverted(pack, &place.join(OsStr::from_bytes(&change.path)))?),
        };
    }
    Ok(())
}

/// Adds these paths to a copy of the base's index with git, and returns their entries.
fn add_all(
    source: &BodyWorkspace,
    git: &Git,
    index: &PathBuf,
    paths: &[&[u8]],
) -> Result<IndexNames, WorkspaceError> {
    // git decides about line-end conversion by the content in the index, so start with the base's index.
    fs::copy(source.base_index()?, index).during("copy an index")?;
    if source.workspace.included {
        git.run(["read-tree", "-m", "-i", &format!("{}^{{tree}}", source.workspace.base)])?;
    }
    if paths.is_empty() {
        return Ok(IndexNames::default());
    }
    let list = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
    git.feed(["update-index", "-z", "--add", "--replace", "--stdin"], list)?;
    let all = IndexNames::of(index)?;
    let mut named = IndexNames::default();
    for path in paths {
        // Only the entries of these paths: the index also has entries of the base that git did not touch.
        if let Some(id) = all.get(path) {
            named.push(path, id, 0);
        }
    }
    named.sort();
    Ok(named)
}

/// The paths for which an attribute sets another encoding.
fn paths_with_encoding(git: &Git, paths: &[&[u8]]) -> Result<BTreeSet<Vec<u8>>, WorkspaceError> {
    let list = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
    let said = git.feed(["check-attr", "-z", "--stdin", ENCODING], list)?;
    let fields: Vec<&[u8]> = said.split(|byte| *byte == 0).collect();
    Ok(fields
        .chunks_exact(3)
        .filter(|fields| fields[2] != b"unspecified")
        .map(|fields| fields[0].to_vec())
        .collect())
}

fn pack_unconverted(
    pack: &mut PackWriter,
    path: &Path,
) -> Result<crate::pack_writer::ObjectId, WorkspaceError> {
    let file = File::open(path).during("read a copy")?;
    let len = file.metadata().during("read a copy")?.len();
    pack.add(ObjectKind::Blob, len, file).during("read a copy")
}
