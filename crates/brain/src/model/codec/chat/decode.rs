//! Answers of Chat Completions.

use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use crate::model::{
    Answer, ContentBlock, ModelDelta, ModelError, OpaqueBlock, StopReason, TokenUsage, ToolArguments,
    ToolCall, Wire,
    codec::{
        DeltaFn, WireDecoder, fault,
        parts::{PartialCall, check_count, cut, malformed},
        sse::SseEvent,
    },
};

#[derive(Deserialize)]
struct ChunkReport {
    model: Option<String>,
    #[serde(default)]
    choices: Vec<ChoiceReport>,
    usage: Option<UsageReport>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChoiceReport {
    #[serde(default)]
    index: u64,
    delta: Option<MessagePiece>,
    /// Stands in place of `delta` in an answer that is no stream.
    message: Option<MessagePiece>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct MessagePiece {
    content: Option<Value>,
    refusal: Option<String>,
    /// DeepSeek, vLLM and others.
    reasoning_content: Option<String>,
    /// OpenRouter, Groq, Ollama and others.
    reasoning: Option<Value>,
    /// OpenRouter; it wants every element back as it was.
    reasoning_details: Option<Vec<Box<RawValue>>>,
    tool_calls: Option<Vec<CallPiece>>,
}

#[derive(Deserialize)]
struct CallPiece {
    index: Option<u64>,
    id: Option<String>,
    function: Option<FunctionPiece>,
}

#[derive(Deserialize)]
struct FunctionPiece {
    name: Option<String>,
    arguments: Option<Value>,
}

#[derive(Deserialize)]
struct UsageReport {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<DetailsReport>,
    /// DeepSeek's name for cached tokens.
    prompt_cache_hit_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct DetailsReport {
    cached_tokens: Option<u64>,
    cache_write_tokens: Option<u64>,
}

/// The thoughts of an answer, by the field that carried them.
#[derive(Default)]
struct Reasoning {
    content: Option<String>,
    plain: String,
    details: Vec<Box<RawValue>>,
}

/// The thoughts as their server wants them back. Plain `reasoning` is only for people: some servers refuse it.
#[derive(Serialize)]
struct ReasoningText<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    reasoning_details: &'a [Box<RawValue>],
}

/// The decoder of one answer.
pub struct ChatDecoder {
    asked_model: String,
    model: Option<String>,
    text: String,
    refusal: String,
    reasoning: Reasoning,
    /// The calls with the indexes that the stream gives them.
    calls: Vec<(Option<u64>, PartialCall)>,
    usage: TokenUsage,
    finish_reason: Option<String>,
    is_done: bool,
}

impl ChatDecoder {
    /// Makes the decoder for an answer of a model.
    pub fn new(model: &str) -> Self {
        Self {
            asked_model: model.to_owned(),
            model: None,
            text: String::new(),
            refusal: String::new(),
            reasoning: Reasoning::default(),
            calls: Vec::new(),
            usage: TokenUsage::default(),
            finish_reason: None,
            is_done: false,
        }
    }

    fn take_chunk(&mut self, text: &str, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let chunk: ChunkReport =
            serde_json::from_str(text).map_err(|error| malformed(format!("a chunk is invalid: {error}")))?;
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            return Err(fault::read_event(&serde_json::json!({ "error": error })));
        }
        self.model = self.model.take().or(chunk.model.filter(|model| !model.is_empty()));
        if let Some(usage) = chunk.usage {
            self.usage = to_usage(&usage);
        }
        for choice in chunk.choices.into_iter().filter(|choice| choice.index == 0) {
            if let Some(piece) = choice.delta.or(choice.message) {
                self.take_piece(piece, deltas)?;
            }
            let reason = choice.finish_reason.filter(|reason| !reason.is_empty());
            self.finish_reason = reason.or(self.finish_reason.take());
        }
        Ok(())
    }

    fn take_piece(&mut self, piece: MessagePiece, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        self.take_reasoning(&piece, deltas);
        self.reasoning.details.extend(piece.reasoning_details.unwrap_or_default());
        let text = piece.content.as_ref().map(to_text).unwrap_or_default();
        if !text.is_empty() {
            self.text.push_str(&text);
            deltas(ModelDelta::Text { text });
        }
        self.refusal.push_str(&piece.refusal.unwrap_or_default());
        for call in piece.tool_calls.unwrap_or_default() {
            self.take_call(call, deltas)?;
        }
        Ok(())
    }

    fn take_reasoning(&mut self, piece: &MessagePiece, deltas: &mut DeltaFn<'_>) {
        let plain = piece.reasoning.as_ref().and_then(Value::as_str).unwrap_or_default();
        self.reasoning.plain.push_str(plain);
        let content = piece.reasoning_content.as_deref().unwrap_or_default();
        if !content.is_empty() {
            self.reasoning.content.get_or_insert_default().push_str(content);
        }
        // Some servers send one thought in both fields.
        let text = if content.is_empty() { plain } else { content };
        if !text.is_empty() {
            deltas(ModelDelta::Reasoning { text: text.to_owned() });
        }
    }

    fn take_call(&mut self, piece: CallPiece, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let at = match self.find_call(&piece) {
            Some(at) => at,
            None => {
                check_count(self.calls.len())?;
                self.calls.push((piece.index, PartialCall::default()));
                self.calls.len() - 1
            }
        };
        let (_, call) = &mut self.calls[at];
        let function = piece.function;
        let (name, arguments) = function.map_or((None, None), |function| (function.name, function.arguments));
        if call.id.is_empty() {
            call.id = piece.id.unwrap_or_default();
        }
        if call.name.is_empty() {
            call.name = name.unwrap_or_default();
        }
        let text = match arguments {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text,
            // Some servers send an object instead of its text.
            Some(value) => value.to_string(),
        };
        call.push(at, &text, deltas);
        Ok(())
    }

    /// The call that a piece continues. A piece with another id begins a call, also under a known index:
    /// some servers number all parallel calls 0.
    fn find_call(&self, piece: &CallPiece) -> Option<usize> {
        let at = match piece.index {
            Some(index) => self.calls.iter().rposition(|(known, _)| *known == Some(index))?,
            None if piece.id.as_ref().is_some_and(|id| !id.is_empty()) => {
                return self.calls.iter().rposition(|(_, call)| Some(&call.id) == piece.id.as_ref());
            }
            None => self.calls.len().checked_sub(1)?,
        };
        let known = &self.calls[at].1.id;
        let is_other = piece.id.as_ref().is_some_and(|id| !id.is_empty() && !known.is_empty() && id != known);
        (!is_other).then_some(at)
    }

    fn stop(&self) -> StopReason {
        match self.finish_reason.as_deref().unwrap_or_default() {
            // Some servers report `stop` also after calls.
            "stop" | "tool_calls" | "function_call" | "tool_use" if !self.calls.is_empty() => {
                StopReason::ToolUse
            }
            "stop" | "eos" | "end_turn" | "tool_calls" => StopReason::EndTurn,
            "length" => StopReason::MaxTokens,
            other => StopReason::Other(other.to_owned()),
        }
    }
}

fn to_usage(report: &UsageReport) -> TokenUsage {
    let details = report.prompt_tokens_details.as_ref();
    let cache_read = details.and_then(|details| details.cached_tokens).or(report.prompt_cache_hit_tokens);
    let cache_read = cache_read.unwrap_or(0);
    let cache_write = details.and_then(|details| details.cache_write_tokens).unwrap_or(0);
    let input = report.prompt_tokens.unwrap_or(0);
    TokenUsage {
        input: input.saturating_sub(cache_read).saturating_sub(cache_write),
        output: report.completion_tokens.unwrap_or(0),
        cache_read,
        cache_write,
    }
}

/// Content is a string, or a list of parts of which some are text.
fn to_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect()
        }
        _ => String::new(),
    }
}

