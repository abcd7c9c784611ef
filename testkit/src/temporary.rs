//! The directory of one test.

use std::{
    fs,
    ops::Deref,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// A directory that every user may enter, removed at the end. A file that cannot be removed is a leftover,
/// and fails the test.
#[derive(Debug)]
pub struct TemporaryDir(PathBuf);

impl TemporaryDir {
    /// Creates a new one.
    pub fn new(what: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("palisade-{what}-{}-{next}", std::process::id()));
        // A pid may be reused; remove what a killed test left under it.
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new()
            .mode(0o755)
            .create(&path)
            .unwrap_or_else(|error| panic!("cannot make {}: {error}", path.display()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the directory is ours");
        Self(path)
    }
}

impl Deref for TemporaryDir {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryDir {
    fn drop(&mut self) {
        let removed = fs::remove_dir_all(&self.0);
        if !std::thread::panicking() {
            removed.unwrap_or_else(|error| panic!("files are left in {}: {error}", self.0.display()));
        }
    }
}
