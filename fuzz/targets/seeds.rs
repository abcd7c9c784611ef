//! Writes a first few inputs for each target below `$SEEDS`; run with `-runs=0`.
//!
//! It is a fuzz target only in form: a program with coverage counters links only with libFuzzer.
#![no_main]

use std::{env, fs, path::Path};

use prost::Message;
use proto::{
    ChainHead, ChainId, Draft, Event,
    envelope::{END, seal},
    event_data::ConfigChanged,
    tree::{TreeItem, MAGIC, write},
    wire::process::{SendSignalRequest, StartRequest},
};
use store::{Durability, EventLog, Store};

const START: &str = r#"{"process":{"cmd":"/bin/sh","args":["-c","true"],"envs":{"A":"b"},"cwd":"/"},"pty":{"size":{"cols":80,"rows":24}},"tag":"t","stdin":true}"#;
const SIGNAL: &str = r#"{"process":{"pid":7},"signal":"SIGNAL_SIGKILL"}"#;

const ANTHROPIC: &str = r#"data: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":1,"output_tokens":1}}}

data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"t"}}

data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"s"}}

data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"a","name":"x","input":{}}}

data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{}"}}

data: {"type":"content_block_start","index":2,"content_block":{"type":"server_tool_use","id":"b"}}

data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{}"}}

data: {"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":2}}

data: {"type":"message_stop"}

"#;
const CHAT: &str = r#"data: {"choices":[{"index":0,"delta":{"content":"hi","reasoning_content":"t","reasoning_details":[{"b":1}]}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"x","arguments":"{}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}

data: [DONE]

"#;
/// A hello for `a.test`, in one record.
const HELLO: &[u8] = b"\x16\x03\x01\0B\x01\0\0>\x03\x03rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr\0\0\x02\x13\x01\x01\0\0\x13\0\0\0\x0b\0\x09\0\0\x06a.test\0\x15\0\0";
const REQUEST: &[u8] =
    b"POST /x HTTP/1.1\r\nHost: a.test\r\nConnection: x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\n";
const PATCH: &str = "a\nb\nfn c() {\n    d\n}\n\0*** Begin Patch\n*** Update File: f\n*** Move to: g\n@@ fn c() {\n-    d\n+    e\n \
                     }\n*** End of File\n*** Add File: h\n+x\n*** Delete File: i\n*** End Patch\n";
const RESPONSES: &str = r#"data: {"type":"response.output_item.added","output_index":0,"item":{"type":"function_call","call_id":"a","name":"x"}}

data: {"type":"response.function_call_arguments.delta","output_index":0,"delta":"{}"}

data: {"type":"response.output_item.done","output_index":0,"item":{"type":"function_call","call_id":"a","name":"x","arguments":"{}"}}

data: {"type":"response.output_item.done","output_index":1,"item":{"type":"reasoning","summary":[],"encrypted_content":"e"}}

data: {"type":"response.completed","response":{"status":"completed","output":[],"usage":{"input_tokens":1,"output_tokens":1}}}

"#;

libfuzzer_sys::fuzz_target!(
    init: write_all(),
    |_input: &[u8]| {}
);

