//! OpenAI Chat Completions, with `reasoning_content` as many servers send it.

use serde_json::{Value, json};

use crate::model::{StopReason, scripted::track::PlannedAnswer};

use super::{WireAnswer, cut, make_id, plain_event};

pub fn write(model: &str, planned: &PlannedAnswer, is_refusal: bool) -> WireAnswer {
    let id = make_id("chatcmpl-", planned);
    let reason = match &planned.stop {
        _ if is_refusal => "stop",
        StopReason::ToolUse => "tool_calls",
        StopReason::MaxTokens => "length",
        _ => "stop",
    };
    let chunk = |choices: Value, usage: Value| {
        plain_event(&json!({
            "id": id, "object": "chat.completion.chunk", "created": 0, "model": model,
            "choices": choices, "usage": usage,
        }))
    };
    let choice =
        |delta: Value, reason: Option<&str>| json!([{ "index": 0, "delta": delta, "finish_reason": reason }]);
    let mut events = vec![chunk(choice(json!({ "role": "assistant", "content": "" }), None), Value::Null)];
    events.extend(
        to_deltas(planned, is_refusal).into_iter().map(|delta| chunk(choice(delta, None), Value::Null)),
    );
    events.push(chunk(choice(json!({}), Some(reason)), Value::Null));
    events.push(chunk(json!([]), to_usage(planned)));
    events.push("data: [DONE]\n\n".to_owned());
    let document = json!({
        "id": id, "object": "chat.completion", "created": 0, "model": model,
        "choices": [{ "index": 0, "message": to_message(planned, is_refusal), "finish_reason": reason }],
        "usage": to_usage(planned),
    });
    WireAnswer { events, document: document.to_string() }
}

const REFUSAL: &str = "the script says so";

fn to_deltas(planned: &PlannedAnswer, is_refusal: bool) -> Vec<Value> {
    if is_refusal {
        return cut(REFUSAL).map(|piece| json!({ "refusal": piece })).collect();
    }
    let think = planned.think.as_deref().unwrap_or_default();
    let mut deltas: Vec<Value> = cut(think).map(|piece| json!({ "reasoning_content": piece })).collect();
    deltas.extend(cut(&planned.text).map(|piece| json!({ "content": piece })));
    for (index, call) in planned.calls.iter().enumerate() {
        let function = json!({ "name": call.name, "arguments": "" });
        deltas.push(json!({
            "tool_calls": [{ "index": index, "id": call.id, "type": "function", "function": function }],
        }));
        deltas.extend(
            cut(&call.arguments).map(
                |piece| json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] }),
            ),
        );
    }
    deltas
}

fn to_message(planned: &PlannedAnswer, is_refusal: bool) -> Value {
    if is_refusal {
        return json!({ "role": "assistant", "content": null, "refusal": REFUSAL });
    }
    let text = (!planned.text.is_empty()).then_some(&planned.text);
    let mut message = json!({ "role": "assistant", "content": text, "refusal": null });
    if let Some(think) = &planned.think {
        message["reasoning_content"] = json!(think);
    }
    if !planned.calls.is_empty() {
        let calls = planned.calls.iter().map(|call| {
            let function = json!({ "name": call.name, "arguments": call.arguments });
            json!({ "id": call.id, "type": "function", "function": function })
        });
        message["tool_calls"] = calls.collect();
    }
    message
}

fn to_usage(planned: &PlannedAnswer) -> Value {
    let (input, output) = (planned.usage.total_input(), planned.usage.output);
    json!({
        "prompt_tokens": input,
        "completion_tokens": output,
        "total_tokens": input.saturating_add(output),
        "prompt_tokens_details": {
            "cached_tokens": planned.usage.cache_read,
            "cache_write_tokens": planned.usage.cache_write,
        },
    })
}
