//! The arguments of `pal`. The doc comments are the help texts.

mod agent;
mod body;
mod exec;
mod network;
mod port;
mod secret;
mod serve;
mod templates;
pub mod values;
mod verbs;
mod work;

use std::{ffi::OsString, os::unix::ffi::OsStrExt};

use clap::{Parser, Subcommand};
use fleet::Durability;

pub use agent::{
    AgentAnswerArgs, AgentApproveArgs, AgentArg, AgentArgs, AgentCommand, AgentDenyArgs, AgentExportArgs,
    AgentForkArgs, AgentListArgs, AgentRemoveArgs, AgentResumeArgs, AgentRewindArgs, AgentRunArgs,
    AgentSendArgs, AgentShowArgs, AgentsArg,
};
pub use body::BodyArgs;
pub use exec::{ExecArgs, RunArgs, ShellArgs, StdioArgs};
pub use network::{CeilingArgs, NetArgs, NetCommand, NetWatchArgs, NetworkArgs};
pub use port::{PortArgs, PortCommand, PortForwardArgs, PortPair};
pub use secret::{SecretArgs, SecretCommand, SecretSetArgs};
pub use serve::{KeysArgs, KeysCommand, NewKeyArgs, ServeArgs};
pub use templates::{ImportArgs, PullArgs, SetupArgs, TemplateArgs, TemplateCommand};
pub use verbs::{
    BodiesArg, BodyArg, CompletionsArgs, CopyArgs, EventsArgs, EventsCommand, ForkArgs, GcArgs, HomeArgs,
    HomeCommand, HomesArgs, LimitArgs, LogsArgs, PauseArgs, RemoveArgs, SnapshotArgs, SnapshotCommand,
    SnapshotsArgs, StopArgs,
};
pub use work::{
    CompareArgs, ConfigArgs, ConfigCommand, DiffArgs, LandArgs, LogArgs, PrepareArgs, RepoArgs, SyncArgs,
    UpArgs,
};

use crate::output::Format;

/// Give every AI agent a computer of its own, on yours.
///
/// A Body is a sandbox: files, processes, a network view and limits of its own.
/// Results go to standard output, messages to standard error.
///
/// Exit codes: `run` and `exec` exit with the command's own code, 126 and 127 as in a shell. Failures of
/// `pal` itself: 2 usage, 120 internal, 121 not found, 122 conflict, 123 denied, 124 limit, 125 host.
///
/// Example: pal run -- uname -a
#[derive(Debug, Parser)]
#[command(name = "pal", version, disable_help_subcommand = true)]
pub struct Cli {
    /// The options of every command.
    #[command(flatten)]
    pub common: GlobalArgs,
    /// The command.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The options of every command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Keep Bodies, snapshots and events in this directory [env: PAL_DATA]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Keep every acknowledged event through the loss of this: power or process [env: PAL_DURABILITY]
    /// [default: process]
    #[arg(long, global = true, value_name = "LOSS", value_parser = values::durability)]
    pub durability: Option<Durability>,
}

/// A parser for a single command. Building the parser of all commands takes longer than the kernel needs for
/// a namespace.
#[derive(Debug, Parser)]
struct SingleVerb<Verb: clap::Args> {
    #[command(flatten)]
    common: GlobalArgs,
    #[command(flatten)]
    verb: Verb,
}

impl Cli {
    /// Parses the arguments. The commands that must be fast are tried alone first; on an error, or for help,
    /// the parser of all commands answers.
    pub fn read(argv: &[OsString]) -> Result<Self, clap::Error> {
        let alone = verb_at(argv.iter().skip(1).map(|argument| argument.as_bytes())).and_then(|at| {
            // Puts the command in the place of the program name, and moves options in front of it behind it.
            let (before, rest) = argv[1..].split_at(at);
            let words = || rest[..1].iter().chain(before).chain(&rest[1..]);
            match rest[0].to_str()? {
                "run" => SingleVerb::try_parse_from(words())
                    .map(|SingleVerb { common, verb }| (common, CliCommand::Run(verb)))
                    .ok(),
                "exec" => exec_alone(rest, before)
                    .or_else(|| SingleVerb::try_parse_from(words()).ok())
                    .map(|SingleVerb { common, verb }| (common, CliCommand::Exec(verb))),
                _ => None,
            }
        });
        match alone {
            Some((common, command)) => Ok(Cli { common, command }),
            None => Cli::try_parse_from(argv),
        }
    }
}

