//! Dependency layers: the dependencies of a repository, installed once in a clean Body and shared by all others.
//!
//! A dependency layer is the snapshot of a Body in which the repository's own steps ran, with an egress proxy that
//! allows only its registries. Its key is a hash of the inputs of the steps, so a commit that changes none of them
//! reuses the layer. A new dependency layer is built on the last one, so that only new dependencies are downloaded.
//!
//! Invariant: a layer names the steps that it lacks, and so does every Body above it.
//! Invariant: a layer hides no file of the commit that a Body above it begins with.
//! Invariant: two requests with one key install once: the second waits, and then finds the layer of the first.

use std::{collections::BTreeMap, ffi::OsStr, os::unix::ffi::OsStrExt, path::PathBuf};

use body::{
    driver::{Capabilities, Capability},
    snapshot::{self, SnapshotManifest},
};
use proto::{
    BodyId, Failure, Layer, SnapshotId, Spec,
    egress::EgressRule,
    event::hex,
    event_data::MissingStep,
    spec::{Access, BodyRole, Egress, Mount},
    workspace::Workspace,
};
use serde_json::json;
use sha2::{Digest, Sha256};
use workspace::{Needs, NeedsRequest, NetworkSettings, StepWeight};

use super::{
    Progress, ProgressLine,
    devcontainer::{self, BaseTemplate},
    key_lock::lock_key,
    steps::{AfterFailure, PlannedStep, StepContext, StepRunner},
    toolchain::ToolGap,
    unfinished::UnfinishedBody,
    up::{ImportedRepo, RepositoryNetwork},
};
use crate::{
    Create, Fleet, PrepareChoice, UpRequest, Workspaces, blocking::run_blocking, drivers::DEFAULT_LAYER,
    egress::EgressSession, failures, network::repository_policy, snapshots::DependencyLayer,
};

/// Most dependency layers on top of each other.
const CHAIN_MAX: usize = 6;
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The template and the settings of the Bodies of one request.
#[derive(Debug)]
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
    /// The network of the Bodies; the steps have their own.
    pub egress: Option<Egress>,
    /// The failure of a required step. With it, the Body of [`PrepareChoice::Keep`] shows what is there.
    pub failure: Option<Failure>,
}

/// A workspace and what it needs.
type WorkspaceNeeds<'a> = (&'a Workspace, Needs);

/// The inputs of one preparation.
pub(super) struct Preparation<'a> {
    up: &'a UpRequest,
    pub footing: &'a BaseTemplate,
    all: &'a [WorkspaceNeeds<'a>],
    base: &'a PreparedBase,
    pub layer: Layer,
    key: &'a str,
}

/// The Body in which the steps of a preparation run.
struct PreparingBody<'a, 'p> {
    body: UnfinishedBody<'a>,
    /// The steps that are left.
    planned: Vec<PlannedStep<'p>>,
    gaps: Vec<ToolGap>,
    /// The layer of the same key below it, which lacks steps.
    partial: Option<SnapshotManifest>,
}

