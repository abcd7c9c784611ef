//! Saves a Body's work as git objects: its commits, and one more commit with every file that is not in them.
//!
//! A save works whether the Body is running, stopped, dead, out of disk or hostile: the host reads its files
//! as plain files and never runs the Body's git. The result lists everything that git refuses; nothing is dropped silently.
//!
//! Invariant: `refs/palisade/BODY/wip` holds every tracked and untracked file that git can hold;
//! [`SaveResult::skipped`] and [`SaveResult::commit_error`] list everything else.
//! Invariant: work counts as saved only after the refs of the user's repository name the objects made here.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use body::{programs::Programs, vm::upper_copy::UpperCopy};
use proto::{
    BodyId,
    event_data::{SavedSubmodule, SavedWork, SkippedFile},
    spec::Ids,
    workspace::Workspace,
};
use serde::Serialize;

use crate::{
    Quarantine,
    error::{ErrorContext, WorkspaceError},
    files::{self, ReadContext, WorkFiles},
    git::{Git, GitError, GitReason},
    import_objects,
    land_base::{self, SYNCED, WorkBase},
    left_out::{OtherBranch, other_branches},
    objects::Objects,
    overlay_reader::OverlayDir,
    pack_writer::{ObjectKind, PackWriter},
    publish::{self, PublishedRefs},
    quarantine::QuarantineView,
    refs::{self, BodyRefs, namespace},
    submodules::{self, SubmoduleWork},
    upper::{BodyGit, UpperFiles},
};
pub use crate::{overlay_diff::SkippedPath, submodules::SavedModule};

/// Why a path is skipped that a Body created as the `.git` of a submodule.
const NO_GIT: &str = "it is not a git directory of this workspace";

/// A workspace in a Body, to be read on the host.
#[derive(Debug, Clone)]
pub struct BodyWorkspace {
    /// The Body.
    pub body: BodyId,
    /// The Body's directory.
    pub dir: PathBuf,
    /// Its writes: a directory for each area.
    pub upper: PathBuf,
    /// Where that is a copy, which goes with the last that reads it.
    pub copy: Option<Arc<UpperCopy>>,
    /// The snapshots below its upper, topmost first.
    pub snapshots: Vec<PathBuf>,
    /// How many of these, from the bottom, hold only what a preparation made: no work of a Body.
    pub prepared: usize,
    /// The imported repository.
    pub workspace: Workspace,
    /// The directory of all layers.
    pub layers: PathBuf,
    /// The launcher, which reads files that only the Body's ids may read.
    pub programs: Programs,
    /// The Body's ids.
    pub ids: Ids,
    /// The path of a submodule in the workspace; empty for the workspace itself.
    pub inside: String,
    /// Time limit of a look or a save.
    pub time_max: Duration,
}

/// A Body's current files as git trees.
#[derive(Debug)]
pub struct WorkTrees {
    /// The workspace itself, and each changed submodule.
    pub parts: Vec<WorkPart>,
    /// Paths that are not in the trees.
    pub skipped: Vec<SkippedPath>,
    /// Branches of the Body with commits that its current one lacks.
    pub branches: Vec<OtherBranch>,
}

/// The files of one repository in a Body, by their paths in its workspace.
#[derive(Debug)]
pub struct WorkPart {
    /// The tree or commit that the Body began with.
    pub base: String,
    /// The tree of the files now.
    pub tree: String,
    /// The quarantine that holds the trees; dropping it removes them.
    pub view: QuarantineView,
    /// The host's repository.
    pub(crate) repository: PathBuf,
    pub(crate) inside: String,
}