/// The key of an `exec` that names no Body: the only Body of the current repository is meant.
pub const ONLY_BODY: &str = ".";

/// Parses an `exec` that names no Body in front of its `--`; none if it names one, or is wrong.
fn exec_alone(words: &[OsString], before: &[OsString]) -> Option<SingleVerb<ExecArgs>> {
    let end = words.iter().position(|word| word == "--")?;
    let is_option = |word: &OsString| word.as_bytes().starts_with(b"-");
    // A word that follows no option can only be the Body; one that follows an option may be its value.
    if words[..end].windows(2).any(|pair| !is_option(&pair[0]) && !is_option(&pair[1])) {
        return None;
    }
    let only = OsString::from(ONLY_BODY);
    let (options, command) = words.split_at(end);
    let words = options[..1].iter().chain(before).chain(&options[1..]).chain([&only]).chain(command);
    SingleVerb::try_parse_from(words)
        .ok()
        .filter(|parsed: &SingleVerb<ExecArgs>| parsed.verb.body == ONLY_BODY)
}

/// The position of the first argument that is neither an option nor an option's value.
fn verb_at<'a>(mut arguments: impl Iterator<Item = &'a [u8]>) -> Option<usize> {
    let mut at = 0;
    loop {
        match arguments.next()? {
            b"--data" | b"--durability" => {
                arguments.next()?;
                at += 2;
            }
            [b'-', ..] => at += 1,
            _ => return Some(at),
        }
    }
}

