//! Watches one agent: on a terminal, in a pipe, or as events in JSON.
//!
//! Invariant: watching changes nothing. The agent goes on by itself, however the watcher ends; only the interrupt key and
//! answers of the person at the terminal reach it, as events of its log.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use brain::agent::AgentStatus;
use bridge::{Agents, watch_live};
use proto::{
    AgentId, EventData, Failure,
    event_data::{AgentInterrupted, AgentPause, MessageReceived, MessageSource},
    failure::WAITS_FOR_PERSON,
};
use tokio::{
    io::{BufReader, Lines},
    net::UnixStream,
    signal::unix::Signal,
};

use super::{
    driver, end,
    follow::AgentFollower,
    keyboard::Keyboard,
    live::{LiveAnswer, StatusLine},
    prompt::{self, PromptEnd},
    render::{EventLines, PlanPlace, plan_lines},
    screen::{self, LiveScreen},
    style::TextLine,
};
use crate::{
    output::{self, Format},
    session::{
        StopSignals,
        signals::{SIGINT, listen_to},
        stopped_code,
    },
};

/// How often the log is read and the screen is drawn.
const TICK: Duration = Duration::from_millis(80);
/// A second interrupt within this time ends the watching.
const IMPATIENT: Duration = Duration::from_secs(2);
/// A pause between two drawings that is longer than this means that a shell had the terminal.
const SHELL_GAP: Duration = Duration::from_millis(700);
const SIGCONT: i32 = 18;

/// The first event that a watcher sees.
#[derive(Debug, Clone, Copy)]
pub enum WatchFrom {
    /// The first one of an agent that was just created.
    Start,
    /// The newest message of a person.
    Newest,
    /// The one behind this `seq`, of an agent that just got an input.
    After(u64),
}

/// Watches an agent until it waits or has finished; gives the exit code.
pub async fn attach(agents: &Agents, id: &AgentId, from: WatchFrom, format: Format) -> Result<u8, Failure> {
    let mut watcher = AgentWatcher::open(agents, id, format).await?;
    if !matches!(from, WatchFrom::Newest) {
        watcher.follower.expect_driver();
    }
    watcher.lines.is_prompted = watcher.keyboard.is_some();
    watcher.begin(from)?;
    loop {
        if let WatchEnd::Left(code) = watcher.watch().await? {
            watcher.leave()?;
            return Ok(code);
        }
        if let PromptEnd::Left(code) = watcher.answer_agent().await? {
            return Ok(code);
        }
        driver::wake(agents, id)?;
        watcher.follower.expect_driver();
    }
}

/// Why the watching stopped.
enum WatchEnd {
    /// The agent waits or has finished.
    Idle,
    /// The person has left; the exit code.
    Left(u8),
}

/// The place where events are shown.
enum WatchOutput {
    Screen(LiveScreen),
    Lines,
    Json,
}

struct AgentWatcher<'a> {
    agents: &'a Agents,
    follower: AgentFollower,
    lines: EventLines,
    live: LiveAnswer,
    updates: Option<Lines<BufReader<UnixStream>>>,
    output: WatchOutput,
    keyboard: Option<Keyboard>,
    signals: StopSignals,
    continued: Signal,
    interrupted: Option<Instant>,
    /// When the screen was drawn last.
    drawn: Instant,
    status: StatusLine,
    sub_agents: BTreeMap<AgentId, (AgentFollower, EventLines)>,
}

impl<'a> AgentWatcher<'a> {
    async fn open(agents: &'a Agents, id: &AgentId, format: Format) -> Result<Self, Failure> {
        let output = match (format, LiveScreen::open()) {
            (Format::Json, _) => WatchOutput::Json,
            (Format::Text, Some(screen)) => WatchOutput::Screen(screen),
            (Format::Text, None) => WatchOutput::Lines,
        };
        let is_screen = matches!(output, WatchOutput::Screen(_));
        let follower = AgentFollower::open(agents, id).await?;
        let is_script = follower.record.spec.model.starts_with("script:");
        Ok(Self {
            agents,
            follower,
            lines: EventLines::new(if is_screen { PlanPlace::Elsewhere } else { PlanPlace::Lines }),
            live: LiveAnswer::default(),
            updates: None,
            output,
            signals: StopSignals::listen()?,
            continued: listen_to(SIGCONT)?,
            keyboard: if is_screen { Keyboard::open()? } else { None },
            interrupted: None,
            drawn: Instant::now(),
            status: StatusLine { since: Instant::now(), frame: 0, is_script, sub_agents: 0, notice: None },
            sub_agents: BTreeMap::new(),
        })
    }

