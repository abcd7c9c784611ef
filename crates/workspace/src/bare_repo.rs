//! Bare repositories of Palisade, with its own settings only, which read the objects of other repositories as
//! alternates.
//!
//! Invariant: only files written here decide how git behaves in such a repository: no hook, no filter, no
//! include.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::DirBuilderExt},
    path::{Path, PathBuf},
};

const CONFIG: &str = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n\tlogAllRefUpdates = false\n[gc]\n\tauto = 0\n[receive]\n\tfsckObjects = true\n";

/// Creates the repository, or restores its settings if it exists.
pub fn make(dir: &Path, objects: &[&Path], shallow: Option<&Path>) -> io::Result<()> {
    for part in ["", "objects", "objects/info", "objects/pack", "refs"] {
        match fs::DirBuilder::new().mode(0o700).create(dir.join(part)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let lines: Vec<u8> = objects.iter().flat_map(|path| quoted(path).into_iter().chain(*b"\n")).collect();
    sys::fd::write_whole(&dir.join("objects/info/alternates"), &lines)?;
    sys::fd::write_whole(&dir.join("config"), CONFIG.as_bytes())?;
    if let Some(shallow) = shallow.filter(|path| path.exists()) {
        fs::copy(shallow, dir.join("shallow"))?;
    }
    // HEAD is written last: without it git sees no repository.
    sys::fd::write_whole(&dir.join("HEAD"), b"ref: refs/heads/none\n")
}

/// A path quoted for `objects/info/alternates`, whatever bytes it has.
pub fn quoted(path: &Path) -> Vec<u8> {
    let mut line = vec![b'"'];
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'"' | b'\\' => line.extend([b'\\', *byte]),
            0..32 | 127.. => line.extend(format!("\\{byte:03o}").bytes()),
            byte => line.push(*byte),
        }
    }
    line.push(b'"');
    line
}

/// Removes stage directories (`stage-PID-…`) whose process no longer exists.
pub fn clear_stale(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(maker) = name.strip_prefix("stage-") else { continue };
        let maker = maker.split('-').next().and_then(|pid| pid.parse::<u32>().ok());
        if !maker.is_some_and(|pid| Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A temporary directory, removed on drop.
#[derive(Debug)]
pub struct StageDir(PathBuf);

impl StageDir {
    /// Creates the directory, empty.
    pub fn make(path: PathBuf) -> io::Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// A path inside the directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for StageDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_maker_left_goes_and_what_is_used_stays() {
        let dir = std::env::temp_dir().join(format!("pal-scratch-{}", std::process::id()));
        let (mine, old, odd) =
            (format!("stage-{}-00", std::process::id()), "stage-4294967295-00", "stage-0123456789abcdef");
        for name in [&mine, old, odd, "objects"] {
            fs::create_dir_all(dir.join(name).join("files")).unwrap();
        }
        clear_stale(&dir);
        let left = |name: &str| dir.join(name).exists();
        assert_eq!((left(&mine), left(old), left(odd), left("objects")), (true, false, false, true));
        fs::remove_dir_all(&dir).unwrap();
    }
}
