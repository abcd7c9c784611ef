//! The driver: takes an agent over, and takes one step after the other until the agent waits or has finished.

use std::{sync::Arc, time::Instant};

use proto::{
    AgentId, Draft, EventData,
    event_data::{
        AgentDriven, AgentFinished, AgentInstructed, AgentPause, AgentPaused, AnswerEnd, MessageReceived,
        MessageSource, ModelAnswered, ModelAsked, ModelFailed, ModelUsage,
    },
};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::{
    blocks::{ResolvedEvent, resolve, store_content},
    deadline::await_deadline,
    journal::{AgentJournal, JournalError},
    middleware::{Continuation, Middleware},
    tool::ToolRegistry,
    view::{AgentStatus, AgentView},
};
use crate::model::{
    Answer, Model, ModelCatalog, ModelDelta, ModelError, ModelProgress, ModelRequest, StopReason,
};

/// How often the driver looks for events of other writers while it works.
pub(super) const FOLLOW: std::time::Duration = std::time::Duration::from_secs(5);
/// How many answers in a row may be cut off or empty before the agent pauses.
const INCOMPLETE_MAX: u32 = 3;

/// One thing that a watcher of the agent sees before it is in the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LiveUpdate {
    /// A request went to the model; pieces of an earlier one are void.
    Asking {
        /// The turn.
        turn: u64,
    },
    /// A piece of an answer.
    Delta {
        /// The piece.
        delta: ModelDelta,
    },
    /// Output of a running call.
    Output {
        /// The call.
        call: String,
        /// The text.
        text: String,
    },
}

/// Receives live updates. They may be lost; the log has everything that counts.
pub trait LiveSink: Send + Sync {
    /// Takes one update.
    fn update(&self, update: LiveUpdate);

    /// Takes note of an event that is in the log now, before the driver acts on it.
    fn note_event(&self, event: &proto::Event) {
        let _ = event;
    }
}

/// Everything that a driver works with.
pub struct DriverParts {
    /// The agent.
    pub agent: AgentId,
    /// The chain of the agent.
    pub journal: Arc<dyn AgentJournal>,
    /// The model.
    pub model: Arc<dyn Model>,
    /// Prices and context windows.
    pub catalog: Arc<ModelCatalog>,
    /// The tools.
    pub tools: ToolRegistry,
    /// The concerns around calls, outermost first.
    pub middleware: Vec<Arc<dyn Middleware>>,
    /// The system prompt for an agent that has none yet.
    pub system: Vec<String>,
    /// Watchers.
    pub live: Arc<dyn LiveSink>,
}

/// How a drive ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriveEnd {
    /// The agent waits for a person.
    Paused {
        /// The reason.
        reason: AgentPause,
        /// The reason in words.
        why: String,
    },
    /// The agent has finished.
    Finished,
}

/// Why a drive could not go on.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The chain could not be read or written, or another driver took over.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Drives one agent.
pub struct AgentDriver {
    pub(super) parts: DriverParts,
    pub(super) view: AgentView,
    /// All events of the agent, for a fold after a rewind.
    events: Vec<ResolvedEvent>,
    /// The newest request, to measure the prefix that the next one shares with it.
    request_before: Vec<u8>,
    incomplete: u32,
    overflow: bool,
    /// Serialises appends of calls that end at the same time.
    appending: Mutex<()>,
}

impl AgentDriver {
    /// Takes over an agent with the events that its chain has so far.
    pub async fn take_over(
        parts: DriverParts,
        events: Vec<proto::Event>,
        pid: u32,
    ) -> Result<Self, DriveError> {
        let mut resolved = Vec::with_capacity(events.len());
        for event in events {
            resolved.push(resolve(parts.journal.as_ref(), event).await?);
        }
        let view = AgentView::of(&resolved);
        let mut driver = Self {
            parts,
            view,
            events: resolved,
            request_before: Vec::new(),
            incomplete: 0,
            overflow: false,
            appending: Mutex::new(()),
        };
        let fence = driver.view.fence + 1;
        driver.append([EventData::from(AgentDriven { fence, pid })]).await?;
        Ok(driver)
    }

