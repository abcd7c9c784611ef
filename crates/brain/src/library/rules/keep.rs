//! A rule from a decision: the call that a person approved for good, as text for the file of rules.

use serde_json::{Map, Value};

use super::{PathPattern, shell_argument};
use crate::library::command::{Word, WordPattern, read_command};

/// The arguments of file tools that name a file.
const PATH_ARGUMENTS: &[&str] = &["file_path", "path"];
/// The longest reason, in characters.
const WHY_LEN_MAX: usize = 400;

/// A rule in TOML that allows a call like this one: exactly these commands, this file, or this tool. An error says why
/// no rule can be made.
pub fn keep_rule(tool: &str, arguments: &Map<String, Value>, why: &str) -> Result<String, String> {
    let why: String =
        why.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(WHY_LEN_MAX).collect();
    let why = why.as_str();
    if let Some(text) = shell_argument(tool, arguments) {
        return keep_commands(text, why);
    }
    let path = PATH_ARGUMENTS.iter().find_map(|name| arguments.get(*name)).and_then(Value::as_str);
    let path = path.map(|path| format!("path = {}\n", quote(&PathPattern::escape(path)))).unwrap_or_default();
    Ok(format!(
        "\n[[rule]]\ndecision = \"allow\"\ntool = {}\n{path}why = {}\n",
        quote(&WordPattern::escape(tool)),
        quote(why)
    ))
}

/// One rule for each command of the text.
fn keep_commands(text: &str, why: &str) -> Result<String, String> {
    let line = read_command(text);
    if let Some(unknown) = line.unknown.first() {
        return Err(format!("no rule can be made of this command, because a part is not known: {unknown}"));
    }
    let mut rules = String::new();
    for call in &line.calls {
        let words: Option<Vec<&str>> = call.words.iter().map(Word::as_exact).collect();
        let words = words.ok_or("no rule can be made of this command, because a word of it is computed")?;
        let tokens: Vec<String> = words.iter().map(|word| quote(&WordPattern::escape(word))).collect();
        let rule = format!(
            "\n[[rule]]\ndecision = \"allow\"\ncommand = [{}]\nwhy = {}\n",
            tokens.join(", "),
            quote(why)
        );
        if !rules.contains(&rule) {
            rules.push_str(&rule);
        }
    }
    if rules.is_empty() { Err("the command starts no program".to_owned()) } else { Ok(rules) }
}

/// A text as TOML writes it.
fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            letter if letter.is_control() => quoted.push_str(&format!("\\u{:04x}", u32::from(letter))),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}
