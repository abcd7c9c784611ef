//! The overhead of a tool call, from one request to the model to the next, and the prefix that requests share.

use std::{fs, io, time::Duration};

use fleet::{Create, Fleet, Force};
use proto::{
    Event,
    event_data::{CallEnded, CallOutcome, HistoryCompacted, ModelAsked},
};

use super::{
    deepagents::{DeepAgents, PeerBackend},
    one, row,
};
use crate::{
    agents::{self, BenchCall, TestedAgent, between},
    context::BenchContext,
    library::{self, failure_text},
    measure::interrupted,
    peers::AbsentPeer,
    report::{Bar, Bound, ReportSection, ReportTable, Unit},
    run::CommandLine,
    stats::Samples,
};

/// Chooses the samples of a bar.
type SampleChoice = dyn Fn(&CallTimes) -> Samples;

/// The tools of a round of calls, in order.
const TOOLS: [&str; 7] = ["execute", "write_file", "read_file", "edit_file", "grep", "glob", "ls"];
/// The rounds of calls of one script.
const ROUNDS: usize = 5;
/// The runs of each script.
const RUNS: usize = 10;
const OURS: &str = "pal agent";
/// The directory of the calls in the Body.
const ROOT_INSIDE: &str = "/tmp/bench-calls";

/// The times of the calls of one contender, by tool.
struct CallTimes {
    name: &'static str,
    by_tool: [Samples; TOOLS.len()],
    all: Samples,
}

impl CallTimes {
    fn new(name: &'static str) -> Self {
        Self { name, by_tool: Default::default(), all: Samples::default() }
    }

    /// Adds the calls of one run. The first call makes the directory and does not count.
    fn add(&mut self, times: &[Duration]) {
        for (index, time) in times.iter().skip(1).enumerate() {
            self.by_tool[index % TOOLS.len()].push_time(*time);
            self.all.push_time(*time);
        }
    }
}

/// The prefixes that the requests of the agent share.
#[derive(Default)]
struct PrefixShares {
    shares: Samples,
    changed: usize,
}

/// Runs the same script in `pal agent` and in deepagents, in turns.
pub fn measure(context: &BenchContext, part: &mut ReportSection) -> io::Result<()> {
    let fleet = context.plain_fleet()?;
    let runtime = library::runtime()?;
    let body = runtime.block_on(fleet.create(Create::kept())).map_err(failure_text)?;
    let measured = interleave(context, &fleet, body.id().as_str());
    runtime.block_on(fleet.remove(body.id(), Force::Yes)).map_err(failure_text)?;
    let CallResults { contenders, prefix, absent, version } = measured?;
    report_calls(&contenders, absent, &version.unwrap_or_default(), part)?;
    report_prefix(prefix, part);
    Ok(())
}

/// The results of all contenders.
struct CallResults {
    contenders: Vec<CallTimes>,
    prefix: PrefixShares,
    absent: Vec<AbsentPeer>,
    /// The version of deepagents.
    version: Option<String>,
}

fn interleave(context: &BenchContext, fleet: &Fleet, body: &str) -> io::Result<CallResults> {
    let (mut ours, mut prefix, mut absent) = (CallTimes::new(OURS), PrefixShares::default(), Vec::new());
    let script = agents::write_script(context, "calls.toml", &script(ROOT_INSIDE))?;
    let found = DeepAgents::find(context)?;
    if let Err(missing) = &found {
        absent.push(missing.clone());
    }
    let peer = found.ok();
    let mut peers: Vec<(PeerBackend, CallTimes)> = Vec::new();
    if peer.is_some() {
        let places = [PeerBackend::Subprocesses, PeerBackend::LocalShell, PeerBackend::Body];
        peers.extend(places.map(|place| (place, CallTimes::new(place.name()))));
    }
    let pal = context.pal.to_string_lossy().into_owned();
    for run in 0..context.args.scaled(RUNS) {
        if interrupted() {
            break;
        }
        let events = run_ours(context, fleet, &script)?;
        ours.add(&gaps(&events));
        prefix.add(&events);
        for (place, times) in &mut peers {
            let Some(deepagents) = &peer else { continue };
            if absent.iter().any(|(name, _)| name == times.name) {
                continue;
            }
            let root = match place {
                PeerBackend::Body => format!("{ROOT_INSIDE}-{run}"),
                _ => context.dir(&format!("calls-{run}-{place:?}"))?.to_string_lossy().into_owned(),
            };
            let script = agents::write_script(context, "calls-of-peer.toml", &self::script(&root))?;
            match deepagents.run(&script, &root, *place, [&pal, body]) {
                Ok(found) => times.add(&found),
                Err(error) => absent.push((times.name.to_owned(), error.to_string())),
            }
            if *place != PeerBackend::Body {
                fs::remove_dir_all(&root)?;
            }
        }
    }
    let contenders = std::iter::once(ours).chain(peers.into_iter().map(|(_, times)| times));
    let contenders = contenders.collect();
    Ok(CallResults { contenders, prefix, absent, version: peer.map(|peer| peer.version) })
}

/// One call in each answer, as models mostly do; each round has a file of its own.
fn script(root: &str) -> String {
    let make = BenchCall::new("execute", &[("command", &format!("mkdir -p {root}"))]);
    let rounds = (0..ROUNDS).flat_map(|round| round_of_calls(root, round));
    let turns: Vec<Vec<BenchCall>> = std::iter::once(make).chain(rounds).map(|call| vec![call]).collect();
    agents::script(&turns)
}

