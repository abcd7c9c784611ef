//! The launcher, which is also the guest: embedded in this program, and installed on disk once for each
//! version.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

static LAUNCH: &[u8] = include_bytes!(env!("PAL_LAUNCH"));

/// The location of the program on this host.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `pal-launch`.
    pub launch: PathBuf,
}

impl Programs {
    /// Finds the program in the data directory, or installs it there.
    pub fn install(data: &Path) -> io::Result<Self> {
        let dir = data.join("bin");
        let launch = dir.join(env!("PAL_LAUNCH_NAME"));
        if !is_whole(&launch, LAUNCH) {
            fs::create_dir_all(&dir)?;
            put(&launch, LAUNCH)?;
        }
        Ok(Self { launch })
    }
}

const PAGE_LEN: usize = 4096;

fn is_whole(path: &Path, bytes: &[u8]) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.len() == bytes.len() as u64)
}

/// Writes a temporary file and renames it, so that a killed `pal` leaves no incomplete program.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension(format!("part{}", std::process::id()));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o700).open(&part)?;
    // Writes page by page: the kernel caches one large write as a large folio, maps the whole folio when one
    // byte of it is touched, and charges it to every Body.
    bytes.chunks(PAGE_LEN).try_for_each(|page| file.write_all(page))?;
    file.set_permissions(fs::Permissions::from_mode(0o500))?;
    drop(file);
    fs::rename(&part, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_every_body_is_small() {
        // A development build optimizes the launcher for compile time, not for size.
        let max = if cfg!(debug_assertions) { 16 << 20 } else { 4 << 20 };
        assert!(LAUNCH.len() < max, "{} bytes", LAUNCH.len());
    }
}