impl Workspaces<'_> {
    /// Finds or creates the dependency layer of these repositories.
    pub(crate) async fn prepare(
        &self,
        up: &UpRequest,
        repos: &[ImportedRepo],
        say: Progress<'_>,
    ) -> Result<PreparedBase, Failure> {
        let mut all = Vec::new();
        for repo in repos {
            all.push((&repo.workspace, self.needs_of_request(up, repo, say)?));
        }
        let footing =
            self.base_template(up, all.first().map(|(workspace, needs)| (*workspace, needs)), say).await?;
        let mut user = None;
        for (workspace, needs) in &mut all {
            let wanted = devcontainer::resolve_variables(&footing, workspace, needs, &up.create.env, say);
            user = user.or(wanted);
            needs.notes.iter().for_each(|note| say(ProgressLine::Note(note)));
        }
        let egress = work_network(up, &all, say)?;
        let layer = up.create.layer.unwrap_or(DEFAULT_LAYER);
        let capabilities = self.fleet.drivers.get(layer)?.capabilities();
        let base = PreparedBase { egress, ..settings(&footing, &all, up, user, capabilities, say) };
        if all.iter().all(|(_, needs)| needs.steps.is_empty()) {
            return Ok(base);
        }
        let key = key(&footing, &all, &base, layer);
        let preparation = Preparation { up, footing: &footing, all: &all, base: &base, layer, key: &key };
        let (template, failure) = self.find_or_make_layer(&preparation, say).await?;
        Ok(PreparedBase { template, failure, ..base })
    }

    /// Detects the needs of a repository for a request. Without a preparation there are no steps, and a repository
    /// that cannot be understood is no failure.
    fn needs_of_request(
        &self,
        up: &UpRequest,
        repo: &ImportedRepo,
        say: Progress<'_>,
    ) -> Result<Needs, Failure> {
        let needs = self.needs(&repo.workspace, repo.settings.as_deref());
        if up.prepare != PrepareChoice::No {
            return needs;
        }
        match needs {
            Ok(needs) => {
                Ok(Needs { steps: Vec::new(), notes: Vec::new(), container: Default::default(), ..needs })
            }
            Err(failure) => {
                say(ProgressLine::Note(&format!("no toolchain is set up: {failure}")));
                Ok(Needs::default())
            }
        }
    }

    /// Detects the needs of a repository at its base commit. `settings` is an uncommitted palisade.toml.
    pub(crate) fn needs(&self, workspace: &Workspace, settings: Option<&str>) -> Result<Needs, Failure> {
        let request = NeedsRequest { objects: &workspace.repository, commit: &workspace.base, settings };
        workspace::needs(&request)
            .map_err(|error| failures::workspace("cannot find out what the repository needs", error))
    }

    async fn find_or_make_layer(
        &self,
        preparation: &Preparation<'_>,
        say: Progress<'_>,
    ) -> Result<(String, Option<Failure>), Failure> {
        if let Some(found) = self.find_layer(preparation) {
            return Ok((use_layer(self.fleet, &found, say), None));
        }
        let _lock = lock_key(&self.fleet.data, preparation.key, say).await?;
        // Another request may have made it meanwhile.
        if let Some(found) = self.find_layer(preparation) {
            return Ok((use_layer(self.fleet, &found, say), None));
        }
        self.make_layer(preparation, say).await
    }

    /// The newest layer of a preparation, unless some of its missing steps should run again.
    fn find_layer(&self, preparation: &Preparation<'_>) -> Option<SnapshotManifest> {
        let found = preparation.known_layer(self.fleet)?;
        preparation.retried(&found.missing_steps).is_empty().then_some(found)
    }

    /// Runs the steps that no layer has, and keeps their files as a layer. Returns it with the failure of a required
    /// step.
    async fn make_layer(
        &self,
        preparation: &Preparation<'_>,
        say: Progress<'_>,
    ) -> Result<(String, Option<Failure>), Failure> {
        let choice = preparation.up.prepare;
        let mut egress = self.open_egress(preparation.all)?;
        let PreparingBody { body, planned, gaps, partial } =
            self.preparing_body(preparation, &egress, say).await?;
        let after_failure = match choice {
            PrepareChoice::Anyway => AfterFailure::Continue,
            _ => AfterFailure::StopUnlessUnreachable,
        };
        let context = StepContext { body: body.id()?, env: egress.env(), gaps, after_failure };
        let mut outcome =
            StepRunner { fleet: self.fleet }.run_steps(&context, &planned, &mut egress, say).await?;
        // Steps that failed before and did not run again stay missing.
        let known_missing = partial.as_ref().map_or(&[][..], |partial| &partial.missing_steps);
        let not_run = |missing: &&MissingStep| !planned.iter().any(|planned| planned.matches(missing));
        outcome.missing.extend(known_missing.iter().filter(not_run).cloned());
        let failure = outcome.failure.take();
        let failure = match failure {
            Some(failure) => Some(explain(failure, body.id()?, choice, &outcome.failed_source)),
            None => None,
        };
        let template = match (partial, &failure) {
            // Nothing new was installed.
            (Some(partial), _) if outcome.succeeded == 0 => partial.id.to_string(),
            (None, Some(_)) if outcome.succeeded == 0 && choice != PrepareChoice::Keep => String::new(),
            _ => {
                let layer = DependencyLayer {
                    origin: preparation.footing.template.clone(),
                    key: preparation.key.to_owned(),
                    missing_steps: outcome.missing,
                };
                self.keep_layer(body.id()?, &layer, say).await?
            }
        };
        body.remove().await?;
        match failure {
            Some(failure) if choice != PrepareChoice::Keep => Err(failure),
            failure => {
                say(ProgressLine::Activity("starting the Body"));
                Ok((template, failure))
            }
        }
    }

    /// Creates the Body in which the steps run: above the last layer of the same repositories, which saves repeated
    /// downloads, or above a layer with tools that the template lacks.
    async fn preparing_body<'p>(
        &self,
        preparation: &'p Preparation<'_>,
        egress: &EgressSession,
        say: Progress<'_>,
    ) -> Result<PreparingBody<'_, 'p>, Failure> {
        let partial = preparation.known_layer(self.fleet).filter(|partial| partial.below.len() < CHAIN_MAX);
        let planned = match &partial {
            Some(partial) => preparation.retried(&partial.missing_steps),
            None => preparation.steps(),
        };
        let can_extend =
            |known: &SnapshotManifest| preparation.can_extend(known) && preparation.fits(self.fleet, known);
        let known = || dependency_layers(self.fleet).into_iter().find(can_extend);
        let below = partial.clone().or_else(known);
        let create = Create { egress: Some(egress.spec.clone()), ..preparation.create() };
        let template = below.map_or_else(|| create.template.clone(), |below| below.id.to_string());
        let body = UnfinishedBody::create(self.fleet, Create { template, ..create.clone() }).await?;
        let needs: Vec<&Needs> = preparation.all.iter().map(|(_, needs)| needs).collect();
        let gaps = StepRunner { fleet: self.fleet }.find_gaps(body.id()?, &needs, &planned).await?;
        let Some(template) = StepRunner { fleet: self.fleet }.tool_layer(preparation, &gaps, say).await?
        else {
            return Ok(PreparingBody { body, planned, gaps, partial });
        };
        body.remove().await?;
        let body = UnfinishedBody::create(self.fleet, Create { template, ..create }).await?;
        let planned = preparation.steps();
        let gaps = StepRunner { fleet: self.fleet }.find_gaps(body.id()?, &needs, &planned).await?;
        Ok(PreparingBody { body, planned, gaps, partial: None })
    }

    /// Opens the egress session of a preparation.
    pub(super) fn open_egress(&self, all: &[WorkspaceNeeds<'_>]) -> Result<EgressSession, Failure> {
        let mut allow: Vec<String> = all.iter().flat_map(|(_, needs)| needs.allow.iter().cloned()).collect();
        allow.sort();
        allow.dedup();
        let opened = self.fleet.egress().open_session(allow);
        opened.map_err(|failure| failure.hint("see `allow` in palisade.toml"))
    }

    /// Keeps the files that the steps wrote, except their changes to a `.git` and to files of the commit.
    pub(super) async fn keep_layer(
        &self,
        body: &BodyId,
        layer: &DependencyLayer,
        say: Progress<'_>,
    ) -> Result<String, Failure> {
        say(ProgressLine::Activity("keeping what was installed for later Bodies"));
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(body)?;
            if let Some(running) = dir.running().map_err(|error| failures::dir(body, error))? {
                self.fleet.driver(&spec)?.kill_synced(&dir, &spec, &running)?;
                body::process::wait_unmounted(&running);
            }
            let id = self.fleet.snapshots().take_dependencies(&dir, &spec, layer)?;
            self.uncover_files(&spec, &id, say)?;
            Ok(id.to_string())
        })
    }

    /// Removes from a new layer what hides files of the commit: a Body begins with the files of its own commit, whatever
    /// the steps did to those of another one.
    fn uncover_files(&self, spec: &Spec, layer: &SnapshotId, say: Progress<'_>) -> Result<(), Failure> {
        let dir = self.fleet.snapshots().path(layer);
        let layers = self.fleet.templates().layers_dir();
        let programs = &self.fleet.launch_context.programs;
        for workspace in &spec.workspaces {
            let hidden = workspace::hidden_files(workspace, &layers, std::slice::from_ref(&dir))
                .map_err(|error| failures::workspace("cannot read what the steps changed", error))?;
            for path in &hidden {
                let path = dir.join(workspace.area_dir()).join(OsStr::from_bytes(path));
                snapshot::remove(programs, &spec.ids, &path).map_err(failures::removal)?;
            }
            if let Some(first) = hidden.first() {
                let first = proto::text::visible_bytes(first);
                let more = match hidden.len() - 1 {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                say(ProgressLine::Note(&format!(
                    "not kept: what the steps changed in files of the repository: {first}{more}"
                )));
            }
        }
        Ok(())
    }

    /// The prepare steps that a Body lacks: its own record, else that of the snapshot below it.
    pub(crate) fn missing_steps(&self, spec: &Spec) -> Vec<MissingStep> {
        let own = body::BodyDir::at(self.fleet.body_path(&spec.id)).missing_steps();
        let below = || {
            let top = self.fleet.snapshots().path(spec.snapshots.first()?);
            snapshot::read(&top).ok().map(|manifest| manifest.missing_steps)
        };
        own.or_else(below).unwrap_or_default()
    }
}

