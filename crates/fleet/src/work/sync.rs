//! Brings new commits of the user's branch into a Body, so that its agent can build on them.
//!
//! Invariant: the host's git never touches the Body's files. The commits go in as a pack that the Body's own git reads
//! from its standard input, as the Body's user and without hooks.

use std::{fs::File, io::Read};

use bytes::Bytes;
use proto::{BodyId, Failure, Kind, event_data::WorkspaceSynced};
use serde::Serialize;
use workspace::{BodyWorkspace, Git, GitIdentity, SyncPack};

use super::steps::last_lines;
use crate::{Exec, ExecRequest, OutputChunk, Stdin, Workspaces, blocking::run_blocking, failures};

/// How many bytes at the end of a command's output are kept.
const TAIL_MAX: usize = 2 << 10;
/// Length of one piece of a pack.
pub(super) const PIECE_LEN: usize = 128 << 10;

/// The use that the Body's git makes of the new commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncMode {
    /// It keeps them as a remote branch; no file changes.
    Fetch,
    /// It merges them into the current branch.
    Merge,
    /// It rebases the current branch onto them.
    Rebase,
}

/// The result of a sync.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SyncResult {
    /// The workspace.
    pub workspace: String,
    /// The branch of the user.
    pub branch: String,
    /// Its commit.
    pub commit: String,
    /// How many commits the Body did not get before.
    pub commits: usize,
    /// The ref of that commit in the Body.
    pub reference: String,
}

impl Workspaces<'_> {
    /// Brings the commits of the user's branch into a running Body; by default those of the branch that it began on.
    pub async fn sync(
        &self,
        id: &BodyId,
        name: Option<&str>,
        branch: Option<&str>,
        mode: SyncMode,
        person: &GitIdentity,
    ) -> Result<SyncResult, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let (_, source) = self.workspace_source(id, name)?;
        let branch = branch.or(source.workspace.branch.as_deref()).ok_or_else(|| {
            Failure::new(Kind::Usage, format!("Body {id} began on no branch"))
                .hint(format!("name one: pal sync --branch main {id}"))
        })?;
        let cannot = |error| failures::workspace(&format!("cannot bring {branch} into Body {id}"), error);
        let pack = run_blocking(|| workspace::make_sync_pack(&source, branch, person)).map_err(cannot)?;
        let workspace = source.workspace.name.clone();
        let reference = format!("refs/remotes/host/{branch}");
        let (branch, commit, commits) = (pack.branch.clone(), pack.commit.clone(), pack.commits);
        self.fleet.write(
            id,
            WorkspaceSynced {
                workspace: workspace.clone(),
                branch: branch.clone(),
                commit: commit.clone(),
                reference: reference.clone(),
            },
        )?;
        run_blocking(|| workspace::record_sync(&Git::at(&source.workspace.repository), id, &commit))
            .map_err(|error| failures::workspace("cannot record the commit", error))?;
        take_in(*self, id, &source, &pack, &reference).await?;
        self.combine(id, &source, &pack, &reference, mode).await?;
        Ok(SyncResult { workspace, branch, commit, commits, reference })
    }

    /// Merges or rebases in the Body.
    async fn combine(
        &self,
        id: &BodyId,
        source: &BodyWorkspace,
        pack: &SyncPack,
        reference: &str,
        mode: SyncMode,
    ) -> Result<(), Failure> {
        let (verb, options) = match mode {
            SyncMode::Fetch => return Ok(()),
            SyncMode::Merge => ("merge", vec!["--no-edit", reference]),
            // Commits of the user that the branch no longer has are not put on top of it.
            SyncMode::Rebase if pack.rewritten => {
                ("rebase", vec!["--onto", reference, &source.workspace.commit])
            }
            SyncMode::Rebase => ("rebase", vec![reference]),
        };
        let request = git_in(source, &[&[verb], &options[..]].concat());
        let (code, said) = self.run_in(id, request, None).await?;
        if code == 0 {
            return Ok(());
        }
        let path = source.workspace.path();
        Err(Failure::new(
            Kind::Conflict,
            format!("the commits are in Body {id}, but git {verb} ended with code {code}"),
        )
        // git overwrites its own progress on a terminal.
        .because(last_lines(&said.replace('\r', "\n")))
        .hint(format!("let its agent resolve it, or look: pal exec {id} -- git -C {path} status")))
    }

    /// Runs a command in a Body, with a pack as its standard input; returns its exit code and the end of its output.
    pub(super) async fn run_in(
        &self,
        id: &BodyId,
        request: ExecRequest,
        pack: Option<&SyncPack>,
    ) -> Result<(i32, String), Failure> {
        let exec = self.fleet.execs().start(id, request).await?;
        if let Some(pack) = pack {
            let unreadable = |error: std::io::Error| {
                Failure::new(Kind::Host, "cannot read the pack of the commits").because(error)
            };
            let mut file = File::open(&pack.path).map_err(unreadable)?;
            let control = exec.control();
            let mut piece = vec![0; PIECE_LEN];
            loop {
                let len = run_blocking(|| file.read(&mut piece)).map_err(unreadable)?;
                // A command that ended reads no more; its exit code says why.
                if len == 0 || control.send(Bytes::copy_from_slice(&piece[..len])).await.is_err() {
                    break;
                }
            }
            let _ = control.close_stdin().await;
        }
        read_end(exec).await
    }
}

/// Lets the Body's git read the pack, and set the ref.
pub(super) async fn take_in(
    workspaces: Workspaces<'_>,
    id: &BodyId,
    source: &BodyWorkspace,
    pack: &SyncPack,
    reference: &str,
) -> Result<(), Failure> {
    let mut index = vec!["index-pack", "--stdin"];
    if pack.partial {
        index.push("--promisor");
    }
    let request = ExecRequest { stdin: Stdin::Open, ..git_in(source, &index) };
    for (request, pack) in
        [(request, Some(pack)), (git_in(source, &["update-ref", reference, &pack.commit]), None)]
    {
        let (code, said) = workspaces.run_in(id, request, pack).await?;
        if code != 0 {
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "git in Body {id} did not take the commits: code {code}: {}",
                    proto::text::visible(said.trim())
                ),
            )
            .hint(format!("look at it there: pal exec {id} -- git -C {} status", source.workspace.path())));
        }
    }
    Ok(())
}

/// Reads a command's output to its end; returns its exit code and the end of its output.
pub(super) async fn read_end(mut exec: Exec<'_>) -> Result<(i32, String), Failure> {
    let mut tail: Vec<u8> = Vec::new();
    while let Some(output) = exec.next().await? {
        let (OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes) | OutputChunk::Tty(bytes)) = output;
        tail.extend_from_slice(&bytes);
        let old = tail.len().saturating_sub(TAIL_MAX);
        tail.drain(..old);
    }
    let code = exec.finish().await?.code;
    Ok((code, String::from_utf8_lossy(&tail).into_owned()))
}

/// A git command in the workspace of a Body, without hooks.
pub(super) fn git_in(source: &BodyWorkspace, args: &[&str]) -> ExecRequest {
    let argv = ["git", "-c", "core.hooksPath=/dev/null"].iter().chain(args).copied();
    ExecRequest { workdir: Some(source.workspace.path()), ..ExecRequest::new(argv) }
}
