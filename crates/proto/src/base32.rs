//! The alphabet of ids: 32 lower-case letters and digits, none of which look alike.

const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// Encodes random bytes, one character for each: keeps five bits of each byte, so the input must be random.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect()
}
