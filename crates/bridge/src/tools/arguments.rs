//! Arguments of a call, read by the rules and refused in the words of Deep Agents' tools, which are pydantic's.
//!
//! Invariant: an argument that is not known is ignored; a missing or wrong one is an error that names it.

use serde_json::{Map, Value};

use super::python;

/// How much of the arguments an error shows, in characters.
const SHOWN_LEN_MAX: usize = 2000;

/// Reads the arguments of one call, and collects the errors.
pub struct ArgumentReader<'a> {
    tool: &'static str,
    arguments: &'a Map<String, Value>,
    errors: Vec<String>,
}

impl<'a> ArgumentReader<'a> {
    /// Reads these arguments of a tool.
    pub fn new(tool: &'static str, arguments: &'a Map<String, Value>) -> Self {
        Self { tool, arguments, errors: Vec::new() }
    }

    /// An argument that must be there.
    fn required(&mut self, name: &str) -> Option<&'a Value> {
        let value = self.arguments.get(name);
        if value.is_none() {
            self.refuse(name, "Field required");
        }
        value
    }

    /// An argument that may be missing or null.
    fn optional(&self, name: &str) -> Option<&'a Value> {
        self.arguments.get(name).filter(|value| !value.is_null())
    }

    /// Notes an error about an argument.
    pub fn refuse(&mut self, name: &str, message: &str) {
        self.errors.push(format!("{name}: {message}"));
    }

    /// A text.
    pub fn text(&mut self, name: &str) -> &'a str {
        let value = self.required(name);
        self.as_text(name, value).unwrap_or_default()
    }

    /// A text that may be missing.
    pub fn optional_text(&mut self, name: &str) -> Option<&'a str> {
        let value = self.optional(name);
        self.as_text(name, value)
    }

    fn as_text(&mut self, name: &str, value: Option<&'a Value>) -> Option<&'a str> {
        match value? {
            Value::String(text) => Some(text),
            _ => {
                self.refuse(name, "Input should be a valid string");
                None
            }
        }
    }

    /// A whole number that may be missing.
    pub fn optional_integer(&mut self, name: &str) -> Option<i64> {
        match as_integer(self.optional(name)?) {
            Ok(number) => Some(number),
            Err(message) => {
                self.refuse(name, message);
                None
            }
        }
    }

    /// A whole number that must be there.
    pub fn integer(&mut self, name: &str) -> i64 {
        match self.required(name).map(as_integer) {
            Some(Ok(number)) => number,
            Some(Err(message)) => {
                self.refuse(name, message);
                0
            }
            None => 0,
        }
    }

    /// A truth value; false if it is missing.
    pub fn flag(&mut self, name: &str) -> bool {
        let Some(value) = self.optional(name) else { return false };
        match value {
            Value::Bool(flag) => *flag,
            Value::String(text) => match text.to_ascii_lowercase().as_str() {
                "true" | "t" | "yes" | "y" | "on" | "1" => true,
                "false" | "f" | "no" | "n" | "off" | "0" => false,
                _ => {
                    self.refuse(name, "Input should be a valid boolean, unable to interpret input");
                    false
                }
            },
            Value::Number(number) if number.as_f64() == Some(0.0) => false,
            Value::Number(number) if number.as_f64() == Some(1.0) => true,
            _ => {
                self.refuse(name, "Input should be a valid boolean");
                false
            }
        }
    }

    /// One of some words; the first one if it is missing.
    pub fn word(&mut self, name: &str, words: &[&'static str]) -> &'static str {
        let default = words.first().copied().unwrap_or_default();
        let Some(value) = self.optional(name) else { return default };
        match words.iter().find(|word| value.as_str() == Some(word)) {
            Some(word) => word,
            None => {
                self.refuse(name, &choice_error(words));
                default
            }
        }
    }

    /// A list.
    pub fn list(&mut self, name: &str) -> &'a [Value] {
        match self.required(name) {
            Some(Value::Array(values)) => values,
            Some(_) => {
                self.refuse(name, "Input should be a valid list");
                &[]
            }
            None => &[],
        }
    }

    /// An error for the model if an argument is missing or wrong.
    pub fn finish(self) -> Result<(), String> {
        if self.errors.is_empty() {
            return Ok(());
        }
        let shown = python::repr_value(&Value::Object(self.arguments.clone()));
        let shown: String = match shown.char_indices().nth(SHOWN_LEN_MAX) {
            Some((end, _)) => format!("{}...", &shown[..end]),
            None => shown,
        };
        Err(format!(
            "Error invoking tool '{}' with kwargs {shown} with error:\n {}\n Please fix the error and try again.",
            self.tool,
            self.errors.join("\n")
        ))
    }
}

/// The words of an error about a value that is none of some words.
pub fn choice_error(words: &[&str]) -> String {
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => {
            let rest: Vec<String> = rest.iter().map(|word| format!("'{word}'")).collect();
            format!("Input should be {} or '{last}'", rest.join(", "))
        }
        _ => format!("Input should be '{}'", words.join("")),
    }
}

