//! Starting a process for somebody else.
