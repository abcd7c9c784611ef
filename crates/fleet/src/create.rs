//! Making a Body: checked first, written down, then made.

use std::path::{Component, Path};

use body::{
    BodyDir,
    dir::Lock,
    ids,
    process::{Begun, Launcher, Made},
    root::Under,
    vm::{Parts, record::Machine},
};
use proto::{
    BodyId, Draft, Enforcement, Failure, Kind, Layer, Limits, Spec,
    launch::Running,
    limits::HostCapacity,
    spec::{Ids, Life, Mount, Network},
};
use serde_json::json;

use crate::{
    Create, ExecRequest, Fleet, Held, Lease, Opened, Status, View, exec, failures, lease,
    parked::{Parked, Shape},
    templates::{Origin, start::Patience},
    vm::{self, spare::Spare},
};

/// What is written down before a new Body is one.
pub(crate) struct Before<'a> {
    created: Draft,
    first: Option<&'a ExecRequest>,
    beside: Option<vm::Beside<'a>>,
}

/// What is asked for with a Body beyond its spec.
#[derive(Clone, Copy)]
struct Wishes<'a> {
    terms: Option<&'a Lease>,
    first: Option<&'a ExecRequest>,
    beside: Option<vm::Beside<'a>>,
}

/// Which start of a Body that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    First,
    Again,
}

impl<'a> Wishes<'a> {
    fn before(self, created: Draft) -> Before<'a> {
        Before { created, first: self.first, beside: self.beside }
    }
}

/// A machine that runs and nobody knows of. Dropped, it ends, and that is waited for: its ids and its directory go next.
struct Unknown(Option<Made>);

impl Drop for Unknown {
    fn drop(&mut self) {
        if let Some(made) = &mut self.0 {
            made.tether.bury();
        }
    }
}

const ENV_BYTES_MAX: usize = 128 << 10;
const PATH_LEN_MAX: usize = 4095;

impl Fleet {
    /// Makes a Body and starts its guest.
    pub async fn create(&self, request: Create) -> Result<View, Failure> {
        let view = self.create_now(request, None)?;
        match self.started(view.clone()).await {
            Ok(view) => Ok(view),
            Err(failure) => {
                let _ = self.remove(view.id(), crate::Force::Yes).await;
                Err(failure)
            }
        }
    }

    /// A Body that just came up, once what its template runs is ready.
    pub(crate) async fn started(&self, view: View) -> Result<View, Failure> {
        if let Some(start) = view.spec.base.as_ref().and_then(|base| base.start.as_ref()) {
            self.start_template(view.id(), start, Patience::NoNaps).await?;
        }
        for line in &view.spec.at_start {
            self.run_at_start(view.id(), line).await?;
        }
        Ok(view)
    }

    /// The same for a fork: `parent` is written down.
    pub(crate) fn create_now(&self, request: Create, parent: Option<BodyId>) -> Result<View, Failure> {
        let origin = self.origin(&request.template)?;
        let layer = choose_layer(request.layer.or(origin.machine.as_ref().map(|_| Layer::Microvm)))?;
        self.create_on(layer, request, origin, parent)
    }

    /// The same for what was found already.
    pub(crate) fn create_on(
        &self,
        layer: Layer,
        request: Create,
        origin: Origin,
        parent: Option<BodyId>,
    ) -> Result<View, Failure> {
        self.create_with(layer, request, origin, parent, None)
    }

    /// The same for a fork of a machine that is still being frozen: `beside` waits for that.
    pub(crate) fn create_beside(
        &self,
        request: Create,
        origin: Origin,
        parent: BodyId,
        beside: vm::Beside<'_>,
    ) -> Result<View, Failure> {
        self.create_with(Layer::Microvm, request, origin, Some(parent), Some(beside))
    }

