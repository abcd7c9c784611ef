//! Tool calls: the plan before a call runs, and the result after it.

use proto::event_data::{CallOutcome, CallRisk, CallVenue, EventData};

use crate::model::ResultBlock;

/// How a call will be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPlan {
    /// The risk of the call.
    pub risk: CallRisk,
    /// Where it runs.
    pub venue: CallVenue,
    /// The rule or the reason that decided.
    pub why: String,
    /// The files that the call changes. Of two calls of one answer that change the same file, the later one is refused.
    pub writes: Vec<String>,
}

impl CallPlan {
    /// A call that only changes the agent's own log.
    pub fn in_log(why: impl Into<String>) -> Self {
        Self { risk: CallRisk::Pure, venue: CallVenue::Agent, why: why.into(), writes: Vec::new() }
    }

    /// A call that reads in the Body.
    pub fn reading(why: impl Into<String>) -> Self {
        Self { risk: CallRisk::Read, venue: CallVenue::Body, why: why.into(), writes: Vec::new() }
    }

    /// A call that changes the Body.
    pub fn working(why: impl Into<String>) -> Self {
        Self { risk: CallRisk::Workspace, venue: CallVenue::Body, why: why.into(), writes: Vec::new() }
    }
}

/// Something that the driver does after a call, beside giving the result to the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallEffect {
    /// Ask a person; the answer is the result of the call.
    Ask {
        /// The question.
        question: String,
        /// Answers to choose from.
        choices: Vec<String>,
    },
    /// Summarise the conversation before the next answer.
    Compact,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct CallResult {
    /// How the call ended.
    pub outcome: CallOutcome,
    /// The content that the model gets.
    pub blocks: Vec<ResultBlock>,
    /// The exit code of its command.
    pub exit_code: Option<i32>,
    /// Events that are appended together with the end of the call.
    pub events: Vec<EventData>,
    /// Something that the driver does afterwards.
    pub effect: Option<CallEffect>,
}

impl CallResult {
    /// A result of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::ended(CallOutcome::Done, text)
    }

    /// An error that the model reads.
    pub fn error(text: impl Into<String>) -> Self {
        Self::ended(CallOutcome::Failed, text)
    }

    /// A call that a rule or a person refused.
    pub fn denied(text: impl Into<String>) -> Self {
        Self::ended(CallOutcome::Denied, text)
    }

    /// A call whose effect cannot be known.
    pub fn unknown() -> Self {
        let text = "Outcome unknown: the call was interrupted by a crash and may or may not have taken effect. \
                    Check the state before you repeat it.";
        Self::ended(CallOutcome::Unknown, text)
    }

    /// A call that ended in this way, with text for the model.
    pub fn ended(outcome: CallOutcome, text: impl Into<String>) -> Self {
        let blocks = vec![ResultBlock::Text { text: text.into() }];
        Self { outcome, blocks, exit_code: None, events: Vec::new(), effect: None }
    }

    /// Adds an event.
    #[must_use]
    pub fn with_event(mut self, event: impl Into<EventData>) -> Self {
        self.events.push(event.into());
        self
    }

    /// Whether the model should read the result as an error.
    pub fn is_error(&self) -> bool {
        is_error(&self.outcome)
    }
}

/// Whether a result with this outcome is an error for the model.
pub(super) fn is_error(outcome: &CallOutcome) -> bool {
    !matches!(outcome, CallOutcome::Done | CallOutcome::Answered)
}
