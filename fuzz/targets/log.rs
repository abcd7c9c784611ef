//! A database with any contents: the reader returns errors and findings, never panics, and a log that
//! verifies is valid.
#![no_main]

use std::{collections::BTreeMap, fs, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use store::{EventLog, EventQuery, LogVerdict, Store};

/// In memory, for this process alone; `fuzz/run` sets TMPDIR and removes it.
static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("palisade-fuzz-log-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory can be made");
    dir
});

fuzz_target!(|input: &[u8]| {
    for rest in ["events.db-wal", "events.db-shm"] {
        let _ = fs::remove_file(DIR.join(rest));
    }
    fs::write(DIR.join(store::FILE), input).expect("a file can be written");
    let Ok(store) = Store::open_read_only(&DIR) else { return };
    let verdict = store.verify();
    let events = store.read(&EventQuery { limit: 100, ..EventQuery::default() });
    let body = "a".parse().expect("an id");
    let _ = store.read(&EventQuery { after: 1, limit: 100, ..EventQuery::of_body(&body) });
    let _ = store.read(&EventQuery::of_exec(&body, 1));
    let _ = store.last_pos();
    if let Ok(LogVerdict::Whole { events: count, .. }) = verdict {
        let events = events.expect("a whole log can be read");
        assert_eq!(events.len() as u64, count.min(100));
        let mut heads = BTreeMap::new();
        for event in events {
            assert_eq!(event.digest(), event.hash);
            if let Some(head) = heads.insert(event.chain.clone(), event.head()) {
                assert_eq!((event.seq, event.prev), (head.seq + 1, head.hash));
            }
        }
    }
});
