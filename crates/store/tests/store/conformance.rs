//! The laws of an event log and of artifacts, for any implementation.
//!
//! A law takes a [`LogBench`]: a place with one new log that can be opened many times, as by other processes.
//! The list at the end runs every law on the embedded store, and once more through the provided methods of
//! the trait alone.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use proto::{
    AgentId, BodyId, ChainHead, ChainId, Draft, Event, NodeId,
    event_data::{ExecEnded, ExecOutcome, ExecStarted, LogSealed, SealedHead},
};
use serde_json::json;
use store::{
    APPEND_LEN_MAX, Append, AppendError, ArtifactError, ArtifactRef, Artifacts, DEPTH_MAX, EventLog,
    EventOrder, EventQuery, ExecFilter, LogVerdict, ReadError, SEAL_EVERY,
};

use crate::scene::{SceneDir, odd_draft};

/// A place with one log and its artifacts.
pub trait LogBench: Sync {
    /// Another client of the log.
    fn open(&self) -> Box<dyn EventLog>;
    /// Another client of the artifacts.
    fn artifacts(&self) -> Box<dyn Artifacts>;
}

fn body(name: &str) -> BodyId {
    name.parse().unwrap()
}

fn chain(name: &str) -> ChainId {
    ChainId::Body(body(name))
}

fn counted(name: &str, at: u64) -> Draft {
    odd_draft("body.counted".into(), Some(body(name)), json!({ "at": at }))
}

fn all(log: &dyn EventLog) -> Vec<Event> {
    log.read(&EventQuery::default()).unwrap()
}

fn events_of_whole(log: &dyn EventLog) -> u64 {
    match log.verify().unwrap() {
        LogVerdict::Whole { events, .. } => events,
        broken => panic!("{broken:?}"),
    }
}

