//! Lands a Body's work: makes commits on a branch of the user's repository, with the user as committer.
//! [`crate::replay`] makes the commits; this module checks the work, and moves the branch.
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
    GitIdentity, Quarantine, SaveResult, SavedModule, SkippedPath,
    error::WorkspaceError,
    git::{Git, GitError},
    land_base,
    left_out::{self, LeftOut},
    partial_clone, publish, refs,
    replay::{self, Replay},
    review,
};

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
    /// Every commit, and one more with this message for uncommitted work.
    AllWithMessage(String),
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
    /// Why the Body's commits landed as one commit; none if they did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combined: Option<&'static str>,
    /// Paths that are not in the landed work, because git cannot hold them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedPath>,
    /// Other work of the Body that did not land.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// The data of the event `workspace.landed`.
impl From<&LandResult> for LandedWork {
    fn from(landed: &LandResult) -> Self {
        let LandResult { branch, from, to, commits, auto_executed, submodules, .. } = landed.clone();
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
    LandPlan::make(request)?.carry_out(request)
}

/// A landing whose commits are made, and whose branch has not moved yet.
#[derive(Debug)]
pub struct LandPlan {
    /// The branch; none if it does not exist.
    found: Option<UserBranch>,
    replay: Replay,
    /// The result, once the branch has moved.
    result: LandResult,
}

impl LandPlan {
    /// Makes the commits of a landing, after git's fsck has checked the work.
    pub fn make(request: &LandRequest<'_>) -> Result<Self, WorkspaceError> {
        let git = request.git();
        let branch = request.branch();
        if !refs::is_branch(branch) {
            return Err(WorkspaceError::Repository(format!(
                "{:?} is not a valid branch name",
                proto::text::visible(branch)
            )));
        }
        // The commits are made while git's fsck checks the objects.
        let (sound, planned) = std::thread::scope(|scope| {
            let sound = scope.spawn(|| check(request));
            let planned = Self::replay(request, &git);
            (sound.join(), planned)
        });
        let Ok(sound) = sound else { return Err(GitError::Answer("index-pack").into()) };
        // A branch that does not exist is reported first; then what git's fsck refuses.
        match planned {
            Err(error @ WorkspaceError::NotFound(_)) => Err(error),
            planned => sound.and(planned),
        }
    }

    fn replay(request: &LandRequest<'_>, git: &Git) -> Result<Self, WorkspaceError> {
        let branch = request.branch();
        let found = look_for(git, branch)?;
        let start = match (&request.how, &found) {
            (LandTarget::Onto(_), None) => {
                return Err(refs::missing_branch(git, branch));
            }
            (_, Some(found)) => found.id.clone(),
            (LandTarget::Branch(_), None) => request.saved.origin.clone(),
        };
        partial_clone::fetch_commit(&request.workspace.repository, &start, request.person)?;
        let replay = replay::replay(request, git, &start)?;
        let auto_executed = if replay.commits == 0 {
            Vec::new()
        } else {
            let names = review::names(git, &start, &replay.to)?;
            names.into_iter().filter(|path| review::is_auto_executed(path)).collect()
        };
        let result = LandResult {
            branch: branch.to_owned(),
            from: found.as_ref().map(|found| found.id.clone()),
            to: replay.to.clone(),
            commits: replay.commits,
            auto_executed,
            submodules: request.saved.submodules.clone(),
            combined: replay.combined,
            skipped: request.saved.skipped.clone(),
            left_out: left_out::of_landing(git, request)?,
        };
        Ok(Self { found, replay, result })
    }

    /// The commit that the branch will move to; none if there is nothing to land.
    pub fn commit(&self) -> Option<&str> {
        (self.replay.commits > 0).then_some(&self.replay.to)
    }

    /// Moves the branch.
    pub fn carry_out(self, request: &LandRequest<'_>) -> Result<LandResult, WorkspaceError> {
        if self.replay.commits == 0 {
            return Ok(self.result);
        }
        let git = request.git();
        let record = match &self.replay.state {
            Some(tree) => {
                Some(land_base::make_landing(&git, request.body, tree, &self.replay.to, &request.saved.head)?)
            }
            None => None,
        };
        let update = BranchUpdate {
            git,
            branch: request.branch(),
            old: self.found.as_ref().map(|found| found.id.as_str()),
            new: &self.replay.to,
            record,
        };
        update.advance(request, self.found.as_ref().and_then(|found| found.place.as_deref()))?;
        Ok(self.result)
    }
}

impl LandRequest<'_> {
    fn git(&self) -> Git {
        Git::at(&self.workspace.repository).identity(self.person).deadline(Instant::now() + self.time_max)
    }

    fn branch(&self) -> &str {
        match &self.how {
            LandTarget::Branch(name) | LandTarget::Onto(name) => name,
        }
    }
}

