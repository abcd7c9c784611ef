//! Dependency layers: the dependencies of a repository, installed once in a clean Body and shared by all others.
//!
//! A dependency layer is the snapshot of a Body in which the repository's own steps ran, with an egress proxy that
//! allows only its registries. Its key is a hash of the inputs of the steps, so a commit that changes none of them
//! reuses the layer. A new dependency layer is built on the last one, so that only new dependencies are downloaded.

use std::collections::{BTreeMap, BTreeSet};

use body::{
    driver::{Capabilities, Capability},
    snapshot,
};
use proto::{
    BodyId, Failure, Kind, Layer,
    event::hex,
    spec::{Access, BodyRole, Mount},
    workspace::Workspace,
};
use serde_json::json;
use sha2::{Digest, Sha256};
use workspace::{Needs, Tool};

use super::devcontainer::{self, BaseTemplate};
use crate::{
    Create, ExecRequest, Force, OutputChunk, UpRequest, Workspaces,
    blocking::run_blocking,
    drivers::DEFAULT_LAYER,
    egress::{EgressDenial, EgressSession},
    failures,
    work::Discard,
};

/// Longest run time of one step.
const STEP_WALL: std::time::Duration = std::time::Duration::from_secs(1800);
/// How many bytes at the end of a failed step's output are shown.
const TAIL_MAX: usize = 4 << 10;
/// Most dependency layers on top of each other.
const CHAIN_MAX: usize = 6;
/// The mount point of the user's own Rust toolchain.
const RUST: &str = "/opt/rust";
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A callback that receives lines about the progress.
pub type Progress<'a> = &'a mut dyn FnMut(&str);

/// The template and the settings of the Bodies of one request.
pub(crate) struct PreparedBase {
    /// The dependency layer, or the template if nothing was installed.
    pub template: String,
    /// The user of commands, if the repository names one.
    pub user: Option<String>,
    /// Shell commands that run at each start.
    pub at_start: Vec<String>,
    /// Ports inside that the user will want to reach.
    pub ports: Vec<u16>,
    /// Environment variables of every command.
    pub env: BTreeMap<String, String>,
    /// Mounts of toolchains.
    pub mounts: Vec<Mount>,
}

