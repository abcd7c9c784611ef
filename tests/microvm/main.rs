//! What only a Body with a kernel of its own does: frozen and thawed with its memory, and ended like a machine.

mod bad_input;
mod death;
mod forks;
mod kernels;
mod kills;
mod limits;
mod memory;
mod pause;
mod probes;
mod serve;
mod share;
mod spares;
mod walls;
