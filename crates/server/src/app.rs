//! What every request can reach.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use fleet::Fleet;
use proto::{Failure, Kind};
use tokio::sync::Semaphore;

use crate::{
    ServerConfig, audit::AuditCounter, exec_tasks::ExecTasks, idempotency::RequestSlots, keys::KeyStore,
    lease_expiry::LeaseTimer, streams::OpenStreams, usage_history::UsageHistories, v1::Services,
};

/// Acts on Bodies that may be under way at the same time; as many as there are threads for them.
const ACTS_MAX: u32 = 512;
/// How long acts under way have to finish when the server stops.
const FINISH_WAIT: Duration = Duration::from_secs(15);

/// What every request can reach; a clone is the same one.
#[derive(Debug, Clone)]
pub struct App(Arc<AppState>);

#[derive(Debug)]
struct AppState {
    fleet: Fleet,
    keys: KeyStore,
    config: ServerConfig,
    address: SocketAddr,
    started: Instant,
    audit: AuditCounter,
    turns: RequestSlots,
    samples: UsageHistories,
    streams: OpenStreams,
    exec_tasks: ExecTasks,
    timer: LeaseTimer,
    services: Services,
    /// One permit for each act under way.
    acts: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(fleet: Fleet, keys: KeyStore, config: ServerConfig, address: SocketAddr) -> Self {
        let services = Services::default();
        services.limits().bound(&config.bounds);
        Self(Arc::new(AppState {
            fleet,
            keys,
            config,
            address,
            started: Instant::now(),
            audit: AuditCounter::default(),
            turns: RequestSlots::default(),
            samples: UsageHistories::default(),
            streams: OpenStreams::default(),
            exec_tasks: ExecTasks::default(),
            timer: LeaseTimer::default(),
            services,
            acts: Arc::new(Semaphore::new(ACTS_MAX as usize)),
        }))
    }

    /// All Bodies. What blocks there is called through [`App::blocking`].
    pub fn fleet(&self) -> &Fleet {
        &self.0.fleet
    }

    /// Who may call.
    pub fn keys(&self) -> &KeyStore {
        &self.0.keys
    }

    /// How the server was started.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// How callers reach it.
    pub fn scheme(&self) -> &'static str {
        if self.config().tls == crate::Tls::Off { "http" } else { "https" }
    }

    /// Since when it does.
    pub fn started(&self) -> Instant {
        self.0.started
    }

    /// What was written down lately of refusals.
    pub(crate) fn audit(&self) -> &AuditCounter {
        &self.0.audit
    }

    /// Requests that are done once.
    pub(crate) fn turns(&self) -> &RequestSlots {
        &self.0.turns
    }

    /// What Bodies used.
    pub(crate) fn samples(&self) -> &UsageHistories {
        &self.0.samples
    }

    /// Streams into Bodies that are open now.
    pub(crate) fn streams(&self) -> &OpenStreams {
        &self.0.streams
    }

    /// Commands that clients follow.
    pub(crate) fn exec_tasks(&self) -> &ExecTasks {
        &self.0.exec_tasks
    }

    /// Deadlines of Bodies.
    pub(crate) fn timer(&self) -> &LeaseTimer {
        &self.0.timer
    }

    /// What the native API keeps between requests.
    pub(crate) fn services(&self) -> &Services {
        &self.0.services
    }

    /// Does on a thread of its own what makes, ends or looks at Bodies: most of that waits for the kernel or the disk.
    ///
    /// It is finished also when the caller goes away in between.
    pub async fn blocking<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(&Fleet) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let app = self.clone();
        let handle = tokio::runtime::Handle::current();
        let permit = self.0.acts.clone().acquire_owned().await;
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            handle.block_on(act(app.fleet()))
        })
        .await;
        done.map_err(|error| Failure::new(Kind::Internal, "a task of the server did not end").because(error))?
    }

    /// Waits until nothing is made, ended or changed any more.
    pub(crate) async fn finish(&self) {
        let _ = tokio::time::timeout(FINISH_WAIT, self.0.acts.acquire_many(ACTS_MAX)).await;
    }
}
