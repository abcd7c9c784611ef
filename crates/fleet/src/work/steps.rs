//! Runs prepare steps in a Body, and explains those that fail.

use std::{collections::BTreeMap, time::Duration};

use proto::{BodyId, Failure, Kind, egress::is_unreachable, event_data::MissingStep, workspace::Workspace};
use workspace::{NeedsStep, StepWeight};

use super::{
    Progress, ProgressLine,
    reason::{telling_line, without_colours},
    toolchain::ToolGap,
};
use crate::{
    ExecRequest, Fleet, OutputChunk,
    blocking::run_blocking,
    egress::{EgressDenial, EgressSession},
};

/// Longest run time of one step.
pub(super) const STEP_WALL: Duration = Duration::from_secs(1800);
/// How many bytes at the end of a step's output are kept.
const TAIL_MAX: usize = 4 << 10;
/// How many lines at the end of a failed step's output are shown.
const TAIL_LINES: usize = 20;
/// How often the decisions of the egress proxy are imported while a step runs, so that their events have its time.
const IMPORT_EVERY: Duration = Duration::from_secs(1);

/// A step, and the workspace that it prepares.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedStep<'a> {
    pub workspace: &'a Workspace,
    pub step: &'a NeedsStep,
}

impl PlannedStep<'_> {
    /// The directory in the Body in which the step runs.
    fn place(&self) -> String {
        match self.step.dir.as_str() {
            "" => self.workspace.path(),
            dir => format!("{}/{dir}", self.workspace.path()),
        }
    }

    fn is_required(&self) -> bool {
        self.step.weight == StepWeight::Required
    }

    /// Whether a record of a missing step means this step.
    pub fn matches(&self, missing: &MissingStep) -> bool {
        missing.workspace == self.workspace.name
            && missing.dir == self.step.dir
            && missing.name == self.step.name
    }

    /// The record of this step as missing.
    pub fn missing(&self, why: String, retry: bool) -> MissingStep {
        MissingStep {
            workspace: self.workspace.name.clone(),
            dir: self.step.dir.clone(),
            name: self.step.name.clone(),
            why,
            retry,
        }
    }

    /// Variables of this step only.
    fn env(&self) -> BTreeMap<String, String> {
        let mut env = BTreeMap::new();
        if self.step.name.starts_with("bun ") {
            // bun links packages from its cache, which works only in the file system of the workspace.
            env.insert(
                "BUN_INSTALL_CACHE_DIR".to_owned(),
                format!("{}/node_modules/.cache/bun", self.place()),
            );
        }
        env
    }
}

/// Whether the steps after a failed required step run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterFailure {
    /// They do not run.
    Stop,
    /// They do not run, unless the step of a manifest failed because its registry cannot be reached: then neither the
    /// repository nor its settings are at fault, and that step is a warning.
    StopUnlessUnreachable,
    /// They run.
    Continue,
}

/// The cause of a missing step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissingCause {
    /// It ran and failed.
    Failed,
    /// It ran and could not reach a host that it may reach.
    Unreachable,
    /// It did not run, because its tool is missing.
    NoTool,
}

/// A step that is missing after its turn.
struct FailedStep {
    missing: MissingStep,
    failure: Failure,
    cause: MissingCause,
}

/// The outcome of the steps of one preparation.
#[derive(Debug, Default)]
pub(crate) struct StepOutcome {
    /// The number of steps that succeeded.
    pub succeeded: usize,
    /// The steps that failed or did not run.
    pub missing: Vec<MissingStep>,
    /// The failure of the first required step that failed.
    pub failure: Option<Failure>,
    /// The file that makes that step; empty for a command.
    pub failed_source: String,
}

/// The Body and the circumstances of a preparation.
pub(crate) struct StepContext<'a> {
    pub body: &'a BodyId,
    /// Variables of the steps besides the Body's own.
    pub env: BTreeMap<String, String>,
    pub gaps: Vec<ToolGap>,
    pub after_failure: AfterFailure,
}

impl StepContext<'_> {
    /// The missing tool of a required step, if that ends the preparation.
    fn gap_of_required(&self, steps: &[PlannedStep<'_>]) -> Option<&ToolGap> {
        let mut required = steps.iter().filter(|planned| planned.is_required());
        let lacks =
            |planned: &PlannedStep<'_>| self.gaps.iter().find(|gap| gap.is_missing && gap.concerns(planned));
        required.find_map(lacks).filter(|_| self.after_failure != AfterFailure::Continue)
    }

    /// Whether the failure of a step ends the preparation.
    fn is_ended_by(&self, planned: &PlannedStep<'_>, cause: MissingCause) -> bool {
        let ends = match self.after_failure {
            AfterFailure::Stop => true,
            AfterFailure::StopUnlessUnreachable => {
                cause != MissingCause::Unreachable || planned.step.tool.is_none()
            }
            AfterFailure::Continue => false,
        };
        ends && planned.is_required()
    }
}