/// The result of a save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SaveResult {
    /// The name of the workspace.
    pub workspace: String,
    /// The commit that the work is compared with: the one that the Body began with, or a later one of the user that
    /// `pal sync` brought in and the Body took over.
    pub base: String,
    /// The user's commit below `base`; another one if `base` holds uncommitted work of the user.
    #[serde(skip)]
    pub origin: String,
    /// The Body's own last commit.
    pub head: String,
    /// The commit that holds every file.
    pub wip: String,
    /// Whether `wip` has more than the last commit.
    pub uncommitted: bool,
    /// The Body's branches and their commits.
    pub branches: BTreeMap<String, String>,
    /// Paths that were not saved.
    pub skipped: Vec<SkippedPath>,
    /// Why the Body's own commits could not be saved; none if they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit_error: Option<String>,
    /// Work in submodules, which is saved in their own repositories.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<SavedModule>,
}

/// The data of the event `workspace.saved`.
impl From<&SaveResult> for SavedWork {
    fn from(saved: &SaveResult) -> Self {
        let SaveResult {
            workspace,
            base,
            origin: _,
            head,
            wip,
            uncommitted,
            branches,
            skipped,
            commit_error,
            submodules,
        } = saved.clone();
        Self {
            workspace,
            base,
            head,
            wip,
            uncommitted,
            branches,
            skipped: skipped
                .into_iter()
                .map(|SkippedPath { path, why }| SkippedFile { path, why: why.to_owned() })
                .collect(),
            commit_error,
            submodules: submodules.into_iter().map(SavedSubmodule::from).collect(),
        }
    }
}

impl SaveResult {
    /// Whether everything was saved, so that removing the Body loses nothing.
    pub fn is_whole(&self) -> bool {
        self.skipped.is_empty() && self.commit_error.is_none()
    }

    /// Whether no change was found.
    pub(crate) fn is_idle(&self) -> bool {
        self.wip == self.base && self.head == self.base && self.branches.is_empty()
    }

    /// Whether the Body changed nothing at all.
    pub fn is_empty(&self) -> bool {
        self.wip == self.base && self.branches.is_empty() && self.submodules.is_empty() && self.is_whole()
    }
}

/// The index of the files that a Body begins with, of a workspace or of the submodule at `inside`.
pub(crate) fn index_of_files(
    workspace: &Workspace,
    layers: &Path,
    inside: &str,
) -> Result<PathBuf, WorkspaceError> {
    // A submodule has only its layer of files; a workspace has the `.git` layer first.
    let files = workspace
        .layers
        .get(usize::from(inside.is_empty()))
        .ok_or_else(|| WorkspaceError::Repository("the workspace has no layer of files".into()))?;
    Ok(layers.join(files.as_str()).join("index"))
}

impl BodyWorkspace {
    /// The directories of this workspace in the Body's upper and in the snapshots below.
    pub(crate) fn changed(&self) -> Vec<PathBuf> {
        let area = self.workspace.area_dir();
        let upper = self.upper.join(&area);
        [upper].into_iter().chain(self.snapshots.iter().map(|snapshot| snapshot.join(&area))).collect()
    }

    /// The index of the files that the Body began with.
    pub(crate) fn base_index(&self) -> Result<PathBuf, WorkspaceError> {
        index_of_files(&self.workspace, &self.layers, &self.inside)
    }

    /// The commits that the Body began with.
    pub(crate) fn first_base(&self) -> WorkBase {
        WorkBase { origin: self.workspace.commit.clone(), base: self.workspace.base.clone() }
    }

    /// Opens the quarantine. That of a submodule has a `+` in its name, so it cannot clash with a workspace.
    pub(crate) fn quarantine(&self) -> Result<Quarantine, WorkspaceError> {
        let name = match self.inside.as_str() {
            "" => self.workspace.name.clone(),
            inside => format!("{}+{}", self.workspace.name, crate::layer_id("submodule", &[inside])),
        };
        Quarantine::open(&self.dir, &name, &self.workspace.repository, self.time_max)
    }

    /// Whether the Body may have changed something: cheap, and true if in doubt.
    pub(crate) fn is_touched(&self) -> bool {
        let found = OverlayDir::open(&self.changed()).and_then(|dirs| dirs.down(&self.inside));
        !matches!(found, Ok(None))
    }
}

