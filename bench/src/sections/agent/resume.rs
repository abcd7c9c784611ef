//! The time to go on with an agent that has a long log: from `pal agent send` to the next request to the model.

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use fleet::{Fleet, clock};
use proto::{
    Event,
    event_data::{AgentDriven, ModelAsked},
};

use super::row;
use crate::{
    agents::{self, BenchCall, TestedAgent, between},
    context::BenchContext,
    measure::interrupted,
    report::{Bar, Bound, ReportSection, ReportTable},
    stats::Samples,
};

/// The events of a long log.
const EVENTS: usize = 10_000;
/// The calls of an answer; each makes two events, and each answer two more.
const CALLS: usize = 8;
const SHORT_TURNS: usize = 1;
const ROUNDS: usize = 10;
/// A driver may live on for this time after its last event.
const DRIVER_END: Duration = Duration::from_secs(5);

/// Resumes an agent with a long log and one with a short log, in turns.
pub fn measure(context: &BenchContext, part: &mut ReportSection) -> io::Result<()> {
    let fleet = context.plain_fleet()?;
    let turns = EVENTS.div_ceil(2 * CALLS + 2);
    let long = start(context, &fleet, "long.toml", turns)?;
    let short = start(context, &fleet, "short.toml", SHORT_TURNS)?;
    long.wait(0)?;
    short.wait(0)?;
    let lens = [long.events_after(0)?.len(), short.events_after(0)?.len()];
    let mut samples: [Samples; 2] = Default::default();
    for _ in 0..context.args.scaled(ROUNDS) {
        for (agent, samples) in [&long, &short].into_iter().zip(&mut samples) {
            if !interrupted() {
                samples.push_time(resume(agent)?);
            }
        }
    }
    let [of_long, of_short] = samples;
    part.bars.push(Bar {
        promise: format!("resume of an agent with a log of {} events", lens[0]),
        found: of_long.median().filter(|_| lens[0] >= EVENTS).map(|nanoseconds| nanoseconds / 1e9),
        bound: Bound::AtMost(0.3),
        unit: " s",
    });
    let rows = vec![
        row(format!("a log of {} events", lens[0]), of_long, format!("{turns} turns")),
        row(format!("a log of {} events", lens[1]), of_short, format!("{SHORT_TURNS} turn")),
    ];
    let title = "Resume an agent: from `pal agent send` to the request to the model";
    part.tables.push(ReportTable::times(title, &[], rows));
    Ok(())
}

fn start<'a>(
    context: &'a BenchContext,
    fleet: &'a Fleet,
    name: &str,
    turns: usize,
) -> io::Result<TestedAgent<'a>> {
    let turn = |turn: usize| -> Vec<BenchCall> {
        let first = BenchCall::new("execute", &[("command", &format!("echo {turn}"))]);
        let read =
            |line| BenchCall::new("read_file", &[("file_path", "/etc/passwd")]).and_number("offset", line);
        let reads = (1..CALLS).map(|line| read(line).and_number("limit", 3));
        std::iter::once(first).chain(reads).collect()
    };
    let turns: Vec<Vec<BenchCall>> = (0..turns).map(turn).collect();
    let text = agents::script(&turns)
        + "repeat = \"forever\"\n[[turns]]\nrole = \"summarizer\"\ntext = \"a summary\"\nrepeat = \"forever\"\n";
    TestedAgent::start(context, fleet, &agents::write_script(context, name, &text)?)
}

fn resume(agent: &TestedAgent<'_>) -> io::Result<Duration> {
    wait_for_driver(agent)?;
    let begin = agent.end()?;
    let began = clock::now();
    agent.send("go on")?;
    agent.wait(begin)?;
    let events = agent.events_after(begin)?;
    let asked = events.iter().find(|event| event.is::<ModelAsked>());
    asked
        .and_then(|asked| between(&began, &asked.at))
        .ok_or_else(|| io::Error::other("the agent did not ask its model again"))
}

/// Waits until the newest driver has ended, so that the next one need not wait for its lock.
fn wait_for_driver(agent: &TestedAgent<'_>) -> io::Result<()> {
    let events = agent.events_after(0)?;
    let driven = events.iter().rev().find_map(Event::data_as::<AgentDriven>);
    let Some(driven) = driven else { return Ok(()) };
    let deadline = Instant::now() + DRIVER_END;
    // A process that has ended has no command line, also before its parent has reaped it.
    while fs::read(format!("/proc/{}/cmdline", driven.pid)).is_ok_and(|line| !line.is_empty()) {
        if Instant::now() > deadline {
            return Err(io::Error::other("the driver of an agent that has finished did not end"));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
