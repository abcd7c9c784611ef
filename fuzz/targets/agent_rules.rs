//! Commands of a hostile model: any text is read, quoting hides nothing, and a command that a rule denies is never let
//! through, whatever follows it.
#![no_main]

use std::sync::LazyLock;

use brain::library::{
    RuleSet,
    command::{Word, read_command},
    risk_of_command,
    rules::{CallSubject, RuleCoverage},
};
use libfuzzer_sys::fuzz_target;

static RULES: LazyLock<RuleSet> = LazyLock::new(|| {
    let text = "[[rule]]\ndecision = \"deny\"\ncommand = [\"git\", \"push\", \"**\"]\nwhy = \"w\"\n\
                [[rule]]\ndecision = \"allow\"\ncommand = [\"git\", \"**\"]\nwhy = \"w\"\n";
    RuleSet::parse("rules", text).expect("rules")
});

/// Whether rules let a command run without a person.
fn is_allowed(text: &str) -> bool {
    let line = read_command(text);
    let verdict = RULES.judge(CallSubject { tool: "execute", command: Some((text, &line)), paths: &[] });
    verdict.denied.is_none() && verdict.asked.is_empty()
}

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let line = read_command(text);
    assert!(line.calls.len() <= 512 && line.calls.iter().all(|call| !call.words.is_empty()));
    let verdict = RULES.judge(CallSubject { tool: "execute", command: Some((text, &line)), paths: &[] });
    assert!(verdict.coverage != RuleCoverage::Whole || line.unknown.is_empty());
    risk_of_command(text);
    assert!(!is_allowed(&format!("git push; {text}")));
    if !text.contains('\0') {
        let quoted = format!("'{}'", text.replace('\'', "'\\''"));
        let line = read_command(&format!("git push {quoted}"));
        assert_eq!(line.calls[0].words[2], Word::exact(text));
        assert!(!is_allowed(&format!("sh -c 'git push' {quoted}")));
    }
});
