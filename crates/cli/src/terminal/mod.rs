//! Our own terminal: raw while a command uses it, and always restored.
//!
//! The guard's drop restores it, a hook does so on a panic, and a helper process if `pal` is killed.

mod restore;

use std::sync::OnceLock;

use fleet::TtySize;
use proto::{Failure, Kind};
use rustix::{
    stdio,
    termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr},
};

pub use restore::{RESCUE, restore_when_orphaned};

/// The size of a terminal that reports none.
const SIZE_UNKNOWN: TtySize = TtySize { cols: 80, rows: 24 };

/// The size of our terminal.
pub fn size() -> TtySize {
    match tcgetwinsize(stdio::stdin()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => TtySize { cols: size.ws_col, rows: size.ws_row },
        _ => SIZE_UNKNOWN,
    }
}

/// The saved state for the panic hook: a panic aborts, so no drop runs.
static SAVED: OnceLock<Termios> = OnceLock::new();

/// Our terminal in raw mode, until this is dropped.
pub struct RawTerminal {
    raw: Termios,
    rescue: Option<restore::TerminalRestorer>,
}

impl RawTerminal {
    /// Makes the terminal raw.
    pub fn enter() -> Result<Self, Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::new(Kind::Host, "cannot make the terminal raw").because(std::io::Error::from(errno))
        };
        let saved = tcgetattr(stdio::stdin()).map_err(failed)?;
        let mut raw = saved.clone();
        raw.make_raw();
        // The helper matters only after `kill -9`, so its failure is ignored.
        let rescue = restore::TerminalRestorer::start(&saved).ok();
        restore_on_panic(saved);
        let guard = Self { raw, rescue };
        tcsetattr(stdio::stdin(), OptionalActions::Now, &guard.raw).map_err(failed)?;
        Ok(guard)
    }

    /// Makes it raw again, because a shell that stopped `pal` has changed it.
    pub fn reenter(&self) {
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, &self.raw);
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
        if let Some(rescue) = self.rescue.take() {
            rescue.dismiss();
        }
    }
}

fn restore() {
    if let Some(saved) = SAVED.get() {
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, saved);
    }
}

fn restore_on_panic(saved: Termios) {
    if SAVED.set(saved).is_ok() {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            next(info);
        }));
    }
}
