//! `pal-egress`: the process that connects one Body to the names of its policy, and to nothing else.
//!
//! The Body's supervisor starts it, restarts it when it dies, and ends it with the Body; it needs no `pal`. It
//! decides by the policy, writes the decision to the Body's spool, and only then forwards. Any `pal` copies the
//! spool's lines into the event log.
//!
//! Programs reach it in three ways, which end in one (`connection`): they ask its socket for a tunnel or a page
//! (`proxy`), the kernel redirects their connections to it (`redirect`), and they look names up (`dns`). Clients of ssh
//! take its socket for an agent (`ssh_agent`). The egress processes of other Bodies connect to it, too (`peers`).
//!
//! Invariant: it has one thread, from start to end.
//! Invariant: the spool is its only file descriptor of a file; it opens files only for reading, and starts no
//! program.
//! Invariant: it ends with the Body's first process, even if the supervisor was killed.
//! Absent on purpose: the event log. A process that parses hostile bytes does not write to it.

mod address;
mod budgets;
mod client;
mod client_hello;
mod confine;
mod connection;
mod control;
mod corporate;
mod dial;
mod dns;
mod dns_message;
mod first_bytes;
mod flows;
mod http_body;
mod http_gate;
mod http_head;
mod idle;
mod inputs;
mod inspect;
mod journal;
mod name_cache;
mod names;
mod peers;
mod process;
mod proxy;
mod questions;
mod redirect;
mod refusal;
mod resolve;
mod secrets;
mod splice;
mod ssh_agent;
mod supervisor;
mod target;

pub use process::main;

/// The readers of hostile bytes, for the fuzz targets.
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
