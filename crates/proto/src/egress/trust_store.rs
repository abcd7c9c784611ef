//! Trusted certificates in the form that Java reads: PKCS#12 without a password, because Java reads no PEM and no variable
//! of other programs.

use base64::{Engine, engine::general_purpose::STANDARD};

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OCTETS: u8 = 0x04;
const BMP_STRING: u8 = 0x1e;
/// A value with the context's tag 0 around it.
const TAGGED: u8 = 0xa0;
const VERSION_3: &[u8] = &[0x02, 1, 3];
/// pkcs-7-data, 1.2.840.113549.1.7.1.
const DATA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 1];
/// pkcs-12-certBag, 1.2.840.113549.1.12.10.1.3.
const CERT_BAG: &[u8] = &[0x06, 11, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 10, 1, 3];
/// x509Certificate, 1.2.840.113549.1.9.22.1.
const X509: &[u8] = &[0x06, 10, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 22, 1];
/// friendlyName, 1.2.840.113549.1.9.20: the alias of an entry.
const FRIENDLY_NAME: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 20];
/// Oracle's trustedKeyUsage, 2.16.840.1.113894.746875.1.1: only certificates with it are trusted.
const TRUSTED_USAGE: &[u8] = &[0x06, 12, 0x60, 0x86, 0x48, 1, 0x86, 0xf9, 0x66, 0xad, 0xca, 0x7b, 1, 1];
/// anyExtendedKeyUsage, 2.5.29.37.0.
const ANY_USAGE: &[u8] = &[0x06, 4, 0x55, 0x1d, 0x25, 0];

/// The trust store with the certificates of a PEM bundle.
pub fn java_trust_store(bundle: &str) -> Vec<u8> {
    let bags: Vec<u8> =
        certificates(bundle).enumerate().flat_map(|(at, certificate)| bag(at, &certificate)).collect();
    let contents = data(&der(SEQUENCE, &bags));
    der(SEQUENCE, &[VERSION_3, &data(&der(SEQUENCE, &contents))].concat())
}

/// The certificates of a bundle, in DER. Text around them is a comment.
fn certificates(bundle: &str) -> impl Iterator<Item = Vec<u8>> {
    bundle.split("-----BEGIN CERTIFICATE-----").skip(1).filter_map(|rest| {
        let (text, _) = rest.split_once("-----END CERTIFICATE-----")?;
        STANDARD.decode(text.split_ascii_whitespace().collect::<String>()).ok()
    })
}

fn bag(at: usize, certificate: &[u8]) -> Vec<u8> {
    let certificate = der(SEQUENCE, &[X509, &der(TAGGED, &der(OCTETS, certificate))].concat());
    let alias: Vec<u8> = at.to_string().bytes().flat_map(|digit| [0, digit]).collect();
    let attribute = |name: &[u8], value: &[u8]| der(SEQUENCE, &[name, &der(SET, value)].concat());
    let attributes =
        [attribute(FRIENDLY_NAME, &der(BMP_STRING, &alias)), attribute(TRUSTED_USAGE, ANY_USAGE)].concat();
    der(SEQUENCE, &[CERT_BAG, &der(TAGGED, &certificate), &der(SET, &attributes)].concat())
}

/// Content of type data.
fn data(content: &[u8]) -> Vec<u8> {
    der(SEQUENCE, &[DATA, &der(TAGGED, &der(OCTETS, content))].concat())
}

/// A tag, a length and a value.
fn der(tag: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    match u8::try_from(value.len()) {
        Ok(short) if short < 0x80 => out.push(short),
        _ => {
            let digits = value.len().to_be_bytes();
            let digits = &digits[value.len().leading_zeros() as usize / 8..];
            out.push(0x80 | digits.len() as u8);
            out.extend_from_slice(digits);
        }
    }
    out.extend_from_slice(value);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_written_in_the_shortest_form() {
        assert_eq!(der(OCTETS, &[7; 3]), [4, 3, 7, 7, 7]);
        assert_eq!(der(OCTETS, &[7; 0x80])[..3], [4, 0x81, 0x80]);
        assert_eq!(der(OCTETS, &[7; 0x1234])[..4], [4, 0x82, 0x12, 0x34]);
    }

    #[test]
    fn each_certificate_of_a_bundle_is_in_the_store_and_text_is_not() {
        let pem = |byte: &[u8]| {
            format!(
                "a comment\n-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
                STANDARD.encode(byte)
            )
        };
        let found: Vec<Vec<u8>> = certificates(&format!("{}{}", pem(b"one"), pem(b"two"))).collect();
        assert_eq!(found, [b"one", b"two"]);
        let store = java_trust_store(&pem(b"one"));
        let has = |part: &[u8]| store.windows(part.len()).any(|window| window == part);
        assert!(has(&[4, 3, b'o', b'n', b'e']) && has(TRUSTED_USAGE) && !has(b"comment"));
        for name in [DATA, CERT_BAG, X509, FRIENDLY_NAME, TRUSTED_USAGE, ANY_USAGE] {
            assert_eq!(usize::from(name[1]), name.len() - 2, "the length of {name:x?}");
        }
    }
}
