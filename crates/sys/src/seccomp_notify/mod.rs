//! System calls that are answered in place of the kernel: `mknod` by a filter, `open` by another process (user notification).

pub mod mknod;
pub mod open;
