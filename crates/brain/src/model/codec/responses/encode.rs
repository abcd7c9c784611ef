//! Requests of OpenAI Responses.

use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::model::{
    ChatMessage, ContentBlock, Effort, ImageData, ModelRequest, OpaqueBlock, ResultBlock, Speaker,
    ToolResult, Wire,
};

#[derive(Serialize)]
struct RequestDocument<'a> {
    model: &'a str,
    stream: bool,
    store: bool,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    include: &'static [&'static str],
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<ReasoningParam>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<ToolParam<'a>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    instructions: String,
    input: Vec<ItemParam<'a>>,
}

#[derive(Serialize)]
struct ReasoningParam {
    effort: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<&'static str>,
}

#[derive(Serialize)]
struct ToolParam<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: &'a str,
    description: &'a str,
    parameters: &'a Value,
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ItemParam<'a> {
    Opaque(&'a RawValue),
    Known(KnownItem<'a>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum KnownItem<'a> {
    Message { role: &'static str, content: Vec<PartParam<'a>> },
    FunctionCall { call_id: &'a str, name: &'a str, arguments: String },
    FunctionCallOutput { call_id: &'a str, output: OutputParam<'a> },
}

#[derive(Serialize)]
#[serde(untagged)]
enum OutputParam<'a> {
    Text(String),
    Parts(Vec<PartParam<'a>>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartParam<'a> {
    InputText { text: &'a str },
    OutputText { text: &'a str },
    InputImage { image_url: String },
}

/// The field of a thought without which a provider that stores nothing cannot take it back.
#[derive(serde::Deserialize)]
struct ItemHead<'a> {
    #[serde(rename = "type", borrow)]
    kind: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    encrypted_content: Option<&'a RawValue>,
}

/// The body of a request.
pub fn encode(model: &str, request: &ModelRequest) -> serde_json::Result<String> {
    let tools = request.tools.iter().map(|tool| ToolParam {
        kind: "function",
        name: &tool.name,
        description: &tool.description,
        parameters: &tool.parameters,
        strict: false,
    });
    let mut input = Vec::new();
    for message in &request.messages {
        match message.speaker {
            Speaker::User => add_user(message, &mut input),
            Speaker::Assistant => add_assistant(model, message, &mut input),
        }
    }
    let thinks = request.effort != Some(Effort::None);
    serde_json::to_string(&RequestDocument {
        model,
        stream: true,
        store: false,
        // Models that do not think refuse this; effort `none` leaves it out.
        include: if thinks { &["reasoning.encrypted_content"] } else { &[] },
        max_output_tokens: request.max_output_tokens,
        reasoning: request
            .effort
            .map(|effort| ReasoningParam { effort: effort.as_str(), summary: thinks.then_some("auto") }),
        prompt_cache_key: request.conversation.as_deref(),
        tools: tools.collect(),
        instructions: request.system.join("\n\n"),
        input,
    })
}

/// Adds the results first, which their calls wait for, and then everything else as one message.
fn add_user<'a>(message: &'a ChatMessage, input: &mut Vec<ItemParam<'a>>) {
    let mut content = Vec::new();
    for block in &message.blocks {
        match block {
            ContentBlock::ToolResult(result) => {
                let item =
                    KnownItem::FunctionCallOutput { call_id: &result.call_id, output: to_output(result) };
                input.push(ItemParam::Known(item));
            }
            ContentBlock::Text { text } if !text.is_empty() => content.push(PartParam::InputText { text }),
            ContentBlock::Image(image) => content.push(to_image(image)),
            _ => {}
        }
    }
    if !content.is_empty() {
        input.push(ItemParam::Known(KnownItem::Message { role: "user", content }));
    }
}

fn to_output(result: &ToolResult) -> OutputParam<'_> {
    if result.blocks.iter().all(|block| block.as_text().is_some()) {
        return OutputParam::Text(result.to_text());
    }
    let parts = result.blocks.iter().map(|block| match block {
        ResultBlock::Text { text } => PartParam::InputText { text },
        ResultBlock::Image(image) => to_image(image),
    });
    OutputParam::Parts(parts.collect())
}

fn to_image<'a>(image: &ImageData) -> PartParam<'a> {
    PartParam::InputImage { image_url: format!("data:{};base64,{}", image.media_type, image.data) }
}

/// Adds the items in their order: a thought stands before the call that it led to.
fn add_assistant<'a>(model: &str, message: &'a ChatMessage, input: &mut Vec<ItemParam<'a>>) {
    for block in &message.blocks {
        match block {
            ContentBlock::Text { text } if !text.is_empty() => {
                let content = vec![PartParam::OutputText { text }];
                input.push(ItemParam::Known(KnownItem::Message { role: "assistant", content }));
            }
            ContentBlock::ToolCall(call) => input.push(ItemParam::Known(KnownItem::FunctionCall {
                call_id: &call.id,
                name: &call.name,
                arguments: call.arguments.to_text(),
            })),
            ContentBlock::Opaque(opaque) => input.extend(to_echo(model, opaque)),
            _ => {}
        }
    }
}

fn to_echo<'a>(model: &str, opaque: &'a OpaqueBlock) -> Option<ItemParam<'a>> {
    if opaque.wire != Wire::Responses || opaque.model != model {
        return None;
    }
    let head: ItemHead<'_> = serde_json::from_str(&opaque.raw).ok()?;
    let is_encrypted = head.encrypted_content.is_some_and(|content| content.get() != "null");
    if head.kind == "reasoning" && !is_encrypted {
        return None;
    }
    serde_json::from_str(&opaque.raw).ok().map(ItemParam::Opaque)
}
