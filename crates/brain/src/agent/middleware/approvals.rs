//! Approval modes: which risks an agent takes by itself, and which need a person.
//!
//! Invariant: a mode is a convenience, never the security boundary. The Body is the boundary: a call that is allowed
//! here can do no more than the Body lets it.

use proto::event_data::{ApprovalMode, CallRisk};

use super::{Judgement, Middleware};
use crate::{
    agent::{call::CallPlan, journal::BoxFuture, view::AgentView},
    model::ToolCall,
};

/// Judges calls by the agent's mode and the risk of the call.
#[derive(Debug, Default)]
pub struct ModeRules;

impl Middleware for ModeRules {
    fn name(&self) -> &'static str {
        "approvals"
    }

    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        let mode = view.spec.as_ref().map_or(ApprovalMode::Ask, |spec| spec.mode.clone());
        Box::pin(async move {
            match judge_risk(&mode, &plan.risk, &plan.why, &call.name) {
                Judgement::Ask(rule) if view.granted.contains(&rule) => Judgement::Allow,
                judgement => judgement,
            }
        })
    }
}

/// The judgement of a mode about a risk. A question about an effect outside of the Body contains the reason for the risk,
/// so that a grant for one kind of effect is not one for all.
pub(super) fn judge_risk(mode: &ApprovalMode, risk: &CallRisk, why: &str, tool: &str) -> Judgement {
    let reads = matches!(risk, CallRisk::Pure | CallRisk::Read);
    let stays = reads || matches!(risk, CallRisk::Workspace | CallRisk::Untrusted);
    match mode {
        ApprovalMode::Plan if !reads => Judgement::Deny(format!(
            "{tool} is not allowed in plan mode: the agent only reads. Describe what you would do instead."
        )),
        ApprovalMode::Never if !stays => Judgement::Deny(format!(
            "{tool} has an effect outside of the Body ({why}), and no person is there to approve it."
        )),
        ApprovalMode::Ask | ApprovalMode::Other(_) if !stays => {
            Judgement::Ask(format!("mode ask: {tool} has an effect outside of the Body: {why}"))
        }
        ApprovalMode::Ask | ApprovalMode::Other(_) if !reads => {
            Judgement::Ask(format!("mode ask: {tool} changes something"))
        }
        ApprovalMode::Auto if !stays => {
            Judgement::Ask(format!("mode auto: {tool} has an effect outside of the Body: {why}"))
        }
        _ => Judgement::Allow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_judges_each_risk() {
        let word = |mode: &ApprovalMode, risk: CallRisk| match judge_risk(mode, &risk, "w", "t") {
            Judgement::Allow => 'y',
            Judgement::Ask(_) => '?',
            Judgement::Deny(_) => 'n',
        };
        let table = [
            (ApprovalMode::Plan, "yynnn"),
            (ApprovalMode::Ask, "yy???"),
            (ApprovalMode::Auto, "yyy?y"),
            (ApprovalMode::Never, "yyyny"),
            (ApprovalMode::Other("later".into()), "yy???"),
        ];
        for (mode, expected) in table {
            let risks =
                [CallRisk::Pure, CallRisk::Read, CallRisk::Workspace, CallRisk::Outside, CallRisk::Untrusted];
            let found: String = risks.into_iter().map(|risk| word(&mode, risk)).collect();
            assert_eq!(found, expected, "{mode:?}");
        }
    }
}