/// Reads a Body's current files as trees in its quarantine. The user's repositories do not change.
pub fn look(source: &BodyWorkspace) -> Result<WorkTrees, WorkspaceError> {
    let (mut apart, inner) = submodules::look(source)?;
    let quarantine = source.quarantine()?;
    let view = quarantine.view()?;
    let mut objects = Objects::start(&view.git())?;
    let upper = UpperFiles::open(source, &view)?;
    let git_dir = upper.git_dir()?;
    if !source.inside.is_empty() && matches!(git_dir, BodyGit::Odd) {
        apart.skipped.push(SkippedPath { path: ".git".into(), why: NO_GIT });
    }
    let given = ReadContext { source, view: &view, upper: &upper, git_dir: git_dir.dirs(), apart: &apart };
    let WorkFiles { tree, mut skipped } = packed(&view, 0, |pack| files::read(&given, &mut objects, pack))?;
    skipped.append(&mut apart.skipped);
    let (base, branches) = look_at_history(source, &quarantine, &upper, &mut objects, &git_dir)?;
    let part = WorkPart::of(source, view, base, tree)?;
    Ok(WorkTrees { parts: [part].into_iter().chain(inner).collect(), skipped, branches })
}

/// Finds the commit that the files are compared with, and the branches that a diff does not show. The Body's commits
/// are read only if there may be an answer other than the usual one.
fn look_at_history(
    source: &BodyWorkspace,
    quarantine: &Quarantine,
    upper: &UpperFiles,
    objects: &mut Objects,
    git_dir: &BodyGit,
) -> Result<(String, Vec<OtherBranch>), WorkspaceError> {
    let first = source.first_base();
    let pointers = git_dir.dirs().map(refs::read).unwrap_or_default();
    let Some(head) = pointers.head.as_deref().filter(|_| source.inside.is_empty()) else {
        return Ok((first.base, Vec::new()));
    };
    let known = PublishedRefs::ask(&quarantine.user(&source.workspace), &namespace(&source.body))?;
    let others = || pointers.branches.values().any(|id| *id != head && *id != first.origin);
    if known.numbered(SYNCED).is_empty() && !others() {
        return Ok((first.base, Vec::new()));
    }
    let (_, refused) = commits(source, quarantine, upper, objects, &known, git_dir)?;
    if refused.is_some() {
        return Ok((first.base, Vec::new()));
    }
    let git = quarantine.git();
    let found = WorkBase::find(&git, &known, head, first);
    let branches = other_branches(&git, &pointers.branches, head, &[&found.origin, &found.base])?;
    Ok((found.base, branches))
}

impl WorkTrees {
    /// Whether the Body changed or added anything.
    pub fn is_changed(&self) -> Result<bool, WorkspaceError> {
        for part in &self.parts {
            let base = part.view.git().line(["rev-parse", "--verify", &format!("{}^{{tree}}", part.base)])?;
            if base != part.tree {
                return Ok(true);
            }
        }
        Ok(!self.skipped.is_empty() || !self.branches.is_empty())
    }
}

impl WorkPart {
    fn of(
        source: &BodyWorkspace,
        view: QuarantineView,
        base: String,
        tree: String,
    ) -> Result<Self, WorkspaceError> {
        let mut part = Self {
            base,
            tree,
            view,
            repository: source.workspace.repository.clone(),
            inside: source.inside.clone(),
        };
        if !part.inside.is_empty() {
            part.base = part.wrapped(&format!("{}^{{tree}}", part.base))?;
            part.tree = part.wrapped(&part.tree)?;
        }
        Ok(part)
    }

    /// Puts the tree of a submodule at its path in the workspace.
    pub(crate) fn wrapped(&self, tree: &str) -> Result<String, WorkspaceError> {
        let git = self.view.writing().scratch();
        let mut id = git.line(["rev-parse", "--verify", "--quiet", tree])?;
        for name in self.inside.rsplit('/').filter(|name| !name.is_empty()) {
            let said = git.feed(["mktree", "-z"], format!("040000 tree {id}\t{name}\0").into_bytes())?;
            id = String::from_utf8_lossy(&said).trim_end().to_owned();
        }
        Ok(id)
    }
}

