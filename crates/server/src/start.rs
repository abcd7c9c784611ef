//! The start, run and stop of a server.

use std::{future::Future, net::SocketAddr, time::Duration};

use axum::Router;
use fleet::Fleet;
use proto::{Failure, Kind};
use tokio::net::TcpListener;

use crate::{
    App, Exposure, ServerConfig, Tls, e2b,
    keys::{CreatedKey, KeyStore},
    lease_expiry, listen,
    lock::ServerLock,
    telemetry, tls, usage_history, v1,
};

/// How long to wait for an address that is in use.
const BIND_PATIENCE: Duration = Duration::from_secs(1);
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    app: App,
    listener: TcpListener,
    tls: Option<tls::Acceptor>,
    first_key: Option<CreatedKey>,
    /// Held until the server is dropped.
    _lock: ServerLock,
}

impl Server {
    /// Opens the data directory and binds the address. The server answers no request before [`Server::run`].
    pub async fn start(config: ServerConfig) -> Result<Self, Failure> {
        check_exposure(&config)?;
        let mut fleet = Fleet::open_to_serve(config.fleet.clone())?;
        fleet.env = config.body_env.clone();
        fleet.host_variables = config.host_variables;
        let mut lock = ServerLock::take(fleet.data())?;
        // A directory that cannot be cleared now, such as on a full disk, is withdrawn and therefore not served.
        if let Err(failure) = fleet.garbage().finish_interrupted() {
            tracing::warn!(causes = ?failure.causes(), "cannot finish what a killed process left: {failure}");
        }
        let tls = tls::acceptor(&config, fleet.data())?;
        let busy = |error| {
            Failure::new(Kind::Host, format!("cannot listen at {}", config.listen))
                .because(error)
                .hint("choose another address: pal serve --listen 127.0.0.1:0")
        };
        let listener = bind(config.listen).await.map_err(busy)?;
        let address = listener.local_addr().map_err(busy)?;
        lock.tell(address).map_err(|error| {
            Failure::new(Kind::Host, "cannot write the server's address to its lock file").because(error)
        })?;
        // A start that fails before this point leaves no key that was never shown.
        let (keys, first_key) = KeyStore::open(fleet.data(), fleet.records().clone())?;
        let app = App::new(fleet, keys, config, address);
        Ok(Self { app, listener, tls, first_key, _lock: lock })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.app.address()
    }

    /// The key that this start created, if it was the first start in its data directory.
    pub fn first_key(&self) -> Option<&CreatedKey> {
        self.first_key.as_ref()
    }

    /// The shared state of the request handlers.
    pub fn app(&self) -> &App {
        &self.app
    }

    /// Serves until `stop` completes, then lets responses in progress finish. Bodies keep running.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let router = router(&self.app).with_state(self.app.clone());
        let helpers = [
            tokio::spawn(lease_expiry::run(self.app.clone())),
            tokio::spawn(usage_history::run(self.app.clone())),
            tokio::spawn(telemetry::run(self.app.clone())),
            tokio::spawn({
                let agents = self.app.agents().clone();
                async move { agents.resume_interrupted().await }
            }),
        ];
        listen::serve(self.listener, self.tls, self.app.clone(), router, stop).await;
        helpers.iter().for_each(tokio::task::JoinHandle::abort);
        self.app.agents().stop().await;
        self.app.exec_tasks().stop().await;
        self.app.finish().await;
    }
}

/// Binds the address. A child that a killed server was about to start may briefly hold the inherited socket.
async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let patience = tokio::time::Instant::now() + BIND_PATIENCE;
    loop {
        match TcpListener::bind(address).await {
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrInUse
                    && tokio::time::Instant::now() < patience =>
            {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            bound => return bound,
        }
    }
}

/// The routes of the control plane: the native and the E2B API.
fn router(app: &App) -> Router<App> {
    v1::router().merge(e2b::router(app))
}

fn check_exposure(config: &ServerConfig) -> Result<(), Failure> {
    if config.listen.ip().is_loopback() || config.exposure == Exposure::Open || config.tls != Tls::Off {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Denied,
        format!("{} is reachable from other hosts, and clients would send keys in plain text", config.listen),
    )
    .hint("listen on this host only: pal serve --listen 127.0.0.1:3900")
    .hint("or encrypt connections: pal serve --tls")
    .hint("or, behind a proxy that encrypts or in a network you trust: pal serve --insecure"))
}
