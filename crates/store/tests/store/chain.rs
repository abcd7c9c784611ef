//! Every event that the store accepts is read back unchanged.

use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use proto::{BodyId, ChainHead, ChainId, Draft, Event, event::GENESIS};
use serde_json::{Map, Number, Value, json};
use store::{
    APPEND_LEN_MAX, AppendError, Artifacts, DEPTH_MAX, EventLog, EventQuery, LABEL_LEN_MAX, LogVerdict, Store,
};

use crate::scene::{SceneDir, append, chain, draft, events_of, odd_draft};

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        // Any bit pattern that is a number: subnormal, huge, -0.0.
        any::<u64>()
            .prop_map(|bits| Number::from_f64(f64::from_bits(bits)).map_or(Value::Null, Value::Number)),
        (-1e6..1e6).prop_map(|float: f64| json!(float)),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        let object = proptest::collection::btree_map(any::<String>(), inner.clone(), 0..6);
        prop_oneof![
            proptest::collection::vec(inner, 0..6).prop_map(Value::from),
            object.prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

fn any_draft() -> impl Strategy<Value = Draft> {
    let id = proptest::option::of("[a-z0-9]{1,32}".prop_map(|id| id.parse::<BodyId>().unwrap()));
    (any::<String>(), id, proptest::option::of(any::<String>()), value())
        .prop_map(|(kind, body, brain, data)| with(odd_draft(kind, body, data), |draft| draft.brain = brain))
}

fn with(mut draft: Draft, change: impl FnOnce(&mut Draft)) -> Draft {
    change(&mut draft);
    draft
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_drafts_come_back_bit_by_bit_and_verify(batches in proptest::collection::vec(proptest::collection::vec(any_draft(), 0..5), 1..5)) {
        let dir = SceneDir::new();
        let store = dir.open();
        let mut written = Vec::new();
        for drafts in &batches {
            written.extend(store.append_at_end(&chain(), drafts.clone()).unwrap());
        }
        let drafts: Vec<_> = batches.concat();
        prop_assert_eq!(written.iter().map(|event| &event.data).collect::<Vec<_>>(), drafts.iter().map(|draft| &draft.data).collect::<Vec<_>>());
        drop(store);
        let store = Store::open_read_only(&dir).unwrap();
        prop_assert_eq!(store.read(&EventQuery::default()).unwrap(), written.clone());
        let (events, chains) = (written.len() as u64, u64::from(!written.is_empty()));
        prop_assert_eq!(store.verify().unwrap(), LogVerdict::Whole { events, chains, head: GENESIS.to_owned() });
        // An event also survives conversion to JSON and back.
        for event in written {
            let again: Event = serde_json::from_str(&serde_json::to_string(&event).unwrap()).unwrap();
            prop_assert_eq!(again.digest(), event.hash);
        }
    }
}

#[test]
fn floats_that_plain_readers_get_wrong_by_a_bit_are_read_exactly() {
    // These numbers were found by searching; without serde_json's float_roundtrip at least one of them
    // changes.
    let floats: Vec<f64> =
        (1..20_000_u64).map(|at| f64::from_bits(at.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    let floats: Vec<f64> = floats.into_iter().filter(|float| float.is_finite()).collect();
    let dir = SceneDir::new();
    let store = dir.open();
    append(&store, odd_draft("floats".into(), None, json!(floats)));
    assert_eq!(store.read(&EventQuery::default()).unwrap()[0].data, json!(floats));
    assert_eq!(events_of(store.verify().unwrap()), 1);
}

#[test]
fn the_form_that_is_hashed_does_not_change_between_versions() {
    let draft = odd_draft(
        "body.started".into(),
        Some("ab12".parse().unwrap()),
        json!({"z": 1, "a": [1.5, -0.0, u64::MAX, "ä\u{1}"], "m": {"y": null, "b": true}}),
    );
    let head = ChainHead { seq: 6, hash: GENESIS.to_owned() };
    let hash =
        |chain: ChainId| Event::place(draft.clone(), chain, &head, "2026-01-02T03:04:05.000006Z".into()).hash;
    // This fails when a dependency turns on serde_json's preserve_order or arbitrary_precision, which would
    // break old logs. The hashes were computed with Python's json and hashlib, so another program can check a
    // log too. The first hash is for version 1 of the envelope, the second for version 2.
    let one_chain = "e1ca971777d7167478b0b257c7e6fb6c586fcf21941d7c282b6fb3a010c51f70";
    assert_eq!(hash(ChainId::OneChain), one_chain);
    let many_chains = "a672cd3b0f39abd71fe947d30629c3a4fb9a19d71a65a6982987209727f1056e";
    assert_eq!(hash("body/ab12".parse().unwrap()), many_chains);
}

#[test]
fn queries_choose_by_place_body_and_number() {
    let dir = SceneDir::with_events(9);
    let store = dir.open();
    let seqs = |after, body: Option<&str>, limit| {
        let body = body.map(|id| id.parse().unwrap());
        let events = store.read(&EventQuery { after, body, limit, ..EventQuery::default() }).unwrap();
        events.iter().map(|event| event.seq).collect::<Vec<_>>()
    };
    assert_eq!(seqs(0, None, usize::MAX), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(seqs(4, None, 3), [5, 6, 7]);
    assert_eq!(seqs(0, Some("even"), 3), [2, 4, 6]);
    assert_eq!(seqs(6, Some("odd"), 100), [7, 9]);
    assert_eq!(seqs(0, Some("nobody"), 100), [0_u64; 0]);
    assert_eq!(seqs(u64::MAX, None, 100), [0_u64; 0]);
    assert_eq!(seqs(0, None, 0), [0_u64; 0]);
    assert_eq!(store.last_pos().unwrap(), 9);
}

#[test]
fn an_event_beyond_a_limit_is_refused_and_so_are_its_companions() {
    let dir = SceneDir::new();
    let store = dir.open();
    let nest = |depth| (0..depth).fold(json!(1), |inner, _| json!([inner]));
    let holding = |data| with(draft(1), |draft| draft.data = data);
    let refused = |draft: Draft| match store.append_at_end(&chain(), vec![crate::scene::draft(1), draft]) {
        Err(AppendError::TooLarge { field, found, max, .. }) => (field, found, max),
        other => panic!("{other:?}"),
    };
    let long = "x".repeat(APPEND_LEN_MAX);
    assert_eq!(refused(holding(nest(DEPTH_MAX + 1))), ("depth of the data", 101, 100));
    let (field, found, max) = refused(holding(json!(long)));
    assert_eq!((field, max), ("length of the append in bytes", APPEND_LEN_MAX));
    assert!(found > APPEND_LEN_MAX);
    let label = "x".repeat(LABEL_LEN_MAX + 1);
    assert_eq!(
        refused(with(draft(1), |draft| draft.kind = label.clone())),
        ("length of the type in bytes", 1025, 1024)
    );
    assert_eq!(
        refused(with(draft(1), |draft| draft.brain = Some(label))),
        ("length of the brain in bytes", 1025, 1024)
    );
    assert_eq!(store.last_pos().unwrap(), 0);
    // The largest allowed event can also be read.
    append(&store, holding(nest(DEPTH_MAX)));
    append(&store, with(holding(json!(&long[8192..])), |draft| draft.kind = "x".repeat(LABEL_LEN_MAX)));
    assert_eq!(store.read(&EventQuery::default()).unwrap().len(), 2);
    assert_eq!(events_of(store.verify().unwrap()), 2);
}

#[test]
fn the_files_are_for_their_owner_alone() {
    let dir = SceneDir::with_events(1);
    for name in ["events.db", "events.db-wal", "events.db-shm"] {
        let mode = dir.join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn a_long_wal_is_written_back_when_the_store_is_closed() {
    let dir = SceneDir::new();
    let store = dir.open();
    (1..=100).for_each(|at| drop(append(&store, draft(at))));
    let wal = || dir.join("events.db-wal").metadata().unwrap().len();
    assert!(wal() > 0);
    drop(store);
    assert_eq!(wal(), 0);
    // Closing leaves a short WAL: writing it back would wait for the disk.
    append(&dir.open(), draft(101));
    assert!(wal() > 0);
    assert_eq!(events_of(dir.open().verify().unwrap()), 101);
}

#[test]
fn a_reader_sees_what_a_writer_appends_meanwhile_and_cannot_write() {
    let dir = SceneDir::with_events(1);
    let (writer, reader) = (dir.open(), Store::open_read_only(&dir).unwrap());
    append(&writer, draft(2));
    assert_eq!(reader.last_pos().unwrap(), 2);
    assert!(matches!(reader.append_at_end(&chain(), vec![draft(3)]), Err(AppendError::ReadOnly)));
    assert!(matches!(reader.artifact(), Err(store::ArtifactError::ReadOnly)));
}
