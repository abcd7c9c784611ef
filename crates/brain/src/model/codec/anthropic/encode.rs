//! Requests of Anthropic Messages.

use serde::Serialize;
use serde_json::{Map, Value, value::RawValue};

use crate::model::{
    CachePolicy, ContentBlock, Effort, ImageData, ModelRequest, ResultBlock, Speaker, ToolArguments, Wire,
};

/// The format demands a limit; without one of the caller this is it.
const MAX_TOKENS: u32 = 16_384;

#[derive(Serialize)]
struct RequestDocument<'a> {
    model: &'a str,
    max_tokens: u32,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<ThinkingParam>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputParam>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<ToolParam<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system: Vec<SystemParam<'a>>,
    messages: Vec<MessageParam<'a>>,
}

#[derive(Serialize)]
struct ThinkingParam {
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Serialize)]
struct OutputParam {
    effort: &'static str,
}

#[derive(Serialize)]
struct CacheMark {
    #[serde(rename = "type")]
    kind: &'static str,
}

const MARK: CacheMark = CacheMark { kind: "ephemeral" };

#[derive(Serialize)]
struct ToolParam<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: &'a Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheMark>,
}

#[derive(Serialize)]
struct SystemParam<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheMark>,
}

#[derive(Serialize)]
struct MessageParam<'a> {
    role: &'static str,
    content: Vec<BlockParam<'a>>,
}

/// A block with its mark. The provider's own blocks carry no mark, so they are written as they are.
#[derive(Serialize)]
#[serde(untagged)]
enum BlockParam<'a> {
    Opaque(&'a RawValue),
    Known {
        #[serde(flatten)]
        part: PartParam<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheMark>,
    },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartParam<'a> {
    Text {
        text: &'a str,
    },
    Image {
        source: ImageSourceParam<'a>,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: InputParam<'a>,
    },
    ToolResult {
        tool_use_id: &'a str,
        content: Vec<PartParam<'a>>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        is_error: bool,
    },
}

#[derive(Serialize)]
struct ImageSourceParam<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    media_type: &'a str,
    data: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum InputParam<'a> {
    Object(&'a Map<String, Value>),
    /// The format takes only objects, so invalid arguments go back inside of one.
    Invalid {
        invalid_json: &'a str,
    },
}

/// The body of a request.
pub fn encode(model: &str, request: &ModelRequest) -> serde_json::Result<String> {
    let marks = request.cache == CachePolicy::Marks;
    let last_tool = request.tools.len().saturating_sub(1);
    let tools = request.tools.iter().enumerate().map(|(index, tool)| ToolParam {
        name: &tool.name,
        description: &tool.description,
        input_schema: &tool.parameters,
        cache_control: (marks && index == last_tool).then_some(MARK),
    });
    let texts: Vec<&str> =
        request.system.iter().map(String::as_str).filter(|text| !text.trim().is_empty()).collect();
    let last_text = texts.len().saturating_sub(1);
    let system = texts.into_iter().enumerate().map(|(index, text)| SystemParam {
        kind: "text",
        text,
        cache_control: (marks && index == last_text).then_some(MARK),
    });
    let mut messages = to_messages(model, request);
    if marks {
        mark_newest(&mut messages);
    }
    let effort = request.effort.filter(|effort| *effort != Effort::None);
    serde_json::to_string(&RequestDocument {
        model,
        max_tokens: request.max_output_tokens.unwrap_or(MAX_TOKENS),
        stream: true,
        thinking: request.effort.map(|effort| ThinkingParam {
            kind: if effort == Effort::None { "disabled" } else { "adaptive" },
        }),
        output_config: effort.map(|effort| OutputParam { effort: effort.as_str() }),
        tools: tools.collect(),
        system: system.collect(),
        messages,
    })
}

/// Joins neighbours of one speaker, which the format demands, and leaves out empty text, which it refuses.
fn to_messages<'a>(model: &str, request: &'a ModelRequest) -> Vec<MessageParam<'a>> {
    let mut messages: Vec<MessageParam<'a>> = Vec::new();
    for message in &request.messages {
        let role = match message.speaker {
            Speaker::User => "user",
            Speaker::Assistant => "assistant",
        };
        let content: Vec<BlockParam<'a>> =
            message.blocks.iter().filter_map(|block| to_block(model, block)).collect();
        match messages.last_mut() {
            Some(last) if last.role == role => last.content.extend(content),
            _ if content.is_empty() => {}
            _ => messages.push(MessageParam { role, content }),
        }
    }
    for message in messages.iter_mut().filter(|message| message.role == "user") {
        // A stable sort: results first, everything else in its order.
        message.content.sort_by_key(|block| !block.is_result());
    }
    messages
}

impl BlockParam<'_> {
    fn is_result(&self) -> bool {
        matches!(self, Self::Known { part: PartParam::ToolResult { .. }, .. })
    }
}

fn to_block<'a>(model: &str, block: &'a ContentBlock) -> Option<BlockParam<'a>> {
    let part = match block {
        ContentBlock::Opaque(opaque) => {
            let fits = opaque.wire == Wire::Anthropic && opaque.model == model;
            return serde_json::from_str(&opaque.raw).ok().filter(|_| fits).map(BlockParam::Opaque);
        }
        ContentBlock::Text { text } if text.is_empty() => return None,
        ContentBlock::Text { text } => PartParam::Text { text },
        ContentBlock::Image(image) => to_image(image),
        ContentBlock::ToolCall(call) => PartParam::ToolUse {
            id: &call.id,
            name: &call.name,
            input: match &call.arguments {
                ToolArguments::Object(map) => InputParam::Object(map),
                ToolArguments::Invalid(text) => InputParam::Invalid { invalid_json: text },
            },
        },
        ContentBlock::ToolResult(result) => PartParam::ToolResult {
            tool_use_id: &result.call_id,
            content: result.blocks.iter().filter_map(to_result_part).collect(),
            is_error: result.is_error,
        },
    };
    Some(BlockParam::Known { part, cache_control: None })
}

fn to_result_part(block: &ResultBlock) -> Option<PartParam<'_>> {
    match block {
        ResultBlock::Text { text } if text.is_empty() => None,
        ResultBlock::Text { text } => Some(PartParam::Text { text }),
        ResultBlock::Image(image) => Some(to_image(image)),
    }
}

fn to_image(image: &ImageData) -> PartParam<'_> {
    PartParam::Image {
        source: ImageSourceParam { kind: "base64", media_type: &image.media_type, data: &image.data },
    }
}

/// Marks the last message of the user and the one before it. The older mark stands where the request before
/// ended, so that the provider finds that prefix however many blocks are new.
fn mark_newest(messages: &mut [MessageParam<'_>]) {
    for message in messages.iter_mut().rev().filter(|message| message.role == "user").take(2) {
        let known = message.content.iter_mut().rev().find_map(|block| match block {
            BlockParam::Known { cache_control, .. } => Some(cache_control),
            BlockParam::Opaque(_) => None,
        });
        if let Some(mark) = known {
            *mark = Some(MARK);
        }
    }
}