fn round_of_calls(root: &str, round: usize) -> [BenchCall; TOOLS.len()] {
    let file = format!("{root}/module_{round}.py");
    let lines: String = (0..40).map(|line| format!("value_{round}_{line} = {line}\n")).collect();
    let (old, new) = (format!("value_{round}_7 = 7\n"), format!("value_{round}_7 = 70\n"));
    let wanted = format!("value_{round}_9 ");
    let arguments: [&[(&str, &str)]; TOOLS.len()] = [
        &[("command", "true")],
        &[("file_path", &file), ("content", &lines)],
        &[("file_path", &file)],
        &[("file_path", &file), ("old_string", &old), ("new_string", &new)],
        &[("pattern", &wanted), ("path", root)],
        &[("pattern", "*.py"), ("path", root)],
        &[("path", root)],
    ];
    let mut number = 0;
    TOOLS.map(|tool| {
        number += 1;
        BenchCall::new(tool, arguments[number - 1])
    })
}

/// Runs the script to its end in `pal agent`, and returns the events of the agent.
fn run_ours(context: &BenchContext, fleet: &Fleet, script: &std::path::Path) -> io::Result<Vec<Event>> {
    let agent = TestedAgent::start(context, fleet, script)?;
    agent.wait(0)?;
    let events = agent.events_after(0)?;
    let ended: Vec<CallEnded> = events.iter().filter_map(Event::data_as).collect();
    let good = ended.iter().filter(|end| end.outcome == CallOutcome::Done).count();
    if good == ROUNDS * TOOLS.len() + 1 {
        return Ok(events);
    }
    Err(io::Error::other(format!("{good} calls of `pal agent` of {} succeeded", ended.len())))
}

/// The times from one request to the next.
fn gaps(events: &[Event]) -> Vec<Duration> {
    let requests: Vec<&Event> = events.iter().filter(|event| event.is::<ModelAsked>()).collect();
    requests.windows(2).filter_map(|pair| between(&pair[0].at, &pair[1].at)).collect()
}

impl PrefixShares {
    /// Adds the requests of one run, but for the first and those after a compaction.
    fn add(&mut self, events: &[Event]) {
        let mut before: Option<u64> = None;
        for event in events {
            if event.is::<HistoryCompacted>() {
                before = None;
            }
            let Some(asked) = event.data_as::<ModelAsked>() else { continue };
            if let Some(before) = before {
                self.shares.push(asked.prefix_bytes as f64 / asked.bytes.max(1) as f64 * 100.0);
                self.changed += usize::from(asked.prefix_bytes < before);
            }
            before = Some(asked.bytes);
        }
    }
}

fn note(samples: &Samples) -> String {
    samples.quantile(0.99).map(|p99| format!("p99 {:.2} ms", p99 / 1e6)).unwrap_or_default()
}

fn report_calls(
    contenders: &[CallTimes],
    absent: Vec<AbsentPeer>,
    version: &str,
    part: &mut ReportSection,
) -> io::Result<()> {
    let rows = contenders.iter().map(|times| row(times.name, times.all.clone(), note(&times.all))).collect();
    let title = format!(
        "A tool call, from one request to the model to the next (scripted, no model; deepagents {version})"
    );
    let mut all = ReportTable::times(title, &[OURS], rows);
    all.absent = absent;
    let mut rows = Vec::new();
    let plain = CommandLine::new(["bash", "-c", "true"]);
    let mut samples = Samples::default();
    for _ in 0..20 {
        samples.push_time(plain.time()?);
    }
    rows.push(row("`bash -c true`, no agent", samples, ""));
    for (index, tool) in TOOLS.iter().enumerate() {
        for times in contenders {
            let samples = &times.by_tool[index];
            let ours = contenders.first().and_then(|ours| ours.by_tool[index].median());
            let ratio = ours.zip(samples.median()).map(|(ours, theirs)| theirs / ours);
            let ratio = ratio.filter(|_| times.name != OURS).map(|ratio| format!("; {ratio:.1} × {OURS}"));
            let note = note(samples) + &ratio.unwrap_or_default();
            rows.push(row(format!("{tool}: {}", times.name), samples.clone(), note));
        }
    }
    let peer = PeerBackend::Subprocesses.name();
    let all_calls = |times: &CallTimes| times.all.clone();
    let commands = |times: &CallTimes| times.by_tool[0].clone();
    let bars: [(&str, &SampleChoice, f64); 3] = [
        ("a call of all tools, p50", &all_calls, 0.5),
        ("a call of all tools, p99", &all_calls, 0.99),
        ("a call of `execute` alone, p50", &commands, 0.5),
    ];
    for (text, choose, quantile) in bars {
        let of = |name: &str| choose(contenders.iter().find(|times| times.name == name)?).quantile(quantile);
        part.bars.push(Bar {
            promise: format!("{text}: {peer}, against {OURS}"),
            found: of(peer).zip(of(OURS)).map(|(theirs, ours)| theirs / ours),
            bound: Bound::AtLeast(10.0),
            unit: "×",
        });
    }
    part.tables.push(all);
    part.tables.push(ReportTable::times("… by tool", &[], rows));
    Ok(())
}

fn report_prefix(prefix: PrefixShares, part: &mut ReportSection) {
    part.bars.push(Bar {
        promise: "the least share of a request to the model that is the request before".into(),
        found: prefix.shares.least(),
        bound: Bound::AtLeast(95.0),
        unit: " %",
    });
    let rows = vec![
        row("share of a request that is a prefix of the one before", prefix.shares, ""),
        row(
            "requests that do not begin with the whole request before",
            one(prefix.changed as f64),
            "a count",
        ),
    ];
    part.tables.push(ReportTable {
        title: format!("Requests of a run of {} turns to the model (scripted)", ROUNDS * TOOLS.len() + 2),
        unit: Unit::Percent,
        against: Vec::new(),
        rows,
        absent: Vec::new(),
    });
}
