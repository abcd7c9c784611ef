//! Answers of Anthropic Messages.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::model::{
    Answer, ContentBlock, ModelDelta, ModelError, OpaqueBlock, StopReason, TokenUsage, ToolArguments,
    ToolCall, Wire,
    codec::{
        DeltaFn, WireDecoder, fault,
        parts::{PartialCall, check_count, cut, malformed, read_json},
        sse::SseEvent,
    },
};

/// A block that still grows.
enum PartialBlock {
    Text(String),
    Thinking {
        thinking: String,
        signature: String,
    },
    Call {
        call: PartialCall,
        index: usize,
    },
    /// A block of another type: kept as it began, with its text and input as the deltas give them.
    Foreign {
        block: Map<String, Value>,
        input: String,
    },
}

/// A thought as the provider wants it back.
#[derive(Serialize)]
struct ThinkingText<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    thinking: &'a str,
    signature: &'a str,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct UsageReport {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StopReport {
    stop_reason: Option<String>,
    stop_details: Option<Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct MessageReport {
    model: Option<String>,
    usage: Option<UsageReport>,
    content: Vec<Value>,
    #[serde(flatten)]
    stop: StopReport,
}

#[derive(Deserialize)]
struct EventReport {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    index: u64,
    message: Option<MessageReport>,
    content_block: Option<Map<String, Value>>,
    delta: Option<Value>,
    usage: Option<UsageReport>,
}

/// The decoder of one answer.
pub struct AnthropicDecoder {
    asked_model: String,
    model: Option<String>,
    /// The blocks with the indexes that the stream gives them.
    blocks: Vec<(u64, PartialBlock)>,
    calls: usize,
    usage: TokenUsage,
    stop: StopReport,
    is_complete: bool,
}

impl AnthropicDecoder {
    /// Makes the decoder for an answer of a model.
    pub fn new(model: &str) -> Self {
        Self {
            asked_model: model.to_owned(),
            model: None,
            blocks: Vec::new(),
            calls: 0,
            usage: TokenUsage::default(),
            stop: StopReport::default(),
            is_complete: false,
        }
    }

    /// Counts are cumulative: a later report replaces an earlier one, number by number.
    fn take_usage(&mut self, report: &UsageReport) {
        let usage = &mut self.usage;
        for (count, reported) in [
            (&mut usage.input, report.input_tokens),
            (&mut usage.output, report.output_tokens),
            (&mut usage.cache_read, report.cache_read_input_tokens),
            (&mut usage.cache_write, report.cache_creation_input_tokens),
        ] {
            *count = reported.unwrap_or(*count);
        }
    }

