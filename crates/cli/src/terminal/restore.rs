//! A helper process that restores the terminal if `pal` is killed.
//!
//! Its standard input is a pipe from `pal`: the saved state, then perhaps [`DONE`]. Its standard output is
//! the terminal. If the pipe ends without [`DONE`], `pal` is gone, and the helper restores the state.

use std::{
    io::{self, Read, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, Command, Stdio},
};

use rustix::{
    stdio,
    termios::{
        ControlModes, InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios,
        tcgetattr, tcsetattr,
    },
};

use crate::{commands::runtime, session::StopSignals};

/// The first argument of the helper; not meant for users.
pub const RESCUE: &str = "__restore-tty";
const DONE: u8 = b'd';
/// Length of the state: four words of modes and two special codes, which is all that raw mode changes.
const STATE_LEN: usize = 4 * 4 + 2;

/// The helper process, as `pal` sees it.
pub struct TerminalRestorer {
    helper: Child,
}

impl TerminalRestorer {
    /// Starts the helper and sends it the state of the terminal.
    pub fn start(saved: &Termios) -> io::Result<Self> {
        let terminal = stdio::stdin().as_fd().try_clone_to_owned()?;
        let mut helper = Command::new("/proc/self/exe")
            .arg0("pal-rescue")
            .arg(RESCUE)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(terminal)
            .stderr(Stdio::null())
            .spawn()?;
        if let Some(pipe) = &mut helper.stdin {
            pipe.write_all(&encode(saved))?;
        }
        Ok(Self { helper })
    }

    /// Ends the helper after the terminal was restored.
    pub fn dismiss(mut self) {
        if let Some(mut pipe) = self.helper.stdin.take() {
            let _ = pipe.write_all(&[DONE]);
        }
        let _ = self.helper.wait();
    }
}

/// The main function of the helper.
pub fn restore_when_orphaned() {
    // In a session of its own the helper gets neither signals of the terminal nor SIGTTOU.
    let _ = rustix::process::setsid();
    let ears = runtime().ok();
    let _deaf = ears.as_ref().map(|runtime| {
        let _inside = runtime.enter();
        StopSignals::listen()
    });
    let mut heard = Vec::with_capacity(STATE_LEN + 1);
    let told = io::stdin().take(STATE_LEN as u64 + 1).read_to_end(&mut heard);
    if told.is_ok()
        && let Ok(state) = <[u8; STATE_LEN]>::try_from(heard)
    {
        restore(&state);
    }
}

fn restore(state: &[u8; STATE_LEN]) {
    let Ok(mut termios) = tcgetattr(stdio::stdout()) else { return };
    decode(state, &mut termios);
    let _ = tcsetattr(stdio::stdout(), OptionalActions::Now, &termios);
}

fn encode(termios: &Termios) -> [u8; STATE_LEN] {
    let modes = [
        termios.input_modes.bits(),
        termios.output_modes.bits(),
        termios.control_modes.bits(),
        termios.local_modes.bits(),
    ];
    let mut state = [0; STATE_LEN];
    for (place, word) in state.chunks_exact_mut(4).zip(modes) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    state[16] = termios.special_codes[SpecialCodeIndex::VMIN];
    state[17] = termios.special_codes[SpecialCodeIndex::VTIME];
    state
}

fn decode(state: &[u8; STATE_LEN], termios: &mut Termios) {
    let word = |at: usize| u32::from_le_bytes([state[at], state[at + 1], state[at + 2], state[at + 3]]);
    termios.input_modes = InputModes::from_bits_retain(word(0));
    termios.output_modes = OutputModes::from_bits_retain(word(4));
    termios.control_modes = ControlModes::from_bits_retain(word(8));
    termios.local_modes = LocalModes::from_bits_retain(word(12));
    termios.special_codes[SpecialCodeIndex::VMIN] = state[16];
    termios.special_codes[SpecialCodeIndex::VTIME] = state[17];
}
