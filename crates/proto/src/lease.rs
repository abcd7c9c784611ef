//! The words of a lease: what happens to a Body at its deadline, and how it is paused.

use serde::{Deserialize, Serialize};

/// What happens to a Body at its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is removed.
    Kill,
    /// It is paused.
    Pause(PauseMode),
}

/// How a Body is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Its processes stand still.
    Memory,
    /// Its processes are ended; its files stay.
    Files,
}