    fn begin_block(
        &mut self,
        index: u64,
        mut block: Map<String, Value>,
        deltas: &mut DeltaFn<'_>,
    ) -> Result<(), ModelError> {
        check_count(self.blocks.len())?;
        if self.blocks.iter().any(|(known, _)| *known == index) {
            return Err(malformed(format!("block {index} begins twice")));
        }
        let mut take = |name: &str| match block.get_mut(name).map(Value::take) {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let partial = match block_type(&take("type")) {
            BlockType::Text => {
                let text = take("text");
                tell_text(&text, deltas);
                PartialBlock::Text(text)
            }
            BlockType::Thinking => {
                let (thinking, signature) = (take("thinking"), take("signature"));
                tell_reasoning(&thinking, deltas);
                PartialBlock::Thinking { thinking, signature }
            }
            BlockType::Call => {
                let mut call = PartialCall::new(take("id"), take("name"));
                let number = self.calls;
                self.calls += 1;
                let input = block.get("input").filter(|input| !is_empty(input));
                call.push(number, &input.map(Value::to_string).unwrap_or_default(), deltas);
                PartialBlock::Call { call, index: number }
            }
            BlockType::Foreign(kind) => {
                block.insert("type".to_owned(), Value::String(kind));
                PartialBlock::Foreign { block, input: String::new() }
            }
        };
        self.blocks.push((index, partial));
        Ok(())
    }

    fn extend_block(
        &mut self,
        index: u64,
        delta: &Value,
        deltas: &mut DeltaFn<'_>,
    ) -> Result<(), ModelError> {
        let Some((_, block)) = self.blocks.iter_mut().find(|(known, _)| *known == index) else {
            return Err(malformed(format!("block {index} grows before it begins")));
        };
        let piece = |name: &str| delta.get(name).and_then(Value::as_str).unwrap_or_default();
        match (piece("type"), block) {
            ("text_delta", PartialBlock::Text(text)) => {
                text.push_str(piece("text"));
                tell_text(piece("text"), deltas);
            }
            ("thinking_delta", PartialBlock::Thinking { thinking, .. }) => {
                thinking.push_str(piece("thinking"));
                tell_reasoning(piece("thinking"), deltas);
            }
            ("signature_delta", PartialBlock::Thinking { signature, .. }) => {
                signature.push_str(piece("signature"))
            }
            ("input_json_delta", PartialBlock::Call { call, index }) => {
                call.push(*index, piece("partial_json"), deltas);
            }
            ("input_json_delta", PartialBlock::Foreign { input, .. }) => {
                input.push_str(piece("partial_json"))
            }
            ("text_delta" | "thinking_delta" | "input_json_delta", _) => {
                return Err(malformed(format!("block {index} grows by a piece of another type")));
            }
            // A new kind of piece adds to what a person sees, not to what the model has to get back.
            _ => {}
        }
        Ok(())
    }

    fn end_message(&mut self) -> Result<(), ModelError> {
        if self.stop.stop_reason.is_none() {
            return Err(malformed("the message ends without a reason to stop"));
        }
        self.is_complete = true;
        Ok(())
    }

    fn take_stop(&mut self, stop: StopReport) {
        self.stop.stop_reason = stop.stop_reason.or(self.stop.stop_reason.take());
        self.stop.stop_details = stop.stop_details.or(self.stop.stop_details.take());
    }

    fn refusal(&self) -> ModelError {
        let details = self.stop.stop_details.as_ref();
        let say = |name: &str| details.and_then(|details| details.get(name)).and_then(Value::as_str);
        let message = say("explanation").or_else(|| say("category")).unwrap_or("the model gives no reason");
        ModelError::Refused { message: message.to_owned(), usage: self.usage }
    }
}

enum BlockType {
    Text,
    Thinking,
    Call,
    Foreign(String),
}

fn block_type(name: &str) -> BlockType {
    match name {
        "text" => BlockType::Text,
        "thinking" => BlockType::Thinking,
        "tool_use" => BlockType::Call,
        other => BlockType::Foreign(other.to_owned()),
    }
}

fn is_empty(input: &Value) -> bool {
    input.is_null() || input.as_object().is_some_and(Map::is_empty)
}

fn tell_text(text: &str, deltas: &mut DeltaFn<'_>) {
    if !text.is_empty() {
        deltas(ModelDelta::Text { text: text.to_owned() });
    }
}

fn tell_reasoning(text: &str, deltas: &mut DeltaFn<'_>) {
    if !text.is_empty() {
        deltas(ModelDelta::Reasoning { text: text.to_owned() });
    }
}

impl WireDecoder for AnthropicDecoder {
    fn read_event(&mut self, event: &SseEvent, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let value: Value = read_json(event)?;
        let kind = value.get("type").and_then(Value::as_str).unwrap_or(&event.name).to_owned();
        if kind == "error" {
            return Err(fault::read_event(&value));
        }
        if !kind.starts_with("message_") && !kind.starts_with("content_block_") {
            return Ok(());
        }
        let report: EventReport = serde_json::from_value(value)
            .map_err(|error| malformed(format!("event {kind} is invalid: {error}")))?;
        if let Some(usage) = &report.usage {
            self.take_usage(usage);
        }
        match report.kind.as_str() {
            "message_start" => {
                let message = report.message.unwrap_or_default();
                self.take_usage(&message.usage.unwrap_or_default());
                self.model = message.model;
            }
            "content_block_start" => {
                let block =
                    report.content_block.ok_or_else(|| malformed("a block begins without content"))?;
                self.begin_block(report.index, block, deltas)?;
            }
            "content_block_delta" => {
                let delta = report.delta.ok_or_else(|| malformed("a piece of a block is missing"))?;
                self.extend_block(report.index, &delta, deltas)?;
            }
            "message_delta" => {
                let stop = report.delta.map(serde_json::from_value).transpose();
                self.take_stop(stop.map_err(|error| malformed(error.to_string()))?.unwrap_or_default());
            }
            "message_stop" => self.end_message()?,
            _ => {}
        }
        Ok(())
    }

