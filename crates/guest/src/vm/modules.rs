//! Drivers that this kernel has as modules: in the first file system, in the order they need.

use std::{fs, io, path::PathBuf};

const DIR: &str = "/modules";

/// Loads them all, and makes room. What fails is told; whether the machine can do without shows soon enough.
pub fn load() -> io::Result<Vec<String>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(DIR)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut trouble = Vec::new();
    for path in paths {
        match rustix::system::init_module(&fs::read(&path)?, c"") {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => trouble
                .push(format!("module {}: {errno}", path.file_stem().unwrap_or_default().to_string_lossy())),
        }
        // The first file system is memory.
        fs::remove_file(&path)?;
    }
    fs::remove_dir(DIR)?;
    let _ = fs::remove_file("/init");
    Ok(trouble)
}
