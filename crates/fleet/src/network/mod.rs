//! The network of a Body: presets and rules that make its policy, and changes of the policy while the Body runs.
//!
//! Invariant: a Body without a policy reaches only its own loopback.
//! Invariant: a repository's palisade.toml never opens everything, names addresses, or reaches private networks; only
//! the command line and the API do.

mod changer;
mod corporate;
mod decisions;
mod presets;
mod reach;
mod remotes;
mod repository;
mod request;

pub use changer::{GrantedSecret, NetworkState, PolicyChange, PolicyChanger, PolicyForce, PolicyPart};
pub(crate) use corporate::corporate_proxy;
pub use decisions::{
    NetworkProposal, PolicyVerdict, WantedTarget, allowing_command, allowing_target, judge_target,
};
pub use presets::{Preset, registries};
pub(crate) use reach::names_hosts;
pub use reach::{RuleReach, network_warnings, rule_reach};
pub use request::NetworkRequest;

pub(crate) use repository::repository_policy;
pub(crate) use request::{check, check_accept};
