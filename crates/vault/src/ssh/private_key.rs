//! Private keys in the format of OpenSSH (`openssh-key-v1`), without a passphrase.
//!
//! Invariant: no error and no debug text holds a part of a key.

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::{
    rand::SystemRandom,
    rsa::{KeyPairComponents, PublicKeyComponents},
    signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm, Ed25519KeyPair, RSA_PKCS1_SHA256, RSA_PKCS1_SHA512, RsaEncoding, RsaKeyPair,
    },
};
use zeroize::Zeroizing;

use super::{
    host_key::padded,
    wire::{SshReader, put_mpint, put_string, without_zeros},
};

const BEGIN: &str = "-----BEGIN OPENSSH PRIVATE KEY-----";
const END: &str = "-----END OPENSSH PRIVATE KEY-----";
const MAGIC: &[u8] = b"openssh-key-v1\0";
/// Longest text of a key.
const TEXT_LEN_MAX: usize = 16 << 10;
/// The flags of a sign request by which a client chooses the hash of RSA.
const RSA_SHA2_256: u32 = 2;
const RSA_SHA2_512: u32 = 4;

/// The reason why a text is no key that can sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SshKeyError {
    /// A passphrase protects it.
    #[error("a passphrase protects it")]
    Encrypted,
    /// It has one of the formats of OpenSSL.
    #[error("it is a private key in another format than OpenSSH's")]
    OtherFormat,
    /// It is a public key.
    #[error("it is a public key")]
    Public,
    /// It is of another type.
    #[error("it is neither of Ed25519, nor ECDSA with 256 or 384 bits, nor RSA with 2048, 3072 or 4096 bits")]
    OtherType,
    /// It is not a key, or damaged.
    #[error("it is not a private key of OpenSSH, or it is damaged")]
    Damaged,
}

/// A private key that signs.
pub struct SshPrivateKey {
    public: Vec<u8>,
    pair: KeyPair,
}

enum KeyPair {
    Ed25519(Ed25519KeyPair),
    /// The name of the key's type, and the pair.
    Ecdsa(&'static str, Box<EcdsaKeyPair>),
    Rsa(Box<RsaKeyPair>),
}

impl fmt::Debug for SshPrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SshPrivateKey")
    }
}

impl SshPrivateKey {
    /// Reads a key in the format that `ssh-keygen` writes.
    pub fn parse(text: &str) -> Result<Self, SshKeyError> {
        let text = text.trim();
        if text.len() > TEXT_LEN_MAX {
            return Err(SshKeyError::Damaged);
        }
        let Some(body) = text.strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(END)) else {
            let is_pem = text.starts_with("-----BEGIN ") && text.contains("PRIVATE KEY-----");
            let is_public = ["ssh-", "ecdsa-", "sk-"].iter().any(|kind| text.starts_with(kind));
            return Err(match (is_pem && !text.starts_with(BEGIN), is_public) {
                (true, _) => SshKeyError::OtherFormat,
                (false, true) => SshKeyError::Public,
                (false, false) => SshKeyError::Damaged,
            });
        };
        let packed =
            Zeroizing::new(body.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect::<Vec<u8>>());
        let bytes = Zeroizing::new(STANDARD.decode(&*packed).map_err(|_| SshKeyError::Damaged)?);
        Self::read(&bytes)
    }

    fn read(bytes: &[u8]) -> Result<Self, SshKeyError> {
        let container = || {
            let mut reader = SshReader::new(bytes.strip_prefix(MAGIC)?);
            let (cipher, _kdf, _options) = (reader.string()?, reader.string()?, reader.string()?);
            if reader.number()? != 1 {
                return None;
            }
            let (public, private) = (reader.string()?, reader.string()?);
            reader.finish((cipher, public, private))
        };
        let (cipher, public, private) = container().ok_or(SshKeyError::Damaged)?;
        if cipher != b"none" {
            return Err(SshKeyError::Encrypted);
        }
        let mut reader = SshReader::new(private);
        let checks = (reader.number(), reader.number());
        if checks.0.is_none() || checks.0 != checks.1 {
            return Err(SshKeyError::Damaged);
        }
        let kind = reader.string().ok_or(SshKeyError::Damaged)?;
        let pair = match kind {
            b"ssh-ed25519" => ed25519(&mut reader),
            b"ecdsa-sha2-nistp256" => {
                ecdsa(&mut reader, &ECDSA_P256_SHA256_FIXED_SIGNING, "ecdsa-sha2-nistp256", 32)
            }
            b"ecdsa-sha2-nistp384" => {
                ecdsa(&mut reader, &ECDSA_P384_SHA384_FIXED_SIGNING, "ecdsa-sha2-nistp384", 48)
            }
            b"ssh-rsa" => rsa(&mut reader)?,
            _ => return Err(SshKeyError::OtherType),
        };
        let (pair, own) = pair.ok_or(SshKeyError::Damaged)?;
        let comment = reader.string();
        let padding = reader.rest().iter().enumerate().all(|(at, byte)| usize::from(*byte) == at + 1);
        if comment.is_none() || !padding || own != public {
            return Err(SshKeyError::Damaged);
        }
        Ok(Self { public: own, pair })
    }

    /// The public key.
    pub fn public(&self) -> &[u8] {
        &self.public
    }

    /// The name of the algorithm by which it signs with these flags of a sign request; none if it signs with none.
    pub fn algorithm(&self, flags: u32) -> Option<&'static str> {
        match &self.pair {
            KeyPair::Ed25519(_) => Some("ssh-ed25519"),
            KeyPair::Ecdsa(kind, _) => Some(kind),
            KeyPair::Rsa(_) if flags & RSA_SHA2_512 != 0 => Some("rsa-sha2-512"),
            KeyPair::Rsa(_) if flags & RSA_SHA2_256 != 0 => Some("rsa-sha2-256"),
            // A signature with SHA-1.
            KeyPair::Rsa(_) => None,
        }
    }

    /// Signs a message.
    pub fn sign(&self, message: &[u8], flags: u32) -> Option<Vec<u8>> {
        let algorithm = self.algorithm(flags)?;
        let value = match &self.pair {
            KeyPair::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
            KeyPair::Ecdsa(_, pair) => {
                let fixed = pair.sign(&SystemRandom::new(), message).ok()?;
                let (r, s) = fixed.as_ref().split_at(fixed.as_ref().len() / 2);
                let mut numbers = Vec::new();
                put_mpint(&mut numbers, r);
                put_mpint(&mut numbers, s);
                numbers
            }
            KeyPair::Rsa(pair) => {
                let encoding: &'static dyn RsaEncoding =
                    if algorithm == "rsa-sha2-512" { &RSA_PKCS1_SHA512 } else { &RSA_PKCS1_SHA256 };
                let mut value = vec![0; pair.public().modulus_len()];
                pair.sign(encoding, &SystemRandom::new(), message, &mut value).ok()?;
                value
            }
        };
        let mut signature = Vec::new();
        put_string(&mut signature, algorithm.as_bytes());
        put_string(&mut signature, &value);
        Some(signature)
    }
}

