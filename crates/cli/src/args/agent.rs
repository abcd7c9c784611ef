//! The options of `pal agent`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use proto::event_data::{AgentBudget, ApprovalMode};

use super::{RepoArgs, values};

/// Run agents: a Brain that plans and works in a Body, and asks where it must.
///
/// An agent acts only in its Body. Everything that it does is in the log; it survives crashes, and can be forked and
/// rewound together with its Body.
///
/// Example: pal agent run "the login test fails on empty passwords; fix it"
#[derive(Debug, clap::Args)]
pub struct AgentArgs {
    /// The command.
    #[command(subcommand)]
    pub command: AgentCommand,
}

/// The commands of `pal agent`.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    Run(Box<AgentRunArgs>),
    #[command(visible_alias = "list")]
    Ls(AgentListArgs),
    Show(AgentShowArgs),
    /// Watch an agent work. Ctrl-C interrupts it, twice stops watching, too; `d` leaves it at work.
    ///
    /// Example: pal agent attach k3v9
    Attach(AgentArg),
    Send(AgentSendArgs),
    Approve(AgentApproveArgs),
    Deny(AgentDenyArgs),
    Answer(AgentAnswerArgs),
    /// Interrupt what an agent does; a message or `resume` lets it go on.
    ///
    /// Example: pal agent interrupt k3v9
    Interrupt(AgentArg),
    /// Interrupt an agent, and end the processes that it started in the background.
    ///
    /// Example: pal agent stop k3v9
    Stop(AgentArg),
    Resume(AgentResumeArgs),
    Fork(AgentForkArgs),
    Rewind(AgentRewindArgs),
    /// Run the recorded calls of an agent again in a fresh Body; print the results that differ.
    ///
    /// Example: pal agent replay k3v9
    Replay(AgentArg),
    Export(AgentExportArgs),
    /// Print the tokens, the cost and the times of agents.
    ///
    /// Example: pal agent cost k3v9
    Cost(AgentsArg),
    Rm(AgentRemoveArgs),
    /// Drive an agent in this process, without a terminal.
    #[command(hide = true)]
    Drive(AgentArg),
}

/// List the agents.
///
/// Example: pal agent ls
#[derive(Debug, clap::Args)]
pub struct AgentListArgs {
    /// Include sub-agents
    #[arg(long)]
    pub all: bool,
}

/// An agent.
#[derive(Debug, clap::Args)]
pub struct AgentArg {
    /// The agent, by its id or the beginning of it; the newest one if left out
    pub agent: Option<String>,
}

/// Some agents.
#[derive(Debug, clap::Args)]
pub struct AgentsArg {
    /// The agents, by their ids; all if left out
    pub agents: Vec<String>,
}

/// Make a Body with the repository of the current directory, and let an agent work in it.
///
/// The terminal shows what happens, and asks for approvals. Ctrl-C interrupts the agent, twice stops watching, too; `d`
/// leaves it at work. The exit code is 0 if the agent has finished, and 3 if it waits for you.
///
/// Example: pal agent run --model anthropic:claude-sonnet-4-5 "fix the failing test"
#[derive(Debug, clap::Args)]
pub struct AgentRunArgs {
    /// The task; `-` reads it from standard input
    #[arg(value_name = "TASK")]
    pub task: String,
    /// The model: an alias of models.toml, anthropic:NAME, openai:NAME, openai-responses:NAME, NAME@URL or script:FILE
    /// [env: PAL_MODEL] [default: the alias `default`]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Work in this Body instead of a new one
    #[arg(long = "body", value_name = "BODY", conflicts_with_all = ["repo", "reference", "uncommitted", "committed", "include", "count", "home", "net", "allow", "deny"])]
    pub in_body: Option<String>,
    /// Work in a new Body without a repository
    #[arg(long, conflicts_with_all = ["in_body", "repo"])]
    pub no_repo: bool,
    /// The role of the agent, by the name of its file
    #[arg(long, value_name = "ROLE")]
    pub role: Option<String>,
    /// The plan that the agent follows, by the name of its file
    #[arg(long, value_name = "PLAN")]
    pub plan: Option<String>,
    /// A directory with skills; may be repeated
    #[arg(long, value_name = "DIR")]
    pub skills: Vec<PathBuf>,
    /// When to ask for approval: plan (only read), ask (before each change), auto (before effects outside of the Body)
    /// or never (refuse those)
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = approval_mode)]
    pub approve: ApprovalMode,
    /// Pause at this cost in dollars
    #[arg(long, value_name = "DOLLARS", value_parser = microdollars)]
    pub budget: Option<u64>,
    /// Pause after this many answers of the model
    #[arg(long, value_name = "COUNT")]
    pub max_turns: Option<u64>,
    /// Pause after this many tokens
    #[arg(long, value_name = "COUNT")]
    pub max_tokens: Option<u64>,
    /// Take checkpoints at most once in this time; `0s` takes one after each turn that changed something [default: as
    /// often as they take 5 % of the time]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub checkpoint_every: Option<Duration>,
    /// Print the agent's id, and do not wait for it
    #[arg(long, short = 'd')]
    pub detach: bool,
    /// The repositories and the Body.
    #[command(flatten)]
    pub work: RepoArgs,
}

