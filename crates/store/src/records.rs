//! Records: small typed values in named buckets, each with a revision, changed by compare-and-set.
//!
//! [`Records`] may have two implementations: the table of [`EmbeddedRecords`](crate::EmbeddedRecords), and a
//! key-value store on the network. So callers decide by compare-and-set alone: a `get` may be older than the
//! newest write of another process, and only a write with an expected revision detects that.
//!
//! Invariant: the revisions of a bucket only grow and no revision is assigned twice, so a record that was
//! deleted and created again is never mistaken for the earlier one.
//! Invariant: a write either takes effect completely, or fails with [`RecordsError::Conflict`] and the
//! revision that the caller should read; no update is lost.
//! Absent on purpose: transactions over several records. No caller needs one, and a shared store has none.

use std::{error::Error, fmt, marker::PhantomData, str::FromStr, time::Duration};

use proto::{Failure, Kind};
use serde::{Serialize, de::DeserializeOwned};

use crate::OpenError;

/// The longest value of a record as JSON, in bytes.
pub const RECORD_LEN_MAX: usize = 512 * 1024;
/// The longest key, in bytes.
pub const KEY_LEN_MAX: usize = 512;
/// The largest number of changes that one [`Records::watch`] returns; the caller continues from the last of
/// them.
pub const WATCH_LEN_MAX: usize = 1000;
/// The longest name of a bucket, in bytes.
const BUCKET_LEN_MAX: usize = 32;
/// How many times [`RecordTable::change`] retries. Each retry means that another writer has won, so a caller
/// that loses this often shares its record with too many writers.
const CHANGE_ATTEMPTS_MAX: usize = 1000;

/// The position of a write in the order of all writes to its bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl Revision {
    /// Before the first write.
    pub const START: Revision = Revision(0);
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a bucket: lower case letters, digits and `-`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket(&'static str);

impl Bucket {
    /// A bucket by its name, for constants: an invalid name does not compile there.
    pub const fn new(name: &'static str) -> Self {
        let bytes = name.as_bytes();
        assert!(!bytes.is_empty() && bytes.len() <= BUCKET_LEN_MAX, "a bucket has a short name");
        let mut at = 0;
        while at < bytes.len() {
            assert!(
                matches!(bytes[at], b'a'..=b'z' | b'0'..=b'9' | b'-'),
                "a bucket is named in a-z, 0-9 and -"
            );
            at += 1;
        }
        Self(name)
    }

    /// Its name.
    pub fn as_str(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// The key of a record: one or more segments of letters, digits, `-`, `_` and `=`, joined by `.`.
///
/// A subject of NATS can carry such a key too. [`RecordKey::of`] makes a key from any texts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey(String);

/// Why a text is not the key of a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is longer than [`KEY_LEN_MAX`].
    #[error("a key of {0} bytes is too long: {KEY_LEN_MAX} is the most")]
    TooLong(usize),
    /// The key has an invalid format.
    #[error("{0:?} is not a key: use segments of letters, digits, `-`, `_` and `=`, joined by single dots")]
    Grammar(String),
}

impl RecordKey {
    /// A key with one segment for each text. A byte that is not allowed in a segment becomes `=` and two
    /// hexadecimal digits, so two different texts never have the same key.
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, KeyError> {
        let segments: Vec<String> = texts.into_iter().map(escape).collect();
        segments.join(".").parse()
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn escape(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut segment, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => segment.push(char::from(byte)),
            _ => segment.push_str(&format!("={byte:02X}")),
        }
        segment
    })
}

impl FromStr for RecordKey {
    type Err = KeyError;
    fn from_str(text: &str) -> Result<Self, KeyError> {
        if text.len() > KEY_LEN_MAX {
            return Err(KeyError::TooLong(text.len()));
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=".contains(&byte);
        let whole = |segment: &str| !segment.is_empty() && segment.bytes().all(plain);
        match text.split('.').all(whole) {
            true => Ok(Self(text.to_owned())),
            false => Err(KeyError::Grammar(text.to_owned())),
        }
    }
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why records could not be read or changed. A failed change has no effect.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// The record is not at the revision that the caller expected.
    #[error("{bucket} record {key} was changed meanwhile: {}", match current {
        Some(revision) => format!("it is at revision {revision} now"),
        None => "it does not exist now".to_owned(),
    })]
    Conflict {
        /// Its bucket.
        bucket: Bucket,
        /// Its key.
        key: RecordKey,
        /// Its current revision; none if it does not exist.
        current: Option<Revision>,
    },
    /// The value is longer than [`RECORD_LEN_MAX`].
    #[error("{bucket} record {key} would take {len} bytes, and {RECORD_LEN_MAX} is the most")]
    TooLarge {
        /// Its bucket.
        bucket: Bucket,
        /// Its key.
        key: RecordKey,
        /// The length of its value.
        len: usize,
    },
    /// The watch began before deletions that the store has dropped; the caller lists the bucket again.
    #[error("changes of {bucket} since revision {since} are no longer known; list the bucket again")]
    Compacted {
        /// The bucket.
        bucket: Bucket,
        /// The revision from which the caller watched.
        since: Revision,
    },
    /// This version cannot read the value.
    #[error("{bucket} record {key} cannot be read")]
    Unreadable {
        /// Its bucket.
        bucket: Bucket,
        /// Its key.
        key: RecordKey,
        /// The error of the parser.
        #[source]
        source: serde_json::Error,
    },
    /// The value cannot be converted to JSON.
    #[error("{bucket} record {key} cannot be stored as JSON")]
    Unwritable {
        /// Its bucket.
        bucket: Bucket,
        /// Its key.
        key: RecordKey,
        /// The error of the conversion.
        #[source]
        source: serde_json::Error,
    },
    /// A key is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The disk is full.
    #[error("the disk of the records is full; the record was not changed")]
    DiskFull,
    /// Another process kept the write lock.
    #[error("the records stayed locked by another process; the record was not changed")]
    Busy,
    /// The store is damaged.
    #[error("the records are damaged: {0}")]
    Damaged(String),
    /// Another failure of the store.
    #[error("cannot use the records")]
    Store(#[source] Box<dyn Error + Send + Sync>),
}

