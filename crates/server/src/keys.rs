//! API keys: records that hold the hash of a key and its rights.
//!
//! The first start of a server creates the first key. The server also stores that key in plain text in
//! `serve.key`, readable only by the owner of the data directory, who has every right without it.
//!
//! Invariant: a revoked key is refused from the next request on, whichever process revoked it.
//! Invariant: the duration of a comparison reveals nothing about a key: the server compares hashes, and
//! always all of them.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::http::{HeaderMap, header};
use fleet::records::{KEYS, RecordKey, RecordTable, Records, RecordsError, Revision, key_of};
use proto::{
    Failure, Kind,
    egress::{EgressRule, Policy, RuleAction},
    event::hex,
    event_data::{KeyCreated, KeyQuota, KeyScope},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The file in the data directory that has the first key.
pub const FIRST: &str = "serve.key";
const KEYS_MAX: usize = 1000;
const NAME_LEN_MAX: usize = 64;
const REACH_LEN_MAX: usize = 1024;

/// The scope of a key. Each scope includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Read-only requests.
    Read,
    /// Create, use and remove Bodies.
    Run,
    /// Create and revoke keys, and use Bodies of every key.
    Admin,
}

/// The Bodies that a key reaches besides those that it created. As text: `own`, `all` or `label=NAME=VALUE`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum KeyReach {
    /// No others.
    #[default]
    Own,
    /// Those whose metadata has this pair.
    Label {
        /// The name of the pair.
        name: String,
        /// The value of the pair.
        value: String,
    },
    /// Every Body.
    All,
}

impl FromStr for KeyReach {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let label = || text.strip_prefix("label=")?.split_once('=').filter(|(name, _)| !name.is_empty());
        match (text, label()) {
            ("own", _) => Ok(Self::Own),
            ("all", _) => Ok(Self::All),
            (_, Some((name, value))) if text.len() <= REACH_LEN_MAX => {
                Ok(Self::Label { name: name.to_owned(), value: value.to_owned() })
            }
            _ => Err(Failure::new(
                Kind::Usage,
                format!("{:?} names no Bodies that a key can reach", proto::text::visible(text)),
            )
            .hint("choose own, all or label=NAME=VALUE")),
        }
    }
}

impl fmt::Display for KeyReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("own"),
            Self::All => f.write_str("all"),
            Self::Label { name, value } => write!(f, "label={name}={value}"),
        }
    }
}

impl TryFrom<String> for KeyReach {
    type Error = Failure;

    fn try_from(text: String) -> Result<Self, Failure> {
        text.parse()
    }
}

impl From<KeyReach> for String {
    fn from(reach: KeyReach) -> Self {
        reach.to_string()
    }
}

/// The caller of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The id of its key; not the secret.
    pub key: String,
    /// The scope of its key.
    pub scope: Scope,
    /// The Bodies that its key reaches besides its own.
    pub reach: KeyReach,
    /// Whether its key has a ceiling that allows targets, so that it may give its Bodies a network below it.
    pub has_ceiling: bool,
}

/// The rights and the name of a key that is about to be created.
#[derive(Debug, Clone)]
pub struct KeyTerms {
    /// The name of the key.
    pub name: String,
    /// The scope of the key.
    pub scope: Scope,
    /// The Bodies that it reaches besides its own; `None` stands for the default of the scope: `all` for `admin`, `own`
    /// for the others.
    pub reach: Option<KeyReach>,
    /// The quota of all Bodies of the key together.
    pub quota: Quota,
    /// The ceiling of their networks: rules that must allow each connection, too. Rules that deny hold alone as well.
    pub network: Vec<EgressRule>,
}

impl KeyTerms {
    /// A key with the default reach of its scope, without a quota and a ceiling.
    pub fn new(name: &str, scope: Scope) -> Self {
        Self { name: name.to_owned(), scope, reach: None, quota: Quota::default(), network: Vec::new() }
    }

    /// Checks the ceiling.
    fn check_network(&self) -> Result<(), Failure> {
        if self.network.is_empty() {
            return Ok(());
        }
        if self.scope != Scope::Run {
            return Err(Failure::new(Kind::Usage, "only a key of scope run has a ceiling for its networks")
                .hint("a key of scope admin may give every network, one of scope read none"));
        }
        if self.network.iter().any(|rule| rule.action == RuleAction::Ask || !rule.headers.is_empty()) {
            return Err(Failure::new(
                Kind::Usage,
                "a ceiling allows and denies; it asks nothing and sets no headers",
            ));
        }
        Policy::new(&self.network).map(drop).map_err(|error| Failure::new(Kind::Usage, error.to_string()))
    }

