//! Disks of microVMs: the private upper, and sparse copies.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::Command,
};

use super::{VmError, VmStepExt, find_tool, run};

/// The smallest size of a disk with a file system.
pub const DISK_MIN: u64 = 16 << 20;

/// An empty disk of that size with that number of inodes: created once, then copied.
pub fn empty(uppers: &Path, bytes: u64, inodes: u64) -> Result<std::path::PathBuf, VmError> {
    let path = uppers.join(format!("{bytes}-{inodes}.img"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(uppers).step("make a directory for disks")?;
    let part = uppers.join(format!("{bytes}-{inodes}.part{}", std::process::id()));
    let inodes = inodes.to_string();
    let made = (|| {
        File::create(&part).and_then(|file| file.set_len(bytes)).step("make an empty disk")?;
        let options = [
            "-q",
            "-F",
            "-t",
            "ext4",
            "-m",
            "0",
            "-N",
            &inodes,
            // The space for growing takes four megabytes that every microVM would copy, and no disk grows.
            "-O",
            "^resize_inode",
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0",
        ];
        run(Command::new(find_tool("mke2fs")?).args(options).arg(&part), "mke2fs")?;
        fs::rename(&part, &path).step("put an empty disk in place")
    })();
    if made.is_err() {
        let _ = fs::remove_file(&part);
    }
    made.map(|()| path)
}

/// Copies the written parts of a file, and shares their blocks where the file system supports reflinks.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let target = File::options().read(true).write(true).create(true).truncate(true).open(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(());
    }
    sys::fd::copy_data(&source, &target)
}

/// The size of a file on disk.
pub fn used(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or(0, |found| found.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_holes() {
        let dir = std::env::temp_dir().join(format!("pal-disks-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (from, to) = (dir.join("from"), dir.join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"begin", 0).unwrap();
        file.write_all_at(&[7; 5000], 40 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
        assert!(used(&to) < 1 << 20, "{} bytes", used(&to));
        fs::remove_dir_all(dir).unwrap();
    }
}
