//! A Body's work as git objects: its commits, and one more that holds every file that is not in them.
//!
//! Works the same whether the Body runs, is stopped, dead, full or hostile: its files are read as plain files, its git
//! is never run. What git itself refuses is told, never dropped in silence.
//!
//! Invariant: `refs/palisade/BODY/wip` holds every tracked and untracked file that git can hold; what it does not hold
//! is in [`SaveResult::skipped`] or [`SaveResult::commit_error`].
//! Invariant: nothing counts as saved before the user's repository names the very objects that were made here.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use body::programs::Programs;
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

/// Why a look leaves out what a Body made the `.git` of a submodule.
const NO_GIT: &str = "it is no git directory of this workspace";

/// Where a Body's work is.
#[derive(Debug, Clone)]
pub struct BodyWorkspace {
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
    /// The helper that reads what only the Body's ids may read, and those ids.
    pub programs: Programs,
    /// See there.
    pub ids: Ids,
    /// Where in the workspace this is: nothing for itself, the path of a submodule for that.
    pub inside: String,
    /// How long a look or a save may take.
    pub time_max: Duration,
}

/// A Body's files as trees.
#[derive(Debug)]
pub struct WorkTrees {
    /// The workspace itself, and each submodule that was changed.
    pub parts: Vec<WorkPart>,
    /// What is not in them.
    pub skipped: Vec<SkippedPath>,
}

/// Files of one repository in a Body, by their paths in its workspace.
#[derive(Debug)]
pub struct WorkPart {
    /// What they were.
    pub base: String,
    /// What they are.
    pub tree: String,
    /// Where the trees are; they go with this.
    pub view: QuarantineView,
    /// Which repository.
    pub(crate) repository: PathBuf,
    pub(crate) inside: String,
}

/// A Body's work, in the user's repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SaveResult {
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
    pub skipped: Vec<SkippedPath>,
    /// Why its own commits could not be taken, if they could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit_error: Option<String>,
    /// What was done in submodules: saved in repositories of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<SavedModule>,
}

/// What events say of it.
impl From<&SaveResult> for SavedWork {
    fn from(saved: &SaveResult) -> Self {
        let SaveResult {
            workspace,
            base,
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
    /// Whether something would be lost with the Body.
    pub fn is_whole(&self) -> bool {
        self.skipped.is_empty() && self.commit_error.is_none()
    }

    /// Whether nothing was changed, as far as it could be taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.wip == self.base && self.head == self.base && self.branches.is_empty()
    }

    /// Whether the Body did anything at all.
    pub fn is_empty(&self) -> bool {
        self.wip == self.base && self.branches.is_empty() && self.submodules.is_empty() && self.is_whole()
    }
}

impl BodyWorkspace {
    /// Its upper and the snapshots below, as far as they hold this workspace.
    pub(crate) fn changed(&self) -> Vec<PathBuf> {
        let area = self.workspace.area_dir();
        let upper = self.dir.join("disk/upper").join(&area);
        [upper].into_iter().chain(self.snapshots.iter().map(|snapshot| snapshot.join(&area))).collect()
    }

    /// The index that fits the files it began with.
    pub(crate) fn base_index(&self) -> Result<PathBuf, WorkspaceError> {
        // A submodule has its files, and nothing else.
        let files = self
            .workspace
            .layers
            .get(usize::from(self.inside.is_empty()))
            .ok_or_else(|| WorkspaceError::Repository("the workspace has no files".into()))?;
        Ok(self.layers.join(files.as_str()).join("index"))
    }

    /// What its quarantine is called: a submodule's as no workspace is.
    fn quarantine(&self) -> Result<Quarantine, WorkspaceError> {
        let name = match self.inside.as_str() {
            "" => self.workspace.name.clone(),
            inside => format!("{}+{}", self.workspace.name, crate::layer_id("submodule", &[inside])),
        };
        Quarantine::open(&self.dir, &name, &self.workspace.repository, self.time_max)
    }

