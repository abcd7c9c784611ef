//! The calls of one answer: planned, judged, carried out side by side, and recovered after a crash.

use std::{sync::Arc, time::Instant};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use proto::{
    EventData,
    event_data::{
        AgentPause, ApprovalAsked, ApprovalDecision, CallEnded, CallOutcome, CallStarted, QuestionAsked,
    },
};
use serde_json::{Map, Value};

use super::{
    blocks::store_content,
    call::{CallEffect, CallPlan, CallResult},
    deadline::await_deadline,
    driver::{AgentDriver, DriveError, FOLLOW},
    journal::BoxFuture,
    middleware::Judgement,
    tool::{ARGUMENTS_LEN_MAX, CallContext},
    view::{CallStage, CallState},
};
use crate::model::{ToolArguments, ToolCall};

/// Tools of which an answer has at most one call, and the error for more, in the words of Deep Agents.
const SINGLE_CALLS: &[(&str, &str)] = &[(
    "write_todos",
    "Error: The `write_todos` tool should never be called multiple times in parallel. Please call it only once per \
     model invocation to update the todo list.",
)];
/// The most calls of one answer that are carried out.
const CALLS_MAX: usize = 64;
/// The most calls that run at once.
const PARALLEL_MAX: usize = 8;

/// The next act of the driver on a call.
enum CallStep {
    /// It runs with these arguments.
    Run(CallPlan, Map<String, Value>),
    /// A person decides, because of this rule.
    Ask(String),
    /// It has this result without running.
    End(CallResult),
    /// It waits for a person.
    Wait,
}

/// A call that ended, and how long it took.
type EndedCall = (String, CallResult, u64);

impl AgentDriver {
    /// Carries out the open calls as far as no person has to decide.
    pub(super) async fn run_calls(&mut self) -> Result<(), DriveError> {
        let mut running: FuturesUnordered<BoxFuture<'static, EndedCall>> = FuturesUnordered::new();
        let mut queue = Vec::new();
        let open: Vec<CallState> = self.view.open_calls().cloned().collect();
        let mut written: Vec<String> = Vec::new();
        for (index, state) in open.iter().enumerate() {
            let repeated = self.find_repeated(&state.call.name);
            let step = match self.next_step(state).await {
                CallStep::Run(..) if repeated.is_some() => {
                    CallStep::End(CallResult::error(repeated.unwrap_or_default()))
                }
                CallStep::Run(plan, _) if plan.writes.iter().any(|path| written.contains(path)) => {
                    CallStep::End(CallResult::error(
                        "Error: parallel file mutations to the same path are not allowed.",
                    ))
                }
                _ if index >= CALLS_MAX => CallStep::End(CallResult::error(format!(
                    "Error: an answer may have at most {CALLS_MAX} tool calls; this one was not carried out."
                ))),
                step => step,
            };
            match step {
                CallStep::Run(plan, arguments) => {
                    written.extend(plan.writes.iter().cloned());
                    queue.push((state.call.clone(), plan, arguments));
                }
                CallStep::Ask(why) => {
                    let asked = ApprovalAsked {
                        call: state.call.id.clone(),
                        tool: state.call.name.clone(),
                        arguments: arguments_value(&state.call),
                        why,
                    };
                    self.append([EventData::from(asked)]).await?;
                }
                CallStep::End(result) => self.end_call(&state.call.id, result, 0).await?,
                CallStep::Wait => {}
            }
        }
        let clock = CallClock { began: Instant::now(), deadline: self.deadline_of_calls() };
        queue.reverse();
        while let Some((call, plan, arguments)) = queue.pop() {
            let started = self.start_call(call, plan, arguments).await?;
            running.push(started);
            if running.len() >= PARALLEL_MAX
                && self.await_call(&mut running, clock).await? == TurnState::Interrupted
            {
                return Ok(());
            }
        }
        while !running.is_empty() {
            if self.await_call(&mut running, clock).await? == TurnState::Interrupted {
                return Ok(());
            }
        }
        self.end_turn().await
    }

