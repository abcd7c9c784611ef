//! Changes the limits of existing Bodies.

use std::collections::BTreeMap;

use body::{
    BodyDir, ProcessState,
    driver::{ChangedLimits, DeferredLimit, LimitRequest, Origin, StartMode},
};
use proto::{BodyId, Failure, Limits, Spec, event_data::BodyLimited, launch::RunRecord};
use serde::Serialize;
use serde_json::Value;

use crate::{Fleet, blocking::run_blocking, failures, lifecycle::paused_failure};

/// The result of changing limits.
#[derive(Debug, Clone, Serialize)]
pub struct LimitChange {
    /// The Body.
    pub id: BodyId,
    /// Its limits now.
    pub limits: Limits,
    /// The limits that count from its next start on.
    pub at_next_start: Vec<DeferredLimit>,
}

/// Changes the limits of existing Bodies.
#[derive(Debug, Clone, Copy)]
pub struct LimitChanger<'a> {
    fleet: &'a Fleet,
}

impl<'a> LimitChanger<'a> {
    /// The changer for a fleet's Bodies.
    pub fn of(fleet: &'a Fleet) -> Self {
        Self { fleet }
    }

    /// Changes the limits that are asked for, at once where that is possible and else from the next start on.
    pub async fn change(&self, id: &BodyId, asked: &LimitRequest) -> Result<LimitChange, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(id)?;
            let new = self.new_limits(&spec, asked)?;
            let running = match dir.condition().map_err(|error| failures::dir(id, error))? {
                ProcessState::Running(running) | ProcessState::Paused(running) => Some(running),
                // Saved memory fits only into a microVM of the same size.
                _ if dir.is_swapped() => return Err(paused_failure(id)),
                _ => None,
            };
            let changed = if new == spec.limits {
                ChangedLimits::default()
            } else {
                self.apply_limits(&dir, &spec, &new, running.as_ref())?
            };
            Ok(LimitChange { id: id.clone(), limits: new, at_next_start: changed.deferred })
        })
    }

    /// The limits of a Body with those that are asked for, checked against the host and the layer.
    fn new_limits(&self, spec: &Spec, asked: &LimitRequest) -> Result<Limits, Failure> {
        let old = &spec.limits;
        let disk = asked.disk.unwrap_or(old.disk);
        // An inode limit that follows from the disk limit goes on following it.
        let follows = old.inodes == Limits::inodes_of(old.disk);
        let inodes = asked.inodes.unwrap_or(if follows { Limits::inodes_of(disk) } else { old.inodes });
        let all = LimitRequest {
            memory: asked.memory.or(Some(old.memory)),
            cpu_milli: asked.cpu_milli.or(Some(old.cpu_milli)),
            pids: asked.pids.or(Some(old.pids)),
            disk: Some(disk),
            inodes: Some(inodes),
            wall: asked.wall.or(old.wall_ms.map(std::time::Duration::from_millis)),
            ..LimitRequest::from(old)
        };
        let driver = self.fleet.driver(spec)?;
        let new = driver.limits(&all, spec.life, &Origin::Template(StartMode::Boot))?;
        driver.check_new_limits(spec, &new)?;
        Ok(new)
    }

    fn apply_limits(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        new: &Limits,
        running: Option<&RunRecord>,
    ) -> Result<ChangedLimits, Failure> {
        let id = &spec.id;
        let driver = self.fleet.driver(spec)?;
        self.fleet.write(id, BodyLimited { limits: differences(&spec.limits, new) })?;
        let applied = running
            .map_or_else(|| Ok(ChangedLimits::default()), |running| driver.change_limits(running, spec, new));
        let cannot = |error| {
            failures::dir(id, error)
                .hint("its limits may have changed in part; try again, or make room: pal gc")
        };
        let written = applied.and_then(|mut changed| {
            dir.rewrite_spec(&Spec { limits: new.clone(), ..spec.clone() }).map_err(cannot)?;
            dir.restate_mechanisms(std::mem::take(&mut changed.mechanisms)).map_err(cannot)?;
            Ok(changed)
        });
        written.inspect_err(|_| {
            // The log says which limits count: the earlier ones.
            let _ = running.map(|running| {
                let changed = Spec { limits: new.clone(), ..spec.clone() };
                driver.change_limits(running, &changed, &spec.limits)
            });
            let _ = self.fleet.write(id, BodyLimited { limits: differences(new, &spec.limits) });
        })
    }
}

/// The limits of `new` that differ from `old`, by their names in a spec.
fn differences(old: &Limits, new: &Limits) -> BTreeMap<String, Value> {
    let fields = |limits: &Limits| match serde_json::to_value(limits) {
        Ok(Value::Object(fields)) => fields,
        _ => Default::default(),
    };
    let old = fields(old);
    fields(new).into_iter().filter(|(name, value)| old.get(name) != Some(value)).collect()
}
