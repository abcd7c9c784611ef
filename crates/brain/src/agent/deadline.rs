//! The end of the working time during an answer or a call: what runs is interrupted, and the agent pauses.
//!
//! Invariant: an agent works no longer than its budget of time, however long an answer or a call takes.

use std::time::{Duration, Instant};

use proto::{
    EventData,
    event_data::{AgentPause, CallOutcome, ModelFailed},
};

use super::{
    call::CallResult,
    driver::{AgentDriver, DriveError},
    view::CallStage,
};

/// Tools whose calls keep the budget themselves: a sub-agent has the rest of it, and does not work while it waits for a
/// person.
const NESTED: &[&str] = &["task"];

impl AgentDriver {
    /// When the budget of time is used up, if work goes on from now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let totals = &self.view.totals;
        let used_ms = totals.model_ms.saturating_add(totals.tool_ms);
        let left_ms = self.view.budget.wall_ms?.saturating_sub(used_ms);
        Instant::now().checked_add(Duration::from_millis(left_ms))
    }

    /// The deadline of the calls that are open.
    pub(super) fn deadline_of_calls(&self) -> Option<Instant> {
        let is_nested = self.view.open_calls().any(|state| NESTED.contains(&state.call.name.as_str()));
        if is_nested { None } else { self.deadline() }
    }

    /// Ends the calls that run or have not begun, and pauses.
    pub(super) async fn expire_calls(&mut self, began: Instant) -> Result<(), DriveError> {
        let mut took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let waits = |stage: &CallStage| matches!(stage, CallStage::Asked(_) | CallStage::Questioned);
        let open: Vec<String> = self
            .view
            .open_calls()
            .filter(|state| !waits(&state.stage))
            .map(|state| state.call.id.clone())
            .collect();
        for call in open {
            let text =
                "The agent's budget of time was used up during this call. It may have taken effect in part.";
            self.end_call(&call, CallResult::ended(CallOutcome::Interrupted, text), took_ms).await?;
            // They ran at the same time.
            took_ms = 0;
        }
        self.pause_expired("a call").await
    }

    /// Records an answer that did not come in time, and pauses.
    pub(super) async fn expire_answer(&mut self, turn: u64) -> Result<(), DriveError> {
        let why = "the agent's budget of time was used up before the answer was complete".to_owned();
        self.append([EventData::from(ModelFailed { turn, attempt: 0, why, retry_ms: None })]).await?;
        self.pause_expired("an answer").await
    }

    async fn pause_expired(&mut self, during: &str) -> Result<(), DriveError> {
        let limit_ms = self.view.budget.wall_ms.unwrap_or_default();
        let why = format!("the budget of time, {} s, was used up during {during}", limit_ms.div_ceil(1000));
        self.pause(AgentPause::Budget, why).await
    }
}

/// Waits for a deadline; without one for ever.
pub(super) async fn await_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
