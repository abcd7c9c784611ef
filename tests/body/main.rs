//! What a Body does: its life, its commands, its limits, its files, and what is left when it is gone.

mod death;
mod exec;
mod fleets;
mod life;
mod limits;
