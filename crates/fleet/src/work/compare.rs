//! Compares the work of several Bodies, and lands it on a branch one Body after the other.

use proto::{BodyId, Failure, Kind, workspace::Workspace};
use serde::Serialize;
use workspace::{
    BodyWorkspace, ChangedFile, Git, GitIdentity, LandResult, LandSelection, LandTarget, SaveResult,
    UncommittedFiles,
};

use super::{
    DevcontainerChoice, Discard, PrepareChoice, ProgressLine, RepoSource, RepositoryNetwork, UpRequest,
    land::SavedLanding,
};
use crate::{BodyView, Create, ExecRequest, Force, NetworkRequest, Workspaces, failures};

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
    /// The last line that a failing test printed, escaped for a terminal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_line: Option<String>,
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
    /// Whether there was nothing to land, because the Body changed nothing or the branch has its work already.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nothing: bool,
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
            let (test, last_line) = match test {
                Some(line) => {
                    let (code, said) = self.test_in(id, line).await?;
                    (Some(code), Some(said).filter(|said| code != 0 && !said.is_empty()))
                }
                None => (None, None),
            };
            bodies.push(BodyComparison { body: id.clone(), files, test, last_line });
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
                    saved,
                    &works[other_index].2,
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

    /// Runs a shell command in a Body; returns its exit code and the last line of its output.
    async fn test_in(&self, id: &BodyId, line: &str) -> Result<(i32, String), Failure> {
        let request = ExecRequest { timeout: Some(TEST_WALL), ..ExecRequest::new(["/bin/sh", "-c", line]) };
        let (code, tail) = self.run_in(id, request, None).await?;
        Ok((code, proto::text::visible(tail.trim().lines().last().unwrap_or_default())))
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
            say(ProgressLine::Note(&format!("{id}: onto {onto}")));
            for Workspace { name, .. } in self.fleet.view(&id)?.spec.workspaces.iter().skip(1) {
                say(ProgressLine::Note(&format!(
                    "{id}: left out: workspace {name}; land it by itself: pal land --workspace {name} {id}"
                )));
            }
            let what = if saved.commit_error.is_some() {
                LandSelection::Squash { message: None }
            } else {
                LandSelection::All
            };
            let how = LandTarget::Onto(onto.to_owned());
            let landing = SavedLanding { id: &id, source: &source, saved: &saved, person, how, what };
            let done = self.land_tested(&landing, test, say).await;
            let result = QueueResult { body: id.clone(), landed: None, why: None, nothing: false };
            queued.push(match done {
                Ok(Some(landed)) => QueueResult { landed: Some(landed), ..result },
                Ok(None) => QueueResult { nothing: true, ..result },
                Err(failure) if failure.kind == Kind::Internal => return Err(failure),
                Err(failure) => QueueResult { why: Some(failure.to_string()), ..result },
            });
        }
        Ok(queued)
    }

    /// Lands one Body's work if its test passes; none if there is nothing to land.
    async fn land_tested(
        &self,
        landing: &SavedLanding<'_>,
        test: Option<&str>,
        say: super::Progress<'_>,
    ) -> Result<Option<LandResult>, Failure> {
        let plan = landing.plan()?;
        let Some(commit) = plan.commit() else { return Ok(None) };
        let up = UpRequest {
            repositories: vec![RepoSource::Path(landing.source.workspace.repository.clone())],
            reference: Some(commit.to_owned()),
            dirty: UncommittedFiles::Without,
            include: Vec::new(),
            prepare: PrepareChoice::Yes,
            devcontainer: DevcontainerChoice::Use,
            person: landing.person.clone(),
            images: |reference| Ok(crate::Image::new(reference)),
            home: None,
            // The tested commit may have another palisade.toml, which no person has seen.
            network: NetworkRequest::default(),
            repository_network: RepositoryNetwork::Ignore,
            create: Create::kept(),
            count: 1,
        };
        let view = self.up_with_progress(up, say).await?.remove(0);
        let judged = self.judge(&view, test).await;
        self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await?;
        judged?;
        landing.carry_out(self, plan).map(Some)
    }

    /// Runs the test, or the project's own one, in a Body.
    async fn judge(&self, view: &BodyView, test: Option<&str>) -> Result<(), Failure> {
        let line = match test {
            Some(line) => Some(line.to_owned()),
            None => self.needs(&view.spec.workspaces[0], None)?.test,
        };
        let Some(line) = line else {
            return Err(Failure::new(Kind::Usage, "the landing queue needs a test, and there is none")
                .hint("name one: --test 'make test', or [test] command in palisade.toml"));
        };
        match self.test_in(view.id(), &line).await? {
            (0, _) => Ok(()),
            (code, said) => Err(Failure::new(
                Kind::Conflict,
                format!("`{}` ended with code {code}: {said}", proto::text::visible(&line)),
            )),
        }
    }
}
