//! Drivers that this kernel has as modules: in the first file system, in the order of their names.

use std::{fs, io, path::PathBuf};

use proto::vm::OPTIONAL_MODULE;

const DIR: &str = "/modules";

/// Loads them all, and frees their memory. A module that the kernel refuses ends the machine, unless its name says that
/// the machine can do without: then it is told in what is returned.
pub fn load() -> io::Result<Vec<String>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(DIR)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut trouble = Vec::new();
    for path in paths {
        let file = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        // Behind its place in the order.
        let (_, name) = file.split_once('-').unwrap_or(("", &file));
        match rustix::system::init_module(&fs::read(&path)?, c"") {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) if name.ends_with(OPTIONAL_MODULE) => trouble.push(format!("module {name}: {errno}")),
            // Nothing would answer for minutes that the machine waits for.
            Err(errno) => {
                return Err(io::Error::other(format!("the kernel refuses the module {name}: {errno}")));
            }
        }
        // The first file system is memory.
        fs::remove_file(&path)?;
    }
    fs::remove_dir(DIR)?;
    let _ = fs::remove_file("/init");
    Ok(trouble)
}
