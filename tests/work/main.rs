//! Repositories in Bodies: import, landing, and that no work is lost.

mod account;
mod bounds;
mod bring;
mod contents;
mod devcontainer;
mod ecosystems;
mod home;
mod hostile;
mod keep;
mod kills;
mod land;
mod land_history;
mod prepare;
mod prepared_files;
mod property;
mod repo;
mod several;
mod status;
mod submodules;
mod sync;
mod terminal;
