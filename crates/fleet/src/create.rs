//! Creates a Body in five steps: resolve the template, draft and check the spec, prepare the driver's recipe, take a
//! pooled Body or claim a place for a new one, publish it.
//!
//! Invariant: a request that can be refused is refused before a directory, an id or an event of the Body exists.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Component, Path},
    sync::Arc,
};

use body::{
    BodyDir,
    driver::{self, Capability, Driver, LimitRequest, Origin, Recipe, SnapshotSource, StartMode},
    ids,
    process::{StartedBody, SupervisorHandle, guest_config},
    root::RootfsStack,
};
use proto::{
    BodyId, Draft, Enforcement, Failure, Kind, Layer, Limits, Spec,
    event_data::{BodyCreated, BodyFailed, BodyStarted, LeaseTerms},
    launch::RunRecord,
    spec::{BodyRole, Egress, Ids, Life, Mount, Network, PublicSpec},
};

use crate::{
    BodyView, Create, Fleet, Lease, OwnedBody, Status,
    blocking::run_blocking,
    drivers::DEFAULT_LAYER,
    failures, mounts,
    names::Names,
    network::check as check_rules,
    place::BodyPlace,
    pool::{PoolKey, PoolOrder},
    secrets::add_grant,
    templates::{ResolvedTemplate, start::ReadyWait},
    work::StepRunner,
};

/// Whether a Body is started for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartOccasion {
    First,
    Again,
    /// For prepare steps: the Body ends with this process, and so does its egress proxy.
    Prepare,
}

/// A Body whose request was checked; nothing of it exists on disk yet.
struct BodyDraft {
    driver: Arc<dyn Driver>,
    /// The spec, without an id and host ids.
    spec: Spec,
    rootfs: RootfsStack,
    origin: Origin,
    root: ids::MapRoot,
    lease: Option<Lease>,
    /// A lock that keeps `gc` from removing the layers below the Body.
    _layers: Option<File>,
}

/// The source of a new Body's guest.
enum GuestSource<'a> {
    /// The launcher starts it, from this recipe.
    Start(&'a dyn Recipe),
    /// It already runs: it comes from the pool.
    Pool(Box<StartedBody>),
}

const ENV_BYTES_MAX: usize = 128 << 10;
const PATH_LEN_MAX: usize = 4095;

impl Fleet {
    /// Creates a Body and starts its guest.
    pub async fn create(&self, request: Create) -> Result<BodyView, Failure> {
        let view = run_blocking(|| self.creator().create_now(request, None))?;
        match self.creator().await_template_start(view.clone()).await {
            Ok(view) => Ok(view),
            Err(failure) => {
                let _ = self.remove(view.id(), crate::Force::Yes).await;
                Err(failure)
            }
        }
    }
}

