//! `ask_user`: a question to the person for whom the agent works.

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallEffect, CallPlan, CallResult},
    model::ToolSchema,
};
use serde_json::{Map, Value, json};

use super::arguments::ArgumentReader;

const NAME: &str = "ask_user";
const DESCRIPTION: &str = "Asks the user a question and waits for the answer, which is the result of this call.

Usage:
- Ask only what you cannot find out with your other tools and what changes how you go on. The user may be away for a long time.
- Put everything that the user needs to decide into the question.
- Offer `choices` if there are a few good answers. The user may answer something else.";
/// The longest question, in characters.
const QUESTION_LEN_MAX: usize = 8000;
/// The most answers to choose from.
const CHOICES_MAX: usize = 16;
/// The longest answer to choose from, in characters.
const CHOICE_LEN_MAX: usize = 500;

/// Asks a person.
pub struct AskTool;

impl AgentTool for AskTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "question": {"type": "string", "description": "The question, with everything that is needed to answer it."},
                    "choices": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": null,
                        "description": "Answers to choose from.",
                    },
                },
                "required": ["question"],
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        read(arguments).map(|_| CallPlan::in_log(NAME))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            match read(&context.arguments) {
                Ok((question, choices)) => {
                    let effect = Some(CallEffect::Ask { question, choices });
                    CallResult { effect, ..CallResult::text("") }
                }
                Err(text) => CallResult::error(text),
            }
        })
    }

    /// The question was not recorded, so that it is asked now.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { Some(self.run(context).await) })
    }
}

fn read(arguments: &Map<String, Value>) -> Result<(String, Vec<String>), String> {
    let mut read = ArgumentReader::new(NAME, arguments);
    let question = read.text("question");
    if question.trim().is_empty() && arguments.get("question").is_some_and(Value::is_string) {
        read.refuse("question", "String should have at least 1 character");
    }
    if question.chars().count() > QUESTION_LEN_MAX {
        read.refuse("question", &format!("String should have at most {QUESTION_LEN_MAX} characters"));
    }
    let mut choices = Vec::new();
    if arguments.get("choices").is_some_and(|choices| !choices.is_null()) {
        for (index, choice) in read.list("choices").iter().enumerate() {
            match choice.as_str() {
                Some(text) if text.chars().count() <= CHOICE_LEN_MAX => choices.push(text.to_owned()),
                Some(_) => read.refuse(
                    &format!("choices.{index}"),
                    &format!("String should have at most {CHOICE_LEN_MAX} characters"),
                ),
                None => read.refuse(&format!("choices.{index}"), "Input should be a valid string"),
            }
            if index >= CHOICES_MAX {
                read.refuse("choices", &format!("List should have at most {CHOICES_MAX} items"));
                break;
            }
        }
    }
    read.finish()?;
    Ok((question.to_owned(), choices))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(arguments: Value) -> Result<(String, Vec<String>), String> {
        read(arguments.as_object().unwrap())
    }

    #[test]
    fn a_question_has_limits() {
        assert_eq!(
            asked(json!({"question": "Which?", "choices": ["a", "b"]})).unwrap(),
            ("Which?".to_owned(), vec!["a".to_owned(), "b".to_owned()])
        );
        assert_eq!(asked(json!({"question": "Which?", "choices": null})).unwrap().1, Vec::<String>::new());
        for bad in [
            json!({}),
            json!({"question": " "}),
            json!({"question": "x".repeat(QUESTION_LEN_MAX + 1)}),
            json!({"question": "a", "choices": "b"}),
            json!({"question": "a", "choices": vec!["b"; 17]}),
            json!({"question": "a", "choices": [1]}),
        ] {
            assert!(asked(bad).is_err());
        }
    }
}
