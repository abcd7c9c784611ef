//! After `kill -9` and on a full disk: Bodies are usable or gone, the log is valid, and nothing else is left.
//!
//! The seed is printed; `PALISADE_SEED` sets it, `PALISADE_KILLS` sets the number of kills.

mod chance;
mod first_use;
mod full_disk;
mod kills;
mod layout;
mod leftovers;
mod pal;
mod world;

use std::sync::{Mutex, MutexGuard, PoisonError};

use testkit::leaks;

/// Serialises the tests, because each finds its leftovers by process.
struct SuiteTurn(#[expect(dead_code, reason = "held until the test is over")] MutexGuard<'static, ()>);

fn turn() -> SuiteTurn {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = SuiteTurn(ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
    leaks::watch();
    turn
}

impl Drop for SuiteTurn {
    /// A failed test ends its Bodies.
    fn drop(&mut self) {
        if std::thread::panicking() {
            leaks::end(&leaks::descendants());
            leaks::reap();
        }
    }
}
