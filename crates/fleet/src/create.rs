//! Making a Body: checked first, written down, then made.

use std::path::{Component, Path};

use body::{
    BodyDir,
    dir::BodyLock,
    ids,
    process::{Launcher, StartedBody, StartingBody},
    root::RootfsStack,
    vm::record::VmRecord,
};
use proto::{
    BodyId, Draft, Enforcement, Failure, Kind, Layer, Limits, Spec,
    event_data::{BodyCreated, BodyFailed, BodyStarted, LeaseTerms},
    launch::RunRecord,
    limits::HostCapacity,
    spec::{Ids, Life, Mount, Network, PublicSpec},
};

use crate::{
    BodyView, Create, Fleet, Lease, OwnedBody, Status, failures, lease, mounts,
    parked::{BodyShape, PooledBody},
    templates::{ResolvedTemplate, start::ReadyWait},
    vm::{self, vm_pool::SpareVm},
};

/// Which start of a Body that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StartOccasion {
    First,
    Again,
}

/// A machine that runs and nobody knows of. Dropped, it ends, and that is waited for: its ids and its directory go next.
struct UnpublishedVm(Option<StartedBody>);

impl Drop for UnpublishedVm {
    fn drop(&mut self) {
        if let Some(made) = &mut self.0 {
            made.supervisor.reap();
        }
    }
}

const ENV_BYTES_MAX: usize = 128 << 10;
const PATH_LEN_MAX: usize = 4095;

impl Fleet {
    /// Makes a Body and starts its guest.
    pub async fn create(&self, request: Create) -> Result<BodyView, Failure> {
        let view = self.create_now(request, None)?;
        match self.await_template_start(view.clone()).await {
            Ok(view) => Ok(view),
            Err(failure) => {
                let _ = self.remove(view.id(), crate::Force::Yes).await;
                Err(failure)
            }
        }
    }

    /// A Body that just came up, once what its template runs is ready.
    pub(crate) async fn await_template_start(&self, view: BodyView) -> Result<BodyView, Failure> {
        if let Some(start) = view.spec.base.as_ref().and_then(|base| base.start.as_ref()) {
            self.templates().start_template(view.id(), start, ReadyWait::NoNaps).await?;
        }
        for line in &view.spec.at_start {
            self.workspaces().run_at_start(view.id(), line).await?;
        }
        Ok(view)
    }

    /// The same for a fork: `parent` is written down.
    pub(crate) fn create_now(&self, request: Create, parent: Option<BodyId>) -> Result<BodyView, Failure> {
        let origin = self.templates().resolve(&request.template)?;
        let layer = choose_layer(request.layer.or(origin.machine.as_ref().map(|_| Layer::Microvm)))?;
        self.create_on(layer, request, origin, parent)
    }

