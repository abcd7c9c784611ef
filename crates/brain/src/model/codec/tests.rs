//! Tests of the three wire formats: streams as the vendors send them, every cut of them, and requests.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::model::{
    CachePolicy, ChatMessage, Effort, ImageData, OpaqueBlock, ResultBlock, StopReason, TokenUsage,
    ToolArguments, ToolCall, ToolResult, ToolSchema,
};

const WIRES: [Wire; 3] = [Wire::Anthropic, Wire::Chat, Wire::Responses];

const ANTHROPIC: &str = r#"event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"claude-x-1","content":[],"stop_reason":null,"usage":{"input_tokens":10,"cache_read_input_tokens":7,"cache_creation_input_tokens":3,"output_tokens":1}}}

event: ping
data: {"type":"ping"}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm, ä "}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"🦀?"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"c2ln/+=="}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"redacted_thinking","data":"b3BhcXVl"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"I look "}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"日本."}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: content_block_start
data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"toolu_1","name":"ls","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{\"path\": \"/s"}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"rc\"}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":3}

event: content_block_start
data: {"type":"content_block_start","index":4,"content_block":{"type":"tool_use","id":"toolu_2","name":"now","input":{}}}

event: content_block_stop
data: {"type":"content_block_stop","index":4}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":42}}

event: message_stop
data: {"type":"message_stop"}

"#;

const CHAT: &str = r#"data: {"id":"c","object":"chat.completion.chunk","model":"gpt-x-1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}

data: {"id":"c","model":"gpt-x-1","choices":[{"index":0,"delta":{"reasoning_content":"Hm, ä "}}]}

data: {"id":"c","model":"gpt-x-1","choices":[{"index":0,"delta":{"reasoning_content":"🦀?"}}]}

data: {"id":"c","model":"gpt-x-1","choices":[{"index":0,"delta":{"content":"I look "}}]}

data: {"id":"c","model":"gpt-x-1","choices":[{"index":0,"delta":{"content":"日本."}}]}

data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"toolu_1","type":"function","function":{"name":"ls","arguments":""}}]}}]}

data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"toolu_2","type":"function","function":{"name":"now","arguments":""}}]}}]}

data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"path\": \"/s"}}]}}]}

data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"rc\"}"}}]}}]}

data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}

data: {"id":"c","choices":[],"usage":{"prompt_tokens":20,"completion_tokens":42,"total_tokens":62,"prompt_tokens_details":{"cached_tokens":7,"cache_write_tokens":3}}}

data: [DONE]

"#;

const RESPONSES: &str = r#"event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"r","status":"in_progress","output":[]}}

event: response.output_item.added
data: {"type":"response.output_item.added","sequence_number":1,"output_index":0,"item":{"type":"reasoning","id":"rs_1","summary":[]}}

event: response.reasoning_summary_text.delta
data: {"type":"response.reasoning_summary_text.delta","sequence_number":2,"output_index":0,"summary_index":0,"delta":"Hm, ä "}

event: response.reasoning_summary_text.delta
data: {"type":"response.reasoning_summary_text.delta","sequence_number":3,"output_index":0,"summary_index":0,"delta":"🦀?"}

event: response.output_item.done
data: {"type":"response.output_item.done","sequence_number":4,"output_index":0,"item":{"type":"reasoning","id":"rs_1","zeta":1,"alpha":2,"summary":[{"type":"summary_text","text":"Hm, ä 🦀?"}],"encrypted_content":"c2ln/+=="}}

event: response.output_item.added
data: {"type":"response.output_item.added","sequence_number":5,"output_index":1,"item":{"type":"message","id":"msg_1","role":"assistant","content":[]}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":6,"output_index":1,"content_index":0,"delta":"I look "}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":7,"output_index":1,"content_index":0,"delta":"日本."}

event: response.output_item.done
data: {"type":"response.output_item.done","sequence_number":8,"output_index":1,"item":{"type":"message","id":"msg_1","role":"assistant","status":"completed","content":[{"type":"output_text","text":"I look 日本.","annotations":[]}]}}

event: response.output_item.added
data: {"type":"response.output_item.added","sequence_number":9,"output_index":2,"item":{"type":"function_call","id":"fc_1","call_id":"toolu_1","name":"ls","arguments":""}}

event: response.function_call_arguments.delta
data: {"type":"response.function_call_arguments.delta","sequence_number":10,"output_index":2,"item_id":"fc_1","delta":"{\"path\": \"/s"}

