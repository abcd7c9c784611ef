//! Lands a Body's work: makes commits on a branch of the user's repository, with the user as committer.
//!
//! Invariant: only this module moves a branch, and only forward from the commit at which it read the branch.
//! Invariant: git runs no hook, and only filters and merge drivers that the user's own settings name.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::{
    event_data::{LandedWork, SavedSubmodule},
    workspace::Workspace,
};
use serde::Serialize;

use crate::{
    GitIdentity, Quarantine, SaveResult, SavedModule,
    error::WorkspaceError,
    git::{Git, GitError},
    publish, refs, review,
};

/// Most commits that are cherry-picked.
const COMMITS_MAX: usize = 1000;

/// The branch that the work lands on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandTarget {
    /// A new branch, or an existing one that moves forward.
    Branch(String),
    /// On top of an existing branch.
    Onto(String),
}

/// The part of the work that lands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandSelection {
    /// Every commit, and one more for uncommitted work.
    All,
    /// Every commit, without uncommitted work.
    Committed,
    /// Everything as one commit.
    Squash {
        /// The commit message; none to list the subjects of the Body's commits.
        message: Option<String>,
    },
    /// The commits with these ids.
    Pick(Vec<String>),
}

/// A request to land a Body's work.
#[derive(Debug)]
pub struct LandRequest<'a> {
    /// The workspace.
    pub workspace: &'a Workspace,
    /// The result of the last save, whose objects are in the user's repository.
    pub saved: &'a SaveResult,
    /// The id of the Body, for messages.
    pub body: &'a str,
    /// The directory of the Body.
    pub dir: &'a Path,
    /// The target branch.
    pub how: LandTarget,
    /// The selected work.
    pub what: LandSelection,
    /// The user who lands it.
    pub person: &'a GitIdentity,
    /// Time limit of the landing.
    pub time_max: Duration,
}

/// The result of a landing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LandResult {
    /// The branch.
    pub branch: String,
    /// The commit of the branch before; none if it is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The commit of the branch now.
    pub to: String,
    /// How many commits the branch gained.
    pub commits: usize,
    /// Changed files that a tool of the user may execute by itself.
    pub auto_executed: Vec<String>,
    /// Work in submodules, which did not land: it is saved in their own repositories.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<SavedModule>,
}

/// The data of the event `workspace.landed`.
impl From<&LandResult> for LandedWork {
    fn from(landed: &LandResult) -> Self {
        let LandResult { branch, from, to, commits, auto_executed, submodules } = landed.clone();
        Self {
            branch,
            from,
            to,
            commits: commits as u64,
            auto_executed,
            submodules: submodules.into_iter().map(SavedSubmodule::from).collect(),
        }
    }
}

/// Lands the work.
pub fn land(request: &LandRequest<'_>) -> Result<LandResult, WorkspaceError> {
    let workspace = request.workspace;
    let git =
        Git::at(&workspace.repository).identity(request.person).deadline(Instant::now() + request.time_max);
    let branch = match &request.how {
        LandTarget::Branch(name) | LandTarget::Onto(name) => name,
    };
    if !refs::is_branch(branch) {
        return Err(WorkspaceError::Repository(format!(
            "{:?} is not a valid branch name",
            proto::text::visible(branch)
        )));
    }
    // The plan is made while git's fsck checks the objects.
    let (sound, planned) = std::thread::scope(|scope| {
        let sound = scope.spawn(|| check(request));
        let planned = LandPlan::of(request, &git, branch);
        (sound.join(), planned)
    });
    let Ok(sound) = sound else { return Err(GitError::Answer("index-pack").into()) };
    let LandPlan { found, replayed } = planned?;
    sound?;
    let ReplayResult { to, commits, auto_executed } = replayed?;
    let (branch, from, submodules) =
        (branch.to_owned(), found.as_ref().map(|found| found.id.clone()), request.saved.submodules.clone());
    if commits > 0 || found.is_none() {
        advance(request, &git, &branch, found, &to)?;
    }
    Ok(LandResult { branch, from, to, commits, auto_executed, submodules })
}

/// The planned change of a branch.
struct LandPlan {
    /// The branch; none if it does not exist.
    found: Option<UserBranch>,
    /// The commit that the branch would move to, or why it cannot.
    replayed: Result<ReplayResult, WorkspaceError>,
}

/// The commit that a branch would move to.
struct ReplayResult {
    to: String,
    /// How many commits the branch gains; 0 if it has all of them already.
    commits: usize,
    /// Changed files that a tool of the user may execute by itself.
    auto_executed: Vec<String>,
}