impl Preparation<'_> {
    /// The request for a Body with these repositories, in which steps run.
    pub fn create(&self) -> Create {
        Create {
            template: self.footing.template.clone(),
            workspaces: self.all.iter().map(|(workspace, _)| (*workspace).clone()).collect(),
            env: self.base.env.clone(),
            mounts: self.base.mounts.clone(),
            limits: self.up.create.limits.clone(),
            role: BodyRole::Step,
            user: self.base.user.clone(),
            layer: self.up.create.layer,
            ..Create::kept()
        }
    }

    fn steps(&self) -> Vec<PlannedStep<'_>> {
        let mut steps = Vec::new();
        for (workspace, needs) in self.all {
            steps.extend(needs.steps.iter().map(|step| PlannedStep { workspace, step }));
        }
        steps
    }

    /// The missing steps of a layer that run again: those whose cause may have passed, and required ones.
    fn retried(&self, missing: &[MissingStep]) -> Vec<PlannedStep<'_>> {
        let again = |planned: &PlannedStep<'_>, missing: &MissingStep| {
            let required = planned.step.weight == StepWeight::Required;
            missing.retry || (required && self.up.prepare != PrepareChoice::Anyway)
        };
        let mut steps = self.steps();
        steps.retain(|planned| {
            missing.iter().any(|missing| planned.matches(missing) && again(planned, missing))
        });
        steps
    }

    /// The newest layer with these inputs.
    fn known_layer(&self, fleet: &Fleet) -> Option<SnapshotManifest> {
        let is_same = |known: &SnapshotManifest| known.dependency.as_deref() == Some(self.key);
        dependency_layers(fleet).into_iter().find(|known| is_same(known) && self.fits(fleet, known))
    }

    /// Whether a layer, with those below it, hides no file of these commits. One that was made for another commit may:
    /// a file that a step generated there can be a file of this commit.
    fn fits(&self, fleet: &Fleet, layer: &SnapshotManifest) -> bool {
        let Ok(stack) = fleet.snapshots().stack(layer) else { return false };
        let dirs: Vec<PathBuf> =
            stack.into_iter().filter(|below| below.dependency).map(|below| below.dir).collect();
        let layers = fleet.templates().layers_dir();
        self.all.iter().all(|(workspace, _)| {
            workspace::hidden_files(workspace, &layers, &dirs).is_ok_and(|hidden| hidden.is_empty())
        })
    }

    /// Whether a layer of other inputs can be below the new one.
    fn can_extend(&self, known: &SnapshotManifest) -> bool {
        let repositories = |workspaces: &mut dyn Iterator<Item = &Workspace>| {
            workspaces.map(|workspace| workspace.repository.clone()).collect::<Vec<_>>()
        };
        let ours = repositories(&mut self.all.iter().map(|(workspace, _)| *workspace));
        repositories(&mut known.workspaces.iter()) == ours
            && known.layer == self.layer
            && known.below.len() < CHAIN_MAX
            && known.origin.as_deref() == Some(&self.footing.template)
    }
}

