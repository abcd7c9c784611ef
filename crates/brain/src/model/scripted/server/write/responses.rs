//! OpenAI Responses.

use serde_json::{Value, json};

use crate::model::{StopReason, scripted::track::PlannedAnswer};

use super::{WireAnswer, cut, make_id, named_event, sign};

const REFUSAL: &str = "the script says so";

pub fn write(model: &str, planned: &PlannedAnswer, is_refusal: bool) -> WireAnswer {
    let id = make_id("resp_", planned);
    let items = to_items(planned, is_refusal, &id["resp_".len()..]);
    let is_cut = planned.stop == StopReason::MaxTokens && !is_refusal;
    let response = |status: &str, output: Value, usage: Value, details: Value| {
        json!({
            "id": id, "object": "response", "created_at": 0, "model": model, "status": status, "output": output,
            "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "error": null,
            "incomplete_details": details, "instructions": null, "metadata": {}, "usage": usage,
        })
    };
    let (status, details) = if is_cut {
        ("incomplete", json!({ "reason": "max_output_tokens" }))
    } else {
        ("completed", Value::Null)
    };
    let output: Value = items.iter().map(|item| item.whole.clone()).collect();
    let whole = response(status, output, to_usage(planned), details);
    let begun = response("in_progress", json!([]), Value::Null, Value::Null);
    let mut events = vec![
        json!({ "type": "response.created", "response": begun }),
        json!({ "type": "response.in_progress", "response": begun }),
    ];
    for (index, item) in items.iter().enumerate() {
        events
            .push(json!({ "type": "response.output_item.added", "output_index": index, "item": item.empty }));
        for event in &item.events {
            let mut event = event.clone();
            event["output_index"] = json!(index);
            event["item_id"] = item.whole["id"].clone();
            events.push(event);
        }
        events
            .push(json!({ "type": "response.output_item.done", "output_index": index, "item": item.whole }));
    }
    events.push(json!({ "type": format!("response.{status}"), "response": whole }));
    for (number, event) in events.iter_mut().enumerate() {
        event["sequence_number"] = json!(number);
    }
    WireAnswer { events: events.iter().map(named_event).collect(), document: whole.to_string() }
}

/// An item as it begins, as it grows, and as a whole.
struct ItemForms {
    empty: Value,
    events: Vec<Value>,
    whole: Value,
}

fn to_items(planned: &PlannedAnswer, is_refusal: bool, stem: &str) -> Vec<ItemForms> {
    if is_refusal {
        let part = json!({ "type": "refusal", "refusal": REFUSAL });
        let pieces = cut(REFUSAL)
            .map(|piece| json!({ "type": "response.refusal.delta", "content_index": 0, "delta": piece }));
        return vec![to_message(stem, &part, &json!({ "type": "refusal", "refusal": "" }), pieces.collect())];
    }
    let mut items: Vec<ItemForms> = planned.think.iter().map(|think| to_reasoning(stem, think)).collect();
    if !planned.text.is_empty() {
        let part =
            |text: &str| json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] });
        let pieces = cut(&planned.text).map(
            |piece| json!({ "type": "response.output_text.delta", "content_index": 0, "delta": piece, "logprobs": [] }),
        );
        items.push(to_message(stem, &part(&planned.text), &part(""), pieces.collect()));
    }
    items.extend(planned.calls.iter().map(|call| {
        let form = |arguments: &str, status: &str| {
            json!({
                "type": "function_call", "id": format!("fc_{}", call.id), "call_id": call.id, "name": call.name,
                "arguments": arguments, "status": status,
            })
        };
        let mut events: Vec<Value> = cut(&call.arguments)
            .map(|piece| json!({ "type": "response.function_call_arguments.delta", "delta": piece }))
            .collect();
        events.push(json!({
            "type": "response.function_call_arguments.done", "name": call.name, "arguments": call.arguments,
        }));
        ItemForms { empty: form("", "in_progress"), events, whole: form(&call.arguments, "completed") }
    }));
    items
}

fn to_message(stem: &str, part: &Value, empty: &Value, pieces: Vec<Value>) -> ItemForms {
    let form = |content: Value, status: &str| {
        json!({
            "type": "message", "id": format!("msg_{stem}"), "role": "assistant", "status": status, "content": content,
        })
    };
    let mut events =
        vec![json!({ "type": "response.content_part.added", "content_index": 0, "part": empty })];
    events.extend(pieces);
    events.push(json!({ "type": "response.content_part.done", "content_index": 0, "part": part }));
    ItemForms { empty: form(json!([]), "in_progress"), events, whole: form(json!([part]), "completed") }
}

fn to_reasoning(stem: &str, think: &str) -> ItemForms {
    let part = |text: &str| json!({ "type": "summary_text", "text": text });
    let form = |summary: Value, encrypted: Option<String>| {
        json!({
            "type": "reasoning", "id": format!("rs_{stem}"), "summary": summary, "encrypted_content": encrypted,
        })
    };
    let mut events = vec![
        json!({ "type": "response.reasoning_summary_part.added", "summary_index": 0, "part": part("") }),
    ];
    events.extend(cut(think).map(|piece| {
        json!({ "type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": piece })
    }));
    events.push(json!({ "type": "response.reasoning_summary_text.done", "summary_index": 0, "text": think }));
    events.push(
        json!({ "type": "response.reasoning_summary_part.done", "summary_index": 0, "part": part(think) }),
    );
    ItemForms { empty: form(json!([]), None), events, whole: form(json!([part(think)]), Some(sign(think))) }
}

fn to_usage(planned: &PlannedAnswer) -> Value {
    let (input, output) = (planned.usage.total_input(), planned.usage.output);
    json!({
        "input_tokens": input,
        "input_tokens_details": {
            "cached_tokens": planned.usage.cache_read,
            "cache_write_tokens": planned.usage.cache_write,
        },
        "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": input.saturating_add(output),
    })
}
