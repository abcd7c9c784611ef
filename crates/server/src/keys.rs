//! Who is calling: API keys, kept as hashes.
//!
//! `keys.json` in the data directory holds what every key is but not the key itself. The first one is made by the
//! first start; it is also kept as it is in `serve.key`, readable by the owner of the data directory alone, who could
//! do everything without it.
//!
//! Invariant: a key that was revoked is refused from the next request on, whoever revoked it.
//! Invariant: how long a comparison takes tells nothing about a key: hashes are compared, and all of them.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use axum::http::{HeaderMap, header};
use proto::{
    Failure, Kind,
    event::hex,
    event_data::{KeyQuota, KeyScope},
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const FILE: &str = "keys.json";
const FIRST: &str = "serve.key";
const FILE_LEN_MAX: u64 = 4 << 20;
const KEYS_MAX: usize = 1000;
const NAME_LEN_MAX: usize = 64;
/// Longer than any tick by which a file system tells the time (FAT's two seconds are the longest).
const TICK_MAX: Duration = Duration::from_secs(2);

/// What a key is good for; each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Look.
    Read,
    /// Make, use and end Bodies.
    Run,
    /// Make and revoke keys, and use Bodies of every key.
    Admin,
}

/// Whose request it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The key's id; not the key.
    pub key: String,
    /// What it is good for.
    pub scope: Scope,
}

/// A key that was just made. Nobody can show it again.
#[derive(Debug, Clone)]
pub struct CreatedKey {
    /// Its id.
    pub id: String,
    /// What callers send.
    pub secret: String,
}

/// A key as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// Its id.
    pub id: String,
    /// What somebody called it.
    pub name: String,
    /// What it is good for.
    pub scope: Scope,
    /// SHA-256 of the key.
    pub sha256: String,
    /// When it was made.
    pub created_at: String,
    /// When it was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<String>,
    /// How much its Bodies may use together.
    #[serde(default)]
    pub quota: Quota,
}

/// How much the Bodies of a key may use together; what is left out is not bounded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// Bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bodies: Option<u64>,
    /// Processor time in thousandths of one processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u64>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What they may write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

impl From<Scope> for KeyScope {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Read => Self::Read,
            Scope::Run => Self::Run,
            Scope::Admin => Self::Admin,
        }
    }
}

impl From<Quota> for KeyQuota {
    fn from(quota: Quota) -> Self {
        let Quota { bodies, cpu_milli, memory_bytes, disk_bytes } = quota;
        Self { bodies, cpu_milli, memory_bytes, disk_bytes }
    }
}

/// All keys of a data directory.
#[derive(Debug)]
pub struct KeyStore {
    file: PathBuf,
    known: Mutex<LoadedKeys>,
}

/// The file as it was read last.
#[derive(Debug, Default)]
struct LoadedKeys {
    changed: Option<SystemTime>,
    records: Vec<KeyRecord>,
}

impl KeyStore {
    /// The keys of a data directory, as they are.
    pub fn at(data: &Path) -> Self {
        Self { file: data.join(FILE), known: Mutex::default() }
    }

    /// Reads the keys, and makes the first where there is none.
    pub fn open(data: &Path) -> Result<(Self, Option<CreatedKey>), Failure> {
        let keys = Self::at(data);
        if !keys.all()?.is_empty() {
            return Ok((keys, None));
        }
        let first = keys.make("first", Scope::Admin)?;
        write_private(&data.join(FIRST), &first.secret).map_err(cannot_write)?;
        Ok((keys, Some(first)))
    }

