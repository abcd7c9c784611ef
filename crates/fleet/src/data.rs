//! The data directory: checks its owner and its layout version, and opens a fleet in it.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use body::{
    capacity,
    driver::{DriverContext, Notices},
    process::LaunchContext,
    programs::Programs,
};
use proto::{
    Failure, Kind, TemplateId,
    egress::Flush,
    event::hex,
    secret::{self, Purpose},
};
use store::{Durability, EmbeddedRecords, Records};

use crate::{DriverMaker, Fleet, drivers::Drivers, log::Log, migrate, pool::Pool, supervisors::Supervisors};

/// The current layout version. An older layout is migrated; a newer one is refused.
const VERSION: u32 = 2;
/// The old layout that kept records in JSON files.
const VERSION_OF_FILES: u32 = 1;
const VERSION_FILE: &str = "version";

/// The options for opening a fleet.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// The data directory.
    pub data: PathBuf,
    /// The failures that a written event survives.
    pub durability: Durability,
}

pub fn open(config: FleetConfig, ahead: Prestart, drivers: &[DriverMaker<'_>]) -> Result<Fleet, Failure> {
    let data = prepare(&config.data)?;
    let records: Arc<dyn Records> = Arc::new(EmbeddedRecords::at(&data, config.durability));
    check_version(&data, &*records)?;
    let programs = Programs::install(&data).map_err(|error| unusable(&data, error))?;
    let cgroups = sys::cgroup::CgroupMounts::find().unwrap_or_default();
    let flush = match config.durability {
        Durability::Power => Flush::Disk,
        Durability::Process => Flush::Kernel,
    };
    let maker = Arc::new(LaunchContext { programs, capacity: capacity::measure(&data), cgroups, flush });
    let supervisors = Supervisors::open(maker.clone(), ahead)?;
    let key = key(&data).map_err(|error| unusable(&data, error))?;
    let context = Arc::new(DriverContext {
        launch: maker.clone(),
        data: data.clone(),
        key: key.clone(),
        notices: Notices::default(),
    });
    let fleet = Fleet {
        pool: (ahead == Prestart::Always).then(|| Pool::open(context.clone())),
        drivers: Drivers::new(context, &records, drivers),
        log: Log::new(&data, config.durability),
        data,
        env: Default::default(),
        host_variables: |_| None,
        key,
        records,
        launch_context: maker,
        supervisors,
        connections: Default::default(),
        jobs: Default::default(),
        steps: Default::default(),
    };
    // A caller that creates a Body at once opens the log later, while the launcher works.
    if ahead != Prestart::Once {
        fleet.log.open()?;
    }
    Ok(fleet)
}

/// The processes that the fleet starts before a caller asks for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prestart {
    /// One launcher, for the Body that the caller is about to create.
    Once,
    /// Always a launcher for the next Body.
    Always,
    /// No process.
    None,
}

/// The token that a caller must send with files for the builds of a template. It is derived from the data directory's
/// key.
pub fn upload_token(key: &str, template: &TemplateId, files_sha256: &str) -> String {
    secret::derive(key, Purpose::UploadToken, &[template.as_str(), &files_sha256.to_ascii_lowercase()])
}

/// Creates the data directory if it does not exist, and refuses one that belongs to another user.
fn prepare(data: &Path) -> Result<PathBuf, Failure> {
    let text = |path: &Path| match path.to_str() {
        Some(_) => Ok(()),
        // Records contain paths below this directory, and records are JSON.
        None => Err(Failure::new(
            Kind::Usage,
            format!("the data directory {} has a path that is not UTF-8", path.display()),
        )
        .hint("choose another: --data DIR")),
    };
    text(data)?;
    let found = match fs::metadata(data) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(data)
                .map_err(|error| unusable(data, error))?;
            fs::metadata(data)
        }
        found => found,
    };
    let found = found.map_err(|error| unusable(data, error))?;
    if !found.is_dir() {
        return Err(Failure::new(Kind::Usage, format!("{} is not a directory", data.display()))
            .hint("choose another: --data DIR"));
    }
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(Failure::new(
            Kind::Denied,
            format!(
                "the data directory {} belongs to another user (user id {})",
                data.display(),
                found.uid()
            ),
        )
        .hint("choose one of your own: --data DIR"));
    }
    let data = data.canonicalize().map_err(|error| unusable(data, error))?;
    text(&data)?;
    if found.mode() & 0o077 != 0 {
        fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .map_err(|error| unusable(&data, error))?;
    }
    Ok(data)
}

