//! Watches several attempts at one task: a line for each.

use std::time::{Duration, Instant};

use brain::agent::AgentStatus;
use bridge::{AgentRecord, Agents};
use fleet::Fleet;
use proto::{BodyId, EventData, Failure, event_data::AgentInterrupted, failure::WAITS_FOR_PERSON};

use super::{
    attach::print_lines,
    call_line::{shorten, time},
    follow::AgentFollower,
    render::{EventLines, PlanPlace, spent},
    screen::LiveScreen,
    style::{TextLine, Tone},
};
use crate::{
    failure,
    output::{self, Format},
    session::{StopSignals, signals::SIGINT, stopped_code},
};

const TICK: Duration = Duration::from_millis(150);
const IMPATIENT: Duration = Duration::from_secs(2);

/// One of the agents.
struct GroupMember {
    follower: AgentFollower,
    lines: EventLines,
    newest: String,
    is_lost: bool,
    is_told: bool,
    began: Instant,
    took: Option<Duration>,
}

impl GroupMember {
    fn is_idle(&self) -> bool {
        self.is_lost || self.follower.view.status() != AgentStatus::Working
    }

    async fn read(&mut self, format: Format) -> Result<(), Failure> {
        let new = self.follower.read().await?;
        self.take(new, format)?;
        if let Err(failure) = self.follower.check_driver()
            && !std::mem::replace(&mut self.is_lost, true)
        {
            failure::warn(&failure, format);
        }
        if self.is_idle() {
            self.took.get_or_insert(self.began.elapsed());
        }
        Ok(())
    }

    fn take(&mut self, new: std::ops::Range<usize>, format: Format) -> Result<(), Failure> {
        for event in &self.follower.events[new] {
            if format == Format::Json {
                output::json(&event.event)?;
            }
            if let Some(activity) = self.lines.activity(event) {
                self.newest = activity;
            }
        }
        Ok(())
    }

    /// The agent in one line.
    fn line(&self) -> TextLine {
        let view = &self.follower.view;
        let (sign, tone, state) = match view.status() {
            _ if self.is_lost => ("✗ ", Tone::Bad, "no process drives it".to_owned()),
            AgentStatus::Finished => ("✓ ", Tone::Good, "finished".to_owned()),
            AgentStatus::Paused { why, .. } => ("‖ ", Tone::Notice, format!("waits: {}", shorten(&why, 60))),
            AgentStatus::Working => ("… ", Tone::Normal, "at work".to_owned()),
        };
        let body = view.body.as_ref().map_or("-", BodyId::as_str);
        let mut facts = vec![format!("turn {}", view.turn)];
        facts.extend(spent(&view.totals, self.follower.record.spec.model.starts_with("script:")));
        let took = self.took.unwrap_or_else(|| self.began.elapsed());
        facts.push(time(u64::try_from(took.as_millis()).unwrap_or(u64::MAX) / 1000 * 1000));
        let line = TextLine::new(tone, sign)
            .add(Tone::Strong, self.follower.id().as_str())
            .add(Tone::Faint, &format!("  Body {body}  "))
            .add(tone, &state)
            .add(Tone::Faint, &format!("  {}", facts.join(", ")));
        if self.is_idle() { line } else { line.add(Tone::Faint, &format!("  {}", shorten(&self.newest, 80))) }
    }
}

/// Waits until every agent waits or has finished; gives the exit code.
pub async fn wait_for_all(agents: &Agents, records: &[AgentRecord], format: Format) -> Result<u8, Failure> {
    let mut members = Vec::new();
    for record in records {
        let mut follower = AgentFollower::open(agents, &record.spec.id).await?;
        follower.expect_driver();
        let mut member = GroupMember {
            follower,
            lines: EventLines::new(PlanPlace::Elsewhere),
            newest: String::new(),
            is_lost: false,
            is_told: false,
            began: Instant::now(),
            took: None,
        };
        let all = 0..member.follower.events.len();
        member.take(all, format)?;
        members.push(member);
    }
    let mut screen = if format == Format::Text { LiveScreen::open() } else { None };
    let mut signals = StopSignals::listen()?;
    let mut interrupted: Option<Instant> = None;
    loop {
        tokio::select! {
            signal = signals.next() => {
                let again = interrupted.is_some_and(|at| at.elapsed() < IMPATIENT);
                if signal != SIGINT || again {
                    show(screen.as_mut(), &mut members)?;
                    return Ok(stopped_code(signal));
                }
                interrupted = Some(Instant::now());
                for member in members.iter().filter(|member| !member.is_idle()) {
                    let interrupt = AgentInterrupted { stop: false };
                    agents.note(member.follower.id(), [EventData::from(interrupt)])?;
                }
            }
            () = tokio::time::sleep(TICK) => {
                for member in &mut members {
                    member.read(format).await?;
                }
                if format == Format::Text {
                    show(screen.as_mut(), &mut members)?;
                }
                if members.iter().all(GroupMember::is_idle) {
                    break;
                }
            }
        }
    }
    if format == Format::Text {
        print_lines(&next_steps(agents, &members))?;
    }
    let finished = |member: &GroupMember| member.follower.view.status() == AgentStatus::Finished;
    Ok(if members.iter().all(finished) { 0 } else { WAITS_FOR_PERSON })
}

/// Draws the lines again; without a screen, prints those of agents that stopped working.
fn show(screen: Option<&mut LiveScreen>, members: &mut [GroupMember]) -> Result<(), Failure> {
    let lines: Vec<TextLine> = members.iter().map(GroupMember::line).collect();
    if let Some(screen) = screen {
        return screen.update(&[], &lines);
    }
    for (member, line) in members.iter_mut().zip(lines) {
        if member.is_idle() && !std::mem::replace(&mut member.is_told, true) {
            print_lines(&[line])?;
        }
    }
    Ok(())
}

fn next_steps(agents: &Agents, members: &[GroupMember]) -> Vec<TextLine> {
    let step = |name: &str, command: &str| {
        TextLine::new(Tone::Faint, &format!("  {name:<9}")).add(Tone::Strong, command)
    };
    let mut lines = vec![TextLine::default()];
    for member in members {
        let id = member.follower.id();
        match member.follower.view.status() {
            _ if member.is_lost => lines.push(step("go on", &format!("pal agent resume {id}"))),
            AgentStatus::Paused { .. } => lines.push(step("go on", &format!("pal agent attach {id}"))),
            AgentStatus::Finished | AgentStatus::Working => {}
        }
    }
    let finished = members.iter().filter(|member| member.follower.view.status() == AgentStatus::Finished);
    let bodies: Vec<&str> =
        finished.filter_map(|member| member.follower.view.body.as_ref()).map(BodyId::as_str).collect();
    if bodies.len() > 1 {
        lines.push(step("compare", &format!("pal compare {}", bodies.join(" "))));
        let branch = branch_of(agents.fleet(), bodies[0]).unwrap_or_else(|| "BRANCH".to_owned());
        lines.push(step("land", &format!("pal land --queue --onto {branch} {}", bodies.join(" "))));
    } else if let [body] = bodies[..] {
        lines.push(step("look", &format!("pal diff {body}")));
        lines.push(step("land", &format!("pal land {body}")));
    }
    lines
}

/// The branch on which a Body began.
fn branch_of(fleet: &Fleet, body: &str) -> Option<String> {
    fleet.find(body).ok()?.spec.workspaces.first()?.branch.clone()
}
