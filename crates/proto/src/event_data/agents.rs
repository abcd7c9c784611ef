//! Structs and words of the events of agents.

use serde_json::Value;

use crate::AgentId;

words! {
    /// The calls for which an agent needs a person's approval.
    ApprovalMode {
        /// The agent only reads; every other call is refused.
        "plan" => Plan,
        /// Every call that changes something needs approval.
        "ask" => Ask,
        /// Calls inside the Body need none; calls that leave it, land, spend or publish do.
        "auto" => Auto,
        /// No person is asked; a call that would need approval is refused.
        "never" => Never,
    }

    /// The sender of a message.
    MessageSource {
        /// A person.
        "user" => User,
        /// The agent that started this one.
        "parent" => Parent,
        /// Palisade itself: a reminder of a middleware or a command hook.
        "palisade" => Palisade,
    }

    /// How an answer of a model ended.
    AnswerEnd {
        /// The model has nothing to add.
        "end_turn" => EndTurn,
        /// The model waits for the results of its tool calls.
        "tool_use" => ToolUse,
        /// The answer reached the largest number of tokens.
        "max_tokens" => MaxTokens,
        /// The conversation filled the model's context window.
        "context_full" => ContextFull,
        /// The model refused to answer.
        "refused" => Refused,
    }

    /// The risk of a tool call.
    CallRisk {
        /// It only computes.
        "pure" => Pure,
        /// It reads files of the Body.
        "read" => Read,
        /// It changes files or runs programs inside the Body.
        "workspace" => Workspace,
        /// It has an effect outside of the Body.
        "outside" => Outside,
        /// It runs code of unknown origin.
        "untrusted" => Untrusted,
    }

    /// The place in which a tool call runs.
    CallVenue {
        /// The agent's own log: nothing runs.
        "agent" => Agent,
        /// The agent's Body.
        "body" => Body,
        /// A fork of the Body that is removed afterwards.
        "fork" => Fork,
        /// A new microVM that is removed afterwards.
        "microvm" => Microvm,
        /// A tool server that the user named.
        "server" => Server,
    }

    /// How a tool call ended.
    CallOutcome {
        /// The tool gave a result.
        "done" => Done,
        /// The tool reported an error.
        "failed" => Failed,
        /// A rule or a person refused the call.
        "denied" => Denied,
        /// A person gave the answer instead of the tool.
        "answered" => Answered,
        /// The call was interrupted.
        "interrupted" => Interrupted,
        /// The driver or the Body ended during the call, and its effect cannot be known.
        "unknown" => Unknown,
    }

    /// How the work of a sub-agent came back.
    MergeOutcome {
        /// There was none.
        "nothing" => Nothing,
        /// Its commits were merged.
        "merged" => Merged,
        /// Its changes were put into the files, without commits: the agent has uncommitted changes itself.
        "applied" => Applied,
        /// It conflicts; nothing was changed.
        "conflict" => Conflict,
        /// It could not be brought over.
        "failed" => Failed,
    }

    /// A person's decision about a tool call.
    ApprovalDecision {
        /// Carry it out.
        "approve" => Approve,
        /// Carry it out with other arguments.
        "edit" => Edit,
        /// Do not carry it out.
        "reject" => Reject,
        /// Do not carry it out; the model gets this answer.
        "answer" => Answer,
    }

    /// How long a decision holds.
    ApprovalScope {
        /// For this call.
        "once" => Once,
        /// For all calls of this agent that the same rule asks about.
        "agent" => Agent,
        /// As a rule that Palisade keeps.
        "rule" => Rule,
    }

    /// The reason for which an agent waits.
    AgentPause {
        /// A call needs approval.
        "approval" => Approval,
        /// The agent asked a question.
        "question" => Question,
        /// A budget is used up.
        "budget" => Budget,
        /// A person interrupted the agent.
        "interrupted" => Interrupted,
        /// The agent repeats itself.
        "stuck" => Stuck,
        /// The model gives no answer.
        "model" => Model,
        /// The Body cannot be used.
        "body" => Body,
        /// A person stopped the agent.
        "stopped" => Stopped,
    }

    /// The state of a task in an agent's plan.
    TodoStatus {
        /// Not begun.
        "pending" => Pending,
        /// Begun.
        "in_progress" => InProgress,
        /// Done.
        "completed" => Completed,
    }
}

records! {
    /// The settings of an agent.
    "agent spec" => AgentSpec {
        /// The agent's id.
        id: AgentId,
        /// The address of the model.
        model: String,
        /// The first line of the task.
        title: String,
        /// The name of the role.
        role?: Option<String>,
        /// The plan template.
        plan?: Option<String>,
        /// The calls that need a person's approval.
        mode: ApprovalMode,
        /// The limits of the agent.
        budget?: AgentBudget,
        /// The agent that started this one, and the call by which it did.
        parent?: Option<AgentParent>,
        /// The working directory in the Body.
        workdir?: Option<String>,
        /// The host's repository that the Body was made from.
        repository?: Option<String>,
        /// The agents of one request, for several attempts at one task.
        group?: Option<String>,
        /// Further settings of the driver.
        settings?: Value,
    }

    /// The limits of an agent. At a limit the agent pauses.
    "budget" => AgentBudget {
        /// The largest number of turns.
        turns?: Option<u64>,
        /// The largest number of tokens, read and written.
        tokens?: Option<u64>,
        /// The highest cost in millionths of a dollar.
        cost_microdollars?: Option<u64>,
        /// The longest working time.
        wall_ms?: Option<u64>,
    }

    /// The agent and the call that started a sub-agent.
    "agent parent" => AgentParent {
        /// The agent.
        agent: AgentId,
        /// The idempotency key of the call.
        call: String,
        /// How many agents are above this one.
        depth: u64,
    }

    /// A place in an agent's chain.
    "agent position" => AgentPosition {
        /// The agent.
        agent: AgentId,
        /// The `seq` of the last event that counts.
        through: u64,
    }

    /// The content of a message: a list of blocks, or the artifact that holds the list.
    "stored message" => StoredMessage {
        /// The blocks of the message; left out if they are in an artifact.
        blocks?: Option<Value>,
        /// The SHA-256 of the artifact that holds the blocks as JSON.
        artifact?: Option<String>,
        /// The length of the artifact.
        artifact_bytes?: u64,
    }

    /// The tokens of one answer.
    "model usage" => ModelUsage {
        /// Read by the model, without those from its cache.
        input: u64,
        /// Written by the model.
        output: u64,
        /// Read from the model's cache.
        cache_read: u64,
        /// Written to the model's cache.
        cache_write: u64,
    }

    /// One task of an agent's plan.
    "todo" => Todo {
        /// The task.
        content: String,
        /// Its state.
        status: TodoStatus,
    }
}

#[expect(clippy::derivable_impls, reason = "the macro that defines the struct derives no default")]
impl Default for AgentBudget {
    fn default() -> Self {
        Self { turns: None, tokens: None, cost_microdollars: None, wall_ms: None }
    }
}
