//! The neutral conversation: messages of blocks, as events store them and as every wire format can say them.
//!
//! Invariant: a block that only its provider understands is kept as text and goes back to the same provider
//! unchanged; another provider never sees it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Wire;

/// The side of a conversation that speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// The person, or a tool that answers.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The side that speaks.
    pub speaker: Speaker,
    /// The parts of the message, in order.
    pub blocks: Vec<ContentBlock>,
}

impl ChatMessage {
    /// A message of the user that is only text.
    pub fn from_user(text: impl Into<String>) -> Self {
        Self { speaker: Speaker::User, blocks: vec![ContentBlock::text(text)] }
    }

    /// A message of the model.
    pub fn from_model(blocks: Vec<ContentBlock>) -> Self {
        Self { speaker: Speaker::Assistant, blocks }
    }

    /// The results of tool calls, all in one message: an answer with parallel calls needs all results at once.
    pub fn from_results(results: impl IntoIterator<Item = ToolResult>) -> Self {
        Self { speaker: Speaker::User, blocks: results.into_iter().map(ContentBlock::ToolResult).collect() }
    }
}

/// One part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
    /// A picture.
    Image(ImageData),
    /// A part that only its provider understands: a thought, a signature, an unknown item.
    Opaque(OpaqueBlock),
    /// A call of a tool, by the model.
    ToolCall(ToolCall),
    /// The result of a tool call, for the model.
    ToolResult(ToolResult),
}

impl ContentBlock {
    /// A block of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into() }
    }
}

/// A picture in a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageData {
    /// The media type, for example `image/png`.
    pub media_type: String,
    /// The bytes in base64.
    pub data: String,
}

/// A part of an answer that its provider wants back unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpaqueBlock {
    /// The wire format that the block belongs to.
    pub wire: Wire,
    /// The name under which the model was asked; another model does not get the block.
    pub model: String,
    /// The JSON text of the provider.
    pub raw: String,
    /// The part of it that a person can read, possibly empty.
    pub text: String,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id that the result names; unique within its answer.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments.
    pub arguments: ToolArguments,
}

/// The arguments of a tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolArguments {
    /// A JSON object.
    Object(Map<String, Value>),
    /// Text of the model that is no JSON object; the call fails, and the model is told so.
    Invalid(String),
}

impl ToolArguments {
    /// Reads the text of a model. No text at all means no arguments.
    pub fn parse(text: &str) -> Self {
        if text.trim().is_empty() {
            return Self::Object(Map::new());
        }
        serde_json::from_str(text).map_or_else(|_| Self::Invalid(text.to_owned()), Self::Object)
    }

    /// The arguments as JSON text, or the invalid text itself.
    pub fn to_text(&self) -> String {
        match self {
            Self::Object(map) => Value::Object(map.clone()).to_string(),
            Self::Invalid(text) => text.clone(),
        }
    }
}

/// The result of a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The id of the call.
    pub call_id: String,
    /// The parts of the result.
    pub blocks: Vec<ResultBlock>,
    /// Whether the tool failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_error: bool,
}

impl ToolResult {
    /// A result that is only text.
    pub fn from_text(call_id: impl Into<String>, text: impl Into<String>) -> Self {
        let blocks = vec![ResultBlock::Text { text: text.into() }];
        Self { call_id: call_id.into(), blocks, is_error: false }
    }

    /// The text of the result, without its pictures.
    pub fn to_text(&self) -> String {
        let texts: Vec<&str> = self.blocks.iter().filter_map(ResultBlock::as_text).collect();
        texts.join("\n")
    }
}

/// One part of a tool's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResultBlock {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
    /// A picture.
    Image(ImageData),
}

impl ResultBlock {
    /// The text of a text block.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text { text } => Some(text),
            Self::Image(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_message_survives_its_stored_form() {
        let message = ChatMessage::from_model(vec![
            ContentBlock::text("hi"),
            ContentBlock::Image(ImageData { media_type: "image/png".into(), data: "AA==".into() }),
            ContentBlock::Opaque(OpaqueBlock {
                wire: Wire::Anthropic,
                model: "m".into(),
                raw: r#"{"type":"thinking","thinking":"b","signature":"a"}"#.into(),
                text: "b".into(),
            }),
            ContentBlock::ToolCall(ToolCall {
                id: "1".into(),
                name: "ls".into(),
                arguments: ToolArguments::parse(r#"{"path": "/", "depth": 0.1}"#),
            }),
            ContentBlock::ToolCall(ToolCall {
                id: "2".into(),
                name: "ls".into(),
                arguments: ToolArguments::parse("{\"path\": "),
            }),
            ContentBlock::ToolResult(ToolResult::from_text("1", "a\nb")),
        ]);
        let stored = serde_json::to_value(&message).unwrap();
        assert_eq!(stored["blocks"][3]["arguments"], json!({"object": {"path": "/", "depth": 0.1}}));
        assert_eq!(stored["blocks"][4]["arguments"], json!({"invalid": "{\"path\": "}));
        assert_eq!(serde_json::from_value::<ChatMessage>(stored).unwrap(), message);
    }

    #[test]
    fn arguments_are_an_object_or_kept_as_they_came() {
        for text in ["", "  ", "{}"] {
            assert_eq!(ToolArguments::parse(text), ToolArguments::Object(Map::new()), "{text:?}");
        }
        let deep = "[".repeat(1000);
        for text in ["null", "[]", "1", "{\"a\":}", "{} x", "\"{}\"", &deep, &format!("{{\"a\":{deep}")] {
            assert_eq!(ToolArguments::parse(text), ToolArguments::Invalid(text.to_owned()));
            assert_eq!(ToolArguments::parse(text).to_text(), text);
        }
    }
}