/// Checks everything that would land with all of git's fsck rules. A save skips the rules about file
/// contents, and the Body may have committed such files.
fn check(request: &LandRequest<'_>) -> Result<(), WorkspaceError> {
    let (workspace, saved) = (request.workspace, request.saved);
    let tips: Vec<&str> = match request.what {
        LandSelection::All | LandSelection::AllWithMessage(_) | LandSelection::Squash { .. } => {
            vec![&saved.wip]
        }
        LandSelection::Committed => vec![&saved.head],
        LandSelection::Pick(_) => {
            saved.branches.values().chain([&saved.head, &saved.wip]).map(String::as_str).collect()
        }
    };
    let view =
        Quarantine::open(request.dir, &workspace.name, &workspace.repository, request.time_max)?.view()?;
    let old = [workspace.commit.as_str(), &workspace.base, &saved.origin];
    publish::check(&view, &tips, &old).map_err(|error| match error {
        WorkspaceError::Git(GitError::Failed { said, .. }) => {
            let committed = saved.head != saved.origin
                && !matches!(request.what, LandSelection::Committed | LandSelection::Pick(_))
                && publish::check(&view, &[&saved.head], &old).is_ok();
            WorkspaceError::Unsound { why: format!("git's fsck refuses it: {said}"), committed }
        }
        error => error,
    })
}

/// Merges two commits and returns the tree, or the error that lists the conflicts.
pub(crate) fn merge(git: &Git, base: &str, ours: &str, theirs: &str) -> Result<String, WorkspaceError> {
    let base = format!("--merge-base={base}");
    match git.run(["merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", &base, ours, theirs]) {
        Ok(said) => Ok(first_field(&said)),
        Err(GitError::Failed { code: Some(1), .. }) => Err(WorkspaceError::Conflict(format!(
            "it conflicts in {}",
            conflicts(git, &base, ours, theirs).join(", ")
        ))),
        Err(error) => Err(error.into()),
    }
}

/// The first field of git's output with `-z`.
pub(crate) fn first_field(said: &[u8]) -> String {
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

/// Files that conflict if the work of both Bodies lands, in either order. A Body may have rewritten its history, so
/// only the commits count that the two began with.
pub fn conflicting(git: &Git, one: &SaveResult, other: &SaveResult) -> Vec<String> {
    let Ok(base) = git.line(["merge-base", &one.base, &other.base]) else { return Vec::new() };
    match merge(git, &base, &one.wip, &other.wip) {
        Ok(_) => Vec::new(),
        Err(_) => conflicts(git, &format!("--merge-base={base}"), &one.wip, &other.wip),
    }
}

/// A branch that is about to move.
struct BranchUpdate<'a> {
    git: Git,
    branch: &'a str,
    /// Its commit now; none if it does not exist.
    old: Option<&'a str>,
    new: &'a str,
    /// The ref and the commit that record the landing.
    record: Option<(String, String)>,
}

impl BranchUpdate<'_> {
    /// Moves the branch forward, and updates the files of the work tree that has it checked out.
    fn advance(&self, request: &LandRequest<'_>, place: Option<&Path>) -> Result<(), WorkspaceError> {
        let place = place.map(|place| place_of(place, self.branch, request.person)).transpose()?.flatten();
        let (Some((dir, files)), Some(old)) = (place, self.old) else { return self.move_branch(request) };
        let there = Git::at(&dir).files(&files).identity(request.person).durable();
        let _ = there.run(["update-index", "-q", "--refresh"]);
        there.run(["read-tree", "-m", "-u", old, self.new]).map_err(|error| match error {
            GitError::Failed { said, .. } => WorkspaceError::Conflict(format!(
                "branch {} is checked out, and git would overwrite uncommitted changes: {said}",
                self.branch
            )),
            error => error.into(),
        })?;
        self.move_branch(request).inspect_err(|_| {
            // Another process moved the branch meanwhile: restore the files.
            let _ = there.run(["read-tree", "-m", "-u", self.new, old]);
        })
    }

    /// Moves the branch and sets the record in one transaction.
    fn move_branch(&self, request: &LandRequest<'_>) -> Result<(), WorkspaceError> {
        let name = format!("refs/heads/{}", self.branch);
        let mut lines = match self.old {
            Some(old) => format!("update {name}\0{}\0{old}\0", self.new),
            None => format!("create {name}\0{}\0", self.new),
        };
        if let Some((record, commit)) = &self.record {
            lines.push_str(&format!("update {record}\0{commit}\0\0"));
        }
        let message = format!("pal land {}", request.body);
        let args = ["update-ref", "-m", &message, "--create-reflog", "--stdin", "-z"];
        self.git.clone().durable().feed(args, lines.into_bytes()).map_err(|error| {
            let moved = look_for(&self.git, self.branch)
                .is_ok_and(|now| now.as_ref().map(|now| now.id.as_str()) != self.old);
            if moved {
                WorkspaceError::Conflict(format!("branch {} moved meanwhile: try again", self.branch))
            } else {
                error.into()
            }
        })?;
        Ok(())
    }
}

/// A name for a branch of a Body's work that no branch of the repository has.
pub fn free_branch(git: &Git, body: &str) -> String {
    let is_free = |name: &String| {
        // Neither the branch itself, nor one below its name.
        git.line(["for-each-ref", "--count=1", &format!("refs/heads/{name}")])
            .is_ok_and(|found| found.is_empty())
    };
    let names = (2..100).map(|number| format!("pal/{body}-{number}"));
    let first = format!("pal/{body}");
    [first.clone()].into_iter().chain(names).find(is_free).unwrap_or(first)
}

/// A branch of the user's repository.
#[derive(Debug)]
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
