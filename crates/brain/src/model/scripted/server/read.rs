//! Requests of the three wire formats, read and judged as the real endpoints judge them.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::model::{Speaker, Wire};

use super::{super::track::Conversation, write::sign};

/// A request as the script needs it.
pub struct WireRequest {
    pub model: String,
    pub is_stream: bool,
    pub conversation: Conversation,
}

impl WireRequest {
    /// Reads a request, or tells what the real endpoint would complain about.
    pub fn read(wire: Wire, body: &[u8]) -> Result<Self, String> {
        let body: Value =
            serde_json::from_slice(body).map_err(|error| format!("the body is no JSON: {error}"))?;
        let model = body["model"].as_str().filter(|model| !model.is_empty()).ok_or("model is missing")?;
        let mut reader = RequestReader::default();
        match wire {
            Wire::Anthropic => reader.read_anthropic(&body)?,
            Wire::Chat | Wire::Script => reader.read_chat(&body)?,
            Wire::Responses => reader.read_responses(&body)?,
        }
        reader.expect_answered("the conversation ends")?;
        if reader.conversation.messages.is_empty() {
            return Err("the conversation is empty".to_owned());
        }
        Ok(Self {
            model: model.to_owned(),
            is_stream: body["stream"].as_bool().unwrap_or(false),
            conversation: reader.conversation,
        })
    }
}

/// The conversation so far, and the calls that wait for a result.
#[derive(Default)]
struct RequestReader {
    conversation: Conversation,
    open_calls: BTreeSet<String>,
}

impl RequestReader {
    fn add(&mut self, speaker: Speaker, text: impl Into<String>) {
        self.conversation.messages.push((speaker, text.into()));
    }

    fn open_call(&mut self, id: &Value) -> Result<(), String> {
        let id = id.as_str().filter(|id| !id.is_empty()).ok_or("a call has no id")?;
        if self.open_calls.insert(id.to_owned()) {
            Ok(())
        } else {
            Err(format!("two calls have the id {id}"))
        }
    }

    fn close_call(&mut self, id: &Value) -> Result<(), String> {
        let id = id.as_str().unwrap_or_default();
        if self.open_calls.remove(id) {
            Ok(())
        } else {
            Err(format!("the result `{id}` belongs to no open call"))
        }
    }

    fn expect_answered(&self, place: &str) -> Result<(), String> {
        match self.open_calls.first() {
            Some(id) => Err(format!("call {id} has no result when {place}")),
            None => Ok(()),
        }
    }

    fn read_anthropic(&mut self, body: &Value) -> Result<(), String> {
        if !body["max_tokens"].is_u64() {
            return Err("max_tokens is missing".to_owned());
        }
        let marks = count_marks(body);
        if marks > 4 {
            return Err(format!("a maximum of 4 blocks may have cache_control, found {marks}"));
        }
        self.conversation.system = join_texts(&body["system"]);
        for message in items(&body["messages"], "messages")? {
            let speaker = speaker_of(message)?;
            self.read_anthropic_message(speaker, &message["content"])?;
        }
        Ok(())
    }

    fn read_anthropic_message(&mut self, speaker: Speaker, content: &Value) -> Result<(), String> {
        let mut texts = Vec::new();
        if let Some(text) = content.as_str() {
            texts.push(text.to_owned());
        } else {
            for block in items(content, "content")? {
                texts.push(self.read_anthropic_block(speaker, block)?);
            }
        }
        if speaker == Speaker::User {
            self.expect_answered("the next message of the user ends")?;
        }
        self.add(speaker, texts.join("\n"));
        Ok(())
    }

