//! The guest: init of every Body.
//!
//! It starts processes, moves files and watches directories for callers that speak envd's Connect protocol (the one
//! of the E2B SDKs) and a small service of our own, and it buries the dead.
//!
//! Invariant: one thread serves everybody and never blocks; what may block runs on a short-lived helper thread.
//! Invariant: an idle guest holds no buffers; every buffer, queue and table has a limit.
//! Trust: callers come through the host, but may send anything. Programs in the Body are hostile: what they put on
//! disk (`/etc/passwd`, symlinks, FIFOs, endless files) is read with limits and never followed where it matters.

mod auth;
pub mod channel;
mod config;
mod connect;
mod dial;
mod drain;
mod files;
mod forward;
pub mod fsmonitor;
mod init;
mod metrics;
mod paths;
mod process;
mod query;
mod ready;
mod reply;
mod server;
mod tree;
mod users;
pub mod vm;

use std::{os::unix::net::UnixListener, time::Duration};

use proto::guest::GuestConfig;
use tokio::task::LocalSet;

pub use config::{ConfigError, GuestOptions, Listener};

/// Helper threads at once; each is one slow file operation.
const HELPERS_MAX: usize = 32;
const HELPER_STACK_LEN: usize = 256 * 1024;
const HELPER_KEPT: Duration = Duration::from_millis(500);

/// Becomes the guest of a Body, in a process that is set up for it and has one thread. Calls `begun` before it builds its
/// runtime: the kernel queues connections until the guest accepts them.
pub fn serve(
    config: GuestConfig,
    listener: UnixListener,
    followed: Vec<fsmonitor::FollowedOverlay>,
    begun: impl FnOnce(),
) -> Result<(), ConfigError> {
    run(GuestOptions { config: config.into(), listener: config::unix(listener)?, followed }, begun)
}

/// The same for tests and developers, as the command line says.
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
    // Helpers may hang on a dead file system; nobody waits for them.
    runtime.shutdown_background();
    served.map_err(ConfigError::Runtime)
}
