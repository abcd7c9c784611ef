//! The tools of an agent, each through the registry, in real Bodies.

mod commands;
mod files;
mod patches;
mod places;
mod recovery;
mod schemas;
mod sessions;
mod world;
