//! A Body's work as git objects: its commits, and one more that holds every file that is not in them.
//!
//! Works the same whether the Body runs, is stopped, dead, full or hostile: its files are read as plain files, its git
//! is never run. What git itself refuses is told, never dropped in silence.
//!
//! Invariant: `refs/palisade/BODY/wip` holds every tracked and untracked file that git can hold; what it does not hold
//! is in [`Saved::left_out`] or [`Saved::trouble`].
//! Invariant: nothing counts as saved before the user's repository names the very objects that were made here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use proto::{BodyId, workspace::Workspace};
use serde::Serialize;

pub use crate::walk::LeftOut;
use crate::{
    Quarantine,
    error::{During, WorkspaceError},
    git::{Git, GitError},
    ignore::Ignore,
    index, loose,
    merged::Dirs,
    refs::{self, Pointers, namespace},
    walk::{Changes, Walk},
};

/// Longest list of exclusions taken from a Body.
const EXCLUDE_LEN_MAX: u64 = 1 << 20;
/// Largest index taken from a Body.
const INDEX_LEN_MAX: u64 = 512 << 20;
/// Files by which git finds other repositories; some contents of them are refused by fsck.
const MODULES: &[u8] = b".gitmodules";

/// What git says when there is no room left.
const FULL: &str = "No space left on device";

/// Where a Body's work is.
#[derive(Debug, Clone)]
pub struct Source {
    /// Which Body.
    pub body: BodyId,
    /// Its directory.
    pub dir: PathBuf,
    /// Snapshots below its upper, nearest first.
    pub snapshots: Vec<PathBuf>,
    /// The repository in it.
    pub workspace: Workspace,
    /// The directory of all layers.
    pub layers: PathBuf,
}

/// A Body's files as a tree.
#[derive(Debug)]
pub struct Work {
    /// The tree.
    pub tree: String,
    /// What is not in it.
    pub left_out: Vec<LeftOut>,
    /// Where the tree is.
    pub quarantine: Quarantine,
}

/// A Body's work, in the user's repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Saved {
    /// The workspace.
    pub workspace: String,
    /// The commit it began with.
    pub base: String,
    /// The Body's own last commit.
    pub head: String,
    /// The commit that holds everything.
    pub wip: String,
    /// Whether that is more than the last commit.
    pub uncommitted: bool,
    /// Its branches.
    pub branches: BTreeMap<String, String>,
    /// What is not in it.
    pub left_out: Vec<LeftOut>,
    /// Why its own commits could not be taken, if they could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Saved {
    /// Whether something would be lost with the Body.
    pub fn is_whole(&self) -> bool {
        self.left_out.is_empty() && self.trouble.is_none()
    }

    /// Whether the Body did anything at all.
    pub fn is_empty(&self) -> bool {
        self.wip == self.base && self.branches.is_empty() && self.is_whole()
    }
}

impl Source {
    /// Its upper and the snapshots below, as far as they hold this workspace.
    fn changed(&self) -> Vec<PathBuf> {
        let area = self.workspace.area_dir();
        let upper = self.dir.join("disk/upper").join(&area);
        [upper].into_iter().chain(self.snapshots.iter().map(|snapshot| snapshot.join(&area))).collect()
    }

    /// The Body's `.git`: what it changed of it over what it was given.
    fn git_dir(&self) -> Result<Option<Dirs>, WorkspaceError> {
        let head = self.workspace.layers.first().map(|id| self.layers.join(id.as_str()).join("root"));
        let all: Vec<PathBuf> = self.changed().into_iter().chain(head).collect();
        Ok(Dirs::open(&all).during("open the Body's files")?.dir(".git"))
    }

    /// The objects it added itself.
    fn own_objects(&self) -> Result<Option<Dirs>, WorkspaceError> {
        let dirs = Dirs::open(&self.changed()).during("open the Body's files")?;
        Ok(dirs.dir(".git").and_then(|git| git.dir("objects")))
    }

    /// The index that fits the files it began with.
    fn base_index(&self) -> Result<PathBuf, WorkspaceError> {
        let files = self.workspace.layers.get(1).ok_or_else(|| WorkspaceError::Repository("the workspace has no files".into()))?;
        Ok(self.layers.join(files.as_str()).join("index"))
    }
}

/// A Body's files as they are now, as a tree in its quarantine. The user's repository is not touched.
pub fn look(source: &Source) -> Result<Work, WorkspaceError> {
    let quarantine = Quarantine::open(&source.dir, &source.workspace)?;
    let git_dir = source.git_dir()?;
    let (tree, left_out) = files(source, &quarantine, git_dir.as_ref(), &[])?;
    Ok(Work { tree, left_out, quarantine })
}

