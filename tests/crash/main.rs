//! What `kill -9` and a full disk leave: Bodies that can be used or are gone, a whole log, and nothing else.
//!
//! The seed is printed; `PALISADE_SEED` sets it, `PALISADE_KILLS` says how many kills there are.

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

/// One test at a time, with all its processes: leftovers are told apart by process.
struct SuiteTurn(#[expect(dead_code, reason = "held until the test is over")] MutexGuard<'static, ()>);

fn turn() -> SuiteTurn {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = SuiteTurn(ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
    leaks::watch();
    turn
}

impl Drop for SuiteTurn {
    /// A test that failed takes its Bodies along.
    fn drop(&mut self) {
        if std::thread::panicking() {
            leaks::end(&leaks::descendants());
            leaks::reap();
        }
    }
}
