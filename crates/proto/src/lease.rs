//! The terms of a lease: what happens to a Body at its deadline, and how it is paused.

use serde::{Deserialize, Serialize};

/// The action of `pal serve` at a Body's deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// `pal serve` removes it.
    Kill,
    /// `pal serve` pauses it.
    Pause(PauseMode),
}

/// How a Body is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Its processes are frozen and stay in memory.
    Memory,
    /// Its processes end; its files stay.
    Files,
}