/// Brings a Body's work into the user's repository, and looks that it is there.
pub fn save(source: &Source) -> Result<Saved, WorkspaceError> {
    let quarantine = Quarantine::open(&source.dir, &source.workspace)?;
    let git_dir = source.git_dir()?;
    let (pointers, trouble) = commits(source, &quarantine, git_dir.as_ref())?;
    let attempt = |pointers: &Pointers, trouble, without: &[&[u8]]| attempt(source, &quarantine, git_dir.as_ref(), pointers, trouble, without);
    let refused = |error: WorkspaceError| match error {
        WorkspaceError::Git(GitError::Failed { said, .. }) if !said.contains(FULL) => Ok(said),
        error => Err(error),
    };
    // fsck looks into this file, and nothing else that a plain file could hold makes it refuse.
    let said = match attempt(&pointers, trouble.clone(), &[]) {
        Ok(saved) => return Ok(saved),
        Err(error) => refused(error)?,
    };
    if said.contains("gitmodules")
        && let Ok(saved) = attempt(&pointers, trouble, &[MODULES])
    {
        return Ok(saved);
    }
    // Its files, without its commits.
    let trouble = Some(format!("its commits are refused: {said}"));
    attempt(&Pointers::default(), trouble.clone(), &[]).or_else(|error| {
        refused(error)?;
        attempt(&Pointers::default(), trouble, &[MODULES])
    })
}

fn attempt(
    source: &Source,
    quarantine: &Quarantine,
    git_dir: Option<&Dirs>,
    pointers: &Pointers,
    trouble: Option<String>,
    without: &[&[u8]],
) -> Result<Saved, WorkspaceError> {
    let workspace = &source.workspace;
    let (tree, left_out) = files(source, quarantine, git_dir, without)?;
    let head = pointers.head.clone().unwrap_or_else(|| workspace.commit.clone());
    let wip = wip(source, quarantine, &tree, &head)?;
    let saved = Saved {
        workspace: workspace.name.clone(),
        base: workspace.base.clone(),
        uncommitted: wip != head,
        head,
        wip,
        branches: pointers.branches.iter().filter(|(_, id)| **id != workspace.commit).map(|(name, id)| (name.clone(), id.clone())).collect(),
        left_out,
        trouble,
    };
    publish(source, quarantine, &saved)?;
    Ok(saved)
}

/// The Body's own commits, in quarantine; or why they cannot be there.
fn commits(source: &Source, quarantine: &Quarantine, git_dir: Option<&Dirs>) -> Result<(Pointers, Option<String>), WorkspaceError> {
    let nothing = |why: &str| Ok((Pointers::default(), Some(why.to_owned())));
    let Some(git_dir) = git_dir else { return nothing("its .git is gone") };
    let pointers = refs::read(git_dir);
    if pointers.head.is_none() {
        return nothing("its .git does not say which commit it is on");
    }
    if let Some(objects) = source.own_objects()?
        && let Err(error) = loose::import(quarantine, &objects)
    {
        if error.is_full() {
            return Err(error);
        }
        return nothing(&format!("its git objects are refused: {error}"));
    }
    match connected(source, quarantine, &pointers) {
        Ok(()) if pointers.refused > 0 => {
            let why = format!("{} of its branches are left out: their names are refused, or they are too many", pointers.refused);
            Ok((pointers, Some(why)))
        }
        Ok(()) => Ok((pointers, None)),
        Err(error) if error.is_full() => Err(error),
        Err(error) => nothing(&format!("its commits are refused: {error}")),
    }
}

/// Every tip is a commit, with everything it needs.
fn connected(source: &Source, quarantine: &Quarantine, pointers: &Pointers) -> Result<(), WorkspaceError> {
    let tips: BTreeSet<&String> = pointers.head.iter().chain(pointers.branches.values()).collect();
    let news: Vec<&&String> = tips.iter().filter(|tip| ***tip != source.workspace.commit).collect();
    if news.is_empty() {
        return Ok(());
    }
    let lines: String = news.iter().map(|tip| format!("{tip}^{{commit}}\n")).chain([format!("^{}\n", source.workspace.commit)]).collect();
    quarantine.git().feed(["rev-list", "--objects", "--quiet", "--stdin"], lines.into_bytes())?;
    Ok(())
}