    fn reach(&self) -> Result<KeyReach, Failure> {
        match (self.scope, &self.reach) {
            (Scope::Admin, None | Some(KeyReach::All)) => Ok(KeyReach::All),
            (Scope::Admin, Some(_)) => {
                Err(Failure::new(Kind::Usage, "a key of scope admin reaches every Body")
                    .hint("choose the scope run or read, or leave out the reach"))
            }
            (_, reach) => Ok(reach.clone().unwrap_or_default()),
        }
    }
}

/// A key that was just created. The server does not store its secret, so it cannot show it again.
#[derive(Debug, Clone)]
pub struct CreatedKey {
    /// Its id.
    pub id: String,
    /// The secret that callers send.
    pub secret: String,
}

/// The record of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// Its id.
    pub id: String,
    /// The name of the key.
    pub name: String,
    /// The scope of the key.
    pub scope: Scope,
    /// The Bodies that the key reaches besides its own.
    #[serde(default)]
    pub reach: KeyReach,
    /// SHA-256 of the secret.
    pub sha256: String,
    /// When the key was created.
    pub created_at: String,
    /// When the key was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<String>,
    /// The quota of all Bodies of this key together.
    #[serde(default)]
    pub quota: Quota,
    /// The ceiling of their networks, which `fleet` reads here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<EgressRule>,
}

impl KeyRecord {
    fn has_ceiling(&self) -> bool {
        self.network.iter().any(|rule| rule.action == RuleAction::Allow)
    }

    /// The Bodies that the key reaches besides its own. An earlier version did not record the reach of admin keys.
    pub fn full_reach(&self) -> KeyReach {
        if self.scope == Scope::Admin { KeyReach::All } else { self.reach.clone() }
    }

    /// The event of the key's creation.
    pub fn created_event(&self) -> KeyCreated {
        KeyCreated {
            key: self.id.clone(),
            name: self.name.clone(),
            scope: self.scope.into(),
            reach: Some(self.full_reach().to_string()),
            quota: self.quota.into(),
            network: self.network.clone(),
        }
    }
}

/// The quota of all Bodies of a key together; a limit that is left out does not apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// Number of Bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bodies: Option<u64>,
    /// CPU time, in thousandths of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u64>,
    /// Bytes of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes that the Bodies may write to their file systems.
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
    records: Arc<dyn Records>,
    known: Mutex<LoadedKeys>,
}

/// The keys as of the last read of the records.
#[derive(Debug)]
struct LoadedKeys {
    revision: Revision,
    keys: BTreeMap<RecordKey, KeyRecord>,
}

impl KeyStore {
    /// The key store of these records.
    pub fn new(records: Arc<dyn Records>) -> Self {
        let known = LoadedKeys { revision: Revision::START, keys: BTreeMap::new() };
        Self { records, known: Mutex::new(known) }
    }

    /// Reads the keys, and creates the first one if there is none.
    pub fn open(data: &Path, records: Arc<dyn Records>) -> Result<(Self, Option<CreatedKey>), Failure> {
        let keys = Self::new(records);
        if !keys.all()?.is_empty() {
            return Ok((keys, None));
        }
        let first = new_key()?;
        // Writes the file first: if the start is interrupted here, the next one creates another key, and
        // there is never a valid key that is in no file.
        write_private(&data.join(FIRST), &first.secret).map_err(|error| {
            Failure::new(Kind::Host, format!("cannot write the first API key to {FIRST}"))
                .because(error)
                .hint("make room on the disk that holds the data directory: pal gc")
        })?;
        keys.add(&first, &KeyTerms::new("first", Scope::Admin))?;
        Ok((keys, Some(first)))
    }