    fn create_with(
        &self,
        layer: Layer,
        mut request: Create,
        origin: Origin,
        parent: Option<BodyId>,
        beside: Option<vm::Beside<'_>>,
    ) -> Result<View, Failure> {
        let Origin { mut under, base, settings, workspaces, home, at_start, ports, machine } = origin;
        let workspaces =
            if request.workspaces.is_empty() { workspaces } else { std::mem::take(&mut request.workspaces) };
        under.workspaces = self.workspaces_below(&workspaces)?;
        let home = request.home.take().or(home);
        under.home = self.home_below(home.as_ref())?;
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
            .then(|| self.building())
            .transpose()?;
        fits_layer(layer, &under, machine.as_ref())?;
        if layer != Layer::Microvm && request.engine.is_some() {
            return Err(Failure::new(Kind::Usage, format!("a Body on layer {layer} has no hypervisor"))
                .hint("leave --engine out, or choose `--layer microvm`"));
        }
        if layer != Layer::Microvm && request.share.is_some() {
            return Err(vm::wrong_layer(layer));
        }
        if layer == Layer::Microvm {
            if let Some((_, machine)) = &machine {
                vm::inherit(&mut request, machine)?;
            }
            request.limits = self.machine_limits(&request);
            vm::check(&request, !workspaces.is_empty() || home.is_some() || request.egress.is_some())?;
        }
        let limits = self.limits_on(layer, &request)?;
        check_env(&request.env)?;
        let mounts = request.mounts.iter().map(check_mount).collect::<Result<Vec<_>, _>>()?;
        request.workdir.as_deref().map_or(Ok(()), |path| check_inside(Path::new(path)))?;
        let user = request.user.clone().unwrap_or_else(|| "user".into());
        // An ordinary user cannot show what was written under many ids to a Body that has one.
        let many = under.ids().any(Ids::has_root);
        let shares = request.share.is_some();
        let root = if user == "root" || request.life == Life::Kept || base.is_some() || many || shares {
            ids::Root::Wanted
        } else {
            ids::Root::Unneeded
        };
        let spec = Spec {
            v: proto::spec::VERSION,
            id: BodyId::from_random([0; 12]),
            created_at: store::clock::now(),
            layer,
            engine: self.engine_of(layer, request.engine, machine.as_ref().map(|(_, machine)| machine))?,
            template: request.template,
            snapshots: under.snapshots.iter().map(|below| below.id.clone()).collect(),
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
            life: request.life,
            ids: Ids { users: Vec::new(), groups: Vec::new() },
        };
        let wishes = Wishes {
            terms: request.lease.as_ref(),
            first: request.first.as_ref().filter(|_| request.life == Life::Run),
            beside,
        };
        if layer == Layer::Microvm {
            let parts = match &machine {
                Some((dir, machine)) if beside.is_some() => self.awaited_parts(&spec, dir, machine)?,
                Some((dir, machine)) => self.thawed_parts(&spec, dir, machine, request.cold)?,
                None if request.cold || spec.share.is_some() => self.parts(&spec, &under)?,
                None => return self.anchored(self.make_warm_or_spare(spec, root, wishes, under)?),
            };
            under.vm = Some(Parts { alone: !request.of_many, ..parts });
        }
        let Some(yard) = &self.yard else { return self.anchored(self.make(spec, root, wishes, &under)?) };
        let shape = Shape::of(&spec);
        let made = match yard.take(&shape, root) {
            Some(parked) => self.unpark(parked, spec, wishes),
            None => self.make(spec, root, wishes, &under),
        };
        yard.refill(shape, root);
        self.anchored(made?)
    }

    /// Makes a Body from its spec, which still lacks an id and ids.
    fn make(&self, spec: Spec, root: ids::Root, wishes: Wishes<'_>, under: &Under) -> Result<View, Failure> {
        let launcher = self.launcher()?;
        // Before its ids: a claim whose Body has no directory is anybody's.
        let (id, dir, _lock) = self.new_dir(launcher.wish())?;
        let claimed = ids::claim(&self.data, &id, root).map_err(failures::ids);
        let claimed = claimed.and_then(|claimed| match &spec.base {
            // What shares a directory acts under every id that the machine has.
            _ if spec.share.is_some() && !claimed.has_root() => Err(no_root()),
            // A machine has a root of its own whoever runs its hypervisor.
            _ if spec.layer == Layer::Microvm => Ok(claimed),
            Some(_) if !ids::is_whole(&claimed) => Err(failures::ids(ids::IdsError::TooFew)),
            _ if spec.user == "root" && !claimed.has_root() => Err(no_root()),
            _ => Ok(claimed),
        });
        // One that was promised other ids than there were to have is of no use.
        let launched = claimed.and_then(|claimed| {
            Ok((if launcher.fits(&claimed) { launcher } else { self.launcher()? }, claimed))
        });
        let (launcher, claimed) = launched.inspect_err(|_| drop(std::fs::remove_dir_all(dir.path())))?;
        let spec = Spec { id, ids: claimed, ..spec };
        let making = |draft| {
            let begun = self.begin(launcher, &dir, &spec, under)?;
            self.look_ahead();
            self.bring_up(begun, &dir, &spec, Some(wishes.before(draft)))
        };
        self.make_known(&dir, &spec, wishes.terms, making)
    }

