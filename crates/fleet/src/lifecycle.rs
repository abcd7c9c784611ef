//! Finds, starts, pauses, stops and removes Bodies.

use std::{collections::BTreeMap, fs, io, time::Duration};

use body::{
    BodyDir, GuestClient, ProcessState,
    dir::{BodyLock, DirError},
    driver::{Capability, Driver, Origin},
    ids, process,
    vm::upper_copy::UpperCopy,
};
use proto::{
    BodyId, Draft, EventData, Failure, Kind, Layer, Spec,
    event_data::{BodyPaused, BodyRemoved, BodyResumed, BodyStopped},
    launch::{GuestEnd, RunRecord},
    spec::Life,
};

use crate::{
    BodyView, Discard, Fleet, OwnedBody, Rest, Status, blocking::run_blocking, create::StartOccasion,
    failures, receipt::request_receipt, secrets::live_variables, shutdown_wait,
};

/// Whether a running Body may be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force {
    /// It may: its processes are killed first.
    Yes,
    /// It may not.
    No,
}

/// Extra time for the guest after the grace period of its processes; then the guest is killed.
const GUEST_PATIENCE: Duration = Duration::from_secs(2);

/// The facts about a Body that starting a command needs.
pub(crate) struct ExecTarget {
    /// The layer of the Body.
    pub layer: Layer,
    /// The Body's output limit, in bytes.
    pub output_max: u64,
    /// The Body's processes, if this process created the Body and ends it itself. Then no lookup is needed: if the
    /// Body is gone, the connection to its guest fails.
    pub running: Option<RunRecord>,
    /// The variables of the Body's secrets.
    pub secrets: BTreeMap<String, String>,
}

impl Fleet {
    /// All Bodies, oldest first. Skips directories of Bodies that are being created or removed, and clears those whose
    /// process was killed meanwhile.
    pub fn list(&self) -> Result<Vec<BodyView>, Failure> {
        let ids = self.ids()?;
        ids.iter().for_each(|id| self.garbage().clear_unpublished(id));
        let mut views: Vec<BodyView> = ids.iter().filter_map(|id| self.view(id).ok()).collect();
        views.sort_by(|a, b| (&a.spec.created_at, a.id()).cmp(&(&b.spec.created_at, b.id())));
        Ok(views)
    }