impl GlobalArgs {
    /// The output format.
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    Up(Box<UpArgs>),
    Prepare(PrepareArgs),
    Run(Box<RunArgs>),
    Create(Box<BodyArgs>),
    Exec(ExecArgs),
    Shell(ShellArgs),
    /// List the Bodies, those of the current repository first.
    ///
    /// WORK says what is known of the work in its repositories: `unlanded`, `landed`, or `changed` for files that
    /// changed since the last save and may be build products. LIMITS has those that differ from the usual ones.
    ///
    /// Example: pal ls
    #[command(visible_alias = "list")]
    Ls,
    /// Show everything about a Body, with its enforcement record.
    ///
    /// Example: pal inspect k3v9
    Inspect(BodyArg),
    /// List the processes in a Body.
    ///
    /// Example: pal ps k3v9
    Ps(BodyArg),
    Limit(LimitArgs),
    Net(NetArgs),
    Port(PortArgs),
    Secret(SecretArgs),
    Logs(LogsArgs),
    Diff(DiffArgs),
    Log(LogArgs),
    Compare(CompareArgs),
    Land(LandArgs),
    Sync(SyncArgs),
    /// Save the work of Bodies to their repositories; print the commits that hold it.
    ///
    /// All tracked and untracked files go to refs/palisade/BODY/wip. `pal stop` and `pal rm` save the work,
    /// too.
    ///
    /// Example: pal save k3v9
    #[command(alias = "wip")]
    Save(BodiesArg),
    Cp(CopyArgs),
    /// Start Bodies that are stopped, dead or interrupted.
    ///
    /// Example: pal start k3v9
    Start(BodiesArg),
    Stop(StopArgs),
    Pause(PauseArgs),
    /// Write the memory of microVMs to disk and end their hypervisors; `pal resume` continues them.
    ///
    /// Example: pal suspend k3v9
    Suspend(BodiesArg),
    /// Resume the processes of paused or suspended Bodies.
    ///
    /// Example: pal resume k3v9
    Resume(BodiesArg),
    #[command(visible_alias = "remove")]
    Rm(RemoveArgs),
    Snapshot(SnapshotArgs),
    #[command(hide = true)]
    Snapshots(SnapshotsArgs),
    Home(HomeArgs),
    #[command(hide = true)]
    Homes(HomesArgs),
    Fork(ForkArgs),
    #[command(alias = "templates")]
    Template(TemplateArgs),
    Setup(SetupArgs),
    Events(EventsArgs),
    /// Check what this host supports, and how to get what is missing.
    ///
    /// Every check is a real attempt.
    ///
    /// Example: pal doctor
    Doctor,
    Gc(GcArgs),
    /// Show how much disk space each part of the data directory takes.
    ///
    /// Example: pal df
    Df,
    Config(ConfigArgs),
    Agent(AgentArgs),
    Serve(ServeArgs),
    Keys(KeysArgs),
    Completions(CompletionsArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn clap_finds_no_fault_with_the_arguments() {
        Cli::command().debug_assert();
    }

    #[test]
    fn earlier_words_mean_what_the_new_ones_mean() {
        for (earlier, now) in [
            ("wip k3v9", "save k3v9"),
            ("up --with-dirty", "up --uncommitted"),
            ("up --clean -n 2", "up --committed -n 2"),
            ("create --cold", "create --boot"),
            ("templates rm x", "template rm x"),
            ("templates", "template"),
        ] {
            let read = |line: &str| {
                let argv: Vec<OsString> =
                    std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
                format!("{:?}", Cli::read(&argv).unwrap())
            };
            assert_eq!(read(earlier), read(now), "{earlier}");
        }
    }

    #[test]
    fn an_exec_without_a_body_means_the_only_one() {
        let read = |line: &str| {
            let argv: Vec<OsString> = std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
            match Cli::read(&argv).unwrap().command {
                CliCommand::Exec(args) => (args.body, args.command.join(" ")),
                other => panic!("{other:?}"),
            }
        };
        for (line, body, command) in [
            ("exec -- ls -l", ".", "ls -l"),
            ("exec -it -- sh", ".", "sh"),
            ("--json exec -u root --timeout 5s -- ls k3v9", ".", "ls k3v9"),
            ("exec -u root -- ls -- x", ".", "ls -- x"),
            ("exec k3v9 -- ls -l", "k3v9", "ls -l"),
            ("exec -i k3v9 -- ls", "k3v9", "ls"),
            ("exec -u root k3v9 -- ls", "k3v9", "ls"),
            ("exec k3v9 -u root -- ls", "k3v9", "ls"),
            ("exec k3v9 ls -- -l", "k3v9", "ls -- -l"),
            ("exec k3v9 ls -l", "k3v9", "ls -l"),
        ] {
            assert_eq!(read(line), (body.to_owned(), command.to_owned()), "{line}");
        }
    }

    #[test]
    fn no_help_shows_an_earlier_word() {
        let help = Cli::command().render_long_help().to_string();
        let of =
            |verb: &str| Cli::command().find_subcommand_mut(verb).unwrap().render_long_help().to_string();
        for (text, word) in [
            (help.clone(), "\n  wip "),
            (help.clone(), "\n  snapshots "),
            (help.clone(), "\n  homes "),
            (help, "\n  templates "),
            (of("pause"), "--swap"),
            (of("up"), "--with-dirty"),
            (of("create"), "--cold"),
            (of("create"), "--share"),
        ] {
            assert!(!text.contains(word), "{word}: {text}");
        }
    }

    #[test]
    fn the_verb_is_found_behind_options() {
        let found = |words: &[&'static str]| verb_at(words.iter().map(|word| word.as_bytes()));
        assert_eq!(found(&["run", "--", "true"]), Some(0));
        assert_eq!(found(&["--data", "run", "--json", "ls"]), Some(3));
        assert_eq!(found(&["--data=run", "--durability", "power", "run"]), Some(3));
        assert_eq!(found(&["--json"]), None);
        assert_eq!(found(&["--data"]), None);
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn a_verb_read_alone_means_the_same() {
        for line in [
            "run -- true",
            "run true --json",
            "run --json --data /d -it -e A=b --memory 1G --mount /a:/b:rw --keep -- sh -c x",
            "exec -i --durability power k3v9 ls -l",
            "exec k3v9 --user root -- --json",
        ] {
            let argv: Vec<OsString> = std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
            let (alone, whole) = (Cli::read(&argv).unwrap(), Cli::try_parse_from(&argv).unwrap());
            assert_eq!(format!("{alone:?}"), format!("{whole:?}"), "{line}");
        }
        for line in ["run", "run --help", "exec", "run --forc x", "run --version"] {
            let argv: Vec<OsString> = std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
            let (alone, whole) = (Cli::read(&argv).unwrap_err(), Cli::try_parse_from(&argv).unwrap_err());
            assert_eq!(alone.to_string(), whole.to_string(), "{line}");
        }
    }
}