impl Workspaces<'_> {
    /// Finds or creates the dependency layer of these repositories.
    pub(crate) async fn prepare(
        &self,
        up: &UpRequest,
        workspaces: &[Workspace],
        say: Progress<'_>,
    ) -> Result<PreparedBase, Failure> {
        let mut all = Vec::new();
        for workspace in workspaces {
            all.push((workspace, self.needs(workspace)?));
        }
        let footing =
            self.base_template(up, all.first().map(|(workspace, needs)| (*workspace, needs)), say).await?;
        let mut user = None;
        for (workspace, needs) in &mut all {
            let wanted = devcontainer::resolve_variables(&footing, workspace, needs, &up.create.env, say);
            user = user.or(wanted);
        }
        let layer = up.create.layer.unwrap_or(DEFAULT_LAYER);
        let capabilities = self.fleet.drivers.get(layer)?.capabilities();
        let prepared = settings(&footing, &all, up, user, capabilities);
        if all.iter().all(|(_, needs)| needs.steps.is_empty()) {
            return Ok(prepared);
        }
        let key = key(&footing, &all, &prepared, layer);
        let known =
            self.fleet.snapshots().manifests().into_iter().filter(|manifest| manifest.dependency.is_some());
        let mut known: Vec<_> = known.collect();
        known.sort_by(|a, b| b.created_at.cmp(&a.created_at));
        if let Some(found) = known.iter().find(|manifest| manifest.dependency.as_deref() == Some(&key)) {
            self.fleet.garbage().touch_snapshot(&found.id);
            return Ok(PreparedBase { template: found.id.to_string(), ..prepared });
        }
        // The last dependency layer of the same repositories saves repeated downloads.
        let same = |manifest: &&snapshot::SnapshotManifest| {
            let repositories = |workspaces: &[Workspace]| {
                workspaces.iter().map(|workspace| workspace.repository.clone()).collect::<Vec<_>>()
            };
            repositories(&manifest.workspaces) == repositories(workspaces)
                && manifest.layer == layer
                && manifest.below.len() < CHAIN_MAX
                && manifest.origin.as_deref() == Some(&footing.template)
        };
        let below = known.iter().find(same).map(|manifest| manifest.id.to_string());
        let template =
            self.make_dependencies(up, &footing, workspaces, &all, &prepared, below, &key, say).await?;
        Ok(PreparedBase { template, ..prepared })
    }

    /// Detects the needs of a repository at its base commit.
    pub(crate) fn needs(&self, workspace: &Workspace) -> Result<Needs, Failure> {
        workspace::needs(&workspace.repository, &format!("{}^{{tree}}", workspace.base))
            .map_err(|error| failures::workspace("cannot find out what the repository needs", error))
    }

    #[expect(clippy::too_many_arguments, reason = "the inputs of one preparation, each of another type")]
    async fn make_dependencies(
        &self,
        up: &UpRequest,
        footing: &BaseTemplate,
        workspaces: &[Workspace],
        all: &[(&Workspace, Needs)],
        prepared: &PreparedBase,
        below: Option<String>,
        key: &str,
        say: Progress<'_>,
    ) -> Result<String, Failure> {
        let allow: Vec<String> = all.iter().flat_map(|(_, needs)| needs.allow.iter().cloned()).collect();
        let mut egress = self
            .fleet
            .egress()
            .open_session(allow)
            .map_err(|failure| failure.hint("see `allow` in palisade.toml"))?;
        let mut create = Create {
            template: below.unwrap_or_else(|| footing.template.clone()),
            workspaces: workspaces.to_vec(),
            ..Create::kept()
        };
        create.env = prepared
            .env
            .iter()
            .map(|(name, value)| (name.clone(), value.clone()))
            .chain(egress.env())
            .collect();
        create.mounts = prepared.mounts.clone();
        create.limits = up.create.limits.clone();
        create.egress = Some(egress.spec.clone());
        create.role = BodyRole::Step;
        create.user = prepared.user.clone();
        create.layer = up.create.layer;
        let view = self.fleet.create(create).await?;
        let done = self.run_steps(view.id(), all, &mut egress, say).await;
        let kept = match done {
            Ok(()) => self.keep_dependencies(view.id(), &footing.template, key).await,
            Err(failure) => Err(failure),
        };
        let removed = self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await;
        let kept = kept?;
        removed?;
        Ok(kept)
    }

    async fn run_steps(
        &self,
        body: &BodyId,
        all: &[(&Workspace, Needs)],
        egress: &mut EgressSession,
        say: Progress<'_>,
    ) -> Result<(), Failure> {
        let mut there: BTreeSet<Tool> = BTreeSet::new();
        for (workspace, needs) in all {
            for step in &needs.steps {
                if let Some(tool) = step.tool
                    && there.insert(tool)
                {
                    self.look_for(body, tool).await?;
                }
                let place = if step.dir.is_empty() {
                    workspace.path()
                } else {
                    format!("{}/{}", workspace.path(), step.dir)
                };
                let shown = proto::text::visible(&step.line);
                say(&format!("preparing: {shown}"));
                let (code, tail) = self.run_line(body, &step.line, Some(&place), say).await?;
                self.fleet.egress().note_denials(body, egress)?;
                if code != 0 {
                    return Err(step_failed(&shown, code, &tail, &egress.denied));
                }
            }
        }
        Ok(())
    }

    /// Checks that the Body has a tool. Without this check, a step would fail with a message that is hard to
    /// understand.
    async fn look_for(&self, body: &BodyId, tool: Tool) -> Result<(), Failure> {
        let argv = ["/bin/sh", "-c", r#"command -v "$1" >/dev/null"#, "sh", tool.program];
        let mut exec = self
            .fleet
            .execs()
            .start(body, ExecRequest { timeout: Some(STEP_WALL), ..ExecRequest::new(argv) })
            .await?;
        while exec.next().await?.is_some() {}
        if exec.finish().await?.code == 0 {
            return Ok(());
        }
        let missing = Failure::new(
            Kind::Host,
            format!("the repository needs `{}`, which its Body does not have", tool.program),
        );
        let missing =
            missing.hint(format!("Bodies of template host use this host's own programs: {}", tool.get));
        Err(missing
            .hint("or choose a template that has it: pal up --template NAME")
            .hint("or start without it: pal up --no-prepare"))
    }

    /// Runs a start command of a Body and waits for its end.
    pub(crate) async fn run_at_start(&self, body: &BodyId, line: &str) -> Result<(), Failure> {
        match self.run_line(body, line, None, &mut |_| ()).await? {
            (0, _) => Ok(()),
            (code, tail) => Err(devcontainer::failed_at_start(line, code, &tail)),
        }
    }

    async fn run_line(
        &self,
        body: &BodyId,
        line: &str,
        place: Option<&str>,
        say: Progress<'_>,
    ) -> Result<(i32, String), Failure> {
        let argv = ["/bin/sh", "-c", line];
        let mut exec = self
            .fleet
            .execs()
            .start(
                body,
                ExecRequest {
                    workdir: place.map(str::to_owned),
                    timeout: Some(STEP_WALL),
                    ..ExecRequest::new(argv)
                },
            )
            .await?;
        let mut tail: Vec<u8> = Vec::new();
        let mut line: Vec<u8> = Vec::new();
        while let Some(output) = exec.next().await? {
            let (OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes) | OutputChunk::Tty(bytes)) = output;
            tail.extend_from_slice(&bytes);
            let old = tail.len().saturating_sub(TAIL_MAX);
            tail.drain(..old);
            for byte in bytes {
                if byte == b'\n' || byte == b'\r' || line.len() >= 1024 {
                    let text = proto::text::visible_bytes(&std::mem::take(&mut line));
                    if !text.trim().is_empty() {
                        say(&format!("  {text}"));
                    }
                } else {
                    line.push(byte);
                }
            }
        }
        let ended = exec.finish().await?;
        Ok((ended.code, String::from_utf8_lossy(&tail).into_owned()))
    }

    /// Keeps the files that the steps wrote, except their changes to a `.git`.
    async fn keep_dependencies(&self, body: &BodyId, origin: &str, key: &str) -> Result<String, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(body)?;
            if let Some(running) = dir.running().map_err(|error| failures::dir(body, error))? {
                self.fleet.driver(&spec)?.kill_synced(&dir, &spec, &running)?;
                body::process::wait_unmounted(&running);
            }
            self.fleet.snapshots().take_dependencies(&dir, &spec, origin, key).map(|id| id.to_string())
        })
    }
}

