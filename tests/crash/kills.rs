//! `kill -9` at random moments of every command that changes a Body.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use proto::launch::RunRecord;
use testkit::{leaks, wait};

use crate::{
    chance::Chance,
    leftovers,
    pal::{self, Pal},
    turn,
    world::{Act, Verb, World},
};

/// How many `pal` processes are killed before they ended by themselves.
const KILLS: usize = 200;
const KILLS_AS_USER: usize = 60;
/// Most Bodies at once.
const BODIES_MAX: usize = 5;
/// After so many kills everything is removed, and nothing may be left.
const CLEAR_EVERY: usize = 40;

#[test]
fn kills_of_pal_lose_nothing_and_leave_nothing() {
    kill_and_check(KILLS);
}

fn kill_and_check(wanted: usize) {
    let _turn = turn();
    let wanted = std::env::var("PALISADE_KILLS")
        .map_or(wanted, |wanted| wanted.parse().expect("PALISADE_KILLS is a number"));
    let mut chance = Chance::new();
    let mut world = World::new();
    let typical = measure(&mut world);
    let mut kills: BTreeMap<Verb, usize> = BTreeMap::new();
    let mut round = 0;
    while kills.values().sum::<usize>() < wanted {
        round += 1;
        world.have_some();
        let act = choose(&mut world, &mut chance);
        let kill = chance.before(typical[&act.verb] * 11 / 10);
        let besides = ConcurrentLoad::choose(&world, &mut chance, kill);
        eprintln!("round {round}: {:?} {} killed after {kill:?}, besides: {besides:?}", act.verb, act.of);
        let said = thread::scope(|scope| {
            let besides = scope.spawn(|| besides.act());
            let said = world.act(&act, Some(kill));
            besides.join().expect("what happens besides does not fail");
            said
        });
        leaks::reap();
        match said.code {
            None => *kills.entry(act.verb).or_default() += 1,
            Some(0) => {}
            Some(code) => assert!(besides.excuses(code), "round {round}: {act:?} failed by itself: {said:?}"),
        }
        world.check();
        if round % CLEAR_EVERY == 0 {
            world.clear_and_check();
        }
    }
    world.clear_and_check();
    eprintln!("{} of {round} were killed on the way: {kills:?}", kills.values().sum::<usize>());
}

#[test]
fn kills_of_an_ordinary_users_pal_lose_nothing_and_leave_nothing() {
    if !testkit::is_root() {
        return kill_and_check(KILLS_AS_USER);
    }
    let _turn = turn();
    // The parent finds the program, so that the ordinary user can use it, too.
    pal::program();
    testkit::run_as_user("crash::kills::kills_of_an_ordinary_users_pal_lose_nothing_and_leave_nothing");
}

/// How long each command takes without a kill.
fn measure(world: &mut World) -> BTreeMap<Verb, Duration> {
    let mut typical = BTreeMap::new();
    let mut time = |world: &mut World, verb: Verb, of: &str| {
        let act = world.prepare(verb, of.to_owned());
        let began = Instant::now();
        let said = world.act(&act, None);
        assert_eq!(said.code, Some(0), "{act:?}: {said:?}");
        typical.insert(verb, began.elapsed());
        said.out.lines().next().unwrap_or_default().to_owned()
    };
    // Run it once first, so that the data directory exists.
    time(world, Verb::Run, "");
    time(world, Verb::Run, "");
    let body = time(world, Verb::Create, "");
    time(world, Verb::Exec, &body);
    time(world, Verb::Copy, &body);
    let snapshot = time(world, Verb::Snapshot, &body);
    time(world, Verb::RemoveSnapshot, &snapshot);
    time(world, Verb::Fork, &body);
    time(world, Verb::Stop, &body);
    time(world, Verb::Start, &body);
    time(world, Verb::Remove, &body);
    time(world, Verb::Gc, "");
    typical
}

fn choose(world: &mut World, chance: &mut Chance) -> Act {
    loop {
        let verb = *chance.of(&Verb::ALL);
        let (bodies, snapshots) = (world.bodies(), world.snapshots());
        match verb {
            Verb::Run | Verb::Gc => return world.prepare(verb, String::new()),
            Verb::Create if bodies.len() < BODIES_MAX => return world.prepare(verb, String::new()),
            Verb::RemoveSnapshot if !snapshots.is_empty() => {
                return world.prepare(verb, chance.of(&snapshots).clone());
            }
            Verb::Create | Verb::RemoveSnapshot => {}
            Verb::Fork if bodies.len() >= BODIES_MAX => {}
            _ if bodies.is_empty() => {}
            _ => return world.prepare(verb, chance.of(&bodies).clone()),
        }
    }
}

