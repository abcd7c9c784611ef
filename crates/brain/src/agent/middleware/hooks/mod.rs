//! Command hooks: commands of the user around calls, messages and the end of the work, in the manner of Claude Code.
//!
//! A hook gets JSON on its standard input. Exit code 0 lets things go on; 2 blocks, with its standard error as the
//! reason; any other code is a failure of the hook that changes nothing. A hook may also print JSON with a decision.
//!
//! Invariant: hooks come from the user's own hooks.toml, never from a repository.
//! Invariant: a hook runs in the Body, unless the user's file says `where = "host"` for it.
//! Invariant: a hook before a call that cannot be run refuses the call: the user wanted it to be looked at.

mod file;
mod outcome;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use proto::{
    EventData,
    event_data::{AgentPause, AgentSpec, ApprovalMode, MessageReceived, MessageSource},
};
use serde_json::{Value, json};

use super::{Continuation, Judgement, Middleware, Summarizer};
use crate::{
    agent::{
        call::{CallPlan, CallResult},
        journal::BoxFuture,
        tool::CallContext,
        view::AgentView,
    },
    model::{ContentBlock, ResultBlock, Speaker, ToolArguments, ToolCall},
};
pub use file::{Hook, HookEvent, HookPlace, HookSet};
use outcome::HookDecision;

/// The longest text of a result that a hook gets, in characters.
const RESPONSE_LEN_MAX: usize = 100_000;
/// How often hooks may keep an agent from finishing, one after the other.
const STOPS_MAX: usize = 5;
const STOP_PREFIX: &str = "A hook wants more before you finish:\n";

/// Runs hooks.
pub trait HookRunner: Send + Sync {
    /// Runs one command with `sh -c`. An error says why it could not run; a timeout is one.
    fn run<'a>(&'a self, run: HookRun<'a>) -> BoxFuture<'a, Result<HookOutput, String>>;
}

/// One run of a hook.
#[derive(Debug, Clone)]
pub struct HookRun<'a> {
    /// The command.
    pub command: &'a str,
    /// The place in which it runs.
    pub place: HookPlace,
    /// The JSON for its standard input.
    pub input: String,
    /// How long it may take.
    pub timeout: Duration,
    /// A key by which a run is known, if a crash repeats it.
    pub key: String,
}

/// The end of a hook.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HookOutput {
    /// The exit code.
    pub exit_code: i32,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
}

/// The hooks of one agent.
pub struct Hooks {
    hooks: Vec<Hook>,
    runner: Arc<dyn HookRunner>,
    spec: AgentSpec,
    summarizer: Option<Arc<Summarizer>>,
    began: AtomicBool,
    /// The messages that hooks have let through and no request has had yet.
    passed: Mutex<Vec<(u64, String)>>,
    /// The reason for which a message was blocked, until the driver pauses for it.
    pause: Mutex<Option<String>>,
}

impl Hooks {
    /// Runs these hooks around the agent.
    pub fn new(hooks: HookSet, runner: Arc<dyn HookRunner>, spec: &AgentSpec) -> Self {
        Self {
            hooks: hooks.hooks,
            runner,
            spec: spec.clone(),
            summarizer: None,
            began: AtomicBool::new(false),
            passed: Mutex::new(Vec::new()),
            pause: Mutex::new(None),
        }
    }

    /// Runs the hooks for `PreCompact` before this summarizer makes a summary.
    #[must_use]
    pub fn before_summaries_of(self, summarizer: Arc<Summarizer>) -> Self {
        Self { summarizer: Some(summarizer), ..self }
    }

    /// Runs the hooks for the end of a drive.
    pub async fn end_session(&self, reason: &str) {
        let input = json!({ "reason": reason });
        self.run_all(HookEvent::SessionEnd, reason, input, "session-end").await;
    }

