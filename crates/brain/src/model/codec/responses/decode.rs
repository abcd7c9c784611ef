//! Answers of OpenAI Responses.

use serde::Deserialize;
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
struct EventReport {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    output_index: u64,
    delta: Option<Value>,
    item: Option<Box<RawValue>>,
    response: Option<ResponseReport>,
}

#[derive(Deserialize)]
struct ResponseReport {
    status: Option<String>,
    model: Option<String>,
    #[serde(default)]
    output: Vec<Box<RawValue>>,
    usage: Option<UsageReport>,
    error: Option<Value>,
    incomplete_details: Option<IncompleteReport>,
}

#[derive(Deserialize)]
struct IncompleteReport {
    reason: Option<String>,
}

#[derive(Deserialize)]
struct UsageReport {
    #[serde(default)]
    input_tokens: u64,
    #[serde(default)]
    output_tokens: u64,
    input_tokens_details: Option<DetailsReport>,
}

#[derive(Deserialize)]
struct DetailsReport {
    cached_tokens: Option<u64>,
    cache_write_tokens: Option<u64>,
}

/// An item of the output, as far as this version knows it.
#[derive(Deserialize)]
struct ItemReport {
    #[serde(rename = "type")]
    kind: String,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    content: Option<Vec<PartReport>>,
    summary: Option<Vec<PartReport>>,
}

#[derive(Deserialize)]
struct PartReport {
    #[serde(rename = "type", default)]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

/// How the response ended.
enum ResponseEnd {
    Completed,
    Incomplete(String),
}

/// The decoder of one answer.
pub struct ResponsesDecoder {
    asked_model: String,
    model: Option<String>,
    /// The calls that the stream announced, with the index of their item.
    calls: Vec<(u64, PartialCall)>,
    /// The finished items; their text is authoritative.
    items: Vec<(u64, Box<RawValue>)>,
    usage: TokenUsage,
    end: Option<ResponseEnd>,
}

impl ResponsesDecoder {
    /// Makes the decoder for an answer of a model.
    pub fn new(model: &str) -> Self {
        Self {
            asked_model: model.to_owned(),
            model: None,
            calls: Vec::new(),
            items: Vec::new(),
            usage: TokenUsage::default(),
            end: None,
        }
    }

    fn begin_item(
        &mut self,
        index: u64,
        item: &RawValue,
        deltas: &mut DeltaFn<'_>,
    ) -> Result<(), ModelError> {
        check_count(self.calls.len())?;
        let Ok(item) = serde_json::from_str::<ItemReport>(item.get()) else { return Ok(()) };
        if item.kind == "function_call" && !self.calls.iter().any(|(known, _)| *known == index) {
            let call = PartialCall::new(item.call_id.unwrap_or_default(), item.name.unwrap_or_default());
            self.calls.push((index, call));
            self.tell_arguments(index, "", deltas);
        }
        Ok(())
    }

    fn tell_arguments(&mut self, index: u64, text: &str, deltas: &mut DeltaFn<'_>) {
        let found = self.calls.iter_mut().enumerate().find(|(_, (known, _))| *known == index);
        if let Some((number, (_, call))) = found {
            call.push(number, text, deltas);
        }
    }

    fn end_item(&mut self, index: u64, item: Box<RawValue>) -> Result<(), ModelError> {
        check_count(self.items.len())?;
        if self.items.iter().any(|(known, _)| *known == index) {
            return Err(malformed(format!("item {index} ends twice")));
        }
        self.items.push((index, item));
        Ok(())
    }

    fn end_response(&mut self, response: ResponseReport) -> Result<(), ModelError> {
        self.model = response.model.filter(|model| !model.is_empty()).or(self.model.take());
        if let Some(usage) = response.usage {
            self.usage = to_usage(&usage);
        }
        if self.items.is_empty() {
            check_count(response.output.len())?;
            self.items = (0..).zip(response.output).collect();
        }
        match response.status.as_deref().unwrap_or("completed") {
            "completed" => self.end = Some(ResponseEnd::Completed),
            "incomplete" => {
                let reason = response.incomplete_details.and_then(|details| details.reason);
                self.end = Some(ResponseEnd::Incomplete(reason.unwrap_or_default()));
            }
            "failed" | "cancelled" => return Err(fault::read_event(&response.error.unwrap_or_default())),
            other => return Err(cut(format!("the response ended with status `{other}`"))),
        }
        Ok(())
    }

    fn refusal(&self, message: String) -> ModelError {
        ModelError::Refused { message, usage: self.usage }
    }

    fn to_blocks(&self) -> Result<Vec<ContentBlock>, ModelError> {
        let mut items: Vec<&(u64, Box<RawValue>)> = self.items.iter().collect();
        items.sort_by_key(|(index, _)| *index);
        let mut blocks = Vec::new();
        for (_, raw) in items {
            blocks.extend(self.to_block(raw)?);
        }
        Ok(blocks)
    }

