//! Keys of ssh: private keys that sign, host keys that are checked, and lists of known hosts.
//!
//! Invariant: a private key leaves this module only as a signature.
//! Trust: every reader here takes hostile bytes; lengths are checked before they are used.

mod host_key;
mod known_hosts;
mod private_key;
mod wire;

pub use host_key::{is_host_key, verify};
pub use known_hosts::{KnownHost, host_label, known_hosts_of};
pub use private_key::{SshKeyError, SshPrivateKey};
pub use wire::{SshReader, put_string};