    /// Runs all hooks of an event, in their order, until one blocks.
    async fn run_all(&self, event: HookEvent, subject: &str, input: Value, key: &str) -> HookDecision {
        let mut decision = HookDecision::default();
        for (index, hook) in self.hooks.iter().enumerate().filter(|(_, hook)| hook.applies(event, subject)) {
            let run = HookRun {
                command: &hook.command,
                place: hook.place,
                input: self.input(event, &input),
                timeout: hook.timeout,
                key: format!("{key}-hook-{index}"),
            };
            decision.add(event, self.runner.run(run).await, &hook.command);
            if decision.blocked.is_some() {
                break;
            }
        }
        decision
    }

    /// The input of a hook: what every hook gets, and what the event adds.
    fn input(&self, event: HookEvent, added: &Value) -> String {
        let mode = match self.spec.mode {
            ApprovalMode::Plan => "plan",
            ApprovalMode::Auto => "acceptEdits",
            ApprovalMode::Never => "dontAsk",
            ApprovalMode::Ask | ApprovalMode::Other(_) => "default",
        };
        let mut input = json!({
            "session_id": self.spec.id,
            "cwd": self.spec.workdir,
            "permission_mode": mode,
            "hook_event_name": event.as_str(),
        });
        if let (Value::Object(input), Value::Object(added)) = (&mut input, added) {
            input.extend(added.clone());
        }
        input.to_string()
    }

    fn has(&self, event: HookEvent) -> bool {
        self.hooks.iter().any(|hook| hook.event == event)
    }

    /// Messages for the agent before a request: the beginning of the session, new messages of the user.
    async fn prepare(&self, view: &AgentView, overflow: bool) -> Vec<EventData> {
        let mut notes = Vec::new();
        if !self.began.swap(true, Ordering::Relaxed) && self.has(HookEvent::SessionStart) {
            let source = if view.turn == 0 { "startup" } else { "resume" };
            let key = format!("{}-{}-start", self.spec.id, view.fence);
            let decision =
                self.run_all(HookEvent::SessionStart, source, json!({ "source": source }), &key).await;
            notes.extend(decision.context);
        }
        if self.has(HookEvent::UserPromptSubmit) {
            notes.extend(self.submit_prompts(view).await);
        }
        let is_due = self.summarizer.as_ref().is_some_and(|summarizer| summarizer.is_due(view, overflow));
        if is_due && self.has(HookEvent::PreCompact) {
            let trigger = if view.compact_wanted { "manual" } else { "auto" };
            let key = format!("{}-{}-compact", self.spec.id, view.seq);
            self.run_all(HookEvent::PreCompact, trigger, json!({ "trigger": trigger }), &key).await;
        }
        let note = |text: String| MessageReceived { from: MessageSource::Palisade, text }.into();
        notes.into_iter().map(note).collect()
    }

    /// Shows new messages of the user to the hooks. A blocked one pauses the agent, each time it would be answered.
    async fn submit_prompts(&self, view: &AgentView) -> Vec<String> {
        let mut notes = Vec::new();
        let mut passed = self.passed.lock().map(|passed| passed.clone()).unwrap_or_default();
        passed.retain(|prompt| view.new_prompts.contains(prompt));
        let open: Vec<&(u64, String)> =
            view.new_prompts.iter().filter(|prompt| !passed.contains(prompt)).collect();
        for prompt in open {
            let (seq, text) = prompt;
            let key = format!("{}-{seq}-prompt", self.spec.id);
            let decision =
                self.run_all(HookEvent::UserPromptSubmit, "", json!({ "prompt": text }), &key).await;
            if let Some(reason) = decision.blocked {
                self.set_pause(format!("a hook blocked the message: {reason}"));
                break;
            }
            notes.extend(decision.context);
            passed.push(prompt.clone());
        }
        if let Ok(mut kept) = self.passed.lock() {
            *kept = passed;
        }
        notes
    }

    fn set_pause(&self, why: String) {
        if let Ok(mut pause) = self.pause.lock() {
            *pause = Some(why);
        }
    }