fn write_all() {
    let root = env::var_os("SEEDS").expect("SEEDS says where to");
    let put = |target: &str, name: &str, head: &[u8], bytes: &[u8]| {
        let dir = Path::new(&root).join(target);
        fs::create_dir_all(&dir).expect("a directory can be made");
        fs::write(dir.join(name), [head, bytes].concat()).expect("a file can be written");
    };
    let frames = [
        proto::mux::seal(proto::mux::FrameKind::Data, 1, b"hello"),
        proto::mux::seal(proto::mux::FrameKind::Receipt, 0, b"{}"),
        proto::mux::seal(proto::mux::FrameKind::Credit, 2, &[0, 0, 0, 0]),
        proto::mux::seal(proto::mux::FrameKind::End, 3, b""),
    ];
    put("mux", "four", &[3, 1, 4, 9], &frames.concat());
    put("envelope", "three", &[3, 1, 4, 9], &[seal(0, b"one"), seal(0, b""), seal(END, b"{}")].concat());
    put("tree", "small", &[2, 5, 9], &tree());
    put("process_json", "start", &[0], START.as_bytes());
    put("process_json", "signal", &[6], SIGNAL.as_bytes());
    let start: StartRequest = serde_json::from_str(START).expect("a message");
    let signal: SendSignalRequest = serde_json::from_str(SIGNAL).expect("a message");
    put("process_proto", "start", &[0], &start.encode_to_vec());
    put("process_proto", "signal", &[6], &signal.encode_to_vec());
    let event = Event::place(draft(), chain(), &ChainHead::genesis(), store::clock::now());
    put("event", "one", &[], &serde_json::to_vec(&event).expect("an event"));
    put("model_sse", "two", &[2, 5, 9], b"event: a\r\ndata: 1\r\n\r\n: c\ndata: x\ndata: y\n\n");
    put("model_anthropic", "call", &[2, 5, 9], ANTHROPIC.as_bytes());
    put("model_chat", "call", &[2, 5, 9], CHAT.as_bytes());
    put("model_responses", "call", &[2, 5, 9], RESPONSES.as_bytes());
    put("patch", "update", &[], PATCH.as_bytes());
    put("agent_rules", "list", &[], b"cd a && sudo -u b git -C c push \"$d\" | xargs sh -c 'e $(f `g`)'; h <<E\n$(i)\nE\n");
    put("agent_rules", "words", &[], b"for x in {1,2}; do [[ $x == ${y:-$(z)} ]] && $((1 + 2)) <(w) $'v\\n'; done");
    let role = b"---\nname: a\ndescription: b\ntools: [ls]\nvenue: fork\n---\nc\n";
    put("agent_library", "role", &[0], role);
    put("agent_library", "skill", &[2], b"---\nname: a\ndescription: b\nmetadata:\n  c: d\n---\ne\n");
    let plan = b"name = \"a\"\ndescription = \"b\"\n[[phase]]\nname = \"c\"\ngoal = \"d\"\nexit = { command = \"e\" }\n";
    put("agent_library", "plan", &[1], plan);
    let rule = b"[[rule]]\ndecision = \"ask\"\ncommand = [\"git\", \"**\"]\nwhy = \"w\"\nmatch = [\"git x\"]\n";
    put("agent_library", "rule", &[3], rule);
    put("agent_library", "hook", &[4], b"[[hook]]\nevent = \"Stop\"\ncommand = \"a\"\n");
    put("agent_library", "memory", &[5], b"a <!-- b --> </agent_memory> c\n");
    put("egress_dns", "query", &[], b"\xab\xcd\x01\0\0\x01\0\0\0\0\0\x01\x01a\x04test\0\0\x01\0\x01\0\0\x29\x10\0\0\0\0\0\0\0");
    put("egress_hello", "hello", &[2, 5, 9], HELLO);
    put("egress_first", "hello", &[2, 5, 9], HELLO);
    put("egress_first", "request", &[2, 5, 9], REQUEST);
    put("egress_request", "judged", &[2, 5, 9], b"GET a.test/repos/**\nGET\n/repos/x\nx-api-key\nBearer palph0a");
    put("egress_request", "signed", &[2, 5, 9], b"a.test\nGET\n/?k=palph0a\nauthorization\nAWS4-HMAC-SHA256 Credential=palph0b/1/2/s3/aws4_request, SignedHeaders=x-amz-date, Signature=0");
    put("egress_request", "masked", &[2, 5, 9], b"xabcabdxYWJjYWJkx616263616264x");
    put("egress_http", "request", &[2, 5, 9], REQUEST.trim_ascii_end());
    put("egress_http", "url", &[0], b"GET http://a.test:80/x?y HTTP/1.0\r\nHost: a.test\r\nRange: bytes=1-");
    put("egress_http", "chunks", &[2, 5, 9], b"5\r\nhello\r\n0\r\nx: y\r\n\r\n");
    put("egress_ssh", "messages", &[], b"\0\0\0\x01\x0b\0\0\0\x12\x1b\0\0\0\x05query\0\0\0\0\0\0\0\0\0\0\0\x0d\x0d\0\0\0\0\0\0\0\0\0\0\0\0");
    put("egress_ssh", "known", &[], b"a.test ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl\n|1|c2FsdA==|aGFzaA== ssh-ed25519 AAAA\n");
    put("log", "none", &[], &log(0));
    put("log", "few", &[], &log(3));
    put("log", "more", &[], &log(12));
}

fn tree() -> Vec<u8> {
    let mut bytes = MAGIC[..].into();
    for item in [
        TreeItem::Dir { path: b"d".to_vec(), mode: 0o755 },
        TreeItem::File { path: b"d/f".to_vec(), mode: 0o644 },
        TreeItem::Data(b"hello"[..].into()),
        TreeItem::FileEnd,
        TreeItem::Link { path: b"l".to_vec(), target: b"d/f".to_vec() },
        TreeItem::End,
    ] {
        write(&item, &mut bytes);
    }
    bytes.to_vec()
}

fn draft() -> Draft {
    let id = "a".parse().expect("an id");
    let value = serde_json::json!({"a": [1, 2.5, "ä", null], "b": {"c": true}});
    Draft::about(&id, ConfigChanged { settings: [("odd".to_owned(), value)].into() })
}

fn chain() -> ChainId {
    "body/a".parse().expect("a chain")
}

/// The bytes of a database in one file.
fn log(events: usize) -> Vec<u8> {
    let dir = env::temp_dir().join(format!("palisade-fuzz-seed-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory can be made");
    let store = Store::open(&dir, Durability::Process).expect("a store");
    store.append_at_end(&chain(), (0..events).map(|_| draft()).collect()).expect("events");
    store.seal(std::time::Duration::ZERO).expect("a seal");
    drop(store);
    // A plain connection writes the WAL back as it closes; the store's leaves a short one.
    let plain = rusqlite::Connection::open(dir.join(store::FILE)).expect("a database");
    plain.query_row("SELECT count(*) FROM events", [], |_| Ok(())).expect("a table");
    drop(plain);
    let bytes = fs::read(dir.join(store::FILE)).expect("a database");
    fs::remove_dir_all(&dir).expect("a directory can be removed");
    bytes
}