impl RecordsError {
    /// Whether another writer was faster.
    pub fn is_conflict(&self) -> bool {
        matches!(self, RecordsError::Conflict { .. })
    }
}

impl From<RecordsError> for Failure {
    fn from(error: RecordsError) -> Self {
        let (kind, hint) = match &error {
            RecordsError::Conflict { .. } => (Kind::Conflict, Some("try again")),
            RecordsError::TooLarge { .. } => (Kind::Limit, None),
            RecordsError::Key(_) => (Kind::Usage, None),
            RecordsError::Open(OpenError::Newer { .. }) => {
                (Kind::Host, Some("use the newer pal that wrote it, or another directory: --data DIR"))
            }
            RecordsError::DiskFull => {
                (Kind::Host, Some("make room on the disk that holds the data directory: pal gc"))
            }
            RecordsError::Busy => (Kind::Host, Some("try again when the other pal is done")),
            RecordsError::Damaged(_) => {
                (Kind::Host, Some("check the database that holds them: pal events verify"))
            }
            _ => (Kind::Host, None),
        };
        let failure = Failure::new(kind, error.to_string());
        let failure = match error {
            RecordsError::Unreadable { source, .. } | RecordsError::Unwritable { source, .. } => {
                failure.because(source)
            }
            RecordsError::Store(source) => failure.because(source),
            RecordsError::Open(OpenError::Access { source, .. }) => failure.because(source),
            RecordsError::Open(OpenError::Database { source, .. }) => failure.because(source),
            _ => failure,
        };
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// One record as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRecord {
    /// Its key.
    pub key: RecordKey,
    /// The revision of its last write.
    pub revision: Revision,
    /// Its value, as JSON.
    pub value: String,
}

/// The records of a bucket at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing<R> {
    /// The records, by key.
    pub records: Vec<R>,
    /// The newest revision of the whole bucket at that moment: a watch from here misses no change.
    pub revision: Revision,
}

/// The newest write to one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordChange<V> {
    /// The record's key.
    pub key: RecordKey,
    /// The revision of the write.
    pub revision: Revision,
    /// The value; none when the write deleted the record.
    pub value: Option<V>,
}