/// The steps that create a Body.
#[derive(Debug, Clone, Copy)]
pub struct Creator<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Creator<'_> {
    /// Waits until the start command of a new Body's template is ready.
    pub(crate) async fn await_template_start(&self, view: BodyView) -> Result<BodyView, Failure> {
        if let Some(start) = view.spec.base.as_ref().and_then(|base| base.start.as_ref()) {
            self.fleet.templates().start_template(view.id(), start, ReadyWait::NoNaps).await?;
        }
        for line in &view.spec.at_start {
            StepRunner { fleet: self.fleet }.run_at_start(view.id(), line).await?;
        }
        Ok(view)
    }

    /// Creates a Body. `parent` is the Body that it is forked from, if any.
    pub(crate) fn create_now(&self, request: Create, parent: Option<BodyId>) -> Result<BodyView, Failure> {
        let template = self.fleet.templates().resolve(&request.template)?;
        let taken_on = template.snapshot.as_ref().map(|source| source.manifest.layer);
        let layer = request.layer.or(taken_on).unwrap_or(DEFAULT_LAYER);
        self.create_on(layer, request, template, parent)
    }

    /// Creates a Body from a template that is already resolved.
    pub(crate) fn create_on(
        &self,
        layer: Layer,
        request: Create,
        template: ResolvedTemplate,
        parent: Option<BodyId>,
    ) -> Result<BodyView, Failure> {
        let mut draft = self.draft_body(layer, request, template, parent)?;
        let rootfs = std::mem::take(&mut draft.rootfs);
        let recipe = draft.driver.prepare(&draft.spec, rootfs, &draft.origin)?;
        let key = self.pool_key(&draft, &*recipe);
        let view = match key.as_ref().and_then(|key| self.take_pooled(key, &draft)) {
            Some((place, started)) => self.publish(&place, &draft, GuestSource::Pool(Box::new(started)))?,
            None => {
                let place = self.claim_place(&draft)?;
                self.publish(&place, &draft, GuestSource::Start(&*recipe))?
            }
        };
        if let (Some(pool), Some(key)) = (&self.fleet.pool, key) {
            pool.order(PoolOrder { key, driver: draft.driver.clone(), recipe, after: view.id().clone() });
        }
        self.fleet.workspaces().anchor_objects(view)
    }

    /// Combines a request with its template, and refuses a request that the layer, the host or the limits rule out.
    fn draft_body(
        &self,
        layer: Layer,
        mut request: Create,
        template: ResolvedTemplate,
        parent: Option<BodyId>,
    ) -> Result<BodyDraft, Failure> {
        let driver = self.fleet.drivers.get(layer)?.clone();
        request.name.as_ref().map_or(Ok(()), |name| Names::of(self.fleet).check(name))?;
        let mut rootfs = template.rootfs;
        let workspaces = or_default(std::mem::take(&mut request.workspaces), template.workspaces);
        rootfs.workspaces = self.fleet.workspaces().workspaces_below(&workspaces)?;
        let home = request.home.take().or(template.home);
        rootfs.home = self.fleet.homes().home_below(home.as_ref())?;
        let settings = template.settings;
        request.limits.memory = request.limits.memory.or(settings.memory);
        request.limits.cpu_milli = request.limits.cpu_milli.or(settings.cpu_milli);
        let layers = (template.base.is_some() || !workspaces.is_empty() || home.is_some())
            .then(|| self.fleet.garbage().building())
            .transpose()?;
        let origin = origin(template.snapshot, request.start_mode());
        let limits = driver.limits(&request.limits, request.life, &origin)?;
        let is_work = request.role == BodyRole::Work;
        let secrets = request.secrets.iter().filter(|_| is_work);
        let secrets = secrets.map(|name| self.fleet.secrets().find(name)).collect::<Result<Vec<_>, _>>()?;
        let mut egress = request.egress.or_else(|| (!secrets.is_empty()).then(Egress::default));
        let proxy = if egress.is_some() && is_work { self.fleet.egress().env() } else { BTreeMap::new() };
        let known = self.fleet.env.clone().into_iter().chain(proxy);
        let mut env: BTreeMap<String, String> = known.chain(settings.env).collect();
        secrets.iter().flat_map(|record| &record.env).for_each(|name| drop(env.remove(name)));
        env.extend(request.env);
        if let Some(egress) = &mut egress {
            secrets.iter().try_for_each(|record| add_grant(egress, &mut env, record))?;
            check_rules(&egress.all_rules())?;
        }
        check_env(&env)?;
        let mounts = request
            .mounts
            .iter()
            .map(|mount| check_mount(mount, &self.fleet.data))
            .collect::<Result<Vec<_>, _>>()?;
        let workdir = request.workdir.or(settings.workdir);
        workdir.as_deref().map_or(Ok(()), |path| check_inside(Path::new(path)))?;
        let spec = Spec {
            v: proto::spec::VERSION,
            id: BodyId::from_random([0; 12]),
            name: request.name,
            created_at: store::clock::now(),
            layer,
            engine: driver.engine(request.engine, &origin)?,
            template: request.template,
            snapshots: rootfs.snapshots.iter().map(|below| below.id.clone()).collect(),
            base: template.base,
            parent,
            limits,
            env,
            mounts,
            share: request.share,
            workspaces,
            home,
            at_start: or_default(request.at_start, template.at_start),
            ports: or_default(request.ports, template.ports),
            workdir,
            user: request.user.or(settings.user).unwrap_or_else(|| "user".into()),
            network: Network::Closed,
            egress,
            role: request.role,
            life: request.life,
            ids: Ids { users: Vec::new(), groups: Vec::new() },
        };
        driver::check(&*driver, &spec, &origin)?;
        let root = map_root(&spec, &rootfs);
        Ok(BodyDraft { driver, spec, rootfs, origin, root, lease: request.lease, _layers: layers })
    }

    /// The properties that a pooled Body must share with this draft; `None` if the draft cannot use the pool.
    fn pool_key(&self, draft: &BodyDraft, recipe: &dyn Recipe) -> Option<PoolKey> {
        let fresh = matches!(draft.origin, Origin::Template(StartMode::Restore));
        self.fleet.pool.as_ref().filter(|_| fresh)?;
        let shape = draft.driver.pool_shape(&draft.spec)?;
        Some(PoolKey { shape, root: draft.root, recipe: recipe.key() })
    }

    /// Takes a pooled Body and assigns the draft's identity to it. The pool ends a Body whose assignment fails.
    fn take_pooled(&self, key: &PoolKey, draft: &BodyDraft) -> Option<(BodyPlace, StartedBody)> {
        let pool = self.fleet.pool.as_ref()?;
        let mut pooled = pool.take(key)?;
        let spec = placed(&draft.spec, &pooled.place);
        match draft.driver.assign(&pooled.place.dir, &guest_config(&spec, &self.fleet.token(&spec.id))) {
            Ok(report) => {
                pooled.started.ready.revival = report.or(pooled.started.ready.revival);
                Some((pooled.place, pooled.started))
            }
            Err(_) => {
                pool.discard(pooled);
                None
            }
        }
    }

    /// Claims an id, a directory and host ids, and checks that the host ids are enough for the draft.
    fn claim_place(&self, draft: &BodyDraft) -> Result<BodyPlace, Failure> {
        let place = BodyPlace::claim(&self.fleet.drivers.context, draft.root)?;
        match check_ids(draft, &place.ids) {
            Ok(()) => Ok(place),
            Err(failure) => {
                place.clear(&self.fleet.drivers.context);
                Err(failure)
            }
        }
    }

    /// Turns a claimed place into a Body: writes its records and starts its guest. Removes the place if that fails.
    fn publish(
        &self,
        place: &BodyPlace,
        draft: &BodyDraft,
        guest: GuestSource<'_>,
    ) -> Result<BodyView, Failure> {
        let spec = placed(&draft.spec, place);
        match self.record_and_start(&place.dir, &spec, draft, guest) {
            Ok((enforcement, pid)) => Ok(BodyView {
                missing_steps: self.fleet.workspaces().missing_steps(&spec),
                spec,
                status: Status::Running,
                end: None,
                pid: Some(pid),
                enforcement,
                receipt: place.dir.revival(),
            }),
            Err(failure) => {
                let _ =
                    body::snapshot::remove(&self.fleet.launch_context.programs, &spec.ids, place.dir.path());
                let _ = self.fleet.egress().close(&spec.id);
                self.fleet.steps.release(&spec.id);
                let data = BodyFailed { why: failure.to_string(), causes: failure.causes() };
                let _ = self.fleet.log().append_end(&spec.id, None, data);
                if draft.lease.is_some() {
                    self.fleet.leases().forget(&spec.id);
                }
                ids::release(&self.fleet.data, &spec.ids, &spec.id);
                Err(failure)
            }
        }
    }

    fn record_and_start(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        draft: &BodyDraft,
        guest: GuestSource<'_>,
    ) -> Result<(Enforcement, i32), Failure> {
        self.fleet.steps.hold(dir, spec)?;
        if let Some(terms) = &draft.lease {
            self.fleet.leases().create(&spec.id, terms)?;
        }
        let name_lock = Names::of(self.fleet).lock(spec)?;
        dir.draft_spec(spec).map_err(|error| failures::dir(&spec.id, error))?;
        drop(name_lock);
        let terms = draft.lease.as_ref().map(LeaseTerms::from);
        let created = Draft::about(&spec.id, BodyCreated { spec: PublicSpec::new(spec), lease: terms });
        let (recorded, started) = match guest {
            GuestSource::Pool(started) => (self.fleet.append(created), *started),
            GuestSource::Start(recipe) => {
                self.fleet.egress().prepare(spec)?;
                let starting = recipe.begin(
                    self.fleet.supervisors.take_launcher()?,
                    dir,
                    spec,
                    &self.fleet.token(&spec.id),
                )?;
                self.fleet.supervisors.prestart_launcher();
                // The event is appended while the launcher works.
                let recorded = self.fleet.append(created);
                (recorded, starting.finish().map_err(cannot_start)?)
            }
        };
        match recorded {
            Ok(_) => self.register_running(started, dir, spec, StartOccasion::First),
            Err(failure) => {
                self.kill_now(dir, started.supervisor);
                Err(failure)
            }
        }
    }

    /// Starts the guest of a Body that was started before. The caller holds the Body's lock.
    pub(crate) fn start_again(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        recipe: &dyn Recipe,
        occasion: StartOccasion,
    ) -> Result<(), Failure> {
        self.fleet.egress().prepare(spec)?;
        let starting =
            recipe.begin(self.fleet.supervisors.take_launcher()?, dir, spec, &self.fleet.token(&spec.id))?;
        let started = starting.finish().map_err(cannot_start)?;
        self.register_running(started, dir, spec, occasion).map(drop)
    }

    /// Kills a Body whose event could not be appended.
    fn kill_now(&self, dir: &BodyDir, mut supervisor: SupervisorHandle) {
        if let Ok(Some(running)) = dir.running() {
            let _ = body::process::kill(dir, &running);
        }
        supervisor.reap();
    }

    /// Records that the guest runs. A new Body exists for other processes from then on.
    fn register_running(
        &self,
        started: StartedBody,
        dir: &BodyDir,
        spec: &Spec,
        start: StartOccasion,
    ) -> Result<(Enforcement, i32), Failure> {
        let StartedBody { enforcement, ready, mut supervisor, cgroups } = started;
        let data =
            BodyStarted { pid: ready.pid, enforcement: enforcement.clone(), receipt: ready.revival.clone() };
        let kept = match &ready.revival {
            None => Ok(()),
            Some(report) => {
                self.fleet.drivers.get(spec.layer)?.note_started(spec, report);
                dir.write_receipt(report).map_err(|error| {
                    Failure::new(Kind::Host, "cannot store the receipt of the Body")
                        .because(error)
                        .hint("make room: pal gc")
                })
            }
        };
        let written = kept.and_then(|()| self.fleet.append(Draft::about(&spec.id, data)).map(drop));
        let publish = || match start {
            StartOccasion::First => dir.publish().map_err(|error| failures::dir(&spec.id, error)),
            StartOccasion::Again | StartOccasion::Prepare => Ok(()),
        };
        if let Err(failure) = written.and_then(|()| publish()) {
            self.kill_now(dir, supervisor);
            return Err(failure);
        }
        // The Body of a step ends with this process, too.
        if spec.life == Life::Kept && spec.role == BodyRole::Work && start != StartOccasion::Prepare {
            supervisor.detach();
        }
        let running = RunRecord {
            boot_id: String::new(),
            pid: ready.pid,
            ticks: ready.ticks,
            supervisor: ready.supervisor,
            supervisor_ticks: Some(ready.supervisor_ticks),
            cgroups,
        };
        let owned = OwnedBody { supervisor, running, spec: spec.clone(), recorded: false };
        self.fleet.supervisors.owned().insert(spec.id.clone(), owned);
        Ok((enforcement, ready.pid))
    }

    /// Computes the limits of a Body with this request, or explains why the host cannot provide them.
    pub fn limits(&self, request: &Create) -> Result<Limits, Failure> {
        let driver = self.fleet.drivers.get(request.layer.unwrap_or(DEFAULT_LAYER))?;
        driver.limits(&request.limits, request.life, &Origin::Template(request.start_mode()))
    }

    /// The limits of a Body like this one whose caller asks for none.
    pub fn default_limits(&self, spec: &Spec) -> Result<Limits, Failure> {
        let driver = self.fleet.drivers.get(spec.layer)?;
        driver.limits(&LimitRequest::default(), spec.life, &Origin::Template(StartMode::Restore))
    }

    /// Checks that a layer is set up on this host. The failure says how to set it up.
    pub fn readiness(&self, layer: Layer) -> Result<(), Failure> {
        self.fleet.drivers.get(layer)?.readiness()
    }
}