event: response.function_call_arguments.delta
data: {"type":"response.function_call_arguments.delta","sequence_number":11,"output_index":2,"item_id":"fc_1","delta":"rc\"}"}

event: response.output_item.done
data: {"type":"response.output_item.done","sequence_number":12,"output_index":2,"item":{"type":"function_call","id":"fc_1","call_id":"toolu_1","name":"ls","arguments":"{\"path\": \"/src\"}","status":"completed"}}

event: response.output_item.added
data: {"type":"response.output_item.added","sequence_number":13,"output_index":3,"item":{"type":"function_call","id":"fc_2","call_id":"toolu_2","name":"now","arguments":""}}

event: response.output_item.done
data: {"type":"response.output_item.done","sequence_number":14,"output_index":3,"item":{"type":"function_call","id":"fc_2","call_id":"toolu_2","name":"now","arguments":"","status":"completed"}}

event: response.completed
data: {"type":"response.completed","sequence_number":15,"response":{"id":"r","model":"gpt-x-1","status":"completed","output":[],"usage":{"input_tokens":20,"input_tokens_details":{"cached_tokens":7,"cache_write_tokens":3},"output_tokens":42}}}

"#;

fn stream(wire: Wire) -> &'static str {
    match wire {
        Wire::Anthropic => ANTHROPIC,
        Wire::Responses => RESPONSES,
        Wire::Chat | Wire::Script => CHAT,
    }
}

fn read_for<'a>(
    wire: Wire,
    request: &ModelRequest,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Result<Answer, ModelError>, Vec<ModelDelta>) {
    let mut deltas = Vec::new();
    let mut reader = AnswerReader::new(wire, "m", request);
    for piece in pieces {
        if let Err(error) = reader.push(piece, &mut |delta| deltas.push(delta)) {
            return (Err(error), deltas);
        }
    }
    let result = reader.finish(&mut |delta| deltas.push(delta));
    (result, deltas)
}

fn read(wire: Wire, text: &str) -> Result<Answer, ModelError> {
    read_for(wire, &ModelRequest::default(), [text.as_bytes()]).0
}

fn call(id: &str, name: &str, arguments: &str) -> ContentBlock {
    ContentBlock::ToolCall(ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: ToolArguments::parse(arguments),
    })
}

fn opaque(wire: Wire, raw: &str, text: &str) -> ContentBlock {
    ContentBlock::Opaque(OpaqueBlock { wire, model: "m".into(), raw: raw.into(), text: text.into() })
}

