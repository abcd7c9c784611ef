//! Compares the work of several Bodies, and lands it on a branch one Body after the other.

use proto::{BodyId, Failure, Kind};
use serde::Serialize;
use workspace::{
    BodyWorkspace, ChangedFile, Git, GitIdentity, LandResult, LandSelection, LandTarget, SaveResult,
    UncommittedFiles,
};

use super::{Discard, PrepareChoice, RepoSource, UpRequest};
use crate::{Create, ExecRequest, Force, Workspaces, failures};

/// How many bytes at the end of a test's output are reported.
const TAIL_MAX: usize = 2 << 10;
/// Longest run time of a test.
const TEST_WALL: std::time::Duration = std::time::Duration::from_secs(3600);

/// The work of one Body in a comparison.
#[derive(Debug, Clone, Serialize)]
pub struct BodyComparison {
    /// The Body.
    pub body: BodyId,
    /// The files that it changed.
    pub files: Vec<ChangedFile>,
    /// The exit code of its test, if one ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<i32>,
}

/// Files that two Bodies both changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// The first Body.
    pub one: BodyId,
    /// The second Body.
    pub other: BodyId,
    /// The files that both changed.
    pub files: Vec<String>,
    /// The files that conflict, whichever of the two lands first.
    pub conflicts: Vec<String>,
}

/// The comparison of several Bodies.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The work of each Body.
    pub bodies: Vec<BodyComparison>,
    /// Each pair of Bodies that changed the same file.
    pub overlaps: Vec<Overlap>,
}

/// The result of one Body in a landing queue.
#[derive(Debug, Clone, Serialize)]
pub struct QueueResult {
    /// The Body.
    pub body: BodyId,
    /// The result of the landing, if its work landed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub landed: Option<LandResult>,
    /// The reason why its work did not land.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Workspaces<'_> {
    /// Compares the work of several Bodies of one repository.
    pub async fn compare(&self, ids: &[BodyId], test: Option<&str>) -> Result<Comparison, Failure> {
        let works = self.saved_works(ids).await?;
        let cannot = |error| failures::workspace("cannot compare the Bodies", error);
        let mut bodies = Vec::new();
        for (id, source, saved) in &works {
            let git = Git::at(&source.workspace.repository);
            let files = workspace::touched(&git, &saved.base, &saved.wip).map_err(cannot)?;
            let test = match test {
                Some(line) => Some(self.test_in(id, line).await?.0),
                None => None,
            };
            bodies.push(BodyComparison { body: id.clone(), files, test });
        }
        let mut overlaps = Vec::new();
        for (index, one) in bodies.iter().enumerate() {
            for (other_index, other) in bodies.iter().enumerate().skip(index + 1) {
                let files: Vec<String> = one
                    .files
                    .iter()
                    .filter(|file| other.files.iter().any(|theirs| theirs.path == file.path))
                    .map(|file| file.path.clone())
                    .collect();
                if files.is_empty() {
                    continue;
                }
                let (_, source, saved) = &works[index];
                let conflicts = workspace::conflicting(
                    &Git::at(&source.workspace.repository),
                    &saved.wip,
                    &works[other_index].2.wip,
                );
                overlaps.push(Overlap { one: one.body.clone(), other: other.body.clone(), files, conflicts });
            }
        }
        Ok(Comparison { bodies, overlaps })
    }

    async fn saved_works(&self, ids: &[BodyId]) -> Result<Vec<(BodyId, BodyWorkspace, SaveResult)>, Failure> {
        let mut works: Vec<(BodyId, BodyWorkspace, SaveResult)> = Vec::new();
        for id in ids {
            let (saved, source) = self.save_one(id, None).await?;
            if let Some((first, other, _)) = works.first()
                && other.workspace.repository != source.workspace.repository
            {
                return Err(Failure::new(
                    Kind::Usage,
                    format!("Bodies {first} and {id} work on different repositories"),
                ));
            }
            works.push((id.clone(), source, saved));
        }
        Ok(works)
    }

