//! Roles, plans, skills, rules and hooks of a hostile repository or a careless user: each is read, or refused with a line
//! of its text.
#![no_main]

use brain::{
    agent::middleware::{HookSet, MemoryFile, memory_prompt, skills_prompt},
    library::{LibraryError, PlanTemplate, Role, RuleSet, Skill},
};
use libfuzzer_sys::fuzz_target;

fn check<T>(read: Result<T, LibraryError>, text: &str) -> Option<T> {
    if let Err(error) = &read {
        assert!(error.line >= 1 && error.line <= text.lines().count() + 2, "{error}");
        assert!(!error.fault.is_empty() && !error.mend.is_empty());
    }
    read.ok()
}

fuzz_target!(|input: &[u8]| {
    let Some((kind, input)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(input) else { return };
    match kind % 6 {
        0 => drop(check(Role::parse("f", text), text)),
        1 => drop(check(PlanTemplate::parse("f", text), text)),
        2 => {
            if let Some(skill) = check(Skill::parse("SKILL.md", text), text) {
                let prompt = skills_prompt([&skill]).expect("a prompt");
                assert_eq!(prompt.matches("</skills").count(), 1);
            }
        }
        3 => drop(check(RuleSet::parse("f", text), text)),
        4 => drop(check(HookSet::parse("f", text), text)),
        _ => {
            let file = MemoryFile { path: "/AGENTS.md".to_owned(), text: text.to_owned() };
            if let Some(prompt) = memory_prompt(&[file]) {
                assert_eq!(prompt.matches("</agent_memory").count(), 1);
            }
        }
    }
});