fn step_failed(step: &str, code: i32, tail: &str, denied: &[EgressDenial]) -> Failure {
    let lines: Vec<&str> = tail.lines().rev().take(20).collect();
    let said: String =
        lines.into_iter().rev().map(|line| format!("\n    {}", proto::text::visible(line))).collect();
    let mut failure = Failure::new(
        Kind::Conflict,
        format!("preparing the repository failed: `{step}` ended with code {code}{said}"),
    );
    for denial in denied.iter().take(4) {
        failure = failure.hint(format!(
            "the egress proxy denied {denial}; allow it in palisade.toml: [prepare] allow = [\"HOST:443\"]"
        ));
    }
    failure
        .hint("start without it and examine the Body: pal up --no-prepare")
        .hint("set other commands: palisade.toml, [prepare] commands = [...]")
}

/// The variables and mounts of both the preparation and the work.
fn settings(
    footing: &BaseTemplate,
    all: &[(&Workspace, Needs)],
    up: &UpRequest,
    user: Option<String>,
    capabilities: Capabilities,
) -> PreparedBase {
    let (mut env, mut path, mut mounts) = (footing.settings.env.clone(), Vec::new(), Vec::new());
    env.remove("PATH");
    let (mut at_start, mut ports) = (Vec::new(), Vec::new());
    for (workspace, needs) in all {
        env.extend(needs.env.clone());
        at_start.extend(needs.container.start.clone());
        ports.extend(
            needs.container.ports.iter().copied().filter(|port| !ports.contains(port)).collect::<Vec<_>>(),
        );
        path.extend(needs.path.iter().map(|dir| (*dir).to_owned()));
        // On a layer without live mounts, the template must contain the toolchain.
        if needs.tools.iter().any(|tool| tool.program == "cargo")
            && capabilities.contains(Capability::LiveMounts)
            && mounts.is_empty()
            && (footing.is_host() || footing.template == up.create.template)
            && let Some(source) =
                workspace::rust_of(&up.person, workspace.repository.parent().unwrap_or(&workspace.repository))
        {
            path.insert(0, format!("{RUST}/bin"));
            mounts.push(Mount { source, target: RUST.into(), access: Access::ReadOnly });
        }
    }
    let usual = footing.env().remove("PATH").unwrap_or_else(|| PATH.to_owned());
    if !env.contains_key("PATH") && (!path.is_empty() || usual != PATH) {
        path.push(usual);
        path.dedup();
        env.insert("PATH".into(), path.join(":"));
    }
    let user = up.create.user.clone().or(user).or_else(|| footing.settings.user.clone());
    PreparedBase { template: footing.template.clone(), user, at_start, ports, env, mounts }
}

/// The key of a dependency layer: a hash of all inputs.
fn key(footing: &BaseTemplate, all: &[(&Workspace, Needs)], prepared: &PreparedBase, layer: Layer) -> String {
    let steps: Vec<_> = all
        .iter()
        .map(|(workspace, needs)| {
            json!([
                workspace.at(),
                needs.inputs,
                needs.steps.iter().map(|step| (&step.dir, &step.line)).collect::<Vec<_>>(),
                needs.allow
            ])
        })
        .collect();
    let tools: Vec<_> = prepared.mounts.iter().map(|mount| mount.source.display().to_string()).collect();
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let mut deciding = json!([
        footing.template,
        footing.state,
        prepared.user,
        std::env::consts::ARCH,
        steps,
        prepared.env,
        tools,
        system
    ]);
    // Only the layer on which a snapshot of files was taken can mount it.
    if let (true, Some(deciding)) = (layer != DEFAULT_LAYER, deciding.as_array_mut()) {
        deciding.push(json!(layer));
    }
    hex(&Sha256::digest(deciding.to_string().as_bytes()))
}