impl AgentRunArgs {
    /// The limits of the agent. `--timeout` is the agent's, not the Body's.
    pub fn agent_budget(&self) -> AgentBudget {
        let wall = self.work.body.timeout;
        AgentBudget {
            turns: self.max_turns,
            tokens: self.max_tokens,
            cost_microdollars: self.budget,
            wall_ms: wall.map(|wall| u64::try_from(wall.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// Show what an agent does, waits for and has cost.
///
/// Example: pal agent show k3v9
#[derive(Debug, clap::Args)]
pub struct AgentShowArgs {
    /// The agent.
    #[command(flatten)]
    pub of: AgentArg,
    /// Print the whole conversation
    #[arg(long)]
    pub log: bool,
}

/// Give an agent another message; it goes on with it.
///
/// Example: pal agent send k3v9 "also cover the empty user name"
#[derive(Debug, clap::Args)]
pub struct AgentSendArgs {
    /// The agent, by its id
    pub agent: String,
    /// The message; `-` reads it from standard input
    #[arg(value_name = "MESSAGE")]
    pub message: String,
    /// Do not watch the agent
    #[arg(long, short = 'd')]
    pub detach: bool,
}

/// Approve the calls that an agent asks for.
///
/// Example: pal agent approve k3v9
#[derive(Debug, clap::Args)]
pub struct AgentApproveArgs {
    /// The agent.
    #[command(flatten)]
    pub of: AgentArg,
    /// The call, by its id; all that wait if left out
    #[arg(long, value_name = "CALL")]
    pub call: Option<String>,
    /// Approve calls of the same kind from now on, too: for this `agent`, or as a `rule` for all agents
    #[arg(long, value_name = "SCOPE", value_parser = ["agent", "rule"])]
    pub always: Option<String>,
    /// Carry the call out with these arguments instead, as a JSON object
    #[arg(long, value_name = "JSON", requires = "call")]
    pub edit: Option<String>,
}

/// Deny the calls that an agent asks for.
///
/// Example: pal agent deny k3v9 "do not push; I will"
#[derive(Debug, clap::Args)]
pub struct AgentDenyArgs {
    /// The agent, by its id
    pub agent: String,
    /// The reason, for the agent
    #[arg(value_name = "REASON")]
    pub reason: Option<String>,
    /// The call, by its id; all that wait if left out
    #[arg(long, value_name = "CALL")]
    pub call: Option<String>,
    /// Give this text to the agent as the result of the call
    #[arg(long, value_name = "TEXT", conflicts_with = "reason")]
    pub instead: Option<String>,
}

/// Answer a question of an agent.
///
/// Example: pal agent answer k3v9 "use the second one"
#[derive(Debug, clap::Args)]
pub struct AgentAnswerArgs {
    /// The agent, by its id
    pub agent: String,
    /// The answer
    #[arg(value_name = "ANSWER")]
    pub answer: String,
}

/// Let an agent go on that was interrupted, ran out of its budget or lost its driver.
///
/// Example: pal agent resume k3v9 --budget 5
#[derive(Debug, clap::Args)]
pub struct AgentResumeArgs {
    /// The agent.
    #[command(flatten)]
    pub of: AgentArg,
    /// Raise the cost at which it pauses to this many dollars
    #[arg(long, value_name = "DOLLARS", value_parser = microdollars)]
    pub budget: Option<u64>,
    /// Raise the number of answers after which it pauses
    #[arg(long, value_name = "COUNT")]
    pub max_turns: Option<u64>,
    /// Raise the number of tokens after which it pauses
    #[arg(long, value_name = "COUNT")]
    pub max_tokens: Option<u64>,
    /// Raise the time after which it pauses
    #[arg(long, value_name = "DURATION", value_parser = values::timeout)]
    pub timeout: Option<Duration>,
    /// Do not watch the agent
    #[arg(long, short = 'd')]
    pub detach: bool,
}

/// Copy an agent together with its Body; each copy goes on by itself.
///
/// Example: pal agent fork k3v9 --at 4 -n 3 "try it without the cache"
#[derive(Debug, clap::Args)]
pub struct AgentForkArgs {
    /// The agent, by its id
    pub agent: String,
    /// The message for the copies
    #[arg(value_name = "MESSAGE")]
    pub message: Option<String>,
    /// Begin at the checkpoint of this turn
    #[arg(long, value_name = "TURN")]
    pub at: Option<u64>,
    /// Make this many copies
    #[arg(long, short = 'n', value_name = "COUNT", default_value = "1", value_parser = values::forks)]
    pub count: u32,
}

/// Take an agent back to a checkpoint, together with its Body. The Body before stays.
///
/// Example: pal agent rewind k3v9 --to 4
#[derive(Debug, clap::Args)]
pub struct AgentRewindArgs {
    /// The agent, by its id
    pub agent: String,
    /// The turn of the checkpoint
    #[arg(long, value_name = "TURN", alias = "at")]
    pub to: u64,
}

/// Print the conversation of an agent.
///
/// Example: pal agent export k3v9 --as markdown > k3v9.md
#[derive(Debug, clap::Args)]
pub struct AgentExportArgs {
    /// The agent.
    #[command(flatten)]
    pub of: AgentArg,
    /// The format: events (JSON lines, with their content) or markdown
    #[arg(long = "as", value_name = "FORMAT", default_value = "events", value_parser = ["events", "markdown"])]
    pub format: String,
}

/// Remove agents from the list. Their events stay in the log.
///
/// Example: pal agent rm k3v9 --body
#[derive(Debug, clap::Args)]
pub struct AgentRemoveArgs {
    /// The agents, by their ids
    #[arg(required = true)]
    pub agents: Vec<String>,
    /// Remove their Bodies, too; unlanded work is saved first
    #[arg(long)]
    pub body: bool,
}

fn approval_mode(text: &str) -> Result<ApprovalMode, String> {
    match text {
        "plan" => Ok(ApprovalMode::Plan),
        "ask" => Ok(ApprovalMode::Ask),
        "auto" => Ok(ApprovalMode::Auto),
        "never" => Ok(ApprovalMode::Never),
        _ => Err("the modes are plan, ask, auto and never".into()),
    }
}

/// An amount such as `0.50` or `$2`, in millionths of a dollar.
fn microdollars(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text} is not an amount of dollars; write one such as 0.50");
    let plain = text.strip_prefix('$').unwrap_or(text);
    let (whole, part) = plain.split_once('.').unwrap_or((plain, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || part.len() > 6 || !is_number(whole) || !is_number(part) {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    let part: u64 = format!("{part:0<6}").parse().map_err(|_| wrong())?;
    whole.checked_mul(1_000_000).and_then(|whole| whole.checked_add(part)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::microdollars;

    #[test]
    fn amounts_are_exact() {
        assert_eq!(microdollars("0.50"), Ok(500_000));
        assert_eq!(microdollars("$2"), Ok(2_000_000));
        assert_eq!(microdollars("1.000001"), Ok(1_000_001));
        for wrong in ["", "-1", "1e9", "0.0000001", "99999999999999999999", ".5", "1.x"] {
            assert!(microdollars(wrong).is_err(), "{wrong}");
        }
    }
}
