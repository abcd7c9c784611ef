//! The scripted model: answers from a file, in this process or behind a server that speaks the wire formats.
//!
//! Invariant: the position in a script follows from the conversation alone, so any number of agents share one
//! script, and an agent that was killed goes on at the right turn.
//! Invariant: a script that does not fit the conversation fails loudly; it never invents an answer.

mod in_process;
mod script;
mod server;
mod track;

pub use in_process::ScriptedModel;
pub use script::{Script, ScriptError};
pub use server::{ModelServer, ModelServerError, ServerOptions};
