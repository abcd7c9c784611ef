//! Disks: the private upper of a machine, and copies that take no more room than what was written.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::FileExt},
    path::Path,
    process::Command,
};

use rustix::{fs::SeekFrom, io::Errno};

use super::{Step, VmError, find_tool, run};

/// The least room for a file system.
pub const DISK_MIN: u64 = 16 << 20;
const CHUNK: usize = 1 << 20;

/// An empty disk of that size: made once, then copied.
pub fn empty(uppers: &Path, bytes: u64) -> Result<std::path::PathBuf, VmError> {
    let path = uppers.join(format!("{bytes}.img"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(uppers).step("make a directory for disks")?;
    let part = uppers.join(format!("{bytes}.part{}", std::process::id()));
    let made = (|| {
        File::create(&part).and_then(|file| file.set_len(bytes)).step("make an empty disk")?;
        let options = ["-q", "-F", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"];
        run(Command::new(find_tool("mke2fs")?).args(options).arg(&part), "mke2fs")?;
        fs::rename(&part, &path).step("put an empty disk in place")
    })();
    if made.is_err() {
        let _ = fs::remove_file(&part);
    }
    made.map(|()| path)
}

/// Copies what was written of a file, and shares even that where the file system can.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let target = File::options().read(true).write(true).create(true).truncate(true).open(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(());
    }
    copy_data(&source, &target)
}

fn copy_data(source: &File, target: &File) -> io::Result<()> {
    let len = source.metadata()?.len();
    target.set_len(len)?;
    let mut at = 0;
    let mut buffer = vec![0; CHUNK];
    while at < len {
        at = match rustix::fs::seek(source, SeekFrom::Data(at)) {
            Ok(at) => at,
            // Nothing but a hole is left.
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(source, SeekFrom::Hole(at))?;
        while at < end {
            let (mut from, mut to) = (at, at);
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX);
            let copied = match rustix::fs::copy_file_range(source.as_fd(), Some(&mut from), target.as_fd(), Some(&mut to), wanted) {
                Ok(copied) if copied > 0 => copied,
                // Some file systems cannot; then it goes through here.
                _ => {
                    let piece = wanted.min(CHUNK);
                    let read = source.read_at(&mut buffer[..piece], at)?;
                    if read == 0 {
                        return Ok(());
                    }
                    target.write_all_at(&buffer[..read], at)?;
                    read
                }
            };
            at += copied as u64;
        }
    }
    Ok(())
}

/// What a file takes on disk.
pub fn used(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or(0, |found| found.blocks() * 512)
}

#[cfg(test)]
mod tests {
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
