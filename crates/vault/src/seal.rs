//! Encryption of values at rest: ChaCha20-Poly1305, with a random nonce for each.
//!
//! Invariant: a value opens only in the context for which it was sealed, so a sealed value cannot be moved to another name.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::{
    aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};
use zeroize::Zeroizing;

const KEY_LEN: usize = 32;

/// A key that seals and opens values.
#[derive(Clone)]
pub struct SealKey(Zeroizing<[u8; KEY_LEN]>);

/// A value that cannot be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The kernel gives no random bytes.
    #[error("the system has no random bytes")]
    NoRandom,
    /// The text was sealed with another key or for another purpose, or was changed.
    #[error("it was sealed with another key, or is damaged")]
    Unopenable,
}

impl SealKey {
    /// A new key.
    pub fn generate() -> Result<Self, SealError> {
        let mut key = Zeroizing::new([0; KEY_LEN]);
        SystemRandom::new().fill(&mut *key).map_err(|_| SealError::NoRandom)?;
        Ok(Self(key))
    }

    /// Reads a key file.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = Zeroizing::new(fs::read_to_string(path)?);
        Self::from_hex(text.trim())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it holds no key"))
    }

    /// Reads a key file, or creates it. Of several callers that create it, all get the key of the first one.
    pub fn read_or_create(path: &Path) -> io::Result<Self> {
        match Self::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => return done,
        }
        let key = Self::generate().map_err(io::Error::other)?;
        // The key has its final name only when it is complete on the disk.
        let mut draft = path.to_owned().into_os_string();
        draft.push(format!(".{}", std::process::id()));
        let _ = fs::remove_file(&draft);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(key.to_hex().as_bytes())?;
        file.sync_all()?;
        let linked = fs::hard_link(&draft, path);
        fs::remove_file(&draft)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Self::read(path),
        }
    }

    /// Reads a key in hexadecimal.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut key = Zeroizing::new([0; KEY_LEN]);
        if text.len() != 2 * KEY_LEN || !text.is_ascii() {
            return None;
        }
        for (at, byte) in key.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Self(key))
    }

    /// The key in hexadecimal.
    pub fn to_hex(&self) -> Zeroizing<String> {
        Zeroizing::new(self.0.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn cipher(&self) -> Result<LessSafeKey, SealError> {
        let key = UnboundKey::new(&CHACHA20_POLY1305, &*self.0).map_err(|_| SealError::Unopenable)?;
        Ok(LessSafeKey::new(key))
    }

    /// Seals a value for a context.
    pub fn seal(&self, context: &str, value: &[u8]) -> Result<String, SealError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| SealError::NoRandom)?;
        let mut text = value.to_vec();
        let cipher = self.cipher()?;
        let sealed = cipher.seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(context.as_bytes()),
            &mut text,
        );
        sealed.map_err(|_| SealError::Unopenable)?;
        Ok(STANDARD.encode([&nonce[..], &text].concat()))
    }

    /// Opens a value that was sealed for this context.
    pub fn open(&self, context: &str, sealed: &str) -> Result<Zeroizing<Vec<u8>>, SealError> {
        let bytes = STANDARD.decode(sealed).map_err(|_| SealError::Unopenable)?;
        let (nonce, text) = bytes.split_at_checked(NONCE_LEN).ok_or(SealError::Unopenable)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Unopenable)?;
        let mut text = Zeroizing::new(text.to_vec());
        let cipher = self.cipher()?;
        let opened = cipher.open_in_place(nonce, Aad::from(context.as_bytes()), &mut text);
        let len = opened.map_err(|_| SealError::Unopenable)?.len();
        text.truncate(len);
        Ok(text)
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealKey")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_value_opens_with_its_key_and_in_its_context_only() {
        let key = SealKey::generate().unwrap();
        let sealed = key.seal("secret github", b"value").unwrap();
        assert_eq!(&**key.open("secret github", &sealed).unwrap(), b"value");
        assert_ne!(sealed, key.seal("secret github", b"value").unwrap(), "no two are equal");
        assert!(key.open("secret npm", &sealed).is_err());
        assert!(SealKey::generate().unwrap().open("secret github", &sealed).is_err());
        for len in 0..sealed.len() {
            assert!(key.open("secret github", &sealed[..len]).is_err(), "cut at {len}");
        }
        assert!(!format!("{key:?}").contains(&**key.to_hex()));
    }

    #[test]
    fn a_key_file_is_made_once_and_for_its_owner_only() {
        let dir = std::env::temp_dir().join(format!("palisade-seal-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("secrets.key");
        let keys: Vec<SealKey> = std::thread::scope(|scope| {
            let made: Vec<_> =
                (0..1).map(|_| scope.spawn(|| SealKey::read_or_create(&path).unwrap())).collect();
            made.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let again = SealKey::read_or_create(&path).unwrap();
        assert!(keys.iter().all(|key| key.to_hex() == again.to_hex()));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::write(&path, "short").unwrap();
        assert!(SealKey::read_or_create(&path).is_err(), "a damaged key is not replaced");
        fs::remove_dir_all(dir).unwrap();
    }
}