impl LandPlan {
    fn of(request: &LandRequest<'_>, git: &Git, branch: &str) -> Result<Self, WorkspaceError> {
        let found = look_for(git, branch)?;
        let start = match (&request.how, &found) {
            (LandTarget::Onto(_), None) => {
                return Err(WorkspaceError::NotFound(format!("there is no branch {branch}")));
            }
            (_, Some(found)) => found.id.clone(),
            (LandTarget::Branch(_), None) => request.workspace.commit.clone(),
        };
        let replayed = ReplayResult::of(request, git, branch, &start, found.is_some());
        Ok(Self { found, replayed })
    }
}

impl ReplayResult {
    fn of(
        request: &LandRequest<'_>,
        git: &Git,
        branch: &str,
        start: &str,
        is_there: bool,
    ) -> Result<Self, WorkspaceError> {
        let (to, between) = replay(request, git, start)?;
        if to == start && is_there {
            return Ok(Self { to, commits: 0, auto_executed: Vec::new() });
        }
        let between = between.map_or_else(|| CommitDistance::of(git, start, &to), Ok)?;
        if between.behind > 0 && is_there {
            return Err(WorkspaceError::Conflict(format!(
                "branch {branch} has diverged from the Body's commits"
            )));
        }
        let auto_executed = review::names(git, start, &to)?
            .into_iter()
            .filter(|path| review::is_auto_executed(path))
            .collect();
        Ok(Self { to, commits: between.ahead, auto_executed })
    }
}

/// Checks everything that would land with all of git's fsck rules. A save skips the rules about file
/// contents, and the Body may have committed such files.
fn check(request: &LandRequest<'_>) -> Result<(), WorkspaceError> {
    let (workspace, saved) = (request.workspace, request.saved);
    let tips: Vec<&str> = match request.what {
        LandSelection::All | LandSelection::Squash { .. } => vec![&saved.wip],
        LandSelection::Committed => vec![&saved.head],
        LandSelection::Pick(_) => {
            saved.branches.values().chain([&saved.head, &saved.wip]).map(String::as_str).collect()
        }
    };
    let view =
        Quarantine::open(request.dir, &workspace.name, &workspace.repository, request.time_max)?.view()?;
    publish::check(&view, &tips, &[&workspace.commit, &workspace.base]).map_err(|error| match error {
        WorkspaceError::Git(GitError::Failed { said, .. }) => {
            WorkspaceError::Unsound(format!("git's fsck refuses it: {said}"))
        }
        error => error,
    })
}

/// How many commits two histories have that the other lacks.
struct CommitDistance {
    behind: usize,
    ahead: usize,
}

impl CommitDistance {
    fn of(git: &Git, old: &str, new: &str) -> Result<Self, WorkspaceError> {
        let said = git.line(["rev-list", "--left-right", "--count", &format!("{old}...{new}"), "--"])?;
        let counted = said.split_once('\t').and_then(|(behind, ahead)| {
            Some(Self { behind: behind.parse().ok()?, ahead: ahead.parse().ok()? })
        });
        counted.ok_or_else(|| GitError::Answer("rev-list").into())
    }
}

/// Returns the commit that a branch at `start` would move to, and its distance from `start` if it is known.
fn replay(
    request: &LandRequest<'_>,
    git: &Git,
    start: &str,
) -> Result<(String, Option<CommitDistance>), WorkspaceError> {
    let (workspace, saved) = (request.workspace, request.saved);
    let commits = match &request.what {
        LandSelection::Squash { message } => {
            return squash(request, git, start, message.as_deref()).map(|to| (to, None));
        }
        LandSelection::Pick(picked) => {
            picked.iter().map(|name| picked_commit(request, git, name)).collect::<Result<Vec<_>, _>>()?
        }
        what => {
            let tip = if *what == LandSelection::All { &saved.wip } else { &saved.head };
            let between = CommitDistance::of(git, start, tip)?;
            if between.behind == 0 {
                return Ok((tip.clone(), Some(between)));
            }
            let merges = git.line([
                "rev-list",
                "--count",
                "--merges",
                &format!("{}..{tip}", workspace.commit),
                "--not",
                start,
            ])?;
            if merges != "0" {
                return Err(WorkspaceError::Conflict("the Body's history has merge commits, which cannot be cherry-picked: land with --squash, or on a new branch".into()));
            }
            let said = git.line([
                "rev-list",
                "--reverse",
                "--topo-order",
                "--no-merges",
                &format!("{}..{tip}", workspace.commit),
                "--not",
                start,
            ])?;
            said.lines().map(str::to_owned).collect()
        }
    };
    if commits.len() > COMMITS_MAX {
        return Err(WorkspaceError::Hostile(format!(
            "the Body has more than {COMMITS_MAX} commits, too many to cherry-pick: land with --squash, or on a new branch"
        )));
    }
    let mut at = start.to_owned();
    for commit in commits {
        at = cherry_pick(request, git, &at, &commit)?;
    }
    Ok((at, None))
}