    async fn judge_call(&self, call: &ToolCall) -> Judgement {
        let arguments = match &call.arguments {
            ToolArguments::Object(arguments) => Value::Object(arguments.clone()),
            ToolArguments::Invalid(_) => return Judgement::Allow,
        };
        let input = json!({ "tool_name": call.name, "tool_input": arguments, "tool_use_id": call.id });
        let key = format!("{}-{}-pre", self.spec.id, call.id);
        let decision = self.run_all(HookEvent::PreToolUse, &call.name, input, &key).await;
        match (decision.blocked, decision.asked) {
            (Some(reason), _) => Judgement::Deny(format!("{} was blocked by a hook: {reason}", call.name)),
            (None, Some(reason)) => Judgement::Ask(format!("a hook asks about {}: {reason}", call.name)),
            (None, None) => Judgement::Allow,
        }
    }

    async fn refine_result(&self, context: &CallContext, mut result: CallResult) -> CallResult {
        let texts: Vec<&str> = result.blocks.iter().filter_map(ResultBlock::as_text).collect();
        let response: String = texts.join("\n").chars().take(RESPONSE_LEN_MAX).collect();
        let input = json!({
            "tool_name": context.tool,
            "tool_input": context.arguments,
            "tool_use_id": context.call,
            "tool_response": { "text": response, "is_error": result.is_error(), "exit_code": result.exit_code },
        });
        let key = format!("{}-post", context.key);
        let decision = self.run_all(HookEvent::PostToolUse, &context.tool, input, &key).await;
        let notes = decision.blocked.into_iter().chain(decision.context);
        result.blocks.extend(
            notes.map(|text| ResultBlock::Text { text: format!("A hook of the user says:\n{text}") }),
        );
        result
    }

    async fn finish_work(&self, view: &AgentView) -> Continuation {
        let event = if self.spec.parent.is_some() { HookEvent::SubagentStop } else { HookEvent::Stop };
        let stops = count_stops(view);
        if stops >= STOPS_MAX || !self.has(event) {
            return Continuation::Continue;
        }
        let input = json!({ "stop_hook_active": stops > 0, "last_assistant_message": view.newest_text() });
        let key = format!("{}-{}-stop", self.spec.id, view.seq);
        let decision = self.run_all(event, "", input, &key).await;
        match decision.blocked {
            Some(reason) => Continuation::Remind(format!("{STOP_PREFIX}{reason}")),
            None => Continuation::Continue,
        }
    }
}

/// How often a hook has kept the agent from finishing since it last called a tool.
fn count_stops(view: &AgentView) -> usize {
    let is_stop =
        |block: &ContentBlock| matches!(block, ContentBlock::Text { text } if text.starts_with(STOP_PREFIX));
    let works = |block: &ContentBlock| matches!(block, ContentBlock::ToolResult(_));
    let messages = view.messages.iter().rev().filter(|message| message.speaker == Speaker::User);
    messages
        .take_while(|message| !message.blocks.iter().any(works))
        .filter(|message| message.blocks.iter().any(is_stop))
        .count()
}

impl Middleware for Hooks {
    fn name(&self) -> &'static str {
        "hooks"
    }

    fn check(&self, view: &AgentView) -> Continuation {
        let _ = view;
        match self.pause.lock().ok().and_then(|mut pause| pause.take()) {
            Some(why) => Continuation::Pause { reason: AgentPause::Other("hook".into()), why },
            None => Continuation::Continue,
        }
    }

    fn before_request<'a>(&'a self, view: &'a AgentView, overflow: bool) -> BoxFuture<'a, Vec<EventData>> {
        Box::pin(self.prepare(view, overflow))
    }

    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        let _ = (view, plan);
        Box::pin(self.judge_call(call))
    }

    fn refine<'a>(&'a self, context: &'a CallContext, result: CallResult) -> BoxFuture<'a, CallResult> {
        Box::pin(async move {
            if self.has(HookEvent::PostToolUse) { self.refine_result(context, result).await } else { result }
        })
    }

    fn finish<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Continuation> {
        Box::pin(self.finish_work(view))
    }
}
