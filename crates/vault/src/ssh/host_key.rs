//! Keys of hosts, and the signatures that they make.

use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey,
    VerificationAlgorithm,
};

use super::wire::SshReader;

/// A public key, as far as its signatures can be checked.
enum PublicKey<'a> {
    Ed25519(&'a [u8]),
    /// A point, and the length of one of its numbers.
    Ecdsa(&'static dyn VerificationAlgorithm, &'a [u8], usize),
    Rsa {
        n: &'a [u8],
        e: &'a [u8],
    },
}

/// Whether this is a public key whose signatures can be checked: Ed25519, ECDSA of 256 or 384 bits, or RSA.
pub fn is_host_key(key: &[u8]) -> bool {
    parse(key).is_some()
}

fn parse(key: &[u8]) -> Option<PublicKey<'_>> {
    let mut reader = SshReader::new(key);
    let ecdsa =
        |mut reader: SshReader<'_>, curve: &[u8]| reader.string().filter(|named| *named == curve).is_some();
    let parsed = match reader.string()? {
        b"ssh-ed25519" => PublicKey::Ed25519(reader.string()?),
        b"ecdsa-sha2-nistp256" if ecdsa(reader.clone(), b"nistp256") => {
            reader.string()?;
            PublicKey::Ecdsa(&ECDSA_P256_SHA256_FIXED, reader.string()?, 32)
        }
        b"ecdsa-sha2-nistp384" if ecdsa(reader.clone(), b"nistp384") => {
            reader.string()?;
            PublicKey::Ecdsa(&ECDSA_P384_SHA384_FIXED, reader.string()?, 48)
        }
        b"ssh-rsa" => {
            let e = reader.mpint()?;
            PublicKey::Rsa { e, n: reader.mpint()? }
        }
        _ => return None,
    };
    reader.finish(parsed)
}

/// Whether a key made this signature of a message. Signatures with SHA-1 do not count.
pub fn verify(key: &[u8], signature: &[u8], message: &[u8]) -> bool {
    check(key, signature, message).is_some()
}

fn check(key: &[u8], signature: &[u8], message: &[u8]) -> Option<()> {
    let mut reader = SshReader::new(signature);
    let (algorithm, value) = (reader.string()?, reader.string()?);
    reader.finish(())?;
    match (parse(key)?, algorithm) {
        (PublicKey::Ed25519(key), b"ssh-ed25519") => {
            UnparsedPublicKey::new(&ED25519, key).verify(message, value).ok()
        }
        (PublicKey::Ecdsa(curve, key, len), b"ecdsa-sha2-nistp256" | b"ecdsa-sha2-nistp384")
            if (algorithm == b"ecdsa-sha2-nistp256") == (len == 32) =>
        {
            let mut numbers = SshReader::new(value);
            let mut fixed = padded(numbers.mpint()?, len)?;
            fixed.extend(padded(numbers.mpint()?, len)?);
            numbers.finish(())?;
            UnparsedPublicKey::new(curve, key).verify(message, &fixed).ok()
        }
        (PublicKey::Rsa { n, e }, b"rsa-sha2-256") => rsa(n, e, &RSA_PKCS1_2048_8192_SHA256, message, value),
        (PublicKey::Rsa { n, e }, b"rsa-sha2-512") => rsa(n, e, &RSA_PKCS1_2048_8192_SHA512, message, value),
        _ => None,
    }
}

fn rsa(n: &[u8], e: &[u8], params: &RsaParameters, message: &[u8], value: &[u8]) -> Option<()> {
    // Some servers leave zeros at the beginning out.
    let value = padded(value, n.len()).filter(|_| !n.is_empty())?;
    RsaPublicKeyComponents { n, e }.verify(params, message, &value).ok()
}

/// A number with zeros before it; none if it is longer.
pub fn padded(number: &[u8], len: usize) -> Option<Vec<u8>> {
    let zeros = len.checked_sub(number.len())?;
    Some([&vec![0; zeros], number].concat())
}
