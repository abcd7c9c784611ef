//! Loads the kernel modules in the initramfs, in the order of their file names.

use std::{fs, io, path::PathBuf};

use proto::vm::OPTIONAL_MODULE;

const DIR: &str = "/modules";

/// Loads all modules and deletes their files. If the kernel refuses a module, the microVM ends, unless the file name
/// marks the module as optional: then the failure is part of the returned list.
pub fn load() -> io::Result<Vec<String>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(DIR)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut trouble = Vec::new();
    for path in paths {
        let file = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        // The file name begins with the position in the order.
        let (_, name) = file.split_once('-').unwrap_or(("", &file));
        match rustix::system::init_module(&fs::read(&path)?, c"") {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) if name.ends_with(OPTIONAL_MODULE) => trouble.push(format!("module {name}: {errno}")),
            // Without this module the guest would wait minutes for a device that never appears.
            Err(errno) => {
                return Err(io::Error::other(format!("the kernel refuses the module {name}: {errno}")));
            }
        }
        // The initramfs is memory, so deleting the file frees it.
        fs::remove_file(&path)?;
    }
    fs::remove_dir(DIR)?;
    let _ = fs::remove_file("/init");
    Ok(trouble)
}