/// Saves a Body's work into the user's repository and verifies it there; work in submodules goes to their
/// repositories.
pub fn save(source: &BodyWorkspace) -> Result<SaveResult, WorkspaceError> {
    let (apart, modules) = submodules::save(source)?;
    let quarantine = source.quarantine()?;
    let had = quarantine.has_objects();
    let attempt = || SaveAttempt::begin(source, &quarantine, &apart).and_then(SaveAttempt::finish);
    let mut saved = attempt();
    let doubtful = match &saved {
        Ok(saved) => saved.commit_error.is_some(),
        Err(error) => matches!(error, WorkspaceError::Git(_) | WorkspaceError::Io(..)) && !error.is_full(),
    };
    // Objects kept from an earlier save may be damaged: delete them and try once more.
    if had && doubtful {
        quarantine.forget();
        saved = attempt();
    }
    let mut saved = saved?;
    quarantine.tidy();
    saved.skipped.extend(apart.skipped);
    saved.submodules = modules;
    Ok(saved)
}

/// Writes a pack and its index.
fn packed<T>(
    view: &QuarantineView,
    number: u32,
    fill: impl FnOnce(&mut PackWriter) -> Result<T, WorkspaceError>,
) -> Result<T, WorkspaceError> {
    let mut pack = PackWriter::begin(&view.pack(number)).during("make a pack")?;
    let done = fill(&mut pack)?;
    if !pack.is_empty() {
        pack.finish().and_then(|finished| finished.index()).during("make a pack")?;
    }
    Ok(done)
}

/// One attempt to save a Body's work.
struct SaveAttempt<'a> {
    source: &'a BodyWorkspace,
    view: QuarantineView,
    user: Git,
    known: PublishedRefs,
    objects: Objects,
    files: WorkFiles,
    pointers: BodyRefs,
    commit_error: Option<String>,
}

impl<'a> SaveAttempt<'a> {
    /// Reads the Body's files and commits.
    fn begin(
        source: &'a BodyWorkspace,
        quarantine: &Quarantine,
        apart: &SubmoduleWork,
    ) -> Result<Self, WorkspaceError> {
        let view = quarantine.view()?;
        let mut objects = Objects::start(&view.git())?;
        let user = quarantine.user(&source.workspace);
        let known = PublishedRefs::ask(&user, &namespace(&source.body))?;
        let upper = UpperFiles::open(source, &view)?;
        let git_dir = upper.git_dir()?;
        let (pointers, commit_error) = commits(source, quarantine, &upper, &mut objects, &known, &git_dir)?;
        let given = ReadContext { source, view: &view, upper: &upper, git_dir: git_dir.dirs(), apart };
        let files = packed(&view, 0, |pack| files::read(&given, &mut objects, pack))?;
        Ok(Self { source, view, user, known, objects, files, pointers, commit_error })
    }

    /// Publishes the work; if the user's repository refuses the Body's commits, only its files.
    fn finish(mut self) -> Result<SaveResult, WorkspaceError> {
        match self.publish(1) {
            Err(WorkspaceError::Git(GitError::Failed { said, reason, .. }))
                if reason != GitReason::DiskFull && self.pointers != BodyRefs::default() =>
            {
                self.commit_error = Some(format!("git refuses the Body's commits: {said}"));
                self.pointers = BodyRefs::default();
                self.publish(2)
            }
            done => done,
        }
    }

