//! A Body: its life, its commands, its limits, its files, and the traces that it leaves.

mod account;
mod agent_calls;
mod builds;
mod copy;
mod data;
mod death;
mod drivers;
mod egress;
mod events;
mod exec;
mod fleets;
mod fork;
mod hostile;
mod images;
mod leases;
mod life;
mod limits;
mod mounts;
mod parked;
mod peers;
mod templates;