    /// The same for what was found already.
    pub(crate) fn create_on(
        &self,
        layer: Layer,
        mut request: Create,
        origin: ResolvedTemplate,
        parent: Option<BodyId>,
    ) -> Result<BodyView, Failure> {
        let ResolvedTemplate { mut rootfs, base, settings, workspaces, home, at_start, ports, machine } =
            origin;
        let workspaces =
            if request.workspaces.is_empty() { workspaces } else { std::mem::take(&mut request.workspaces) };
        rootfs.workspaces = self.workspaces().workspaces_below(&workspaces)?;
        let home = request.home.take().or(home);
        rootfs.home = self.homes().home_below(home.as_ref())?;
        let at_start =
            if request.at_start.is_empty() { at_start } else { std::mem::take(&mut request.at_start) };
        let ports = if request.ports.is_empty() { ports } else { std::mem::take(&mut request.ports) };
        request.limits.memory = request.limits.memory.or(settings.memory);
        request.limits.cpu_milli = request.limits.cpu_milli.or(settings.cpu_milli);
        request.workdir = request.workdir.or(settings.workdir);
        request.user = request.user.or(settings.user);
        request.env = settings.env.into_iter().chain(std::mem::take(&mut request.env)).collect();
        // From here on nobody clears its layers away.
        let _standing = (base.is_some() || !workspaces.is_empty() || home.is_some())
            .then(|| self.garbage().building())
            .transpose()?;
        check_layer(layer, &rootfs, machine.as_ref())?;
        if layer != Layer::Microvm && request.engine.is_some() {
            return Err(Failure::new(Kind::Usage, format!("a Body on layer {layer} has no hypervisor"))
                .hint("leave --engine out, or choose `--layer microvm`"));
        }
        if layer != Layer::Microvm && request.share.is_some() {
            return Err(vm::no_sharing_on_layer(layer));
        }
        if layer == Layer::Microvm {
            if let Some((_, machine)) = &machine {
                vm::inherit(&mut request, machine)?;
            }
            request.limits = self.machine_limits(&request);
            vm::check(&request)?;
        }
        let limits = self.limits_on(layer, &request)?;
        check_env(&request.env)?;
        let mounts = request.mounts.iter().map(check_mount).collect::<Result<Vec<_>, _>>()?;
        request.workdir.as_deref().map_or(Ok(()), |path| check_inside(Path::new(path)))?;
        let user = request.user.clone().unwrap_or_else(|| "user".into());
        // An ordinary user cannot show what was written under many ids to a Body that has one.
        let many = rootfs.ids().any(Ids::has_root);
        let shares = request.share.is_some();
        let root = if user == "root" || request.life == Life::Kept || base.is_some() || many || shares {
            ids::MapRoot::Yes
        } else {
            ids::MapRoot::No
        };
        let spec = Spec {
            v: proto::spec::VERSION,
            id: BodyId::from_random([0; 12]),
            created_at: store::clock::now(),
            layer,
            engine: self.engine_of(layer, request.engine, machine.as_ref().map(|(_, machine)| machine))?,
            template: request.template,
            snapshots: rootfs.snapshots.iter().map(|below| below.id.clone()).collect(),
            base,
            parent,
            limits,
            env: request.env,
            mounts,
            share: request.share,
            workspaces,
            home,
            at_start,
            ports,
            workdir: request.workdir,
            user,
            network: Network::Closed,
            egress: request.egress,
            role: request.role,
            life: request.life,
            ids: Ids { users: Vec::new(), groups: Vec::new() },
        };
        let terms = request.lease.as_ref();
        if layer == Layer::Microvm {
            // Its images hold one commit: a microVM of a boot snapshot would hardly be needed a second time.
            let is_of_repository =
                !spec.workspaces.is_empty() || spec.home.is_some() || !spec.snapshots.is_empty();
            let parts = match &machine {
                Some((dir, machine)) => self.thawed_parts(&spec, &rootfs, dir, machine, request.cold)?,
                None if request.cold || spec.share.is_some() || is_of_repository => {
                    self.parts(&spec, &rootfs)?
                }
                None => {
                    return self
                        .workspaces()
                        .anchor_objects(self.make_warm_or_spare(spec, root, terms, rootfs)?);
                }
            };
            rootfs.vm = Some(parts);
        }
        let Some(yard) = &self.yard else {
            return self.workspaces().anchor_objects(self.make(spec, root, terms, &rootfs)?);
        };
        let shape = BodyShape::of(&spec);
        let made = match yard.take(&shape, root) {
            Some(parked) => self.claim_pooled(parked, spec, terms),
            None => self.make(spec, root, terms, &rootfs),
        };
        yard.refill(shape, root);
        self.workspaces().anchor_objects(made?)
    }

    /// Makes a Body from its spec, which still lacks an id and ids.
    fn make(
        &self,
        spec: Spec,
        root: ids::MapRoot,
        terms: Option<&Lease>,
        rootfs: &RootfsStack,
    ) -> Result<BodyView, Failure> {
        let launcher = self.launcher()?;
        // Before its ids: a claim whose Body has no directory is anybody's.
        let (id, dir, _lock) = self.new_dir()?;
        let claimed = ids::claim(&self.data, &id, root).map_err(failures::ids);
        let claimed = claimed.and_then(|claimed| match &spec.base {
            // What shares a directory acts under every id that the machine has.
            _ if spec.share.is_some() && !claimed.has_root() => Err(root_unavailable()),
            // A machine has a root of its own whoever runs its hypervisor.
            _ if spec.layer == Layer::Microvm => Ok(claimed),
            Some(_) if !ids::is_whole(&claimed) => Err(failures::ids(ids::IdsError::TooFew)),
            _ if spec.user == "root" && !claimed.has_root() => Err(root_unavailable()),
            _ => Ok(claimed),
        });
        let claimed = claimed.inspect_err(|_| drop(std::fs::remove_dir_all(dir.path())))?;
        let spec = Spec { id, ids: claimed, ..spec };
        let making = |draft| {
            let begun = self.begin(launcher, &dir, &spec, rootfs)?;
            self.prestart_launcher();
            self.start_guest(begun, &dir, &spec, Some(draft))
        };
        self.publish(&dir, &spec, terms, making)
    }