/// Records in named buckets. [`RecordTable`] gives them types.
pub trait Records: fmt::Debug + Send + Sync {
    /// The record, if it exists.
    fn get(&self, bucket: Bucket, key: &RecordKey) -> Result<Option<StoredRecord>, RecordsError>;

    /// Stores a record that does not exist.
    fn create(&self, bucket: Bucket, key: &RecordKey, value: &str) -> Result<Revision, RecordsError>;

    /// Replaces a record that is at `expected`.
    fn update(
        &self,
        bucket: Bucket,
        key: &RecordKey,
        value: &str,
        expected: Revision,
    ) -> Result<Revision, RecordsError>;

    /// Deletes a record that is at `expected`.
    fn delete(&self, bucket: Bucket, key: &RecordKey, expected: Revision) -> Result<(), RecordsError>;

    /// All records of a bucket, or those whose keys extend `below` by further segments.
    fn list(&self, bucket: Bucket, below: Option<&RecordKey>) -> Result<Listing<StoredRecord>, RecordsError>;

    /// The newest write to each record that was written after `since`, oldest first and at most
    /// [`WATCH_LEN_MAX`].
    ///
    /// If there is none, it waits up to `wait` for one. A record that was written several times appears once,
    /// with its final state; a caller that continues from the last revision it saw sees every final state.
    fn watch(
        &self,
        bucket: Bucket,
        since: Revision,
        wait: Duration,
    ) -> Result<Vec<RecordChange<String>>, RecordsError>;
}

/// One record with its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<T> {
    /// Its key.
    pub key: RecordKey,
    /// The revision of its last write.
    pub revision: Revision,
    /// Its value.
    pub value: T,
}

/// The records of one bucket, all of one type.
#[derive(Debug, Clone, Copy)]
pub struct RecordTable<'a, T> {
    records: &'a dyn Records,
    bucket: Bucket,
    value: PhantomData<fn() -> T>,
}

impl<'a, T: Serialize + DeserializeOwned> RecordTable<'a, T> {
    /// The bucket of that name in a store.
    pub fn new(records: &'a dyn Records, bucket: Bucket) -> Self {
        Self { records, bucket, value: PhantomData }
    }

    /// The record, if it exists.
    pub fn get(&self, key: &RecordKey) -> Result<Option<Record<T>>, RecordsError> {
        self.records.get(self.bucket, key)?.map(|stored| self.read(stored)).transpose()
    }

    /// Stores a record that does not exist.
    pub fn create(&self, key: &RecordKey, value: &T) -> Result<Revision, RecordsError> {
        self.records.create(self.bucket, key, &self.write(key, value)?)
    }

    /// Replaces a record that is at `expected`.
    pub fn update(&self, key: &RecordKey, value: &T, expected: Revision) -> Result<Revision, RecordsError> {
        self.records.update(self.bucket, key, &self.write(key, value)?, expected)
    }

    /// Deletes a record that is at `expected`.
    pub fn delete(&self, key: &RecordKey, expected: Revision) -> Result<(), RecordsError> {
        self.records.delete(self.bucket, key, expected)
    }

    /// Stores a value whatever the current one is, for a caller that is the only writer of its record.
    pub fn put(&self, key: &RecordKey, value: &T) -> Result<(), RecordsError> {
        self.retry(|| match self.records.get(self.bucket, key)? {
            Some(found) => self.update(key, value, found.revision).map(drop),
            None => self.create(key, value).map(drop),
        })
    }

    /// Deletes a record at any revision; true if there was one.
    pub fn remove(&self, key: &RecordKey) -> Result<bool, RecordsError> {
        self.retry(|| match self.records.get(self.bucket, key)? {
            Some(found) => self.delete(key, found.revision).map(|()| true),
            None => Ok(false),
        })
    }

