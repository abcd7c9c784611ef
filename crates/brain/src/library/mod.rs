//! The library of an agent: roles, plan templates, skills and rules, as data.
//!
//! Everything here is made from text that the caller read; nothing does input or output. There are three sources: the
//! files that are part of Palisade, those of the user, and those of the repository. A later source wins by name. Rules
//! are never taken from a repository.
//!
//! Invariant: every file has a limit on its length, and every list one on its count.
//! Invariant: an error names the file, the line, the fault, and how to mend it.
//! Trust: text of a repository is hostile. It can change what an agent is told, never what it may do.

mod collection;
pub mod command;
mod error;
mod front_matter;
mod plans;
mod roles;
pub mod rules;
mod skills;

pub use collection::Library;
pub use error::LibraryError;
pub(crate) use error::{check_len as check_file_len, line_at as line_of};
pub use front_matter::FrontMatter;
pub use plans::{PhaseCheck, PhaseTemplate, PlanTemplate};
pub use roles::{Role, RoleVenue};
pub use rules::{RuleSet, risk_of_command};
pub use skills::Skill;
