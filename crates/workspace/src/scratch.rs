//! Repositories of ours: bare, with our settings only, seeing the objects of others.
//!
//! Invariant: nothing but our own files decides what git does in one: no hook, no filter, no include.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::DirBuilderExt},
    path::{Path, PathBuf},
};

const CONFIG: &str = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n\tlogAllRefUpdates = false\n[gc]\n\tauto = 0\n[receive]\n\tfsckObjects = true\n";

/// Makes one, or puts one in order that is there.
pub fn make(dir: &Path, objects: &[&Path], shallow: Option<&Path>) -> io::Result<()> {
    for part in ["", "objects", "objects/info", "objects/pack", "refs"] {
        match fs::DirBuilder::new().mode(0o700).create(dir.join(part)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let lines: Vec<u8> = objects.iter().flat_map(|path| quoted(path)).collect();
    sys::fd::write_whole(&dir.join("objects/info/alternates"), &lines)?;
    sys::fd::write_whole(&dir.join("config"), CONFIG.as_bytes())?;
    if let Some(shallow) = shallow.filter(|path| path.exists()) {
        fs::copy(shallow, dir.join("shallow"))?;
    }
    // Last: with it, the repository is one.
    sys::fd::write_whole(&dir.join("HEAD"), b"ref: refs/heads/none\n")
}

/// A line of `alternates` that may hold any path.
fn quoted(path: &Path) -> Vec<u8> {
    let mut line = vec![b'"'];
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'"' | b'\\' => line.extend([b'\\', *byte]),
            0..32 | 127.. => line.extend(format!("\\{byte:03o}").bytes()),
            byte => line.push(*byte),
        }
    }
    line.extend(b"\"\n");
    line
}

/// A directory of ours that goes away.
#[derive(Debug)]
pub struct Stage(PathBuf);

impl Stage {
    /// Makes it, empty.
    pub fn make(path: PathBuf) -> io::Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// Something in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
