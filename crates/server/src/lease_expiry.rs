//! Deadlines: the server ends or pauses Bodies when their lease expires.
//!
//! The deadline in a Body's lease is authoritative; this module only remembers when to read the lease.
//!
//! Invariant: if a deadline passes while no server runs, the next server acts on it at once.
//! Invariant: the server reads a lease again before it ends a Body, so a Body whose lease was extended keeps
//! running.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fleet::{Fleet, Force, Lease, Rest, Status, Then, lease::now_ms};
use proto::{BodyId, Failure, Kind};
use tokio::sync::{Notify, Semaphore};

use crate::App;

/// How often the server reads all leases: another `pal` may have changed one.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long to wait before the next try, if a Body is in use or could not be ended.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Bodies that the server ends at the same time.
const ENDINGS_MAX: usize = 4;
/// How long processes have to exit when only a Body's files are kept.
const GRACE: Duration = Duration::from_secs(2);

/// The times at which to read leases.
#[derive(Debug, Clone, Default)]
pub struct LeaseTimer(Arc<TimerState>);

#[derive(Debug, Default)]
struct TimerState {
    /// Milliseconds since 1970.
    deadlines: Mutex<HashMap<BodyId, u64>>,
    changed: Notify,
}

impl LeaseTimer {
    /// Notes the deadline of a lease that was just created or changed.
    pub fn note(&self, body: &BodyId, lease: &Lease) {
        match lease.deadline_ms {
            Some(deadline) => self.deadlines().insert(body.clone(), deadline),
            None => self.deadlines().remove(body),
        };
        self.0.changed.notify_one();
    }

    /// Forgets a Body that was removed.
    pub fn forget(&self, body: &BodyId) {
        self.deadlines().remove(body);
    }

    fn deadlines(&self) -> MutexGuard<'_, HashMap<BodyId, u64>> {
        self.0.deadlines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_due(&self) -> Vec<BodyId> {
        let now = now_ms();
        let mut deadlines = self.deadlines();
        let due: Vec<BodyId> =
            deadlines.iter().filter(|(_, at)| **at <= now).map(|(body, _)| body.clone()).collect();
        deadlines.retain(|_, at| *at > now);
        due
    }

    fn next(&self) -> Duration {
        let next =
            self.deadlines().values().min().map(|at| Duration::from_millis(at.saturating_sub(now_ms())));
        next.unwrap_or(LOOK_EVERY).min(LOOK_EVERY)
    }
}

/// Ends or pauses Bodies at their deadlines, until it is dropped.
pub async fn run(app: App) {
    let endings = Arc::new(Semaphore::new(ENDINGS_MAX));
    settle(&app).await;
    let mut looked = tokio::time::Instant::now();
    loop {
        for body in app.timer().take_due() {
            let (app, endings) = (app.clone(), endings.clone());
            tokio::spawn(async move {
                let _turn = endings.acquire().await;
                expire(&app, &body).await;
            });
        }
        let wait = app.timer().next();
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = app.timer().0.changed.notified() => {}
        }
        if looked.elapsed() >= LOOK_EVERY {
            look(&app).await;
            looked = tokio::time::Instant::now();
        }
    }
}

/// Reads all leases, copies decisions of egress proxies into the log, and seals the log.
async fn look(app: &App) -> Vec<(BodyId, Lease)> {
    let leased = app
        .blocking(async |fleet: &Fleet| {
            // If the log cannot be written now, the next round does both.
            let _ = fleet.log().drain_all_egress();
            let _ = fleet.log().seal();
            fleet.leases().all()
        })
        .await
        .unwrap_or_default();
    for (body, lease) in &leased {
        if let Some(deadline) = lease.deadline_ms {
            app.timer().deadlines().insert(body.clone(), deadline);
        }
    }
    leased
}

/// Runs after a start: a server that was killed while it paused a Body left the Body running without a
/// deadline.
async fn settle(app: &App) {
    for (body, _) in look(app).await.into_iter().filter(|(_, lease)| lease.paused.is_some()) {
        let _ = app
            .blocking(async move |fleet: &Fleet| {
                if fleet.status(&body)? != Status::Running {
                    return Ok(());
                }
                // A caller that resumed the Body since has changed the lease before the Body ran.
                match fleet.leases().get(&body)?.and_then(|lease| lease.paused) {
                    Some(how) => pause_leased(fleet, &body, how).await,
                    None => Ok(()),
                }
            })
            .await;
    }
}

/// Acts on a Body whose deadline has passed.
async fn expire(app: &App, body: &BodyId) {
    let (streams, id) = (app.streams().clone(), body.clone());
    let met = app.blocking(async move |fleet: &Fleet| end(fleet, &streams, &id).await).await;
    let again = match met {
        Ok(Expiry::Done) => return,
        Ok(Expiry::InUse) => AGAIN_AFTER,
        Ok(Expiry::Later(at)) => Duration::from_millis(at.saturating_sub(now_ms())),
        Err(failure) if failure.kind == Kind::NotFound => return,
        Err(_) => AGAIN_AFTER,
    };
    app.timer().deadlines().insert(body.clone(), now_ms() + again.as_millis() as u64);
    app.timer().0.changed.notify_one();
}

enum Expiry {
    Done,
    /// The Body continues while it has open streams or is busy.
    InUse,
    /// Another caller moved the deadline.
    Later(u64),
}

async fn end(fleet: &Fleet, streams: &crate::streams::OpenStreams, id: &BodyId) -> Result<Expiry, Failure> {
    // The Body may have been removed, or may have no lease.
    let Some(lease) = fleet.leases().get(id)? else { return Ok(Expiry::Done) };
    if !lease.is_due() {
        return Ok(lease.deadline_ms.map_or(Expiry::Done, Expiry::Later));
    }
    if lease.resumed_by_traffic
        && (streams.count(id) > 0 || fleet.access().busy(id).await.is_ok_and(|busy| busy > 0))
    {
        return Ok(Expiry::InUse);
    }
    fleet.leases().note_expired(id, &lease)?;
    match lease.then {
        Then::Kill => match fleet.remove(id, Force::Yes).await {
            // If its work cannot be saved, the Body is paused instead of removed, so that its files can be
            // inspected.
            Err(failure) if !fleet.view(id)?.spec.workspaces.is_empty() => {
                pause_leased(fleet, id, Rest::Files).await?;
                streams.cut(id);
                drop(failure);
            }
            removed => removed?,
        },
        Then::Pause(how) => {
            pause_leased(fleet, id, how).await?;
            streams.cut(id);
        }
    }
    Ok(Expiry::Done)
}

/// Pauses a Body, whatever its state.
pub async fn pause_leased(fleet: &Fleet, id: &BodyId, how: Rest) -> Result<(), Failure> {
    match (how, fleet.status(id)?) {
        (Rest::Memory, Status::Running) => fleet.pause(id).await.map(drop),
        (Rest::Memory, Status::Paused) => Ok(()),
        // A Body that does not run has only files to keep.
        _ => fleet.stop(id, GRACE).await.map(drop),
    }
}
