//! The end of a watch: what was done, what it cost, and what a person can do now.

use brain::agent::{AgentStatus, AgentTotals, CallStage};
use bridge::Agents;
use fleet::{DiffFormat, Fleet};
use proto::{
    BodyId, Failure,
    event_data::{AgentBudget, AgentPause, MessageReceived, MessageSource},
};

use super::{
    call_line::{shorten, time},
    follow::AgentFollower,
    render::{EventLines, plural, spent},
    style::{TextLine, Tone},
};
use crate::age;

/// How many files of the diff are listed.
const FILES_MAX: usize = 10;
/// How many characters of the reason of a pause are shown.
const WHY_LEN: usize = 400;
/// The width of the names of the facts.
const NAME_WIDTH: usize = 9;

/// The agent, its Body and its model.
pub fn head_line(follower: &AgentFollower) -> TextLine {
    let line = TextLine::new(Tone::Strong, &format!("agent {}", follower.id()));
    let body = follower.view.body.as_ref().map_or(String::new(), |body| format!("  Body {body}"));
    let model = follower.view.spec.as_ref().map_or("", |spec| spec.model.as_str());
    line.add(Tone::Faint, &format!("{body}  {}", shorten(model, 60)))
}

/// The state of the work, and the commands that go on from it.
pub fn end_lines(agents: &Agents, follower: &AgentFollower, shown: &EventLines) -> Vec<TextLine> {
    let view = &follower.view;
    let mut lines = vec![state_line(follower)];
    let work = view.body.as_ref().and_then(|body| work_lines(agents.fleet(), body).ok());
    let is_changed = work.as_ref().is_some_and(|work| !work.is_empty());
    match work {
        Some(work) if !work.is_empty() => lines.extend(work),
        Some(_) => lines.push(fact("changed", "no file of the repository")),
        None => {}
    }
    if let Some((command, passed)) = &shown.newest_test {
        let (sign, tone) = if *passed { ("✓ passed", Tone::Good) } else { ("✗ failed", Tone::Bad) };
        lines.push(fact("test", command).add(tone, &format!("  {sign}")));
    }
    lines.push(fact("spent", &facts(follower, shown)));
    let id = follower.id();
    if let AgentStatus::Paused { reason, .. } = view.status() {
        lines.extend(
            pause_commands(follower, &reason).into_iter().map(|(name, command)| step(name, &command)),
        );
    }
    if let Some(body) = view.body.as_ref().filter(|_| is_changed) {
        lines.push(step("look", &format!("pal diff {body}")));
    }
    lines.push(step("talk on", &format!("pal agent send {id} \"…\"")));
    if let Some(body) = view.body.as_ref().filter(|_| is_changed && view.status() == AgentStatus::Finished) {
        lines.push(step("land", &format!("pal land {body}")));
    }
    lines
}

fn state_line(follower: &AgentFollower) -> TextLine {
    match follower.view.status() {
        AgentStatus::Finished => TextLine::new(Tone::Good, "✓ ").add(Tone::Strong, "finished"),
        AgentStatus::Working => TextLine::new(Tone::Notice, "… ").add(Tone::Strong, "at work"),
        AgentStatus::Paused { why, .. } => TextLine::new(Tone::Notice, "‖ ")
            .add(Tone::Strong, "waits")
            .add(Tone::Normal, &format!(": {}", shorten(&why, WHY_LEN))),
    }
}

/// Turns, calls, tokens, money and time.
fn facts(follower: &AgentFollower, shown: &EventLines) -> String {
    let view = &follower.view;
    let mut calls = plural(view.totals.calls, "call");
    if shown.failed_calls > 0 {
        calls += &format!(" ({} failed)", shown.failed_calls);
    }
    let mut parts = vec![plural(view.totals.answers, "turn"), calls];
    parts.extend(spent(&view.totals, follower.record.spec.model.starts_with("script:")));
    parts.extend(worked_ms(follower).map(time));
    parts.join(", ")
}

