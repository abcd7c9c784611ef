//! Files that agents share: records, changed by compare-and-set.
//!
//! Invariant: agents share files with the agents of the same owner and with no others. On a server the owner is the key
//! that owns the Body; the agents of the command line have none and share theirs.
//! Invariant: of two agents that edit one file at once, each sees the other's text: no update is lost.
//! Invariant: a call with a key changes a file once. The record of the file knows the newest keys; the record of a
//! deleted file stays for a day for that reason.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use ::store::Bucket;
use brain::agent::BoxFuture;
use fleet::{
    Fleet,
    records::{RecordKey, RecordTable, RecordsError},
};
use proto::{
    Failure, Kind,
    file_call::{FileAnswer, FileCall, FileError, FileOperation},
    file_text,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    BodyLife, FileBackend, FileReply,
    tree::{FileTree, TextFile, answer_read, refuse},
};

/// The files, by their owner and the SHA-256 of their paths.
const MEMORIES: Bucket = Bucket::new("memories");
/// The longest file in bytes.
const FILE_LEN_MAX: usize = 256 << 10;
/// The most files.
const FILES_MAX: usize = 2000;
/// The most bytes of all files.
const TOTAL_LEN_MAX: usize = 16 << 20;
/// How many keys of calls the record of a file has.
const KEYS_MAX: usize = 32;
/// How long the record of a deleted file stays, in seconds.
const DELETED_KEPT_S: i64 = 24 * 3600;

/// The record of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SharedFileRecord {
    path: String,
    /// The text; none if the file was deleted.
    text: Option<String>,
    modified_s: i64,
    /// The newest calls that changed it, oldest first.
    #[serde(default)]
    calls: Vec<SharedFileCall>,
}

/// A call that changed a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SharedFileCall {
    key: String,
    /// How many places an edit replaced.
    #[serde(default)]
    occurrences: u64,
}

/// The files that agents of one owner share.
#[derive(Clone)]
pub struct SharedStore {
    fleet: Arc<Fleet>,
    owner: Option<String>,
}

impl SharedStore {
    /// The files of an owner in the data directory of this fleet.
    pub fn new(fleet: Arc<Fleet>, owner: Option<String>) -> Self {
        Self { fleet, owner }
    }
}

impl FileBackend for SharedStore {
    fn call(&self, call: FileCall) -> BoxFuture<'_, Result<FileReply, Failure>> {
        let (fleet, owner) = (Arc::clone(&self.fleet), self.owner.clone());
        Box::pin(async move {
            let answer = move || SharedFileTable::new(&fleet, owner.as_deref())?.answer(&call);
            let done = tokio::task::spawn_blocking(answer).await;
            let answer = done.unwrap_or_else(|error| {
                Err(Failure::new(Kind::Internal, "reading the shared files was interrupted").because(error))
            });
            answer.map(FileReply::from)
        })
    }

    /// The record of a file knows the call if it took effect; else it is carried out now.
    fn recover(&self, call: FileCall, _: BodyLife) -> BoxFuture<'_, Result<Option<FileReply>, Failure>> {
        Box::pin(async move { self.call(call).await.map(Some) })
    }
}

/// Why a change stopped: the records failed, or the change is not possible.
enum ChangeStop {
    Records(RecordsError),
    Refused(FileAnswer),
}

impl From<RecordsError> for ChangeStop {
    fn from(error: RecordsError) -> Self {
        Self::Records(error)
    }
}

impl ChangeStop {
    fn answer(self) -> Result<FileAnswer, Failure> {
        match self {
            Self::Records(error) => Err(error.into()),
            Self::Refused(answer) => Ok(answer),
        }
    }
}

/// The bucket of the files, with the operations on it.
struct SharedFileTable<'a> {
    table: RecordTable<'a, SharedFileRecord>,
    owner: RecordKey,
}

impl<'a> SharedFileTable<'a> {
    fn new(fleet: &'a Fleet, owner: Option<&str>) -> Result<Self, Failure> {
        let owner = match owner {
            Some(owner) => RecordKey::of(["key", &digest(owner)]),
            None => RecordKey::of(["local"]),
        };
        let owner = owner.map_err(RecordsError::from)?;
        Ok(Self { table: RecordTable::new(&**fleet.records(), MEMORIES), owner })
    }

    /// All files of the owner.
    fn records(&self) -> Result<Vec<SharedFileRecord>, RecordsError> {
        self.table.values(Some(&self.owner))
    }

    /// The key of a file's record: any path has one.
    fn record_key(&self, path: &str) -> Result<RecordKey, RecordsError> {
        Ok(format!("{}.{}", self.owner.as_str(), digest(path)).parse::<RecordKey>()?)
    }

    fn answer(&self, call: &FileCall) -> Result<FileAnswer, Failure> {
        let key = call.key.as_deref().map(digest);
        match &call.operation {
            FileOperation::Write { files } => {
                for file in files {
                    let written = match &file.content {
                        Some(text) => self.write(&file.path, text, key.as_deref()),
                        None => self.delete(&file.path, key.as_deref()),
                    };
                    match written.or_else(ChangeStop::answer)? {
                        FileAnswer::Written | FileAnswer::Deleted => {}
                        refused => return Ok(refused),
                    }
                }
                Ok(FileAnswer::Written)
            }
            FileOperation::Edit { path, old, new, replace_all } => {
                let replace = |text: &str| file_text::replace_text(text, old, new, *replace_all);
                self.edit(path, replace, key.as_deref()).or_else(ChangeStop::answer)
            }
            FileOperation::Delete { path } => self.delete(path, key.as_deref()).or_else(ChangeStop::answer),
            reading => {
                let files = live_files(self.records()?);
                Ok(answer_read(&files, reading).unwrap_or(FileAnswer::Unknown))
            }
        }
    }