    /// Every key that was ever made, oldest first.
    pub fn all(&self) -> Result<Vec<KeyRecord>, Failure> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut known)?;
        Ok(known.records.clone())
    }

    /// Makes a key without a quota.
    pub fn make(&self, name: &str, scope: Scope) -> Result<CreatedKey, Failure> {
        self.make_with(name, scope, Quota::default())
    }

    /// How much the Bodies of a key may use together; none if there is no such key.
    pub fn quota(&self, id: &str) -> Option<Quota> {
        self.all().ok()?.into_iter().find(|record| record.id == id).map(|record| record.quota)
    }

    /// Makes a key.
    pub fn make_with(&self, name: &str, scope: Scope, quota: Quota) -> Result<CreatedKey, Failure> {
        check_name(name)?;
        let drawn: [u8; 24] = sys::random::bytes()
            .map_err(|error| Failure::new(Kind::Host, "cannot draw a key").because(error))?;
        let (id, secret) = (hex(&drawn[..4]), format!("e2b_{}", hex(&drawn[4..])));
        let record = KeyRecord {
            id: id.clone(),
            name: name.to_owned(),
            scope,
            sha256: digest(&secret),
            created_at: fleet::clock::now(),
            revoked_at: None,
            quota,
        };
        self.change(|records| {
            if records.len() >= KEYS_MAX {
                return Err(Failure::new(Kind::Limit, format!("there are {KEYS_MAX} keys already")));
            }
            records.push(record);
            Ok(())
        })?;
        Ok(CreatedKey { id, secret })
    }

    /// Makes a key worthless.
    pub fn revoke(&self, id: &str) -> Result<(), Failure> {
        let unknown =
            || Failure::new(Kind::NotFound, format!("there is no key {:?}", proto::text::visible(id)));
        self.change(|records| {
            let record = records.iter_mut().find(|record| record.id == id).ok_or_else(unknown)?;
            record.revoked_at.get_or_insert_with(fleet::clock::now);
            Ok(())
        })
    }

    /// Whose key that is.
    pub fn caller(&self, secret: &str) -> Option<Caller> {
        let asked = digest(secret);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // A file that cannot be read now lets nobody in who was not known before.
        let _ = self.refresh(&mut known);
        let good = |record: &&KeyRecord| record.sha256 == asked && record.revoked_at.is_none();
        let found = known.records.iter().rfind(good)?;
        Some(Caller { key: found.id.clone(), scope: found.scope })
    }

    fn refresh(&self, known: &mut LoadedKeys) -> Result<(), Failure> {
        let unreadable =
            |error: io::Error| Failure::new(Kind::Host, "cannot read the API keys").because(error);
        let changed = match fs::metadata(&self.file).and_then(|found| found.modified()) {
            Ok(changed) => changed,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *known = LoadedKeys::default();
                return Ok(());
            }
            Err(error) => return Err(unreadable(error)),
        };
        if known.changed == Some(changed) {
            return Ok(());
        }
        let text = sys::fd::read_small(&self.file, FILE_LEN_MAX).map_err(unreadable)?;
        let records = serde_json::from_str(&text).map_err(|error| unreadable(error.into()))?;
        // A file changed twice within one tick of the clock shows one time: it is believed only when that is past.
        let settled = changed.elapsed().is_ok_and(|ago| ago > TICK_MAX).then_some(changed);
        *known = LoadedKeys { changed: settled, records };
        Ok(())
    }

    fn change(&self, act: impl FnOnce(&mut Vec<KeyRecord>) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // Another `pal` may change them at the same time: one after the other, and neither change is lost.
        let turn = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.file.with_extension("lock"));
        let turn = turn.map_err(cannot_write)?;
        flock(&turn, FlockOperation::LockExclusive).map_err(|errno| cannot_write(errno.into()))?;
        known.changed = None;
        self.refresh(&mut known)?;
        let mut records = known.records.clone();
        act(&mut records)?;
        let text = serde_json::to_vec(&records).map_err(|error| cannot_write(error.into()))?;
        sys::fd::write_whole(&self.file, &text).map_err(cannot_write)?;
        *known = LoadedKeys { changed: None, records };
        Ok(())
    }
}

/// What a caller sent as its key: E2B's header, or a bearer token.
pub fn sent(headers: &HeaderMap) -> Option<&str> {
    let own = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    own.or_else(|| headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer "))
}

/// Compares hashes, so that the time it takes tells nothing about the texts.
pub fn same(one: &[u8], other: &[u8]) -> bool {
    Sha256::digest(one) == Sha256::digest(other)
}

fn check_name(name: &str) -> Result<(), Failure> {
    if (1..=NAME_LEN_MAX).contains(&name.chars().count()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, format!("{:?} cannot name a key", proto::text::visible(name)))
        .hint(format!("use 1 to {NAME_LEN_MAX} characters")))
}

fn digest(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

fn cannot_write(error: io::Error) -> Failure {
    Failure::new(Kind::Host, "cannot write the API keys")
        .because(error)
        .hint("make room on the disk that holds the data directory: pal gc")
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, format!("{text}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-keys-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn the_first_key_is_made_once_and_kept_as_a_hash() {
        let dir = dir("first");
        let (keys, first) = KeyStore::open(&dir).unwrap();
        let first = first.unwrap();
        assert_eq!(first.secret.len(), 44);
        assert!(
            first.secret.starts_with("e2b_")
                && first.secret[4..].bytes().all(|byte| byte.is_ascii_hexdigit())
        );
        assert!(!fs::read_to_string(dir.join(FILE)).unwrap().contains(&first.secret));
        assert_eq!(keys.caller(&first.secret), Some(Caller { key: first.id, scope: Scope::Admin }));
        assert!(KeyStore::open(&dir).unwrap().1.is_none());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_key_that_was_revoked_elsewhere_is_refused() {
        let dir = dir("revoked");
        let (here, _) = KeyStore::open(&dir).unwrap();
        let (there, _) = KeyStore::open(&dir).unwrap();
        // Many times over: two changes may fall into one tick of the file system's clock.
        for _ in 0..50 {
            let key = there.make("ci", Scope::Run).unwrap();
            assert_eq!(here.caller(&key.secret).map(|caller| caller.scope), Some(Scope::Run));
            there.revoke(&key.id).unwrap();
            assert_eq!(here.caller(&key.secret), None);
        }
        assert_eq!(here.caller("e2b_"), None);
        assert!(there.revoke("nobody").is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
