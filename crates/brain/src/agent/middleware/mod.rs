//! Middleware: one concern each, around the model call and the tool call.
//!
//! The driver calls them in the order of the list for requests and calls, and in the reverse order for results, so that
//! the first one is the outermost. The order of an agent, and its reason:
//!
//! | middleware | request | call | result | why there |
//! | --- | --- | --- | --- | --- |
//! | [`SecretMask`] | | | masks | outermost: no text of a later one escapes it |
//! | [`BudgetLimit`], [`StuckDetector`] | pause | | | before anything that costs |
//! | [`Planning`] | begins the plan | tools of the phase | | the phase is known before rules judge |
//! | [`CallRules`] | | rules and mode | | a call that is refused reaches no hook |
//! | [`Hooks`] | new messages, `PreCompact` | `PreToolUse` | `PostToolUse` | before the summary, after the rules |
//! | [`MessageEviction`] | writes, shortens | | | the file is there before the model reads of it |
//! | [`Summarizer`] | summarises | | | last before the request |
//! | the Bridge's router of venues | | chooses | | sees calls that may run |
//! | [`ResultEviction`] | | | writes, shortens | hooks and masks see the preview |
//! | the Bridge's checkpoints | | | | after a complete turn |
//!
//! [`memory_prompt`], [`skills_prompt`] and [`system_prompt`] make the system prompt, which the driver fixes in the log
//! when the agent first runs.
//!
//! Invariant: between two summaries a request only grows: each has the blocks of the one before as its prefix. Nothing
//! here adds text to a request that is not in the log.
//! Absent on purpose: a repair of calls without a result. [`AgentView`] moves results into the conversation only when each
//! call of an answer has one.

mod approvals;
mod budget;
mod eviction;
mod hooks;
mod masking;
mod memory;
mod planning;
mod preview;
mod prompt;
mod rules;
mod skills;
mod stuck;
mod summary;

use super::{
    call::{CallPlan, CallResult},
    journal::BoxFuture,
    tool::CallContext,
    view::AgentView,
};
use crate::model::{ModelRequest, ToolCall};

pub use approvals::ModeRules;
pub use budget::{BudgetLimit, find_exceeded};
pub use eviction::{MessageEviction, ResultEviction};
pub use hooks::{Hook, HookEvent, HookOutput, HookPlace, HookRun, HookRunner, HookSet, Hooks};
pub use masking::SecretMask;
pub use memory::{MemoryFile, memory_prompt};
pub use planning::{CheckResult, PhaseChecks, Planning};
pub use prompt::{PromptParts, system_prompt};
pub use rules::CallRules;
pub use skills::skills_prompt;
pub use stuck::StuckDetector;
pub use summary::Summarizer;

/// The text files of an agent: evicted results, older messages, memory. An error is a text.
pub trait AgentFiles: Send + Sync {
    /// Writes a whole file, and makes its directory.
    fn write<'a>(&'a self, path: &'a str, text: &'a str) -> BoxFuture<'a, Result<(), String>>;

    /// Reads a whole file; `None` if there is none.
    fn read<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<Option<String>, String>>;

    /// The names of the entries of a directory; a directory's name ends with a slash. None if there is no directory.
    fn list<'a>(&'a self, directory: &'a str) -> BoxFuture<'a, Result<Vec<String>, String>>;
}

/// Whether an agent goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Continuation {
    /// It goes on.
    Continue,
    /// It goes on after it got this message.
    Remind(String),
    /// It waits for a person.
    Pause {
        /// The reason.
        reason: proto::event_data::AgentPause,
        /// The reason in words, with the command that goes on.
        why: String,
    },
}

/// Whether a call is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// It is carried out.
    Allow,
    /// A person decides, because of this rule.
    Ask(String),
    /// It is not carried out; the model gets this text.
    Deny(String),
}

/// One concern around the calls of models and tools.
pub trait Middleware: Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &'static str;

    /// Decides before each request whether the agent goes on.
    fn check(&self, view: &AgentView) -> Continuation {
        let _ = view;
        Continuation::Continue
    }

    /// Acts before a request, and returns events to append. `overflow` says that the request before was too long for
    /// the model.
    fn before_request<'a>(
        &'a self,
        view: &'a AgentView,
        overflow: bool,
    ) -> BoxFuture<'a, Vec<proto::EventData>> {
        let _ = (view, overflow);
        Box::pin(async { Vec::new() })
    }

    /// Changes the request that the model sees.
    fn shape(&self, view: &AgentView, request: &mut ModelRequest) {
        let _ = (view, request);
    }

    /// Decides about a call before it runs.
    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        let _ = (view, call, plan);
        Box::pin(async { Judgement::Allow })
    }

    /// Changes a result before it is recorded.
    fn refine<'a>(&'a self, context: &'a CallContext, result: CallResult) -> BoxFuture<'a, CallResult> {
        let _ = context;
        Box::pin(async { result })
    }

    /// Decides whether the agent may finish after an answer without calls.
    fn finish<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Continuation> {
        let _ = view;
        Box::pin(async { Continuation::Continue })
    }

    /// Acts after a complete turn, and returns events to append.
    fn after_turn<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Vec<proto::EventData>> {
        let _ = view;
        Box::pin(async { Vec::new() })
    }
}