/// All dependency layers, newest first.
fn dependency_layers(fleet: &Fleet) -> Vec<SnapshotManifest> {
    let manifests = fleet.snapshots().manifests().into_iter();
    let mut known: Vec<_> = manifests.filter(|manifest| manifest.dependency.is_some()).collect();
    known.sort_by(|a, b| b.created_at.cmp(&a.created_at));
    known
}

/// The newest dependency layer of a key.
pub(super) fn find_dependencies(fleet: &Fleet, key: &str) -> Option<SnapshotManifest> {
    dependency_layers(fleet).into_iter().find(|layer| layer.dependency.as_deref() == Some(key))
}

/// Marks a layer as used, and reminds of the steps that it lacks.
fn use_layer(fleet: &Fleet, layer: &SnapshotManifest, say: Progress<'_>) -> String {
    fleet.garbage().touch_snapshot(&layer.id);
    for missing in &layer.missing_steps {
        let why = proto::text::visible(&missing.why);
        say(ProgressLine::Note(&format!("warning: {} failed before: {why}", missing.title())));
    }
    layer.id.to_string()
}

/// Adds the ways on from a failed preparation.
fn explain(failure: Failure, step_body: &BodyId, choice: PrepareChoice, source: &str) -> Failure {
    let failure = failure.hint(format!("its whole output: pal logs {step_body}"));
    match choice {
        PrepareChoice::Keep => failure,
        _ => failure
            .hint("keep a Body to look into: pal up --keep")
            .hint("or work without it: pal up --anyway")
            .hint(match source {
                "" => "or change the steps in palisade.toml: [prepare] commands = [...]".to_owned(),
                source => format!(
                    "or leave the step out in palisade.toml: [prepare] skip = [\"{}\"]",
                    proto::text::visible(source)
                ),
            }),
    }
}

