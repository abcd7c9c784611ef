//! The settings of a sub-agent that only its driver needs.

use fleet::WorkMark;
use serde::{Deserialize, Serialize};

/// The place of a sub-agent's work, and the state that the work is compared with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubagentSettings {
    /// Whether it works in the Body of its parent.
    #[serde(default)]
    pub shares_body: bool,
    /// The state of the parent's repositories at the start.
    #[serde(default)]
    pub marks: Vec<WorkMark>,
}
