//! Agents whose driver, guest or supervisor is killed at every event of their log.
//!
//! A child process drives the agent and kills itself, the guest or the supervisor right after the n-th event is in the
//! log. Another driver takes over. The end is the same as without a kill, and each call had one effect: every script
//! appends lines to a file of the Body, one for each effect.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bridge::{AgentHost, AgentStatus, Agents, HostSettings, LiveSink, LiveUpdate};
use fleet::GitIdentity;
use proto::{
    AgentId, BodyId, Event, EventData,
    event_data::{AgentPause, AgentResumed, AgentSpec, ApprovalMode, CallEnded, CallOutcome},
    launch::RunRecord,
};
use testkit::{Bodies, body_test};

/// Tells a child process what to do: `DATA AGENT VICTIM EVENT`.
const CHILD: &str = "PALISADE_CRASH_CHILD";
const EFFECTS: &str = "/tmp/effects";

/// The scripts: the turns of a model, and how many lines of effects a whole run leaves.
const SCRIPTS: &[(&str, &str, usize)] = &[
    (
        "one command",
        "[[turns]]\ncalls = [{ tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects\" } }]\n",
        1,
    ),
    (
        "two commands of one answer",
        "[[turns]]\ncalls = [{ tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects\" } }, { tool = \"execute\", arguments = { command = \"echo b >> /tmp/effects\" } }]\n",
        2,
    ),
    (
        "a slow command",
        "[[turns]]\ncalls = [{ tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects; sleep 0.4; echo b >> /tmp/effects\" } }]\n",
        2,
    ),
    (
        "a failing command",
        "[[turns]]\ncalls = [{ tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects; exit 3\" } }]\n",
        1,
    ),
    (
        "write, then edit",
        "[[turns]]\ncalls = [{ tool = \"write_file\", arguments = { file_path = \"/tmp/effects\", content = \"a\\n\" } }]\n\
         [[turns]]\ncalls = [{ tool = \"edit_file\", arguments = { file_path = \"/tmp/effects\", old_string = \"a\\n\", new_string = \"a\\nb\\n\" } }]\n",
        2,
    ),
    (
        "an edit that would apply twice",
        "[[turns]]\ncalls = [{ tool = \"write_file\", arguments = { file_path = \"/tmp/effects\", content = \"a\\n\" } }]\n\
         [[turns]]\ncalls = [{ tool = \"edit_file\", arguments = { file_path = \"/tmp/effects\", old_string = \"a\\n\", new_string = \"a\\na\\n\", replace_all = true } }]\n",
        2,
    ),
    (
        "a patch",
        "[[turns]]\ncalls = [{ tool = \"apply_patch\", arguments = { input = \"*** Begin Patch\\n*** Add File: /tmp/effects\\n+a\\n+b\\n*** End Patch\\n\" } }]\n",
        2,
    ),
    (
        "delete after use",
        "[[turns]]\ncalls = [{ tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects; echo x > /tmp/gone\" } }]\n\
         [[turns]]\ncalls = [{ tool = \"delete\", arguments = { file_path = \"/tmp/gone\" } }]\n",
        1,
    ),
    (
        "a plan and memories",
        "[[turns]]\ncalls = [{ tool = \"write_todos\", arguments = { todos = [{ content = \"one\", status = \"in_progress\" }] } }]\n\
         [[turns]]\ncalls = [{ tool = \"write_file\", arguments = { file_path = \"/memories/crash.md\", content = \"kept\" } }, { tool = \"execute\", arguments = { command = \"echo a >> /tmp/effects\" } }]\n",
        1,
    ),
    (
        "a process in the background",
        "[[turns]]\ncalls = [{ tool = \"exec_command\", arguments = { cmd = \"echo a >> /tmp/effects; sleep 0.3; echo b >> /tmp/effects\", yield_time_ms = 2000 } }]\n",
        2,
    ),
];

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Driver,
    Guest,
    Supervisor,
}

impl Victim {
    fn of(name: &str) -> Self {
        [Self::Driver, Self::Guest, Self::Supervisor]
            .into_iter()
            .find(|one| one.name() == name)
            .expect("a victim")
    }

    fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Guest => "guest",
            Self::Supervisor => "supervisor",
        }
    }
}

/// Kills a process right after the n-th event of this driver is in the log.
struct Killer {
    victim: i32,
    left: AtomicUsize,
}

impl LiveSink for Killer {
    fn update(&self, _: LiveUpdate) {}

    fn note_event(&self, _: &Event) {
        let left = self.left.load(Ordering::SeqCst);
        self.left.store(left.saturating_sub(1), Ordering::SeqCst);
        if left == 1 {
            testkit::kill(self.victim);
        }
    }
}

struct NoSink;

impl LiveSink for NoSink {
    fn update(&self, _: LiveUpdate) {}
}

/// An agent with a script, in a Body of its own.
async fn agent(t: &Bodies, script: &str) -> (AgentId, BodyId) {
    let body = t.create().await;
    let agents = Agents::new(Arc::new(t.second()));
    let id = Agents::new_id().unwrap();
    let file = t.dir().join(format!("{id}.toml"));
    fs::write(&file, format!("{script}\n[[turns]]\ntext = \"Done.\"\n")).unwrap();
    let spec = AgentSpec {
        id,
        model: format!("script:{}", file.display()),
        title: "crash".into(),
        role: None,
        plan: None,
        mode: ApprovalMode::Auto,
        budget: Default::default(),
        parent: None,
        workdir: None,
        repository: None,
        group: None,
        settings: serde_json::Value::Null,
    };
    let record = agents.create(spec, None, &body, Some("work".into())).unwrap();
    (record.spec.id, body)
}

fn host(data: &Path) -> AgentHost {
    let fleet = Arc::new(testkit::open(data).unwrap());
    let settings = HostSettings {
        config: data.join("config"),
        variables: Arc::new(|_| None),
        person: GitIdentity { home: data.into(), path: "/usr/bin:/bin".into(), env: Vec::new() },
    };
    AgentHost::new(Agents::new(fleet), settings)
}

/// Drives to the end; goes on after each pause that only says that the Body died.
async fn drive_to_end(data: &Path, id: &AgentId) -> AgentStatus {
    for _ in 0..5 {
        let host = host(data);
        host.drive(id, Arc::new(NoSink)).await.unwrap();
        match host.agents().load(id).await.unwrap().view.status() {
            AgentStatus::Paused { reason: AgentPause::Body, .. } => {
                host.agents().note(id, [EventData::from(AgentResumed {})]).unwrap();
            }
            status => return status,
        }
    }
    panic!("agent {id} pauses again and again");
}

/// Lets a child process drive, which kills the victim at an event.
fn drive_and_kill(data: &Path, id: &AgentId, victim: Victim, at: usize) {
    let task = format!("{} {id} {} {at}", data.display(), victim.name());
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child"])
        .env(CHILD, task)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(victim == Victim::Driver || ended.status.success(), "{complaint}");
}

/// The child of a test: drives an agent and kills. Without a task it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let [data, id, victim, at] = words[..] else { panic!("{task}") };
    let host = host(Path::new(data));
    let id = host.agents().find(id).unwrap().spec.id;
    let body = host.agents().load(&id).await.unwrap().view.body.unwrap();
    let record = Path::new(data).join("bodies").join(body.as_str()).join("run.json");
    let running: RunRecord = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    let victim = match Victim::of(victim) {
        Victim::Driver => std::process::id() as i32,
        Victim::Guest => running.pid,
        Victim::Supervisor => running.supervisor,
    };
    let killer = Killer { victim, left: AtomicUsize::new(at.parse().unwrap()) };
    let _ = host.drive(&id, Arc::new(killer)).await;
}

/// The end of an agent, as a person sees it.
#[derive(Debug, PartialEq)]
struct AgentEnd {
    status: AgentStatus,
    effects: Vec<String>,
    outcomes: Vec<CallOutcome>,
    answers: u64,
    /// The exit codes of commands, in order of their numbers.
    codes: Vec<i32>,
}

