//! `pal agent run`, `fork`, `rewind` and `replay`.

use std::{io::Read, ops::ControlFlow, path::Path};

use brain::model::ModelAddress;
use bridge::{AgentRecord, AgentSettings, Agents, catalog, check_message};
use proto::{BodyId, Failure, Kind, event_data::AgentSpec, spec::Life};

use super::{
    attach::{self, WatchFrom},
    config_dir, driver, find, group, host,
};
use crate::{
    args::{AgentArg, AgentForkArgs, AgentRewindArgs, AgentRunArgs},
    commands::{create, work::create_bodies},
    output::{self, Format},
    progress,
    settings::absolute,
};

/// The longest task that is read from standard input.
const TASK_LEN_MAX: u64 = 1 << 20;
/// The longest title of an agent, in characters.
const TITLE_LEN_MAX: usize = 72;

/// Makes Bodies, creates agents in them and watches them.
pub async fn run(agents: &Agents, args: AgentRunArgs, format: Format) -> Result<u8, Failure> {
    let task = text_of(&args.task)?;
    check_message(&task)?;
    let model = model(args.model.as_deref())?;
    let mut settings = AgentSettings::default();
    if let Some(every) = args.checkpoint_every {
        settings.checkpoint_every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX).max(1);
    }
    settings.skills = args.skills.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?;
    let host = host(agents)?;
    host.check_names(args.role.as_deref(), args.plan.as_deref())?;
    let bodies = match bodies(agents, &args, format).await? {
        ControlFlow::Continue(bodies) => bodies,
        ControlFlow::Break(code) => return Ok(code),
    };
    let group = (bodies.len() > 1).then(Agents::new_id).transpose()?.map(|id| id.to_string());
    let mut records: Vec<AgentRecord> = Vec::new();
    for (body, workdir) in &bodies {
        let spec = AgentSpec {
            id: Agents::new_id()?,
            model: model.clone(),
            title: task.lines().next().unwrap_or_default().chars().take(TITLE_LEN_MAX).collect(),
            role: args.role.clone(),
            plan: args.plan.clone(),
            mode: args.approve.clone(),
            budget: args.agent_budget(),
            parent: None,
            workdir: workdir.clone(),
            repository: None,
            group: group.clone(),
            settings: serde_json::to_value(&settings).unwrap_or_default(),
        };
        let record = agents.create(spec, None, body, Some(task.clone()))?;
        driver::wake(agents, &record.spec.id)?;
        records.push(record);
    }
    if let ([record], false) = (&records[..], args.detach) {
        return attach::attach(agents, &record.spec.id, WatchFrom::Start, format).await;
    }
    if args.detach {
        print_created(&records, &bodies.iter().map(|(body, _)| body.clone()).collect::<Vec<_>>(), format)?;
        return Ok(0);
    }
    group::wait_for_all(agents, &records, format).await
}

fn print_created(records: &[AgentRecord], bodies: &[BodyId], format: Format) -> Result<(), Failure> {
    for (record, body) in records.iter().zip(bodies) {
        match format {
            Format::Json => output::json(&serde_json::json!({ "agent": record.spec.id, "body": body }))?,
            Format::Text => output::line(format!("{}  Body {body}", record.spec.id))?,
        }
    }
    Ok(())
}

/// The Bodies in which the agents work, and the directories in them.
async fn bodies(
    agents: &Agents,
    args: &AgentRunArgs,
    format: Format,
) -> Result<ControlFlow<u8, Vec<(BodyId, Option<String>)>>, Failure> {
    let fleet = agents.fleet();
    if let Some(name) = &args.in_body {
        let view = fleet.find(name)?;
        return Ok(ControlFlow::Continue(vec![(view.id().clone(), view.spec.workdir.clone())]));
    }
    let mut body = args.work.body.clone();
    // `--timeout` limits the agent; the Body stays for the person who looks at the work.
    body.timeout = None;
    if args.no_repo {
        let network = body.network();
        let mut request = body.request(Life::Kept, None)?;
        request.egress = create::network(fleet, &network, format)?;
        let view = fleet.create(request).await?;
        return Ok(ControlFlow::Continue(vec![(view.id().clone(), view.spec.workdir.clone())]));
    }
    Ok(match create_bodies(fleet, &args.work, body, format).await? {
        ControlFlow::Continue(views) => ControlFlow::Continue(
            views.iter().map(|view| (view.id().clone(), view.spec.workdir.clone())).collect(),
        ),
        ControlFlow::Break(code) => ControlFlow::Break(code),
    })
}

