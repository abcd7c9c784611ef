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
