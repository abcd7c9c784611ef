//! The enforcement record: for each mechanism, whether and how it really confines a Body.
//!
//! Invariant: the record lists every requested mechanism that is missing, with the reason; omitting one is a
//! bug.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How far a mechanism is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MechanismStatus {
    /// It is not in force.
    Absent,
    /// It is in force, but weaker than it should be.
    Degraded,
    /// The kernel enforces it.
    Enforced,
}

impl MechanismStatus {
    /// The word for it in every output.
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

/// One mechanism of a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mechanism {
    /// Its name: `memory limit`, `seccomp`, `user namespace`, …
    pub name: String,
    /// How far it is in force.
    pub state: MechanismStatus,
    /// The mechanism that enforces it, or the cause of the gap.
    pub reason: String,
}

impl Mechanism {
    /// A mechanism that is in force.
    pub fn enforced(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Enforced, reason: reason.into() }
    }

    /// A mechanism that is in force with a gap, which `reason` names.
    pub fn degraded(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Degraded, reason: reason.into() }
    }

    /// A mechanism that is not in force; `reason` says why.
    pub fn absent(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), state: MechanismStatus::Absent, reason: reason.into() }
    }
}

/// All mechanisms of a Body, in the order in which the launcher set them up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforcement {
    /// The mechanisms.
    pub mechanisms: Vec<Mechanism>,
}

impl Enforcement {
    /// The mechanism with a name.
    pub fn get(&self, name: &str) -> Option<&Mechanism> {
        self.mechanisms.iter().find(|mechanism| mechanism.name == name)
    }

    /// How many mechanisms have a status.
    pub fn count(&self, state: MechanismStatus) -> usize {
        self.mechanisms.iter().filter(|mechanism| mechanism.state == state).count()
    }
}
