//! Hypervisors besides QEMU: their requests match their API descriptions, and the real programs accept them.

mod contract;
mod jail;
mod published;
mod real;
mod shared;
mod told;
