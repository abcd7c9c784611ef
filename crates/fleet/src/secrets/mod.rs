//! Secrets that Bodies use and never see: their records, their values, and the Bodies that may use them.
//!
//! A record says where the value comes from, to which hosts it may go and in which parts of a request. A Body with a grant
//! holds a placeholder; its egress process puts the value in its place on the way out.
//!
//! Invariant: a value is in no spec, event, error, log or argument; on the disk it is sealed with the data directory's key.
//! Invariant: a Body loses a secret before the record of the secret is gone.
//! Trust: the output of a command and the bytes of a file are checked before they become a header.

mod authority;
mod grants;
mod record;
mod services;
mod ssh;
mod store;
mod value;

pub use record::{SecretOrigin, SecretRecord, SecretSource, SecretTerms};
pub use services::{SERVICES, SecretService};
pub use store::{SecretView, Secrets};
pub use value::HostVariables;

pub(crate) use authority::BodyAuthority;
pub(crate) use grants::{add_grant, live_variables};
