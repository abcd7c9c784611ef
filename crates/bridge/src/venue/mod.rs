//! The risk router: the risk of a tool call decides where the call runs, by rules that are data.
//!
//! Invariant: every risk has exactly one rule, and a risk that this version does not know is refused.
//! Invariant: rules come from this program and from the user of the host, never from a repository.
//! Invariant: a slower venue is never a silent choice: an emulated microVM is used only if the rule says so, and the
//! result of a call that ran elsewhere says where, and why.

mod routed;
mod rules;
mod throwaway;

use brain::agent::{AgentView, BoxFuture, CallPlan, Judgement, Middleware};
use brain::model::ToolCall;
use fleet::Fleet;
use proto::{
    BodyId, Failure, Layer,
    event_data::{CallRisk, CallVenue},
    vm::Accelerator,
};

pub use routed::{CallRouting, RiskRules, ToolsIn, fork_tools, raise_risks, route_tools};
pub use rules::{VenueChoice, VenueRule, VenueRules};
pub use throwaway::ThrowawayBody;

/// Whether this host can give a call a microVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MicrovmSupport {
    /// The Body is a microVM, and so is each fork of it.
    BodyIsOne,
    /// A boot has proved that microVMs run.
    Proven(Accelerator),
    /// They do not run, for this reason.
    Missing(String),
}

impl MicrovmSupport {
    /// Looks at the host and the agent's Body. Nothing boots.
    pub fn find(fleet: &Fleet, body: &BodyId) -> Result<Self, Failure> {
        if fleet.view(body)?.spec.layer == Layer::Microvm {
            return Ok(Self::BodyIsOne);
        }
        Ok(match fleet.microvms().proven_accelerator() {
            Ok(accelerator) => Self::Proven(accelerator),
            Err(why) => Self::Missing(why),
        })
    }
}

/// The place that a rule chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallRoute {
    /// The call runs there.
    Run {
        /// The place.
        venue: CallVenue,
        /// The rule, and the reason for a second choice.
        why: String,
    },
    /// The call is refused.
    Refuse {
        /// The rule.
        why: String,
    },
}

/// Chooses the venue of each call of one agent.
#[derive(Debug, Clone)]
pub struct VenueRouter {
    rules: VenueRules,
    microvms: MicrovmSupport,
}

impl VenueRouter {
    /// Routes by these rules on a host with this support.
    pub fn new(rules: VenueRules, microvms: MicrovmSupport) -> Self {
        Self { rules, microvms }
    }

    /// The place for a call of this risk.
    pub fn route(&self, risk: &CallRisk) -> CallRoute {
        let Some(rule) = self.rules.find(risk) else {
            return CallRoute::Refuse { why: "no rule says where a call of this risk runs".to_owned() };
        };
        let why = rule.why.clone();
        match (rule.run, &self.microvms) {
            (VenueChoice::Microvm, MicrovmSupport::BodyIsOne | MicrovmSupport::Proven(Accelerator::Kvm)) => {
                CallRoute::Run { venue: CallVenue::Microvm, why }
            }
            (VenueChoice::Microvm, MicrovmSupport::Proven(Accelerator::Emulated)) if rule.emulated => {
                CallRoute::Run { venue: CallVenue::Microvm, why: format!("{why}; the microVM is emulated") }
            }
            (VenueChoice::Microvm, MicrovmSupport::Proven(Accelerator::Emulated)) => {
                let lack =
                    "this host only emulates microVMs, which is slow, and the rule does not ask for that";
                choose(rule.otherwise, format!("{why}; no microVM: {lack}"))
            }
            (VenueChoice::Microvm, MicrovmSupport::Missing(lack)) => {
                choose(rule.otherwise, format!("{why}; no microVM: {lack}"))
            }
            (run, _) => choose(run, why),
        }
    }

    /// The plan with the venue that the rules choose. A plan for another place than the Body stays as it is.
    pub fn apply(&self, plan: CallPlan) -> CallPlan {
        if plan.venue != CallVenue::Body {
            return plan;
        }
        match self.route(&plan.risk) {
            // The tool knows that it acts in the Body; nothing can act in a log.
            CallRoute::Run { venue: CallVenue::Agent | CallVenue::Body, .. } | CallRoute::Refuse { .. } => {
                plan
            }
            CallRoute::Run { venue, why } => CallPlan { venue, why: format!("{}: {why}", plan.why), ..plan },
        }
    }

