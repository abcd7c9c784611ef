//! The alphabet of ids: lower-case letters and digits, 32 of them, none that look alike.

const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// Spells `bytes`, one character for each, keeping five bits of each: for random input only.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect()
}