    /// Shows the events so far from a place on.
    fn begin(&mut self, from: WatchFrom) -> Result<(), Failure> {
        let events = &self.follower.events;
        let is_message = |data: MessageReceived| data.from == MessageSource::User;
        let first = match from {
            WatchFrom::Start => Some(0),
            WatchFrom::Newest => events
                .iter()
                .rposition(|event| event.event.data_as::<MessageReceived>().is_some_and(is_message)),
            WatchFrom::After(seq) => {
                let is_new = |event: &proto::Event| self.follower.is_own(event) && event.seq > seq;
                Some(events.iter().position(|event| is_new(&event.event)).unwrap_or(events.len()))
            }
        };
        let first = first.unwrap_or(0);
        for event in &events[..first] {
            self.lines.of(event);
        }
        self.lines.failed_calls = 0;
        let head = end::head_line(&self.follower);
        match &mut self.output {
            WatchOutput::Screen(screen) => screen.update(&[head], &[])?,
            WatchOutput::Lines => output::line(head.to_text())?,
            WatchOutput::Json => {}
        }
        self.show(first..events.len())
    }

    /// Watches until the agent waits or has finished, or the person leaves.
    async fn watch(&mut self) -> Result<WatchEnd, Failure> {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        self.status.since = Instant::now();
        self.drawn = Instant::now();
        loop {
            tokio::select! {
                biased;
                signal = self.signals.next() => {
                    if let Some(code) = self.take_signal(signal)? {
                        return Ok(WatchEnd::Left(code));
                    }
                }
                key = next_key(self.keyboard.as_ref()) => match key {
                    Some(b'd') => return Ok(WatchEnd::Left(0)),
                    Some(_) => {}
                    None => self.keyboard = None,
                },
                _ = self.continued.recv() => if let Some(keyboard) = &self.keyboard { keyboard.reenter() },
                line = next_update(&mut self.updates) => match line {
                    Some(line) => if let Ok(update) = serde_json::from_str(&line) { self.live.update(update) },
                    None => self.updates = None,
                },
                _ = ticks.tick() => {
                    let new = self.follower.read().await?;
                    self.show(new)?;
                    if self.follower.view.status() != AgentStatus::Working {
                        self.rest()?;
                        return Ok(WatchEnd::Idle);
                    }
                    if let Err(failure) = self.follower.check_driver() {
                        self.rest()?;
                        return Err(failure);
                    }
                    self.look_at_sub_agents().await;
                    self.draw()?;
                }
            }
        }
    }

    /// Shows new events.
    fn show(&mut self, new: std::ops::Range<usize>) -> Result<(), Failure> {
        let mut lasting = Vec::new();
        for event in &self.follower.events[new] {
            if matches!(self.output, WatchOutput::Json) {
                output::json(&event.event)?;
                continue;
            }
            self.live.note(event);
            lasting.extend(self.lines.of(event));
        }
        if lasting.is_empty() {
            return Ok(());
        }
        match &mut self.output {
            WatchOutput::Screen(screen) => {
                let (rows, columns) = LiveScreen::size();
                let below = self.live.lines(&self.follower.view, &self.status, rows, columns);
                screen.update(&lasting, &below)
            }
            WatchOutput::Lines => print_lines(&lasting),
            WatchOutput::Json => Ok(()),
        }
    }

    fn draw(&mut self) -> Result<(), Failure> {
        // The signal that `pal` continues may come after the next drawing.
        if self.drawn.elapsed() > SHELL_GAP {
            self.return_from_shell();
        }
        self.drawn = Instant::now();
        let WatchOutput::Screen(screen) = &mut self.output else { return Ok(()) };
        if self.updates.is_none() {
            self.updates = watch_live(&self.agents.directory(self.follower.id()));
        }
        self.status.frame += 1;
        self.status.sub_agents = self.live.sub_agents().len();
        let is_pressed = self.interrupted.is_some_and(|at| at.elapsed() < IMPATIENT);
        self.status.notice = is_pressed.then_some("interrupting; Ctrl-C again stops watching");
        let (rows, columns) = LiveScreen::size();
        screen.update(&[], &self.live.lines(&self.follower.view, &self.status, rows, columns))
    }

    /// Reads what the sub-agents at work do. Their results are in the log of this agent, so an error is no loss.
    async fn look_at_sub_agents(&mut self) {
        let at_work = self.live.sub_agents();
        self.sub_agents.retain(|id, _| at_work.contains(id));
        if !matches!(self.output, WatchOutput::Screen(_)) {
            return;
        }
        for id in at_work {
            if !self.sub_agents.contains_key(&id)
                && let Ok(follower) = AgentFollower::open(self.agents, &id).await
            {
                self.sub_agents.insert(id.clone(), (follower, EventLines::new(PlanPlace::Elsewhere)));
            }
            let Some((follower, lines)) = self.sub_agents.get_mut(&id) else { continue };
            let Ok(new) = follower.read().await else { continue };
            let activity = follower.events[new].iter().filter_map(|event| lines.activity(event)).last();
            if let Some(activity) = activity {
                self.live.note_activity(&id, activity);
            }
        }
    }

