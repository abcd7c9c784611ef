//! The commands, one file for each group.

mod agent;
mod choose;
mod completions;
mod copy;
mod create;
mod doctor;
mod events;
mod exec;
mod gc;
mod homes;
mod inspect;
mod keys;
mod life;
mod limit;
mod list;
mod logs;
mod net;
mod port;
mod ps;
mod run;
mod secret;
mod serve;
mod snapshot;
mod store;
mod templates;
mod work;

use std::mem::ManuallyDrop;

use fleet::{Fleet, FleetConfig};
use proto::{Failure, Kind};
use tokio::runtime::{Builder, Runtime};

use crate::{
    args::{AgentCommand, Cli, CliCommand},
    output::Format,
    session::StdioMode,
    settings,
};

/// Runs the command; returns the exit code.
pub fn dispatch(cli: Cli) -> Result<u8, Failure> {
    if let CliCommand::Completions(args) = &cli.command {
        return completions::completions(args, cli.common.format());
    }
    if let CliCommand::Serve(args) = &cli.command {
        return serve::serve(args, settings::config(&cli.common)?, cli.common.format());
    }
    // The runtime is never dropped, because nothing waits for its tasks. The fleet is dropped: that keeps the
    // log's write-ahead file short.
    let runtime = ManuallyDrop::new(runtime()?);
    let config = || settings::config(&cli.common);
    runtime.block_on(act(config, cli.command, cli.common.format()))
}

/// Runs a command. Everything that can be checked without a fleet is checked first, so that a typing error
/// creates no data directory.
async fn act(
    config: impl Fn() -> Result<FleetConfig, Failure>,
    command: CliCommand,
    format: Format,
) -> Result<u8, Failure> {
    let attentive = |fleet: Fleet| {
        fleet.microvms().on_notice(crate::output::talk);
        with_env(fleet)
    };
    let fleet = || Fleet::open(config()?).map(attentive);
    let to_create = || Fleet::open_to_create(config()?).map(attentive);
    match command {
        CliCommand::Run(args) => {
            let wire = StdioMode::choose(args.wires, format)?;
            // The fleet is not dropped: the log was checkpointed while the Body ended, and the kernel closes
            // the files.
            let fleet = ManuallyDrop::new(to_create()?);
            return run::run(&fleet, *args, wire, format).await;
        }
        CliCommand::Up(args) => return work::up(&to_create()?, *args, format).await,
        CliCommand::Prepare(args) => return work::prepare(&fleet()?, &args, format).await,
        CliCommand::Agent(args) => {
            let fleet = if matches!(args.command, AgentCommand::Run(_)) { to_create()? } else { fleet()? };
            return agent::agent(fleet, config()?.durability, args.command, format).await;
        }
        CliCommand::Exec(args) => {
            let wire = StdioMode::choose(args.wires, format)?;
            return exec::exec(&fleet()?, args, wire, format).await;
        }
        CliCommand::Shell(args) => {
            let wire = StdioMode::shell(format)?;
            return exec::shell(&fleet()?, args, wire, format).await;
        }
        CliCommand::Create(args) => create::create(&to_create()?, *args, format).await,
        CliCommand::Ls => list::list(&fleet()?, format),
        CliCommand::Inspect(args) => inspect::inspect(&fleet()?, args.body.as_deref(), format),
        CliCommand::Limit(args) => limit::limit(&fleet()?, &args, format).await,
        CliCommand::Net(args) => return net::net(&fleet()?, args.command, format),
        CliCommand::Port(args) => port::port(fleet()?, args.command, format).await,
        CliCommand::Secret(args) => secret::secret(&fleet()?, args.command, format),
        CliCommand::Ps(args) => ps::ps(&fleet()?, args.body.as_deref(), format).await,
        CliCommand::Logs(args) => logs::logs(&fleet()?, &args, format),
        CliCommand::Diff(args) => work::diff(&fleet()?, &args, format),
        CliCommand::Log(args) => work::log(&fleet()?, &args, format).await,
        CliCommand::Compare(args) => work::compare(&fleet()?, &args, format).await,
        CliCommand::Df => store::df(&fleet()?, format),
        CliCommand::Config(args) => store::config(&fleet()?, &args.command, format),
        CliCommand::Land(args) => work::land(&fleet()?, args, format).await,
        CliCommand::Sync(args) => work::sync(&fleet()?, &args, format).await,
        CliCommand::Save(args) => work::save(&fleet()?, &args.bodies, format).await,
        CliCommand::Cp(args) => {
            let way = copy::parse_direction(&args)?;
            let git = copy::check_git(&args, &way, format)?;
            return copy::copy(&fleet()?, way, git, format).await;
        }
        CliCommand::Start(args) => life::start(&fleet()?, &args.bodies, format).await,
        CliCommand::Stop(args) => life::stop(&fleet()?, &args.of.bodies, args.grace, format).await,
        CliCommand::Pause(args) => life::pause(&fleet()?, &args, format).await,
        CliCommand::Suspend(args) => life::suspend(&fleet()?, &args.bodies, format).await,
        CliCommand::Resume(args) => life::resume(&fleet()?, &args.bodies, format).await,
        CliCommand::Rm(args) => life::remove(&fleet()?, &args, format).await,
        CliCommand::Snapshot(args) => snapshot::snapshot(&fleet()?, args, format).await,
        CliCommand::Snapshots(args) => snapshot::list_or_remove(&fleet()?, &args.remove, format),
        CliCommand::Home(args) => homes::home(&fleet()?, args, format),
        CliCommand::Homes(args) => homes::list_or_remove(&fleet()?, &args.remove, format),
        CliCommand::Fork(args) => snapshot::fork(&fleet()?, &args, format).await,
        CliCommand::Template(args) => templates::template(&fleet()?, args, format).await,
        CliCommand::Setup(args) => templates::setup(&fleet()?, &args, format),
        CliCommand::Events(args) => events::events(&fleet()?, args, format).await,
        CliCommand::Keys(args) => keys::keys(&fleet()?, &args.command, format),
        CliCommand::Doctor => doctor::doctor(&fleet()?, format).await,
        CliCommand::Gc(args) => gc::gc(&fleet()?, args.dry_run, format).await,
        CliCommand::Completions(_) | CliCommand::Serve(_) => Ok(()),
    }
    .map(|()| 0)
}

/// A fleet whose new Bodies get the locale of the user, and whose secrets may come from the user's environment.
fn with_env(mut fleet: Fleet) -> Fleet {
    fleet.env = settings::body_env();
    fleet.host_variables = |name| std::env::var_os(name);
    fleet
}

/// The runtime of the process, without threads of its own.
pub fn runtime() -> Result<Runtime, Failure> {
    let built = Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Failure::new(Kind::Host, "cannot start the async runtime").because(error))
}
