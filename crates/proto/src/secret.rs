//! Secrets that are derived from a key, so that no file holds them.
//!
//! Invariant: a secret reveals neither its key nor another secret of the same key: each is the HMAC-SHA256 of
//! a label for its purpose and of its parts, each preceded by its length.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::event::hex;

/// The purpose of a derived secret. Secrets for different purposes never coincide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The access token of one Body's guest.
    GuestToken,
    /// The `/etc/machine-id` of one Body.
    MachineId,
    /// The token with which a client uploads one archive for the builds of a template.
    UploadToken,
}

impl Purpose {
    const fn label(self) -> &'static str {
        match self {
            Self::GuestToken => "palisade guest token v1",
            Self::MachineId => "palisade machine id v1",
            Self::UploadToken => "palisade upload token v1",
        }
    }
}

/// Derives the secret of `parts` for a purpose from `key`, as 64 hexadecimal digits.
pub fn derive(key: &str, purpose: Purpose, parts: &[&str]) -> String {
    #[expect(clippy::expect_used, reason = "HMAC takes a key of any length (RFC 2104)")]
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("any length is a key");
    for part in [purpose.label()].iter().chain(parts) {
        mac.update(&(part.len() as u64).to_be_bytes());
        mac.update(part.as_bytes());
    }
    hex(&mac.finalize().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    #[test]
    fn a_secret_is_the_hmac_of_its_label_and_parts() {
        // The expected values come from Python's hmac module.
        let cases = [
            (
                Purpose::GuestToken,
                &["abc"][..],
                "0aafa38a04bbf83990c3a0153edbb8ef359e1da9f4e9a34fb761e7b92d100d6d",
            ),
            (Purpose::MachineId, &[], "3e847b3deaa12233f6bee639f33ea4baf6d1a40dab26984f7d03f54b88d33353"),
            (
                Purpose::UploadToken,
                &["tpl", "0123"],
                "8d1fbc023f124a5620aa3cf57c8803ccd153589e153abc1ea34a6a7e05ea6636",
            ),
        ];
        for (purpose, parts, expected) in cases {
            assert_eq!(derive(KEY, purpose, parts), expected, "{purpose:?}");
        }
    }

    #[test]
    fn key_purpose_and_the_borders_of_parts_all_count() {
        let secret = derive(KEY, Purpose::UploadToken, &["ab", "c"]);
        assert_ne!(derive("other", Purpose::UploadToken, &["ab", "c"]), secret);
        assert_ne!(derive(KEY, Purpose::GuestToken, &["ab", "c"]), secret);
        assert_ne!(derive(KEY, Purpose::UploadToken, &["a", "bc"]), secret);
        assert_ne!(derive(KEY, Purpose::UploadToken, &["abc"]), secret);
    }
}
