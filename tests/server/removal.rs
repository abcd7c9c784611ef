//! Kills the server while it removes Bodies: the log, the directory and the API agree afterwards.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use testkit::{leaks, wait};

use crate::{client, native::create, pal::Pal, server::TestServer, server_test};

/// How many servers are killed; `PALISADE_REMOVALS` sets another number.
const ROUNDS: u32 = 40;
/// Bodies that are removed at the same time.
const BODIES: usize = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// A Body whose removal has begun is gone at the next start, and has one end; any other is there, and has none.
#[test]
fn kills_during_removals_leave_no_difference() {
    let rounds = std::env::var("PALISADE_REMOVALS")
        .map_or(ROUNDS, |rounds| rounds.parse().expect("PALISADE_REMOVALS is a number"));
    crate::pal::check(|pal| {
        let mut server = TestServer::start(pal);
        let began = Instant::now();
        remove(&server, &fill(&server), None);
        let typical = began.elapsed();
        let mut cut = 0;
        for round in 0..rounds {
            let doomed = fill(&server);
            // Spread over the time of a removal, and never in step with it.
            let acknowledged = remove(&server, &doomed, Some(typical * (round * 37 % 100) / 80));
            server.kill();
            cut += half_removed(pal).len();
            server = TestServer::start(pal);
            let alive = compare(pal, &server);
            assert!(alive.is_disjoint(&acknowledged), "round {round}: a removed Body came back: {alive:?}");
        }
        eprintln!("{cut} removals of {rounds} rounds were cut on the way");
        assert!(cut > 0, "no removal was cut");
        remove(&server, &fill(&server), None);
        assert_eq!(compare(pal, &server), BTreeSet::new());
        assert_eq!(server.stop(), Some(0));
        // Nothing is left for `pal gc` either: no lease, no cgroup, no claim of ids.
        leaks::reap();
        assert_eq!(pal.ok("gc --dry-run --json"), "");
    });
}

/// Creates Bodies through both APIs until there are enough; returns all of them.
fn fill(server: &TestServer) -> Vec<String> {
    let listed = server.get("/v1/bodies?limit=1000").expect(200).json();
    let mut ids: Vec<String> =
        listed["items"].as_array().unwrap().iter().map(|body| body["id"].as_str().unwrap().into()).collect();
    while ids.len() < BODIES {
        ids.push(if ids.len().is_multiple_of(2) {
            create(server, json!({}))
        } else {
            server.create(json!({})).id
        });
    }
    ids
}

/// Asks for all removals at once; returns those that were acknowledged, after all of them or after a time.
fn remove(server: &TestServer, ids: &[String], within: Option<Duration>) -> BTreeSet<String> {
    let acknowledged = Mutex::new(BTreeSet::new());
    let (address, key) = (server.address, server.key.clone());
    std::thread::scope(|scope| {
        for id in ids {
            let (acknowledged, key) = (&acknowledged, &key);
            let ask = move || {
                let path = format!("/v1/bodies/{id}?force=true");
                let answer = client::ask(address, "DELETE", &path, &[("X-API-KEY", key)], b"");
                if answer.is_ok_and(|answer| answer.status == 204) {
                    acknowledged.lock().unwrap().insert(id.clone());
                }
            };
            scope.spawn(ask);
        }
        if let Some(within) = within {
            std::thread::sleep(within);
            server.kill_now();
        }
    });
    acknowledged.into_inner().unwrap()
}

fn spec(pal: &Pal, id: &str) -> PathBuf {
    pal.data().join("bodies").join(id).join("spec.json")
}

/// Directories of Bodies whose removal was cut.
fn half_removed(pal: &Pal) -> Vec<String> {
    let is_half = |id: &String| !spec(pal, id).exists() && spec(pal, id).with_extension("draft").exists();
    pal.bodies().into_iter().filter(is_half).collect()
}

/// The ends in the log of every Body that the log knows.
fn ends(pal: &Pal) -> BTreeMap<String, usize> {
    let mut ends = BTreeMap::new();
    for event in pal.events() {
        let id = event["body"].as_str().unwrap_or_default().to_owned();
        match event["type"].as_str().unwrap() {
            "body.created" => drop(ends.insert(id, 0)),
            "body.removed" | "body.failed" => *ends.entry(id).or_default() += 1,
            _ => {}
        }
    }
    ends
}