fn unusable(data: &Path, error: io::Error) -> Failure {
    let failure = Failure::new(Kind::Host, format!("cannot use the data directory {}", data.display()));
    let hint = match error.kind() {
        io::ErrorKind::StorageFull => "make room on that disk",
        _ => "choose another: --data DIR",
    };
    failure.because(error).hint(hint)
}

/// Creates the layout in an empty directory, migrates an older layout, and refuses a newer one.
fn check_version(data: &Path, records: &dyn Records) -> Result<(), Failure> {
    let found = match read_version(data) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            for dir in ["bodies", "snapshots"] {
                match fs::DirBuilder::new().mode(0o700).create(data.join(dir)) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(unusable(data, error));
                    }
                    _ => {}
                }
            }
            write_version(data)?;
            Some(VERSION)
        }
        Err(error) => return Err(unusable(data, error)),
    };
    match found {
        Some(VERSION) => Ok(()),
        Some(VERSION_OF_FILES) => {
            let is_done = || read_version(data).is_ok_and(|found| found == Some(VERSION));
            migrate::migrate(data, records, is_done, || write_version(data))
        }
        Some(newer) if newer > VERSION => Err(Failure::new(
            Kind::Host,
            format!(
                "the data directory {} was written by a newer pal (layout {newer}, this one knows {VERSION})",
                data.display()
            ),
        )
        .hint("use that newer pal, or another directory: --data DIR")),
        _ => Err(Failure::new(
            Kind::Host,
            format!("{} does not contain a layout version", data.join(VERSION_FILE).display()),
        )
        .hint("choose another directory: --data DIR")),
    }
}

fn read_version(data: &Path) -> io::Result<Option<u32>> {
    Ok(fs::read_to_string(data.join(VERSION_FILE))?.trim().parse().ok())
}

fn write_version(data: &Path) -> Result<(), Failure> {
    let file = data.join(VERSION_FILE);
    match sys::fd::write_whole(&file, format!("{VERSION}\n").as_bytes()) {
        // Two processes that start at the same time write the same contents; one of them finds the other's file in
        // place.
        Err(error) if error.kind() != io::ErrorKind::NotFound || !file.exists() => Err(unusable(data, error)),
        _ => Ok(()),
    }
}

/// Reads the key, or generates it once. Two processes that start at the same time agree: the first `link` wins.
fn key(data: &Path) -> io::Result<String> {
    let file = data.join("key");
    match fs::read_to_string(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        read => return read,
    }
    let fresh = data.join(format!("key.{}", std::process::id()));
    let mut options = fs::OpenOptions::new();
    let mut part = options.write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    let written =
        sys::random::bytes::<32>().and_then(|drawn| io::Write::write_all(&mut part, hex(&drawn).as_bytes()));
    let linked = written.and_then(|()| fs::hard_link(&fresh, &file));
    fs::remove_file(&fresh)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::read_to_string(&file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upload_tokens_are_keyed_hashes() {
        // The expected value was computed with Python's hmac module.
        let template = "abc".parse().unwrap();
        let upload = "4c98f94a7707678a6fdfe16677671ebbc4ea9073ae8fdb680c58c88ade04de29";
        assert_eq!(upload_token("a key", &template, "00FF"), upload);
        assert_ne!(upload_token("another key", &template, "00FF"), upload);
    }
}