    fn read_anthropic_block(&mut self, speaker: Speaker, block: &Value) -> Result<String, String> {
        match (block["type"].as_str().unwrap_or_default(), speaker) {
            ("text", Speaker::User) if !self.open_calls.is_empty() => {
                Err("results must stand before text in a message".to_owned())
            }
            ("text", _) => match block["text"].as_str() {
                None | Some("") => Err("text content blocks must be non-empty".to_owned()),
                Some(text) => Ok(text.to_owned()),
            },
            ("image", Speaker::User) => Ok(String::new()),
            ("tool_use", Speaker::Assistant) => {
                if !block["input"].is_object() {
                    return Err("the input of a tool_use block must be an object".to_owned());
                }
                self.open_call(&block["id"]).map(|()| String::new())
            }
            ("tool_result", Speaker::User) => {
                self.close_call(&block["tool_use_id"])?;
                Ok(join_texts(&block["content"]))
            }
            ("thinking", Speaker::Assistant) => {
                let thinking = block["thinking"].as_str().unwrap_or_default();
                if block["signature"].as_str() == Some(&sign(thinking)) {
                    Ok(String::new())
                } else {
                    Err("invalid `signature` in `thinking` block".to_owned())
                }
            }
            (kind, _) => Err(format!("a block of type `{kind}` is not allowed here")),
        }
    }

    fn read_chat(&mut self, body: &Value) -> Result<(), String> {
        for message in items(&body["messages"], "messages")? {
            let role = message["role"].as_str().unwrap_or_default();
            if role != "tool" {
                self.expect_answered("a message of another role follows")?;
            }
            let text = join_texts(&message["content"]);
            match role {
                "system" | "developer" => self.conversation.system.push_str(&text),
                "user" => self.add(Speaker::User, text),
                "tool" => {
                    self.close_call(&message["tool_call_id"])?;
                    self.add(Speaker::User, text);
                }
                "assistant" => {
                    for call in message["tool_calls"].as_array().into_iter().flatten() {
                        if !call["function"]["arguments"].is_string() {
                            return Err("the arguments of a call must be a string".to_owned());
                        }
                        self.open_call(&call["id"])?;
                    }
                    if text.is_empty() && self.open_calls.is_empty() {
                        return Err("a message of the assistant needs content or tool_calls".to_owned());
                    }
                    self.add(Speaker::Assistant, text);
                }
                other => return Err(format!("`{other}` is no role")),
            }
        }
        Ok(())
    }

    fn read_responses(&mut self, body: &Value) -> Result<(), String> {
        self.conversation.system = body["instructions"].as_str().unwrap_or_default().to_owned();
        if let Some(text) = body["input"].as_str() {
            self.add(Speaker::User, text);
            return Ok(());
        }
        for item in items(&body["input"], "input")? {
            self.read_item(item)?;
        }
        Ok(())
    }

    fn read_item(&mut self, item: &Value) -> Result<(), String> {
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let text = join_texts(&item["content"]);
                if matches!(item["role"].as_str(), Some("system" | "developer")) {
                    self.conversation.system.push_str(&text);
                } else {
                    self.add(speaker_of(item)?, text);
                }
            }
            "function_call" => {
                if !item["arguments"].is_string() {
                    return Err("the arguments of a call must be a string".to_owned());
                }
                self.open_call(&item["call_id"])?;
                self.add(Speaker::Assistant, "");
            }
            "function_call_output" => {
                self.close_call(&item["call_id"])?;
                self.add(Speaker::User, join_texts(&item["output"]));
            }
            "reasoning" => {
                let summary = join_texts(&item["summary"]);
                if item["encrypted_content"].as_str() != Some(&sign(&summary)) {
                    return Err("the encrypted content of a reasoning item could not be verified".to_owned());
                }
                self.add(Speaker::Assistant, "");
            }
            other => return Err(format!("`{other}` is no type of an item")),
        }
        Ok(())
    }
}

fn items<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>, String> {
    value.as_array().ok_or_else(|| format!("{name} is no list"))
}

fn speaker_of(message: &Value) -> Result<Speaker, String> {
    match message["role"].as_str().unwrap_or_default() {
        "user" => Ok(Speaker::User),
        "assistant" => Ok(Speaker::Assistant),
        other => Err(format!("`{other}` is no role")),
    }
}

/// The text of a string, or of the parts of a list.
fn join_texts(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn count_marks(value: &Value) -> usize {
    match value {
        Value::Object(map) => {
            usize::from(map.contains_key("cache_control")) + map.values().map(count_marks).sum::<usize>()
        }
        Value::Array(list) => list.iter().map(count_marks).sum(),
        _ => 0,
    }
}
