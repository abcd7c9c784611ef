//! Whole trees in and out: how `pal cp` reaches into a Body.

mod receive;
mod send;

pub use receive::receive;
pub use send::send;
