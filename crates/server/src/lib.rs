//! The fleet behind HTTP: the E2B surface, the native API, terminals and ports of Bodies, on one port.
//!
//! Translates and decides nothing: what a Body may do is decided by its spec, and what becomes of it by `fleet`.
//!
//! Invariant: every route but `/health` wants a key or a Body's own token.
//! Invariant: nothing is kept here that cannot be read again from the data directory: a killed server loses nothing.
//! Invariant: every answer, also a refusal, is in the dialect of the surface that was asked.
//! Absent on purpose: printing, environment variables. The caller brings a [`ServerConfig`] and says what happened.

mod abort;
mod app;
mod audit;
mod authz;
mod config;
mod e2b;
mod envd_exec;
mod exec_tasks;
mod idempotency;
pub mod keys;
mod lease_expiry;
mod limits;
mod listen;
mod lock;
mod metrics;
mod proxy;
mod route;
mod signed;
mod start;
mod streams;
mod telemetry;
mod terminal;
mod tls;
mod usage_history;
mod v1;

pub use app::App;
pub use config::{Exposure, ServerConfig};
pub use keys::{Caller, CreatedKey, KeyStore, Quota, Scope};
pub use limits::ServerBounds;
pub use lock::{RunningServer, standing};
pub use start::Server;
pub use telemetry::Telemetry;
pub use tls::{Tls, certificate};
