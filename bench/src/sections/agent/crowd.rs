//! Many agents at once in one server, all at work until all have finished.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use fleet::{EventQuery, Fleet, clock};
use proto::{
    Event,
    event_data::{AgentFinished, EventKind},
};
use serde_json::json;

use super::{idle::remove_bodies, one, row};
use crate::{
    agents::{self, BenchCall, between},
    context::BenchContext,
    measure::interrupted,
    memory,
    report::{ReportSection, ReportTable, Unit},
    stats::Samples,
    tested_server::TestedServer,
};

const AGENTS: usize = 50;
/// The calls of each agent, one in each answer.
const CALLS: usize = 10;
const SCRIPT: &str = "crowd.toml";
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The times and the memory of a run.
struct CrowdRun {
    created: Duration,
    finished: Samples,
    before: u64,
    peak: u64,
    after: u64,
}

/// Creates the agents with one request, and waits until all have finished.
pub fn measure(context: &BenchContext, part: &mut ReportSection) -> io::Result<()> {
    let call = |number: usize| match number % 3 {
        0 => BenchCall::new("execute", &[("command", &format!("echo {number} >>/tmp/notes"))]),
        1 => BenchCall::new("read_file", &[("file_path", "/tmp/notes")]),
        _ => BenchCall::new("ls", &[("path", "/tmp")]),
    };
    let turns: Vec<Vec<BenchCall>> = (0..CALLS).map(|number| vec![call(number)]).collect();
    agents::write_script(context, SCRIPT, &agents::script(&turns))?;
    let count = context.args.scaled(AGENTS);
    let fleet = context.plain_fleet()?;
    let server = TestedServer::start_with_config(context, &agents::config(context)?)?;
    let ran = run(&fleet, &server, count);
    remove_bodies(&fleet)?;
    let ran = ran?;
    let all = ran.finished.quantile(1.0).unwrap_or_default();
    let rate = (count * CALLS) as f64 / (all / 1e9);
    let rows = vec![
        row(format!("{count} agents and Bodies created"), one(ran.created.as_nanos() as f64), "one request"),
        row("until an agent has finished", ran.finished, format!("{CALLS} calls each")),
        row("until all have finished", one(all), format!("{rate:.0} calls a second, creation included")),
    ];
    part.tables.push(ReportTable::times(format!("{count} agents at once in one `pal serve`"), &[], rows));
    part.tables.push(ReportTable {
        title: "… and the memory of the server (PSS)".into(),
        unit: Unit::Bytes,
        against: Vec::new(),
        rows: vec![
            row("before", one(ran.before as f64), ""),
            row("at its peak", one(ran.peak as f64), "read every 50 ms"),
            row("after all have finished", one(ran.after as f64), ""),
        ],
        absent: Vec::new(),
    });
    Ok(())
}

fn run(fleet: &Fleet, server: &TestedServer, count: usize) -> io::Result<CrowdRun> {
    let mut client = server.client()?;
    let begin = agents::newest(fleet)?;
    let (before, mut peak) = (memory::pss(server.pid())?, 0);
    let (began, began_at) = (Instant::now(), clock::now());
    let creation = thread::spawn(move || {
        let wanted =
            json!({ "task": "go", "model": format!("script:{SCRIPT}"), "create": {}, "count": count });
        agents::post(&mut client, "/v1/agents", &wanted).map(|_| began.elapsed())
    });
    let query = EventQuery { after: begin, kinds: AgentFinished::NAMES.to_vec(), ..EventQuery::default() };
    let ends: Vec<Event> = loop {
        let ends = fleet.log().read(&query).map_err(io::Error::other)?;
        peak = peak.max(memory::pss(server.pid())?);
        if ends.len() >= count {
            break ends;
        }
        if interrupted() || began.elapsed() > PATIENCE {
            return Err(io::Error::other(format!("{} of {count} agents have finished", ends.len())));
        }
        thread::sleep(LOOK_EVERY);
    };
    let created = creation.join().unwrap_or_else(|_| Err(io::Error::other("the client was lost")))?;
    let mut finished = Samples::default();
    ends.iter().filter_map(|end| between(&began_at, &end.at)).for_each(|time| finished.push_time(time));
    thread::sleep(Duration::from_secs(3));
    Ok(CrowdRun { created, finished, before, peak, after: memory::pss(server.pid())? })
}