/// The end of a shell line that ran in a Body.
pub(crate) struct LineEnd {
    pub code: i32,
    /// The last bytes of its output, as text.
    pub tail: String,
    pub timed_out: bool,
}

/// Runs prepare steps and other shell lines in Bodies.
#[derive(Clone, Copy)]
pub(crate) struct StepRunner<'a> {
    pub fleet: &'a Fleet,
}

impl StepRunner<'_> {
    /// Runs steps in a Body, in order.
    pub(crate) async fn run_steps(
        &self,
        context: &StepContext<'_>,
        steps: &[PlannedStep<'_>],
        egress: &mut EgressSession,
        say: Progress<'_>,
    ) -> Result<StepOutcome, Failure> {
        let mut outcome = StepOutcome::default();
        if let Some(gap) = context.gap_of_required(steps) {
            // Nothing runs, so that the user need not wait for the failure.
            outcome.missing.extend(steps.iter().map(|planned| planned.missing(gap.text.clone(), true)));
            outcome.failure = Some(gap.failure());
            return Ok(outcome);
        }
        context.gaps.iter().for_each(|gap| gap.report(steps, say));
        for planned in steps {
            if outcome.failure.is_some() {
                outcome.missing.push(planned.missing("an earlier step failed".into(), true));
                continue;
            }
            let Some(FailedStep { missing, failure, cause }) =
                self.run_step(context, planned, egress, say).await?
            else {
                outcome.succeeded += 1;
                continue;
            };
            if context.is_ended_by(planned, cause) {
                outcome.failure = Some(failure);
                outcome.failed_source.clone_from(&planned.step.source);
            } else if cause != MissingCause::NoTool {
                // A missing tool was reported before the first step.
                warn_missing(context, planned, &missing, &failure, say);
            }
            outcome.missing.push(missing);
        }
        Ok(outcome)
    }

    /// Runs one step; returns its record and its failure if it is missing afterwards.
    async fn run_step(
        &self,
        context: &StepContext<'_>,
        planned: &PlannedStep<'_>,
        egress: &mut EgressSession,
        say: Progress<'_>,
    ) -> Result<Option<FailedStep>, Failure> {
        let gap = context.gaps.iter().find(|gap| gap.concerns(planned));
        if let Some(gap) = gap.filter(|gap| gap.is_missing) {
            let (missing, failure) = (planned.missing(gap.text.clone(), true), gap.failure());
            return Ok(Some(FailedStep { missing, failure, cause: MissingCause::NoTool }));
        }
        let title = planned.step.title();
        say(ProgressLine::Activity(&format!("installing: {title}")));
        egress.denied.clear();
        let env = context.env.clone().into_iter().chain(planned.env()).collect();
        let request = ExecRequest { env, workdir: Some(planned.place()), ..shell(&planned.step.line) };
        let end = self.run_line(context.body, request, Some(egress), say).await?;
        if end.code == 0 {
            return Ok(None);
        }
        let unreachable = egress.denied.iter().find(|denial| is_unreachable(&denial.why));
        let mut why = match (unreachable, end.timed_out) {
            (Some(denial), _) => format!("{} cannot be reached", proto::text::visible(&denial.to)),
            (_, true) => format!("it did not end within {} minutes", STEP_WALL.as_secs() / 60),
            _ => match telling_line(&end.tail) {
                "" => format!("code {}", end.code),
                line => format!("code {}: {}", end.code, proto::text::visible(line)),
            },
        };
        if let (None, Some(denial)) = (unreachable, egress.denied.first()) {
            why.push_str(&format!("; the egress proxy denied {}", proto::text::visible(&denial.to)));
        }
        let missing = planned.missing(why, unreachable.is_some() || end.timed_out);
        let failure = step_failure(&title, &end, &egress.denied, gap);
        let cause = if unreachable.is_some() { MissingCause::Unreachable } else { MissingCause::Failed };
        Ok(Some(FailedStep { missing, failure, cause }))
    }

    /// Runs a start command of a Body and waits for its end.
    pub(crate) async fn run_at_start(&self, body: &BodyId, line: &str) -> Result<(), Failure> {
        let end = self.run_line(body, shell(line), None, &mut |_| ()).await?;
        if end.code == 0 {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Conflict,
            format!(
                "a command that runs at each start ended with code {}: {}",
                end.code,
                proto::text::visible(line)
            ),
        )
        .because(last_lines(&end.tail))
        .hint("start without it: pal up --no-prepare"))
    }

    /// Runs a command to its end, and reports its output as progress.
    pub(super) async fn run_line<S: FnMut(ProgressLine<'_>) + ?Sized>(
        &self,
        body: &BodyId,
        request: ExecRequest,
        mut egress: Option<&mut EgressSession>,
        say: &mut S,
    ) -> Result<LineEnd, Failure> {
        let mut exec = self.fleet.execs().start(body, request).await?;
        let mut ticks = tokio::time::interval(IMPORT_EVERY);
        let (mut tail, mut line): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
        loop {
            let next = {
                let mut next = std::pin::pin!(exec.next());
                loop {
                    tokio::select! {
                        output = &mut next => break output?,
                        _ = ticks.tick() => {
                            if let Some(egress) = egress.as_deref_mut() {
                                run_blocking(|| self.fleet.egress().note_denials(body, egress))?;
                            }
                        }
                    }
                }
            };
            let Some(output) = next else { break };
            let (OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes) | OutputChunk::Tty(bytes)) = output;
            tail.extend_from_slice(&bytes);
            let old = tail.len().saturating_sub(TAIL_MAX);
            tail.drain(..old);
            for byte in bytes {
                if byte == b'\n' || byte == b'\r' || line.len() >= 1024 {
                    let text = proto::text::visible_bytes(&without_colours(&std::mem::take(&mut line)));
                    if !text.trim().is_empty() {
                        say(ProgressLine::Output(&text));
                    }
                } else {
                    line.push(byte);
                }
            }
        }
        let ended = exec.finish().await?;
        if let Some(egress) = egress {
            run_blocking(|| self.fleet.egress().note_denials(body, egress))?;
        }
        let tail = String::from_utf8_lossy(&without_colours(&tail)).into_owned();
        Ok(LineEnd { code: ended.code, tail, timed_out: ended.timed_out })
    }
}

