//! Anthropic Messages.

use serde_json::{Value, json};

use crate::model::{StopReason, scripted::track::PlannedAnswer};

use super::{WireAnswer, cut, make_id, named_event, sign};

pub fn write(model: &str, planned: &PlannedAnswer, is_refusal: bool) -> WireAnswer {
    let usage = json!({
        "input_tokens": planned.usage.input,
        "output_tokens": planned.usage.output,
        "cache_read_input_tokens": planned.usage.cache_read,
        "cache_creation_input_tokens": planned.usage.cache_write,
    });
    let stop = if is_refusal { "refusal" } else { stop_word(&planned.stop) };
    let details = is_refusal
        .then(|| json!({ "type": "refusal", "category": null, "explanation": "the script says so" }));
    let blocks = if is_refusal { Vec::new() } else { to_blocks(planned) };
    let message = json!({
        "id": make_id("msg_", planned),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks.iter().map(|block| block.whole.clone()).collect::<Vec<_>>(),
        "stop_reason": stop,
        "stop_sequence": null,
        "stop_details": details,
        "usage": usage,
    });
    let mut first = message.clone();
    first["content"] = json!([]);
    first["stop_reason"] = Value::Null;
    first["stop_details"] = Value::Null;
    first["usage"]["output_tokens"] = json!(1);
    let mut events = vec![
        named_event(&json!({ "type": "message_start", "message": first })),
        named_event(&json!({ "type": "ping" })),
    ];
    for (index, block) in blocks.iter().enumerate() {
        events.push(named_event(
            &json!({ "type": "content_block_start", "index": index, "content_block": block.empty }),
        ));
        events.extend(block.deltas.iter().map(|delta| {
            named_event(&json!({ "type": "content_block_delta", "index": index, "delta": delta }))
        }));
        events.push(named_event(&json!({ "type": "content_block_stop", "index": index })));
    }
    events.push(named_event(&json!({
        "type": "message_delta",
        "delta": { "stop_reason": stop, "stop_sequence": null, "stop_details": details },
        "usage": usage,
    })));
    events.push(named_event(&json!({ "type": "message_stop" })));
    WireAnswer { events, document: message.to_string() }
}

fn stop_word(stop: &StopReason) -> &'static str {
    match stop {
        StopReason::ToolUse => "tool_use",
        StopReason::MaxTokens => "max_tokens",
        _ => "end_turn",
    }
}

/// A block as it begins, as it grows, and as a whole.
struct BlockForms {
    empty: Value,
    deltas: Vec<Value>,
    whole: Value,
}

fn to_blocks(planned: &PlannedAnswer) -> Vec<BlockForms> {
    let mut blocks = Vec::new();
    if let Some(think) = &planned.think {
        let signature = sign(think);
        let mut deltas: Vec<Value> =
            cut(think).map(|piece| json!({ "type": "thinking_delta", "thinking": piece })).collect();
        deltas.push(json!({ "type": "signature_delta", "signature": signature }));
        blocks.push(BlockForms {
            empty: json!({ "type": "thinking", "thinking": "", "signature": "" }),
            deltas,
            whole: json!({ "type": "thinking", "thinking": think, "signature": signature }),
        });
    }
    if !planned.text.is_empty() {
        blocks.push(BlockForms {
            empty: json!({ "type": "text", "text": "" }),
            deltas: cut(&planned.text).map(|piece| json!({ "type": "text_delta", "text": piece })).collect(),
            whole: json!({ "type": "text", "text": planned.text }),
        });
    }
    blocks.extend(planned.calls.iter().map(|call| {
        let form =
            |input: Value| json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input });
        let delta = |piece| json!({ "type": "input_json_delta", "partial_json": piece });
        BlockForms {
            empty: form(json!({})),
            deltas: cut(&call.arguments).map(delta).collect(),
            // A whole answer has no room for arguments that are no JSON.
            whole: form(serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))),
        }
    }));
    blocks
}
