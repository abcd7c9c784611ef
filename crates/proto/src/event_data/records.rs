//! Structs and words that more than one kind of event uses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    ChainId,
    launch::GuestEnd,
    lease::{OnTimeout, PauseMode},
};

words! {
    /// The client that started a command.
    StartedBy {
        /// A client of envd's protocol, through `pal serve`.
        "envd" => Envd,
        /// The Body's template.
        "template" => Template,
    }

    /// The part of `pal` that removed a Body on its own.
    RemovedBy {
        /// `pal gc`, or the first `pal` that found what a killed one had left.
        "gc" => Gc,
        /// `pal up`, after it failed to set up the Body.
        "up" => Up,
    }

    /// The verb that copied a file.
    CopiedBy {
        /// `pal cp`.
        "cp" => Cp,
    }

    /// The permissions of a key.
    KeyScope {
        /// Reading.
        "read" => Read,
        /// Creating, using and ending Bodies.
        "run" => Run,
        /// Managing keys, and using the Bodies of every key.
        "admin" => Admin,
    }
}

records! {
    /// A prepare step that failed or did not run, so that the Body is prepared only in part.
    "missing step" => MissingStep {
        /// The workspace.
        workspace: String,
        /// The directory below the workspace; left out for its top.
        dir?: String,
        /// The name of the step, such as `npm ci`.
        name: String,
        /// The reason in one line.
        why: String,
        /// Whether the next `pal up` tries it again: it did not run, or its cause may pass.
        retry?: bool,
    }

    /// The terms on which `pal serve` keeps a Body: its lease, without the tokens and the network settings.
    "lease" => LeaseTerms {
        /// The id of the key that created the Body.
        owner?: Option<String>,
        /// The template as the client named it.
        alias?: Option<String>,
        /// The deadline, in milliseconds since 1970; left out while the Body is paused.
        deadline_ms?: Option<u64>,
        /// The timeout that the client set last.
        timeout_ms: u64,
        /// The action at the deadline.
        then: OnTimeout,
        /// Whether a request to one of its ports resumes the paused Body.
        #[serde(default)]
        auto_resume: bool,
        /// Whether such a request resumed it.
        #[serde(default)]
        resumed_by_traffic: bool,
        /// How it is paused; left out while it runs.
        paused?: Option<PauseMode>,
        /// When it last started or resumed, RFC 3339.
        since: String,
        /// Labels that the client gave it.
        #[serde(default)]
        metadata: BTreeMap<String, String>,
        /// The idempotency key of the request that created it.
        request?: Option<String>,
    }

    /// How a command ended.
    "exit" => ExecExit {
        /// The exit code as a shell reports it: 128 + signal after a signal, 124 at the timeout, 137 if the
        /// Body ended.
        code: i32,
        /// The signal that ended it.
        signal?: Option<i32>,
        /// Whether the kernel killed a process of the Body because of its memory limit while the command ran.
        out_of_memory?: Option<bool>,
        /// Whether the command was killed at its timeout.
        #[serde(default)]
        timed_out: bool,
        /// Why the Body ended while the command ran, if it did.
        body_end?: Option<GuestEnd>,
        /// How long the command ran.
        duration_ms: u64,
        /// The command's standard output; with a terminal, all of its output. Left out if `pal` did not
        /// record it.
        stdout?: Option<ExecOutput>,
        /// Its standard error.
        stderr?: Option<ExecOutput>,
    }

    /// The output of a command, or a reference to it.
    "output" => ExecOutput {
        /// The bytes.
        ..content: OutputContent,
        /// How many bytes the command wrote.
        bytes: u64,
        /// How many of them `pal` kept, if the Body's output limit cut the rest.
        truncated_to?: Option<u64>,
    }

    /// A Body's work, as `pal` saved it in the user's repository.
    "saved" => SavedWork {
        /// The workspace.
        workspace: String,
        /// The commit that the work began with.
        base: String,
        /// The Body's own last commit.
        head: String,
        /// The commit that holds every file.
        wip: String,
        /// Whether `wip` holds more than `head`.
        uncommitted: bool,
        /// The Body's branches, and the commit of each.
        branches: BTreeMap<String, String>,
        /// Files that git cannot hold.
        #[serde(alias = "left_out")]
        skipped: Vec<SkippedFile>,
        /// Why the Body's own commits could not be saved; left out if they were.
        #[serde(alias = "trouble")]
        commit_error?: Option<String>,
        /// Work in submodules, saved in their own repositories.
        submodules?: Vec<SavedSubmodule>,
    }

    /// A file that is not in the saved work.
    "skipped file" => SkippedFile {
        /// Its path in the workspace, escaped for a terminal.
        path: String,
        /// The reason.
        why: String,
    }

    /// A Body's work in a submodule.
    "saved submodule" => SavedSubmodule {
        /// Its path in the workspace.
        path: String,
        /// The commit that the work began with.
        base: String,
        /// The Body's own last commit there; `base` if it made none.
        head: String,
        /// The commit that holds every file.
        wip: String,
        /// Branches that the Body made there.
        branches?: BTreeMap<String, String>,
    }

    /// How a branch of the user moved.
    "landed" => LandedWork {
        /// The branch.
        branch: String,
        /// Its commit before; left out for a new branch.
        from?: Option<String>,
        /// Its commit now.
        to: String,
        /// How many commits the branch gained.
        commits: u64,
        /// Changed files that a tool of the user may execute by itself.
        #[serde(alias = "runs_something")]
        auto_executed: Vec<String>,
        /// Work in submodules, which is saved but did not land.
        submodules?: Vec<SavedSubmodule>,
    }

    /// Where a chain ended when it was sealed.
    "sealed head" => SealedHead {
        /// The chain.
        chain: ChainId,
        /// The `seq` of its last event.
        seq: u64,
        /// The `hash` of its last event.
        hash: String,
    }

    /// How much the Bodies of a key may use together.
    "quota" => KeyQuota {
        /// Number of Bodies.
        bodies?: Option<u64>,
        /// CPU time, in thousandths of a CPU.
        cpu_milli?: Option<u64>,
        /// Memory.
        memory_bytes?: Option<u64>,
        /// Disk.
        disk_bytes?: Option<u64>,
    }
}

/// How a command ended, or why it did not start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ExecOutcome {
    /// The command ran.
    Ended(ExecExit),
    /// The guest did not start the command.
    NotStarted {
        /// The error message.
        error: String,
    },
}

/// The output of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputContent {
    /// At most 4 KiB of UTF-8.
    Text(String),
    /// At most 4 KiB that are not UTF-8, in hexadecimal.
    Hex(String),
    /// Longer output: the SHA-256 of a file in `artifacts/` of the data directory.
    Artifact(String),
}

impl MissingStep {
    /// Names the step and its directory, such as `npm ci in web`, escaped for a terminal.
    pub fn title(&self) -> String {
        let name = crate::text::visible(&self.name);
        if self.dir.is_empty() { name } else { format!("{name} in {}", crate::text::visible(&self.dir)) }
    }
}