    fn table(&self) -> RecordTable<'_, KeyRecord> {
        RecordTable::new(&*self.records, KEYS)
    }

    /// Every key that was ever created, oldest first.
    pub fn all(&self) -> Result<Vec<KeyRecord>, Failure> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut known)?;
        let mut keys: Vec<KeyRecord> = known.keys.values().cloned().collect();
        keys.sort_by(|one, other| one.created_at.cmp(&other.created_at));
        Ok(keys)
    }

    /// The quota of a key; none if there is no such key.
    pub fn quota(&self, id: &str) -> Option<Quota> {
        self.all().ok()?.into_iter().find(|record| record.id == id).map(|record| record.quota)
    }

    /// Creates a key.
    pub fn make(&self, terms: &KeyTerms) -> Result<(KeyRecord, CreatedKey), Failure> {
        let made = new_key()?;
        Ok((self.add(&made, terms)?, made))
    }

    fn add(&self, made: &CreatedKey, terms: &KeyTerms) -> Result<KeyRecord, Failure> {
        check_name(&terms.name)?;
        terms.check_network()?;
        let reach = terms.reach()?;
        if self.all()?.len() >= KEYS_MAX {
            return Err(Failure::new(Kind::Limit, format!("there are {KEYS_MAX} keys already")));
        }
        let record = KeyRecord {
            id: made.id.clone(),
            name: terms.name.clone(),
            scope: terms.scope,
            reach,
            sha256: digest(&made.secret),
            created_at: fleet::clock::now(),
            revoked_at: None,
            quota: terms.quota,
            network: terms.network.clone(),
        };
        self.table().create(&key_of([&made.id])?, &record)?;
        Ok(record)
    }

    /// Revokes a key.
    pub fn revoke(&self, id: &str) -> Result<(), Failure> {
        let unknown =
            || Failure::new(Kind::NotFound, format!("there is no key {:?}", proto::text::visible(id)));
        let key = key_of([id]).map_err(|_| unknown())?;
        let revoked = self.table().change(&key, |found| {
            let Some(record) = found.filter(|record| record.revoked_at.is_none()) else { return Ok(None) };
            Ok::<_, Failure>(Some(KeyRecord { revoked_at: Some(fleet::clock::now()), ..record.clone() }))
        })?;
        revoked.map(drop).ok_or_else(unknown)
    }

    /// The caller that a secret belongs to.
    pub fn caller(&self, secret: &str) -> Option<Caller> {
        let asked = digest(secret);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // If the records cannot be read now, only keys that are already loaded are accepted.
        let _ = self.refresh(&mut known);
        let good = |record: &&KeyRecord| record.sha256 == asked && record.revoked_at.is_none();
        let found = known.keys.values().rfind(good)?;
        Some(Caller {
            key: found.id.clone(),
            scope: found.scope,
            reach: found.full_reach(),
            has_ceiling: found.has_ceiling(),
        })
    }

    /// Reads the records that changed since the last read; usually none have, and this costs one index
    /// lookup.
    fn refresh(&self, known: &mut LoadedKeys) -> Result<(), Failure> {
        loop {
            let changes = match self.table().watch(known.revision, Duration::ZERO) {
                Err(RecordsError::Compacted { .. }) => {
                    let listing = self.table().list(None)?;
                    known.keys =
                        listing.records.into_iter().map(|record| (record.key, record.value)).collect();
                    known.revision = listing.revision;
                    continue;
                }
                changes => changes?,
            };
            if changes.is_empty() {
                return Ok(());
            }
            for change in changes {
                known.revision = change.revision;
                match change.value {
                    Some(record) => known.keys.insert(change.key, record),
                    None => known.keys.remove(&change.key),
                };
            }
        }
    }
}

fn new_key() -> Result<CreatedKey, Failure> {
    let drawn: [u8; 24] = sys::random::bytes()
        .map_err(|error| Failure::new(Kind::Host, "cannot generate a key").because(error))?;
    Ok(CreatedKey { id: hex(&drawn[..4]), secret: format!("e2b_{}", hex(&drawn[4..])) })
}

/// The key that a caller sent: E2B's header, or a bearer token.
pub fn sent(headers: &HeaderMap) -> Option<&str> {
    let own = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    own.or_else(|| headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer "))
}

/// Compares hashes, so that the duration reveals nothing about the texts.
pub fn same(one: &[u8], other: &[u8]) -> bool {
    Sha256::digest(one) == Sha256::digest(other)
}

fn check_name(name: &str) -> Result<(), Failure> {
    if (1..=NAME_LEN_MAX).contains(&name.chars().count()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, format!("{:?} is not a valid name for a key", proto::text::visible(name)))
        .hint(format!("use 1 to {NAME_LEN_MAX} characters")))
}