    fn write(&self, path: &str, text: &str, key: Option<&str>) -> Result<FileAnswer, ChangeStop> {
        self.check_room(path, text.len())?;
        self.change(path, key, |_| Ok((Some(text.to_owned()), 0)))?;
        Ok(FileAnswer::Written)
    }

    fn edit(
        &self,
        path: &str,
        replace: impl Fn(&str) -> Result<(String, u64), FileError>,
        key: Option<&str>,
    ) -> Result<FileAnswer, ChangeStop> {
        let occurrences = self.change(path, key, |text| {
            let (text, occurrences) = replace(text.ok_or(FileError::NotFound)?)?;
            if text.len() > FILE_LEN_MAX {
                return Err(FileError::TooLarge { len: text.len() as u64 });
            }
            Ok((Some(text), occurrences))
        })?;
        Ok(FileAnswer::Edited { occurrences })
    }

    /// Deletes a file, or all files below a directory.
    fn delete(&self, path: &str, key: Option<&str>) -> Result<FileAnswer, ChangeStop> {
        let records = self.records()?;
        self.purge(&records)?;
        let below = |other: &str| {
            other == path
                || other.strip_prefix(path.trim_end_matches('/')).is_some_and(|rest| rest.starts_with('/'))
        };
        let mut concerned = false;
        for record in records.iter().filter(|record| below(&record.path)) {
            concerned |= record.text.is_some() || key.is_some_and(|key| record.knows(key).is_some());
            if record.text.is_some() {
                self.change(&record.path, key, |_| Ok((None, 0)))?;
            }
        }
        if concerned {
            Ok(FileAnswer::Deleted)
        } else {
            Err(ChangeStop::Refused(refuse(path, FileError::NotFound)))
        }
    }

    /// Changes a file, unless a call with this key has done so. Returns the number of replaced places.
    fn change(
        &self,
        path: &str,
        key: Option<&str>,
        change: impl Fn(Option<&str>) -> Result<(Option<String>, u64), FileError>,
    ) -> Result<u64, ChangeStop> {
        let mut replaced = 0;
        self.table.change(&self.record_key(path)?, |record| {
            if let Some(done) = key.and_then(|key| record?.knows(key)) {
                replaced = done.occurrences;
                return Ok(None);
            }
            let text = record.and_then(|record| record.text.as_deref());
            let (text, occurrences) =
                change(text).map_err(|reason| ChangeStop::Refused(refuse(path, reason)))?;
            replaced = occurrences;
            let mut calls = record.map(|record| record.calls.clone()).unwrap_or_default();
            calls.extend(key.map(|key| SharedFileCall { key: key.to_owned(), occurrences }));
            calls.drain(..calls.len().saturating_sub(KEYS_MAX));
            Ok::<_, ChangeStop>(Some(SharedFileRecord {
                path: path.to_owned(),
                text,
                modified_s: now_s(),
                calls,
            }))
        })?;
        Ok(replaced)
    }

    /// Refuses a text that is too long, and a file for which there is no room.
    fn check_room(&self, path: &str, len: usize) -> Result<(), ChangeStop> {
        let refused = |reason| Err(ChangeStop::Refused(refuse(path, reason)));
        if len > FILE_LEN_MAX {
            return refused(FileError::TooLarge { len: len as u64 });
        }
        let records = self.records()?;
        self.purge(&records)?;
        let files = live_files(records);
        let prefix = format!("{}/", path.trim_end_matches('/'));
        if path == "/" || files.keys().any(|other| other.starts_with(&prefix)) {
            return refused(FileError::IsDirectory);
        }
        let others = || files.iter().filter(|(other, _)| *other != path);
        let total: usize = others().map(|(_, file)| file.text.len()).sum();
        if others().count() >= FILES_MAX || total + len > TOTAL_LEN_MAX {
            let why = format!(
                "the agents may keep at most {FILES_MAX} files with {} MiB together; delete some of them",
                TOTAL_LEN_MAX >> 20
            );
            return refused(FileError::Other { why });
        }
        Ok(())
    }

    /// Removes the records of files that were deleted long ago.
    fn purge(&self, records: &[SharedFileRecord]) -> Result<(), RecordsError> {
        let is_old = |record: &&SharedFileRecord| {
            record.text.is_none() && record.modified_s + DELETED_KEPT_S < now_s()
        };
        for record in records.iter().filter(is_old) {
            let key = self.record_key(&record.path)?;
            if let Some(found) = self.table.get(&key)?.filter(|found| found.value == *record) {
                match self.table.delete(&key, found.revision) {
                    Err(error) if !error.is_conflict() => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

impl SharedFileRecord {
    fn knows(&self, key: &str) -> Option<&SharedFileCall> {
        self.calls.iter().find(|call| call.key == key)
    }
}

fn live_files(records: Vec<SharedFileRecord>) -> FileTree {
    let live =
        |SharedFileRecord { path, text, modified_s, .. }| Some((path, TextFile { text: text?, modified_s }));
    records.into_iter().filter_map(live).collect()
}

/// The SHA-256 of a text, in hexadecimal digits.
fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn now_s() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}
