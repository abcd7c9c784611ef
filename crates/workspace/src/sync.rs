//! Makes the pack by which new commits of the user's branch go into a Body.
//!
//! Invariant: the host's git only reads the user's repository. The Body's own git takes the pack in, inside the Body.

use std::{fs::File, path::PathBuf};

use crate::{
    BodyWorkspace, GitIdentity,
    bare_repo::StageDir,
    error::{ErrorContext, WorkspaceError},
    git::Git,
    land_base::{SYNCED, is_ancestor},
    partial_clone,
    publish::PublishedRefs,
    refs::{self, namespace},
};

/// The commits that a Body lacks, as a pack.
#[derive(Debug)]
pub struct SyncPack {
    /// The branch of the user; empty for work of another Body.
    pub branch: String,
    /// The commit.
    pub commit: String,
    /// How many commits the Body did not get before.
    pub commits: usize,
    /// Whether the branch was rewritten: it does not contain the commit that the Body began with.
    pub rewritten: bool,
    /// The pack.
    pub path: PathBuf,
    /// Whether objects may be missing, because the user's repository is a partial clone.
    pub partial: bool,
    /// Removes the pack on drop.
    _stage: StageDir,
}

/// Packs the commits of a branch that came after the one that a Body began with. An earlier pack may have got lost in
/// the Body, so each pack has all of them.
pub fn make_sync_pack(
    source: &BodyWorkspace,
    branch: &str,
    person: &GitIdentity,
) -> Result<SyncPack, WorkspaceError> {
    let workspace = &source.workspace;
    let git = Git::at(&workspace.repository);
    if !refs::is_branch(branch) {
        let branch = proto::text::visible(branch);
        return Err(WorkspaceError::Repository(format!("{branch:?} is not a valid branch name")));
    }
    let commit = git
        .line(["rev-parse", "--verify", "--quiet", &format!("refs/heads/{branch}^{{commit}}")])
        .map_err(|_| refs::missing_branch(&git, branch))?;
    partial_clone::fetch_commit(&workspace.repository, &commit, person)?;
    let known = PublishedRefs::ask(&git, &namespace(&source.body))?.numbered(SYNCED);
    let had = known.iter().map(String::as_str).chain([workspace.commit.as_str()]);
    let count = git.line(["rev-list", "--count", &commit, "--not"].into_iter().chain(had))?;
    let rewritten = !is_ancestor(&git, &workspace.commit, &commit);
    let (path, partial, stage) = pack_commit(source, &commit)?;
    Ok(SyncPack {
        branch: branch.to_owned(),
        commit,
        commits: count.parse().unwrap_or(0),
        rewritten,
        path,
        partial,
        _stage: stage,
    })
}

/// Packs a commit of another Body's saved work that a Body shall get, with everything since the one that it began with.
pub fn make_commit_pack(source: &BodyWorkspace, commit: &str) -> Result<SyncPack, WorkspaceError> {
    if !refs::is_id(commit) {
        return Err(WorkspaceError::NotFound("the commit to bring over has no valid id".to_owned()));
    }
    let start = &source.workspace.commit;
    let git = Git::at(&source.workspace.repository);
    let count = git.line(["rev-list", "--count", commit, &format!("^{start}")])?;
    let rewritten = !is_ancestor(&git, start, commit);
    let (path, partial, stage) = pack_commit(source, commit)?;
    Ok(SyncPack {
        branch: String::new(),
        commit: commit.to_owned(),
        commits: count.parse().unwrap_or(0),
        rewritten,
        path,
        partial,
        _stage: stage,
    })
}

/// Writes a pack of a commit and everything since the one that a Body began with. Returns whether objects may be missing.
fn pack_commit(source: &BodyWorkspace, commit: &str) -> Result<(PathBuf, bool, StageDir), WorkspaceError> {
    let workspace = &source.workspace;
    let stage = source.quarantine()?.stage()?;
    let path = stage.join("sync.pack");
    let mut args = vec!["pack-objects", "--revs", "--stdout", "--delta-base-offset", "--quiet"];
    let partial = partial_clone::remote(&workspace.repository).is_some();
    if partial {
        args.push("--missing=allow-any");
    }
    let revisions = format!("{commit}\n^{}\n", workspace.commit);
    let git = Git::at(&workspace.repository);
    git.fill(args, revisions.into_bytes(), File::create(&path).during("make a pack")?)?;
    Ok((path, partial, stage))
}