/// The answer that all three streams mean.
fn expected(wire: Wire) -> Answer {
    let text = "Hm, ä 🦀?";
    let mut blocks = match wire {
        Wire::Anthropic => vec![
            opaque(wire, r#"{"type":"thinking","thinking":"Hm, ä 🦀?","signature":"c2ln/+=="}"#, text),
            opaque(wire, r#"{"data":"b3BhcXVl","type":"redacted_thinking"}"#, ""),
        ],
        Wire::Responses => vec![opaque(
            wire,
            r#"{"type":"reasoning","id":"rs_1","zeta":1,"alpha":2,"summary":[{"type":"summary_text","text":"Hm, ä 🦀?"}],"encrypted_content":"c2ln/+=="}"#,
            text,
        )],
        Wire::Chat | Wire::Script => vec![opaque(wire, r#"{"reasoning_content":"Hm, ä 🦀?"}"#, text)],
    };
    blocks.extend([
        ContentBlock::text("I look 日本."),
        call("toolu_1", "ls", r#"{"path": "/src"}"#),
        call("toolu_2", "now", ""),
    ]);
    Answer {
        blocks,
        stop: StopReason::ToolUse,
        usage: TokenUsage { input: 10, output: 42, cache_read: 7, cache_write: 3 },
        model: if wire == Wire::Anthropic { "claude-x-1" } else { "gpt-x-1" }.into(),
    }
}

#[test]
fn a_stream_becomes_its_answer_and_its_deltas() {
    for wire in WIRES {
        let expected = expected(wire);
        let expected = match wire {
            // The usage of Anthropic counts cached tokens apart, that of OpenAI within.
            Wire::Anthropic => expected,
            _ => Answer { usage: TokenUsage { input: 10, ..expected.usage }, ..expected },
        };
        let (answer, deltas) = read_for(wire, &ModelRequest::default(), [stream(wire).as_bytes()]);
        assert_eq!(answer.unwrap(), expected, "{wire:?}");
        let join = |pick: fn(&ModelDelta) -> Option<&str>| deltas.iter().filter_map(pick).collect::<String>();
        let text = join(|delta| match delta {
            ModelDelta::Text { text } => Some(text),
            _ => None,
        });
        let thought = join(|delta| match delta {
            ModelDelta::Reasoning { text } => Some(text),
            _ => None,
        });
        let arguments = join(|delta| match delta {
            ModelDelta::CallArguments { index: 0, text } => Some(text),
            _ => None,
        });
        assert_eq!((text.as_str(), thought.as_str()), ("I look 日本.", "Hm, ä 🦀?"), "{wire:?}");
        assert_eq!(arguments, r#"{"path": "/src"}"#, "{wire:?}");
        let started: Vec<&ModelDelta> =
            deltas.iter().filter(|delta| matches!(delta, ModelDelta::CallStarted { .. })).collect();
        let start =
            |index, id: &str, name: &str| ModelDelta::CallStarted { index, id: id.into(), name: name.into() };
        assert_eq!(started, [&start(0, "toolu_1", "ls"), &start(1, "toolu_2", "now")], "{wire:?}");
    }
}

#[test]
fn every_cut_into_two_pieces_gives_the_same_answer() {
    for wire in WIRES {
        for text in [stream(wire).to_owned(), stream(wire).replace('\n', "\r\n")] {
            let whole = read_for(wire, &ModelRequest::default(), [text.as_bytes()]);
            assert!(whole.0.is_ok(), "{wire:?}: {whole:?}");
            for at in 0..=text.len() {
                let (left, right) = text.as_bytes().split_at(at);
                let cut = read_for(wire, &ModelRequest::default(), [left, right]);
                assert_eq!(cut, whole, "{wire:?} at {at}");
            }
            let bytes = read_for(wire, &ModelRequest::default(), text.as_bytes().chunks(1));
            assert_eq!(bytes, whole, "{wire:?}");
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_retryable_and_never_an_answer() {
    for wire in WIRES {
        let text = stream(wire);
        // Anthropic and Responses end with one event; Chat with its reason to stop.
        let end = match wire {
            Wire::Anthropic => text.find(r#"{"type":"message_stop"}"#).unwrap() + 23,
            Wire::Responses => text.len() - 2,
            Wire::Chat | Wire::Script => text.find("data: {\"id\":\"c\",\"choices\":[],").unwrap() - 2,
        };
        for at in 0..end {
            let result = read_for(wire, &ModelRequest::default(), [&text.as_bytes()[..at]]).0;
            let error = result.expect_err(&format!("{wire:?}: an answer after {at} bytes"));
            assert!(matches!(error, ModelError::StreamCut { .. }), "{wire:?} at {at}: {error:?}");
            assert!(error.is_retryable());
        }
        assert!(read_for(wire, &ModelRequest::default(), [&text.as_bytes()[..end]]).0.is_ok(), "{wire:?}");
    }
}

#[test]
fn comments_unknown_events_and_later_bytes_change_nothing() {
    for wire in WIRES {
        let noise = ": keep-alive\n\nevent: response.brand_new\ndata: {\"type\":\"brand_new\",\"x\":[1]}\n\n";
        let noisy: String = stream(wire)
            .split_inclusive("\n\n")
            .map(|event| format!("{noise}id: 7\nretry: 1\n{event}"))
            .chain([noise.to_owned(), "data: {\"type\":\"error\",\"error\":{}}\n\n".to_owned()])
            .collect();
        let answer = read(wire, stream(wire)).unwrap();
        assert_eq!(read(wire, &noisy).unwrap(), answer, "{wire:?}");
        let garbage = [noisy.as_bytes(), b"data: \xff\n\n"].concat();
        assert_eq!(
            read_for(wire, &ModelRequest::default(), [garbage.as_slice()]).0.unwrap(),
            answer,
            "{wire:?}"
        );
    }
}

#[test]
fn an_error_event_after_the_status_is_its_error() {
    let errors = [
        (
            Wire::Anthropic,
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"}}\n\n",
        ),
        (Wire::Chat, "data: {\"error\":{\"message\":\"busy\",\"type\":\"x\",\"code\":503}}\n\n"),
        (
            Wire::Responses,
            "event: error\ndata: {\"type\":\"error\",\"code\":\"server_is_overloaded\",\"message\":\"busy\"}\n\n",
        ),
        (
            Wire::Responses,
            "data: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"server_is_overloaded\",\"message\":\"busy\"}}}\n\n",
        ),
    ];
    for (wire, error) in errors {
        let events: Vec<&str> = stream(wire).split_inclusive("\n\n").collect();
        for before in 0..events.len() - 2 {
            let text = format!("{}{error}", events[..before].concat());
            let overloaded = ModelError::Overloaded { retry_after: None, message: "busy".into() };
            assert_eq!(read(wire, &text), Err(overloaded), "{wire:?} after {before} events");
        }
    }
}

#[test]
fn an_event_that_is_no_json_is_malformed() {
    for wire in WIRES {
        let events: Vec<&str> = stream(wire).split_inclusive("\n\n").collect();
        for before in 0..events.len() - 2 {
            for bad in ["data: {\"type\": \"x\n\n", "data: hello\n\n", "data: [1,\n\n"] {
                let result = read(wire, &format!("{}{bad}", events[..before].concat()));
                assert!(
                    matches!(result, Err(ModelError::MalformedStream { .. })),
                    "{wire:?} {before}: {result:?}"
                );
            }
        }
    }
}

#[test]
fn a_refusal_is_an_error_with_its_tokens() {
    let usage = TokenUsage { input: 5, output: 2, ..TokenUsage::default() };
    let refused = |message: &str| Err(ModelError::Refused { message: message.into(), usage });
    let anthropic = concat!(
        "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":5,\"output_tokens\":1}}}\n\n",
        "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"refusal\",\"stop_details\":{\"type\":\"refusal\",\"category\":\"bio\",\"explanation\":null}},\"usage\":{\"output_tokens\":2}}\n\n",
        "data: {\"type\":\"message_stop\"}\n\n",
    );
    assert_eq!(read(Wire::Anthropic, anthropic), refused("bio"));
    let chat = |delta: &str, reason: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":\"{reason}\"}}],\"usage\":{{\"prompt_tokens\":5,\"completion_tokens\":2}}}}\n\ndata: [DONE]\n\n"
        )
    };
    assert_eq!(read(Wire::Chat, &chat("{\"refusal\":\"no\"}", "stop")), refused("no"));
    let filtered = "the provider's content filter stopped the answer";
    assert_eq!(read(Wire::Chat, &chat("{\"content\":\"a\"}", "content_filter")), refused(filtered));
    let responses = |output: &str, status: &str, details: &str| {
        format!(
            "data: {{\"type\":\"response.{status}\",\"response\":{{\"status\":\"{status}\",\"output\":{output},\"incomplete_details\":{details},\"usage\":{{\"input_tokens\":5,\"output_tokens\":2}}}}}}\n\n"
        )
    };
    let said = r#"[{"type":"message","role":"assistant","content":[{"type":"refusal","refusal":"no"}]}]"#;
    assert_eq!(read(Wire::Responses, &responses(said, "completed", "null")), refused("no"));
    let details = r#"{"reason":"content_filter"}"#;
    assert_eq!(read(Wire::Responses, &responses("[]", "incomplete", details)), refused(filtered));
    let limit = read(Wire::Responses, &responses("[]", "incomplete", r#"{"reason":"max_output_tokens"}"#));
    assert_eq!(limit.unwrap().stop, StopReason::MaxTokens);
}

#[test]
fn calls_get_ids_of_their_own() {
    let chat = |calls: &str| {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":{calls}}},\"finish_reason\":\"stop\"}}]}}\n\n"
        )
    };
    let cases = [
        // Every call has index 0: a new id begins a new call.
        (
            r#"[{"index":0,"id":"a","function":{"name":"x","arguments":"{}"}},{"index":0,"id":"b","function":{"name":"y","arguments":"{}"}}]"#,
            vec!["a:x", "b:y"],
        ),
        // No index at all.
        (
            r#"[{"id":"a","function":{"name":"x","arguments":"{"}},{"function":{"arguments":"}"}},{"id":"b","function":{"name":"y","arguments":{}}}]"#,
            vec!["a:x", "b:y"],
        ),
        // No ids, and one id twice.
        (
            r#"[{"index":0,"function":{"name":"x"}},{"index":1,"function":{"name":"y"}}]"#,
            vec!["call_2:x", "call_3:y"],
        ),
        (
            r#"[{"index":0,"id":"a","function":{"name":"x"}},{"index":1,"id":"a","function":{"name":"y"}}]"#,
            vec!["a:x", "a_2:y"],
        ),
        // The conversation has used this id already.
        (r#"[{"index":0,"id":"old","function":{"name":"x"}}]"#, vec!["old_2:x"]),
    ];
    let request = ModelRequest {
        messages: vec![ChatMessage::from_model(vec![call("old", "x", "")])],
        ..ModelRequest::default()
    };
    for (calls, expected) in cases {
        let answer = read_for(Wire::Chat, &request, [chat(calls).as_bytes()]).0.unwrap();
        let got: Vec<String> = answer.calls().map(|call| format!("{}:{}", call.id, call.name)).collect();
        assert_eq!(got, expected, "{calls}");
        assert_eq!(answer.stop, StopReason::ToolUse, "servers say `stop` after calls too");
        assert!(answer.calls().all(|call| matches!(call.arguments, ToolArguments::Object(_))), "{answer:?}");
    }
}

#[test]
fn invalid_arguments_are_kept_as_they_came() {
    for wire in WIRES {
        let text = stream(wire).replace(r#"rc\"}"#, r#"rc\""#);
        let answer = read(wire, &text).unwrap();
        let first = answer.calls().next().unwrap();
        assert!(
            matches!(&first.arguments, ToolArguments::Invalid(raw) if raw.starts_with(r#"{"path": "/src"#)),
            "{first:?}"
        );
    }
}

#[test]
fn a_whole_document_is_an_answer_too() {
    let documents = [
        (
            Wire::Anthropic,
            r#" {"type":"message","model":"claude-x-1","content":[{"type":"thinking","thinking":"Hm, ä 🦀?","signature":"c2ln/+=="},{"type":"redacted_thinking","data":"b3BhcXVl"},{"type":"text","text":"I look 日本."},{"type":"tool_use","id":"toolu_1","name":"ls","input":{"path":"/src"}},{"type":"tool_use","id":"toolu_2","name":"now","input":{}}],"stop_reason":"tool_use","usage":{"input_tokens":10,"cache_read_input_tokens":7,"cache_creation_input_tokens":3,"output_tokens":42}}"#,
        ),
        (
            Wire::Chat,
            r#"{"model":"gpt-x-1","choices":[{"index":0,"message":{"role":"assistant","content":[{"type":"text","text":"I look 日本."}],"reasoning_content":"Hm, ä 🦀?","tool_calls":[{"id":"toolu_1","type":"function","function":{"name":"ls","arguments":"{\"path\": \"/src\"}"}},{"id":"toolu_2","type":"function","function":{"name":"now","arguments":"{}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":20,"completion_tokens":42,"prompt_tokens_details":{"cached_tokens":7,"cache_write_tokens":3}}}"#,
        ),
        (
            Wire::Responses,
            r#"{"model":"gpt-x-1","status":"completed","error":null,"output":[{"type":"reasoning","id":"rs_1","zeta":1,"alpha":2,"summary":[{"type":"summary_text","text":"Hm, ä 🦀?"}],"encrypted_content":"c2ln/+=="},{"type":"message","content":[{"type":"output_text","text":"I look 日本."}]},{"type":"function_call","call_id":"toolu_1","name":"ls","arguments":"{\"path\": \"/src\"}"},{"type":"function_call","call_id":"toolu_2","name":"now","arguments":"{}"}],"usage":{"input_tokens":20,"input_tokens_details":{"cached_tokens":7,"cache_write_tokens":3},"output_tokens":42}}"#,
        ),
    ];
    for (wire, document) in documents {
        assert_eq!(read(wire, document).unwrap(), expected(wire), "{wire:?}");
        for at in 1..document.len() {
            let result = read_for(wire, &ModelRequest::default(), [&document.as_bytes()[..at]]).0;
            assert!(result.as_ref().is_err_and(ModelError::is_retryable), "{wire:?} at {at}: {result:?}");
        }
        let error =
            read(wire, r#"{"type":"error","error":{"type":"rate_limit_error","message":"x"}}"#).unwrap_err();
        assert_eq!(error.kind(), "rate_limited", "{wire:?}");
    }
}

#[test]
fn an_oversize_answer_is_refused() {
    for wire in WIRES {
        let mut reader = AnswerReader::new(wire, "m", &ModelRequest::default());
        let piece = b": nothing\n".repeat(100_000);
        let error = (0..100).find_map(|_| reader.push(&piece, &mut |_| {}).err());
        assert_eq!(error, Some(ModelError::TooLarge { limit_bytes: STREAM_BYTES_MAX }), "{wire:?}");
    }
    let calls = |count: usize| {
        let call = |index: usize| format!(r#"{{"index":{index},"id":"c{index}","function":{{"name":"x"}}}}"#);
        let calls: Vec<String> = (0..count).map(call).collect();
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{}]}},\"finish_reason\":\"stop\"}}]}}\n\n",
            calls.join(",")
        )
    };
    assert_eq!(read(Wire::Chat, &calls(100)).unwrap().calls().count(), 100);
    assert_eq!(read(Wire::Chat, &calls(5000)).unwrap_err().kind(), "malformed_stream");
}

#[test]
fn the_words_of_vendors_are_understood() {
    let chat = |delta: &str, reason: &str, usage: &str| {
        let text = format!(
            "data: {{\"choices\":[{{\"delta\":{delta},\"finish_reason\":\"{reason}\"}}],\"usage\":{usage}}}\n\n"
        );
        read(Wire::Chat, &text).unwrap()
    };
    let details = r#"[{"type":"reasoning.text","text":"t","signature":"s"},{"b":1,"a":2}]"#;
    let answer =
        chat(&format!(r#"{{"reasoning":"t","reasoning_details":{details},"content":"x"}}"#), "stop", "null");
    let raw = format!(r#"{{"reasoning_details":{details}}}"#);
    assert_eq!(answer.blocks, [opaque(Wire::Chat, &raw, "t"), ContentBlock::text("x")]);
    let usage = r#"{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":4}"#;
    let expected = TokenUsage { input: 5, output: 1, cache_read: 4, cache_write: 0 };
    assert_eq!(chat(r#"{"content":"x"}"#, "length", usage).usage, expected);
    assert_eq!(chat("{}", "length", "null").stop, StopReason::MaxTokens);
    assert_eq!(chat("{}", "tired", "null").stop, StopReason::Other("tired".into()));
    let anthropic = |reason: &str| {
        let text = format!(
            "data: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{reason}\"}}}}\n\ndata: {{\"type\":\"message_stop\"}}\n\n"
        );
        read(Wire::Anthropic, &text).unwrap().stop
    };
    assert_eq!(anthropic("model_context_window_exceeded"), StopReason::ContextFull);
    assert_eq!(anthropic("pause_turn"), StopReason::PauseTurn);
    assert_eq!(anthropic("stop_sequence"), StopReason::StopSequence);
}

/// A conversation with every kind of block: the answer of `wire`, its results, and a question.
fn conversation(wire: Wire) -> ModelRequest {
    let picture = ImageData { media_type: "image/png".into(), data: "AA==".into() };
    let mut answer = read(wire, stream(wire)).unwrap().blocks;
    answer.push(call("bad", "ls", "{\"pa"));
    let results = ["toolu_1", "toolu_2", "bad"].map(|id| {
        let mut result = ToolResult::from_text(id, format!("result of {id}"));
        result.is_error = id == "bad";
        if id == "toolu_2" {
            result.blocks.push(ResultBlock::Image(picture.clone()));
        }
        result
    });
    let mut newest = ChatMessage::from_results(results);
    newest.blocks.insert(0, ContentBlock::text("and hurry"));
    ModelRequest {
        system: vec!["You are careful.".into(), String::new(), "Today is Monday.".into()],
        tools: vec![ToolSchema {
            name: "ls".into(),
            description: "lists".into(),
            parameters: json!({"type": "object", "properties": {"path": {"type": "string"}}}),
        }],
        messages: vec![
            ChatMessage {
                speaker: crate::model::Speaker::User,
                blocks: vec![ContentBlock::text("look"), ContentBlock::Image(picture)],
            },
            ChatMessage::from_model(answer),
            newest,
        ],
        max_output_tokens: Some(1000),
        effort: Some(Effort::High),
        conversation: Some("agent-1".into()),
        ..ModelRequest::default()
    }
}

fn body(address: &str, request: &ModelRequest) -> (Value, String) {
    let text = encode(&address.parse().unwrap(), request).unwrap();
    (serde_json::from_str(&text).unwrap(), text)
}

#[test]
fn a_request_to_anthropic_has_marks_echoes_and_results_first() {
    let request = conversation(Wire::Anthropic);
    let (body, text) = body("anthropic:m", &request);
    let mark = json!({"type": "ephemeral"});
    assert_eq!(body["system"][1], json!({"type": "text", "text": "Today is Monday.", "cache_control": mark}));
    assert_eq!(body["tools"][0]["cache_control"], mark);
    assert_eq!((&body["max_tokens"], &body["stream"]), (&json!(1000), &json!(true)));
    assert_eq!(
        (&body["thinking"], &body["output_config"]),
        (&json!({"type": "adaptive"}), &json!({"effort": "high"}))
    );
    let messages = body["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user"]);
    let picture =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
    let mut marked = picture.clone();
    marked["cache_control"] = mark.clone();
    assert_eq!(messages[0]["content"], json!([{"type": "text", "text": "look"}, marked]));
    // The provider's own words go back as they came, in the order of their keys.
    assert!(text.contains(r#"{"type":"thinking","thinking":"Hm, ä 🦀?","signature":"c2ln/+=="}"#), "{text}");
    assert!(text.contains(r#"{"data":"b3BhcXVl","type":"redacted_thinking"}"#), "{text}");
    assert_eq!(
        messages[1]["content"][3],
        json!({"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "/src"}})
    );
    assert_eq!(messages[1]["content"][5]["input"], json!({"invalid_json": "{\"pa"}));
    let result = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": format!("result of {id}")}]});
    let mut second = result("toolu_2");
    second["content"].as_array_mut().unwrap().push(picture);
    let mut bad = result("bad");
    bad["is_error"] = json!(true);
    let question = json!({"type": "text", "text": "and hurry", "cache_control": mark});
    assert_eq!(messages[2]["content"], json!([result("toolu_1"), second, bad, question]));
    let off = ModelRequest { cache: CachePolicy::Off, effort: None, ..request };
    let (_, text) = self::body("anthropic:m", &off);
    assert!(!text.contains("cache_control") && !text.contains("\"thinking\":{"), "{text}");
}

#[test]
fn a_request_to_chat_has_tool_messages_and_pictures_of_the_user() {
    let request = conversation(Wire::Chat);
    let (body, _) = body("m@http://h", &request);
    assert_eq!(body["stream_options"], json!({"include_usage": true}));
    assert_eq!((&body["max_tokens"], &body["max_completion_tokens"]), (&json!(1000), &Value::Null));
    assert_eq!((&body["reasoning_effort"], &body["prompt_cache_key"]), (&json!("high"), &Value::Null));
    assert_eq!(body["tools"][0]["function"]["name"], "ls");
    let messages = body["messages"].as_array().unwrap();
    assert_eq!(messages[0], json!({"role": "system", "content": "You are careful.\n\n\n\nToday is Monday."}));
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    assert_eq!(messages[1], json!({"role": "user", "content": [{"type": "text", "text": "look"}, picture]}));
    let function = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(
        messages[2],
        json!({"role": "assistant", "content": "I look 日本.", "reasoning_content": "Hm, ä 🦀?", "tool_calls": [
            function("toolu_1", "ls", r#"{"path":"/src"}"#), function("toolu_2", "now", "{}"), function("bad", "ls", "{\"pa"),
        ]})
    );
    for (message, id) in messages[3..6].iter().zip(["toolu_1", "toolu_2", "bad"]) {
        assert_eq!(
            *message,
            json!({"role": "tool", "tool_call_id": id, "content": format!("result of {id}")})
        );
    }
    let parts = json!([{"type": "text", "text": "Pictures of tool call toolu_2:"}, picture, {"type": "text", "text": "and hurry"}]);
    assert_eq!(messages[6..], [json!({"role": "user", "content": parts})]);
    let (vendor, _) = self::body("openai:m", &request);
    assert_eq!((&vendor["max_tokens"], &vendor["max_completion_tokens"]), (&Value::Null, &json!(1000)));
    assert_eq!(vendor["prompt_cache_key"], "agent-1");
    let (plain, _) = self::body(
        "m@http://h",
        &ModelRequest { messages: vec![ChatMessage::from_user("hi")], ..ModelRequest::default() },
    );
    assert_eq!(plain["messages"], json!([{"role": "user", "content": "hi"}]));
}

#[test]
fn a_request_to_responses_stores_nothing_and_echoes_encrypted_thoughts() {
    let request = conversation(Wire::Responses);
    let (body, text) = body("openai-responses:m", &request);
    assert_eq!((&body["store"], &body["include"]), (&json!(false), &json!(["reasoning.encrypted_content"])));
    assert_eq!(body["reasoning"], json!({"effort": "high", "summary": "auto"}));
    assert_eq!((&body["max_output_tokens"], &body["prompt_cache_key"]), (&json!(1000), &json!("agent-1")));
    assert!(text.contains(r#""id":"rs_1","zeta":1,"alpha":2,"summary""#), "{text}");
    let input = body["input"].as_array().unwrap();
    let kinds: Vec<&str> = input.iter().map(|item| item["type"].as_str().unwrap()).collect();
    let call = "function_call";
    let output = "function_call_output";
    assert_eq!(
        kinds,
        ["message", "reasoning", "message", call, call, call, output, output, output, "message"]
    );
    assert_eq!(
        input[2],
        json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look 日本."}]})
    );
    assert_eq!(input[5], json!({"type": call, "call_id": "bad", "name": "ls", "arguments": "{\"pa"}));
    assert_eq!(input[6], json!({"type": output, "call_id": "toolu_1", "output": "result of toolu_1"}));
    let picture = json!({"type": "input_image", "image_url": "data:image/png;base64,AA=="});
    assert_eq!(input[7]["output"], json!([{"type": "input_text", "text": "result of toolu_2"}, picture]));
    assert_eq!(input[9]["content"], json!([{"type": "input_text", "text": "and hurry"}]));
    let plain = ModelRequest { effort: Some(Effort::None), ..request };
    let (body, _) = self::body("openai-responses:m", &plain);
    assert_eq!((&body["include"], &body["reasoning"]), (&Value::Null, &json!({"effort": "none"})));
}

#[test]
fn an_opaque_block_goes_only_to_the_model_that_sent_it() {
    for wire in WIRES {
        let request = conversation(wire);
        for (address, is_same) in [
            ("anthropic:m", wire == Wire::Anthropic),
            ("m@http://h", wire == Wire::Chat),
            ("openai-responses:m", wire == Wire::Responses),
            ("anthropic:n", false),
            ("n@http://h", false),
            ("openai-responses:n", false),
        ] {
            let (_, text) = body(address, &request);
            assert_eq!(text.contains("Hm, ä 🦀?"), is_same, "{wire:?} to {address}");
        }
    }
    // Without its encrypted content a provider that stores nothing cannot take a thought back.
    let mut request = conversation(Wire::Responses);
    for block in &mut request.messages[1].blocks {
        if let ContentBlock::Opaque(opaque) = block {
            opaque.raw = opaque.raw.replace("\"c2ln/+==\"", "null");
        }
    }
    assert!(!body("openai-responses:m", &request).1.contains("rs_1"));
}

#[test]
fn a_longer_conversation_keeps_the_text_of_the_shorter_one_as_prefix() {
    for (wire, address) in [
        (Wire::Chat, "m@http://h"),
        (Wire::Responses, "openai-responses:m"),
        (Wire::Anthropic, "anthropic:m"),
    ] {
        let long = ModelRequest { cache: CachePolicy::Off, ..conversation(wire) };
        let short = ModelRequest { messages: long.messages[..2].to_vec(), ..long.clone() };
        let (_, short) = body(address, &short);
        let (_, long) = body(address, &long);
        let shared = short.trim_end_matches(['}', ']']);
        assert!(long.starts_with(shared), "{wire:?}\n{short}\n{long}");
    }
}

proptest! {
    #[test]
    fn any_bytes_in_any_cut_end_in_one_defined_way(
        wire in prop::sample::select(WIRES.to_vec()),
        from in 0usize..4000,
        bytes in prop::collection::vec(any::<u8>(), 0..12),
        size in 1usize..50,
    ) {
        let mut text = stream(wire).as_bytes().to_vec();
        let at = from.min(text.len());
        let end = (at + bytes.len()).min(text.len());
        text.splice(at..end, bytes);
        let whole = read_for(wire, &ModelRequest::default(), [text.as_slice()]);
        let pieces = read_for(wire, &ModelRequest::default(), text.chunks(size));
        prop_assert_eq!(pieces.0, whole.0);
    }

    #[test]
    fn any_text_and_arguments_survive_the_wire(text in ".{0,40}", key in "[a-z]{1,8}", value in ".{0,20}") {
        let arguments = json!({ key: value }).to_string();
        let chunk = |delta: Value, reason: Value| format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}));
        let calls = json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "x", "arguments": arguments}}]});
        let stream = [chunk(json!({"content": text}), Value::Null), chunk(calls, json!("tool_calls"))].concat();
        let answer = read(Wire::Chat, &stream).unwrap();
        prop_assert_eq!(answer.text(), text);
        prop_assert_eq!(&answer.calls().next().unwrap().arguments, &ToolArguments::parse(&arguments));
    }
}