/// Tells the user about a step whose failure does not end the preparation.
fn warn_missing(
    context: &StepContext<'_>,
    planned: &PlannedStep<'_>,
    missing: &MissingStep,
    failure: &Failure,
    say: Progress<'_>,
) {
    say(ProgressLine::Note(&format!("warning: {} failed: {}", planned.step.title(), missing.why)));
    for hint in &failure.hints {
        say(ProgressLine::Note(&format!("  hint: {hint}")));
    }
    say(ProgressLine::Note(&format!("  hint: its whole output: pal logs {}", context.body)));
}

/// The request to run a shell line.
pub(super) fn shell(line: &str) -> ExecRequest {
    ExecRequest { timeout: Some(STEP_WALL), ..ExecRequest::new(["/bin/sh", "-c", line]) }
}

/// The end of an output as a cause, which the command line shows line by line.
pub(super) fn last_lines(tail: &str) -> String {
    let lines: Vec<&str> = tail.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.is_empty() {
        return "it printed nothing".to_owned();
    }
    let first = lines.len().saturating_sub(TAIL_LINES);
    format!("the last lines of its output:\n{}", lines[first..].join("\n"))
}

fn step_failure(title: &str, end: &LineEnd, denied: &[EgressDenial], gap: Option<&ToolGap>) -> Failure {
    let how = match end.timed_out {
        true => format!("did not end within {} minutes", STEP_WALL.as_secs() / 60),
        false => format!("ended with code {}", end.code),
    };
    let mut failure = Failure::new(Kind::Conflict, format!("preparing the repository failed: {title} {how}"))
        .because(last_lines(&end.tail));
    if let Some(gap) = gap {
        failure = failure.hint(format!("{}; {}", gap.text, gap.requirement.hint));
    }
    for denial in denied.iter().take(4) {
        let to = proto::text::visible(&denial.to);
        failure = failure.hint(if is_unreachable(&denial.why) {
            format!("{to} is allowed, but {}; check the network of this host", denial.why)
        } else {
            format!(
                "the egress proxy denied {denial}; allow it in palisade.toml: [prepare] allow = [\"{to}\"]"
            )
        });
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_an_output_are_shown_as_lines() {
        let tail: String = (1..=30).map(|number| format!("line {number}\n\n")).collect();
        let shown = last_lines(&tail);
        assert!(
            shown.starts_with("the last lines of its output:\nline 11\n") && shown.ends_with("\nline 30")
        );
        assert_eq!(last_lines(" \n"), "it printed nothing");
    }

    #[test]
    fn a_hint_says_whether_a_name_was_denied_or_could_not_be_reached() {
        let end = LineEnd { code: 1, tail: String::new(), timed_out: false };
        let denial = |why: &str| EgressDenial { to: "a.test:443".into(), why: why.into() };
        let hint = |why: &str| step_failure("npm ci", &end, &[denial(why)], None).hints.remove(0);
        assert_eq!(
            hint("no rule names a.test:443"),
            "the egress proxy denied a.test:443: no rule names a.test:443; allow it in palisade.toml: [prepare] allow = [\"a.test:443\"]"
        );
        let unresolved = format!("{}: the name does not exist", proto::egress::NOT_RESOLVED);
        assert_eq!(
            hint(&unresolved),
            "a.test:443 is allowed, but its name cannot be resolved: the name does not exist; check the network of this host"
        );
    }
}