impl Reasoning {
    fn to_block(&self, model: &str) -> Result<Option<ContentBlock>, ModelError> {
        let text = self.content.as_deref().unwrap_or(&self.plain);
        if text.is_empty() && self.details.is_empty() {
            return Ok(None);
        }
        let raw =
            ReasoningText { reasoning_content: self.content.as_deref(), reasoning_details: &self.details };
        let raw = serde_json::to_string(&raw).map_err(|error| malformed(error.to_string()))?;
        let block = OpaqueBlock { wire: Wire::Chat, model: model.to_owned(), raw, text: text.to_owned() };
        Ok(Some(ContentBlock::Opaque(block)))
    }
}

impl WireDecoder for ChatDecoder {
    fn read_event(&mut self, event: &SseEvent, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        match event.data.trim() {
            "" => Ok(()),
            "[DONE]" => {
                self.is_done = true;
                Ok(())
            }
            text => self.take_chunk(text, deltas),
        }
    }

    fn read_document(&mut self, text: &str, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        if serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
            return Err(cut("the JSON of the answer is broken"));
        }
        self.take_chunk(text, deltas)
    }

    fn is_complete(&self) -> bool {
        self.is_done
    }

    fn finish(self: Box<Self>) -> Result<Answer, ModelError> {
        // The reason to stop completes the answer; some servers leave out `[DONE]`.
        let Some(reason) = self.finish_reason.as_deref() else {
            return Err(cut("`finish_reason` is missing"));
        };
        if !self.refusal.is_empty() || reason == "content_filter" {
            let reasons = [self.refusal.as_str(), "the provider's content filter stopped the answer"];
            let message = reasons.iter().find(|text| !text.is_empty()).copied().unwrap_or_default();
            return Err(ModelError::Refused { message: message.to_owned(), usage: self.usage });
        }
        if reason == "error" {
            let message = "the stream ended with the reason `error`".to_owned();
            return Err(ModelError::Server { status: 500, retry_after: None, message });
        }
        let stop = self.stop();
        let mut blocks: Vec<ContentBlock> = self.reasoning.to_block(&self.asked_model)?.into_iter().collect();
        if !self.text.is_empty() {
            blocks.push(ContentBlock::Text { text: self.text });
        }
        blocks.extend(self.calls.into_iter().map(|(_, call)| {
            ContentBlock::ToolCall(ToolCall {
                arguments: ToolArguments::parse(&call.arguments),
                id: call.id,
                name: call.name,
            })
        }));
        Ok(Answer { blocks, stop, usage: self.usage, model: self.model.unwrap_or(self.asked_model) })
    }
}