    /// Runs a shell command in a Body; returns its exit code and the end of its output.
    async fn test_in(&self, id: &BodyId, line: &str) -> Result<(i32, String), Failure> {
        let mut exec = self
            .fleet
            .execs()
            .start(id, ExecRequest { timeout: Some(TEST_WALL), ..ExecRequest::new(["/bin/sh", "-c", line]) })
            .await?;
        let mut tail: Vec<u8> = Vec::new();
        while let Some(output) = exec.next().await? {
            let (crate::OutputChunk::Stdout(bytes)
            | crate::OutputChunk::Stderr(bytes)
            | crate::OutputChunk::Tty(bytes)) = output;
            tail.extend_from_slice(&bytes);
            let old = tail.len().saturating_sub(TAIL_MAX);
            tail.drain(..old);
        }
        let code = exec.finish().await?.code;
        Ok((
            code,
            proto::text::visible(String::from_utf8_lossy(&tail).trim().lines().last().unwrap_or_default()),
        ))
    }

    /// Lands Bodies one after the other on a branch. Each is put on top of the work that landed before and tested in a
    /// fresh Body; it lands only if the test passes.
    pub async fn land_queue(
        &self,
        ids: &[BodyId],
        onto: &str,
        test: Option<&str>,
        person: &GitIdentity,
        say: super::Progress<'_>,
    ) -> Result<Vec<QueueResult>, Failure> {
        let works = self.saved_works(ids).await?;
        let mut queued = Vec::new();
        for (id, source, saved) in works {
            say(&format!("{id}: onto {onto}"));
            let done = self.land_tested(&id, &source, &saved, onto, test, person, say).await;
            queued.push(match done {
                Ok(landed) => QueueResult { body: id, landed: Some(landed), why: None },
                Err(failure) if failure.kind == Kind::Internal => return Err(failure),
                Err(failure) => QueueResult { body: id, landed: None, why: Some(failure.to_string()) },
            });
        }
        Ok(queued)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one queue entry: the work, the branch, the test, the identity, the progress"
    )]
    async fn land_tested(
        &self,
        id: &BodyId,
        source: &BodyWorkspace,
        saved: &SaveResult,
        onto: &str,
        test: Option<&str>,
        person: &GitIdentity,
        say: super::Progress<'_>,
    ) -> Result<LandResult, Failure> {
        let repository = &source.workspace.repository;
        let git = Git::at(repository);
        let cannot = |error: workspace::GitError| {
            failures::workspace("cannot create the trial branch of the landing", error.into())
        };
        let trial = format!("pal/queue/{id}");
        let before = git
            .line(["rev-parse", "--verify", "--quiet", &format!("refs/heads/{onto}")])
            .map_err(|_| Failure::new(Kind::NotFound, format!("there is no branch {onto}")))?;
        git.run(["update-ref", &format!("refs/heads/{trial}"), &before]).map_err(cannot)?;
        let tried = async {
            let what = if saved.commit_error.is_some() {
                LandSelection::Squash { message: None }
            } else {
                LandSelection::All
            };
            self.land_saved(id, source, saved, LandTarget::Onto(trial.clone()), what.clone(), person)?;
            let up = UpRequest {
                repositories: vec![RepoSource::Path(repository.clone())],
                reference: Some(trial.clone()),
                dirty: UncommittedFiles::Without,
                include: Vec::new(),
                prepare: PrepareChoice::Yes,
                person: person.clone(),
                images: |reference| Ok(crate::Image::new(reference)),
                home: None,
                create: Create::kept(),
                count: 1,
            };
            let view = self.up_with_progress(up, say).await?.remove(0);
            let line = match test {
                Some(line) => Some(line.to_owned()),
                None => self.needs(&view.spec.workspaces[0])?.test,
            };
            let judged = match &line {
                Some(line) => self.test_in(view.id(), line).await,
                None => Err(Failure::new(Kind::Usage, "the landing queue needs a test, and there is none")
                    .hint("name one: --test 'make test', or [test] command in palisade.toml")),
            };
            self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await?;
            match (judged?, line.unwrap_or_default()) {
                ((0, _), _) => {}
                ((code, said), line) => {
                    return Err(Failure::new(
                        Kind::Conflict,
                        format!("`{}` ended with code {code}: {said}", proto::text::visible(&line)),
                    ));
                }
            }
            let now = git
                .line(["rev-parse", "--verify", "--quiet", &format!("refs/heads/{onto}")])
                .map_err(cannot)?;
            if now != before {
                return Err(
                    Failure::new(Kind::Conflict, format!("branch {onto} moved meanwhile")).hint("try again")
                );
            }
            self.land_saved(id, source, saved, LandTarget::Onto(onto.to_owned()), what, person)
        };
        let tried = tried.await;
        let _ = git.run(["update-ref", "-d", &format!("refs/heads/{trial}")]);
        tried
    }
}
