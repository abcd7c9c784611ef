//! Budgets of agents that are driven together: what a sub-agent spends, each agent above it spends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brain::{
    agent::{
        AgentTotals, AgentView, BoxFuture, CallPlan, Continuation, Judgement, Middleware,
        middleware::find_exceeded,
    },
    model::ToolCall,
};
use proto::event_data::{AgentBudget, AgentPause};

/// The spending of one agent that is driven, and of its sub-agents that run.
#[derive(Debug, Default)]
pub struct SpendMeter {
    above: Option<Arc<SpendMeter>>,
    known: Mutex<MeterState>,
}

#[derive(Debug, Default)]
struct MeterState {
    /// Whether the numbers of the agent are known yet.
    is_noted: bool,
    budget: AgentBudget,
    /// The totals when none of its sub-agents ran, with those of its sub-agents that had ended by then.
    own: AgentTotals,
    /// Sub-agents that the agent started since then.
    below: Vec<Arc<SpendMeter>>,
}

impl SpendMeter {
    /// The meter of a new sub-agent.
    pub fn below(above: &Arc<Self>) -> Arc<Self> {
        let meter = Arc::new(Self { above: Some(Arc::clone(above)), ..Self::default() });
        above.known().below.push(Arc::clone(&meter));
        meter
    }

    fn known(&self) -> MutexGuard<'_, MeterState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of an agent none of whose sub-agents runs: its totals have theirs.
    fn note(&self, view: &AgentView) {
        *self.known() =
            MeterState { is_noted: true, budget: view.budget.clone(), own: view.totals, below: Vec::new() };
    }

    /// Takes note of an agent whose driver goes on with calls of an earlier one, before its first request.
    pub fn note_once(&self, view: &AgentView) {
        let mut known = self.known();
        if !known.is_noted {
            (known.is_noted, known.budget, known.own) = (true, view.budget.clone(), view.totals);
        }
    }

    /// The totals of the agent and of its sub-agents that run.
    fn total(&self) -> AgentTotals {
        let known = self.known();
        known.below.iter().fold(known.own, |total, meter| plus(total, meter.total()))
    }

    /// The budget that is left.
    pub fn rest(&self) -> AgentBudget {
        // Two statements: the lock of the first must be free for the second.
        let budget = self.known().budget.clone();
        let spent = self.total();
        let less = |limit: Option<u64>, used: u64| limit.map(|limit| limit.saturating_sub(used));
        let tokens = spent.usage.total_input().saturating_add(spent.usage.output);
        AgentBudget {
            turns: less(budget.turns, spent.answers),
            tokens: less(budget.tokens, tokens),
            cost_microdollars: less(budget.cost_microdollars, spent.cost_microdollars),
            wall_ms: less(budget.wall_ms, spent.model_ms.saturating_add(spent.tool_ms)),
        }
    }

    /// The limit of this agent that its spending has reached.
    fn exceeded(&self) -> Option<String> {
        let budget = self.known().budget.clone();
        find_exceeded(&budget, &self.total())
    }
}

/// Adds up what agents spend. The time of a sub-agent is part of the call that its parent waits for.
fn plus(total: AgentTotals, more: AgentTotals) -> AgentTotals {
    AgentTotals {
        answers: total.answers.saturating_add(more.answers),
        usage: total.usage.plus(more.usage),
        cost_microdollars: total.cost_microdollars.saturating_add(more.cost_microdollars),
        unpriced_answers: total.unpriced_answers.saturating_add(more.unpriced_answers),
        ..total
    }
}

/// Pauses an agent when the budget of one above it is used up.
pub struct SharedBudget {
    meter: Arc<SpendMeter>,
}

impl SharedBudget {
    /// Watches the budgets above this meter's agent.
    pub fn new(meter: Arc<SpendMeter>) -> Self {
        Self { meter }
    }
}

impl Middleware for SharedBudget {
    fn name(&self) -> &'static str {
        "shared budget"
    }

    fn check(&self, view: &AgentView) -> Continuation {
        self.meter.note(view);
        let mut above = self.meter.above.clone();
        while let Some(meter) = above {
            if let Some(limit) = meter.exceeded() {
                let why = format!("an agent above this one has no budget left: {limit}");
                return Continuation::Pause { reason: AgentPause::Budget, why };
            }
            above = meter.above.clone();
        }
        Continuation::Continue
    }

    /// Calls are judged before the first of them starts.
    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        _: &'a ToolCall,
        _: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        self.meter.note(view);
        Box::pin(async { Judgement::Allow })
    }
}

#[cfg(test)]
mod tests {
    use brain::model::TokenUsage;

    use super::*;

    fn view(turns: Option<u64>, answers: u64, output: u64) -> AgentView {
        let totals = AgentTotals {
            answers,
            usage: TokenUsage { output, ..TokenUsage::default() },
            ..AgentTotals::default()
        };
        to_view(AgentBudget { turns, ..AgentBudget::default() }, totals)
    }

    fn to_view(budget: AgentBudget, totals: AgentTotals) -> AgentView {
        let mut view = AgentView::default();
        (view.budget, view.totals) = (budget, totals);
        view
    }

    fn goes_on(meter: &Arc<SpendMeter>, view: &AgentView) -> bool {
        SharedBudget::new(Arc::clone(meter)).check(view) == Continuation::Continue
    }

    #[test]
    fn parallel_sub_agents_share_the_rest_of_all_agents_above() {
        let root = Arc::new(SpendMeter::default());
        assert!(goes_on(&root, &view(Some(10), 4, 0)));
        assert_eq!(root.rest().turns, Some(6));
        let (one, other) = (SpendMeter::below(&root), SpendMeter::below(&root));
        assert!(goes_on(&one, &view(None, 3, 0)));
        assert!(goes_on(&other, &view(None, 2, 0)));
        assert_eq!(root.rest().turns, Some(1));
        let deep = SpendMeter::below(&one);
        assert!(!goes_on(&deep, &view(None, 1, 0)), "4 + 3 + 2 + 1 answers are the budget of the root");
        assert!(!goes_on(&other, &view(None, 2, 0)));
        // The root's next request: the sub-agents have ended, and its totals have them.
        assert!(goes_on(&root, &view(Some(20), 10, 0)));
        assert_eq!(root.rest().turns, Some(10));
    }

    #[test]
    fn every_limit_has_a_rest() {
        let meter = SpendMeter::default();
        let budget =
            AgentBudget { turns: None, tokens: Some(100), cost_microdollars: Some(50), wall_ms: Some(1_000) };
        let totals = AgentTotals {
            usage: TokenUsage { input: 20, output: 10, ..TokenUsage::default() },
            cost_microdollars: 60,
            model_ms: 300,
            tool_ms: 100,
            ..AgentTotals::default()
        };
        meter.note_once(&to_view(budget, totals));
        let rest =
            AgentBudget { turns: None, tokens: Some(70), cost_microdollars: Some(0), wall_ms: Some(600) };
        assert_eq!(meter.rest(), rest);
    }
}