    /// The reason why a planned call must not run, if there is one.
    fn objection(&self, plan: &CallPlan) -> Option<String> {
        if !matches!(plan.venue, CallVenue::Body | CallVenue::Fork | CallVenue::Microvm) {
            return None;
        }
        match self.route(&plan.risk) {
            CallRoute::Refuse { why } => Some(format!("calls of this risk are refused: {why}")),
            CallRoute::Run { venue: CallVenue::Fork | CallVenue::Microvm, why }
                if plan.venue == CallVenue::Body =>
            {
                Some(format!("this tool can only act in the Body itself, and a rule forbids that: {why}"))
            }
            CallRoute::Run { .. } => None,
        }
    }
}

fn choose(choice: VenueChoice, why: String) -> CallRoute {
    match choice {
        VenueChoice::Agent => CallRoute::Run { venue: CallVenue::Agent, why },
        VenueChoice::Body => CallRoute::Run { venue: CallVenue::Body, why },
        VenueChoice::Fork => CallRoute::Run { venue: CallVenue::Fork, why },
        VenueChoice::Microvm => CallRoute::Run { venue: CallVenue::Microvm, why },
        VenueChoice::Refuse => CallRoute::Refuse { why },
    }
}

/// Refuses calls that the rules refuse, and calls of tools that cannot act where the rules want them.
impl Middleware for VenueRouter {
    fn name(&self) -> &'static str {
        "venue"
    }

    fn judge<'a>(
        &'a self,
        _: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        Box::pin(async move {
            match self.objection(plan) {
                Some(why) => Judgement::Deny(format!("{} was not carried out: {why}.", call.name)),
                None => Judgement::Allow,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(text: &str, microvms: MicrovmSupport) -> VenueRouter {
        VenueRouter::new(VenueRules::shipped().unwrap().replaced_by(text).unwrap(), microvms)
    }

    fn missing() -> MicrovmSupport {
        MicrovmSupport::Missing("it is not set up".into())
    }

    fn word(route: &CallRoute) -> String {
        match route {
            CallRoute::Run { venue, .. } => String::from(venue.clone()),
            CallRoute::Refuse { .. } => "refuse".into(),
        }
    }

    #[test]
    fn each_risk_has_its_venue_on_each_host() {
        let risks = ["pure", "read", "workspace", "outside", "untrusted", "odd"];
        let table = [
            ("", missing(), "agent body body body fork refuse"),
            ("", MicrovmSupport::Proven(Accelerator::Emulated), "agent body body body fork refuse"),
            ("", MicrovmSupport::Proven(Accelerator::Kvm), "agent body body body microvm refuse"),
            ("", MicrovmSupport::BodyIsOne, "agent body body body microvm refuse"),
            (
                "[[venue]]\nrisk = 'untrusted'\nrun = 'microvm'\nemulated = true\nwhy = 'w'",
                MicrovmSupport::Proven(Accelerator::Emulated),
                "agent body body body microvm refuse",
            ),
            (
                "[[venue]]\nrisk = 'untrusted'\nrun = 'microvm'\nwhy = 'w'\n[[venue]]\nrisk = 'read'\nrun = 'fork'\nwhy = 'w'",
                missing(),
                "agent fork body body refuse refuse",
            ),
        ];
        for (text, support, expected) in table {
            let router = router(text, support.clone());
            let found: Vec<String> =
                risks.iter().map(|risk| word(&router.route(&CallRisk::from((*risk).to_owned())))).collect();
            assert_eq!(found.join(" "), expected, "{text} {support:?}");
        }
    }

    #[test]
    fn a_second_choice_says_why() {
        let CallRoute::Run { why, .. } = router("", missing()).route(&CallRisk::Untrusted) else {
            panic!("it runs in a fork")
        };
        assert!(why.contains("no microVM: it is not set up"), "{why}");
    }

    #[test]
    fn a_tool_that_cannot_leave_the_body_is_refused_and_others_are_moved() {
        let router = router("", missing());
        let untrusted = CallPlan { risk: CallRisk::Untrusted, ..CallPlan::working("test") };
        assert!(router.objection(&untrusted).is_some_and(|why| why.contains("only act in the Body")));
        let moved = router.apply(untrusted);
        assert_eq!(moved.venue, CallVenue::Fork);
        assert_eq!(router.objection(&moved), None);
        let working = CallPlan::working("test");
        assert_eq!(router.apply(working.clone()), working);
        assert_eq!(router.objection(&working), None);
        let server = CallPlan { venue: CallVenue::Server, risk: CallRisk::Outside, ..working };
        assert_eq!(router.objection(&router.apply(server.clone())), None);
    }
}
