//! A Body's files as a tree: what it began with, changed by what a walk of its upper found.
//!
//! Invariant: the tree is the one that plain git would make of the same files; what git cannot hold is told.

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

/// Longest list of exclusions taken from a Body.
const EXCLUDE_LEN_MAX: u64 = 1 << 20;
/// Largest index taken from a Body.
const INDEX_LEN_MAX: u64 = 512 << 20;
/// Longest file of the base that says how git treats others.
const RULE_LEN_MAX: u64 = 100 << 20;
/// Why something is left out that a Body took out of sight.
const UNSEEN: &str = "it is out of sight, and its contents are not there";
/// The mode of a directory.
const DIR: u32 = 0o40_000;
/// The mode of another repository's commit.
const LINK: u32 = 0o160_000;
/// What a Body's git may do to a file before it stores it, and cannot always do.
const ENCODING: &str = "working-tree-encoding";

/// What was read.
#[derive(Debug)]
pub struct WorkFiles {
    /// The tree.
    pub tree: String,
    /// What is not in it.
    pub skipped: Vec<SkippedPath>,
}

/// What they are read from.
#[derive(Debug, Clone, Copy)]
pub struct ReadContext<'a> {
    /// Whose.
    pub source: &'a BodyWorkspace,
    /// Where they become objects.
    pub view: &'a QuarantineView,
    /// The Body's changes.
    pub(crate) upper: &'a UpperFiles,
    /// Its `.git`.
    pub git_dir: Option<&'a OverlayDir>,
    /// What others read.
    pub apart: &'a SubmoduleWork,
}

impl ReadContext<'_> {
    /// Has the quarantine take what the Body's git made, as far as that is sound.
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

/// Reads them; new objects go to `pack`.
pub fn read(
    given: &ReadContext<'_>,
    objects: &mut Objects,
    pack: &mut PackWriter,
) -> Result<WorkFiles, WorkspaceError> {
    let ReadContext { source, view, upper, git_dir, apart } = *given;
    let place = view.join("files");
    fs::create_dir(&place).during("make room for a copy")?;
    let base = base_names(source, view)?;
    let (mut rules, attributes) = put_rules(objects, &base, &place)?;
    rules |= take_exclusions(view, git_dir)?;
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
    converted(source, view, &place, pack, &mut changes.files)?;
    let tree = base_tree(source, objects)?;
    let mut trees = TreeWriter::of(objects, &tree)?;
    unseen.iter().try_for_each(|(path, mode, id)| trees.set(path, *mode, *id))?;
    changes.gone.iter().try_for_each(|path| trees.remove(path))?;
    for change in &changes.files {
        let id = change.id.ok_or(GitError::Answer("update-index"))?;
        trees.set(&change.path, change.mode, id)?;
    }
    // A submodule with a git of the Body's own is where that stands.
    for (path, head) in &apart.links {
        if let Some(head) = head.filter(|_| base.contains(path)) {
            trees.set(path, LINK, head)?;
        }
    }
    Ok(WorkFiles { tree: trees.write(pack)?, skipped: changes.skipped })
}

/// What `git sparse-checkout` took out of sight is not gone: it is what the Body's index says. Gives what differs there
/// from the base.
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
        // A file that is seen is what it is.
        let hidden = kind == "tree" || unseen.contains(path) || !base.contains(path);
        if hidden && base.mode_and_id(path) != Some((mode, id)) && is_held(path) {
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
            _ => changes.skipped.push(SkippedPath { path: proto::text::visible_bytes(&path), why: UNSEEN }),
        }
    }
    Ok(found)
}

/// Whether git may hold a path that an index names.
fn is_held(path: &[u8]) -> bool {
    let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !is_dot_git(part);
    path.split(|byte| *byte == b'/').all(plain)
}

fn base_tree(source: &BodyWorkspace, objects: &mut Objects) -> Result<String, WorkspaceError> {
    let found = objects.about(&[format!("{}^{{tree}}", source.workspace.base)])?.pop().flatten();
    let gone = || {
        WorkspaceError::NotFound("the commit that the Body began with is no longer in the repository".into())
    };
    found.map(|tree| tree.id).ok_or_else(gone)
}

/// What the Body began with, and what of it counts.
fn base_names(source: &BodyWorkspace, view: &QuarantineView) -> Result<IndexNames, WorkspaceError> {
    if !source.workspace.included {
        return IndexNames::of(&source.base_index()?);
    }
    // Ignored files that came along are not in the base.
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

/// Puts files of the base where git looks for how it treats others; says whether there are some of each kind.
fn put_rules(objects: &mut Objects, base: &IndexNames, place: &Path) -> Result<(bool, bool), WorkspaceError> {
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
        // One that is too long for us is too long for git, too.
        let bytes = objects.contents(&crate::pack_writer::hex(&id), "blob", RULE_LEN_MAX)?;
        fs::write(to, bytes).during("copy a rule")?;
    }
    Ok((ignores, attributes))
}

/// What the Body's own git excludes, besides what its files say; whether that is anything.
fn take_exclusions(view: &QuarantineView, git_dir: Option<&OverlayDir>) -> Result<bool, WorkspaceError> {
    let text = git_dir.and_then(|git| git.small("info/exclude", EXCLUDE_LEN_MAX)).unwrap_or_default();
    let dir = view.quarantine.dir().join("info");
    fs::create_dir_all(&dir).during("note what is excluded")?;
    sys::fd::write_whole(&dir.join("exclude"), &text).during("note what is excluded")?;
    Ok(text.split(|byte| *byte == b'\n').any(|line| !line.is_empty() && line[0] != b'#'))
}

/// Has git read the files that attributes may change. What git cannot convert stays as it is in the Body: better odd
/// than lost.
fn converted(
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
            let odd = encoded(&git, &paths)?;
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
        // What git leaves out without a word is taken all the same.
        change.id = match done.get(&change.path) {
            Some(id) => Some(id),
            None => Some(raw(pack, &place.join(OsStr::from_bytes(&change.path)))?),
        };
    }
    Ok(())
}

/// What an index of the base has for these paths, once git has read their files.
fn add_all(
    source: &BodyWorkspace,
    git: &Git,
    index: &PathBuf,
    paths: &[&[u8]],
) -> Result<IndexNames, WorkspaceError> {
    // What is in the base decides about line ends, too.
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
        // Its own entry, and none that was there before and is passed over in silence.
        if let Some(id) = all.get(path) {
            named.push(path, id, 0);
        }
    }
    named.sort();
    Ok(named)
}

/// Those that git would convert from another encoding.
fn encoded(git: &Git, paths: &[&[u8]]) -> Result<BTreeSet<Vec<u8>>, WorkspaceError> {
    let list = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
    let said = git.feed(["check-attr", "-z", "--stdin", ENCODING], list)?;
    let fields: Vec<&[u8]> = said.split(|byte| *byte == 0).collect();
    Ok(fields
        .chunks_exact(3)
        .filter(|fields| fields[2] != b"unspecified")
        .map(|fields| fields[0].to_vec())
        .collect())
}

fn raw(pack: &mut PackWriter, path: &Path) -> Result<crate::pack_writer::ObjectId, WorkspaceError> {
    let file = File::open(path).during("read a copy")?;
    let len = file.metadata().during("read a copy")?.len();
    pack.add(ObjectKind::Blob, len, file).during("read a copy")
}
