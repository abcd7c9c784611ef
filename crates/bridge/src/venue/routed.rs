//! Tools whose calls may run in a Body for one call instead of the agent's own.

use std::sync::Arc;

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult, ToolRegistry},
    library::RuleSet,
    model::{ResultBlock, ToolSchema},
};
use fleet::{Fleet, GitIdentity};
use proto::{
    BodyId, Failure,
    event_data::{CallRisk, CallVenue},
};
use serde_json::{Map, Value};

use super::{CallRoute, ThrowawayBody, VenueRouter};

/// Makes the tools of an agent that works in this Body.
pub type ToolsIn = Arc<dyn Fn(&BodyId) -> ToolRegistry + Send + Sync>;

/// Finds a higher risk of a call than its tool does, such as that of a command that runs downloaded code.
pub trait RiskRules: Send + Sync {
    /// The risk, and the rule that says so; none if the plan of the tool stands.
    fn find_risk(
        &self,
        tool: &str,
        arguments: &Map<String, Value>,
        plan: &CallPlan,
    ) -> Option<(CallRisk, String)>;
}

/// The rules of the user and those that are part of Palisade know the risks of commands.
impl RiskRules for RuleSet {
    fn find_risk(
        &self,
        tool: &str,
        arguments: &Map<String, Value>,
        _: &CallPlan,
    ) -> Option<(CallRisk, String)> {
        self.risk_of_call(tool, arguments)
    }
}

/// The parts that carry a call to its venue.
pub struct CallRouting {
    /// The router.
    pub router: Arc<VenueRouter>,
    /// The rules about risks.
    pub risks: Arc<dyn RiskRules>,
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// Makes the tools for another Body.
    pub tools_in: ToolsIn,
    /// The git identity of the user, for the repository in a microVM.
    pub person: GitIdentity,
}

/// Replaces tools by ones whose calls run where the router wants them. The tools of these names must end their work with
/// their call: a Body for one call is removed at its end.
pub fn route_tools(tools: &mut ToolRegistry, names: &[&str], routing: &Arc<CallRouting>) {
    wrap_tools(tools, names, routing, PlaceChoice::Routed);
}

/// Replaces tools by ones whose plans have the risks that the rules find, for tools that can only act in the Body. The
/// router refuses calls that a rule wants elsewhere.
pub fn raise_risks(tools: &mut ToolRegistry, names: &[&str], routing: &Arc<CallRouting>) {
    wrap_tools(tools, names, routing, PlaceChoice::Body);
}

/// Replaces tools by ones each of whose calls runs in a fork of the Body that is thrown away, for an agent that only reads.
pub fn fork_tools(tools: &mut ToolRegistry, names: &[&str], routing: &Arc<CallRouting>) {
    wrap_tools(tools, names, routing, PlaceChoice::Fork);
}

fn wrap_tools(tools: &mut ToolRegistry, names: &[&str], routing: &Arc<CallRouting>, choice: PlaceChoice) {
    for name in names {
        if let Some(inner) = tools.get(name).cloned() {
            tools.add(Arc::new(RoutedTool { inner, routing: Arc::clone(routing), choice }));
        }
    }
}

/// How the place of a call is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlaceChoice {
    /// By the router.
    Routed,
    /// It is always the Body.
    Body,
    /// It is always a fork.
    Fork,
}

/// A tool that a router moves.
struct RoutedTool {
    inner: Arc<dyn AgentTool>,
    routing: Arc<CallRouting>,
    choice: PlaceChoice,
}

impl AgentTool for RoutedTool {
    fn schema(&self) -> ToolSchema {
        self.inner.schema()
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let mut plan = self.inner.plan(arguments)?;
        if self.choice == PlaceChoice::Fork {
            let why = "this agent only reads".to_owned();
            // Its changes go with the fork, so that for the agent's Body it is a call that reads.
            return Ok(CallPlan { risk: CallRisk::Read, venue: CallVenue::Fork, why, writes: Vec::new() });
        }
        let found = self.routing.risks.find_risk(&self.schema().name, arguments, &plan);
        if let Some((risk, rule)) = found {
            plan = CallPlan { risk, why: rule, ..plan };
        }
        Ok(match self.choice {
            PlaceChoice::Body => plan,
            PlaceChoice::Routed | PlaceChoice::Fork => self.routing.router.apply(plan),
        })
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            match context.plan.venue {
                CallVenue::Fork | CallVenue::Microvm => self.run_elsewhere(context).await,
                // A person may have changed the arguments after the rules judged them.
                _ => match self.routing.router.route(&context.plan.risk) {
                    CallRoute::Refuse { why } => CallResult::denied(format!(
                        "{} was not carried out: calls of this risk are refused: {why}.",
                        context.tool
                    )),
                    CallRoute::Run { .. } => self.inner.run(context).await,
                },
            }
        })
    }

    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        match context.plan.venue {
            // The Body of the interrupted call is gone, and so is every effect of the call.
            CallVenue::Fork | CallVenue::Microvm => Box::pin(async move { Some(self.run(context).await) }),
            _ => self.inner.recover(context),
        }
    }
}

impl RoutedTool {
    async fn run_elsewhere(&self, context: CallContext) -> CallResult {
        let why = context.plan.why.clone();
        let place = match self.open_place(&context).await {
            Ok(place) => place,
            Err(failure) => {
                return CallResult::error(format!(
                    "Error: the call was not carried out, because it may only run in a Body of its own, and none could \
                     be created: {}",
                    in_words(&failure)
                ));
            }
        };
        let Some(body) = place.id().cloned() else { return CallResult::unknown() };
        let tools = (self.routing.tools_in)(&body);
        let name = context.tool.clone();
        let venue = context.plan.venue.clone();
        let mut result = match tools.get(&name) {
            Some(tool) => tool.run(CallContext { body: Some(body), ..context }).await,
            None => CallResult::error(format!("Error: {name} cannot run in a Body of its own.")),
        };
        let removed = place.remove().await;
        result.blocks.push(ResultBlock::Text { text: describe(&venue, &why, removed.err().as_ref()) });
        result
    }

    async fn open_place(&self, context: &CallContext) -> Result<ThrowawayBody, Failure> {
        let Some(body) = &context.body else {
            return Err(Failure::new(proto::Kind::Conflict, "the agent has no Body"));
        };
        match context.plan.venue {
            CallVenue::Microvm => {
                ThrowawayBody::microvm(&self.routing.fleet, body, &self.routing.person).await
            }
            _ => ThrowawayBody::fork(&self.routing.fleet, body).await,
        }
    }
}

/// Tells the model where the call ran.
fn describe(venue: &CallVenue, why: &str, left: Option<&Failure>) -> String {
    let place = match venue {
        CallVenue::Microvm => "a fresh microVM with the files of the workspace",
        _ => "a fork of the Body",
    };
    let end = match left {
        None => "It was thrown away, so nothing that the call changed is left".to_owned(),
        Some(failure) => {
            format!("The Body is unchanged, but that place could not be removed: {}", in_words(failure))
        }
    };
    format!("[Ran in {place}, without network: {why}. {end}.]")
}

fn in_words(failure: &Failure) -> String {
    let causes = failure.causes();
    std::iter::once(failure.to_string()).chain(causes).collect::<Vec<_>>().join(": ")
}