pub fn an_append_is_one_unit_behind_the_head_it_expects(bench: &dyn LogBench) {
    let log = bench.open();
    let chain = chain("a");
    assert_eq!((log.head(&chain).unwrap(), log.last_pos().unwrap()), (ChainHead::genesis(), 0));
    let drafts = (1..=3).map(|at| counted("a", at)).collect();
    let append = Append::new(chain.clone(), ChainHead::genesis(), drafts).unwrap();
    let stored = log.append(&append).unwrap();
    assert_eq!(stored.iter().map(|event| event.seq).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(stored.windows(2).all(|two| two[0].hash == two[1].prev && two[0].pos < two[1].pos));
    assert!(stored.iter().all(|event| event.digest() == event.hash && event.chain == chain));
    let unplaced: Vec<Event> = stored.iter().map(|event| Event { pos: 0, ..event.clone() }).collect();
    assert_eq!(unplaced, append.events(), "what is stored is what was appended");
    assert_eq!(log.head(&chain).unwrap(), stored[2].head());
    assert_eq!(log.last_pos().unwrap(), stored[2].pos);
    assert_eq!((&all(&*log), all(&*bench.open())), (&stored, stored.clone()));
    assert!(log.append_at_end(&chain, Vec::new()).unwrap().is_empty());
    assert_eq!(events_of_whole(&*log), 3);
}

pub fn an_append_that_expects_another_head_is_a_conflict(bench: &dyn LogBench) {
    let log = bench.open();
    let chain = chain("a");
    let first = Append::new(chain.clone(), ChainHead::genesis(), vec![counted("a", 1)]).unwrap();
    let head = log.append(&first).unwrap()[0].head();
    let wrong_hash = ChainHead { hash: "7".repeat(64), ..head.clone() };
    let too_far = ChainHead { seq: 2, ..head.clone() };
    for expected in [ChainHead::genesis(), wrong_hash, too_far] {
        let other = Append::new(chain.clone(), expected, vec![counted("a", 2)]).unwrap();
        match log.append(&other) {
            Err(AppendError::Conflict { chain: found, head: real }) => {
                assert_eq!((found, &real), (chain.clone(), &head));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(all(&*log).len(), 1, "a refused append leaves nothing");
    let next = Append::new(chain, head, vec![counted("a", 2)]).unwrap();
    assert_eq!(log.append(&next).unwrap()[0].seq, 2);
}

pub fn a_retried_append_is_stored_once(bench: &dyn LogBench) {
    let (log, other) = (bench.open(), bench.open());
    let drafts = vec![counted("a", 1), counted("a", 2)];
    let append = Append::new(chain("a"), ChainHead::genesis(), drafts.clone()).unwrap();
    let stored = log.append(&append).unwrap();
    assert_eq!(log.append(&append).unwrap(), stored);
    assert_eq!(other.append(&append).unwrap(), stored, "also by another client");
    // The result is the same after others have appended.
    other.append_at_end(&chain("a"), vec![counted("a", 3)]).unwrap();
    assert_eq!(log.append(&append).unwrap(), stored);
    // The same drafts at another time are a different append.
    let again = Append::new(chain("a"), ChainHead::genesis(), drafts.clone()).unwrap();
    assert!(matches!(log.append(&again), Err(AppendError::Conflict { .. })));
    // An append that contains it is a different append, too.
    let longer = [drafts, vec![counted("a", 9)]].concat();
    let longer = Append::new(chain("a"), ChainHead::genesis(), longer).unwrap();
    assert!(matches!(log.append(&longer), Err(AppendError::Conflict { .. })));
    assert_eq!((all(&*log).len(), events_of_whole(&*log)), (3, 3));
}

pub fn two_writers_of_one_chain_conflict_and_lose_nothing(bench: &dyn LogBench) {
    const APPENDS: u64 = 40;
    let write = |who: u64| {
        let log = bench.open();
        let mut expected = log.head(&chain("a")).unwrap();
        for at in 0..APPENDS {
            // Two events each, to detect an append that was stored in part.
            let drafts = vec![counted("a", who * 1000 + at), counted("a", who * 1000 + at)];
            loop {
                let append = Append::new(chain("a"), expected, drafts.clone()).unwrap();
                match log.append(&append) {
                    Ok(stored) => break expected = stored[1].head(),
                    Err(AppendError::Conflict { head, .. }) => expected = head,
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| write(1));
        scope.spawn(|| write(2));
    });
    let events = bench.open().read(&EventQuery::of_chain(&chain("a"))).unwrap();
    assert_eq!(events.len() as u64, APPENDS * 4);
    assert!(events.iter().zip(1..).all(|(event, seq)| event.seq == seq));
    assert!(events.chunks(2).all(|two| two[0].data == two[1].data), "an append is one unit");
    let said: BTreeSet<u64> = events.iter().map(|event| event.data["at"].as_u64().unwrap()).collect();
    assert_eq!(said.len() as u64, APPENDS * 2, "none is lost, none is doubled");
    assert_eq!(events_of_whole(&*bench.open()), APPENDS * 4);
}

pub fn appends_at_the_end_of_a_chain_wait_for_each_other(bench: &dyn LogBench) {
    thread::scope(|scope| {
        for who in 0..4 {
            scope.spawn(move || {
                let log = bench.open();
                for at in 0..25 {
                    log.append_at_end(&chain("a"), vec![counted("a", who * 1000 + at)]).unwrap();
                }
            });
        }
    });
    let log = bench.open();
    let events = all(&*log);
    let said: BTreeSet<u64> = events.iter().map(|event| event.data["at"].as_u64().unwrap()).collect();
    assert_eq!((events.len(), said.len(), events_of_whole(&*log)), (100, 100, 100));
}

pub fn chains_count_for_themselves_and_positions_for_all(bench: &dyn LogBench) {
    let log = bench.open();
    let node = ChainId::Node(log.node().unwrap());
    let agent = ChainId::Agent("a".parse::<AgentId>().unwrap());
    let chains = [chain("a"), agent, node, chain("b")];
    for at in 0..8 {
        log.append_at_end(&chains[at % 4], vec![counted("a", at as u64)]).unwrap();
    }
    let events = all(&*log);
    assert!(events.windows(2).all(|two| two[0].pos < two[1].pos));
    for chain in &chains {
        let events = log.read(&EventQuery::of_chain(chain)).unwrap();
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [1, 2], "{chain}");
        assert_eq!(log.head(chain).unwrap(), events[1].head());
    }
    assert!(matches!(log.verify().unwrap(), LogVerdict::Whole { events: 8, chains: 4, .. }));
}

pub fn a_follower_sees_all_events_in_their_order(bench: &dyn LogBench) {
    const EVENTS: usize = 90;
    let follow = || {
        let (log, mut seen) = (bench.open(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while seen.len() < EVENTS && Instant::now() < deadline {
            let after = seen.last().map_or(0, |event: &Event| event.pos);
            let query = EventQuery { after, limit: 7, ..EventQuery::default() };
            seen.extend(log.follow(&query, Duration::from_secs(5)).unwrap());
        }
        seen
    };
    let seen = thread::scope(|scope| {
        let follower = scope.spawn(follow);
        for name in ["a", "b", "c"] {
            scope.spawn(move || {
                let log = bench.open();
                for at in 0..EVENTS as u64 / 3 {
                    log.append_at_end(&chain(name), vec![counted(name, at)]).unwrap();
                }
            });
        }
        follower.join().unwrap()
    });
    assert!(seen.windows(2).all(|two| two[0].pos < two[1].pos));
    assert_eq!(seen, all(&*bench.open()));
}

pub fn a_follower_of_a_log_at_rest_waits_and_goes_away_with_nothing(bench: &dyn LogBench) {
    let log = bench.open();
    log.append_at_end(&chain("a"), vec![counted("a", 1)]).unwrap();
    let of_b = EventQuery::of_body(&body("b"));
    let begun = Instant::now();
    assert_eq!(log.follow(&of_b, Duration::from_millis(120)).unwrap(), []);
    assert!(begun.elapsed() >= Duration::from_millis(120));
    assert_eq!(log.follow(&EventQuery::default(), Duration::from_secs(60)).unwrap().len(), 1);
}

pub fn a_log_that_is_opened_again_goes_on(bench: &dyn LogBench) {
    let log = bench.open();
    let (node, first) = (log.node().unwrap(), log.append_at_end(&chain("a"), vec![counted("a", 1)]).unwrap());
    drop(log);
    let log = bench.open();
    assert_eq!((log.node().unwrap(), &all(&*log)), (node, &first));
    let next = Append::new(chain("a"), first[0].head(), vec![counted("a", 2)]).unwrap();
    assert_eq!(log.append(&next).unwrap()[0].seq, 2);
    assert_eq!(events_of_whole(&*log), 2);
}

pub fn what_is_beyond_a_limit_is_refused_whole(bench: &dyn LogBench) {
    let log = bench.open();
    let holding = |data| odd_draft("body.counted".into(), Some(body("a")), data);
    let append = |drafts| log.append_at_end(&chain("a"), drafts);
    let half = json!("x".repeat(APPEND_LEN_MAX / 2));
    assert!(matches!(
        append(vec![holding(half.clone()), holding(half.clone())]),
        Err(AppendError::TooLarge { field: "length of the append in bytes", max: APPEND_LEN_MAX, .. })
    ));
    let deep = (0..=DEPTH_MAX).fold(json!(1), |inner, _| json!([inner]));
    assert!(matches!(
        append(vec![counted("a", 1), holding(deep)]),
        Err(AppendError::TooLarge { field: "depth of the data", .. })
    ));
    assert!(matches!(log.append_at_end(&ChainId::OneChain, vec![counted("a", 1)]), Err(AppendError::Closed)));
    assert_eq!(log.last_pos().unwrap(), 0);
    append(vec![holding(half)]).unwrap();
    append((0..800).map(|at| counted("a", at)).collect()).unwrap();
    assert_eq!(events_of_whole(&*log), 801);
}

fn started(name: &str, tag: Option<&str>) -> Draft {
    let data = ExecStarted {
        argv: vec!["true".into()],
        user: None,
        workdir: None,
        tty: false,
        env: Vec::new(),
        timeout_ms: None,
        tag: tag.map(str::to_owned),
        by: None,
        detached: false,
    };
    Draft::about(&body(name), data)
}

fn ended(name: &str, exec: u64) -> Draft {
    Draft::about(&body(name), ExecEnded { exec, outcome: ExecOutcome::NotStarted { error: "no".into() } })
}

pub fn queries_find_the_events_of_a_body_and_of_a_command(bench: &dyn LogBench) {
    let log = bench.open();
    let append = |name: &str, draft| log.append_at_end(&chain(name), vec![draft]).unwrap()[0].seq;
    append("a", counted("a", 1));
    let one = append("a", started("a", Some("t")));
    let two = append("a", started("a", Some("u")));
    // Another Body has commands with the same numbers.
    append("b", counted("b", 1));
    append("b", started("b", Some("t")));
    append("a", ended("a", two));
    append("b", ended("b", two));
    let three = append("a", started("a", Some("t")));
    append("a", ended("a", one));
    assert_eq!((one, two, three), (2, 3, 5));
    let seqs = |query: &EventQuery| -> Vec<u64> {
        log.read(query).unwrap().into_iter().map(|event| event.seq).collect()
    };
    let a = body("a");
    assert_eq!(seqs(&EventQuery::of_body(&a)), [1, 2, 3, 4, 5, 6]);
    assert_eq!(seqs(&EventQuery::of_exec(&a, one)), [2, 6]);
    assert_eq!(seqs(&EventQuery::of_exec(&a, two)), [3, 4]);
    assert_eq!(seqs(&EventQuery::of_exec(&a, 9)), [0_u64; 0]);
    let with = |change: &dyn Fn(&mut EventQuery)| {
        let mut query = EventQuery::of_body(&a);
        change(&mut query);
        seqs(&query)
    };
    assert_eq!(with(&|query| query.exec = Some(ExecFilter::Any)), [2, 3, 4, 5, 6]);
    assert_eq!(with(&|query| query.exec = Some(ExecFilter::Tag("t".into()))), [2, 5]);
    let newest = |query: &mut EventQuery| {
        (query.order, query.limit, query.kinds) = (EventOrder::NewestFirst, 2, vec!["exec.started"]);
    };
    assert_eq!(with(&newest), [5, 3]);
    let middle = log.read(&EventQuery::of_exec(&a, two)).unwrap()[0].pos;
    assert_eq!(with(&|query| query.after = middle), [4, 5, 6]);
    assert_eq!(with(&|query| query.limit = 0), [0_u64; 0]);
    assert_eq!(with(&|query| query.after = u64::MAX), [0_u64; 0]);
}

pub fn a_seal_names_the_heads_of_all_chains_that_changed(bench: &dyn LogBench) {
    let log = bench.open();
    assert!(!log.seal(Duration::ZERO).unwrap(), "an empty log has nothing to seal");
    let a = log.append_at_end(&chain("a"), vec![counted("a", 1), counted("a", 2)]).unwrap();
    let b = log.append_at_end(&chain("b"), vec![counted("b", 1)]).unwrap();
    assert!(!log.seal(SEAL_EVERY).unwrap(), "the log is younger than that");
    assert!(log.seal(Duration::ZERO).unwrap());
    assert!(!log.seal(Duration::ZERO).unwrap(), "nothing changed since");
    let node = ChainId::Node(log.node().unwrap());
    log.append_at_end(&node, vec![odd_draft("key.revoked".into(), None, json!({ "key": "k" }))]).unwrap();
    let c = log.append_at_end(&chain("a"), vec![counted("a", 3)]).unwrap();
    assert!(log.seal(Duration::ZERO).unwrap());
    let sealed =
        |event: &Event| SealedHead { chain: event.chain.clone(), seq: event.seq, hash: event.hash.clone() };
    let seals: Vec<LogSealed> =
        log.read(&EventQuery::of_chain(&node)).unwrap().iter().filter_map(Event::data_as).collect();
    let expected = [vec![sealed(&a[1]), sealed(&b[0])], vec![sealed(&c[0])]];
    assert_eq!(seals, expected.map(|heads| LogSealed { heads }));
    assert_eq!(events_of_whole(&*log), 7);
}

pub fn artifacts_come_back_by_their_hash(bench: &dyn LogBench) {
    let (store, other) = (bench.artifacts(), bench.artifacts());
    let large: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let kept = store.put_artifact(&large).unwrap();
    let mut writer = other.artifact().unwrap();
    large.chunks(7000).for_each(|piece| writer.write_all(piece).unwrap());
    assert_eq!(writer.finish().unwrap(), kept, "in pieces or at once, it is one artifact");
    assert!(other.get_artifact(&kept).unwrap() == large);
    let mut streamed = Vec::new();
    other.open_artifact(&kept).unwrap().read_to_end(&mut streamed).unwrap();
    assert!(streamed == large);
    other.verify_artifact(&kept).unwrap();
    drop(store.artifact().unwrap().write_all(b"never finished"));
    assert_eq!(other.artifacts().unwrap(), std::slice::from_ref(&kept));
    let wrong = ArtifactRef { bytes: 1, ..kept.clone() };
    assert!(matches!(store.open_artifact(&wrong), Err(ArtifactError::Damaged { .. })));
    store.remove_artifact(&kept).unwrap();
    store.remove_artifact(&kept).unwrap();
    assert!(matches!(other.get_artifact(&kept), Err(ArtifactError::Missing { .. })));
    let no_name = ArtifactRef { sha256: "../events.db".into(), bytes: 0 };
    assert!(matches!(store.open_artifact(&no_name), Err(ArtifactError::Name(_))));
}

impl LogBench for SceneDir {
    fn open(&self) -> Box<dyn EventLog> {
        Box::new(SceneDir::open(self))
    }

    fn artifacts(&self) -> Box<dyn Artifacts> {
        Box::new(SceneDir::open(self))
    }
}

/// The embedded store without its own versions of the trait's provided methods.
struct ProvidedBench(SceneDir);

impl LogBench for ProvidedBench {
    fn open(&self) -> Box<dyn EventLog> {
        Box::new(ProvidedLog(LogBench::open(&self.0)))
    }

    fn artifacts(&self) -> Box<dyn Artifacts> {
        LogBench::artifacts(&self.0)
    }
}

struct ProvidedLog(Box<dyn EventLog>);

impl EventLog for ProvidedLog {
    fn node(&self) -> Result<NodeId, ReadError> {
        self.0.node()
    }

    fn head(&self, chain: &ChainId) -> Result<ChainHead, ReadError> {
        self.0.head(chain)
    }

    fn append(&self, append: &Append) -> Result<Vec<Event>, AppendError> {
        self.0.append(append)
    }

    fn read(&self, query: &EventQuery) -> Result<Vec<Event>, ReadError> {
        self.0.read(query)
    }

    fn follow(&self, query: &EventQuery, wait: Duration) -> Result<Vec<Event>, ReadError> {
        self.0.follow(query, wait)
    }

    fn chains_not_ending_in(&self, kinds: &[&str]) -> Result<Vec<ChainId>, ReadError> {
        self.0.chains_not_ending_in(kinds)
    }

    fn last_pos(&self) -> Result<u64, ReadError> {
        self.0.last_pos()
    }

    fn seal(&self, age_min: Duration) -> Result<bool, AppendError> {
        self.0.seal(age_min)
    }

    fn verify(&self) -> Result<LogVerdict, ReadError> {
        self.0.verify()
    }
}

/// One test for each law and implementation.
macro_rules! laws {
    ($($law:ident),+ $(,)?) => {
        mod embedded {
            $( #[test]
            fn $law() {
                super::$law(&super::SceneDir::new());
            } )+
        }

        mod provided_methods {
            $( #[test]
            fn $law() {
                super::$law(&super::ProvidedBench(super::SceneDir::new()));
            } )+
        }
    };
}

laws! {
    an_append_is_one_unit_behind_the_head_it_expects,
    an_append_that_expects_another_head_is_a_conflict,
    a_retried_append_is_stored_once,
    two_writers_of_one_chain_conflict_and_lose_nothing,
    appends_at_the_end_of_a_chain_wait_for_each_other,
    chains_count_for_themselves_and_positions_for_all,
    a_follower_sees_all_events_in_their_order,
    a_follower_of_a_log_at_rest_waits_and_goes_away_with_nothing,
    a_log_that_is_opened_again_goes_on,
    what_is_beyond_a_limit_is_refused_whole,
    queries_find_the_events_of_a_body_and_of_a_command,
    a_seal_names_the_heads_of_all_chains_that_changed,
    artifacts_come_back_by_their_hash,
}