/// A whole number, also from a text or from a number with a decimal point.
fn as_integer(value: &Value) -> Result<i64, &'static str> {
    const WRONG: &str = "Input should be a valid integer";
    match value {
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Ok(number),
            (None, Some(number)) if number.fract() != 0.0 => {
                Err("Input should be a valid integer, got a number with a fractional part")
            }
            // Within these bounds a float is exact enough; beyond them no argument makes sense.
            (None, Some(number)) if number.abs() < 1e15 => Ok(number as i64),
            _ => Err(WRONG),
        },
        Value::String(text) => text
            .trim()
            .parse()
            .map_err(|_| "Input should be a valid integer, unable to parse string as an integer"),
        Value::Bool(flag) => Ok(i64::from(*flag)),
        _ => Err(WRONG),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(arguments: Value, read: impl Fn(&mut ArgumentReader<'_>)) -> String {
        let arguments = arguments.as_object().cloned().unwrap();
        let mut reader = ArgumentReader::new("tool", &arguments);
        read(&mut reader);
        reader.finish().err().unwrap_or_default()
    }

    fn read_mode(read: &mut ArgumentReader<'_>) {
        read.word("mode", &["files_with_matches", "content", "count"]);
    }

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn errors_are_those_of_deep_agents() {
        assert_eq!(
            error(json!({}), |read| {
                read.text("path");
            }),
            "Error invoking tool 'tool' with kwargs {} with error:\n path: Field required\n Please fix the error and try again."
        );
        assert_eq!(
            error(json!({"path": 3}), |read| {
                read.text("path");
            }),
            "Error invoking tool 'tool' with kwargs {'path': 3} with error:\n path: Input should be a valid string\n Please fix the error and try again."
        );
        assert!(
            error(json!({"limit": "x"}), |read| {
                read.optional_integer("limit");
            })
            .contains(" limit: Input should be a valid integer, unable to parse string as an integer\n")
        );
        assert!(
            error(json!({"mode": "bad"}), read_mode)
                .contains(" mode: Input should be 'files_with_matches', 'content' or 'count'\n")
        );
    }

    #[test]
    fn values_that_are_almost_right_are_taken() {
        let arguments = json!({"a": "5", "b": 5.0, "c": "true", "d": null, "e": 1.5});
        let arguments = arguments.as_object().unwrap();
        let mut read = ArgumentReader::new("tool", arguments);
        assert_eq!((read.optional_integer("a"), read.optional_integer("b")), (Some(5), Some(5)));
        assert!(read.flag("c") && !read.flag("d"));
        assert_eq!(read.optional_text("d"), None);
        assert_eq!(read.optional_integer("e"), None);
        assert!(read.finish().is_err());
    }

    #[test]
    fn an_error_does_not_repeat_long_arguments() {
        let long = error(json!({"a": "x".repeat(1 << 20)}), |read| {
            read.text("b");
        });
        assert!(long.len() < 4096 && long.contains("xxx... with error:"));
    }
}