    fn publish(&mut self, number: u32) -> Result<SaveResult, WorkspaceError> {
        let workspace = &self.source.workspace;
        let head = self.pointers.head.clone().unwrap_or_else(|| workspace.commit.clone());
        let wip = self.wip(&head, number)?;
        let WorkBase { origin, base } =
            WorkBase::find(&self.view.git(), &self.known, &head, self.source.first_base());
        let saved = SaveResult {
            workspace: workspace.name.clone(),
            base,
            origin: origin.clone(),
            uncommitted: wip != head,
            head,
            wip,
            branches: self
                .pointers
                .branches
                .iter()
                .filter(|(_, id)| **id != workspace.commit && **id != origin)
                .map(|(name, id)| (name.clone(), id.clone()))
                .collect(),
            skipped: self.files.skipped.clone(),
            commit_error: self.commit_error.clone(),
            submodules: Vec::new(),
        };
        // A submodule gets no refs until the Body changes something in it.
        if !self.source.inside.is_empty() && saved.is_idle() && self.known.id("wip").is_none() {
            return Ok(saved);
        }
        let mut wanted = BTreeMap::from([
            ("base".to_owned(), workspace.base.clone()),
            ("head".to_owned(), saved.head.clone()),
            ("wip".to_owned(), saved.wip.clone()),
        ]);
        // If commits are refused now, the ref keeps the commit of an earlier save.
        if saved.commit_error.is_some() && self.known.id("head").is_some() {
            wanted.remove("head");
        }
        wanted.extend(saved.branches.iter().map(|(name, id)| (format!("heads/{name}"), id.clone())));
        publish::publish(
            &self.view,
            &self.user,
            &namespace(&self.source.body),
            &wanted,
            &self.known,
            &[&workspace.commit, &workspace.base],
        )?;
        Ok(saved)
    }

