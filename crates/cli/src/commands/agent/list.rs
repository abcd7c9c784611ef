//! `pal agent ls`, `cost` and `rm`.

use brain::agent::{AgentStatus, AgentView};
use bridge::{AgentRecord, Agents, LoadedAgent, RemovedBody};
use proto::{
    AgentId, BodyId, ChainId, Event, Failure,
    event_data::{AgentCreated, AgentDriven, AgentPause, AgentRewound, CallEnded, ModelAnswered},
};
use serde::Serialize;
use serde_json::json;

use super::{
    call_line::{shorten, time},
    render::{count, dollars},
};
use crate::{
    age,
    args::{AgentListArgs, AgentRemoveArgs, AgentsArg},
    failure,
    output::{self, Format},
    progress,
    table::Table,
};

/// How many characters of a title a table shows.
const TITLE_LEN: usize = 48;

/// Lists the agents, oldest first.
pub async fn list(agents: &Agents, args: &AgentListArgs, format: Format) -> Result<u8, Failure> {
    let mut records = agents.list()?;
    records.retain(|record| args.all || record.spec.parent.is_none());
    if records.is_empty() && format == Format::Text {
        output::talk("no agents\n  hint: start one with `pal agent run \"the task\"`");
    }
    let mut table = Table::new(&["ID", "STATE", "TURNS", "COST", "AGE", "BODY", "ROLE", "TASK"]);
    for record in &records {
        let loaded = agents.load(&record.spec.id).await?;
        let view = &loaded.view;
        let is_driven = agents.is_driven(&record.spec.id);
        if format == Format::Json {
            output::json(&agent_json(record, view, is_driven))?;
            continue;
        }
        let cost = match (view.totals.unpriced_answers, view.totals.cost_microdollars) {
            _ if record.spec.model.starts_with("script:") => "-".to_owned(),
            (0, 0) => "-".to_owned(),
            (0, cost) => dollars(cost),
            (_, 0) => "?".to_owned(),
            (_, cost) => format!("{}+", dollars(cost)),
        };
        table.row([
            record.spec.id.as_str(),
            &state_word(&loaded, is_driven),
            &view.totals.answers.to_string(),
            &cost,
            &age::since(&record.created_at),
            view.body.as_ref().map_or("-", BodyId::as_str),
            record.spec.role.as_deref().unwrap_or("-"),
            &shorten(&record.spec.title, TITLE_LEN),
        ]);
    }
    if format == Format::Text && !records.is_empty() {
        table.drop_blank_columns();
        output::data(table.render("").as_bytes())?;
    }
    Ok(0)
}

/// An agent as JSON.
pub fn agent_json(record: &AgentRecord, view: &AgentView, is_driven: bool) -> serde_json::Value {
    let mut object = serde_json::to_value(record).unwrap_or_default();
    object["state"] = json!(view.status());
    object["driven"] = json!(is_driven);
    object["body"] = json!(view.body);
    object["turn"] = json!(view.turn);
    object["totals"] = json!(view.totals);
    object["budget"] = json!(view.budget);
    object["todos"] = json!(view.todos);
    object["summary"] = json!(view.summary);
    object
}

/// The activity of an agent in a word or two.
pub fn state_word(loaded: &LoadedAgent, is_driven: bool) -> String {
    match loaded.view.status() {
        AgentStatus::Working if is_driven => "working".to_owned(),
        AgentStatus::Working if is_new(loaded) => "ready".to_owned(),
        AgentStatus::Working => "not driven".to_owned(),
        AgentStatus::Finished => "finished".to_owned(),
        AgentStatus::Paused { reason, .. } => match reason {
            AgentPause::Approval => "needs approval".to_owned(),
            AgentPause::Question => "asks".to_owned(),
            AgentPause::Budget => "out of budget".to_owned(),
            AgentPause::Interrupted => "interrupted".to_owned(),
            AgentPause::Stuck => "stuck".to_owned(),
            AgentPause::Model => "model fails".to_owned(),
            AgentPause::Body => "Body fails".to_owned(),
            AgentPause::Stopped => "stopped".to_owned(),
            AgentPause::Other(word) => word,
        },
    }
}

/// Whether no process has driven an agent since it was forked or taken back.
fn is_new(loaded: &LoadedAgent) -> bool {
    let own = ChainId::Agent(loaded.record.spec.id.clone());
    let newest =
        loaded.events.iter().rev().filter(|event| event.chain == own).find(|event| {
            event.is::<AgentDriven>() || event.is::<AgentRewound>() || event.is::<AgentCreated>()
        });
    newest.is_some_and(|event| !event.is::<AgentDriven>())
}

/// The answers and calls of one agent's own log: a fork does not pay again for the agent that it came from.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct AgentCost {
    answers: u64,
    input: u64,
    cache_read: u64,
    cache_write: u64,
    output: u64,
    cost_microdollars: u64,
    unpriced_answers: u64,
    model_ms: u64,
    calls: u64,
    tool_ms: u64,
    /// Whether only scripts answered, which cost nothing.
    #[serde(skip)]
    is_script: bool,
}

