//! Runs blocking calls inside async functions.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs a function that blocks on the disk or the kernel.
///
/// On a multi-threaded runtime, such as the server's, the other tasks continue on other threads meanwhile. On a
/// single-threaded runtime, such as the command line's, no other task is waiting.
pub(crate) fn run_blocking<T>(act: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(act),
        _ => act(),
    }
}