    /// The ids of all directories of Bodies; some of these Bodies may be only partly created or removed.
    pub fn ids(&self) -> Result<Vec<BodyId>, Failure> {
        let entries = fs::read_dir(self.data.join("bodies"))
            .map_err(|error| Failure::new(Kind::Host, "cannot list the Bodies").because(error))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    /// The number of Bodies; costs less than [`Fleet::list`].
    pub fn count(&self) -> Result<usize, Failure> {
        Ok(self.ids()?.iter().filter(|id| self.body_path(id).join("spec.json").exists()).count())
    }

    /// Returns the current view of an existing Body.
    pub fn view(&self, id: &BodyId) -> Result<BodyView, Failure> {
        let dir = self.dir(id)?;
        let spec = read_spec(&dir, id)?;
        let enforcement = dir.enforcement().map_err(|error| failures::dir(id, error))?;
        let (status, end, pid) = match dir.condition().map_err(|error| failures::dir(id, error))? {
            ProcessState::Running(running) => (Status::Running, None, Some(running.pid)),
            ProcessState::Paused(running) if dir.is_held() => (Status::Running, None, Some(running.pid)),
            ProcessState::Paused(running) => (Status::Paused, None, Some(running.pid)),
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted if dir.is_swapped() => {
                (Status::Paused, None, None)
            }
            ProcessState::Stopped => (Status::Stopped, None, None),
            ProcessState::Dead(end) => (Status::Dead, Some(end), None),
            ProcessState::Interrupted => (Status::Interrupted, None, None),
        };
        let missing_steps = self.workspaces().missing_steps(&spec);
        Ok(BodyView { spec, status, end, pid, enforcement, missing_steps, receipt: dir.revival() })
    }

    fn dir(&self, id: &BodyId) -> Result<BodyDir, Failure> {
        let dir = BodyDir::at(self.body_path(id));
        if dir.path().is_dir() { Ok(dir) } else { Err(no_such_body(id)) }
    }

    /// Takes a Body's lock. Fails if another process keeps it.
    pub(crate) fn lock_body(&self, id: &BodyId) -> Result<(BodyDir, Spec, BodyLock), Failure> {
        let dir = self.dir(id)?;
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let lock = loop {
            match dir.try_lock() {
                Ok(Some(lock)) => break lock,
                Ok(None) if std::time::Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                Ok(None) => {
                    return Err(Failure::new(
                        Kind::Conflict,
                        format!("another pal is changing Body {id} right now"),
                    )
                    .hint("try again in a moment"));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(no_such_body(id));
                }
                Err(error) => {
                    return Err(Failure::new(Kind::Host, format!("cannot lock Body {id}")).because(error));
                }
            }
        };
        // The Body may have been removed while this process waited for its lock.
        let spec = read_spec(&dir, id)?;
        self.thaw_interrupted_save(&dir)?;
        Ok((dir, spec, lock))
    }

    /// Resumes a Body that a killed `pal` had frozen to take a snapshot. The caller holds the Body's lock.
    pub(crate) fn thaw_interrupted_save(&self, dir: &BodyDir) -> Result<(), Failure> {
        body::process_driver::thaw_interrupted_save(dir)
    }

    /// A client for the guest of a running Body.
    pub(crate) fn guest(&self, id: &BodyId) -> GuestClient {
        GuestClient::new(&self.body_path(id), self.token(id))
    }

    /// Collects the facts about a Body that starting a command needs.
    pub(crate) fn exec_target(&self, id: &BodyId) -> Result<ExecTarget, Failure> {
        // The layer and the output limit of a Body never change, so they can be cached; its processes may change.
        let known = |spec: &Spec, running: Option<RunRecord>| ExecTarget {
            layer: spec.layer,
            output_max: spec.limits.output.0,
            secrets: live_variables(spec),
            running: running.filter(|_| spec.life == Life::Run),
        };
        // Another process may have changed the secrets of a Body with a policy.
        let is_known = |held: &&OwnedBody| held.spec.life == Life::Run || held.spec.egress.is_none();
        if let Some(held) = self.supervisors.owned().get(id).filter(is_known) {
            return Ok(known(&held.spec, Some(held.running.clone())));
        }
        let spec = read_spec(&self.dir(id)?, id)?;
        Ok(known(&spec, None))
    }

    /// The processes of a running Body; fails if it does not run, and says why.
    pub(crate) fn running(&self, id: &BodyId) -> Result<RunRecord, Failure> {
        let dir = self.dir(id)?;
        let mut condition = dir.condition().map_err(|error| failures::dir(id, error))?;
        if matches!(condition, ProcessState::Paused(_)) && dir.is_held() {
            // Another process has frozen the Body to take a snapshot. Taking the lock waits for its end.
            drop(self.lock_body(id)?);
            condition = dir.condition().map_err(|error| failures::dir(id, error))?;
        }
        match condition {
            ProcessState::Running(running) => Ok(running),
            ProcessState::Paused(_) => Err(paused_failure(id)),
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted if dir.is_swapped() => {
                Err(paused_failure(id))
            }
            ProcessState::Stopped => Err(Failure::new(Kind::Conflict, format!("Body {id} is stopped"))
                .hint(format!("start it: pal start {id}"))),
            ProcessState::Dead(end) => {
                Err(Failure::new(Kind::Conflict, format!("Body {id} is dead: {}", describe_end(&end)))
                    .hint(format!("its files are intact; start it again: pal start {id}")))
            }
            ProcessState::Interrupted => Err(Failure::new(
                Kind::Conflict,
                format!("Body {id} was interrupted when the host restarted"),
            )
            .hint(format!("its files are intact; start it again: pal start {id}"))),
        }
    }

    /// Starts a Body that does not run, or that is about to end.
    pub async fn start(&self, id: &BodyId) -> Result<BodyView, Failure> {
        let (dir, spec, _lock) = run_blocking(|| self.lock_body(id))?;
        match dir.condition().map_err(|error| failures::dir(id, error))? {
            ProcessState::Running(running) if shutdown_wait::has_ended(self, id, &running).await? => {}
            ProcessState::Running(_) => return self.view(id),
            ProcessState::Paused(_) => return Err(paused_failure(id)),
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted if dir.is_swapped() => {
                return Err(paused_failure(id));
            }
            ProcessState::Dead(_) | ProcessState::Stopped | ProcessState::Interrupted => {}
        }
        let view = run_blocking(|| self.start_ended(id, &dir, &spec, StartOccasion::Again))?;
        self.creator().await_template_start(view).await
    }

    /// Starts a Body whose last guest has ended. The caller holds the Body's lock.
    pub(crate) fn start_ended(
        &self,
        id: &BodyId,
        dir: &BodyDir,
        spec: &Spec,
        occasion: StartOccasion,
    ) -> Result<BodyView, Failure> {
        if spec.life == Life::Run {
            return Err(Failure::new(
                Kind::Conflict,
                format!("Body {id} kept its files in memory and cannot be started again"),
            )
            .hint(format!("remove it: pal rm {id}")));
        }
        if let Some(mut supervisor) = self.supervisors.take(id) {
            supervisor.reap();
        }
        // The last guest may have died before its work was saved.
        self.workspaces().save_if_possible(spec)?;
        self.reclaim_ids(spec)?;
        let recipe =
            self.driver(spec)?.prepare(spec, self.templates().rootfs_stack(spec)?, &Origin::Files)?;
        // Two overlay mounts must not share an upper directory.
        if let Some(last) = dir.running().map_err(|error| failures::dir(id, error))? {
            process::wait_unmounted(&last);
        }
        dir.clear_run_files().map_err(|error| {
            Failure::new(Kind::Host, "cannot remove the records of the Body's last guest").because(error)
        })?;
        self.leases().note_resumed(id)?;
        self.creator().start_again(dir, spec, &*recipe, occasion)?;
        self.view(id)
    }

    /// Makes sure that no other Body uses the host ids of a Body that is about to run.
    pub(crate) fn reclaim_ids(&self, spec: &Spec) -> Result<(), Failure> {
        ids::claim_again(&self.data, &spec.id, &spec.ids).map_err(|error| failures::ids_of(&spec.id, error))
    }

    /// The driver of a Body's layer.
    pub(crate) fn driver(&self, spec: &Spec) -> Result<&dyn Driver, Failure> {
        self.drivers.get(spec.layer).map(|driver| &**driver)
    }

    /// The directory of a Body's writes, if they are plain files.
    pub(crate) fn upper_path(&self, id: &BodyId) -> std::path::PathBuf {
        self.body_path(id).join("disk/upper")
    }

    /// A copy of a Body's repositories and home, if its upper is a disk image and not plain files.
    pub(crate) fn copy_upper(&self, spec: &Spec) -> Result<Option<UpperCopy>, Failure> {
        self.driver(spec)?.copy_upper(&BodyDir::at(self.body_path(&spec.id)), spec)
    }

    /// Freezes every process of a Body.
    pub async fn pause(&self, id: &BodyId) -> Result<BodyView, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.lock_body(id)?;
            if dir.is_swapped()
                || matches!(
                    dir.condition().map_err(|error| failures::dir(id, error))?,
                    ProcessState::Paused(_)
                )
            {
                return Err(paused_already(id));
            }
            let running = self.running(id)?;
            self.leases().note_paused(id, Rest::Memory)?;
            self.write(id, BodyPaused { swap: false })?;
            self.driver(&spec)?.pause(&running)?;
            self.view(id)
        })
    }

    /// Saves a Body's memory to disk and ends its processes; [`Fleet::resume`] continues it from there.
    pub async fn pause_to_disk(&self, id: &BodyId) -> Result<BodyView, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.lock_body(id)?;
            let driver = self.driver(&spec)?;
            driver.check_suspend(&spec)?;
            if spec.life == Life::Run {
                return Err(Failure::new(Kind::Usage, format!("Body {id} ends with its `pal run`"))
                    .hint(format!("pause it in memory: pal pause {id}")));
            }
            if dir.is_swapped() {
                return Err(paused_already(id));
            }
            if let ProcessState::Paused(running) =
                dir.condition().map_err(|error| failures::dir(id, error))?
            {
                // The guest takes part in saving the memory, so it must run.
                driver.resume(&running)?;
            }
            let running = self.running(id)?;
            self.leases().note_paused(id, Rest::Memory)?;
            self.write(id, BodyPaused { swap: true })?;
            driver.suspend(&dir, &spec, &running)?;
            if let Some(mut supervisor) = self.supervisors.take(id) {
                supervisor.reap();
            }
            self.view(id)
        })
    }

    /// Resumes every process of a paused or suspended Body.
    pub async fn resume(&self, id: &BodyId) -> Result<BodyView, Failure> {
        let (dir, spec, _lock) = run_blocking(|| self.lock_body(id))?;
        match dir.condition().map_err(|error| failures::dir(id, error))? {
            ProcessState::Paused(running) => {
                let driver = self.driver(&spec)?;
                run_blocking(|| {
                    self.leases().note_resumed(id)?;
                    self.write(id, BodyResumed { swap: false })?;
                    driver.resume(&running)
                })?;
                if driver.capabilities().contains(Capability::Receipts) {
                    request_receipt(self, &dir, id, "resume").await?;
                }
            }
            ProcessState::Running(_) => {}
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted if dir.is_swapped() => {
                run_blocking(|| self.resume_from_disk(&dir, &spec))?
            }
            _ => drop(self.running(id)?),
        }
        self.view(id)
    }

    /// Continues a Body whose memory is on the disk. The caller holds the Body's lock.
    fn resume_from_disk(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        self.reclaim_ids(spec)?;
        let recipe =
            self.driver(spec)?.prepare(spec, self.templates().rootfs_stack(spec)?, &Origin::Suspended)?;
        // A `pal` that was killed while it suspended the Body may have left the records of the last guest.
        if let Some(last) = dir.running().map_err(|error| failures::dir(&spec.id, error))? {
            process::wait_unmounted(&last);
        }
        dir.clear_run_files().map_err(|error| {
            Failure::new(Kind::Host, "cannot remove the records of the Body's last guest").because(error)
        })?;
        self.leases().note_resumed(&spec.id)?;
        self.write(&spec.id, BodyResumed { swap: true })?;
        self.creator().start_again(dir, spec, &*recipe, StartOccasion::Again)?;
        drop_suspended_memory(dir)
    }

    /// Ends a Body's processes and keeps its files.
    pub async fn stop(&self, id: &BodyId, grace: Duration) -> Result<BodyView, Failure> {
        let (dir, spec, _lock) = run_blocking(|| self.lock_body(id))?;
        let condition = dir.condition().map_err(|error| failures::dir(id, error))?;
        let is_asked = matches!(condition, ProcessState::Running(_));
        run_blocking(|| {
            self.leases().note_paused(id, Rest::Files)?;
            let grace_ms = if is_asked { grace.as_millis() as u64 } else { 0 };
            match condition {
                ProcessState::Running(_) | ProcessState::Paused(_) => {
                    self.write(id, BodyStopped { grace_ms })
                }
                ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted => Ok(()),
            }
        })?;
        let patience = if is_asked && self.guest(id).shutdown(grace).await.is_ok() {
            grace + GUEST_PATIENCE
        } else {
            Duration::ZERO
        };
        run_blocking(|| self.finish_stop(id, &dir, &spec, &condition, patience))
    }

    fn finish_stop(
        &self,
        id: &BodyId,
        dir: &BodyDir,
        spec: &Spec,
        condition: &ProcessState,
        patience: Duration,
    ) -> Result<BodyView, Failure> {
        match condition {
            ProcessState::Running(running) | ProcessState::Paused(running) => {
                self.end_guest(dir, spec, running, patience)?
            }
            // The saved memory is discarded; the Body keeps its files.
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted => {
                drop_suspended_memory(dir)?
            }
        }
        if let Some(mut supervisor) = self.supervisors.take(id) {
            supervisor.reap();
        }
        // The Body counts as stopped even if its guest had to be killed, so the records of the guest's end are
        // removed.
        if dir.path().exists() {
            dir.clear_run_files().map_err(|error| {
                Failure::new(Kind::Host, "cannot remove the records of the Body's guest").because(error)
            })?;
        }
        self.log.drain_egress(id)?;
        self.workspaces().save_if_possible(spec)?;
        self.view(id)
    }

    fn end_guest(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        running: &RunRecord,
        patience: Duration,
    ) -> Result<(), Failure> {
        if process::wait_end(running, patience) {
            process::finish_supervisor(dir, running);
        } else {
            self.driver(spec)?.kill(dir, running)?;
        }
        process::wait_unmounted(running);
        Ok(())
    }

    /// Removes a Body and its files. A running Body needs [`Force::Yes`]. Saves the work in its repositories first; if
    /// that fails, the Body stays.
    pub async fn remove(&self, id: &BodyId, force: Force) -> Result<(), Failure> {
        self.remove_with(id, force, Discard::No).await
    }

    /// Removes a Body and its files. With [`Discard::Yes`], removes it even if its work cannot be saved.
    pub async fn remove_with(&self, id: &BodyId, force: Force, discard: Discard) -> Result<(), Failure> {
        run_blocking(|| {
            self.connections.forget(id);
            let held = self.supervisors.owned().remove(id);
            let held = match held {
                Some(held) if held.spec.life == Life::Run && force == Force::Yes => {
                    return self.remove_owned(id, held);
                }
                held => held,
            };
            let (dir, spec, lock) = match self.lock_body(id) {
                Ok(locked) => locked,
                Err(failure) => {
                    // The Body ended with its supervisor handle, which this process owns.
                    if let Some(mut held) = held {
                        held.supervisor.reap();
                    }
                    return Err(failure);
                }
            };
            let condition = dir.condition().map_err(|error| failures::dir(id, error))?;
            if let (ProcessState::Running(_) | ProcessState::Paused(_), Force::No) = (&condition, force) {
                if let Some(held) = held {
                    self.supervisors.owned().insert(id.clone(), held);
                }
                return Err(Failure::new(Kind::Conflict, format!("Body {id} is running"))
                    .hint(format!("stop it first: pal stop {id}, or end it: pal rm --force {id}")));
            }
            let running = match &condition {
                ProcessState::Running(running) | ProcessState::Paused(running) => Some(running),
                _ => None,
            };
            if running.is_some() && discard == Discard::No {
                // A refusal must not have ended anything.
                let checked = self.workspaces().check_removal(&dir, &spec);
                if let Err(failure) = checked {
                    self.supervisors.owned().extend(held.map(|held| (id.clone(), held)));
                    return Err(failure);
                }
            }
            let keeps_home = spec.home.as_ref().is_some_and(|home| home.name.is_some());
            if !spec.workspaces.is_empty() || keeps_home || spec.egress.is_some() {
                // The Body's processes are killed before its work and its egress decisions are read for the last time.
                if let Some(running) = running {
                    self.write(id, BodyStopped { grace_ms: 0 })?;
                    self.driver(&spec)?.kill_synced(&dir, &spec, running)?;
                }
                let kept = self.homes().keep(&spec);
                if discard == Discard::No {
                    kept.map_err(|failure| {
                        failure.hint(format!(
                            "its files are still there; to discard them: pal rm --discard {id}"
                        ))
                    })?;
                    self.workspaces().save_before_removal(&spec)?;
                }
            }
            self.garbage().withdraw(
                &dir,
                id,
                BodyRemoved { by: None, discarded: discard == Discard::Yes },
            )?;
            spec.workspaces.iter().for_each(|workspace| workspace::release(id, workspace));
            if let Some(running) = running {
                self.driver(&spec)?.kill(&dir, running)?;
            }
            self.remove_files(&dir, &spec)?;
            match (held, running) {
                // The supervisor unmounts the Body's file systems meanwhile; this process reaps it later.
                (Some(held), _) => self.supervisors.reap_later(held.supervisor),
                (None, Some(running)) => process::wait_unmounted(running),
                (None, None) => {}
            }
            drop(lock);
            self.snapshots().drop_unused(&spec.snapshots)
        })
    }

    /// Removes a `pal run` Body of this process: its supervisor ends it and removes its files.
    fn remove_owned(&self, id: &BodyId, held: crate::OwnedBody) -> Result<(), Failure> {
        let crate::OwnedBody { mut supervisor, spec, recorded, .. } = held;
        if !recorded {
            self.log.append_end(id, None, BodyRemoved { by: None, discarded: false })?;
        }
        supervisor.terminate();
        // This runs while the supervisor cleans up.
        self.log.tidy()?;
        supervisor.wait_cleanup();
        self.supervisors.reap_later(supervisor);
        let dir = BodyDir::at(self.body_path(id));
        if dir.path().exists() {
            // The supervisor was killed, or the guest had ended before.
            self.remove_files(&dir, &spec)?;
        }
        self.egress().close(id)?;
        self.snapshots().drop_unused(&spec.snapshots)
    }

    /// Removes the files of a Body whose processes have ended.
    pub(crate) fn remove_files(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        if dir.path().exists() {
            let failed = || format!("cannot remove the files of Body {}", spec.id);
            // From here on it counts as removed, even if this process is killed; then the next `pal` removes the rest.
            dir.unpublish(self.launch_context.flush)
                .map_err(|error| Failure::new(Kind::Host, failed()).because(error))?;
            match dir.running() {
                // If the supervisor was killed, the guest may still run.
                Ok(Some(running)) => self.driver(spec)?.kill(dir, &running)?,
                _ => body::groups::remove_cgroups_by_name(&spec.id),
            }
            self.egress().close(&spec.id)?;
            // The Body's writes are removed first: if this process is killed, the next `pal` still finds the host ids in
            // the draft of the spec.
            for path in [&*dir.path().join("disk"), dir.path()] {
                body::snapshot::remove(&self.launch_context.programs, &spec.ids, path)
                    .map_err(|error| Failure::new(Kind::Host, failed()).because(error))?;
            }
        }
        // The lease goes last: a Body without a lease would stay until a user removes it.
        self.leases().forget(&spec.id);
        ids::release(&self.data, &spec.ids, &spec.id);
        self.steps.release(&spec.id);
        Ok(())
    }

    pub(crate) fn write(&self, id: &BodyId, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::about(id, data)).map(drop)
    }
}

