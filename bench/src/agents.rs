//! Agents of the measured `pal`, each with a scripted model, in a Body of its own without a repository.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use fleet::{EventOrder, EventQuery, Fleet};
use proto::{
    AgentId, ChainId, Event,
    event_data::{AgentFinished, AgentPaused, EventKind},
};
use serde_json::{Map, Value, json};

use crate::{context::BenchContext, measure::interrupted, peers, run::CommandLine};

const PATIENCE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const DAY_US: u64 = 24 * 3600 * 1_000_000;

/// One call of a script: a tool, and its arguments by name.
#[derive(Debug, Clone)]
pub struct BenchCall {
    /// The name of the tool.
    pub tool: &'static str,
    arguments: Vec<(&'static str, Value)>,
}

impl BenchCall {
    /// A call with these arguments.
    pub fn new(tool: &'static str, arguments: &[(&'static str, &str)]) -> Self {
        Self { tool, arguments: arguments.iter().map(|(name, text)| (*name, json!(text))).collect() }
    }

    /// Adds a number to the arguments.
    pub fn and_number(mut self, name: &'static str, number: usize) -> Self {
        self.arguments.push((name, json!(number)));
        self
    }

    fn toml(&self) -> String {
        // A JSON string or number is one of TOML, too.
        let arguments: Vec<String> =
            self.arguments.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        format!("{{ tool = \"{}\", arguments = {{ {} }} }}", self.tool, arguments.join(", "))
    }
}

/// The text of a script: one answer for each list of calls, and a last answer without calls.
pub fn script(turns: &[Vec<BenchCall>]) -> String {
    let turns: String = turns
        .iter()
        .map(|calls| {
            let calls: Vec<String> = calls.iter().map(BenchCall::toml).collect();
            format!("[[turns]]\ncalls = [{}]\n", calls.join(", "))
        })
        .collect();
    turns + "[[turns]]\ntext = \"done\"\n"
}

/// The configuration directory of the measured agents, with the directory `scripts`.
pub fn config(context: &BenchContext) -> io::Result<PathBuf> {
    let config = context.dir("agent-config")?;
    fs::create_dir_all(config.join("scripts"))?;
    Ok(config)
}

/// Writes a script into the configuration directory.
pub fn write_script(context: &BenchContext, name: &str, text: &str) -> io::Result<PathBuf> {
    let file = config(context)?.join("scripts").join(name);
    fs::write(&file, text)?;
    Ok(file)
}

/// An agent; it and its Body are removed in the end.
pub struct TestedAgent<'a> {
    context: &'a BenchContext,
    fleet: &'a Fleet,
    id: AgentId,
}

impl<'a> TestedAgent<'a> {
    /// Starts an agent with `pal agent run -d`.
    pub fn start(context: &'a BenchContext, fleet: &'a Fleet, script: &Path) -> io::Result<Self> {
        let model = format!("script:{}", script.display());
        let printed = pal(context, &["--json", "agent", "run", "-d", "--no-repo", "--model", &model, "go"])?
            .output()?;
        let told: Value = serde_json::from_str(&printed)?;
        let id = told["agent"].as_str().unwrap_or_default().parse().map_err(io::Error::other)?;
        Ok(Self { context, fleet, id })
    }

    /// Gives the agent a message with `pal agent send -d`.
    pub fn send(&self, text: &str) -> io::Result<()> {
        pal(self.context, &["agent", "send", "-d", self.id.as_str(), text])?.output().map(drop)
    }

    /// The events of the agent after a position.
    pub fn events_after(&self, after: u64) -> io::Result<Vec<Event>> {
        let query = EventQuery { after, ..EventQuery::of_chain(&ChainId::Agent(self.id.clone())) };
        self.fleet.log().read(&query).map_err(io::Error::other)
    }