    /// The view so far.
    pub fn view(&self) -> &AgentView {
        &self.view
    }

    /// Takes steps until the agent waits or has finished.
    pub async fn drive(&mut self) -> Result<DriveEnd, DriveError> {
        self.instruct().await?;
        self.recover_calls().await?;
        loop {
            if self.view.is_interrupted() {
                self.interrupt_turn().await?;
            }
            match self.view.status() {
                AgentStatus::Paused { reason, why } => return Ok(DriveEnd::Paused { reason, why }),
                AgentStatus::Finished => return Ok(DriveEnd::Finished),
                AgentStatus::Working => {}
            }
            if self.view.open_calls().next().is_some() {
                self.run_calls().await?;
            } else if self.view.wants_answer() {
                self.ask().await?;
            } else {
                self.finish().await?;
            }
        }
    }

    /// Appends events and folds them, and those of other writers before them, into the view.
    pub(super) async fn append(
        &mut self,
        data: impl IntoIterator<Item = EventData>,
    ) -> Result<(), DriveError> {
        let drafts: Vec<Draft> = data
            .into_iter()
            .map(|data| Draft::of_agent(&self.parts.agent, data).in_body(self.view.body.as_ref()))
            .collect();
        let events = {
            let _turn = self.appending.lock().await;
            self.parts.journal.append(drafts).await?
        };
        events.iter().for_each(|event| self.parts.live.note_event(event));
        self.fold(events).await
    }

    /// Folds events of the chain into the view.
    pub(super) async fn fold(&mut self, events: Vec<proto::Event>) -> Result<(), DriveError> {
        for event in events {
            let event = resolve(self.parts.journal.as_ref(), event).await?;
            let refold = AgentView::needs_refold(&event);
            if !refold {
                self.view.apply(&event);
            }
            self.events.push(event);
            if refold {
                self.view = AgentView::of(&self.events);
            }
        }
        Ok(())
    }

    /// Fixes the system prompt, once.
    async fn instruct(&mut self) -> Result<(), DriveError> {
        if self.view.system.is_some() {
            return Ok(());
        }
        let system = store_content(self.parts.journal.as_ref(), &self.parts.system).await?;
        self.append([EventData::from(AgentInstructed { system })]).await
    }

    pub(super) async fn pause(
        &mut self,
        reason: AgentPause,
        why: impl Into<String>,
    ) -> Result<(), DriveError> {
        self.append([EventData::from(AgentPaused { reason, why: why.into() })]).await
    }

    pub(super) async fn remind(&mut self, text: String) -> Result<(), DriveError> {
        self.append([EventData::from(MessageReceived { from: MessageSource::Palisade, text })]).await
    }

    /// Asks the model for the next answer.
    async fn ask(&mut self) -> Result<(), DriveError> {
        for index in 0..self.parts.middleware.len() {
            let middleware = Arc::clone(&self.parts.middleware[index]);
            let events = middleware.before_request(&self.view, self.overflow).await;
            if !events.is_empty() {
                self.append(events).await?;
            }
            match middleware.check(&self.view) {
                Continuation::Continue => {}
                Continuation::Remind(text) => self.remind(text).await?,
                Continuation::Pause { reason, why } => return self.pause(reason, why).await,
            }
        }
        let request = self.request();
        let turn = self.view.turn + 1;
        self.note_request(&request, turn).await?;
        let began = Instant::now();
        let answered = self.answer_or_interrupt(&request, turn).await?;
        match answered {
            None => Ok(()),
            Some(Ok(answer)) => self.take_answer(turn, answer, began).await,
            Some(Err(error)) => self.take_failure(turn, &error).await,
        }
    }