fn digest(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, format!("{text}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use fleet::{Durability, records::EmbeddedRecords};

    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-keys-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        dir
    }

    /// Opens the keys of a directory as another process would.
    fn open(dir: &Path) -> (KeyStore, Option<CreatedKey>) {
        KeyStore::open(dir, Arc::new(EmbeddedRecords::at(dir, Durability::Process))).unwrap()
    }

    #[test]
    fn the_first_key_is_made_once_and_stored_as_a_hash() {
        let dir = dir("first");
        let (keys, first) = open(&dir);
        let first = first.unwrap();
        assert_eq!(first.secret.len(), 44);
        assert!(
            first.secret.starts_with("e2b_")
                && first.secret[4..].bytes().all(|byte| byte.is_ascii_hexdigit())
        );
        let stored = keys.records.list(KEYS, None).unwrap().records;
        assert!(stored.len() == 1 && !stored[0].value.contains(&first.secret));
        assert_eq!(fs::read_to_string(dir.join(FIRST)).unwrap(), format!("{}\n", first.secret));
        let caller = Caller { key: first.id, scope: Scope::Admin, reach: KeyReach::All, has_ceiling: false };
        assert_eq!(keys.caller(&first.secret), Some(caller));
        assert!(open(&dir).1.is_none());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_key_that_was_revoked_elsewhere_is_refused() {
        let dir = dir("revoked");
        let (here, there) = (open(&dir).0, open(&dir).0);
        for _ in 0..50 {
            let (_, key) = there.make(&KeyTerms::new("ci", Scope::Run)).unwrap();
            assert_eq!(here.caller(&key.secret).map(|caller| caller.scope), Some(Scope::Run));
            there.revoke(&key.id).unwrap();
            assert_eq!(here.caller(&key.secret), None);
        }
        assert_eq!(here.caller("e2b_"), None);
        for unknown in ["nobody", "", "../x"] {
            assert_eq!(there.revoke(unknown).unwrap_err().kind, Kind::NotFound);
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_reach_is_one_text_everywhere() {
        let label = |name: &str, value: &str| KeyReach::Label { name: name.into(), value: value.into() };
        for (text, reach) in [
            ("own", KeyReach::Own),
            ("all", KeyReach::All),
            ("label=team=web", label("team", "web")),
            ("label=team=a=b", label("team", "a=b")),
            ("label=team=", label("team", "")),
        ] {
            assert_eq!(text.parse::<KeyReach>().unwrap(), reach, "{text}");
            assert_eq!(serde_json::json!(reach), text);
            assert_eq!(serde_json::from_value::<KeyReach>(text.into()).unwrap(), reach);
        }
        for text in ["", "ALL", "label", "label=", "label=team", "label==web", "team=web"] {
            assert_eq!(text.parse::<KeyReach>().unwrap_err().kind, Kind::Usage, "{text}");
        }
    }

    #[test]
    fn a_ceiling_is_for_keys_of_scope_run_and_has_rules_that_can_be_judged() {
        let terms = |scope, rule| KeyTerms { network: vec![rule], ..KeyTerms::new("x", scope) };
        let check = |scope, rule| terms(scope, rule).check_network().map_err(|failure| failure.kind);
        assert_eq!(check(Scope::Run, EgressRule::allow("a.test:443")), Ok(()));
        assert_eq!(check(Scope::Run, EgressRule::deny("*:25")), Ok(()));
        for (scope, rule) in [
            (Scope::Admin, EgressRule::allow("a.test")),
            (Scope::Read, EgressRule::allow("a.test")),
            (Scope::Run, EgressRule::ask("a.test")),
            (Scope::Run, EgressRule::allow("https://a.test")),
        ] {
            assert_eq!(check(scope, rule), Err(Kind::Usage));
        }
        let old =
            serde_json::json!({ "id": "a", "name": "x", "scope": "run", "sha256": "", "created_at": "" });
        let mut old: KeyRecord = serde_json::from_value(old).unwrap();
        assert!(!old.has_ceiling());
        old.network = vec![EgressRule::deny("*:25")];
        assert!(!old.has_ceiling(), "denials alone give no right to a network");
        old.network.push(EgressRule::allow("a.test"));
        assert!(old.has_ceiling());
    }

    #[test]
    fn an_admin_key_reaches_every_body() {
        let terms = |scope, reach| KeyTerms { reach, ..KeyTerms::new("x", scope) };
        assert_eq!(terms(Scope::Admin, None).reach().unwrap(), KeyReach::All);
        assert_eq!(terms(Scope::Admin, Some(KeyReach::Own)).reach().unwrap_err().kind, Kind::Usage);
        assert_eq!(terms(Scope::Read, None).reach().unwrap(), KeyReach::Own);
        assert_eq!(terms(Scope::Read, Some(KeyReach::All)).reach().unwrap(), KeyReach::All);
    }
}
