//! System calls of a confined program that the supervisor answers (seccomp user notification).

pub mod mknod;
pub mod open;