    /// The error for a tool of which the newest answer has more than one call, if it may have only one.
    fn find_repeated(&self, tool: &str) -> Option<&'static str> {
        let (_, text) = SINGLE_CALLS.iter().find(|(name, _)| *name == tool)?;
        (self.view.calls.iter().filter(|state| state.call.name == tool).count() > 1).then_some(*text)
    }

    /// Pauses if calls wait for a person; completes the turn if none is open.
    async fn end_turn(&mut self) -> Result<(), DriveError> {
        let waiting = |stage: &CallStage| matches!(stage, CallStage::Asked(_));
        if self.view.open_calls().any(|state| waiting(&state.stage)) {
            return self.pause(AgentPause::Approval, "a tool call needs approval").await;
        }
        if self.view.open_calls().any(|state| state.stage == CallStage::Questioned) {
            return self.pause(AgentPause::Question, "the agent asked a question").await;
        }
        if self.view.open_calls().next().is_none() {
            self.complete_turn().await?;
        }
        Ok(())
    }

    async fn next_step(&self, state: &CallState) -> CallStep {
        match &state.stage {
            CallStage::New => self.judge(&state.call).await,
            CallStage::Decided(decision) => match decision.decision {
                ApprovalDecision::Approve => self.plan_or_end(&state.call, None),
                ApprovalDecision::Edit => self.plan_or_end(&state.call, decision.arguments.as_ref()),
                ApprovalDecision::Answer => CallStep::End(CallResult::ended(
                    CallOutcome::Answered,
                    decision.message.clone().unwrap_or_default(),
                )),
                ApprovalDecision::Reject | ApprovalDecision::Other(_) => {
                    let why = decision.message.as_deref().unwrap_or("no reason was given");
                    CallStep::End(CallResult::denied(format!("The user rejected this call: {why}")))
                }
            },
            CallStage::Answered(answer) => {
                CallStep::End(CallResult::ended(CallOutcome::Answered, answer.clone()))
            }
            CallStage::Asked(_) | CallStage::Questioned | CallStage::Started(_) | CallStage::Ended => {
                CallStep::Wait
            }
        }
    }

    fn plan_or_end(&self, call: &ToolCall, edited: Option<&Value>) -> CallStep {
        let arguments = match (edited, &call.arguments) {
            (Some(Value::Object(edited)), _) => edited.clone(),
            (Some(_), _) => {
                return CallStep::End(CallResult::error("Error: the edited arguments are no object."));
            }
            (None, ToolArguments::Object(arguments)) => arguments.clone(),
            (None, ToolArguments::Invalid(text)) => {
                let shown: String = text.chars().take(200).collect();
                return CallStep::End(CallResult::error(format!(
                    "Error: the arguments of {} are no JSON object: {shown}",
                    call.name
                )));
            }
        };
        if call.arguments.to_text().len() > ARGUMENTS_LEN_MAX {
            return CallStep::End(CallResult::error(format!(
                "Error: the arguments are longer than {} MiB.",
                ARGUMENTS_LEN_MAX >> 20
            )));
        }
        match self.parts.tools.plan(&call.name, &arguments) {
            Ok(plan) => CallStep::Run(plan, arguments),
            Err(text) => CallStep::End(CallResult::error(text)),
        }
    }

    async fn judge(&self, call: &ToolCall) -> CallStep {
        let (plan, arguments) = match self.plan_or_end(call, None) {
            CallStep::Run(plan, arguments) => (plan, arguments),
            step => return step,
        };
        let mut asked = None;
        for middleware in &self.parts.middleware {
            match middleware.judge(&self.view, call, &plan).await {
                Judgement::Allow => {}
                Judgement::Ask(rule) => asked = asked.or(Some(rule)),
                Judgement::Deny(text) => return CallStep::End(CallResult::denied(text)),
            }
        }
        match asked {
            Some(rule) => CallStep::Ask(rule),
            None => CallStep::Run(plan, arguments),
        }
    }

    /// Records the start of a call and starts it.
    async fn start_call(
        &mut self,
        call: ToolCall,
        plan: CallPlan,
        arguments: Map<String, Value>,
    ) -> Result<BoxFuture<'static, EndedCall>, DriveError> {
        let started = CallStarted {
            call: call.id.clone(),
            tool: call.name.clone(),
            arguments: Value::Object(arguments.clone()),
            risk: plan.risk.clone(),
            venue: plan.venue.clone(),
            why: plan.why.clone(),
            // The driver's number makes it unique: after a rewind, turns and ids of calls can repeat.
            key: format!("{}-{}-{}-{}", self.parts.agent, self.view.fence, self.view.turn, call.id),
        };
        let context = self.context(&started, plan, arguments);
        self.append([EventData::from(started)]).await?;
        Ok(self.run(context, Attempt::First))
    }

    fn context(&self, started: &CallStarted, plan: CallPlan, arguments: Map<String, Value>) -> CallContext {
        CallContext {
            agent: self.parts.agent.clone(),
            call: started.call.clone(),
            tool: started.tool.clone(),
            key: started.key.clone(),
            body: self.view.body.clone(),
            plan,
            arguments,
        }
    }

    /// The future that carries out a call, or finds the result of one that an earlier driver started.
    fn run(&self, context: CallContext, attempt: Attempt) -> BoxFuture<'static, EndedCall> {
        let Some(tool) = self.parts.tools.get(&context.tool).cloned() else {
            return Box::pin(async move { (context.call, CallResult::unknown(), 0) });
        };
        let middleware = self.parts.middleware.clone();
        Box::pin(async move {
            let began = Instant::now();
            let result = match attempt {
                Attempt::First => tool.run(context.clone()).await,
                Attempt::Recovery => tool.recover(context.clone()).await.unwrap_or_else(CallResult::unknown),
            };
            let mut result = result;
            for middleware in middleware.iter().rev() {
                result = middleware.refine(&context, result).await;
            }
            let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            (context.call, result, took_ms)
        })
    }

    /// Waits until one call ends, and records it; folds events of other writers meanwhile.
    async fn await_call(
        &mut self,
        running: &mut FuturesUnordered<BoxFuture<'static, EndedCall>>,
        clock: CallClock,
    ) -> Result<TurnState, DriveError> {
        loop {
            let journal = Arc::clone(&self.parts.journal);
            tokio::select! {
                Some((call, result, took_ms)) = running.next() => {
                    self.end_call(&call, result, took_ms).await?;
                    return Ok(TurnState::Running);
                }
                events = journal.follow(FOLLOW) => self.fold(events?).await?,
                () = await_deadline(clock.deadline) => {
                    running.clear();
                    self.expire_calls(clock.began).await?;
                    return Ok(TurnState::Interrupted);
                }
            }
            if self.view.is_interrupted() {
                // Dropping the futures interrupts the calls; `interrupt_turn` records that.
                running.clear();
                return Ok(TurnState::Interrupted);
            }
        }
    }

    /// Records the result of a call, or the question that it asked.
    pub(super) async fn end_call(
        &mut self,
        call: &str,
        result: CallResult,
        took_ms: u64,
    ) -> Result<(), DriveError> {
        if let Some(CallEffect::Ask { question, choices }) = result.effect {
            let asked = QuestionAsked { call: call.to_owned(), question, choices };
            return self.append([EventData::from(asked)]).await;
        }
        let CallResult { outcome, blocks, exit_code, mut events, .. } = result;
        let result = store_content(self.parts.journal.as_ref(), &blocks).await?;
        let ended = CallEnded { call: call.to_owned(), outcome, result, exit_code, took_ms };
        events.push(ended.into());
        self.append(events).await
    }

    /// Finds the results of calls that an earlier driver started.
    pub(super) async fn recover_calls(&mut self) -> Result<(), DriveError> {
        let started: Vec<CallStarted> = self
            .view
            .open_calls()
            .filter_map(|state| match &state.stage {
                CallStage::Started(started) => Some((**started).clone()),
                _ => None,
            })
            .collect();
        let mut running = FuturesUnordered::new();
        for started in started {
            let arguments = started.arguments.as_object().cloned().unwrap_or_default();
            let plan = CallPlan {
                risk: started.risk.clone(),
                venue: started.venue.clone(),
                why: started.why.clone(),
                writes: Vec::new(),
            };
            running.push(self.run(self.context(&started, plan, arguments), Attempt::Recovery));
        }
        let clock = CallClock { began: Instant::now(), deadline: self.deadline_of_calls() };
        let recovered = !running.is_empty();
        while !running.is_empty() {
            if self.await_call(&mut running, clock).await? == TurnState::Interrupted {
                return Ok(());
            }
        }
        if recovered { self.end_turn().await } else { Ok(()) }
    }

    /// Ends the open calls of an interrupted turn, and pauses.
    pub(super) async fn interrupt_turn(&mut self) -> Result<(), DriveError> {
        let open: Vec<String> = self.view.open_calls().map(|state| state.call.id.clone()).collect();
        for call in open {
            let text = "The user interrupted this call. It may have taken effect in part.";
            self.end_call(&call, CallResult::ended(CallOutcome::Interrupted, text), 0).await?;
        }
        self.pause(AgentPause::Interrupted, "a person interrupted the agent").await
    }
}

/// Whether a call runs for the first time.
#[derive(Debug, Clone, Copy)]
enum Attempt {
    First,
    Recovery,
}

/// When the calls of a turn began, and until when they may run.
#[derive(Debug, Clone, Copy)]
struct CallClock {
    began: Instant,
    deadline: Option<Instant>,
}

/// Whether the calls of a turn go on.
#[derive(Debug, PartialEq, Eq)]
enum TurnState {
    Running,
    Interrupted,
}

fn arguments_value(call: &ToolCall) -> Value {
    match &call.arguments {
        ToolArguments::Object(arguments) => Value::Object(arguments.clone()),
        ToolArguments::Invalid(text) => Value::String(text.clone()),
    }
}