/// The model that the person named, in the environment or in models.toml; a script by its absolute path.
fn model(named: Option<&str>) -> Result<String, Failure> {
    let catalog = catalog(&config_dir()?)?;
    let chosen = named.map(str::to_owned).or_else(|| std::env::var("PAL_MODEL").ok());
    let text = match chosen.filter(|text| !text.is_empty()) {
        Some(text) => text,
        None if catalog.aliases.contains_key("default") => "default".to_owned(),
        None => {
            return Err(Failure::new(Kind::Usage, "no model is named")
                .hint("name one: --model anthropic:NAME, --model NAME@http://127.0.0.1:11434, or export PAL_MODEL=…")
                .hint("without a key: --model script:FILE plays a recorded model; see docs/guides/agent.md"));
        }
    };
    let address = catalog
        .resolve(&text)
        .map_err(|error| Failure::new(Kind::Usage, error.to_string()).hint("see docs/reference/models.md"))?;
    Ok(match address {
        ModelAddress::Script { file } => format!("script:{}", absolute(Path::new(&file))?.display()),
        ModelAddress::Http { .. } => text,
    })
}

/// A text, or standard input for `-`.
pub fn text_of(text: &str) -> Result<String, Failure> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut read = String::new();
    std::io::stdin().take(TASK_LEN_MAX).read_to_string(&mut read).map_err(|error| {
        Failure::new(Kind::Usage, "cannot read the text from standard input").because(error)
    })?;
    Ok(read)
}

/// Copies an agent and its Body.
pub async fn fork(agents: &Agents, args: AgentForkArgs, format: Format) -> Result<u8, Failure> {
    let id = agents.find(&args.agent)?.spec.id;
    let forks = agents.fork(&id, args.at, args.count, args.message.clone());
    let forks = progress::watch("forking the agent and its Body", forks).await?;
    let mut bodies = Vec::new();
    for record in &forks {
        let view = agents.load(&record.spec.id).await?.view;
        bodies.extend(view.body);
        if args.message.is_some() {
            driver::wake(agents, &record.spec.id)?;
        }
    }
    print_created(&forks, &bodies, format)?;
    if args.message.is_none() && format == Format::Text {
        output::talk("  hint: the copies wait: pal agent send AGENT \"…\", or pal agent resume AGENT");
    }
    Ok(0)
}

/// Takes an agent back to a checkpoint.
pub async fn rewind(agents: &Agents, args: &AgentRewindArgs, format: Format) -> Result<u8, Failure> {
    let id = agents.find(&args.agent)?.spec.id;
    let before = agents.load(&id).await?.view.body;
    let body = progress::watch("taking the agent back", agents.rewind(&id, args.to)).await?;
    match format {
        Format::Json => output::json(&serde_json::json!({ "agent": id, "turn": args.to, "body": body }))?,
        Format::Text => {
            output::line(format!("agent {id} is at turn {}, in Body {body}", args.to))?;
            if let Some(before) = before {
                output::talk(&format!(
                    "  hint: Body {before} has what came after; remove it: pal rm {before}"
                ));
            }
            output::talk(&format!("  hint: go on: pal agent resume {id}, or pal agent send {id} \"…\""));
        }
    }
    Ok(0)
}

/// Runs the recorded calls again in a fresh Body.
pub async fn replay(agents: &Agents, args: &AgentArg, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.agent.as_deref())?.spec.id;
    let host = host(agents)?;
    let report = progress::watch("running the recorded calls again", host.replay(&id)).await?;
    match format {
        Format::Json => output::json(&report)?,
        Format::Text => {
            for difference in &report.differences {
                output::line(format!("turn {}  {}", difference.turn, difference.tool))?;
                output::line(format!("  recorded: {}", one_line(&difference.recorded)))?;
                output::line(format!("  replayed: {}", one_line(&difference.replayed)))?;
            }
            output::line(format!(
                "{} calls ran again: {} the same, {} different, {} not repeated",
                report.same + report.differences.len(),
                report.same,
                report.differences.len(),
                report.skipped
            ))?;
        }
    }
    Ok(u8::from(!report.differences.is_empty()))
}

fn one_line(text: &str) -> String {
    let line: String = text.lines().next().unwrap_or_default().chars().take(120).collect();
    proto::text::visible(&line).to_string()
}