    /// Makes a machine of a template: of one that waits for this, or thawed where its template's was frozen.
    fn make_warm_or_spare(
        &self,
        spec: Spec,
        root: ids::Root,
        wishes: Wishes<'_>,
        mut under: Under,
    ) -> Result<View, Failure> {
        let parts = self.parts(&spec, &under)?;
        let like = self.likeness(&spec, root, &parts);
        if let Some((like, spare)) =
            like.as_ref().and_then(|like| Some((like, self.take_spare(like, &spec)?)))
        {
            let under = spare.under();
            let view = self.give_away(spare, spec, wishes)?;
            self.want_spare(like.clone(), &view, under);
            return Ok(view);
        }
        under.vm = Some(self.warm(&spec, &under, parts)?);
        let made = self.make(spec.clone(), root, wishes, &under);
        let view = match made {
            // It is not known yet, and its disk was a copy: it can be had without what failed.
            Err(failure)
                if failure.kind == Kind::RestoreIncomplete
                    && under.vm.as_mut().is_some_and(|parts| self.forget_copy(parts)) =>
            {
                self.make(spec, root, wishes, &under)?
            }
            made => made?,
        };
        if let Some(like) = like {
            self.want_spare(like, &view, under);
        }
        Ok(view)
    }

    /// Makes known a machine that waited, and has proved whose it is.
    fn give_away(&self, spare: Spare, spec: Spec, wishes: Wishes<'_>) -> Result<View, Failure> {
        let (id, ids) = spare.who();
        let Spare { dir, made, lock: _lock, .. } = spare;
        let spec = &Spec { id, ids, ..spec };
        let (place, mut unknown) = (&dir, Unknown(Some(made)));
        let making = move |draft| {
            let opened = self.announce(wishes.before(draft), spec)?;
            let made =
                unknown.0.take().ok_or_else(|| Failure::new(Kind::Internal, "a spare was given twice"))?;
            self.settle_in(made, place, spec, opened, Start::First)
        };
        self.make_known(&dir, spec, wishes.terms, making)
    }

    /// Makes known a Body that was made before it was asked for.
    fn unpark(&self, parked: Parked, spec: Spec, wishes: Wishes<'_>) -> Result<View, Failure> {
        let Parked { id, dir, ids, begun, lock: _lock, .. } = parked;
        let spec = Spec { id, ids, ..spec };
        let making = |draft| self.bring_up(begun, &dir, &spec, Some(wishes.before(draft)));
        self.make_known(&dir, &spec, wishes.terms, making)
    }