    /// Makes a machine of a template: of one that waits for this, or thawed where its template's was frozen.
    fn make_warm_or_spare(
        &self,
        spec: Spec,
        root: ids::MapRoot,
        terms: Option<&Lease>,
        mut rootfs: RootfsStack,
    ) -> Result<BodyView, Failure> {
        let parts = self.parts(&spec, &rootfs)?;
        let like = self.pool_key(&spec, root, &parts);
        if let Some((like, spare)) =
            like.as_ref().and_then(|like| Some((like, self.take_spare(like, &spec)?)))
        {
            let rootfs = spare.rootfs();
            let view = self.claim_vm(spare, spec, terms)?;
            self.request_spare(like.clone(), &view, rootfs);
            return Ok(view);
        }
        rootfs.vm = Some(self.use_boot_snapshot(&spec, &rootfs, parts)?);
        let view = self.make(spec, root, terms, &rootfs)?;
        if let Some(like) = like {
            self.request_spare(like, &view, rootfs);
        }
        Ok(view)
    }

    /// Makes known a machine that waited, and has proved whose it is.
    fn claim_vm(&self, spare: SpareVm, spec: Spec, terms: Option<&Lease>) -> Result<BodyView, Failure> {
        let (id, ids) = spare.who();
        let SpareVm { dir, made, lock: _lock, .. } = spare;
        let spec = &Spec { id, ids, ..spec };
        let (place, mut unknown) = (&dir, UnpublishedVm(Some(made)));
        let making = move |draft| {
            self.append(draft)?;
            let made =
                unknown.0.take().ok_or_else(|| Failure::new(Kind::Internal, "a spare was given twice"))?;
            self.register_running(made, place, spec, StartOccasion::First)
        };
        self.publish(&dir, spec, terms, making)
    }

    /// Makes known a Body that was made before it was asked for.
    fn claim_pooled(
        &self,
        parked: PooledBody,
        spec: Spec,
        terms: Option<&Lease>,
    ) -> Result<BodyView, Failure> {
        let PooledBody { id, dir, ids, begun, lock: _lock, .. } = parked;
        let spec = Spec { id, ids, ..spec };
        let making = |draft| self.start_guest(begun, &dir, &spec, Some(draft));
        self.publish(&dir, &spec, terms, making)
    }