impl AgentCost {
    fn of<'a>(events: impl IntoIterator<Item = &'a Event>) -> Self {
        let mut cost = Self::default();
        for event in events {
            if let Some(answered) = event.data_as::<ModelAnswered>() {
                cost.add_answer(&answered);
            }
            if let Some(ended) = event.data_as::<CallEnded>() {
                cost.calls += 1;
                cost.tool_ms += ended.took_ms;
            }
        }
        cost
    }

    fn add_answer(&mut self, answered: &ModelAnswered) {
        let usage = &answered.usage;
        self.answers += 1;
        self.input += usage.input;
        self.cache_read += usage.cache_read;
        self.cache_write += usage.cache_write;
        self.output += usage.output;
        self.model_ms += answered.took_ms;
        match answered.cost_microdollars {
            Some(cost) => self.cost_microdollars += cost,
            None => self.unpriced_answers += 1,
        }
    }

    fn add(&mut self, other: &Self) {
        self.answers += other.answers;
        self.input += other.input;
        self.cache_read += other.cache_read;
        self.cache_write += other.cache_write;
        self.output += other.output;
        self.cost_microdollars += other.cost_microdollars;
        self.unpriced_answers += other.unpriced_answers;
        self.model_ms += other.model_ms;
        self.calls += other.calls;
        self.tool_ms += other.tool_ms;
        self.is_script &= other.is_script;
    }

    fn row(&self, table: &mut Table, id: &str, title: &str) {
        let cost = match (self.answers, self.unpriced_answers) {
            (0, _) => "-".to_owned(),
            _ if self.is_script => "-".to_owned(),
            (_, 0) => dollars(self.cost_microdollars),
            _ if self.cost_microdollars == 0 => "unknown".to_owned(),
            _ => format!("{}+", dollars(self.cost_microdollars)),
        };
        table.row([
            id,
            &self.answers.to_string(),
            &count(self.input + self.cache_read + self.cache_write),
            &count(self.cache_read),
            &count(self.output),
            &cost,
            &time(self.model_ms),
            &self.calls.to_string(),
            &time(self.tool_ms),
            title,
        ]);
    }
}

/// Prints the tokens, the cost and the times of agents and of their sub-agents.
pub async fn cost(agents: &Agents, args: &AgentsArg, format: Format) -> Result<u8, Failure> {
    let all = agents.list()?;
    let mut chosen: Vec<AgentRecord> = if args.agents.is_empty() {
        all.clone()
    } else {
        args.agents.iter().map(|name| agents.find(name)).collect::<Result<_, _>>()?
    };
    let mut index = 0;
    while index < chosen.len() {
        let id = chosen[index].spec.id.clone();
        let is_new = |record: &&AgentRecord| {
            parent_of(record) == Some(&id) && !chosen.iter().any(|other| other.spec.id == record.spec.id)
        };
        let children: Vec<AgentRecord> = all.iter().filter(is_new).cloned().collect();
        chosen.splice(index + 1..index + 1, children);
        index += 1;
    }
    let mut table = Table::new(&[
        "AGENT",
        "ANSWERS",
        "INPUT",
        "CACHED",
        "OUTPUT",
        "COST",
        "MODEL TIME",
        "CALLS",
        "TOOL TIME",
        "TASK",
    ]);
    let mut sum = AgentCost { is_script: true, ..AgentCost::default() };
    for record in &chosen {
        let chain = ChainId::Agent(record.spec.id.clone());
        let events = agents.effective_events(record)?;
        let mut own = AgentCost::of(events.iter().filter(|event| event.chain == chain));
        own.is_script = own.unpriced_answers > 0 && record.spec.model.starts_with("script:");
        if format == Format::Json {
            let mut object = serde_json::to_value(&own).unwrap_or_default();
            object["agent"] = json!(record.spec.id);
            object["parent"] = json!(parent_of(record));
            output::json(&object)?;
        }
        let title = if record.spec.parent.is_some() {
            format!("└ {}", record.spec.title)
        } else {
            record.spec.title.clone()
        };
        own.row(&mut table, record.spec.id.as_str(), &shorten(&title, TITLE_LEN));
        sum.add(&own);
    }
    if format == Format::Text {
        if chosen.len() > 1 {
            sum.row(&mut table, "all", "");
        }
        output::data(table.render("").as_bytes())?;
    }
    Ok(0)
}

fn parent_of(record: &AgentRecord) -> Option<&AgentId> {
    record.spec.parent.as_ref().map(|parent| &parent.agent)
}

/// Removes agents, their sub-agents and their checkpoints; on request their Bodies, too.
pub async fn remove(agents: &Agents, args: &AgentRemoveArgs, format: Format) -> Result<u8, Failure> {
    let body = if args.body { RemovedBody::Removed } else { RemovedBody::Kept };
    let mut last = None;
    for name in &args.agents {
        let removed = match agents.find(name) {
            Ok(record) => {
                let work = agents.remove_whole(&record.spec.id, body);
                progress::watch("removing", work).await.map(|()| record.spec.id)
            }
            Err(failure) => Err(failure),
        };
        let printed = removed.and_then(|id| match format {
            Format::Text => output::line(&id),
            Format::Json => output::json(&json!({ "agent": id })),
        });
        if let Err(failure) = printed
            && let Some(before) = last.replace(failure)
        {
            failure::report(&before, format);
        }
    }
    last.map_or(Ok(0), Err)
}
