//! `kill -9`, and many writers at once.

use std::{collections::BTreeMap, thread, time::Duration};

use store::{Durability, EventLog, EventQuery};

use crate::{
    child::{Appender, forever},
    scene::{Random, SceneDir, events_of},
};

#[test]
fn kill_9_at_any_moment_loses_no_acknowledged_event() {
    let mut random = Random::new();
    let dir = SceneDir::new();
    let mut acknowledged = BTreeMap::new();
    for round in 0..60 {
        let durability = if random.below(4) == 0 { Durability::Power } else { Durability::Process };
        let mut appender = Appender::start(&forever(durability), &dir);
        // Kills the appender while it starts or creates the database, or after some events; then after a
        // random delay.
        let (events, later) = (random.below(40).saturating_sub(5), Duration::from_micros(random.below(4000)));
        for _ in 0..events {
            acknowledged.extend([appender.next().expect("an appender never stops by itself")]);
        }
        // The random moment is the purpose; there is no condition to wait for.
        thread::sleep(later);
        acknowledged.extend(appender.kill());

        let store = dir.open();
        let stored = store.read(&EventQuery::default()).unwrap();
        let stored: BTreeMap<u64, String> = stored.into_iter().map(|event| (event.pos, event.hash)).collect();
        let lost: Vec<_> = acknowledged.iter().filter(|(pos, hash)| stored.get(pos) != Some(hash)).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?}");
        assert_eq!(events_of(store.verify().unwrap()), stored.len() as u64, "round {round}");
    }
    assert!(acknowledged.len() > 60, "hardly anything was appended: {}", acknowledged.len());
}

#[test]
fn four_processes_make_one_log_and_append_to_it_at_once() {
    let dir = SceneDir::new();
    // The directory is empty: the appenders also race to create the database.
    let appenders: Vec<_> = (0..4).map(|_| Appender::start("append process 200", &dir)).collect();
    let said: Vec<_> = appenders.into_iter().map(Appender::finish).collect();
    let mut all = BTreeMap::new();
    for one in said {
        assert_eq!(one.len(), 300);
        assert!(one.is_sorted());
        all.extend(one);
    }
    assert_eq!(all.len(), 1200, "no place was given twice");
    assert_eq!(events_of(dir.open().verify().unwrap()), 1200);
}

#[test]
fn threads_share_one_store() {
    let dir = SceneDir::new();
    let store = dir.open();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..100).for_each(|at| drop(crate::scene::append(&store, crate::scene::draft(at))))
            });
        }
    });
    assert_eq!((store.last_pos().unwrap(), events_of(store.verify().unwrap())), (400, 400));
}