/// The Body's files as a tree.
fn files(source: &Source, quarantine: &Quarantine, git_dir: Option<&Dirs>, without: &[&[u8]]) -> Result<(String, Vec<LeftOut>), WorkspaceError> {
    let stage = quarantine.stage()?;
    let place = stage.join("files");
    fs::create_dir(&place).during("make room for a copy")?;
    let index_file = stage.join("index");
    fs::copy(source.base_index()?, &index_file).during("copy an index")?;
    let git = quarantine.git().files(&place).index(&index_file);
    if source.workspace.included {
        git.run(["read-tree", "-m", "-i", &format!("{}^{{tree}}", source.workspace.base)])?;
    }
    let base = index::names(&index_file)?;
    check_out_rules(&git, &base)?;
    take_exclusions(quarantine, git_dir)?;
    let own_index = git_dir.and_then(|git| git.small("index", INDEX_LEN_MAX)).unwrap_or_default();
    let (tracked, whole) = index::parse(&own_index);
    let mut tracked: BTreeSet<Vec<u8>> = tracked.into_iter().collect();
    if !whole {
        tracked.extend(base.iter().cloned());
    }
    let dirs = Dirs::open(&source.changed()).during("open the Body's files")?;
    let walk = Walk { base: &base, tracked: &tracked, ignore: Ignore::start(&git)?, changes: Changes::default() };
    let ours = File::open(&place).during("open a copy")?;
    let mut changes = walk.run(&dirs, ours.as_fd())?;
    // What `git sparse-checkout` took out of sight is not gone.
    let skipped = index::skipped(&own_index);
    changes.gone.retain(|path| !index::is_skipped(&skipped, path));
    for path in without {
        if changes.paths.iter().any(|changed| changed == path) {
            changes.left_out.push(LeftOut { path: proto::text::visible_bytes(path), why: "git's fsck refuses what it says" });
        }
    }
    let wanted = changes.paths.iter().filter(|path| !without.contains(&path.as_slice()));
    let lines = |paths: &mut dyn Iterator<Item = &Vec<u8>>| paths.flat_map(|path| path.iter().copied().chain([0])).collect::<Vec<u8>>();
    let (gone, there) = (lines(&mut changes.gone.iter()), lines(&mut wanted.into_iter()));
    if !gone.is_empty() {
        git.feed(["update-index", "-z", "--force-remove", "--stdin"], gone)?;
    }
    if !there.is_empty() {
        git.feed(["update-index", "-z", "--add", "--replace", "--stdin"], there)?;
    }
    Ok((git.line(["write-tree"])?, changes.left_out))
}

/// Files of the base that say how git treats others.
fn check_out_rules(git: &Git, base: &BTreeSet<Vec<u8>>) -> Result<(), WorkspaceError> {
    let is_rule = |path: &&Vec<u8>| {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        name == b".gitignore" || name == b".gitattributes"
    };
    let list: Vec<u8> = base.iter().filter(is_rule).flat_map(|path| path.iter().copied().chain([0])).collect();
    if !list.is_empty() {
        git.feed(["checkout-index", "--force", "--quiet", "-z", "--stdin"], list)?;
    }
    Ok(())
}

/// What the Body's own git excludes, besides what its files say.
fn take_exclusions(quarantine: &Quarantine, git_dir: Option<&Dirs>) -> Result<(), WorkspaceError> {
    let text = git_dir.and_then(|git| git.small("info/exclude", EXCLUDE_LEN_MAX)).unwrap_or_default();
    let dir = quarantine.dir().join("info");
    fs::create_dir_all(&dir).during("note what is excluded")?;
    sys::fd::write_whole(&dir.join("exclude"), &text).during("note what is excluded")
}

/// The commit that holds everything: the last one, where that does; the one made before, where nothing has changed.
fn wip(source: &Source, quarantine: &Quarantine, tree: &str, head: &str) -> Result<String, WorkspaceError> {
    let git = quarantine.git();
    let tree_of = |commit: &str| git.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")]).ok();
    if tree_of(head).as_deref() == Some(tree) {
        return Ok(head.to_owned());
    }
    if head == source.workspace.commit && tree_of(&source.workspace.base).as_deref() == Some(tree) {
        return Ok(source.workspace.base.clone());
    }
    let before = format!("{}/wip", namespace(&source.body));
    let user = Git::at(&source.workspace.repository);
    if let Ok(said) = user.line(["log", "-1", "--format=%H %T %P", &before, "--"])
        && let Some((id, rest)) = said.split_once(' ')
        && rest == format!("{tree} {head}")
    {
        return Ok(id.to_owned());
    }
    let message = format!("work in progress of Body {}", source.body);
    Ok(refs::as_palisade(git).line(["commit-tree", tree, "-p", head, "-m", &message])?)
}