    /// The position of the newest event.
    pub fn end(&self) -> io::Result<u64> {
        let query = EventQuery {
            order: EventOrder::NewestFirst,
            limit: 1,
            ..EventQuery::of_chain(&ChainId::Agent(self.id.clone()))
        };
        let newest = self.fleet.log().read(&query).map_err(io::Error::other)?;
        Ok(newest.first().map_or(0, |event| event.pos))
    }

    /// Waits until the agent waits for a person or has finished.
    pub fn wait(&self, after: u64) -> io::Result<()> {
        let chain = Some(ChainId::Agent(self.id.clone()));
        wait_for_ends(self.fleet, &EventQuery { after, chain, ..ends() }, 1).map(drop)
    }
}

impl Drop for TestedAgent<'_> {
    fn drop(&mut self) {
        for words in [&["agent", "stop", self.id.as_str()][..], &["agent", "rm", "--body", self.id.as_str()]]
        {
            let _ = pal(self.context, words).and_then(|line| line.output());
        }
    }
}

/// The query for the events with which agents stop working.
pub fn ends() -> EventQuery {
    EventQuery { kinds: [AgentPaused::NAMES, AgentFinished::NAMES].concat(), ..EventQuery::default() }
}

/// Waits for a number of events, and returns them.
pub fn wait_for_ends(fleet: &Fleet, query: &EventQuery, count: usize) -> io::Result<Vec<Event>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = fleet.log().read(query).map_err(io::Error::other)?;
        if found.len() >= count {
            return Ok(found);
        }
        if interrupted() || Instant::now() > deadline {
            return Err(io::Error::other(format!("{} of {count} agents came to an end", found.len())));
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// The position of the newest event of all.
pub fn newest(fleet: &Fleet) -> io::Result<u64> {
    let query = EventQuery { order: EventOrder::NewestFirst, limit: 1, ..EventQuery::default() };
    let newest = fleet.log().read(&query).map_err(io::Error::other)?;
    Ok(newest.first().map_or(0, |event| event.pos))
}

/// `pal` with the configuration directory of the measured agents.
pub fn pal(context: &BenchContext, words: &[&str]) -> io::Result<CommandLine> {
    let mut line = peers::pal(context, words);
    line.env.push(("PAL_CONFIG".into(), config(context)?));
    Ok(line)
}

/// Asks a server, and returns its answer.
pub fn post(client: &mut crate::client::Client, path: &str, body: &Value) -> io::Result<Map<String, Value>> {
    let headers = [("Content-Type", "application/json")];
    let said = client.ask("POST", path, &headers, body.to_string().as_bytes())?;
    Ok(serde_json::from_slice(&said)?)
}

/// The time between two times of events, which are less than a day apart.
pub fn between(from: &str, to: &str) -> Option<Duration> {
    let passed = (time_of_day_us(to)? + DAY_US - time_of_day_us(from)?) % DAY_US;
    Some(Duration::from_micros(passed))
}

/// The microseconds since midnight of a time such as `2026-11-18T20:21:09.720987Z`.
fn time_of_day_us(at: &str) -> Option<u64> {
    let number = |from: usize, to: usize| at.get(from..to)?.parse::<u64>().ok();
    let seconds = (number(11, 13)? * 60 + number(14, 16)?) * 60 + number(17, 19)?;
    Some(seconds * 1_000_000 + number(20, 26)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_events_have_a_distance() {
        let passed = between("2026-11-18T23:59:59.999000Z", "2026-11-19T00:00:00.001500Z");
        assert_eq!(passed, Some(Duration::from_micros(2500)));
        assert_eq!(between("2026-11-18T23:59:59Z", "x"), None);
    }

    #[test]
    fn a_script_is_toml() {
        let call = BenchCall::new("read_file", &[("file_path", "/a\n\"b\"")]).and_number("limit", 5);
        let expected = "{ tool = \"read_file\", arguments = { file_path = \"/a\\n\\\"b\\\"\", limit = 5 } }";
        assert_eq!(
            script(&[vec![call]]),
            format!("[[turns]]\ncalls = [{expected}]\n[[turns]]\ntext = \"done\"\n")
        );
    }
}