    /// Changes a record by compare-and-set. `change` gets the value, or none if there is no record, and
    /// returns the new value, or none to leave the record unchanged; it runs again if another writer was
    /// faster. Returns the final value of the record.
    pub fn change<E: From<RecordsError>>(
        &self,
        key: &RecordKey,
        mut change: impl FnMut(Option<&T>) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        for attempt in 1.. {
            let found = self.get(key)?;
            let Some(value) = change(found.as_ref().map(|record| &record.value))? else {
                return Ok(found.map(|record| record.value));
            };
            let written = match &found {
                Some(record) => self.update(key, &value, record.revision),
                None => self.create(key, &value),
            };
            match written {
                Ok(_) => return Ok(Some(value)),
                Err(error) if error.is_conflict() && attempt < CHANGE_ATTEMPTS_MAX => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// All records of the bucket, or those whose keys extend `below` by further segments.
    pub fn list(&self, below: Option<&RecordKey>) -> Result<Listing<Record<T>>, RecordsError> {
        let Listing { records, revision } = self.records.list(self.bucket, below)?;
        let records = records.into_iter().map(|stored| self.read(stored)).collect::<Result<_, _>>()?;
        Ok(Listing { records, revision })
    }

    /// The values of [`list`](Self::list).
    pub fn values(&self, below: Option<&RecordKey>) -> Result<Vec<T>, RecordsError> {
        Ok(self.list(below)?.records.into_iter().map(|record| record.value).collect())
    }

    /// The final state of each record that was written after `since`; see [`Records::watch`].
    pub fn watch(&self, since: Revision, wait: Duration) -> Result<Vec<RecordChange<T>>, RecordsError> {
        let changes = self.records.watch(self.bucket, since, wait)?;
        let read = |RecordChange { key, revision, value }: RecordChange<String>| {
            let value = value.map(|value| self.decode(&key, &value)).transpose()?;
            Ok(RecordChange { key, revision, value })
        };
        changes.into_iter().map(read).collect()
    }

    fn retry<R>(&self, mut act: impl FnMut() -> Result<R, RecordsError>) -> Result<R, RecordsError> {
        let mut attempt = 1;
        loop {
            match act() {
                Err(error) if error.is_conflict() && attempt < CHANGE_ATTEMPTS_MAX => attempt += 1,
                done => return done,
            }
        }
    }

    fn read(&self, stored: StoredRecord) -> Result<Record<T>, RecordsError> {
        let value = self.decode(&stored.key, &stored.value)?;
        Ok(Record { key: stored.key, revision: stored.revision, value })
    }

    fn decode(&self, key: &RecordKey, value: &str) -> Result<T, RecordsError> {
        let unreadable = |source| RecordsError::Unreadable { bucket: self.bucket, key: key.clone(), source };
        serde_json::from_str(value).map_err(unreadable)
    }

    fn write(&self, key: &RecordKey, value: &T) -> Result<String, RecordsError> {
        let unwritable = |source| RecordsError::Unwritable { bucket: self.bucket, key: key.clone(), source };
        serde_json::to_string(value).map_err(unwritable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_segments_joined_by_single_dots() {
        for good in ["a", "A-1_b", "t.b", "a.b.c", "=2E"] {
            assert_eq!(good.parse::<RecordKey>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "a.", ".a", "a..b", "a b", "a/b", "a*", ">", "ä", "a\0", "a\n", "a%"] {
            assert_eq!(bad.parse::<RecordKey>(), Err(KeyError::Grammar(bad.to_owned())));
        }
        let long = "a".repeat(KEY_LEN_MAX + 1);
        assert_eq!(long.parse::<RecordKey>(), Err(KeyError::TooLong(KEY_LEN_MAX + 1)));
        assert!(long[1..].parse::<RecordKey>().is_ok());
    }

    #[test]
    fn different_texts_have_different_keys() {
        let of = |texts: &[&str]| RecordKey::of(texts.iter().copied()).unwrap().to_string();
        assert_eq!(of(&["team/web", "a..b"]), "team=2Fweb.a=2E=2Eb");
        assert_eq!(of(&["=2F"]), "=3D2F");
        assert_eq!(of(&["ä"]), "=C3=A4");
        assert_ne!(of(&["a.b"]), of(&["a", "b"]));
        assert_eq!(RecordKey::of([""]), Err(KeyError::Grammar(String::new())));
    }
}
