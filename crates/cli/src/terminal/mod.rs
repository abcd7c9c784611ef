//! Our own terminal: raw while a command uses it, and always restored.
//!
//! The guard's drop restores it, a hook does so on a panic, and a helper process if `pal` is killed.

mod restore;

use std::sync::OnceLock;

use fleet::TtySize;
use proto::{Failure, Kind};
use rustix::{
    stdio,
    termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr},
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
        Self::enter_as(Termios::make_raw)
    }

    /// Makes the terminal give each key at once and show none; the interrupt key still sends its signal.
    pub fn enter_keys() -> Result<Self, Failure> {
        Self::enter_as(|termios| {
            termios.local_modes &= !(LocalModes::ICANON | LocalModes::ECHO);
            termios.special_codes[SpecialCodeIndex::VMIN] = 1;
            termios.special_codes[SpecialCodeIndex::VTIME] = 0;
        })
    }

    /// Makes the terminal show nothing that is typed; lines and signals stay as they are.
    pub fn enter_hidden() -> Result<Self, Failure> {
        Self::enter_as(|termios| {
            termios.local_modes &= !LocalModes::ECHO;
            termios.local_modes |= LocalModes::ECHONL;
        })
    }

    fn enter_as(change: impl FnOnce(&mut Termios)) -> Result<Self, Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::new(Kind::Host, "cannot make the terminal raw").because(std::io::Error::from(errno))
        };
        let saved = tcgetattr(stdio::stdin()).map_err(failed)?;
        let mut raw = saved.clone();
        change(&mut raw);
        // The helper matters only after `kill -9`, so its failure is ignored.
        let rescue = restore::TerminalRestorer::start(&saved).ok();
        restore_on_panic(saved);
        let guard = Self { raw, rescue };
        tcsetattr(stdio::stdin(), OptionalActions::Now, &guard.raw).map_err(failed)?;
        Ok(guard)
    }

    /// Makes it as it was before, for a while.
    pub fn leave(&self) {
        restore();
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