    /// Removes the lines below.
    fn rest(&mut self) -> Result<(), Failure> {
        match &mut self.output {
            WatchOutput::Screen(screen) => screen.clear(),
            WatchOutput::Lines | WatchOutput::Json => Ok(()),
        }
    }

    fn return_from_shell(&mut self) {
        if let Some(keyboard) = &self.keyboard {
            keyboard.reenter();
        }
        if let WatchOutput::Screen(screen) = &mut self.output {
            screen.forget();
        }
    }

    /// Acts on a signal; gives the exit code if the watching ends.
    fn take_signal(&mut self, signal: i32) -> Result<Option<u8>, Failure> {
        let again = self.interrupted.is_some_and(|at| at.elapsed() < IMPATIENT);
        if signal != SIGINT || again {
            return Ok(Some(stopped_code(signal)));
        }
        self.interrupted = Some(Instant::now());
        let interrupt = AgentInterrupted { stop: false };
        self.agents.note(self.follower.id(), [EventData::from(interrupt)])?;
        Ok(None)
    }

    /// Says how to come back.
    fn leave(&mut self) -> Result<(), Failure> {
        self.rest()?;
        if !matches!(self.output, WatchOutput::Json) {
            let id = self.follower.id();
            output::talk(&match self.interrupted {
                None => format!("agent {id} goes on by itself\n  hint: watch it: pal agent attach {id}"),
                Some(_) => format!("agent {id} is interrupted\n  hint: let it go on: pal agent resume {id}"),
            });
        }
        Ok(())
    }

    /// Prints the end of the work; or asks the person at the terminal, if the agent waits for one.
    async fn answer_agent(&mut self) -> Result<PromptEnd, Failure> {
        let status = self.follower.view.status();
        let AgentStatus::Paused { reason, .. } = &status else {
            self.print_end()?;
            return Ok(PromptEnd::Left(0));
        };
        let mut code = WAITS_FOR_PERSON;
        if let Some(keyboard) = &self.keyboard {
            let (id, view) = (self.follower.id(), &self.follower.view);
            let asked = match reason {
                AgentPause::Approval => {
                    prompt::ask_approvals(self.agents, id, view, keyboard, &mut self.signals).await?
                }
                AgentPause::Question => match self.follower.open_question() {
                    Some(asked) => {
                        prompt::ask_answer(self.agents, id, &asked, keyboard, &mut self.signals).await?
                    }
                    None => prompt::ask_message(self.agents, id, keyboard, &mut self.signals).await?,
                },
                AgentPause::Interrupted if self.interrupted.is_some() => {
                    prompt::ask_message(self.agents, id, keyboard, &mut self.signals).await?
                }
                _ => PromptEnd::Left(WAITS_FOR_PERSON),
            };
            self.interrupted = None;
            match asked {
                PromptEnd::Answered => return Ok(PromptEnd::Answered),
                PromptEnd::Left(left) => code = left,
            }
        }
        self.print_end()?;
        Ok(PromptEnd::Left(code))
    }

    /// Prints the state of the work, and what a person can do now.
    fn print_end(&mut self) -> Result<(), Failure> {
        if matches!(self.output, WatchOutput::Json) {
            return Ok(());
        }
        let mut lines = vec![TextLine::default()];
        if matches!(self.output, WatchOutput::Screen(_)) && !self.follower.view.todos.is_empty() {
            lines.extend(plan_lines(&self.follower.view.todos, usize::MAX));
            lines.push(TextLine::default());
        }
        lines.extend(end::end_lines(self.agents, &self.follower, &self.lines));
        print_lines(&lines)
    }
}

/// Prints lines to standard output, with colours on a terminal.
pub fn print_lines(lines: &[TextLine]) -> Result<(), Failure> {
    let paint = screen::paint();
    let text: String = lines.iter().map(|line| format!("{}\n", line.print(paint))).collect();
    output::data(text.as_bytes())
}

async fn next_key(keyboard: Option<&Keyboard>) -> Option<u8> {
    match keyboard {
        Some(keyboard) => keyboard.key().await,
        None => std::future::pending().await,
    }
}

/// The next update of the driver; `None` once its connection ended.
async fn next_update(updates: &mut Option<Lines<BufReader<UnixStream>>>) -> Option<String> {
    match updates {
        Some(updates) => updates.next_line().await.ok().flatten(),
        None => std::future::pending().await,
    }
}
