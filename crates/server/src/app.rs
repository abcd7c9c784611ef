//! The state that all request handlers share.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bridge::{AgentHost, Agents, HostSettings};
use fleet::Fleet;
use proto::{Failure, Kind};
use tokio::sync::Semaphore;

use crate::{
    ServerConfig, agents::AgentService, audit::AuditCounter, exec_tasks::ExecTasks,
    idempotency::RequestSlots, keys::KeyStore, lease_expiry::LeaseTimer, streams::OpenStreams,
    usage_history::UsageHistories, v1::Services,
};

/// Blocking operations on Bodies that may run at the same time; each has a thread.
const ACTS_MAX: u32 = 512;
/// How long running operations have to finish when the server stops.
const FINISH_WAIT: Duration = Duration::from_secs(15);

/// The state that all request handlers share. Clones share it.
#[derive(Debug, Clone)]
pub struct App(Arc<AppState>);

#[derive(Debug)]
struct AppState {
    fleet: Arc<Fleet>,
    agents: AgentService,
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
    /// One permit for each running operation.
    acts: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(fleet: Fleet, keys: KeyStore, config: ServerConfig, address: SocketAddr) -> Self {
        let services = Services::default();
        services.limits().bound(&config.bounds);
        let fleet = Arc::new(fleet);
        let settings = HostSettings {
            config: config.agents.directory.clone(),
            variables: config.agents.variables.clone(),
            person: config.git_identity.clone(),
        };
        let host = AgentHost::new(Agents::new(Arc::clone(&fleet)), settings);
        Self(Arc::new(AppState {
            fleet,
            agents: AgentService::new(host, &config.bounds),
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

    /// All Bodies. Call blocking functions of the fleet through [`App::blocking`].
    pub fn fleet(&self) -> &Fleet {
        &self.0.fleet
    }

    /// The agents, and the tasks that drive them.
    pub(crate) fn agents(&self) -> &AgentService {
        &self.0.agents
    }

    /// The API keys.
    pub fn keys(&self) -> &KeyStore {
        &self.0.keys
    }

    /// The server's configuration.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The URL scheme, `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.config().tls == crate::Tls::Off { "http" } else { "https" }
    }

    /// The domain that clients put `<port>-<body>.` before, with the port of the server unless that is the usual one.
    pub fn public_domain(&self) -> String {
        let config = self.config();
        match self.address().port() {
            _ if config.domain != config.domain_name() => config.domain.clone(),
            80 | 443 => config.domain.clone(),
            port => format!("{}:{port}", config.domain),
        }
    }

    /// When the server started.
    pub fn started(&self) -> Instant {
        self.0.started
    }

    /// The counter of recorded refusals.
    pub(crate) fn audit(&self) -> &AuditCounter {
        &self.0.audit
    }

    /// The slots of requests that have an idempotency key.
    pub(crate) fn turns(&self) -> &RequestSlots {
        &self.0.turns
    }

    /// The usage history of the Bodies.
    pub(crate) fn samples(&self) -> &UsageHistories {
        &self.0.samples
    }

    /// Open streams into Bodies.
    pub(crate) fn streams(&self) -> &OpenStreams {
        &self.0.streams
    }

    /// Commands that clients follow.
    pub(crate) fn exec_tasks(&self) -> &ExecTasks {
        &self.0.exec_tasks
    }

    /// The deadlines of Bodies.
    pub(crate) fn timer(&self) -> &LeaseTimer {
        &self.0.timer
    }

    /// State that the native API keeps between requests.
    pub(crate) fn services(&self) -> &Services {
        &self.0.services
    }

    /// Runs an operation on Bodies on a thread of its own, because most of them block on the kernel or the
    /// disk.
    ///
    /// The operation runs to its end even if the caller disconnects.
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
        done.map_err(|error| {
            Failure::new(Kind::Internal, "a task of the server ended unexpectedly").because(error)
        })?
    }

    /// Waits until all running operations have finished.
    pub(crate) async fn finish(&self) {
        let _ = tokio::time::timeout(FINISH_WAIT, self.0.acts.acquire_many(ACTS_MAX)).await;
    }
}