    /// A directory that is locked from its beginning. In between `gc` may take it for a leftover; then another is made.
    fn new_dir(&self) -> Result<(BodyId, BodyDir, BodyLock), Failure> {
        let cannot = |what: &str, error: std::io::Error| {
            Failure::new(Kind::Host, what.to_owned()).because(error).hint("make room: pal gc")
        };
        loop {
            let id = sys::random::bytes()
                .map(BodyId::from_random)
                .map_err(|error| cannot("cannot draw an id", error))?;
            let dir = BodyDir::create(self.body_path(&id))
                .map_err(|error| cannot("cannot make the Body's directory", error))?;
            match dir.try_lock() {
                Ok(Some(lock)) => return Ok((id, dir, lock)),
                Ok(None) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    let _ = std::fs::remove_dir_all(dir.path());
                    return Err(cannot("cannot lock the Body", error));
                }
            }
        }
    }

    /// Writes a new Body down, on the way to being one; what cannot be one is taken away.
    fn publish(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        terms: Option<&Lease>,
        making: impl FnOnce(Draft) -> Result<(Enforcement, i32), Failure>,
    ) -> Result<BodyView, Failure> {
        let leased = self.steps.hold(dir, spec).and_then(|()| {
            terms.map_or(Ok(()), |terms| {
                lease::write(dir, terms).map_err(|error| {
                    Failure::new(Kind::Host, "cannot write the Body's lease")
                        .because(error)
                        .hint("make room: pal gc")
                })
            })
        });
        let drafted =
            leased.and_then(|()| dir.draft_spec(spec).map_err(|error| failures::dir(&spec.id, error)));
        let made = drafted.and_then(|()| {
            let data = BodyCreated { spec: PublicSpec::new(spec), lease: terms.map(LeaseTerms::from) };
            making(Draft::about(&spec.id, data))
        });
        match made {
            Ok((enforcement, pid)) => Ok(BodyView {
                spec: spec.clone(),
                status: Status::Running,
                end: None,
                pid: Some(pid),
                enforcement,
                receipt: dir.revival(),
            }),
            Err(failure) => {
                let _ = body::snapshot::remove(&self.launch_context.programs, &spec.ids, dir.path());
                let _ = self.egress().close(&spec.id);
                self.steps.release(&spec.id);
                let data = BodyFailed { why: failure.to_string(), causes: failure.causes() };
                let _ = self.append(Draft::about(&spec.id, data));
                ids::release(&self.data, &spec.ids, &spec.id);
                Err(failure)
            }
        }
    }

    /// Hands the launcher its plan.
    pub(crate) fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        rootfs: &RootfsStack,
    ) -> Result<StartingBody, Failure> {
        self.egress().prepare(spec)?;
        let begun = self.launch_context.begin(launcher, dir, spec, &self.token(&spec.id), rootfs);
        begun.map_err(|error| failures::process("cannot start the Body", error))
    }

    /// Waits for the guest of a Body whose lock the caller holds. `before` is written while the launcher works; if it
    /// cannot be, the Body is ended before it could do anything.
    pub(crate) fn start_guest(
        &self,
        begun: StartingBody,
        dir: &BodyDir,
        spec: &Spec,
        before: Option<Draft>,
    ) -> Result<(Enforcement, i32), Failure> {
        let start = if before.is_some() { StartOccasion::First } else { StartOccasion::Again };
        let written = before.map_or(Ok(()), |before| self.append(before).map(drop));
        let made = begun.finish().map_err(|error| failures::process("cannot start the Body", error))?;
        match written {
            Ok(()) => self.register_running(made, dir, spec, start),
            Err(failure) => {
                self.kill_now(dir, made.supervisor);
                Err(failure)
            }
        }
    }

    /// One that cannot be written down.
    fn kill_now(&self, dir: &BodyDir, mut supervisor: body::process::SupervisorHandle) {
        if let Ok(Some(running)) = dir.running() {
            let _ = body::process::kill(dir, &running);
        }
        supervisor.reap();
    }

    /// Writes down that a guest runs; from then on a new Body is one.
    fn register_running(
        &self,
        made: StartedBody,
        dir: &BodyDir,
        spec: &Spec,
        start: StartOccasion,
    ) -> Result<(Enforcement, i32), Failure> {
        let StartedBody { enforcement, ready, mut supervisor, cgroups } = made;
        let data =
            BodyStarted { pid: ready.pid, enforcement: enforcement.clone(), receipt: ready.revival.clone() };
        let kept = ready.revival.as_ref().map_or(Ok(()), |revival| {
            self.record_boot(spec, revival);
            dir.write_receipt(revival).map_err(|error| {
                Failure::new(Kind::Host, "cannot keep the receipt of the machine")
                    .because(error)
                    .hint("make room: pal gc")
            })
        });
        let started = Draft::about(&spec.id, data);
        let written = kept.and_then(|()| self.append(started).map(drop));
        // A new Body is one from here on.
        let published = || match start {
            StartOccasion::First => dir.publish().map_err(|error| failures::dir(&spec.id, error)),
            StartOccasion::Again => Ok(()),
        };
        if let Err(failure) = written.and_then(|()| published()) {
            self.kill_now(dir, supervisor);
            return Err(failure);
        }
        if spec.life == Life::Kept {
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
        let held = OwnedBody { supervisor, running, spec: spec.clone(), told: false };
        self.owned_bodies().insert(spec.id.clone(), held);
        Ok((enforcement, ready.pid))
    }

    /// The limits that a Body of this request has, or why it cannot have them here.
    pub fn limits(&self, request: &Create) -> Result<Limits, Failure> {
        match request.layer.unwrap_or(Layer::Process) {
            Layer::Microvm => {
                let limits = self.machine_limits(request);
                self.limits_on(Layer::Microvm, &Create { limits, ..request.clone() })
            }
            layer => self.limits_on(layer, request),
        }
    }

    fn limits_on(&self, layer: Layer, request: &Create) -> Result<Limits, Failure> {
        let host = self.launch_context.capacity;
        let mut limits = Limits::default_on(host);
        let asked = &request.limits;
        limits.memory = asked.memory.unwrap_or(limits.memory);
        limits.cpu_milli = asked.cpu_milli.unwrap_or(limits.cpu_milli);
        limits.pids = asked.pids.unwrap_or(limits.pids);
        limits.files = asked.files.unwrap_or(limits.files);
        limits.output = asked.output.unwrap_or(limits.output);
        limits.wall_ms = asked.wall.map(|wall| wall.as_millis() as u64);
        limits.disk = match (asked.disk, request.life) {
            (Some(disk), _) => disk,
            // Files in memory count as memory, so they get at most half of it.
            (None, Life::Run) => proto::Size((limits.memory.0 / 2).max(proto::limits::DISK_MIN.0)),
            (None, Life::Kept) => proto::Size((host.disk.0 / 4).max(proto::limits::DISK_MIN.0)),
        };
        limits.inodes = asked.inodes.unwrap_or_else(|| Limits::inodes_of(limits.disk));
        // What is in memory needs no room on the disk.
        let host = if request.life == Life::Run && layer != Layer::Microvm {
            HostCapacity { disk: host.memory, ..host }
        } else {
            host
        };
        limits.check(host).map_err(|error| {
            Failure::new(Kind::Usage, error.to_string()).hint("see this host's capacity: pal doctor")
        })?;
        Ok(limits)
    }
}