/// The variables and mounts of both the preparation and the work.
fn settings(
    footing: &BaseTemplate,
    all: &[WorkspaceNeeds<'_>],
    up: &UpRequest,
    user: Option<String>,
    capabilities: Capabilities,
    say: Progress<'_>,
) -> PreparedBase {
    let (mut env, mut path, mut mounts) = (footing.settings.env.clone(), Vec::new(), Vec::new());
    env.remove("PATH");
    let (mut at_start, mut ports) = (Vec::new(), Vec::new());
    for (_, needs) in all {
        env.extend(needs.env.clone());
        at_start.extend(needs.container.start.clone());
        ports.extend(
            needs.container.ports.iter().copied().filter(|port| !ports.contains(port)).collect::<Vec<_>>(),
        );
        path.extend(needs.path.iter().map(|dir| (*dir).to_owned()));
        // On a layer without live mounts, the template must contain the toolchains.
        if !capabilities.contains(Capability::LiveMounts)
            || !(footing.is_host() || footing.template == up.create.template)
        {
            continue;
        }
        let found = workspace::find_toolchains(&up.person, needs);
        found.notes.iter().for_each(|note| say(ProgressLine::Note(note)));
        env.extend(found.env);
        for toolchain in found.mounts {
            let target = PathBuf::from(toolchain.target);
            if mounts.iter().all(|mount: &Mount| mount.target != target) {
                // After the virtual environment, which is made of the toolchain.
                path.push(format!("{}/bin", toolchain.target));
                mounts.push(Mount { source: toolchain.source, target, access: Access::ReadOnly });
            }
        }
    }
    let usual = footing.env().remove("PATH").unwrap_or_else(|| PATH.to_owned());
    if !env.contains_key("PATH") && (!path.is_empty() || usual != PATH) {
        path.push(usual);
        path.dedup();
        env.insert("PATH".into(), path.join(":"));
    }
    let user = up.create.user.clone().or(user).or_else(|| footing.settings.user.clone());
    let template = footing.template.clone();
    PreparedBase { template, user, at_start, ports, env, mounts, egress: None, failure: None }
}

/// The network of the Bodies: what the request asks for, and what palisade.toml asks for unless the request names a
/// preset.
fn work_network(
    up: &UpRequest,
    all: &[WorkspaceNeeds<'_>],
    say: Progress<'_>,
) -> Result<Option<Egress>, Failure> {
    let mut request = up.network.clone();
    let mut remotes = Vec::new();
    for (workspace, needs) in all {
        let own = workspace::remote_addresses(&workspace.repository);
        request.rules.extend(rules_of_repository(up, needs, &own, say)?);
        remotes.extend(own);
    }
    request.policy(&remotes)
}

/// The rules that a repository's palisade.toml asks for, as far as the request uses them.
fn rules_of_repository(
    up: &UpRequest,
    needs: &Needs,
    remotes: &[String],
    say: Progress<'_>,
) -> Result<Vec<EgressRule>, Failure> {
    if needs.network == NetworkSettings::default() {
        return Ok(Vec::new());
    }
    if up.repository_network == RepositoryNetwork::Ignore || !up.network.presets.is_empty() {
        let why = match up.repository_network {
            RepositoryNetwork::Ignore => "",
            RepositoryNetwork::Use => ": the request names a preset",
        };
        say(ProgressLine::Note(&format!("network: [network] of palisade.toml is not used here{why}")));
        return Ok(Vec::new());
    }
    let Some((asked, summary)) = repository_policy(&needs.network, remotes)? else { return Ok(Vec::new()) };
    say(ProgressLine::Note(&format!("network: {summary} (palisade.toml)")));
    Ok(asked.rules)
}

/// The key of a dependency layer: a hash of all inputs.
fn key(footing: &BaseTemplate, all: &[WorkspaceNeeds<'_>], base: &PreparedBase, layer: Layer) -> String {
    let steps: Vec<_> = all
        .iter()
        .map(|(workspace, needs)| {
            let installs = needs.requirements.iter().filter_map(|requirement| requirement.install.as_ref());
            json!([
                workspace.at(),
                needs.inputs,
                needs.steps.iter().chain(installs).map(|step| (&step.dir, &step.line)).collect::<Vec<_>>(),
                needs.allow
            ])
        })
        .collect();
    let tools: Vec<_> = base.mounts.iter().map(|mount| mount.source.display().to_string()).collect();
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let mut deciding = json!([
        footing.template,
        footing.state,
        base.user,
        std::env::consts::ARCH,
        steps,
        base.env,
        tools,
        system
    ]);
    // Only the layer on which a snapshot of files was taken can mount it.
    if let (true, Some(deciding)) = (layer != DEFAULT_LAYER, deciding.as_array_mut()) {
        deciding.push(json!(layer));
    }
    hex(&Sha256::digest(deciding.to_string().as_bytes()))
}