/// The time from the newest message of a person to the newest event.
fn worked_ms(follower: &AgentFollower) -> Option<u64> {
    let is_message = |data: MessageReceived| data.from == MessageSource::User;
    let began = follower
        .events
        .iter()
        .rfind(|event| event.event.data_as::<MessageReceived>().is_some_and(is_message))
        .and_then(|event| age::milliseconds(&event.event.at))?;
    let ended = follower.events.last().and_then(|event| age::milliseconds(&event.event.at))?;
    Some(ended.saturating_sub(began))
}

/// The size of the diff, and its files. Nothing if no file changed.
fn work_lines(fleet: &Fleet, body: &BodyId) -> Result<Vec<TextLine>, Failure> {
    let review = fleet.workspaces().review_files(body, None)?;
    let files = &review.diff.files;
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let sum = |count: fn(&fleet::ChangedFile) -> Option<u64>| files.iter().filter_map(count).sum::<u64>();
    let size = format!(
        "{} {}, +{} −{}",
        files.len(),
        if files.len() == 1 { "file" } else { "files" },
        sum(|file| file.added),
        sum(|file| file.removed)
    );
    let stat = review.text(DiffFormat::Stat, &[])?;
    let stat = String::from_utf8_lossy(&stat);
    let rows: Vec<&str> = stat.lines().filter(|line| line.contains(" | ")).collect();
    let mut lines = vec![fact("changed", &size)];
    let indent = " ".repeat(NAME_WIDTH + 2);
    let row = |row: &&str| TextLine::new(Tone::Faint, &format!("{indent}{}", row.trim_start()));
    lines.extend(rows.iter().take(FILES_MAX).map(row));
    if rows.len() > FILES_MAX {
        lines.push(TextLine::new(Tone::Faint, &format!("{indent}… {} more", rows.len() - FILES_MAX)));
    }
    Ok(lines)
}

/// The commands that end a pause.
fn pause_commands(follower: &AgentFollower, reason: &AgentPause) -> Vec<(&'static str, String)> {
    let id = follower.id();
    match reason {
        AgentPause::Approval => {
            let calls = follower.view.calls.iter();
            let waiting = calls.filter(|state| matches!(state.stage, CallStage::Asked(_))).count();
            let all = if waiting > 1 { format!("  # all {waiting} calls") } else { String::new() };
            vec![
                ("approve", format!("pal agent approve {id}{all}")),
                ("deny", format!("pal agent deny {id} \"the reason\"")),
            ]
        }
        AgentPause::Question if follower.open_question().is_some() => {
            vec![("answer", format!("pal agent answer {id} \"…\""))]
        }
        AgentPause::Budget => {
            let option = raising_option(&follower.view.budget, &follower.view.totals);
            vec![("go on", format!("pal agent resume {id} {option}"))]
        }
        AgentPause::Question => Vec::new(),
        _ => vec![("go on", format!("pal agent resume {id}"))],
    }
}

/// The option that raises the limit which was reached.
fn raising_option(budget: &AgentBudget, totals: &AgentTotals) -> &'static str {
    let tokens = totals.usage.total_input().saturating_add(totals.usage.output);
    let is_reached = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used >= limit);
    if is_reached(budget.turns, totals.answers) {
        "--max-turns COUNT"
    } else if is_reached(budget.tokens, tokens) {
        "--max-tokens COUNT"
    } else if is_reached(budget.wall_ms, totals.model_ms.saturating_add(totals.tool_ms)) {
        "--timeout DURATION"
    } else {
        "--budget DOLLARS"
    }
}

fn fact(name: &str, value: &str) -> TextLine {
    TextLine::new(Tone::Faint, &format!("  {name:<NAME_WIDTH$}")).add(Tone::Normal, value)
}

fn step(name: &str, command: &str) -> TextLine {
    TextLine::new(Tone::Faint, &format!("  {name:<NAME_WIDTH$}")).add(Tone::Strong, command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_raised_by_the_option_of_its_limit() {
        let totals = AgentTotals { answers: 3, tool_ms: 900, model_ms: 100, ..AgentTotals::default() };
        let option = |turns, wall_ms| {
            raising_option(&AgentBudget { turns, wall_ms, ..AgentBudget::default() }, &totals)
        };
        assert_eq!(option(Some(3), Some(1000)), "--max-turns COUNT");
        assert_eq!(option(Some(4), Some(1000)), "--timeout DURATION");
        assert_eq!(option(None, None), "--budget DOLLARS");
    }
}
