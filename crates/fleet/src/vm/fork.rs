//! A fork that is started while its parent is still being frozen.
//!
//! A hypervisor takes as long to start as a machine to be frozen, and neither needs the other: the fork's is given files
//! that are still empty, and told when they are not.
//!
//! Invariant: nobody reads what is frozen before it is whole; a fork that is never told so is ended with its maker.
//! Invariant: whatever becomes of the fork, its parent goes on as it would after any snapshot.

use std::{io, path::Path, sync::mpsc, time::Duration};

use body::{
    BodyDir, Condition,
    process::Begun,
    snapshot::{self, Manifest},
    vm::{self, VmError, freeze, freeze::Files, plan::UPPER_FILE, record::Machine},
};
use proto::{Failure, Kind, Layer, Spec, vm::Engine};

use super::{
    failure,
    frozen::{self, Place},
};
use crate::{Create, Fleet, View};

/// What a new machine waits for, between its beginning and its first word. Given its directory and what is known of it.
pub(crate) type Beside<'a> = &'a dyn Fn(&BodyDir, &Begun) -> Result<(), Failure>;

/// How often is looked whether who minds a machine can be reached.
const REACH_EVERY: Duration = Duration::from_millis(1);

/// What comes of freezing the parent: first what was written down, then how it went on.
type Steps = mpsc::Receiver<Result<Option<Machine>, Failure>>;

impl Fleet {
    /// Whether a fork of that Body can be started while it is being frozen.
    pub(crate) fn forks_beside(&self, dir: &BodyDir, spec: &Spec) -> bool {
        spec.layer == Layer::Microvm
            && spec.engine.unwrap_or_default() == Engine::Qemu
            && spec.share.is_none()
            && matches!(dir.condition(), Ok(Condition::Running(_)))
    }

    /// Freezes a machine that runs, and makes a fork of it. The caller has the Body's lock.
    pub(crate) fn fork_beside(
        &self,
        dir: &BodyDir,
        parent: &Spec,
        manifest: &Manifest,
        request: Create,
    ) -> Result<View, Failure> {
        let to = self.snapshot_path(&manifest.id);
        self.freeze_and_fork(dir, parent, manifest, request, &to)
            .inspect_err(|_| drop(snapshot::remove(&self.maker.programs, &parent.ids, &to)))
    }

    fn freeze_and_fork(
        &self,
        dir: &BodyDir,
        parent: &Spec,
        manifest: &Manifest,
        request: Create,
        to: &Path,
    ) -> Result<View, Failure> {
        // Asked before anybody works on this.
        let request = Create { of_many: !sys::proc::has_idle_processor(), ..request };
        frozen::make_dir(to)?;
        let machine = self.describe(dir, parent, to)?;
        let files = Files::make(to, machine.memory.0, frozen::extent_for_forks(dir)).map_err(failure)?;
        let promised = Manifest { machine: Some(machine.clone()), below: Vec::new(), ..manifest.clone() };
        let origin = self.origin_of_snapshot(promised)?;
        std::thread::scope(|scope| {
            let (tell, steps) = mpsc::channel();
            // Gone with this closure, at the latest: who waits at the other end is let go.
            let (copied, is_copied) = mpsc::channel();
            let freeze = move || {
                let saved = |machine: &Machine| drop(tell.send(Ok(Some(machine.clone()))));
                // It stands until its fork has a copy of its disk, or will never have one.
                let stand = |_: &Machine| {
                    let _ = is_copied.recv();
                    Ok(())
                };
                let went_on = self.freeze_as(dir, parent, Place { to, machine, files }, saved, stand);
                let _ = tell.send(went_on.map(|_| None));
            };
            std::thread::Builder::new().name("pal-freeze".into()).spawn_scoped(scope, freeze).map_err(
                |error| Failure::new(Kind::Host, "cannot freeze the machine beside its fork").because(error),
            )?;
            let beside = |child: &BodyDir, begun: &Begun| {
                let machine = hand_over(&steps, dir, child, begun, &copied)?;
                // The fork comes to life meanwhile.
                went_on(&steps)?;
                frozen::keep(to, manifest.clone(), machine).map(drop)
            };
            self.create_beside(request, origin, parent.id.clone(), &beside)
        })
    }
}

/// Waits until the parent is written down, gives its fork what is its own of that, and has it go on.
fn hand_over(
    steps: &Steps,
    parent: &BodyDir,
    child: &BodyDir,
    begun: &Begun,
    copied: &mpsc::Sender<()>,
) -> Result<Machine, Failure> {
    let machine = next(steps)?.ok_or_else(nothing)?;
    let disk = |dir: &BodyDir| dir.path().join(UPPER_FILE);
    vm::disks::fill(&disk(parent), &disk(child)).map_err(|error| {
        Failure::new(Kind::Host, "cannot copy the machine's disk").because(error).hint("make room: pal gc")
    })?;
    let _ = copied.send(());
    if let Some(frozen) = &machine.frozen {
        go(child, begun, &frozen.held)?;
    }
    Ok(machine)
}

fn went_on(steps: &Steps) -> Result<(), Failure> {
    next(steps).map(drop)
}

fn next(steps: &Steps) -> Result<Option<Machine>, Failure> {
    steps.recv().unwrap_or_else(|_| Err(nothing()))
}

fn nothing() -> Failure {
    Failure::new(Kind::Internal, "nothing was frozen")
}

/// Tells the fork. One that is over already says why by itself.
fn go(child: &BodyDir, begun: &Begun, held: &proto::vm::Held) -> Result<(), Failure> {
    loop {
        match freeze::go(child.path(), held) {
            Err(VmError::Io(_, error)) if is_not_there(&error) && !begun.is_decided() => {
                std::thread::sleep(REACH_EVERY);
            }
            Err(_) if begun.is_decided() => return Ok(()),
            told => return told.map_err(failure),
        }
    }
}

fn is_not_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
