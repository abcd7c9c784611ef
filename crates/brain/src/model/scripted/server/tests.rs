//! Tests of the server's judgement: what the real endpoints refuse, it refuses.

use serde_json::{Value, json};

use super::{super::script::Script, read::WireRequest, *};

fn judge(wire: Wire, body: &Value) -> Result<(), String> {
    WireRequest::read(wire, body.to_string().as_bytes()).map(|_| ())
}

#[test]
fn requests_that_real_endpoints_refuse_are_refused() {
    let anthropic = |messages: Value| json!({"model": "m", "max_tokens": 5, "messages": messages});
    let chat = |messages: Value| json!({"model": "m", "messages": messages});
    let responses = |input: Value| json!({"model": "m", "input": input});
    let tool_use = json!({"type": "tool_use", "id": "a", "name": "x", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "a", "content": "ok"});
    let text = json!({"type": "text", "text": "hi"});
    let user = |content: Value| json!({"role": "user", "content": content});
    let assistant = |content: Value| json!({"role": "assistant", "content": content});
    let thought = |signature: &str| json!({"type": "thinking", "thinking": "t", "signature": signature});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "x", "arguments": "{}"}}]});
    let item = json!({"type": "function_call", "call_id": "a", "name": "x", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "a", "output": "ok"});
    let reasoning = |content: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": content});
    let signed = write::sign("t");
    let good = [
        (Wire::Anthropic, anthropic(json!([user(json!("hi"))]))),
        (
            Wire::Anthropic,
            anthropic(json!([
                user(json!("hi")),
                assistant(json!([thought(&signed), tool_use])),
                user(json!([result, text]))
            ])),
        ),
        (
            Wire::Chat,
            chat(json!([user(json!("hi")), call, {"role": "tool", "tool_call_id": "a", "content": "ok"}])),
        ),
        (Wire::Responses, responses(json!("hi"))),
        (Wire::Responses, responses(json!([user(json!("hi")), reasoning(&signed), item, output]))),
    ];
    for (wire, body) in good {
        assert_eq!(judge(wire, &body), Ok(()), "{body}");
    }
    let bad = [
        (Wire::Anthropic, json!({"model": "m", "messages": [user(json!("hi"))]}), "max_tokens"),
        (Wire::Anthropic, anthropic(json!([])), "empty"),
        (Wire::Anthropic, anthropic(json!([user(json!("hi")), assistant(json!([tool_use]))])), "no result"),
        (
            Wire::Anthropic,
            anthropic(json!([user(json!("hi")), assistant(json!([tool_use])), user(json!([text, result]))])),
            "before text",
        ),
        (Wire::Anthropic, anthropic(json!([user(json!([result]))])), "no open call"),
        (
            Wire::Anthropic,
            anthropic(json!([user(json!("hi")), assistant(json!([thought("x")]))])),
            "signature",
        ),
        (Wire::Anthropic, anthropic(json!([user(json!([{"type": "text", "text": ""}]))])), "non-empty"),
        (
            Wire::Anthropic,
            anthropic(json!([user(json!("hi")), assistant(json!([tool_use, tool_use]))])),
            "two calls",
        ),
        (Wire::Chat, chat(json!([user(json!("hi")), call, user(json!("hi"))])), "no result"),
        (
            Wire::Chat,
            chat(json!([user(json!("hi")), {"role": "tool", "tool_call_id": "a", "content": "ok"}])),
            "no open call",
        ),
        (Wire::Chat, chat(json!([assistant(json!(""))])), "needs content"),
        (Wire::Chat, json!({"messages": []}), "model"),
        (Wire::Responses, responses(json!([user(json!("hi")), item])), "no result"),
        (Wire::Responses, responses(json!([output])), "no open call"),
        (Wire::Responses, responses(json!([reasoning("x")])), "verified"),
    ];
    for (wire, body, reason) in bad {
        let said = judge(wire, &body).unwrap_err();
        assert!(said.contains(reason), "{body}: {said}");
    }
    let mut marked =
        anthropic(json!([user(json!([text.clone(), text.clone(), text.clone(), text.clone(), text]))]));
    for block in marked["messages"][0]["content"].as_array_mut().unwrap() {
        block["cache_control"] = json!({"type": "ephemeral"});
    }
    assert!(judge(Wire::Anthropic, &marked).unwrap_err().contains("maximum of 4"));
}

#[tokio::test]
async fn the_server_listens_on_loopback_only() {
    let script = Script::parse("[[turns]]").unwrap();
    let bind =
        |address: &str| ModelServer::bind(script.clone(), address.parse().unwrap(), ServerOptions::default());
    assert!(bind("127.0.0.1:0").await.is_ok());
    assert!(matches!(bind("0.0.0.0:0").await, Err(ModelServerError::NotLoopback(_))));
}
