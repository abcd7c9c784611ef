//! Waiting for the disk or the kernel inside of async functions.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs an act that waits for the disk or the kernel.
///
/// On a runtime of several threads, as the server has, the other tasks go on elsewhere meanwhile. A runtime of one
/// thread, as the command line has, has nothing else to do.
pub(crate) fn run_blocking<T>(act: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(act),
        _ => act(),
    }
}
