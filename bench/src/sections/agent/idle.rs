//! Memory of agents that wait for a person, beyond their Bodies.

use std::{io, thread, time::Duration};

use fleet::{Fleet, Force};
use proto::event_data::AgentDriven;
use serde_json::{Value, json};

use super::{MIB, one, row};
use crate::{
    agents::{self, BenchCall, TestedAgent},
    context::BenchContext,
    library::{self, failure_text},
    memory,
    report::{Bar, Bound, ReportSection, ReportTable, Unit},
    tested_server::TestedServer,
};

const AGENTS: usize = 50;
/// The time that a server has to become idle.
const LEFT_ALONE: Duration = Duration::from_secs(3);
const SCRIPT: &str = "idle.toml";

/// The server with many waiting agents, and the driver of `pal agent run -d`.
pub fn measure(context: &BenchContext, part: &mut ReportSection) -> io::Result<()> {
    let calls = [
        BenchCall::new("execute", &[("command", "true")]),
        BenchCall::new("read_file", &[("file_path", "/etc/passwd")]),
        BenchCall::new("ask_user", &[("question", "Shall I go on?")]),
    ];
    let script = agents::write_script(context, SCRIPT, &agents::script(&calls.map(|call| vec![call])))?;
    let fleet = context.plain_fleet()?;
    let driver = {
        let agent = TestedAgent::start(context, &fleet, &script)?;
        agent.wait(0)?;
        thread::sleep(LEFT_ALONE);
        let driven = agent.events_after(0)?.iter().find_map(proto::Event::data_as::<AgentDriven>);
        driven.map_or(0, |driven| memory::pss(driven.pid as i32).unwrap_or(0))
    };
    let count = context.args.scaled(AGENTS);
    let [before, after] = served(context, &fleet, count)?;
    let each = (after - before).max(0.0) / count as f64;
    let note = if driver == 0 { "the process has ended" } else { "the process of `pal agent drive`" };
    let rows = vec![
        row(format!("server with {count} Bodies"), one(before), ""),
        row(format!("server with {count} agents that wait, one in each Body"), one(after), ""),
        row("for each agent in a server", one(each), "no process of its own"),
        row("driver of `pal agent run -d`", one(driver as f64), note),
    ];
    part.bars.push(Bar {
        promise: "an idle agent beyond its Body, in a server or by `pal agent run -d`".into(),
        found: Some(each.max(driver as f64) / MIB),
        bound: Bound::AtMost(3.0),
        unit: " MiB",
    });
    part.tables.push(ReportTable {
        title: "Memory of agents that wait for a person (PSS)".into(),
        unit: Unit::Bytes,
        against: Vec::new(),
        rows,
        absent: Vec::new(),
    });
    Ok(())
}

/// Memory of a server with Bodies, without agents and then with one in each Body.
fn served(context: &BenchContext, fleet: &Fleet, count: usize) -> io::Result<[f64; 2]> {
    let server = TestedServer::start_with_config(context, &agents::config(context)?)?;
    let found = measure_server(fleet, &server, count);
    remove_bodies(fleet)?;
    found
}

fn measure_server(fleet: &Fleet, server: &TestedServer, count: usize) -> io::Result<[f64; 2]> {
    let mut client = server.client()?;
    let mut bodies = Vec::new();
    for _ in 0..count {
        let body = agents::post(&mut client, "/v1/bodies", &json!({}))?;
        bodies.push(body.get("id").and_then(Value::as_str).unwrap_or_default().to_owned());
    }
    thread::sleep(LEFT_ALONE);
    let before = memory::pss(server.pid())? as f64;
    let begin = agents::newest(fleet)?;
    for body in &bodies {
        let wanted = json!({ "task": "go", "model": format!("script:{SCRIPT}"), "body": body });
        agents::post(&mut client, "/v1/agents", &wanted)?;
    }
    agents::wait_for_ends(fleet, &fleet::EventQuery { after: begin, ..agents::ends() }, count)?;
    thread::sleep(LEFT_ALONE);
    Ok([before, memory::pss(server.pid())? as f64])
}

/// Removes every Body of the bench's data directory.
pub fn remove_bodies(fleet: &Fleet) -> io::Result<()> {
    let runtime = library::runtime()?;
    for view in fleet.list().map_err(io::Error::other)? {
        runtime.block_on(fleet.remove(view.id(), Force::Yes)).map_err(failure_text)?;
    }
    Ok(())
}