    /// Whether the Body changed anything there, as far as can be seen without looking closely.
    pub(crate) fn is_touched(&self) -> bool {
        let found = OverlayDir::open(&self.changed()).and_then(|dirs| dirs.down(&self.inside));
        !matches!(found, Ok(None))
    }
}

/// A Body's files as they are now, as trees in its quarantine. The user's repositories are not touched.
pub fn look(source: &BodyWorkspace) -> Result<WorkTrees, WorkspaceError> {
    let (mut apart, inner) = submodules::look(source)?;
    let view = source.quarantine()?.view()?;
    let mut objects = Objects::start(&view.git())?;
    let upper = UpperFiles::open(source, &view)?;
    let git_dir = upper.git_dir()?;
    if !source.inside.is_empty() && matches!(git_dir, BodyGit::Odd) {
        apart.skipped.push(SkippedPath { path: ".git".into(), why: NO_GIT });
    }
    let given = ReadContext { source, view: &view, upper: &upper, git_dir: git_dir.dirs(), apart: &apart };
    let WorkFiles { tree, mut skipped } = packed(&view, 0, |pack| files::read(&given, &mut objects, pack))?;
    skipped.append(&mut apart.skipped);
    let part = WorkPart::of(source, view, tree)?;
    Ok(WorkTrees { parts: [part].into_iter().chain(inner).collect(), skipped })
}

impl WorkPart {
    fn of(source: &BodyWorkspace, view: QuarantineView, tree: String) -> Result<Self, WorkspaceError> {
        let mut part = Self {
            base: source.workspace.base.clone(),
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

    /// A tree of a submodule where the workspace has it.
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

/// Brings a Body's work into the user's repository, and looks that it is there; what was done in submodules, into theirs.
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
    // What was taken before may be damaged; then it is taken once more.
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

/// Makes a pack, and has git find it.
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

/// One way of saving a Body's work.
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
    /// Reads everything.
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

    /// Has the repository take it; where it refuses the Body's commits, its files without them.
    fn finish(mut self) -> Result<SaveResult, WorkspaceError> {
        match self.publish(1) {
            Err(WorkspaceError::Git(GitError::Failed { said, reason, .. }))
                if reason != GitReason::DiskFull && self.pointers != BodyRefs::default() =>
            {
                self.commit_error = Some(format!("its commits are refused: {said}"));
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
        let saved = SaveResult {
            workspace: workspace.name.clone(),
            base: workspace.base.clone(),
            uncommitted: wip != head,
            head,
            wip,
            branches: self
                .pointers
                .branches
                .iter()
                .filter(|(_, id)| **id != workspace.commit)
                .map(|(name, id)| (name.clone(), id.clone()))
                .collect(),
            skipped: self.files.skipped.clone(),
            commit_error: self.commit_error.clone(),
            submodules: Vec::new(),
        };
        // A submodule has no name of the Body's work before there is some.
        if !self.source.inside.is_empty() && saved.is_idle() && self.known.id("wip").is_none() {
            return Ok(saved);
        }
        let mut wanted = BTreeMap::from([
            ("base".to_owned(), saved.base.clone()),
            ("head".to_owned(), saved.head.clone()),
            ("wip".to_owned(), saved.wip.clone()),
        ]);
        // Where commits are refused, what was taken of them before keeps its name.
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

    /// The commit that holds everything: the last one, where that does; the one made before, where nothing has changed.
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

/// The Body's own commits, in quarantine; or why they cannot be there.
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
        // A submodule comes without one.
        BodyGit::None if !given => return Ok((BodyRefs::default(), None)),
        BodyGit::None | BodyGit::Odd => return nothing("its .git is gone, or cannot be read"),
    };
    let pointers = refs::read(git_dir);
    if pointers.head.is_none() && (given || !pointers.branches.is_empty()) {
        return nothing("its .git does not say which commit it is on");
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
            return nothing(&format!("its git objects are refused: {error}"));
        }
        let asked: Vec<String> = tips.iter().map(|tip| format!("{tip}^{{commit}}")).collect();
        let found = objects.about(&asked)?;
        if let Some((missing, _)) = tips.iter().zip(found).find(|(_, found)| found.is_none()) {
            return nothing(&format!("its commits are refused: {missing} is no commit, or it is not there"));
        }
    }
    let why = (pointers.refused > 0).then(|| {
        format!(
            "{} of its branches are left out: their names are refused, or they are too many",
            pointers.refused
        )
    });
    Ok((pointers, why))
}

/// What a Body's git points at.
pub(crate) fn pointers(source: &BodyWorkspace) -> Result<BodyRefs, WorkspaceError> {
    let view = source.quarantine()?.view()?;
    let upper = UpperFiles::open(source, &view)?;
    Ok(upper.git_dir()?.dirs().map(refs::read).unwrap_or_default())
}

/// Names what a Body began with, so that nobody clears it away while the Body needs it.
pub fn write_refs(body: &BodyId, workspace: &Workspace) -> Result<(), WorkspaceError> {
    let to = format!("{}/base", namespace(body));
    let git = Git::at(&workspace.repository);
    git.run(["update-ref", &to, &workspace.base])?;
    for module in &workspace.submodules {
        // Where that does not work, a save will say what it cannot take.
        let _ = Git::at(&module.repository).run(["update-ref", &to, &module.commit]);
    }
    // A convenience: where the user's settings cannot be written, `refs/palisade` is there all the same.
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

/// The section of a remote by which plain git fetches a Body's work, as it was saved last.
fn remote(body: &BodyId) -> String {
    format!("remote.pal/{body}")
}

/// Lets go of what only the Body needed: the remote, and the name of its base where nothing was saved. What was saved
/// stays.
pub fn release(body: &BodyId, workspace: &Workspace) {
    let git = Git::at(&workspace.repository);
    let _ = git.run(["config", "--local", "--remove-section", &remote(body)]);
    for repository in repositories(workspace) {
        let git = Git::at(repository);
        if PublishedRefs::ask(&git, &namespace(body)).is_ok_and(|known| known.id("wip").is_none()) {
            let _ = git.run(["update-ref", "-d", &format!("{}/base", namespace(body))]);
        }
    }
}

/// Its own, and those of its submodules.
fn repositories(workspace: &Workspace) -> impl Iterator<Item = &PathBuf> {
    [&workspace.repository].into_iter().chain(workspace.submodules.iter().map(|module| &module.repository))
}

/// Forgets a Body that did nothing.
pub fn forget(body: &BodyId, workspace: &Workspace) -> Result<(), WorkspaceError> {
    let to = format!("{}/", namespace(body));
    for repository in repositories(workspace) {
        let git = Git::at(repository);
        let said = git.line(["for-each-ref", "--format=delete %(refname)", &to])?;
        git.feed(["update-ref", "--stdin"], format!("{said}\n").into_bytes())?;
    }
    Ok(())
}
