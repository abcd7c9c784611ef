//! Budgets: turns, tokens, money and working time. At a limit the agent pauses and asks.

use proto::event_data::{AgentBudget, AgentPause};

use super::{Continuation, Middleware};
use crate::agent::view::{AgentTotals, AgentView};

/// Pauses an agent whose budget is used up.
#[derive(Debug, Default)]
pub struct BudgetLimit;

impl Middleware for BudgetLimit {
    fn name(&self) -> &'static str {
        "budget"
    }

    fn check(&self, view: &AgentView) -> Continuation {
        match find_exceeded(&view.budget, &view.totals) {
            Some(limit) => Continuation::Pause { reason: AgentPause::Budget, why: limit },
            None => Continuation::Continue,
        }
    }
}

/// The limit of a budget that these sums have reached, in words.
pub fn find_exceeded(budget: &AgentBudget, totals: &AgentTotals) -> Option<String> {
    let tokens = totals.usage.total_input().saturating_add(totals.usage.output);
    let worked_ms = totals.model_ms.saturating_add(totals.tool_ms);
    if budget.turns.is_some_and(|most| totals.answers >= most) {
        return Some(format!("the budget of {} turns is used up", totals.answers));
    }
    if budget.tokens.is_some_and(|most| tokens >= most) {
        return Some(format!("the budget of tokens is used up: {tokens} were used"));
    }
    if budget.cost_microdollars.is_some() && totals.unpriced_answers > 0 {
        return Some(
            "the budget of money cannot be kept, because the price of the model is not known".to_owned(),
        );
    }
    if budget.cost_microdollars.is_some_and(|most| totals.cost_microdollars >= most) {
        return Some(format!(
            "the budget of money is used up: {:.4} dollars were spent",
            dollars(totals.cost_microdollars)
        ));
    }
    if budget.wall_ms.is_some_and(|most| worked_ms >= most) {
        return Some(format!("the budget of time is used up: the agent worked for {} s", worked_ms / 1000));
    }
    None
}

fn dollars(micro: u64) -> f64 {
    micro as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_pauses_and_no_limit_does_not() {
        let used = AgentTotals {
            answers: 3,
            usage: crate::model::TokenUsage { input: 50, output: 10, ..Default::default() },
            cost_microdollars: 2_000_000,
            model_ms: 4_000,
            tool_ms: 1_000,
            ..AgentTotals::default()
        };
        let pauses = |budget: AgentBudget, totals: AgentTotals| {
            let view = AgentView { budget, totals, ..AgentView::default() };
            BudgetLimit.check(&view) != Continuation::Continue
        };
        let none = AgentBudget::default();
        let limits =
            |turns, tokens, cost, wall| AgentBudget { turns, tokens, cost_microdollars: cost, wall_ms: wall };
        assert!(!pauses(none, used));
        assert!(!pauses(limits(Some(4), Some(61), Some(2_000_001), Some(5_001)), used));
        assert!(pauses(limits(Some(3), None, None, None), used));
        assert!(pauses(limits(None, Some(60), None, None), used));
        assert!(pauses(limits(None, None, Some(2_000_000), None), used));
        assert!(pauses(limits(None, None, None, Some(5_000)), used));
        let unpriced = AgentTotals { unpriced_answers: 1, ..used };
        assert!(pauses(limits(None, None, Some(9_000_000), None), unpriced));
    }
}