/// A pair, and its public key as ssh writes it.
type ReadPair = Option<(KeyPair, Vec<u8>)>;

fn public_key(kind: &str, parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::new();
    put_string(&mut key, kind.as_bytes());
    parts.iter().for_each(|part| put_string(&mut key, part));
    key
}

fn ed25519(reader: &mut SshReader<'_>) -> ReadPair {
    let (point, both) = (reader.string()?, reader.string()?);
    let (seed, again) = both.split_at_checked(32)?;
    if again != point {
        return None;
    }
    let pair = Ed25519KeyPair::from_seed_and_public_key(seed, point).ok()?;
    Some((KeyPair::Ed25519(pair), public_key("ssh-ed25519", &[point])))
}

fn ecdsa(
    reader: &mut SshReader<'_>,
    algorithm: &'static EcdsaSigningAlgorithm,
    kind: &'static str,
    len: usize,
) -> ReadPair {
    let (curve, point) = (reader.string()?, reader.string()?);
    let number = Zeroizing::new(padded(reader.mpint()?, len)?);
    let random = SystemRandom::new();
    let pair = EcdsaKeyPair::from_private_key_and_public_key(algorithm, &number, point, &random).ok()?;
    (kind.as_bytes().ends_with(curve) && !curve.is_empty())
        .then(|| (KeyPair::Ecdsa(kind, Box::new(pair)), public_key(kind, &[curve, point])))
}

fn rsa(reader: &mut SshReader<'_>) -> Result<ReadPair, SshKeyError> {
    let numbers = || {
        let (n, e, d) = (reader.mpint()?, reader.mpint()?, reader.mpint()?);
        let (inverse, p, q) = (reader.mpint()?, reader.mpint()?, reader.mpint()?);
        // The private exponents of the primes, which the format leaves out.
        let (of_p, of_q) = (exponent(d, p)?, exponent(d, q)?);
        Some((n, e, d, inverse, p, q, of_p, of_q))
    };
    let mut numbers = numbers;
    let Some((n, e, d, inverse, p, q, of_p, of_q)) = numbers() else { return Ok(None) };
    if ![256, 384, 512].contains(&n.len()) {
        return Err(SshKeyError::OtherType);
    }
    let components = KeyPairComponents {
        public_key: PublicKeyComponents { n, e },
        d,
        p,
        q,
        dP: without_zeros(&of_p),
        dQ: without_zeros(&of_q),
        qInv: inverse,
    };
    let Ok(pair) = RsaKeyPair::from_components(&components) else { return Ok(None) };
    let mut public = Vec::new();
    put_string(&mut public, b"ssh-rsa");
    put_mpint(&mut public, e);
    put_mpint(&mut public, n);
    Ok(Some((KeyPair::Rsa(Box::new(pair)), public)))
}

/// `d mod (prime - 1)`, by the division that is taught in school; it runs once for each key that is read.
fn exponent(d: &[u8], prime: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    // A prime is odd.
    let last = prime.last().filter(|last| *last & 1 == 1)?;
    let mut divisor = Zeroizing::new([&[0], prime].concat());
    *divisor.last_mut()? = last - 1;
    let mut rest = Zeroizing::new(vec![0_u8; divisor.len()]);
    for bit in d.iter().flat_map(|byte| (0..8).rev().map(move |at| byte >> at & 1)) {
        let mut carry = bit;
        for byte in rest.iter_mut().rev() {
            (*byte, carry) = (*byte << 1 | carry, *byte >> 7);
        }
        if *rest >= *divisor {
            let mut borrow = false;
            for (byte, less) in rest.iter_mut().zip(divisor.iter()).rev() {
                let (first, one) = byte.overflowing_sub(*less);
                let (second, two) = first.overflowing_sub(borrow.into());
                (*byte, borrow) = (second, one || two);
            }
        }
    }
    Some(rest)
}

#[cfg(test)]
#[path = "private_key_tests.rs"]
mod tests;