/// Reads the spec of a Body; a directory without a spec is no Body.
fn read_spec(dir: &BodyDir, id: &BodyId) -> Result<Spec, Failure> {
    dir.spec().map_err(|error| match error {
        DirError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => no_such_body(id),
        error => failures::dir(id, error),
    })
}

fn drop_suspended_memory(dir: &BodyDir) -> Result<(), Failure> {
    dir.drop_suspended_memory().map_err(|error| {
        Failure::new(Kind::Host, "cannot remove the Body's memory from the disk").because(error)
    })
}

/// The failure of an operation that needs the Body resumed first.
pub(crate) fn paused_failure(id: &BodyId) -> Failure {
    Failure::new(Kind::Conflict, format!("Body {id} is paused")).hint(format!("resume it: pal resume {id}"))
}

fn paused_already(id: &BodyId) -> Failure {
    Failure::new(Kind::Conflict, format!("Body {id} is paused already"))
        .hint(format!("resume it: pal resume {id}"))
}

/// The failure of an operation on a Body that does not exist.
pub(crate) fn no_such_body(id: &BodyId) -> Failure {
    Failure::new(Kind::NotFound, format!("there is no Body {id}")).hint("list them: pal ls")
}

/// Describes why a guest has ended.
pub fn describe_end(end: &GuestEnd) -> String {
    match end {
        GuestEnd::Exit { code } => match proto::vm::EXITS.iter().find(|(known, _)| known == code) {
            Some((_, why)) => (*why).to_owned(),
            None => format!("its guest ended with code {code}"),
        },
        GuestEnd::Killed { signal } => format!("its guest was killed by signal {signal}"),
        GuestEnd::Oom => "the kernel killed its guest: the Body was out of memory".into(),
        GuestEnd::Timeout => "its time limit was over".into(),
        GuestEnd::Disk => "it wrote more than its disk limit".into(),
        GuestEnd::Inodes => "it made more files and directories than its inode limit".into(),
        GuestEnd::Owner => "the pal that created it ended".into(),
        GuestEnd::Unknown => "its guest was killed together with its supervisor".into(),
    }
}