async fn end_of(t: &Bodies, id: &AgentId) -> AgentEnd {
    let status = drive_to_end(&t.data(), id).await;
    let loaded = host(&t.data()).agents().load(id).await.unwrap();
    let body = loaded.view.body.clone().unwrap();
    let shown = t.sh(&body, &format!("cat {EFFECTS}")).await.text();
    let mut effects: Vec<String> = shown.lines().map(str::to_owned).collect();
    let ended: Vec<CallEnded> = loaded.events.iter().filter_map(Event::data_as).collect();
    let mut codes: Vec<i32> = ended.iter().filter_map(|ended| ended.exit_code).collect();
    let mut outcomes: Vec<CallOutcome> = ended.into_iter().map(|ended| ended.outcome).collect();
    // Calls of one answer run side by side and end in any order.
    effects.sort();
    codes.sort_unstable();
    outcomes.sort_by_key(|outcome| format!("{outcome:?}"));
    AgentEnd { status, effects, outcomes, answers: loaded.view.totals.answers, codes }
}

/// How many events the driver of a whole run appends.
async fn whole_run(t: &Bodies, script: &str) -> (usize, AgentEnd) {
    let (id, body) = agent(t, script).await;
    let before = host(&t.data()).agents().load(&id).await.unwrap().events.len();
    let end = end_of(t, &id).await;
    let events = host(&t.data()).agents().load(&id).await.unwrap().events.len() - before;
    remove(t, &id, &body).await;
    (events, end)
}

async fn remove(t: &Bodies, id: &AgentId, body: &BodyId) {
    host(&t.data()).agents().remove(id, true).unwrap();
    t.fleet().remove(body, fleet::Force::Yes).await.unwrap();
}

async fn kill_at_every_event(t: &Bodies, victim: Victim, scripts: &[(&str, &str, usize)]) {
    let mut same = 0;
    let mut kills = 0;
    for (name, script, effects) in scripts {
        let (events, whole) = whole_run(t, script).await;
        assert_eq!(whole.effects.len(), *effects, "{name}");
        assert_eq!(whole.status, AgentStatus::Finished, "{name}");
        for at in 1..=events {
            let (id, body) = agent(t, script).await;
            drive_and_kill(&t.data(), &id, victim, at);
            let end = end_of(t, &id).await;
            kills += 1;
            let unknown = end.outcomes.contains(&CallOutcome::Unknown);
            match victim {
                Victim::Driver => assert_eq!(end, whole, "{name}, killed at event {at} of {events}"),
                // The guest's knowledge dies with it: an effect is there once or, if the model was told that the
                // outcome is unknown or the call failed, at most once.
                Victim::Guest | Victim::Supervisor => {
                    assert_eq!(
                        end.status,
                        AgentStatus::Finished,
                        "{name}, {victim:?} killed at {at} of {events}"
                    );
                    assert_eq!(end.outcomes.len(), whole.outcomes.len(), "{name}, {victim:?} killed at {at}");
                    let whole_effects = end.effects == whole.effects;
                    let told =
                        unknown || end.outcomes.contains(&CallOutcome::Failed) || end.codes != whole.codes;
                    assert!(whole_effects || told, "{name}, {victim:?} killed at {at}: {end:?}");
                    assert!(
                        end.effects.len() <= whole.effects.len(),
                        "{name}, {victim:?} killed at {at}: {end:?}"
                    );
                }
            }
            same += 1;
            remove(t, &id, &body).await;
        }
    }
    println!("{victim:?}: {same} of {kills} kills ended as they should");
}

#[body_test(except(microvm = "an emulated boot for each of some hundred kills takes an hour"))]
async fn a_killed_driver_changes_nothing(t: Bodies) {
    kill_at_every_event(&t, Victim::Driver, SCRIPTS).await;
}

#[body_test(except(microvm = "an emulated boot for each of some hundred kills takes an hour"))]
async fn a_killed_guest_leaves_no_effect_twice(t: Bodies) {
    kill_at_every_event(&t, Victim::Guest, &SCRIPTS[..4]).await;
}

#[body_test(except(microvm = "an emulated boot for each of some hundred kills takes an hour"))]
async fn a_killed_supervisor_leaves_no_effect_twice(t: Bodies) {
    kill_at_every_event(&t, Victim::Supervisor, &SCRIPTS[..4]).await;
}