/// Resolves a commit id, or its beginning, among the Body's own commits.
fn picked_commit(request: &LandRequest<'_>, git: &Git, name: &str) -> Result<String, WorkspaceError> {
    let unknown =
        || WorkspaceError::NotFound(format!("the Body has no commit {:?}", proto::text::visible(name)));
    let (base, saved) = (&request.workspace.commit, request.saved);
    let tips = saved.branches.values().chain([&saved.wip, &saved.head]);
    let args =
        ["rev-list".to_owned()].into_iter().chain(tips.cloned()).chain(["--not".to_owned(), base.clone()]);
    let own = git.line(args)?;
    let mut found = own.lines().filter(|id| name.len() >= 4 && id.starts_with(name));
    match (found.next(), found.next()) {
        (Some(id), None) => Ok(id.to_owned()),
        _ => Err(unknown()),
    }
}

/// Cherry-picks a commit onto `at`; keeps its author and makes the user its committer.
fn cherry_pick(
    request: &LandRequest<'_>,
    git: &Git,
    at: &str,
    commit: &str,
) -> Result<String, WorkspaceError> {
    let parent = git.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^1")])?;
    if parent == at {
        return Ok(commit.to_owned());
    }
    let tree = merge(git, &parent, at, commit)?;
    if tree == git.line(["rev-parse", &format!("{at}^{{tree}}")])? {
        // The branch has this change already.
        return Ok(at.to_owned());
    }
    let said = git.run([
        "log",
        "-1",
        "--no-show-signature",
        "--format=%an%x00%ae%x00%ad%x00%B",
        "--date=raw",
        commit,
        "--",
    ])?;
    let text = String::from_utf8_lossy(&said).into_owned();
    let mut fields = text.splitn(4, '\0');
    let mut next = || fields.next().unwrap_or_default().to_owned();
    let author = git
        .clone()
        .env("GIT_AUTHOR_NAME", next())
        .env("GIT_AUTHOR_EMAIL", next())
        .env("GIT_AUTHOR_DATE", format!("@{}", next()));
    commit_tree(request, &author, &tree, at, &next())
}

fn squash(
    request: &LandRequest<'_>,
    git: &Git,
    start: &str,
    message: Option<&str>,
) -> Result<String, WorkspaceError> {
    let (workspace, saved) = (request.workspace, request.saved);
    let tree = merge(git, &workspace.base, start, &saved.wip)?;
    if tree == git.line(["rev-parse", &format!("{start}^{{tree}}")])? {
        return Ok(start.to_owned());
    }
    let written = || -> Result<String, WorkspaceError> {
        let commits = review::log(git, &workspace.commit, &saved.head)?;
        let subjects: String = commits
            .iter()
            .rev()
            .map(|commit| format!("- {}\n", proto::text::visible(&commit.subject)))
            .collect();
        Ok(format!("work of Body {}\n\n{subjects}", request.body))
    };
    let message = message.map_or_else(written, |message| Ok(message.to_owned()))?;
    commit_tree(request, git, &tree, start, &message)
}

/// Merges two commits and returns the tree, or the error that lists the conflicts.
pub(crate) fn merge(git: &Git, base: &str, ours: &str, theirs: &str) -> Result<String, WorkspaceError> {
    let base = format!("--merge-base={base}");
    match git.run(["merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", &base, ours, theirs]) {
        Ok(said) => Ok(first(&said)),
        Err(GitError::Failed { code: Some(1), .. }) => Err(WorkspaceError::Conflict(format!(
            "it conflicts in {}",
            conflicts(git, &base, ours, theirs).join(", ")
        ))),
        Err(error) => Err(error.into()),
    }
}

fn first(said: &[u8]) -> String {
    said.split(|byte| *byte == 0)
        .next()
        .map(|id| String::from_utf8_lossy(id).trim_end().to_owned())
        .unwrap_or_default()
}

/// Lists the files that conflict; git prints them and exits with status 1.
pub(crate) fn conflicts(git: &Git, base: &str, ours: &str, theirs: &str) -> Vec<String> {
    let mut command =
        git.command(["merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", base, ours, theirs]);
    let Ok(output) = command.stdin(std::process::Stdio::null()).output() else { return Vec::new() };
    output
        .stdout
        .split(|byte| *byte == 0)
        .skip(1)
        .filter(|name| !name.is_empty())
        .map(proto::text::visible_bytes)
        .collect()
}

/// Files that conflict if both commits land, in either order.
pub fn conflicting(git: &Git, one: &str, other: &str) -> Vec<String> {
    let Ok(base) = git.line(["merge-base", one, other]) else { return Vec::new() };
    match merge(git, &base, one, other) {
        Ok(_) => Vec::new(),
        Err(_) => conflicts(git, &format!("--merge-base={base}"), one, other),
    }
}

