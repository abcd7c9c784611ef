//! Brings the work of a fork back into the Body that it was forked from.
//!
//! Both Bodies' work is saved in the user's repository, and the host combines it there, by commits. The result goes into
//! the Body as a pack or a patch that the Body's own git reads from its standard input.
//!
//! Invariant: the host's git never touches a Body's files.
//! Invariant: a conflict changes no file of the Body: it only gets the commits, under a ref of their own.
//! Invariant: handing over twice is handing over once: the second time there is nothing that the Body lacks.

use bytes::Bytes;
use proto::{BodyId, Failure, Kind};
use serde::{Deserialize, Serialize};
use workspace::{BodyWorkspace, DiffFormat, Git, MergedWork, SaveResult, SyncPack};

use super::{
    Discard,
    sync::{PIECE_LEN, git_in, read_end, take_in},
};
use crate::{ExecRequest, Fleet, Force, Stdin, Workspaces, blocking::run_blocking, failures};

/// The longest patch that goes into a Body.
const PATCH_LEN_MAX: usize = 256 << 20;
/// How many files a result names.
const FILES_MAX: usize = 100;

/// The state of one repository of a Body at some time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkMark {
    /// The workspace.
    pub workspace: String,
    /// The Body's own last commit.
    pub head: String,
    /// The commit that holds every file.
    pub wip: String,
}

/// How the work of a fork came back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HandOverOutcome {
    /// There was none.
    Nothing,
    /// Its commits were merged.
    Merged,
    /// Its changes were put into the files, without commits: the Body has, or had, uncommitted changes itself.
    Applied,
    /// It conflicts, and nothing was changed.
    Conflict,
}

/// The result of handing over one repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HandOver {
    /// The workspace.
    pub workspace: String,
    /// The result.
    pub outcome: HandOverOutcome,
    /// The files that changed, or those that conflict.
    pub files: Vec<String>,
    /// How many more files there are.
    pub files_more: usize,
    /// The ref in the Body that names the commits, if they were brought over.
    pub reference: Option<String>,
    /// Work that stays in the fork, and why.
    pub left_out: Vec<String>,
}

/// The work of forks, on its way back to the Bodies that they were forked from.
#[derive(Debug, Clone, Copy)]
pub struct ForkedWork<'a> {
    fleet: &'a Fleet,
}

impl<'a> ForkedWork<'a> {
    /// The work of the forks of a fleet.
    pub fn of(fleet: &'a Fleet) -> Self {
        Self { fleet }
    }

    /// Notes the state of a Body's repositories, which later work of a fork is compared with.
    pub async fn mark(&self, id: &BodyId) -> Result<Vec<WorkMark>, Failure> {
        if run_blocking(|| self.fleet.view(id))?.spec.workspaces.is_empty() {
            return Ok(Vec::new());
        }
        let mark = |SaveResult { workspace, head, wip, .. }| WorkMark { workspace, head, wip };
        Ok(self.fleet.workspaces().save(id).await?.into_iter().map(mark).collect())
    }

    /// Brings the work of a fork since `mark` into the running Body that it was forked from.
    pub async fn hand_over(
        &self,
        from: &BodyId,
        into: &BodyId,
        mark: &WorkMark,
    ) -> Result<HandOver, Failure> {
        run_blocking(|| self.fleet.running(into))?;
        let workspaces = self.fleet.workspaces();
        let (theirs, _) = workspaces.save_one(from, Some(&mark.workspace)).await?;
        let (ours, source) = workspaces.save_one(into, Some(&mark.workspace)).await?;
        let work = WorkTransfer { workspaces, from, into, mark, theirs, ours, source };
        work.hand_over().await
    }

    /// Removes a fork whose work is in another Body, together with the refs of that work in the user's repository.
    pub async fn remove_fork(&self, id: &BodyId) -> Result<(), Failure> {
        let view = run_blocking(|| self.fleet.view(id))?;
        for workspace in &view.spec.workspaces {
            run_blocking(|| workspace::forget(id, workspace))
                .map_err(|error| failures::workspace("cannot remove the refs of a fork", error))?;
        }
        self.fleet.remove_with(id, Force::Yes, Discard::Yes).await
    }
}

/// The work of a fork, and the Body that gets it.
struct WorkTransfer<'a> {
    workspaces: Workspaces<'a>,
    from: &'a BodyId,
    into: &'a BodyId,
    mark: &'a WorkMark,
    theirs: SaveResult,
    ours: SaveResult,
    source: BodyWorkspace,
}