    /// The commit that holds every file: the Body's last commit if it does, the commit of an earlier save if
    /// nothing changed, or a new one.
    fn wip(&mut self, head: &str, number: u32) -> Result<String, WorkspaceError> {
        let (workspace, tree) = (&self.source.workspace, &self.files.tree);
        let there =
            self.objects.about(&[format!("{head}^{{tree}}"), format!("{}^{{tree}}", workspace.base)])?;
        let has = |at: usize| there.get(at).and_then(Option::as_ref).is_some_and(|found| found.id == *tree);
        if has(0) {
            return Ok(head.to_owned());
        }
        if head == workspace.commit && has(1) {
            return Ok(workspace.base.clone());
        }
        if let Some(before) = self.known.commit("wip", tree, head) {
            return Ok(before);
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let who = format!("{} {at} +0000", refs::PALISADE);
        let text = format!(
            "tree {tree}\nparent {head}\nauthor {who}\ncommitter {who}\n\nwork in progress of Body {}\n",
            self.source.body
        );
        let id = packed(&self.view, number, |pack| {
            pack.add(ObjectKind::Commit, text.len() as u64, text.as_bytes()).during("write a commit")
        })?;
        Ok(crate::pack_writer::hex(&id))
    }
}

/// Imports the Body's own commits into the quarantine; returns its refs, or why the commits cannot be saved.
fn commits(
    source: &BodyWorkspace,
    quarantine: &Quarantine,
    upper: &UpperFiles,
    objects: &mut Objects,
    known: &PublishedRefs,
    git_dir: &BodyGit,
) -> Result<(BodyRefs, Option<String>), WorkspaceError> {
    let nothing = |why: &str| Ok((BodyRefs::default(), Some(why.to_owned())));
    let given = source.inside.is_empty();
    let git_dir = match git_dir {
        BodyGit::There(git_dir) => git_dir,
        // The Body gets no `.git` for a submodule.
        BodyGit::None if !given => return Ok((BodyRefs::default(), None)),
        BodyGit::None | BodyGit::Odd => return nothing("the Body's .git is missing or unreadable"),
    };
    let pointers = refs::read(git_dir);
    if pointers.head.is_none() && (given || !pointers.branches.is_empty()) {
        return nothing("the Body's .git has no valid HEAD");
    }
    let had: BTreeSet<&str> = known.ids().into_iter().chain([source.workspace.commit.as_str()]).collect();
    let tips: BTreeSet<&String> = pointers
        .head
        .iter()
        .chain(pointers.branches.values())
        .filter(|tip| !had.contains(tip.as_str()))
        .collect();
    if !tips.is_empty() {
        if let Some(own) = upper.own_objects(git_dir)?
            && let Err(error) = import_objects::import(quarantine, objects, &own)
        {
            if error.is_full() {
                return Err(error);
            }
            return nothing(&format!("git refuses the Body's objects: {error}"));
        }
        let asked: Vec<String> = tips.iter().map(|tip| format!("{tip}^{{commit}}")).collect();
        let found = objects.about(&asked)?;
        if let Some((missing, _)) = tips.iter().zip(found).find(|(_, found)| found.is_none()) {
            return nothing(&format!(
                "the Body's commits cannot be saved: {missing} is missing or is not a commit"
            ));
        }
    }
    let why = (pointers.refused > 0).then(|| {
        format!("{} of the Body's refs are skipped: invalid names, or too many refs", pointers.refused)
    });
    Ok((pointers, why))
}

/// Reads the refs of a Body's git.
pub(crate) fn pointers(source: &BodyWorkspace) -> Result<BodyRefs, WorkspaceError> {
    let view = source.quarantine()?.view()?;
    let upper = UpperFiles::open(source, &view)?;
    Ok(upper.git_dir()?.dirs().map(refs::read).unwrap_or_default())
}

/// Sets refs for the commits that a Body begins with, so that `git gc` keeps them while the Body needs them. A fork
/// gets the records of its parent, too.
pub fn write_refs(
    body: &BodyId,
    parent: Option<&BodyId>,
    workspace: &Workspace,
) -> Result<(), WorkspaceError> {
    let to = format!("{}/base", namespace(body));
    let git = Git::at(&workspace.repository);
    git.run(["update-ref", &to, &workspace.base])?;
    if let Some(parent) = parent {
        land_base::copy_records(&git, parent, body)?;
    }
    for module in &workspace.submodules {
        // A failure here does no harm: the next save reports what it cannot save.
        let _ = Git::at(&module.repository).run(["update-ref", &to, &module.commit]);
    }
    // The remote is a convenience. If the user's configuration is read-only, `refs/palisade` still works.
    let remote = remote(body);
    let settings = [
        ("fetch", format!("+{}/*:refs/remotes/pal/{body}/*", namespace(body))),
        ("skipFetchAll", "true".to_owned()),
        ("tagOpt", "--no-tags".to_owned()),
        ("url", ".".to_owned()),
    ];
    for (name, value) in settings {
        if git.run(["config", "--local", &format!("{remote}.{name}"), &value]).is_err() {
            break;
        }
    }
    Ok(())
}

/// The configuration section of a remote with which plain git fetches a Body's last saved work.
fn remote(body: &BodyId) -> String {
    format!("remote.pal/{body}")
}

/// Removes what only the Body needed: the remote, the records of its base, and the base ref if nothing was saved. Saved work stays.
pub fn release(body: &BodyId, workspace: &Workspace) {
    let git = Git::at(&workspace.repository);
    let _ = git.run(["config", "--local", "--remove-section", &remote(body)]);
    let _ = land_base::remove_records(&git, body);
    for repository in repositories(workspace) {
        let git = Git::at(repository);
        if PublishedRefs::ask(&git, &namespace(body)).is_ok_and(|known| known.id("wip").is_none()) {
            let _ = git.run(["update-ref", "-d", &format!("{}/base", namespace(body))]);
        }
    }
}

/// The repository of a workspace and those of its submodules.
fn repositories(workspace: &Workspace) -> impl Iterator<Item = &PathBuf> {
    [&workspace.repository].into_iter().chain(workspace.submodules.iter().map(|module| &module.repository))
}

/// Removes all refs of a Body that changed nothing.
pub fn forget(body: &BodyId, workspace: &Workspace) -> Result<(), WorkspaceError> {
    let to = format!("{}/", namespace(body));
    for repository in repositories(workspace) {
        let git = Git::at(repository);
        let said = git.line(["for-each-ref", "--format=delete %(refname)", &to])?;
        git.feed(["update-ref", "--stdin"], format!("{said}\n").into_bytes())?;
    }
    Ok(())
}
