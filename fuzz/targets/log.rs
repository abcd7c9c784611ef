//! A database with any contents: the reader returns errors and findings, never panics, and a log that
//! verifies is valid.
#![no_main]

use std::{fs, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use proto::event::GENESIS;
use store::{EventQuery, Store, ChainVerdict};

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
    let events = store.events(&EventQuery { limit: 100, ..EventQuery::default() });
    let body = "a".parse().expect("an id");
    let _ = store.events(&EventQuery { after: 1, body: Some(body), limit: 100 });
    let _ = store.last_seq();
    if let Ok(ChainVerdict::Whole { events: count, .. }) = verdict {
        let events = events.expect("a whole log can be read");
        assert_eq!(events.len() as u64, count.min(100));
        let mut prev = GENESIS.to_owned();
        for (event, seq) in events.into_iter().zip(1..) {
            assert_eq!((event.seq, &event.prev), (seq, &prev));
            assert_eq!(event.digest(), event.hash);
            prev = event.hash;
        }
    }
});