/// The caller's values, or the template's if the caller gave none.
fn or_default<T>(asked: Vec<T>, template: Vec<T>) -> Vec<T> {
    if asked.is_empty() { template } else { asked }
}

fn origin(snapshot: Option<SnapshotSource>, mode: StartMode) -> Origin {
    match snapshot {
        Some(source) => Origin::Snapshot(Box::new(source), mode),
        None => Origin::Template(mode),
    }
}

/// The draft's spec with the id and the host ids of a claimed place.
fn placed(spec: &Spec, place: &BodyPlace) -> Spec {
    Spec { id: place.id.clone(), ids: place.ids.clone(), ..spec.clone() }
}

/// Whether a Body needs root inside its user namespace.
fn map_root(spec: &Spec, rootfs: &RootfsStack) -> ids::MapRoot {
    // A Body with only one id cannot see files that were written under many ids.
    let many = rootfs.ids().any(Ids::has_root);
    let kept = spec.life == Life::Kept;
    match spec.user == "root" || kept || spec.base.is_some() || many || spec.share.is_some() {
        true => ids::MapRoot::Yes,
        false => ids::MapRoot::No,
    }
}

/// Refuses host ids that are too few for the draft.
fn check_ids(draft: &BodyDraft, claimed: &Ids) -> Result<(), Failure> {
    let spec = &draft.spec;
    // virtiofsd, which shares a directory with a microVM, acts under every id of the Body.
    if spec.share.is_some() && !claimed.has_root() {
        return Err(root_unavailable());
    }
    if draft.driver.capabilities().contains(Capability::OwnIds) {
        return Ok(());
    }
    if spec.base.is_some() && !ids::is_whole(claimed) {
        return Err(failures::ids(ids::IdsError::TooFew));
    }
    if spec.user == "root" && !claimed.has_root() { Err(root_unavailable()) } else { Ok(()) }
}

