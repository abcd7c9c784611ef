//! The kinds of events. To add one, add an entry here and regenerate the page: `UPDATE_DOCS=1 cargo test -p proto`.
//!
//! A kind never loses its entry: logs of earlier versions have it. A kind with a new name keeps its earlier one after
//! `|`. A field of a later version is optional (`field?:`), because earlier events lack it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::records::{
    CopiedBy, ExecOutcome, KeyQuota, KeyScope, LandedWork, LeaseTerms, RemovedBy, SavedWork, SealedHead,
    StartedBy,
};
use crate::{
    BodyId, Enforcement, LayerId, SnapshotId, TemplateId,
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

    /// The egress proxy allowed a connection of a Body that is being prepared or built.
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
    }

    /// The egress proxy denied a connection of a Body that is being prepared or built.
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

    /// The envd client that read the command's output disconnected before the command ended. The command may
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

    /// `pal keys` created a key.
    "key.created" => KeyCreated {
        /// The key's id.
        key: String,
        /// Its name.
        name: String,
        /// The permissions of the key.
        scope: KeyScope,
        /// How much the key's Bodies may use together.
        quota: KeyQuota,
    }

    /// `pal keys` revoked a key.
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
}
