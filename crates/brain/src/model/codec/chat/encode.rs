//! Requests of Chat Completions.

use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::model::{
    ChatMessage, ContentBlock, ImageData, ModelAddress, ModelRequest, ResultBlock, Speaker, ToolCall,
    ToolResult, Wire,
};

#[derive(Serialize)]
struct RequestDocument<'a> {
    model: &'a str,
    stream: bool,
    stream_options: StreamParam,
    /// OpenAI's newer models take only this limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    /// Servers other than OpenAI's know only this limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<ToolParam<'a>>,
    messages: Vec<MessageParam<'a>>,
}

#[derive(Serialize)]
struct StreamParam {
    include_usage: bool,
}

#[derive(Serialize)]
struct ToolParam<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionParam<'a>,
}

#[derive(Serialize)]
struct FunctionParam<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a Value,
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "snake_case")]
enum MessageParam<'a> {
    System {
        content: String,
    },
    User {
        content: ContentParam<'a>,
    },
    Assistant {
        content: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_details: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<CallParam<'a>>,
    },
    Tool {
        tool_call_id: &'a str,
        content: String,
    },
}

#[derive(Serialize)]
#[serde(untagged)]
enum ContentParam<'a> {
    Text(&'a str),
    Parts(Vec<PartParam<'a>>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartParam<'a> {
    Text { text: std::borrow::Cow<'a, str> },
    ImageUrl { image_url: UrlParam },
}

#[derive(Serialize)]
struct UrlParam {
    url: String,
}

#[derive(Serialize)]
struct CallParam<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: CallFunctionParam<'a>,
}

#[derive(Serialize)]
struct CallFunctionParam<'a> {
    name: &'a str,
    arguments: String,
}

/// The fields of a thought that its server wants back.
#[derive(serde::Deserialize, Default)]
struct ReasoningFields<'a> {
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_details: Option<&'a RawValue>,
}

/// The body of a request.
pub fn encode(address: &ModelAddress, request: &ModelRequest) -> serde_json::Result<String> {
    let is_vendor = address.is_vendor();
    let system = request.system.join("\n\n");
    let mut messages = Vec::new();
    if !system.trim().is_empty() {
        messages.push(MessageParam::System { content: system });
    }
    for message in &request.messages {
        match message.speaker {
            Speaker::User => add_user(message, &mut messages),
            Speaker::Assistant => messages.extend(to_assistant(address.model(), message)),
        }
    }
    let tools = request.tools.iter().map(|tool| ToolParam {
        kind: "function",
        function: FunctionParam {
            name: &tool.name,
            description: &tool.description,
            parameters: &tool.parameters,
        },
    });
    let limit = request.max_output_tokens;
    serde_json::to_string(&RequestDocument {
        model: address.model(),
        stream: true,
        stream_options: StreamParam { include_usage: true },
        max_completion_tokens: limit.filter(|_| is_vendor),
        max_tokens: limit.filter(|_| !is_vendor),
        reasoning_effort: request.effort.map(crate::model::Effort::as_str),
        prompt_cache_key: request.conversation.as_deref().filter(|_| is_vendor),
        tools: tools.collect(),
        messages,
    })
}

/// Adds the results first, one message for each, and then everything else as one message of the user: the
/// format takes pictures only there.
fn add_user<'a>(message: &'a ChatMessage, messages: &mut Vec<MessageParam<'a>>) {
    let mut parts: Vec<PartParam<'a>> = Vec::new();
    for block in &message.blocks {
        if let ContentBlock::ToolResult(result) = block {
            messages.push(MessageParam::Tool { tool_call_id: &result.call_id, content: result.to_text() });
            add_images(result, &mut parts);
        }
    }
    for block in &message.blocks {
        match block {
            ContentBlock::Text { text } if !text.is_empty() => {
                parts.push(PartParam::Text { text: text.into() });
            }
            ContentBlock::Image(image) => parts.push(to_image(image)),
            _ => {}
        }
    }
    let texts: Vec<&str> = message.blocks.iter().filter_map(as_text).collect();
    match (parts.len(), texts.as_slice()) {
        (0, _) => {}
        (1, [text]) => messages.push(MessageParam::User { content: ContentParam::Text(text) }),
        _ => messages.push(MessageParam::User { content: ContentParam::Parts(parts) }),
    }
}

fn as_text(block: &ContentBlock) -> Option<&str> {
    match block {
        ContentBlock::Text { text } if !text.is_empty() => Some(text),
        _ => None,
    }
}

fn add_images<'a>(result: &'a ToolResult, parts: &mut Vec<PartParam<'a>>) {
    let images: Vec<&ImageData> = result
        .blocks
        .iter()
        .filter_map(|block| match block {
            ResultBlock::Image(image) => Some(image),
            ResultBlock::Text { .. } => None,
        })
        .collect();
    if !images.is_empty() {
        parts.push(PartParam::Text { text: format!("Pictures of tool call {}:", result.call_id).into() });
    }
    parts.extend(images.into_iter().map(to_image));
}

fn to_image<'a>(image: &ImageData) -> PartParam<'a> {
    PartParam::ImageUrl {
        image_url: UrlParam { url: format!("data:{};base64,{}", image.media_type, image.data) },
    }
}

fn to_assistant<'a>(model: &str, message: &'a ChatMessage) -> Option<MessageParam<'a>> {
    let (mut text, mut tool_calls, mut reasoning) = (String::new(), Vec::new(), ReasoningFields::default());
    for block in &message.blocks {
        match block {
            ContentBlock::Text { text: more } => text.push_str(more),
            ContentBlock::ToolCall(call) => tool_calls.push(to_call(call)),
            ContentBlock::Opaque(opaque) if opaque.wire == Wire::Chat && opaque.model == model => {
                reasoning = serde_json::from_str(&opaque.raw).unwrap_or_default();
            }
            _ => {}
        }
    }
    if text.is_empty() && tool_calls.is_empty() {
        return None;
    }
    Some(MessageParam::Assistant {
        content: (!text.is_empty()).then_some(text),
        reasoning_content: reasoning.reasoning_content,
        reasoning_details: reasoning.reasoning_details,
        tool_calls,
    })
}

fn to_call(call: &ToolCall) -> CallParam<'_> {
    CallParam {
        id: &call.id,
        kind: "function",
        function: CallFunctionParam { name: &call.name, arguments: call.arguments.to_text() },
    }
}
