//! Sealed secrets, the certificate authorities of Bodies, and keys of ssh.
//!
//! `pal` seals values with the key of its data directory; the egress process of a Body opens those that the Body may use.
//! A sealed value on the disk or in the orders of a process tells nothing without that key.

mod authority;
mod seal;
pub mod ssh;

pub use authority::{AuthorityError, LeafCertificate, LeafIssuer, RootAuthority, SigningAuthority};
pub use seal::{SealError, SealKey};
pub use zeroize::Zeroizing;
