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
    Source,
    error::{During, WorkspaceError},
    git::{Git, GitError},
    ignore::Ignore,
    index::Names,
    merged::Dirs,
    objects::Objects,
    packing::{Pack, Sort, id_of},
    quarantine::View,
    save::Upper,
    trees::Trees,
    walk::{Change, Changes, LeftOut, Walk},
};

/// Longest list of exclusions taken from a Body.
const EXCLUDE_LEN_MAX: u64 = 1 << 20;
/// Largest index taken from a Body.
const INDEX_LEN_MAX: u64 = 512 << 20;
/// Longest file of the base that says how git treats others.
const RULE_LEN_MAX: u64 = 100 << 20;
/// What a Body's git may do to a file before it stores it, and cannot always do.
const ENCODING: &str = "working-tree-encoding";

/// What was read.
#[derive(Debug)]
pub struct Files {
    /// The tree.
    pub tree: String,
    /// What is not in it.
    pub left_out: Vec<LeftOut>,
}

/// Reads them; new objects go to `pack`.
pub fn read(
    source: &Source,
    view: &View,
    upper: &Upper,
    objects: &mut Objects,
    pack: &mut Pack,
    git_dir: Option<&Dirs>,
) -> Result<Files, WorkspaceError> {
    let place = view.join("files");
    fs::create_dir(&place).during("make room for a copy")?;
    let base = base_names(source, view)?;
    let (mut rules, attributes) = put_rules(objects, &base, &place)?;
    rules |= take_exclusions(view, git_dir)?;
    let index = |name: &str| git_dir.and_then(|git| git.small(name, INDEX_LEN_MAX));
    let own = index("index").unwrap_or_default();
    let (tracked, all_tracked) = Names::parse_with(&own, index);
    let dirs = upper.dirs()?;
    let ignore = Ignore::new(&view.git().files(&place), rules)?;
    let walk = Walk {
        base: &base,
        tracked: &tracked,
        all_tracked,
        ignore,
        attributes,
        pack,
        changes: Changes::default(),
    };
    let ours = File::open(&place).during("open a copy")?;
    let mut changes = walk.run(&dirs, ours.as_fd())?;
    // What `git sparse-checkout` took out of sight is not gone.
    let skipped = Names::skipped(&own);
    changes.gone.retain(|path| !skipped.skips(path));
    converted(source, view, &place, pack, &mut changes.files)?;
    let tree = base_tree(source, objects)?;
    let mut trees = Trees::of(objects, &tree)?;
    changes.gone.iter().try_for_each(|path| trees.remove(path))?;
    for change in &changes.files {
        let id = change.id.ok_or(GitError::Answer("update-index"))?;
        trees.set(&change.path, change.mode, id)?;
    }
    Ok(Files { tree: trees.write(pack)?, left_out: changes.left_out })
}

fn base_tree(source: &Source, objects: &mut Objects) -> Result<String, WorkspaceError> {
    let found = objects.about(&[format!("{}^{{tree}}", source.workspace.base)])?.pop().flatten();
    let gone = || {
        WorkspaceError::NotFound("the commit that the Body began with is no longer in the repository".into())
    };
    found.map(|tree| tree.id).ok_or_else(gone)
}

/// What the Body began with, and what of it counts.
fn base_names(source: &Source, view: &View) -> Result<Names, WorkspaceError> {
    if !source.workspace.included {
        return Names::of(&source.base_index()?);
    }
    // Ignored files that came along are not in the base.
    let said = view.git().run(["ls-tree", "-r", "-z", &source.workspace.base])?;
    let mut names = Names::default();
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
fn put_rules(objects: &mut Objects, base: &Names, place: &Path) -> Result<(bool, bool), WorkspaceError> {
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
        let bytes = objects.contents(&crate::packing::hex(&id), "blob", RULE_LEN_MAX)?;
        fs::write(to, bytes).during("copy a rule")?;
    }
    Ok((ignores, attributes))
}

/// What the Body's own git excludes, besides what its files say; whether that is anything.
fn take_exclusions(view: &View, git_dir: Option<&Dirs>) -> Result<bool, WorkspaceError> {
    let text = git_dir.and_then(|git| git.small("info/exclude", EXCLUDE_LEN_MAX)).unwrap_or_default();
    let dir = view.quarantine.dir().join("info");
    fs::create_dir_all(&dir).during("note what is excluded")?;
    sys::fd::write_whole(&dir.join("exclude"), &text).during("note what is excluded")?;
    Ok(text.split(|byte| *byte == b'\n').any(|line| !line.is_empty() && line[0] != b'#'))
}

/// Has git read the files that attributes may change. What git cannot convert stays as it is in the Body: better odd
/// than lost.
fn converted(
    source: &Source,
    view: &View,
    place: &Path,
    pack: &mut Pack,
    files: &mut [Change],
) -> Result<(), WorkspaceError> {
    let paths: Vec<&[u8]> =
        files.iter().filter(|change| change.id.is_none()).map(|change| change.path.as_slice()).collect();
    if paths.is_empty() {
        return Ok(());
    }
    let index = view.join("index");
    let git = view.writing().files(place).index(&index).passing();
    let refused =
        |error: &GitError| matches!(error, GitError::Failed { said, .. } if !said.contains("No space left"));
    let done = match add_all(source, &git, &index, &paths) {
        Err(WorkspaceError::Git(error)) if refused(&error) => {
            let odd = encoded(&git, &paths)?;
            let plain: Vec<&[u8]> = paths.iter().copied().filter(|path| !odd.contains(*path)).collect();
            match add_all(source, &git, &index, &plain) {
                Err(WorkspaceError::Git(error)) if refused(&error) => Names::default(),
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
fn add_all(source: &Source, git: &Git, index: &PathBuf, paths: &[&[u8]]) -> Result<Names, WorkspaceError> {
    // What is in the base decides about line ends, too.
    fs::copy(source.base_index()?, index).during("copy an index")?;
    if source.workspace.included {
        git.run(["read-tree", "-m", "-i", &format!("{}^{{tree}}", source.workspace.base)])?;
    }
    if paths.is_empty() {
        return Ok(Names::default());
    }
    let list = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
    git.feed(["update-index", "-z", "--add", "--replace", "--stdin"], list)?;
    let all = Names::of(index)?;
    let mut named = Names::default();
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

fn raw(pack: &mut Pack, path: &Path) -> Result<crate::packing::Id, WorkspaceError> {
    let file = File::open(path).during("read a copy")?;
    let len = file.metadata().during("read a copy")?.len();
    pack.add(Sort::Blob, len, file).during("read a copy")
}
