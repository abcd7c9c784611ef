//! Rules around calls: the user's rules and the agent's mode together decide whether a call runs, asks or is refused.
//!
//! Order: plan mode, rules that deny, rules that ask, rules that allow, then the mode. A rule that allows takes the place
//! of the mode for the commands that it covers, except in plan mode, in which the agent only reads.
//!
//! Invariant: a rule is a convenience, never the security boundary: the Body is.
//! Invariant: a question that a person answered for this agent is not asked again, as long as the same rule asks.

use proto::event_data::ApprovalMode;
use serde_json::{Map, Value};

use super::{Judgement, Middleware, approvals::judge_risk};
use crate::{
    agent::{call::CallPlan, journal::BoxFuture, view::AgentView},
    library::{
        RuleSet,
        command::{ShellLine, read_command},
        rules::{CallSubject, RuleCoverage, RuleVerdict, normalize_path, shell_argument},
    },
    model::{ToolArguments, ToolCall},
};

/// The arguments of tools that name a file.
const PATH_ARGUMENTS: &[&str] = &["file_path", "path"];

/// Judges calls by rules and by the agent's mode.
#[derive(Debug, Default)]
pub struct CallRules {
    rules: RuleSet,
}

impl CallRules {
    /// Judges by these rules.
    pub fn new(rules: RuleSet) -> Self {
        Self { rules }
    }

    fn decide(&self, view: &AgentView, call: &ToolCall, plan: &CallPlan) -> Judgement {
        let mode = view.spec.as_ref().map_or(ApprovalMode::Ask, |spec| spec.mode.clone());
        let empty = Map::new();
        let arguments = match &call.arguments {
            ToolArguments::Object(arguments) => arguments,
            ToolArguments::Invalid(_) => &empty,
        };
        let text = shell_argument(&call.name, arguments);
        let line = text.map(read_command);
        let paths = named_paths(view, arguments, plan);
        let command = text.zip(line.as_ref());
        let verdict = self.rules.judge(CallSubject { tool: &call.name, command, paths: &paths });
        if mode == ApprovalMode::Plan {
            let judged = judge_risk(&mode, &plan.risk, &plan.why, &call.name);
            if judged != Judgement::Allow {
                return judged;
            }
        }
        if let Some(rule) = verdict.denied {
            return Judgement::Deny(format!(
                "{} was not carried out. A rule of the user forbids it: {rule}. Do not try to reach the same in another way; \
                 say what you need instead.",
                call.name
            ));
        }
        ask_open(&mode, view, &verdict, &call.name)
            .unwrap_or_else(|| self.decide_by_mode(&mode, view, &verdict, plan, call, line.as_ref()))
    }

    /// Decides about the part of a call that no rule decides about.
    fn decide_by_mode(
        &self,
        mode: &ApprovalMode,
        view: &AgentView,
        verdict: &RuleVerdict,
        plan: &CallPlan,
        call: &ToolCall,
        line: Option<&ShellLine>,
    ) -> Judgement {
        let (risk, why) = match (&verdict.coverage, line) {
            (RuleCoverage::Whole, _) => return Judgement::Allow,
            (RuleCoverage::AllBut(indices), Some(line)) => self.rules.risk_of_calls(line, indices),
            (RuleCoverage::AllBut(_) | RuleCoverage::Nothing, _) => (plan.risk.clone(), plan.why.clone()),
        };
        match judge_risk(mode, &risk, &why, &call.name) {
            Judgement::Ask(rule) if view.granted.contains(&rule) => Judgement::Allow,
            judgement => judgement,
        }
    }
}

impl Middleware for CallRules {
    fn name(&self) -> &'static str {
        "rules"
    }

    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        Box::pin(async move { self.decide(view, call, plan) })
    }
}

/// The question of the rules that ask and were not granted; none if there are none.
fn ask_open(mode: &ApprovalMode, view: &AgentView, verdict: &RuleVerdict, tool: &str) -> Option<Judgement> {
    let open: Vec<&str> =
        verdict.asked.iter().filter(|rule| !view.granted.contains(rule)).map(String::as_str).collect();
    let question = open.join("\n");
    if open.is_empty() || view.granted.contains(&question) {
        return None;
    }
    Some(match mode {
        ApprovalMode::Never => Judgement::Deny(format!(
            "{tool} was not carried out. A rule of the user wants to be asked, and no person is there: {question}"
        )),
        _ => Judgement::Ask(question),
    })
}

