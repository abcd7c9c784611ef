//! Hypervisors besides QEMU: what they are asked is what their descriptions have, and what becomes of a machine that is
//! asked of one.

mod contract;
mod jail;
mod published;
mod real;
mod shared;
mod told;