    fn to_block(&self, raw: &RawValue) -> Result<Option<ContentBlock>, ModelError> {
        let opaque = |text: String| {
            let (model, raw) = (self.asked_model.clone(), raw.get().to_owned());
            Some(ContentBlock::Opaque(OpaqueBlock { wire: Wire::Responses, model, raw, text }))
        };
        let Ok(item) = serde_json::from_str::<ItemReport>(raw.get()) else {
            return Ok(opaque(String::new()));
        };
        Ok(match item.kind.as_str() {
            "message" => {
                let parts = item.content.unwrap_or_default();
                if let Some(refusal) = parts.iter().find(|part| part.kind == "refusal") {
                    return Err(self.refusal(refusal.refusal.clone().unwrap_or_default()));
                }
                let text = join(parts, "");
                (!text.is_empty()).then_some(ContentBlock::Text { text })
            }
            "function_call" => Some(ContentBlock::ToolCall(ToolCall {
                id: item.call_id.unwrap_or_default(),
                name: item.name.unwrap_or_default(),
                arguments: ToolArguments::parse(&item.arguments.unwrap_or_default()),
            })),
            "reasoning" => {
                let parts = item.summary.filter(|parts| !parts.is_empty()).or(item.content);
                opaque(join(parts.unwrap_or_default(), "\n\n"))
            }
            _ => opaque(String::new()),
        })
    }
}

fn join(parts: Vec<PartReport>, separator: &str) -> String {
    parts.into_iter().filter_map(|part| part.text).collect::<Vec<_>>().join(separator)
}

fn to_usage(report: &UsageReport) -> TokenUsage {
    let details = report.input_tokens_details.as_ref();
    let cache_read = details.and_then(|details| details.cached_tokens).unwrap_or(0);
    let cache_write = details.and_then(|details| details.cache_write_tokens).unwrap_or(0);
    TokenUsage {
        input: report.input_tokens.saturating_sub(cache_read).saturating_sub(cache_write),
        output: report.output_tokens,
        cache_read,
        cache_write,
    }
}

impl WireDecoder for ResponsesDecoder {
    fn read_event(&mut self, event: &SseEvent, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let text = event.data.trim();
        if text.is_empty() || text == "[DONE]" {
            return Ok(());
        }
        let invalid = |error: serde_json::Error| malformed(format!("an event is invalid: {error}"));
        let report: EventReport = serde_json::from_str(text).map_err(invalid)?;
        let kind = report.kind.as_deref().unwrap_or(&event.name);
        let delta = report.delta.as_ref().and_then(Value::as_str).unwrap_or_default();
        match kind {
            "error" => return Err(fault::read_event(&serde_json::from_str(text).map_err(invalid)?)),
            "response.output_item.added" => {
                if let Some(item) = &report.item {
                    self.begin_item(report.output_index, item, deltas)?;
                }
            }
            "response.output_item.done" => {
                let item = report.item.ok_or_else(|| malformed("an item ends without content"))?;
                self.begin_item(report.output_index, &item, deltas)?;
                self.end_item(report.output_index, item)?;
            }
            "response.output_text.delta" => deltas(ModelDelta::Text { text: delta.to_owned() }),
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                deltas(ModelDelta::Reasoning { text: delta.to_owned() });
            }
            "response.function_call_arguments.delta" => {
                self.tell_arguments(report.output_index, delta, deltas)
            }
            "response.completed" | "response.incomplete" | "response.failed" => {
                self.end_response(report.response.ok_or_else(|| malformed("the response is missing"))?)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn read_document(&mut self, text: &str, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        let value: Value = serde_json::from_str(text).map_err(|_| cut("the JSON of the answer is broken"))?;
        if value.get("status").is_none() && value.get("error").is_some_and(|error| !error.is_null()) {
            return Err(fault::read_event(&value));
        }
        let response: ResponseReport = serde_json::from_str(text)
            .map_err(|error| malformed(format!("the answer is invalid: {error}")))?;
        if response.status.is_none() {
            return Err(malformed("the answer has no status"));
        }
        self.end_response(response)?;
        for block in self.to_blocks()? {
            if let ContentBlock::Text { text } = block {
                deltas(ModelDelta::Text { text });
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.end.is_some()
    }

    fn finish(self: Box<Self>) -> Result<Answer, ModelError> {
        let Some(end) = &self.end else { return Err(cut("`response.completed` is missing")) };
        let blocks = self.to_blocks()?;
        let stop = match end {
            ResponseEnd::Completed
                if blocks.iter().any(|block| matches!(block, ContentBlock::ToolCall(_))) =>
            {
                StopReason::ToolUse
            }
            ResponseEnd::Completed => StopReason::EndTurn,
            ResponseEnd::Incomplete(reason) if reason == "max_output_tokens" => StopReason::MaxTokens,
            ResponseEnd::Incomplete(reason) if reason == "content_filter" => {
                return Err(self.refusal("the provider's content filter stopped the answer".to_owned()));
            }
            ResponseEnd::Incomplete(reason) => StopReason::Other(reason.clone()),
        };
        Ok(Answer { blocks, stop, usage: self.usage, model: self.model.unwrap_or(self.asked_model) })
    }
}