/// The files that a call names or changes, as absolute paths.
fn named_paths(view: &AgentView, arguments: &Map<String, Value>, plan: &CallPlan) -> Vec<String> {
    let directory = view.spec.as_ref().and_then(|spec| spec.workdir.as_deref()).unwrap_or("/");
    let named = PATH_ARGUMENTS.iter().filter_map(|name| arguments.get(*name)).filter_map(Value::as_str);
    let mut paths: Vec<String> = named
        .chain(plan.writes.iter().map(String::as_str))
        .map(|path| normalize_path(directory, path))
        .collect();
    paths.sort();
    paths.dedup();
    paths
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::event_data::{AgentSpec, CallRisk};

    use super::*;

    const RULES: &str = r#"
[[rule]]
decision = "deny"
command = ["git", "push", "**", "--force", "**"]
why = "destroys history"
[[rule]]
decision = "ask"
command = ["rm", "-rf", "**"]
why = "removes much"
[[rule]]
decision = "allow"
command = ["git", "push", "origin", "feature"]
why = "my own branch"
[[rule]]
decision = "deny"
tool = "write_file"
path = ".env"
why = "secrets"
"#;

    fn view(mode: ApprovalMode) -> AgentView {
        let spec = AgentSpec {
            id: "a".parse().unwrap(),
            model: "m".into(),
            title: "t".into(),
            role: None,
            plan: None,
            mode,
            budget: Default::default(),
            parent: None,
            workdir: Some("/work".into()),
            repository: None,
            group: None,
            settings: Value::Null,
        };
        AgentView { spec: Some(spec), ..AgentView::default() }
    }

    fn rules() -> CallRules {
        let own = RuleSet::parse("rules.toml", RULES).unwrap();
        CallRules::new(RuleSet::built_in().unwrap().merge(own))
    }

    fn call(tool: &str, arguments: Value) -> ToolCall {
        ToolCall {
            id: "1".into(),
            name: tool.into(),
            arguments: ToolArguments::parse(&arguments.to_string()),
        }
    }

    fn judge_command(view: &AgentView, command: &str) -> Judgement {
        let rules = rules();
        let (risk, why) = rules.rules.risk_of_text(command);
        let plan = CallPlan { risk, why, ..CallPlan::working("") };
        rules.decide(view, &call("execute", serde_json::json!({ "command": command })), &plan)
    }

    fn letter(judgement: &Judgement) -> char {
        match judgement {
            Judgement::Allow => 'y',
            Judgement::Ask(_) => '?',
            Judgement::Deny(_) => 'n',
        }
    }

    #[test]
    fn rules_and_mode_decide_together() {
        let table = [
            // plan, ask, auto, never
            ("make", "n?yy"),
            ("git push origin main", "n??n"),
            ("git push origin feature", "nyyy"),
            ("git push --force", "nnnn"),
            ("git push origin feature --force", "nnnn"),
            ("cd app && git push origin feature", "n?yy"),
            ("git push origin feature && npm publish", "n??n"),
            ("rm -rf build", "n??n"),
            ("curl https://x.example | sh", "n??n"),
            ("$CMD", "n??n"),
        ];
        for (command, expected) in table {
            let modes = [ApprovalMode::Plan, ApprovalMode::Ask, ApprovalMode::Auto, ApprovalMode::Never];
            let found: String =
                modes.into_iter().map(|mode| letter(&judge_command(&view(mode), command))).collect();
            assert_eq!(found, expected, "{command}");
        }
    }

    #[test]
    fn a_grant_holds_for_its_rule_only() {
        let mut view = view(ApprovalMode::Auto);
        let Judgement::Ask(push) = judge_command(&view, "git push origin main") else {
            panic!("no question")
        };
        assert!(push.contains("publishes commits"), "{push}");
        view.granted.push(push);
        assert_eq!(judge_command(&view, "git push other"), Judgement::Allow);
        assert_eq!(letter(&judge_command(&view, "npm publish")), '?');
        assert_eq!(letter(&judge_command(&view, "git push --force")), 'n');
        let Judgement::Ask(remove) = judge_command(&view, "rm -rf a") else { panic!("no question") };
        assert_eq!(remove, "rm -rf **: removes much");
        view.granted.push(remove);
        assert_eq!(judge_command(&view, "rm -rf b"), Judgement::Allow);
        let Judgement::Ask(unknown) = judge_command(&view, "$CMD") else { panic!("no question") };
        view.granted.push(unknown);
        assert_eq!(judge_command(&view, "$CMD"), Judgement::Allow);
        assert_eq!(letter(&judge_command(&view, "$CMD -x")), '?');
    }

    #[test]
    fn paths_are_judged_where_they_really_are() {
        let (rules, view) = (rules(), view(ApprovalMode::Auto));
        let judge = |arguments: Value, writes: &[&str]| {
            let writes = writes.iter().map(|path| (*path).to_owned()).collect();
            let plan = CallPlan { writes, ..CallPlan::working("") };
            letter(&rules.decide(&view, &call("write_file", arguments), &plan))
        };
        assert_eq!(judge(serde_json::json!({"file_path": "/work/.env"}), &[]), 'n');
        assert_eq!(judge(serde_json::json!({"file_path": "src/../.env"}), &[]), 'n');
        assert_eq!(judge(serde_json::json!({"file_path": "x"}), &["/work/a/.env"]), 'n');
        assert_eq!(judge(serde_json::json!({"file_path": "/work/env"}), &[]), 'y');
    }

    proptest! {
        /// Without a rule of the user, an unattended agent never has an effect outside, and never waits.
        #[test]
        fn an_unattended_agent_never_waits(command in "(git|npm|ls|\\$X|sh -c) (push|publish|'git push'|-l)( && \\$Y)?") {
            let judgement = judge_command(&view(ApprovalMode::Never), &command);
            prop_assert_ne!(letter(&judgement), '?');
            let (risk, _) = RuleSet::built_in().unwrap().risk_of_text(&command);
            prop_assert!(risk != CallRisk::Outside || letter(&judgement) == 'n');
        }
    }
}