/// Compares the API with the log and the directory; returns the Bodies.
fn compare(pal: &Pal, server: &TestServer) -> BTreeSet<String> {
    let listed = server.get("/v1/bodies?limit=1000").expect(200).json();
    let listed = listed["items"].as_array().unwrap();
    let alive: BTreeSet<String> = listed.iter().map(|body| body["id"].as_str().unwrap().into()).collect();
    for body in listed {
        assert_eq!(body["status"], "running", "{body}");
    }
    let in_log: BTreeMap<String, usize> = ends(pal)
        .into_iter()
        .map(|(id, ends)| (id.clone(), ends + usize::from(alive.contains(&id))))
        .collect();
    let wrong: Vec<_> = in_log.iter().filter(|(_, ends)| **ends != 1).collect();
    assert!(wrong.is_empty(), "each Body has either an end or a place in the list: {wrong:?}");
    // The directory of a pooled guest has no spec, not even a draft.
    let is_body = |id: &String| spec(pal, id).exists() || spec(pal, id).with_extension("draft").exists();
    let in_directory: BTreeSet<String> = pal.bodies().into_iter().filter(is_body).collect();
    assert_eq!(in_directory, alive, "the directory holds what the API lists");
    alive
}

server_test! {
    /// An earlier version recorded a removal before it withdrew the Body; the next server finishes such a removal.
    fn a_body_that_the_log_calls_removed_does_not_come_back(pal) {
        let id = pal.ok("create");
        pal.ok(&format!("stop {id}"));
        let text = fs::read(spec(pal, &id)).unwrap();
        pal.ok(&format!("rm {id}"));
        fs::create_dir(spec(pal, &id).parent().unwrap()).unwrap();
        fs::write(spec(pal, &id), text).unwrap();
        assert!(pal.ok("ls --json").contains(&id), "the control: it came back");
        let server = TestServer::start(pal);
        assert_eq!(server.get("/v1/bodies").expect(200).json()["items"], json!([]));
        assert_eq!(pal.bodies(), Vec::<String>::new());
        assert_eq!(ends(pal)[&id], 1);
    }
}

server_test! {
    /// The supervisor of a killed `pal run` removes its Body and writes no event; the next server records the end.
    fn a_body_that_went_with_its_pal_has_an_end(pal) {
        let mut run = pal.command(["run", "--", "sh", "-c", "echo up; sleep 100"]).spawn().unwrap();
        crate::pal::await_word(&mut run, "up");
        let id = pal.running();
        run.kill().unwrap();
        run.wait().unwrap();
        wait::blocking(PATIENCE, "its supervisor removes the Body", || {
            leaks::reap();
            pal.bodies().is_empty().then_some(())
        });
        assert_eq!(ends(pal)[&id], 0, "the control: nobody has recorded it");
        for _ in 0..2 {
            drop(TestServer::start(pal));
            assert_eq!(ends(pal)[&id], 1);
        }
        let removed = pal.events().into_iter().find(|event| event["type"] == "body.removed").unwrap();
        assert_eq!(removed["data"]["by"], "gc");
    }
}

server_test! {
    /// Every `pal` that lists Bodies clears what a killed one left of a create or a removal.
    fn any_pal_clears_what_a_killed_one_left(pal) {
        for clear in ["ls", "gc", "serve"] {
            let id = pal.ok("create");
            // As after `kill -9` in the middle of a removal: the Body is withdrawn, and its guest still runs.
            fs::rename(spec(pal, &id), spec(pal, &id).with_extension("draft")).unwrap();
            match clear {
                "serve" => drop(TestServer::start(pal)),
                _ => assert!(!pal.line(clear).out.contains("running"), "{clear}"),
            }
            leaks::reap();
            pal.nothing_left(std::slice::from_ref(&id));
            assert_eq!(ends(pal)[&id], 1, "{clear}");
        }
    }
}

server_test! {
    /// A Body that cannot be recorded as removed stays.
    fn a_refused_removal_leaves_the_body(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        server.ask("DELETE", &format!("/v1/bodies/{id}"), Value::Null).expect(409);
        assert_eq!(server.get(&format!("/v1/bodies/{id}")).expect(200).json()["status"], "running");
        assert_eq!(ends(pal)[&id], 0);
    }
}
