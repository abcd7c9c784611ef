//! Features that only a Body with a kernel of its own has: memory snapshots, restores, and its ways to end.

mod bad_input;
mod death;
mod egress;
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