fn root_unavailable() -> Failure {
    Failure::new(Kind::Host, "this Body cannot have a root inside: only your own id can be mapped")
        .hint("install the helpers: apt-get install uidmap")
        .hint("and give yourself ids: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER")
}

/// A snapshot goes on only on the layer it was taken on.
fn check_layer(
    layer: Layer,
    rootfs: &RootfsStack,
    machine: Option<&(std::path::PathBuf, VmRecord)>,
) -> Result<(), Failure> {
    let taken_on = match (machine, rootfs.snapshots.first()) {
        (Some(_), _) => Layer::Microvm,
        (None, Some(snapshot)) => snapshot.layer,
        (None, None) => return Ok(()),
    };
    if taken_on == layer {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Usage,
        format!("the snapshot was taken on layer {taken_on}, and cannot go on on layer {layer}"),
    )
    .hint(format!("choose it: --layer {taken_on}")))
}

/// Without a request the strongest layer that runs at interactive speed here: on this floor the process layer.
fn choose_layer(asked: Option<Layer>) -> Result<Layer, Failure> {
    match asked {
        None | Some(Layer::Process) => Ok(Layer::Process),
        // Never without being asked for: emulated it is slow.
        Some(Layer::Microvm) => Ok(Layer::Microvm),
        Some(other) => {
            Err(Failure::new(Kind::Host, format!("this pal cannot start a Body on layer {other}"))
                .hint("choose `--layer process` (shares the host's kernel)"))
        }
    }
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

fn check_mount(mount: &Mount) -> Result<Mount, Failure> {
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
        // Specs name their mounts, and specs are JSON.
        return Err(Failure::new(
            Kind::Usage,
            format!("cannot mount {}: its name is no UTF-8", source.display()),
        )
        .hint("mount the directory above it"));
    }
    mounts::check_git(&source, mount.access)?;
    Ok(Mount { source, target: plain, access: mount.access })
}

/// A path inside a Body, as a spec may name it.
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
