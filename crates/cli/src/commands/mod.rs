//! The verbs, one file for each group.

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
mod list;
mod logs;
mod run;
mod serve;
mod snapshot;
mod store;
mod templates;
mod work;

use std::mem::ManuallyDrop;

use fleet::{Config, Fleet, Launcher};
use proto::{Failure, Kind};
use tokio::runtime::{Builder, Runtime};

use crate::{
    args::{Cli, Command},
    output::Format,
    session::Wire,
    settings,
};

/// Does what was asked; gives the exit code.
pub fn dispatch(cli: Cli, launcher: Option<Launcher>) -> Result<u8, Failure> {
    if let Command::Completions(args) = &cli.command {
        return completions::completions(args);
    }
    if let Command::Serve(args) = &cli.command {
        return serve::serve(args, settings::config(&cli.common)?, cli.common.format());
    }
    // Never dropped: nobody waits for its tasks. The fleet is: it keeps the log's write-ahead file short.
    let runtime = ManuallyDrop::new(runtime()?);
    let config = || settings::config(&cli.common);
    runtime.block_on(act(config, cli.command, launcher, cli.common.format()))
}

/// What a command needs to know before it opens the fleet, it asks before: a typing error leaves no directory behind.
async fn act(
    config: impl Fn() -> Result<Config, Failure>,
    command: Command,
    launcher: Option<Launcher>,
    format: Format,
) -> Result<u8, Failure> {
    let fleet = || Fleet::open(config()?);
    let to_create = || Fleet::open_to_create(config()?, launcher);
    match command {
        Command::Run(args) => {
            let wire = Wire::choose(args.wires, format)?;
            // Not closed piece by piece: the log was tidied while the Body ended, and the kernel closes the rest.
            let fleet = ManuallyDrop::new(to_create()?);
            let code = run::run(&fleet, *args, wire, format).await;
            fleet.settle();
            return code;
        }
        Command::Up(args) => return work::up(&to_create()?, *args, format).await,
        Command::Exec(args) => {
            let wire = Wire::choose(args.wires, format)?;
            return exec::exec(&fleet()?, args, wire, format).await;
        }
        Command::Shell(args) => return exec::shell(&fleet()?, args).await,
        Command::Create(args) => create::create(&to_create()?, *args, format).await,
        Command::Ls => list::list(&fleet()?, format),
        Command::Inspect(args) => inspect::inspect(&fleet()?, &args.body, format),
        Command::Logs(args) => logs::logs(&fleet()?, &args.body, format),
        Command::Diff(args) => work::diff(&fleet()?, &args, format),
        Command::Log(args) => work::log(&fleet()?, &args, format).await,
        Command::Compare(args) => work::compare(&fleet()?, &args, format).await,
        Command::Df => store::df(&fleet()?, format),
        Command::Config(args) => store::config(&fleet()?, &args.command, format),
        Command::Land(args) => work::land(&fleet()?, args, format).await,
        Command::Wip(args) => work::wip(&fleet()?, &args.bodies, format).await,
        Command::Cp(args) => {
            let way = copy::way(&args)?;
            copy::copy(&fleet()?, way, format).await
        }
        Command::Start(args) => life::start(&fleet()?, &args.bodies, format).await,
        Command::Stop(args) => life::stop(&fleet()?, &args.of.bodies, args.grace, format).await,
        Command::Pause(args) => life::pause(&fleet()?, &args, format).await,
        Command::Resume(args) => life::resume(&fleet()?, &args.bodies, format).await,
        Command::Rm(args) => life::remove(&fleet()?, &args, format).await,
        Command::Snapshot(args) => snapshot::snapshot(&fleet()?, args, format).await,
        Command::Snapshots(args) => snapshot::snapshots(&fleet()?, &args.remove, format),
        Command::Homes(args) => homes::homes(&fleet()?, &args.remove, format),
        Command::Fork(args) => snapshot::fork(&fleet()?, &args, format).await,
        Command::Templates(args) => templates::templates(&fleet()?, args, format).await,
        Command::Setup(args) => templates::setup(&fleet()?, &args, format),
        Command::Events(args) => events::events(&fleet()?, args, format).await,
        Command::Keys(args) => keys::keys(&fleet()?, &args.command, format),
        Command::Doctor => doctor::doctor(&fleet()?, format).await,
        Command::Gc(args) => gc::gc(&fleet()?, args.dry_run, format).await,
        Command::Completions(_) | Command::Serve(_) => Ok(()),
    }
    .map(|()| 0)
}

/// The one runtime: no threads of its own.
pub fn runtime() -> Result<Runtime, Failure> {
    let built = Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Failure::new(Kind::Host, "cannot wait for events of the kernel").because(error))
}
