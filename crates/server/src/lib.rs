//! The fleet behind HTTP: the E2B API, the native API, terminals and ports of Bodies, on one TCP port.
//!
//! This crate translates requests and makes no policy: a Body's spec decides what the Body may do, and
//! `fleet` manages its lifecycle.
//!
//! Invariant: every route but `/health`, `/` and, on loopback, `/openapi.json` requires a key or a Body's own token.
//! Invariant: the server keeps nothing that cannot be read again from the data directory, so a killed server
//! loses nothing.
//! Invariant: every response, also a refusal, is in the format of the API that the client called.
//! Absent on purpose: printing and environment variables. The caller passes a [`ServerConfig`] and prints the
//! results.

mod abort;
mod agents;
mod app;
mod audit;
mod authz;
mod config;
mod connection;
mod e2b;
mod envd_exec;
mod exec_tasks;
mod explained_stream;
mod idempotency;
pub mod keys;
mod lease_expiry;
mod limits;
mod listen;
mod lock;
mod metrics;
mod peers;
mod proxy;
mod route;
mod signed;
mod start;
mod streams;
mod telemetry;
mod terminal;
mod tls;
mod unread_body;
mod usage_history;
mod v1;

pub use app::App;
pub use config::{AgentConfig, Exposure, InternetAccess, ServerConfig};
pub use keys::{Caller, CreatedKey, KeyReach, KeyStore, KeyTerms, Quota, Scope};
pub use limits::ServerBounds;
pub use lock::{RunningServer, standing};
pub use start::Server;
pub use telemetry::Telemetry;
pub use tls::{Tls, certificate};
