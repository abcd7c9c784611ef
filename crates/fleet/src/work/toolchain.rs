//! The tools of a Body: compared with the versions that a repository states before any step runs, and brought from a
//! registry where one carries them.
//!
//! Invariant: a tool is installed in a Body without a workspace, so no code of a repository runs while the registry of
//! the tool can be reached. Its files are a layer that all repositories share.

use proto::{BodyId, Failure, Kind, event::hex, spec::BodyRole};
use sha2::{Digest, Sha256};
use workspace::{Needs, ToolRequirement};

use super::{
    Progress, ProgressLine,
    prepare::{Preparation, find_dependencies},
    steps::{self, PlannedStep, StepRunner},
    unfinished::UnfinishedBody,
};
use crate::{Create, ExecRequest, OutputChunk, snapshots::DependencyLayer};

/// Longest answer to a probe.
const ANSWER_LEN_MAX: usize = 4 << 10;

/// A tool that is missing in a Body, or of another version than the repository states.
#[derive(Debug, Clone)]
pub(crate) struct ToolGap {
    pub requirement: ToolRequirement,
    /// The gap in one line.
    pub text: String,
    /// Whether the Body has no version at all.
    pub is_missing: bool,
}

impl ToolGap {
    /// Whether a step needs this tool.
    pub fn concerns(&self, planned: &PlannedStep<'_>) -> bool {
        planned.step.tool == Some(self.requirement.tool)
    }

    /// The failure of a step that cannot run without the tool.
    pub fn failure(&self) -> Failure {
        Failure::new(Kind::Host, self.text.clone())
            .hint(format!("Bodies of template host use this host's own programs: {}", self.requirement.hint))
            .hint("or choose a template that has it: pal up --template NAME")
    }

    /// Tells the user about the gap, and which steps do not run for it.
    pub fn report(&self, steps: &[PlannedStep<'_>], say: Progress<'_>) {
        let concerned = steps.iter().filter(|planned| self.is_missing && self.concerns(planned));
        let titles: Vec<String> = concerned.map(|planned| planned.step.title()).collect();
        let without = match titles.is_empty() {
            true => String::new(),
            false => format!("; not run: {}", titles.join(", ")),
        };
        say(ProgressLine::Note(&format!("{}{without}\n  hint: {}", self.text, self.requirement.hint)));
    }
}

impl StepRunner<'_> {
    /// Compares the tools in a Body with the requirements of its steps.
    pub(super) async fn find_gaps(
        &self,
        body: &BodyId,
        needs: &[&Needs],
        planned: &[PlannedStep<'_>],
    ) -> Result<Vec<ToolGap>, Failure> {
        let mut gaps: Vec<ToolGap> = Vec::new();
        for requirement in needs.iter().flat_map(|needs| &needs.requirements) {
            let used = planned.iter().any(|planned| planned.step.tool == Some(requirement.tool));
            if !used || gaps.iter().any(|gap| gap.requirement == *requirement) {
                continue;
            }
            let answer = self.probe(body, requirement).await?;
            if !requirement.is_met_by(&answer) {
                gaps.push(ToolGap {
                    requirement: requirement.clone(),
                    text: requirement.describe_gap(&answer),
                    is_missing: answer.trim().is_empty(),
                });
            }
        }
        Ok(gaps)
    }

    /// The version that a tool in the Body prints; empty if it is missing.
    async fn probe(&self, body: &BodyId, requirement: &ToolRequirement) -> Result<String, Failure> {
        let request = ExecRequest { workdir: Some("/".into()), ..steps::shell(requirement.tool.probe) };
        let mut exec = self.fleet.execs().start(body, request).await?;
        let mut answer = Vec::new();
        while let Some(output) = exec.next().await? {
            if let OutputChunk::Stdout(bytes) = output
                && answer.len() < ANSWER_LEN_MAX
            {
                answer.extend_from_slice(&bytes);
            }
        }
        let found = exec.finish().await?.code == 0;
        Ok(if found { String::from_utf8_lossy(&answer).into_owned() } else { String::new() })
    }

    /// Finds or makes the layer that has the tools which close these gaps; none if no registry carries them, or if
    /// their installation fails.
    pub(super) async fn tool_layer(
        &self,
        preparation: &Preparation<'_>,
        gaps: &[ToolGap],
        say: Progress<'_>,
    ) -> Result<Option<String>, Failure> {
        let wanted: Vec<&ToolGap> = gaps.iter().filter(|gap| gap.requirement.install.is_some()).collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let installs = || wanted.iter().filter_map(|gap| gap.requirement.install.as_ref());
        let footing = preparation.footing;
        let lines: Vec<&str> = installs().map(|install| install.line.as_str()).collect();
        let deciding =
            serde_json::json!(["tools", footing.template, footing.state, preparation.layer, lines]);
        let key = hex(&Sha256::digest(deciding.to_string().as_bytes()));
        if let Some(found) = find_dependencies(self.fleet, &key) {
            self.fleet.garbage().touch_snapshot(&found.id);
            return Ok(Some(found.id.to_string()));
        }
        wanted.iter().for_each(|gap| say(ProgressLine::Note(&gap.text)));
        let allow = wanted.iter().flat_map(|gap| gap.requirement.install_allow.clone()).collect();
        let mut egress = self.fleet.egress().open_session(allow)?;
        let create = Create {
            workspaces: Vec::new(),
            template: footing.template.clone(),
            egress: Some(egress.spec.clone()),
            role: BodyRole::Step,
            ..preparation.create()
        };
        let body = UnfinishedBody::create(self.fleet, create).await?;
        for install in installs() {
            say(ProgressLine::Activity(&format!("installing: {}", install.title())));
            let request = ExecRequest { env: egress.env(), ..steps::shell(&install.line) };
            let end = self.run_line(body.id()?, request, Some(&mut egress), say).await?;
            if end.code != 0 {
                let id = body.id()?.clone();
                body.remove().await?;
                say(ProgressLine::Note(&format!(
                    "warning: {} failed with code {}\n  hint: its whole output: pal logs {id}",
                    install.title(),
                    end.code
                )));
                return Ok(None);
            }
        }
        let layer = DependencyLayer { origin: footing.template.clone(), key, missing_steps: Vec::new() };
        let kept = self.fleet.workspaces().keep_layer(body.id()?, &layer, say).await?;
        body.remove().await?;
        Ok(Some(kept))
    }
}