fn cannot_start(error: body::process::ProcessError) -> Failure {
    failures::process("cannot start the Body", error)
}

fn root_unavailable() -> Failure {
    Failure::new(Kind::Host, "this Body cannot have root inside: only your own user id can be mapped")
        .hint("install the helpers: apt-get install uidmap")
        .hint("and give yourself ids: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER")
}

pub(crate) fn check_env(env: &std::collections::BTreeMap<String, String>) -> Result<(), Failure> {
    let total: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    let bad = env
        .iter()
        .find(|(name, value)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0'));
    match bad {
        Some((name, _)) => {
            Err(Failure::new(Kind::Usage, format!("{name:?} cannot be an environment variable"))
                .hint("write --env NAME=VALUE"))
        }
        None if total > ENV_BYTES_MAX => {
            Err(Failure::new(Kind::Usage, "the environment is longer than 128 KiB"))
        }
        None => Ok(()),
    }
}

fn check_mount(mount: &Mount, data: &Path) -> Result<Mount, Failure> {
    check_inside(&mount.target)?;
    let forbidden = ["/", "/proc", "/sys", "/dev"];
    let plain: std::path::PathBuf = mount.target.components().collect();
    if forbidden.iter().any(|place| plain == Path::new(place))
        || ["/proc", "/sys", "/dev"].iter().any(|place| plain.starts_with(place))
    {
        return Err(Failure::new(Kind::Usage, format!("nothing can be mounted at {}", plain.display()))
            .hint("choose another place, such as /mnt"));
    }
    let source = mount.source.canonicalize().map_err(|error| {
        Failure::new(Kind::NotFound, format!("cannot mount {}", mount.source.display()))
            .because(error)
            .hint("name a file or directory that exists")
    })?;
    if source.to_str().is_none() || plain.to_str().is_none() {
        // Mounts are part of the spec, which is JSON, so their paths must be UTF-8.
        return Err(Failure::new(
            Kind::Usage,
            format!("cannot mount {}: its path is not UTF-8", source.display()),
        )
        .hint("mount the directory above it"));
    }
    mounts::check(&source, mount.access, data)?;
    Ok(Mount { source, target: plain, access: mount.access })
}

/// Checks a path inside a Body: absolute, without `..`, and not too long.
pub(crate) fn check_inside(path: &Path) -> Result<(), Failure> {
    let bytes = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str());
    let climbs = path.components().any(|part| part == Component::ParentDir);
    if !path.is_absolute() || climbs || bytes.contains(&0) || bytes.len() > PATH_LEN_MAX {
        return Err(Failure::new(
            Kind::Usage,
            format!("{:?} is not a path inside a Body", proto::text::visible(&path.to_string_lossy())),
        )
        .hint("name it from `/`, without `..`"));
    }
    Ok(())
}