    /// A directory that is locked from its beginning. In between `gc` may take it for a leftover; then another is made.
    fn new_dir(&self, wish: Option<&BodyId>) -> Result<(BodyId, BodyDir, Lock), Failure> {
        let mut wish = wish.cloned();
        let cannot = |what: &str, error: std::io::Error| {
            Failure::new(Kind::Host, what.to_owned()).because(error).hint("make room: pal gc")
        };
        loop {
            let drawn = || {
                sys::random::bytes()
                    .map(BodyId::from_random)
                    .map_err(|error| cannot("cannot draw an id", error))
            };
            let id = wish.take().map_or_else(drawn, Ok)?;
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
    fn make_known(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        terms: Option<&Lease>,
        making: impl FnOnce(Draft) -> Result<(Enforcement, i32), Failure>,
    ) -> Result<View, Failure> {
        let leased = terms.map_or(Ok(()), |terms| {
            lease::write(dir, terms).map_err(|error| {
                Failure::new(Kind::Host, "cannot write the Body's lease")
                    .because(error)
                    .hint("make room: pal gc")
            })
        });
        let drafted =
            leased.and_then(|()| dir.draft_spec(spec).map_err(|error| failures::dir(&spec.id, error)));
        let made = drafted.and_then(|()| {
            let mut data = json!({ "spec": spec.shown() });
            if let Some(terms) = terms {
                data["lease"] = lease::told(terms);
            }
            making(Draft::body("body.created", &spec.id, data))
        });
        match made {
            Ok((enforcement, pid)) => Ok(View {
                spec: spec.clone(),
                status: Status::Running,
                end: None,
                pid: Some(pid),
                enforcement,
                receipt: dir.revival(),
            }),
            Err(failure) => {
                let _ = body::snapshot::remove(&self.maker.programs, &spec.ids, dir.path());
                let data = json!({ "why": failure.to_string(), "causes": failure.causes() });
                let _ = self.append(Draft::body("body.failed", &spec.id, data));
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
        under: &Under,
    ) -> Result<Begun, Failure> {
        let begun = self.maker.begin(launcher, dir, spec, &self.token(&spec.id), under);
        begun.map_err(|error| failures::process("cannot start the Body", error))
    }

    /// Waits for the guest of a Body whose lock the caller holds. `before` is written while the launcher works; if it
    /// cannot be, the Body is ended before it could do anything.
    pub(crate) fn bring_up(
        &self,
        begun: Begun,
        dir: &BodyDir,
        spec: &Spec,
        before: Option<Before<'_>>,
    ) -> Result<(Enforcement, i32), Failure> {
        let start = if before.is_some() { Start::First } else { Start::Again };
        let beside = before.as_ref().and_then(|before| before.beside);
        let (written, opened) = match before.map_or(Ok(None), |before| self.announce(before, spec)) {
            Ok(opened) => (Ok(()), opened),
            Err(failure) => (Err(failure), None),
        };
        let written = match beside {
            // It goes on when it is told to; one that is not written down never is.
            Some(beside) => Ok(written.and_then(|()| beside(dir, &begun))?),
            None => written,
        };
        let made = begun
            .finish()
            .map_err(|error| failures::process("cannot start the Body", error))
            .inspect_err(|failure| {
                if let Some(Opened::First(first)) = &opened {
                    first.never_ran(self, &spec.id, failure);
                }
            })?;
        match written {
            Ok(()) => self.settle_in(made, dir, spec, opened, start),
            Err(failure) => {
                self.end_at_once(dir, made.tether);
                Err(failure)
            }
        }
    }

    /// One that cannot be written down.
    fn end_at_once(&self, dir: &BodyDir, mut tether: body::process::Tether) {
        if let Ok(Some(running)) = dir.running() {
            let _ = body::process::kill(dir, &running);
        }
        tether.bury();
    }

    /// Writes down that a guest runs; from then on a new Body is one.
    fn settle_in(
        &self,
        made: Made,
        dir: &BodyDir,
        spec: &Spec,
        opened: Option<Opened>,
        start: Start,
    ) -> Result<(Enforcement, i32), Failure> {
        let Made { enforcement, ready, mut tether, cgroups } = made;
        let mut data = json!({ "pid": ready.pid, "enforcement": enforcement });
        let kept = ready.revival.as_ref().map_or(Ok(()), |revival| {
            data["receipt"] = json!(revival);
            dir.keep_revival(revival).map_err(|error| {
                Failure::new(Kind::Host, "cannot keep the receipt of the machine")
                    .because(error)
                    .hint("make room: pal gc")
            })
        });
        let started = Draft::body("body.started", &spec.id, data);
        let written = kept.and_then(|()| match spec.life {
            Life::Kept => self.append(started).map(drop),
            // Written together with its first exec, which follows at once and waits for it.
            Life::Run => {
                self.later(started);
                Ok(())
            }
        });
        // A new Body is one from here on.
        let published = || match start {
            Start::First => dir.publish().map_err(|error| failures::dir(&spec.id, error)),
            Start::Again => Ok(()),
        };
        if let Err(failure) = written.and_then(|()| published()) {
            self.end_at_once(dir, tether);
            return Err(failure);
        }
        if spec.life == Life::Kept {
            tether.slacken();
        }
        let running = Running {
            boot_id: String::new(),
            pid: ready.pid,
            ticks: ready.ticks,
            keeper: ready.keeper,
            cgroups,
        };
        let held = Held { tether, running, spec: spec.clone(), opened, told: false };
        self.tethers().insert(spec.id.clone(), held);
        Ok((enforcement, ready.pid))
    }

    /// Writes down that there will be a Body and, of a run, speaks to its guest: that listens before it can answer, and
    /// one that does not listen yet is spoken to again by whoever needs it.
    fn announce(&self, before: Before<'_>, spec: &Spec) -> Result<Option<Opened>, Failure> {
        let Before { created, first, .. } = before;
        match first {
            Some(request) => {
                exec::First::ask(self, &spec.id, created, request).map(|first| Some(Opened::First(first)))
            }
            None => {
                self.append(created)?;
                let line = if spec.life == Life::Run { self.guest(&spec.id).knock().ok() } else { None };
                Ok(line.map(Opened::Line))
            }
        }
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
        let host = self.maker.capacity;
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

fn no_root() -> Failure {
    Failure::new(Kind::Host, "this Body cannot have a root inside: only your own id can be mapped")
        .hint("install the helpers: apt-get install uidmap")
        .hint("and give yourself ids: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER")
}

/// A snapshot goes on only on the layer it was taken on.
fn fits_layer(
    layer: Layer,
    under: &Under,
    machine: Option<&(std::path::PathBuf, Machine)>,
) -> Result<(), Failure> {
    let taken_on = match (machine, under.snapshots.is_empty()) {
        (Some(_), _) => Layer::Microvm,
        (None, false) => Layer::Process,
        (None, true) => return Ok(()),
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