/// The concurrent load.
#[derive(Debug)]
enum ConcurrentLoad {
    Nothing,
    /// These processes of a Body are killed.
    Deaths(Vec<i32>, Duration),
    /// A `pal gc` runs.
    Gc(GcCall, Duration),
}

#[derive(Debug)]
struct GcCall {
    program: PathBuf,
    data: PathBuf,
}

impl ConcurrentLoad {
    fn choose(world: &World, chance: &mut Chance, within: Duration) -> Self {
        let after = chance.before(within);
        let bodies = world.bodies();
        match chance.below(8) {
            0 if !bodies.is_empty() => {
                let Some(running) = running(&world.pal, chance.of(&bodies).as_str()) else {
                    return ConcurrentLoad::Nothing;
                };
                let pids =
                    [vec![running.pid], vec![running.supervisor], vec![running.supervisor, running.pid]];
                let ours: Vec<i32> = leaks::descendants().into_iter().map(|process| process.pid).collect();
                let pids = chance.of(&pids).iter().copied().filter(|pid| ours.contains(pid)).collect();
                ConcurrentLoad::Deaths(pids, after)
            }
            1 | 2 => ConcurrentLoad::Gc(GcCall { program: pal::program(), data: world.pal.data() }, after),
            _ => ConcurrentLoad::Nothing,
        }
    }

    fn act(&self) {
        match self {
            ConcurrentLoad::Nothing => {}
            ConcurrentLoad::Deaths(pids, after) => {
                thread::sleep(*after);
                let named =
                    |pid: &i32| leaks::HostProcess { pid: *pid, parent: 0, name: String::new(), state: 'R' };
                leaks::end(&pids.iter().map(named).collect::<Vec<_>>());
            }
            ConcurrentLoad::Gc(call, after) => {
                thread::sleep(*after);
                let output = Command::new(&call.program)
                    .arg("gc")
                    .env("PAL_DATA", &call.data)
                    .output()
                    .expect("pal can be run");
                assert!(output.status.success(), "gc: {}", String::from_utf8_lossy(&output.stderr));
            }
        }
    }

    /// Whether an action may fail because of it, with an exit code that says so.
    fn excuses(&self, code: i32) -> bool {
        matches!(self, ConcurrentLoad::Deaths(..)) && (code == 137 || (121..=125).contains(&code))
    }
}

fn running(pal: &Pal, id: &str) -> Option<RunRecord> {
    serde_json::from_slice(&fs::read(pal.data().join("bodies").join(id).join("run.json")).ok()?).ok()
}

/// A `pal run` that sleeps, and its Body.
fn sleeping(pal: &Pal) -> (std::process::Child, String, RunRecord) {
    let child = Command::new(pal::program())
        .args(["run", "--", "sleep", "0.5"])
        .env("PAL_DATA", pal.data())
        .spawn()
        .expect("pal can be run");
    let found = || {
        let id = pal.bodies().into_iter().map(|(id, _)| id).next()?;
        let running = running(pal, &id)?;
        Some((id, running))
    };
    let (id, running) =
        wait::blocking(Duration::from_secs(5), "the Body of a `pal run` is not listed", found);
    (child, id, running)
}

#[test]
fn a_run_whose_keeper_was_killed_ends_in_order() {
    let _turn = turn();
    let pal = Pal::new();
    let (mut child, id, running) = sleeping(&pal);
    testkit::kill(running.supervisor);
    assert_eq!(child.wait().expect("a child can be waited for").code(), Some(0));
    pal.ok(&["gc"]);
    leftovers::none(&pal, &[id].into());
}

#[test]
fn a_run_that_was_killed_with_its_keeper_is_swept() {
    let _turn = turn();
    let pal = Pal::new();
    let (mut child, id, running) = sleeping(&pal);
    testkit::kill(running.supervisor);
    child.kill().expect("it sleeps");
    child.wait().expect("a child can be waited for");
    wait::blocking(Duration::from_secs(5), "the keeper lives on", || {
        leaks::reap();
        leaks::processes().iter().all(|process| process.pid != running.supervisor).then_some(())
    });
    pal.ok(&["gc"]);
    assert_eq!(pal.bodies(), Vec::new());
    leftovers::none(&pal, &[id].into());
}