/// Has the user's repository take it all, and looks that it did.
fn publish(source: &Source, quarantine: &Quarantine, saved: &Saved) -> Result<(), WorkspaceError> {
    let to = namespace(&source.body);
    let mut wanted = BTreeMap::from([("base".to_owned(), saved.base.clone()), ("head".to_owned(), saved.head.clone()), ("wip".to_owned(), saved.wip.clone())]);
    // Where commits are refused, what was taken of them before keeps its name.
    if saved.trouble.is_some() && Git::at(&source.workspace.repository).run(["rev-parse", "--verify", "--quiet", &format!("{to}/head")]).is_ok() {
        wanted.remove("head");
    }
    wanted.extend(saved.branches.iter().map(|(name, id)| (format!("heads/{name}"), id.clone())));
    let user = Git::at(&source.workspace.repository);
    if is_there(&user, &to, &wanted)? {
        return Ok(());
    }
    make_way(&user, &to, &wanted)?;
    let mut packed = String::from("# pack-refs with: sorted \n");
    wanted.iter().for_each(|(name, id)| packed.push_str(&format!("{id} refs/out/{name}\n")));
    sys::fd::write_whole(&quarantine.dir().join("packed-refs"), packed.as_bytes()).during("name what is to be taken")?;
    fetch(&user, quarantine.dir(), &format!("+refs/out/*:{to}/*"))?;
    if is_there(&user, &to, &wanted)? {
        Ok(())
    } else {
        Err(WorkspaceError::Repository("the repository does not name what it was given".into()))
    }
}

/// A branch `a` that became `a/b`, or the other way round, stands in its own way.
fn make_way(user: &Git, to: &str, wanted: &BTreeMap<String, String>) -> Result<(), WorkspaceError> {
    let said = user.line(["for-each-ref", "--format=%(refname)", &format!("{to}/heads/")])?;
    let below = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.starts_with('/'));
    for old in said.lines() {
        let name = old.strip_prefix(&format!("{to}/")).unwrap_or(old);
        if wanted.keys().any(|new| below(new, name) || below(name, new)) {
            user.run(["update-ref", "-d", old])?;
        }
    }
    Ok(())
}

fn fetch(user: &Git, from: &Path, refspec: &str) -> Result<(), WorkspaceError> {
    let flags = ["fetch", "--quiet", "--force", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--no-recurse-submodules", "--update-shallow", "--"];
    user.clone().tight().lasting().run(flags.map(std::ffi::OsStr::new).into_iter().chain([from.as_os_str(), refspec.as_ref()]))?;
    Ok(())
}

fn is_there(user: &Git, to: &str, wanted: &BTreeMap<String, String>) -> Result<bool, WorkspaceError> {
    let said = user.line(["for-each-ref", "--format=%(objectname) %(refname)", &format!("{to}/")])?;
    let there: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once(' ')).map(|(id, name)| (name, id)).collect();
    Ok(wanted.iter().all(|(name, id)| there.get(format!("{to}/{name}").as_str()) == Some(&id.as_str())))
}

/// Names what a Body began with, so that nobody clears it away while the Body needs it.
pub fn anchor(body: &BodyId, workspace: &Workspace) -> Result<(), WorkspaceError> {
    let to = format!("{}/base", namespace(body));
    let git = Git::at(&workspace.repository);
    git.run(["update-ref", &to, &workspace.base])?;
    // A convenience: where the user's settings cannot be written, `refs/palisade` is there all the same.
    let remote = remote(body);
    let settings = [("fetch", format!("+{}/*:refs/remotes/pal/{body}/*", namespace(body))), ("skipFetchAll", "true".to_owned()), ("tagOpt", "--no-tags".to_owned()), ("url", ".".to_owned())];
    for (name, value) in settings {
        if git.run(["config", "--local", &format!("{remote}.{name}"), &value]).is_err() {
            break;
        }
    }
    Ok(())
}

/// The section of a remote by which plain git fetches a Body's work, as it was saved last.
fn remote(body: &BodyId) -> String {
    format!("remote.pal/{body}")
}

/// Takes that remote away with the Body; what was saved stays.
pub fn unname(body: &BodyId, workspace: &Workspace) {
    let _ = Git::at(&workspace.repository).run(["config", "--local", "--remove-section", &remote(body)]);
}

/// Forgets a Body that did nothing.
pub fn forget(body: &BodyId, workspace: &Workspace) -> Result<(), WorkspaceError> {
    let git = Git::at(&workspace.repository);
    let to = format!("{}/", namespace(body));
    let said = git.line(["for-each-ref", "--format=delete %(refname)", &to])?;
    git.feed(["update-ref", "--stdin"], format!("{said}\n").into_bytes())?;
    Ok(())
}
