//! The Brain: an agent that thinks on the host and acts only through tools.
//!
//! Absent on purpose: any knowledge of Bodies. The Brain knows tools and models; the caller connects tools to a Body.
//! Invariant: the library reads no environment and no home; keys, files and settings come from the caller.

pub mod agent;
pub mod library;
pub mod model;
pub mod patch;
