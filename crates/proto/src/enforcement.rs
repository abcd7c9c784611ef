//! The enforcement record: what really holds a Body, mechanism by mechanism.
//!
//! Invariant: a mechanism that was asked for and is missing is in the record with its reason; silence is a bug.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How far a mechanism holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MechanismStatus {
    /// Not there at all.
    Absent,
    /// There, but weaker than it should be.
    Degraded,
    /// The kernel holds it.
    Enforced,
}

impl MechanismStatus {
    /// The word on every surface.
    pub fn name(self) -> &'static str {
        match self {
            MechanismStatus::Absent => "absent",
            MechanismStatus::Degraded => "degraded",
            MechanismStatus::Enforced => "enforced",
        }
    }
}

impl fmt::Display for MechanismStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One mechanism of one Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mechanism {
    /// What it is for: `memory limit`, `seccomp`, `user namespace`, …
    pub name: String,
    /// How far it holds.
    pub state: MechanismStatus,
    /// By what it is held, or why it is not.
    pub reason: String,
}

impl Mechanism {
    /// Holds.
    pub fn enforced(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Enforced, reason: reason.into() }
    }

    /// Holds, with a gap that `reason` names.
    pub fn degraded(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Degraded, reason: reason.into() }
    }

    /// Does not hold, because of `reason`.
    pub fn absent(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Absent, reason: reason.into() }
    }
}

/// All mechanisms of one Body, in the order in which they were put in place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforcement {
    /// The mechanisms.
    pub mechanisms: Vec<Mechanism>,
}

impl Enforcement {
    /// The mechanism of that name.
    pub fn get(&self, name: &str) -> Option<&Mechanism> {
        self.mechanisms.iter().find(|mechanism| mechanism.name == name)
    }

    /// How many are in that state.
    pub fn count(&self, state: MechanismStatus) -> usize {
        self.mechanisms.iter().filter(|mechanism| mechanism.state == state).count()
    }
}