    fn read_document(&mut self, text: &str, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| cut(format!("the JSON of the answer is broken: {error}")))?;
        if value.get("type").and_then(Value::as_str) == Some("error") {
            return Err(fault::read_event(&value));
        }
        let message: MessageReport = serde_json::from_value(value)
            .map_err(|error| malformed(format!("the answer is invalid: {error}")))?;
        self.take_usage(&message.usage.unwrap_or_default());
        self.model = message.model;
        for (index, block) in message.content.into_iter().enumerate() {
            let Value::Object(block) = block else { return Err(malformed("a block is no object")) };
            self.begin_block(index as u64, block, deltas)?;
        }
        self.take_stop(message.stop);
        self.end_message()
    }

    fn is_complete(&self) -> bool {
        self.is_complete
    }

    fn finish(self: Box<Self>) -> Result<Answer, ModelError> {
        if !self.is_complete {
            return Err(cut("`message_stop` is missing"));
        }
        let stop = match self.stop.stop_reason.as_deref().unwrap_or_default() {
            "refusal" => return Err(self.refusal()),
            "end_turn" => StopReason::EndTurn,
            "tool_use" => StopReason::ToolUse,
            "max_tokens" => StopReason::MaxTokens,
            "model_context_window_exceeded" => StopReason::ContextFull,
            "pause_turn" => StopReason::PauseTurn,
            "stop_sequence" => StopReason::StopSequence,
            other => StopReason::Other(other.to_owned()),
        };
        let mut blocks = Vec::new();
        for (_, block) in self.blocks {
            blocks.push(to_block(&self.asked_model, block)?);
        }
        blocks.retain(|block| !matches!(block, ContentBlock::Text { text } if text.is_empty()));
        Ok(Answer { blocks, stop, usage: self.usage, model: self.model.unwrap_or(self.asked_model) })
    }
}

fn to_block(model: &str, block: PartialBlock) -> Result<ContentBlock, ModelError> {
    let opaque = |raw: String, text: String| {
        ContentBlock::Opaque(OpaqueBlock { wire: Wire::Anthropic, model: model.to_owned(), raw, text })
    };
    Ok(match block {
        PartialBlock::Text(text) => ContentBlock::Text { text },
        PartialBlock::Call { call, .. } => ContentBlock::ToolCall(ToolCall {
            arguments: ToolArguments::parse(&call.arguments),
            id: call.id,
            name: call.name,
        }),
        PartialBlock::Thinking { thinking, signature } => {
            let raw = ThinkingText { kind: "thinking", thinking: &thinking, signature: &signature };
            let raw = serde_json::to_string(&raw).map_err(|error| malformed(error.to_string()))?;
            opaque(raw, thinking)
        }
        PartialBlock::Foreign { mut block, input } => {
            if !input.is_empty() {
                let input = serde_json::from_str(&input).map_err(|error| {
                    malformed(format!("the input of a server's tool is invalid: {error}"))
                })?;
                block.insert("input".to_owned(), input);
            }
            opaque(Value::Object(block).to_string(), String::new())
        }
    })
}