impl WorkTransfer<'_> {
    fn git(&self) -> Git {
        Git::at(&self.source.workspace.repository)
    }

    /// The ref in the Body for the commits of the fork.
    fn reference(&self) -> String {
        format!("refs/remotes/task/{}", self.from)
    }

    fn cannot(&self) -> impl Fn(workspace::WorkspaceError) -> Failure {
        let what = format!("cannot bring the work of Body {} into Body {}", self.from, self.into);
        move |error| failures::workspace(&what, error)
    }

    async fn hand_over(self) -> Result<HandOver, Failure> {
        let (git, base) = (self.git(), &self.mark.wip);
        let merged = run_blocking(|| workspace::merge_work(&git, base, &self.ours.wip, &self.theirs.wip));
        match merged.map_err(self.cannot())? {
            MergedWork::Same => Ok(self.result(HandOverOutcome::Nothing, Vec::new(), None)),
            MergedWork::Conflicts(files) => {
                self.bring_commits().await?;
                Ok(self.result(HandOverOutcome::Conflict, files, Some(self.reference())))
            }
            MergedWork::Tree(tree) => {
                let files = run_blocking(|| workspace::touched(&git, &self.ours.wip, &tree));
                let files = files.map_err(self.cannot())?.into_iter().map(|file| file.path).collect();
                if self.is_committed() && self.merge_commits().await? {
                    return Ok(self.result(HandOverOutcome::Merged, files, Some(self.reference())));
                }
                self.apply(&tree).await?;
                Ok(self.result(HandOverOutcome::Applied, files, None))
            }
        }
    }

    /// Whether commits tell the whole work: neither Body had uncommitted files at the fork, and the Body has none now.
    fn is_committed(&self) -> bool {
        let is_clean = self.mark.head == self.mark.wip && !self.ours.uncommitted;
        is_clean && self.theirs.commit_error.is_none() && self.ours.commit_error.is_none()
    }

    fn result(
        &self,
        outcome: HandOverOutcome,
        mut files: Vec<String>,
        reference: Option<String>,
    ) -> HandOver {
        let files_more = files.len().saturating_sub(FILES_MAX);
        files.truncate(FILES_MAX);
        let files = files.iter().map(|path| proto::text::visible(path)).collect();
        let skipped = self.theirs.skipped.iter().map(|left| format!("{} ({})", left.path, left.why));
        let modules = self.theirs.submodules.iter().map(|module| format!("submodule {}", module.path));
        let left_out = skipped.chain(modules).take(FILES_MAX).collect();
        let workspace = self.mark.workspace.clone();
        HandOver { workspace, outcome, files, files_more, reference, left_out }
    }

    /// Gives the Body the commits of the fork, under a ref of their own.
    async fn bring_commits(&self) -> Result<SyncPack, Failure> {
        let pack = run_blocking(|| workspace::make_commit_pack(&self.source, &self.theirs.wip));
        let pack = pack.map_err(self.cannot())?;
        take_in(self.workspaces, self.into, &self.source, &pack, &self.reference()).await?;
        Ok(pack)
    }

    /// Merges the commits of the fork in the Body. Returns whether that worked; else the Body is as before.
    async fn merge_commits(&self) -> Result<bool, Failure> {
        self.bring_commits().await?;
        let message = format!("Merge the work of Body {}", self.from);
        let reference = self.reference();
        let merge = git_in(&self.source, &["merge", "--no-edit", "-m", &message, &reference]);
        if self.workspaces.run_in(self.into, merge, None).await?.0 == 0 {
            return Ok(true);
        }
        // Without a merge in progress this fails, and there is nothing to undo.
        self.workspaces.run_in(self.into, git_in(&self.source, &["merge", "--abort"]), None).await?;
        Ok(false)
    }

    /// Changes the files of the Body from their saved state to a tree.
    async fn apply(&self, tree: &str) -> Result<(), Failure> {
        let git = self.git();
        let patch = run_blocking(|| workspace::diff(&git, &self.ours.wip, tree, DiffFormat::Patch, &[]));
        let patch = patch.map_err(self.cannot())?;
        if patch.len() > PATCH_LEN_MAX {
            return Err(Failure::new(
                Kind::Limit,
                format!("the work of Body {} is more than {} MiB", self.from, PATCH_LEN_MAX >> 20),
            )
            .hint(format!("land it by itself: pal land {}", self.from)));
        }
        let request =
            ExecRequest { stdin: Stdin::Open, ..git_in(&self.source, &["apply", "--whitespace=nowarn"]) };
        let exec = self.workspaces.fleet.execs().start(self.into, request).await?;
        let control = exec.control();
        for piece in patch.chunks(PIECE_LEN) {
            // A command that ended reads no more; its exit code says why.
            if control.send(Bytes::copy_from_slice(piece)).await.is_err() {
                break;
            }
        }
        let _ = control.close_stdin().await;
        let (code, said) = read_end(exec).await?;
        if code == 0 {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Conflict,
            format!(
                "git in Body {} did not apply the work of Body {}: code {code}: {}",
                self.into,
                self.from,
                proto::text::visible(said.trim())
            ),
        )
        .hint(format!("land it by itself: pal land {}", self.from)))
    }
}