fn commit_tree(
    request: &LandRequest<'_>,
    git: &Git,
    tree: &str,
    parent: &str,
    message: &str,
) -> Result<String, WorkspaceError> {
    let user = Git::at(&request.workspace.repository).identity(request.person);
    let signs =
        user.line(["config", "--type=bool", "--get", "commit.gpgsign"]).is_ok_and(|said| said == "true");
    let mut args = vec!["commit-tree", tree, "-p", parent];
    if signs {
        args.push("-S");
    }
    let said = git.feed(args, message.as_bytes().to_vec())?;
    Ok(String::from_utf8_lossy(&said).trim_end().to_owned())
}

/// Moves a branch forward, and updates the files of the work tree that has it checked out.
fn advance(
    request: &LandRequest<'_>,
    git: &Git,
    branch: &str,
    found: Option<UserBranch>,
    new: &str,
) -> Result<(), WorkspaceError> {
    let Some(UserBranch { id: old, place: Some(place) }) = &found else {
        return move_branch(request, git, branch, found.as_ref().map(|found| found.id.as_str()), new);
    };
    let Some((dir, files)) = place_of(place, branch, request.person)? else {
        return move_branch(request, git, branch, Some(old), new);
    };
    let there = Git::at(&dir).files(&files).identity(request.person).durable();
    let _ = there.run(["update-index", "-q", "--refresh"]);
    there.run(["read-tree", "-m", "-u", old, new]).map_err(|error| match error {
        GitError::Failed { said, .. } => WorkspaceError::Conflict(format!(
            "branch {branch} is checked out, and git would overwrite uncommitted changes: {said}"
        )),
        error => error.into(),
    })?;
    move_branch(request, git, branch, Some(old), new).inspect_err(|_| {
        // Another process moved the branch meanwhile: restore the files.
        let _ = there.run(["read-tree", "-m", "-u", new, old]);
    })
}

fn move_branch(
    request: &LandRequest<'_>,
    git: &Git,
    branch: &str,
    old: Option<&str>,
    new: &str,
) -> Result<(), WorkspaceError> {
    let message = format!("pal land {}", request.body);
    let nothing = "0".repeat(40);
    git.clone().durable().run([
        "update-ref",
        "-m",
        &message,
        "--create-reflog",
        &format!("refs/heads/{branch}"),
        new,
        old.unwrap_or(&nothing),
    ])?;
    Ok(())
}

/// A branch of the user's repository.
struct UserBranch {
    id: String,
    /// The work tree that has it checked out.
    place: Option<PathBuf>,
}

fn look_for(git: &Git, branch: &str) -> Result<Option<UserBranch>, WorkspaceError> {
    let name = format!("refs/heads/{branch}");
    let said =
        git.run(["for-each-ref", "--format=%(refname)%00%(objectname)%00%(worktreepath)%00", &name])?;
    let fields: Vec<&[u8]> = said.split(|byte| *byte == 0).collect();
    // The pattern also matches branches below this name.
    let found = fields.chunks_exact(3).find(|fields| fields[0].trim_ascii_start() == name.as_bytes());
    Ok(found.map(|fields| UserBranch {
        id: String::from_utf8_lossy(fields[1]).into_owned(),
        place: Some(fields[2])
            .filter(|path| !path.is_empty())
            .map(|path| <OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path).into()),
    }))
}

/// Returns the git directory and the files of the work tree at `place`; none for a bare repository, which git
/// lists as a work tree, too. For a submodule, and for a repository with a separate git directory, git lists
/// the git directory itself as the work tree: that is an error, because files written there would become
/// hooks and settings.
fn place_of(
    place: &Path,
    branch: &str,
    person: &GitIdentity,
) -> Result<Option<(PathBuf, PathBuf)>, WorkspaceError> {
    let untold = || {
        WorkspaceError::Conflict(format!(
            "branch {branch} is checked out in a work tree whose path git does not report: land on a new branch"
        ))
    };
    let ask = |what: &str| -> Option<PathBuf> {
        let said = crate::git::run_in_directory(place, person, ["rev-parse", what]).ok()?;
        let path = said.strip_suffix(b"\n").unwrap_or(&said);
        std::fs::canonicalize(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path)).ok()
    };
    let Some((dir, files)) = ask("--absolute-git-dir").zip(ask("--show-toplevel")) else {
        let bare = crate::git::run_in_directory(place, person, ["rev-parse", "--is-bare-repository"])
            .is_ok_and(|said| said == b"true\n");
        return if bare { Ok(None) } else { Err(untold()) };
    };
    if files.starts_with(&dir) {
        return Err(untold());
    }
    Ok(Some((dir, files)))
}
