//! Brings the work of a finished sub-agent into the Body of its parent, once.

use brain::agent::AgentView;
use fleet::{ForkedWork, HandOver, HandOverOutcome, Status};
use proto::{
    AgentId, BodyId, EventData, Failure, Kind,
    event_data::{MergeOutcome, WorkMerged},
};

use super::Subagents;
use crate::{AgentRecord, AgentSettings, explain, journal::read_chain, subagent_settings::SubagentSettings};

impl Subagents {
    /// Brings the work of a finished sub-agent back. Returns what the parent shall know of that; none if there is no work.
    pub(super) async fn bring_back(
        &self,
        record: &AgentRecord,
        view: &AgentView,
        into: &BodyId,
    ) -> Result<Option<String>, Failure> {
        let child = &record.spec.id;
        let settings = AgentSettings::of(&record.spec).subagent;
        let Some(settings) = settings.filter(|settings| !settings.shares_body) else { return Ok(None) };
        let Some(from) = &view.body else { return Ok(None) };
        let merged = match self.find_merge(child)? {
            Some(merged) => merged,
            None => {
                let merged = self.merge(from, into, &settings).await?;
                self.agents.note(child, [EventData::from(merged.clone())])?;
                merged
            }
        };
        if !is_kept(&merged.outcome) {
            self.remove_fork(from).await?;
        }
        Ok(Some(merged.note).filter(|note| !note.is_empty()))
    }

    /// The merge of a sub-agent's work that an earlier driver recorded.
    fn find_merge(&self, child: &AgentId) -> Result<Option<WorkMerged>, Failure> {
        let events = read_chain(self.agents.fleet(), child, 0)?;
        Ok(events.iter().rev().find_map(|event| event.data_as::<WorkMerged>()))
    }

    async fn merge(
        &self,
        from: &BodyId,
        into: &BodyId,
        settings: &SubagentSettings,
    ) -> Result<WorkMerged, Failure> {
        let fleet = self.agents.fleet();
        let _turn = self.merging.lock().await;
        let mut whole = WorkMerged {
            body: into.clone(),
            outcome: MergeOutcome::Nothing,
            files: Vec::new(),
            reference: None,
            note: String::new(),
        };
        if settings.marks.is_empty() {
            return Ok(whole);
        }
        if fleet.view(from)?.status != Status::Running {
            fleet.start(from).await?;
        }
        for mark in &settings.marks {
            let handed = ForkedWork::of(fleet).hand_over(from, into, mark).await;
            let part = match handed {
                Ok(handed) => describe(&handed, from),
                // The parent reads about everything else; a Body that is busy is worth another attempt.
                Err(failure) => failed(&failure, from),
            };
            add(&mut whole, part);
        }
        Ok(whole)
    }

    /// Removes the Body of a sub-agent whose work is merged, if it is still there.
    async fn remove_fork(&self, body: &BodyId) -> Result<(), Failure> {
        match ForkedWork::of(self.agents.fleet()).remove_fork(body).await {
            Err(failure) if failure.kind == Kind::NotFound => Ok(()),
            done => done,
        }
    }
}

/// Whether a Body stays, because it has work that is nowhere else.
fn is_kept(outcome: &MergeOutcome) -> bool {
    !matches!(outcome, MergeOutcome::Nothing | MergeOutcome::Merged | MergeOutcome::Applied)
}

/// The result for one repository.
struct Part {
    outcome: MergeOutcome,
    files: Vec<String>,
    reference: Option<String>,
    note: String,
}

fn add(whole: &mut WorkMerged, part: Part) {
    let weight = |outcome: &MergeOutcome| match outcome {
        MergeOutcome::Nothing => 0,
        MergeOutcome::Merged => 1,
        MergeOutcome::Applied => 2,
        MergeOutcome::Conflict => 3,
        MergeOutcome::Failed | MergeOutcome::Other(_) => 4,
    };
    if weight(&part.outcome) > weight(&whole.outcome) {
        whole.outcome = part.outcome;
    }
    whole.files.extend(part.files);
    whole.files.truncate(100);
    whole.reference = whole.reference.take().or(part.reference);
    if !part.note.is_empty() {
        let gap = if whole.note.is_empty() { "" } else { "\n" };
        whole.note.push_str(&format!("{gap}{}", part.note));
    }
}

fn describe(handed: &HandOver, from: &BodyId) -> Part {
    let mut files = handed.files.join(", ");
    if handed.files_more > 0 {
        files.push_str(&format!(" and {} more", handed.files_more));
    }
    let name = format!("task/{from}");
    let (mut outcome, mut note) = match handed.outcome {
        HandOverOutcome::Nothing => (MergeOutcome::Nothing, String::new()),
        HandOverOutcome::Merged => (
            MergeOutcome::Merged,
            format!("[The sub-agent's commits are merged into your branch. Changed files: {files}]"),
        ),
        HandOverOutcome::Applied => (
            MergeOutcome::Applied,
            format!(
                "[The sub-agent's changes are in your files, without commits, because you had uncommitted changes. \
                 Changed files: {files}]"
            ),
        ),
        HandOverOutcome::Conflict => (
            MergeOutcome::Conflict,
            format!(
                "[Conflict: you and the sub-agent changed the same lines of {files}. None of your files was changed. Its \
                 commits are in your repository as {name}: commit your changes, run `git merge {name}` and resolve \
                 the conflicts. Its Body {from} is kept.]"
            ),
        ),
    };
    if !handed.left_out.is_empty() {
        outcome = MergeOutcome::Failed;
        let gap = if note.is_empty() { "" } else { "\n" };
        note.push_str(&format!(
            "{gap}[Not brought over: {}. This work is only in Body {from}, which is kept.]",
            handed.left_out.join(", ")
        ));
    }
    Part { outcome, files: handed.files.clone(), reference: handed.reference.clone(), note }
}

fn failed(failure: &Failure, from: &BodyId) -> Part {
    let note = format!(
        "[The sub-agent's work could not be brought over: {}. It is in Body {from}, which is kept.]",
        explain(failure)
    );
    Part { outcome: MergeOutcome::Failed, files: Vec::new(), reference: None, note }
}
