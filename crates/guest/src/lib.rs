//! The guest: init of every Body.
//!
//! It starts processes, moves files and watches directories for callers that speak envd's Connect protocol (the one
//! of the E2B SDKs) and a small service of our own, and it reaps children.
//!
//! Invariant: one thread serves all callers and never blocks; work that may block runs on a short-lived helper
//! thread.
//! Invariant: an idle guest holds no buffers; every buffer, queue and table has a limit.
//! Trust: callers come through the host, but may send anything. Programs in the Body are hostile: their files
//! (`/etc/passwd`, symlinks, FIFOs, endless files) are read with limits and never followed where it matters.

mod auth;
pub mod channel;
mod config;
mod connect;
mod dial;
mod drain;
mod file_calls;
mod files;
mod forward;
pub mod fsmonitor;
mod init;
mod metrics;
mod name_tunnel;
mod paths;
mod process;
mod process_list;
mod query;
mod ready;
mod redirect;
mod reply;
pub mod resolver;
mod server;
mod tree;
mod tunnel;
mod users;
pub mod vm;

use std::{net::UdpSocket, os::unix::net::UnixListener, time::Duration};

use proto::guest::GuestConfig;
use tokio::task::LocalSet;

pub use config::{ConfigError, GuestOptions, Listener};

/// Most helper threads at once; each runs one slow file operation.
const HELPERS_MAX: usize = 32;
const HELPER_STACK_LEN: usize = 256 * 1024;
const HELPER_KEPT: Duration = Duration::from_millis(500);

/// Runs the guest of a Body, in a prepared process with one thread. Calls `begun` before it builds its runtime: the
/// kernel queues connections until the guest accepts them.
pub fn serve(
    config: GuestConfig,
    listener: UnixListener,
    resolver: Option<UdpSocket>,
    followed: Vec<fsmonitor::FollowedOverlay>,
    begun: impl FnOnce(),
) -> Result<(), ConfigError> {
    let listener = config::unix(listener)?;
    run(GuestOptions { config: config.into(), listener, resolver, followed }, begun)
}

/// Runs the guest with the options of the command line, for tests and developers.
pub fn serve_command_line() -> Result<(), ConfigError> {
    run(config::read()?, || {})
}

fn run(order: GuestOptions, begun: impl FnOnce()) -> Result<(), ConfigError> {
    sys::spawn::keep_heap_small();
    init::become_init();
    begun();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(HELPERS_MAX)
        .thread_stack_size(HELPER_STACK_LEN)
        .thread_keep_alive(HELPER_KEPT)
        .thread_name("pal-guest")
        .build()
        .map_err(ConfigError::Runtime)?;
    let local = LocalSet::new();
    let served = local.block_on(&runtime, server::serve(order));
    // A helper thread may hang on a dead file system, so the guest does not wait for it.
    runtime.shutdown_background();
    served.map_err(ConfigError::Runtime)
}
