//! Our own terminal: raw while a command has it, and always given back.
//!
//! Given back by the guard's drop, by a hook when we panic, and by a helper process when we are killed.

mod restore;

use std::sync::OnceLock;

use fleet::TtySize;
use proto::{Failure, Kind};
use rustix::{
    stdio,
    termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr},
};

pub use restore::{RESCUE, restore_when_orphaned};

/// What a terminal that does not know its size is taken for.
const SIZE_UNKNOWN: TtySize = TtySize { cols: 80, rows: 24 };

/// The size of our terminal.
pub fn size() -> TtySize {
    match tcgetwinsize(stdio::stdin()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => TtySize { cols: size.ws_col, rows: size.ws_row },
        _ => SIZE_UNKNOWN,
    }
}

/// As the terminal was, for the panic hook: a panic aborts, so no drop runs.
static SAVED: OnceLock<Termios> = OnceLock::new();

/// Our terminal, raw until this is dropped.
pub struct RawTerminal {
    raw: Termios,
    rescue: Option<restore::TerminalRestorer>,
}

impl RawTerminal {
    /// Makes it raw.
    pub fn enter() -> Result<Self, Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::new(Kind::Host, "cannot make the terminal raw").because(std::io::Error::from(errno))
        };
        let saved = tcgetattr(stdio::stdin()).map_err(failed)?;
        let mut raw = saved.clone();
        raw.make_raw();
        // Without the helper all is well, but for a kill -9.
        let rescue = restore::TerminalRestorer::start(&saved).ok();
        restore_on_panic(saved);
        let guard = Self { raw, rescue };
        tcsetattr(stdio::stdin(), OptionalActions::Now, &guard.raw).map_err(failed)?;
        Ok(guard)
    }

    /// Makes it raw again: a shell that stopped us has changed it.
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
