//! The kinds of events. To add one, add an entry here and regenerate the page: `UPDATE_DOCS=1 cargo test -p proto`.
//!
//! A kind never loses its entry: logs of earlier versions have it. A kind with a new name keeps its earlier one after
//! `|`. A field of a later version is optional (`field?:`), because earlier events lack it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    agents::{
        AgentBudget, AgentPause, AgentPosition, AgentSpec, AnswerEnd, ApprovalDecision, ApprovalScope,
        CallOutcome, CallRisk, CallVenue, MergeOutcome, MessageSource, ModelUsage, StoredMessage, Todo,
    },
    records::{
        CopiedBy, ExecOutcome, KeyQuota, KeyScope, LandedWork, LeaseTerms, MissingStep, RemovedBy, SavedWork,
        SealedHead, StartedBy,
    },
};
use crate::{
    AgentId, BodyId, Enforcement, LayerId, SnapshotId, TemplateId,
    egress::EgressRule,
    lease::OnTimeout,
    spec::PublicSpec,
    template::{BuildId, Tag},
    vm::StartReport,
};

kinds! {
    /// `pal` creates the Body. If it cannot write this event, it creates none.
    "body.created" => BodyCreated {
        /// The spec of the Body.
        spec: PublicSpec,
        /// The terms on which `pal serve` keeps the Body.
        lease?: Option<LeaseTerms>,
    }

    /// The Body's guest runs, after the Body's creation or a `pal start`.
    "body.started" => BodyStarted {
        /// The guest's pid on the host.
        pid: i32,
        /// The enforcement record.
        enforcement: Enforcement,
        /// How a microVM started, and the receipt of its guest.
        receipt?: Option<StartReport>,
    }

    /// `pal` could not create the Body, and removed its files.
    "body.failed" => BodyFailed {
        /// The error message.
        why: String,
        /// The causes, outermost first.
        causes: Vec<String>,
    }

    /// `pal` is about to freeze the Body's processes.
    "body.paused" => BodyPaused {
        /// `pal` writes the memory of the microVM to disk.
        swap?: bool,
    }

    /// `pal` is about to resume the Body's processes.
    "body.resumed" => BodyResumed {
        /// `pal` reads the memory of the microVM from disk.
        swap?: bool,
    }

    /// The guest of a resumed microVM sent its receipt.
    "body.receipt" => BodyReceipt {
        /// The receipt.
        ..revival: StartReport,
    }

    /// `pal` is about to end the Body's processes.
    "body.stopped" => BodyStopped {
        /// How long the processes have to end by themselves.
        grace_ms: u64,
    }

    /// `pal` is about to change limits of the Body.
    "body.limited" => BodyLimited {
        /// The changed limits and their new values, as in the spec.
        ..limits: BTreeMap<String, Value>,
    }

    /// `pal` is about to change the terms on which it keeps the Body.
    "body.leased" => BodyLeased {
        /// The new terms.
        ..lease: LeaseTerms,
    }

    /// The Body's deadline has passed. `pal serve` is about to remove or pause the Body, and writes the
    /// events of that, too.
    "body.expired" => BodyExpired {
        /// The deadline, in milliseconds since 1970.
        deadline_ms: Option<u64>,
        /// The action at the deadline, from the lease.
        then: OnTimeout,
    }

    /// All forks of the Body run. Each has `body.created` and `body.started` of its own.
    "body.forked" => BodyForked {
        /// The snapshot that the forks began with.
        snapshot: SnapshotId,
        /// The forks.
        bodies: Vec<BodyId>,
    }

    /// `pal` is about to remove the Body and its files. For a Body of `pal run`, which ends with its command, `pal` writes this together with `exec.ended`.
    "body.removed" => BodyRemoved {
        /// The part of `pal` that removed the Body, if no user did.
        by?: Option<RemovedBy>,
        /// Whether the user gave up unsaved work.
        discarded?: bool,
    }

    /// `pal` is about to change a setting of the data directory.
    "config.changed" => ConfigChanged {
        /// The setting's new value, under the setting's name.
        ..settings: BTreeMap<String, Value>,
    }

    /// A Body with a repository runs.
    "workspace.imported" | "workspace.brought" => WorkspaceImported {
        /// The workspace.
        workspace: String,
        /// The branch that it began on, if the repository was on one.
        branch: Option<String>,
        /// The commit that its branch began at.
        commit: String,
        /// The commit whose files it began with: `commit`, or one above it that holds uncommitted work of the user.
        base: String,
        /// Its layers, topmost first.
        layers: Vec<LayerId>,
    }

    /// The Body has the dependencies of its repositories, all or in part.
    "workspace.prepared" => WorkspacePrepared {
        /// The dependency layer that the Body began with; left out after `pal prepare`, whose steps ran in the Body.
        layer?: Option<SnapshotId>,
        /// The steps that are missing.
        missing: Vec<MissingStep>,
    }

    /// The Body's work is in the user's repository. `pal` writes one event for each state of the work.
    "workspace.saved" => WorkspaceSaved {
        /// The workspace.
        workspace: String,
        /// The namespace of the refs that hold the work.
        refs: String,
        /// The work.
        saved: SavedWork,
    }

    /// `pal` could not save the work at a stop or a start. The work is still in the Body.
    "workspace.save_failed" | "workspace.unsaved" => WorkspaceSaveFailed {
        /// The error message.
        why: String,
        /// The causes, outermost first.
        causes: Vec<String>,
    }

    /// A branch of the user has moved to the Body's work.
    "workspace.landed" => WorkspaceLanded {
        /// The workspace.
        workspace: String,
        /// How the branch moved.
        landed: LandedWork,
    }

    /// `pal` is about to bring commits of the user's branch into the Body.
    "workspace.synced" => WorkspaceSynced {
        /// The workspace.
        workspace: String,
        /// The branch of the user.
        branch: String,
        /// Its commit.
        commit: String,
        /// The ref of that commit in the Body.
        reference: String,
    }

    /// `pal` is about to save the files that the Body wrote to its home.
    "home.kept" => HomeKept {
        /// The name of the home.
        home: String,
        /// The Body.
        body: BodyId,
        /// The layer that holds the files.
        layer: LayerId,
    }

    /// `pal` is about to remove a home.
    "home.removed" => HomeRemoved {
        /// The name of the home.
        home: String,
    }

    /// The egress proxy allowed a connection of a Body.
    "network.allowed" => NetworkAllowed {
        /// The host and port, escaped for a terminal.
        to: String,
        /// Always `true`.
        allowed: bool,
        /// The rule that decided.
        why: String,
        /// When the egress process decided; earlier versions wrote no such field.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the decision ends in the egress process' spool, so that no decision is recorded twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
        /// The name or id of the Body that connected, if another Body did; `to` is a port of this Body then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
    }

    /// The egress proxy denied a connection or a name lookup of a Body, or `pal serve` gave a sandbox
    /// no internet access although its client asked for it (`to` is `internet`).
    "network.denied" => NetworkDenied {
        /// The host and port, as far as the proxy understood them, escaped for a terminal.
        to: String,
        /// Always `false`.
        allowed: bool,
        /// The reason.
        why: String,
        /// When the egress process decided; earlier versions wrote no such field.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the decision ends in the egress process' spool, so that no decision is recorded twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
        /// The name or id of the Body that connected, if another Body did; `to` is a port of this Body then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
    }

    /// A connection of a Body waits until a change of its policy allows or denies the target.
    "network.asked" => NetworkAsked {
        /// The host and port, escaped for a terminal.
        to: String,
        /// Always `false`.
        allowed: bool,
        /// The rule that asks.
        why: String,
        /// When the egress process decided to wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the line ends in the egress process' spool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
    }

    /// The egress proxy made the same decision about several connections, after the first was recorded.
    "network.counted" => NetworkCounted {
        /// The host and port, escaped for a terminal.
        to: String,
        /// Whether the proxy allowed the connections.
        allowed: bool,
        /// The rule that decided, or the reason of the denial.
        why: String,
        /// How many connections in all.
        count: u64,
        /// When the egress process decided; earlier versions wrote no such field.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the decision ends in the egress process' spool, so that no decision is recorded twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
        /// The name or id of the Body that connected, if another Body did; `to` is a port of this Body then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
    }

    /// The egress process' resolver gave a name an address that stands for it in the Body.
    "network.named" => NetworkNamed {
        /// The name.
        to: String,
        /// The address.
        address: std::net::IpAddr,
        /// When the egress process decided.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the line ends in the egress process' spool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
    }

    /// The egress proxy is about to forward bytes of a rule with a budget of bytes.
    "network.spent" => NetworkSpent {
        /// The rule.
        to: String,
        /// How many bytes its budget has spent, at most.
        bytes: u64,
        /// The budget.
        why: String,
        /// When the egress process wrote it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decided_at: Option<String>,
        /// Where the line ends in the egress process' spool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spool: Option<u64>,
    }

    /// `pal` is about to give the egress process of the Body another policy.
    "network.changed" => NetworkChanged {
        /// The number of the policy.
        generation: u64,
        /// All rules of the policy.
        rules: Vec<EgressRule>,
        /// The names of the secrets that the Body may use.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        secrets: Vec<String>,
        /// The other Bodies that may connect, each as `BODY:PORTS`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        accept: Vec<String>,
    }

    /// `pal secret` or the API is about to store a secret.
    "secret.stored" => SecretStored {
        /// Its name.
        secret: String,
        /// The hosts to which it may go.
        hosts: Vec<String>,
    }

    /// `pal secret` or the API is about to remove a secret.
    "secret.removed" => SecretRemoved {
        /// Its name.
        secret: String,
    }

    /// `pal` is about to ask the guest to start a command.
    "exec.started" => ExecStarted {
        /// The command and its arguments.
        argv: Vec<String>,
        /// The user that the caller asked for.
        user: Option<String>,
        /// The working directory that the caller asked for.
        workdir: Option<String>,
        /// Whether the command has a terminal.
        #[serde(default)]
        tty: bool,
        /// The names of the variables that the caller gave to this command; not their values.
        #[serde(default)]
        env: Vec<String>,
        /// Time limit of the command.
        timeout_ms: Option<u64>,
        /// A name under which other clients find the command.
        tag?: Option<String>,
        /// The client that started it, if it is not `pal` itself.
        by?: Option<StartedBy>,
        /// Whether `pal` does not wait for its end, so that it has no `exec.ended`.
        detached?: bool,
    }

    /// The command ended, or did not start.
    "exec.ended" => ExecEnded {
        /// The `seq` of its `exec.started`, in the same Body.
        exec: u64,
        /// How it ended.
        ..outcome: ExecOutcome,
    }

    /// The client that read the command's output disconnected before the command ended. The command may
    /// still run.
    "exec.detached" | "exec.left" => ExecDetached {
        /// The `seq` of its `exec.started`, in the same Body.
        exec: u64,
    }

    /// `pal` is about to write files into the Body.
    "file.written" => FileWritten {
        /// The path in the Body.
        path: String,
        /// The verb that copies the files.
        by: CopiedBy,
    }

    /// `pal` is about to copy files of the Body to the host.
    "file.read" => FileRead {
        /// The path in the Body.
        path: String,
        /// The verb that copies the files.
        by: CopiedBy,
    }

    /// `pal` is about to copy the Body's files, for a snapshot or a fork. `body` is the Body that it copies.
    "snapshot.created" => SnapshotCreated {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Its name.
        name: Option<String>,
    }

    /// `pal` is about to remove a snapshot at a user's request. `body` is the Body whose snapshot it is.
    "snapshot.removed" => SnapshotRemoved {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Its name.
        name: Option<String>,
    }

    /// `pal` has downloaded a complete image.
    "image.pulled" => ImagePulled {
        /// The reference.
        image: String,
        /// The digest to which the reference resolved.
        digest: String,
        /// The platform.
        platform: String,
        /// Its layers, topmost first.
        layers: Vec<LayerId>,
    }

    /// `pal` is about to create a template.
    "template.created" => TemplateCreated {
        /// The template.
        template: TemplateId,
        /// Its name.
        name: String,
    }

    /// `pal` is about to record a complete build.
    "template.built" => TemplateBuilt {
        /// The template.
        template: TemplateId,
        /// The build.
        build: BuildId,
        /// The tags that name this build from now on.
        tags: Vec<String>,
        /// The size of its layers on disk.
        bytes: u64,
    }

    /// A build failed.
    "template.failed" => TemplateFailed {
        /// The template.
        template: TemplateId,
        /// The build.
        build: BuildId,
        /// The step that failed: `base`, a number from 1 on, or `finalize`.
        step: String,
        /// The error message.
        why: String,
    }

    /// `pal` is about to change a template's tags or visibility.
    "template.changed" => TemplateChanged {
        /// The template.
        template: TemplateId,
        /// Its name.
        name: String,
        /// Whether Bodies of other keys may start from it.
        public: bool,
        /// The build of each tag, and since when.
        tags: BTreeMap<String, Tag>,
    }

    /// `pal` is about to remove a template.
    "template.removed" => TemplateRemoved {
        /// The template.
        template: TemplateId,
        /// Its name.
        name: String,
    }

    /// `pal keys` or the API created a key.
    "key.created" => KeyCreated {
        /// The key's id.
        key: String,
        /// Its name.
        name: String,
        /// The permissions of the key.
        scope: KeyScope,
        /// The Bodies that it reaches besides its own: `own`, `all` or `label=NAME=VALUE`.
        reach?: Option<String>,
        /// How much the key's Bodies may use together.
        quota: KeyQuota,
        /// The ceiling of their networks: rules that must allow each connection, too.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        network: Vec<EgressRule>,
    }

    /// `pal keys` or the API revoked a key.
    "key.revoked" => KeyRevoked {
        /// The key's id.
        key: String,
    }

    /// The heads of all chains that changed since the seal before. The chain of the node holds it, and `pal events verify` compares the chains with it.
    "log.sealed" => LogSealed {
        /// Where each chain ended.
        heads: Vec<SealedHead>,
    }

    /// `pal serve` is about to carry out a request that changes something.
    "request.accepted" => RequestAccepted {
        /// The id of the caller's key.
        key: String,
        /// The method.
        method: String,
        /// The path without its query, at most 512 characters.
        path: String,
    }

    /// `pal serve` refused a request because of a missing key, a missing permission or an invalid name. It
    /// writes at most five such events a second.
    "request.denied" => RequestDenied {
        /// The id of the caller's key, if it had one.
        key: Option<String>,
        /// The method.
        method: String,
        /// The path without its query, at most 512 characters.
        path: String,
        /// The reason.
        why: String,
        /// How many earlier refusals have no event.
        unwritten_before: u64,
    }

    /// `pal` creates an agent. The agent's chain begins with this event.
    "agent.created" => AgentCreated {
        /// The settings of the agent.
        spec: AgentSpec,
        /// The place in another agent's chain whose conversation this agent goes on from.
        forked_from?: Option<AgentPosition>,
    }

    /// A process drives the agent from here on. Events of an earlier driver do not follow this one.
    "agent.driven" => AgentDriven {
        /// Grows by one with each driver of the agent.
        fence: u64,
        /// The driver's pid on this host.
        pid: u32,
    }

    /// The agent works in this Body from here on.
    "agent.embodied" => AgentEmbodied {
        /// The Body.
        body: BodyId,
        /// The snapshot that the Body began with, if it belongs to a checkpoint.
        snapshot?: Option<SnapshotId>,
    }

    /// The driver fixed the system prompt of the agent: the same text begins every request, so that the model's cache serves it.
    "agent.instructed" => AgentInstructed {
        /// The parts of the system prompt.
        system: StoredMessage,
    }

    /// The agent has a new message.
    "message.received" => MessageReceived {
        /// The sender.
        from: MessageSource,
        /// The message.
        text: String,
    }

    /// The driver is about to ask the model.
    "model.asked" => ModelAsked {
        /// The turn, from 1.
        turn: u64,
        /// How many times the driver asked in this turn before.
        attempt: u64,
        /// The address of the model.
        model: String,
        /// How many messages the request has.
        messages: u64,
        /// The size of the request.
        bytes: u64,
        /// How many of these bytes equal the beginning of the request before.
        prefix_bytes: u64,
    }

    /// The model answered. The driver has not acted on the answer yet.
    "model.answered" => ModelAnswered {
        /// The turn.
        turn: u64,
        /// The answer.
        message: StoredMessage,
        /// The end of the answer.
        stop: AnswerEnd,
        /// The tokens.
        usage: ModelUsage,
        /// The cost in millionths of a dollar, if the price is known.
        cost_microdollars: Option<u64>,
        /// How long the model took.
        took_ms: u64,
    }

    /// The model gave no answer.
    "model.failed" => ModelFailed {
        /// The turn.
        turn: u64,
        /// How many times the driver asked in this turn before.
        attempt: u64,
        /// The error message.
        why: String,
        /// After how long the driver asks again; left out if it does not.
        retry_ms?: Option<u64>,
    }

    /// The driver is about to carry out a tool call. `body` is the Body in which it runs.
    "call.started" => CallStarted {
        /// The id that the model gave to the call.
        call: String,
        /// The tool.
        tool: String,
        /// The arguments, as they are carried out.
        arguments: Value,
        /// The risk of the call.
        risk: CallRisk,
        /// Where it runs.
        venue: CallVenue,
        /// The rule or the reason that decided about risk and venue.
        why: String,
        /// The idempotency key of the call.
        key: String,
    }

    /// A tool call has a result, which the model gets.
    "call.ended" => CallEnded {
        /// The id that the model gave to the call.
        call: String,
        /// The end of the call.
        outcome: CallOutcome,
        /// The result.
        result: StoredMessage,
        /// The exit code of its command.
        exit_code?: Option<i32>,
        /// How long it took.
        took_ms: u64,
    }

    /// A tool call waits for a person's approval.
    "approval.asked" => ApprovalAsked {
        /// The id that the model gave to the call.
        call: String,
        /// The tool.
        tool: String,
        /// The arguments.
        arguments: Value,
        /// The rule that asks.
        why: String,
    }

    /// A person decided about a tool call.
    "approval.given" => ApprovalGiven {
        /// The id that the model gave to the call.
        call: String,
        /// The decision.
        decision: ApprovalDecision,
        /// The arguments to carry out instead, for an edit.
        arguments?: Option<Value>,
        /// The reason of a rejection, or the answer instead of the tool's.
        message?: Option<String>,
        /// How long the decision holds.
        scope: ApprovalScope,
    }

    /// The agent asks a person a question.
    "question.asked" => QuestionAsked {
        /// The id that the model gave to the call.
        call: String,
        /// The question.
        question: String,
        /// Answers to choose from.
        choices?: Vec<String>,
    }

    /// A person answered a question of the agent.
    "question.answered" => QuestionAnswered {
        /// The id that the model gave to the call.
        call: String,
        /// The answer.
        answer: String,
    }

    /// The agent changed its list of tasks.
    "plan.changed" => PlanChanged {
        /// The whole list.
        todos: Vec<Todo>,
    }

    /// The agent follows a plan from here on, or changed the one that it follows.
    "plan.adopted" => PlanAdopted {
        /// The plan template.
        plan: String,
        /// The phases as they are followed: each has a name, a goal, checks and tools.
        template: Value,
        /// The reason of a change.
        why?: Option<String>,
    }

    /// The agent entered a phase of its plan template, or left the last one.
    "phase.entered" => PhaseEntered {
        /// The plan template.
        plan: String,
        /// The phase; none after the last one.
        phase: Option<String>,
        /// The result of the exit check of the phase before.
        check?: Option<String>,
    }

    /// Conversation and Body can be taken back to this place.
    "checkpoint.taken" => CheckpointTaken {
        /// The last complete turn.
        turn: u64,
        /// The snapshot of the Body.
        snapshot: SnapshotId,
        /// How long it took.
        took_ms: u64,
    }

    /// A checkpoint is gone: its snapshot was removed. Conversation and Body can no longer be taken back to it.
    "checkpoint.removed" => CheckpointRemoved {
        /// The snapshot.
        snapshot: SnapshotId,
    }

    /// A tool call started a sub-agent.
    "subagent.started" => SubagentStarted {
        /// The id that the model gave to the call.
        call: String,
        /// The sub-agent.
        agent: AgentId,
        /// Its role.
        role: String,
        /// The Body in which it works.
        body: BodyId,
    }

    /// A sub-agent ended. Its cost counts for the agent that started it.
    "subagent.ended" => SubagentEnded {
        /// The id that the model gave to the call.
        call: String,
        /// The sub-agent.
        agent: AgentId,
        /// The end of the sub-agent.
        outcome: CallOutcome,
        /// The answers of its model, and of those of its own sub-agents.
        answers: u64,
        /// The answers among them whose price is not known.
        unpriced_answers?: u64,
        /// The tokens of these answers.
        usage: ModelUsage,
        /// The cost of these answers in millionths of a dollar, as far as their prices are known.
        cost_microdollars: u64,
    }

    /// The work of a sub-agent went into the Body of the agent that started it, or could not.
    "work.merged" => WorkMerged {
        /// The Body that the work goes into.
        body: BodyId,
        /// The result.
        outcome: MergeOutcome,
        /// The files that changed or conflict, at most 100.
        files?: Vec<String>,
        /// The ref in that Body that names the work.
        reference?: Option<String>,
        /// The result in words.
        note: String,
    }

    /// The agent wrote a file of its own, which is in its log and in no Body.
    "agent.file_written" => AgentFileWritten {
        /// The path, below the agent's own directory.
        path: String,
        /// The content; left out if it is in an artifact.
        content?: Option<String>,
        /// The SHA-256 of the artifact that holds the content.
        artifact?: Option<String>,
        /// The length of the artifact.
        artifact_bytes?: u64,
    }

    /// The agent removed a file of its own, or a directory with its files.
    "agent.file_removed" => AgentFileRemoved {
        /// The path.
        path: String,
    }

    /// A summary stands for the older part of the conversation from here on. The older events stay in the log.
    "history.compacted" => HistoryCompacted {
        /// How many messages at the beginning of the conversation the summary stands for.
        messages: u64,
        /// The summary.
        summary: String,
        /// The file in which the agent finds the older messages.
        file?: Option<String>,
        /// The tokens of the answer that is the summary.
        usage?: Option<ModelUsage>,
        /// The cost of that answer in millionths of a dollar, if its price is known.
        cost_microdollars?: Option<u64>,
    }

    /// The agent waits.
    "agent.paused" => AgentPaused {
        /// The reason.
        reason: AgentPause,
        /// The reason in words, with the command that goes on.
        why: String,
    }

    /// A person asked the agent to stop what it is doing.
    "agent.interrupted" => AgentInterrupted {
        /// Whether the agent's processes end, too.
        #[serde(default)]
        stop: bool,
    }

    /// A person let the agent go on after a pause.
    "agent.resumed" => AgentResumed {}

    /// A person changed the agent's budget.
    "agent.budgeted" => AgentBudgeted {
        /// The new budget.
        budget: AgentBudget,
    }

    /// The agent has finished its task.
    "agent.finished" => AgentFinished {
        /// The agent's last words.
        summary: String,
    }

    /// The agent goes on from an earlier place: its conversation and its Body are those of then.
    "agent.rewound" => AgentRewound {
        /// The `seq` of the last event that still counts.
        through: u64,
        /// The turn.
        turn: u64,
    }

    /// `pal` is about to remove the agent from the list of agents. Its events stay.
    "agent.removed" => AgentRemoved {
        /// Whether its Body is removed, too.
        #[serde(default)]
        body_removed: bool,
    }
}