    fn request(&self) -> ModelRequest {
        let spec = self.view.spec.as_ref();
        let mut request = ModelRequest {
            system: self.view.system.clone().unwrap_or_default(),
            tools: self.parts.tools.schemas(),
            messages: self.view.messages.clone(),
            conversation: spec.map(|spec| spec.id.to_string()),
            role: spec.and_then(|spec| spec.role.clone()),
            turn: Some(usize::try_from(self.view.turn).unwrap_or(usize::MAX)),
            ..ModelRequest::default()
        };
        for middleware in &self.parts.middleware {
            middleware.shape(&self.view, &mut request);
        }
        request
    }

    async fn note_request(&mut self, request: &ModelRequest, turn: u64) -> Result<(), DriveError> {
        let bytes = prompt_bytes(request);
        let same = bytes.iter().zip(&self.request_before).take_while(|(new, old)| new == old).count();
        let asked = ModelAsked {
            turn,
            attempt: 0,
            model: self.parts.model.address().to_string(),
            messages: request.messages.len() as u64,
            bytes: bytes.len() as u64,
            prefix_bytes: same as u64,
        };
        self.request_before = bytes;
        self.parts.live.update(LiveUpdate::Asking { turn });
        self.append([EventData::from(asked)]).await
    }

    /// Waits for the answer, or for an interrupt of a person or the end of the working time: then there is none.
    async fn answer_or_interrupt(
        &mut self,
        request: &ModelRequest,
        turn: u64,
    ) -> Result<Option<Result<Answer, ModelError>>, DriveError> {
        let (model, live) = (Arc::clone(&self.parts.model), Arc::clone(&self.parts.live));
        let (failed, mut failures) = tokio::sync::mpsc::unbounded_channel();
        let progress = move |progress: ModelProgress| match progress {
            ModelProgress::AttemptStarted { attempt } if attempt > 1 => {
                live.update(LiveUpdate::Asking { turn })
            }
            ModelProgress::AttemptStarted { .. } => {}
            ModelProgress::Delta(delta) => live.update(LiveUpdate::Delta { delta }),
            ModelProgress::AttemptFailed { attempt, error, retry_after: Some(wait) } => {
                let retry_ms = Some(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
                let _ = failed.send(ModelFailed {
                    turn,
                    attempt: u64::from(attempt),
                    why: error.to_string(),
                    retry_ms,
                });
            }
            ModelProgress::AttemptFailed { .. } => {}
        };
        let mut answer = model.answer(request, &progress);
        let deadline = self.deadline();
        loop {
            let journal = Arc::clone(&self.parts.journal);
            tokio::select! {
                answered = &mut answer => return Ok(Some(answered)),
                Some(failure) = failures.recv() => self.append([EventData::from(failure)]).await?,
                events = journal.follow(FOLLOW) => self.fold(events?).await?,
                () = await_deadline(deadline) => {
                    self.expire_answer(turn).await?;
                    return Ok(None);
                }
            }
            if self.view.is_interrupted() {
                return Ok(None);
            }
        }
    }

    async fn take_answer(&mut self, turn: u64, answer: Answer, began: Instant) -> Result<(), DriveError> {
        let stop = match &answer.stop {
            StopReason::ToolUse => AnswerEnd::ToolUse,
            StopReason::MaxTokens => AnswerEnd::MaxTokens,
            StopReason::ContextFull => AnswerEnd::ContextFull,
            StopReason::PauseTurn => AnswerEnd::Other("pause_turn".into()),
            StopReason::EndTurn | StopReason::StopSequence => AnswerEnd::EndTurn,
            StopReason::Other(reason) => AnswerEnd::Other(reason.clone()),
        };
        self.overflow = matches!(stop, AnswerEnd::ContextFull);
        let is_cut = !matches!(stop, AnswerEnd::EndTurn | AnswerEnd::ToolUse);
        let is_incomplete = answer.calls().next().is_none() && (is_cut || answer.text().trim().is_empty());
        let usage = answer.usage;
        let answered = ModelAnswered {
            turn,
            message: store_content(self.parts.journal.as_ref(), &answer.blocks).await?,
            stop,
            usage: ModelUsage {
                input: usage.input,
                output: usage.output,
                cache_read: usage.cache_read,
                cache_write: usage.cache_write,
            },
            cost_microdollars: self.parts.catalog.cost(self.parts.model.address(), &usage).map(|cost| cost.0),
            took_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        self.incomplete = if is_incomplete { self.incomplete + 1 } else { 0 };
        self.append([EventData::from(answered)]).await?;
        if is_incomplete { self.ask_again(is_cut).await } else { Ok(()) }
    }

    /// Asks for the rest of an answer that was empty or cut off, a few times in a row.
    async fn ask_again(&mut self, is_cut: bool) -> Result<(), DriveError> {
        if self.incomplete > INCOMPLETE_MAX {
            self.incomplete = 0;
            return self.pause(AgentPause::Model, "the model gives only empty or incomplete answers").await;
        }
        let text = if is_cut { "Your answer was cut off. Go on." } else { "Your answer was empty. Go on." };
        self.remind(text.to_owned()).await
    }

    /// Decides after a failure that the model's own retries did not mend.
    async fn take_failure(&mut self, turn: u64, error: &ModelError) -> Result<(), DriveError> {
        let failed = ModelFailed { turn, attempt: 0, why: error.to_string(), retry_ms: None };
        self.append([EventData::from(failed)]).await?;
        if matches!(error, ModelError::ContextOverflow { .. }) && !self.overflow {
            self.overflow = true;
            return Ok(());
        }
        self.pause(AgentPause::Model, format!("the model gives no answer: {error}")).await
    }

    /// Ends the task after an answer without calls, unless the answer was cut off or a middleware objects.
    async fn finish(&mut self) -> Result<(), DriveError> {
        if self.view.messages.is_empty() {
            return self.pause(AgentPause::Question, "the agent has no task yet").await;
        }
        let text = self.view.newest_text();
        let is_cut = !matches!(self.view.newest_end(), Some(AnswerEnd::EndTurn | AnswerEnd::ToolUse));
        // Only a driver that took over after such an answer comes here with one.
        if is_cut || text.trim().is_empty() {
            return self.ask_again(is_cut).await;
        }
        for index in 0..self.parts.middleware.len() {
            let middleware = Arc::clone(&self.parts.middleware[index]);
            match middleware.finish(&self.view).await {
                Continuation::Continue => {}
                Continuation::Remind(text) => return self.remind(text).await,
                Continuation::Pause { reason, why } => return self.pause(reason, why).await,
            }
        }
        self.complete_turn().await?;
        self.append([EventData::from(AgentFinished { summary: text })]).await
    }

    /// Lets each middleware act on a complete turn.
    pub(super) async fn complete_turn(&mut self) -> Result<(), DriveError> {
        for index in 0..self.parts.middleware.len() {
            let middleware = Arc::clone(&self.parts.middleware[index]);
            let events = middleware.after_turn(&self.view).await;
            if !events.is_empty() {
                self.append(events).await?;
            }
        }
        Ok(())
    }
}

/// The part of a request that a provider's cache sees, in the order in which it sees it.
fn prompt_bytes(request: &ModelRequest) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = serde_json::to_writer(&mut bytes, &request.tools);
    let _ = serde_json::to_writer(&mut bytes, &request.system);
    for message in &request.messages {
        let _ = serde_json::to_writer(&mut bytes, message);
    }
    bytes
}

/// A live sink without a watcher.
#[derive(Debug, Default)]
pub struct NullSink;

impl LiveSink for NullSink {
    fn update(&self, _: LiveUpdate) {}
}
