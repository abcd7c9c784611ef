//! Migrates the JSON files of layout 1 to records, once for each data directory.
//!
//! The file `version` decides which form is valid: the JSON files while it contains 1, the records once it contains 2.
//! The migration creates all records before it changes the version, and moves the files to `layout-1/` afterwards. So
//! `kill -9` at any moment leaves one complete form; the next `pal` starts the migration again or finds it done.
//!
//! Invariant: a file that cannot be read stops the migration before it changes anything that layout 1 reads.
//! Invariant: a `pal` of layout 1 refuses a directory of layout 2, so it never misses a lease or a revoked key.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use proto::{
    Failure, Kind,
    template::{Template, TemplateBuild},
};
use rustix::fs::{FlockOperation, flock};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use store::{Bucket, RecordKey, RecordTable, Records, RecordsError};

use crate::{
    lease::Lease,
    records::{BUILD_JOBS, BUILDS, HOMES, KEYS, LEASES, SETTINGS, TEMPLATES},
    settings::{self, Settings},
    templates::BuildJobRecord,
    work::HomeRecord,
};

/// Longest file of layout 1, in bytes.
const FILE_LEN_MAX: u64 = 4 << 20;
/// The directory to which the files are moved.
const ASIDE: &str = "layout-1";

/// Migrates the files of `data` unless another `pal` has done so: `is_done` reads the version again under the lock.
/// `finish` writes the new version.
pub fn migrate(
    data: &Path,
    records: &dyn Records,
    is_done: impl FnOnce() -> bool,
    finish: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let cannot = |error: io::Error| {
        Failure::new(Kind::Host, format!("cannot migrate the data directory {}", data.display()))
            .because(error)
    };
    let turn = File::open(data).map_err(cannot)?;
    flock(&turn, FlockOperation::LockExclusive).map_err(|errno| cannot(errno.into()))?;
    if is_done() {
        return Ok(());
    }
    refuse_running_server(data)?;
    let mut import = Import { data, records, files: Vec::new() };
    import.all()?;
    let files = import.files;
    finish()?;
    // A file that cannot be moved stays, but layout 2 does not read it.
    for file in files {
        let _ = move_aside(data, &file);
    }
    Ok(())
}

/// Refuses to migrate under a running server of layout 1, which would continue to write files that layout 2 does not
/// read.
fn refuse_running_server(data: &Path) -> Result<(), Failure> {
    let Ok(file) = File::open(data.join("serve.lock")) else { return Ok(()) };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Failure::new(
            Kind::Conflict,
            format!("an earlier version of pal serve uses the data directory {}", data.display()),
        )
        .hint("stop that server, then try again; its Bodies keep running")),
        _ => Ok(()),
    }
}

fn move_aside(data: &Path, file: &Path) -> io::Result<()> {
    let to = data.join(ASIDE).join(file);
    fs::create_dir_all(to.parent().unwrap_or(data))?;
    fs::rename(data.join(file), to)
}

struct Import<'a> {
    data: &'a Path,
    records: &'a dyn Records,
    /// The migrated files, by their paths below the data directory.
    files: Vec<PathBuf>,
}

impl Import<'_> {
    fn all(&mut self) -> Result<(), Failure> {
        // While the version is 1, all existing records come from an interrupted migration.
        for bucket in [SETTINGS, LEASES, KEYS, HOMES, TEMPLATES, BUILDS, BUILD_JOBS] {
            let table = RecordTable::<Value>::new(self.records, bucket);
            for record in self.records.list(bucket, None)?.records {
                table.delete(&record.key, record.revision)?;
            }
        }
        self.settings()?;
        self.keys()?;
        self.leases()?;
        self.homes()?;
        self.templates()
    }

    fn settings(&mut self) -> Result<(), Failure> {
        if let Some(found) = self.read::<Settings>(Path::new("config.json"))? {
            self.create(SETTINGS, &[settings::CURRENT], &found)?;
        }
        Ok(())
    }

    fn keys(&mut self) -> Result<(), Failure> {
        let file = Path::new("keys.json");
        for key in self.read::<Vec<Value>>(file)?.unwrap_or_default() {
            let id = key.get("id").and_then(Value::as_str);
            let id = id.ok_or_else(|| unreadable(&self.data.join(file), "a key has no id".into()))?;
            self.create(KEYS, &[id], &key)?;
        }
        Ok(())
    }

    fn leases(&mut self) -> Result<(), Failure> {
        for body in self.names("bodies")? {
            if let Some(lease) = self.read::<Lease>(&Path::new("bodies").join(&body).join("lease.json"))? {
                self.create(LEASES, &[&body], &lease)?;
            }
        }
        Ok(())
    }

    fn homes(&mut self) -> Result<(), Failure> {
        for name in self.names("homes")?.iter().filter(|name| name.ends_with(".json")) {
            if let Some(home) = self.read::<HomeRecord>(&Path::new("homes").join(name))? {
                self.create(HOMES, &[&home.name], &home)?;
            }
        }
        Ok(())
    }

    fn templates(&mut self) -> Result<(), Failure> {
        for id in self.names("templates")? {
            let dir = Path::new("templates").join(&id);
            // A directory without a manifest belongs to a removed template.
            let Some(template) = self.read::<Template>(&dir.join("manifest.json"))? else { continue };
            self.create(TEMPLATES, &[&template.name], &template)?;
            let builds = dir.join("builds");
            for name in self.names(&builds)? {
                match name.rsplit_once('.') {
                    Some((build, "json")) => {
                        if let Some(whole) = self.read::<TemplateBuild>(&builds.join(&name))? {
                            self.create(BUILDS, &[&id, build], &whole)?;
                        }
                    }
                    Some((build, "draft")) => {
                        if let Some(job) = self.read::<BuildJobRecord>(&builds.join(&name))? {
                            self.create(BUILD_JOBS, &[&id, build], &job)?;
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn create(&self, bucket: Bucket, key: &[&str], value: &impl Serialize) -> Result<(), Failure> {
        let key = RecordKey::of(key.iter().copied()).map_err(RecordsError::from)?;
        let value = serde_json::to_value(value)
            .map_err(|error| Failure::new(Kind::Internal, "cannot write a record").because(error))?;
        RecordTable::new(self.records, bucket).create(&key, &value)?;
        Ok(())
    }

    /// Reads a file below the data directory; `None` if it does not exist.
    fn read<T: DeserializeOwned>(&mut self, file: &Path) -> Result<Option<T>, Failure> {
        let path = self.data.join(file);
        let text = match sys::fd::read_small(&path, FILE_LEN_MAX) {
            Ok(text) => text,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(unreadable(&path, error.into())),
        };
        let value = serde_json::from_str(&text).map_err(|error| unreadable(&path, error.into()))?;
        self.files.push(file.to_owned());
        Ok(Some(value))
    }

    /// The names in a directory below the data directory; none if it does not exist.
    fn names(&self, dir: impl AsRef<Path>) -> Result<Vec<String>, Failure> {
        let path = self.data.join(dir);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(unreadable(&path, error.into())),
        };
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn unreadable(path: &Path, why: Box<dyn std::error::Error + Send + Sync>) -> Failure {
    Failure::new(Kind::Host, format!("cannot migrate {}, a file of an earlier version", path.display()))
        .because(why)
        .hint("repair that file, or move it out of the data directory, then try again")
}
