//! Tests with keys that ssh-keygen makes, and whose signatures it checks.

use std::{path::PathBuf, process::Command};

use ring::digest;

use super::*;
use crate::ssh::verify;

/// A directory with a key of ssh-keygen.
struct MadeKey(PathBuf);

impl MadeKey {
    fn make(name: &str, options: &[&str]) -> Self {
        let dir = std::env::temp_dir().join(format!("palisade-ssh-key-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let made = Self(dir);
        let file = made.0.join("key");
        let done = Command::new("ssh-keygen").args(["-q", "-f"]).arg(&file).args(options).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        made
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.0.join("key")).unwrap()
    }

    fn public(&self) -> Vec<u8> {
        let line = std::fs::read_to_string(self.0.join("key.pub")).unwrap();
        STANDARD.decode(line.split(' ').nth(1).unwrap()).unwrap()
    }

    /// Whether ssh-keygen accepts a signature of a message.
    fn accepts(&self, signature: &[u8], message: &[u8]) -> bool {
        let mut whole = b"SSHSIG\0\0\0\x01".to_vec();
        [&self.public()[..], b"test", b"", b"sha512", signature]
            .iter()
            .for_each(|part| put_string(&mut whole, part));
        let armored = format!(
            "-----BEGIN SSH SIGNATURE-----\n{}\n-----END SSH SIGNATURE-----\n",
            STANDARD.encode(whole)
        );
        std::fs::write(self.0.join("signature"), armored).unwrap();
        std::fs::write(self.0.join("message"), message).unwrap();
        let checked = Command::new("ssh-keygen")
            .args(["-Y", "check-novalidate", "-n", "test", "-s"])
            .arg(self.0.join("signature"))
            .stdin(std::fs::File::open(self.0.join("message")).unwrap())
            .output()
            .unwrap();
        checked.status.success()
    }
}

impl Drop for MadeKey {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The text that ssh-keygen signs in place of a message.
fn enveloped(message: &[u8]) -> Vec<u8> {
    let hash = digest::digest(&digest::SHA512, message);
    let mut text = b"SSHSIG".to_vec();
    [b"test", &b""[..], b"sha512", hash.as_ref()].iter().for_each(|part| put_string(&mut text, part));
    text
}

#[test]
fn ssh_keygen_accepts_signatures_of_each_type_of_key() {
    for (name, options, flags, algorithm) in [
        ("ed25519", &["-t", "ed25519", "-N", ""][..], 0, "ssh-ed25519"),
        ("p256", &["-t", "ecdsa", "-b", "256", "-N", ""], 0, "ecdsa-sha2-nistp256"),
        ("p384", &["-t", "ecdsa", "-b", "384", "-N", ""], 0, "ecdsa-sha2-nistp384"),
        ("rsa2048", &["-t", "rsa", "-b", "2048", "-N", ""], 2, "rsa-sha2-256"),
        ("rsa3072", &["-t", "rsa", "-b", "3072", "-N", ""], 6, "rsa-sha2-512"),
        ("rsa4096", &["-t", "rsa", "-b", "4096", "-N", ""], 4, "rsa-sha2-512"),
    ] {
        let made = MadeKey::make(name, options);
        let key = SshPrivateKey::parse(&made.text()).unwrap();
        assert_eq!((key.public(), key.algorithm(flags)), (&made.public()[..], Some(algorithm)));
        for round in 0..8 {
            let message = format!("message {round}");
            let signature = key.sign(&enveloped(message.as_bytes()), flags).unwrap();
            assert!(made.accepts(&signature, message.as_bytes()), "{name}");
            assert!(!made.accepts(&signature, b"another message"), "{name}");
            assert!(verify(key.public(), &signature, &enveloped(message.as_bytes())), "{name}");
            assert!(!verify(key.public(), &signature, b"another message"), "{name}");
            let mut bad = signature.clone();
            *bad.last_mut().unwrap() ^= 1;
            assert!(!verify(key.public(), &bad, &enveloped(message.as_bytes())), "{name}");
            assert!(
                !verify(key.public(), &[&signature[..], &[0]].concat(), &enveloped(message.as_bytes())),
                "{name}"
            );
        }
        if algorithm.starts_with("rsa") {
            assert_eq!(key.sign(b"x", 0), None, "no signature with SHA-1");
        }
    }
}

#[test]
fn other_keys_are_refused_with_their_reason() {
    let parse = |text: &str| SshPrivateKey::parse(text).unwrap_err();
    let encrypted = MadeKey::make("encrypted", &["-t", "ed25519", "-N", "passphrase"]);
    assert_eq!(parse(&encrypted.text()), SshKeyError::Encrypted);
    let long = MadeKey::make("p521", &["-t", "ecdsa", "-b", "521", "-N", ""]);
    assert_eq!(parse(&long.text()), SshKeyError::OtherType);
    let short = MadeKey::make("rsa1024", &["-t", "rsa", "-b", "1024", "-N", ""]);
    assert_eq!(parse(&short.text()), SshKeyError::OtherType);
    let pem = MadeKey::make("pem", &["-t", "rsa", "-b", "2048", "-m", "PEM", "-N", ""]);
    assert_eq!(parse(&pem.text()), SshKeyError::OtherFormat);
    assert_eq!(parse(&std::fs::read_to_string(pem.0.join("key.pub")).unwrap()), SshKeyError::Public);
    for text in ["", "hunter2", BEGIN, &format!("{BEGIN}\n{END}"), &"x".repeat(TEXT_LEN_MAX + 1)] {
        assert_eq!(parse(text), SshKeyError::Damaged);
    }
}

#[test]
fn a_damaged_key_is_refused_and_never_signs_for_another() {
    let made = MadeKey::make("damaged", &["-t", "ed25519", "-N", "", "-C", "c"]);
    let bytes = STANDARD
        .decode(made.text().lines().filter(|line| !line.starts_with('-')).collect::<String>())
        .unwrap();
    assert!(SshPrivateKey::read(&bytes).is_ok());
    for len in 0..bytes.len() {
        assert!(SshPrivateKey::read(&bytes[..len]).is_err(), "cut at {len}");
    }
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        // The comment says nothing about the key, and neither does the name of the key derivation.
        if let Ok(key) = SshPrivateKey::read(&bad) {
            assert_eq!(key.public(), made.public(), "changed at {at}");
        }
    }
    let text = made.text();
    assert!(!format!("{:?}", SshPrivateKey::parse(&text)).contains(&text[60..80]));
}
