//! Opens files by the paths of a caller.
//!
//! Invariant: no path leads through a link of `/proc` into a descriptor or the memory of the guest. The kernel takes
//! every thread of the guest for the guest itself there, whatever rights the thread has given up.
//! Invariant: nothing blocks and nothing has a side effect: only regular files and directories are opened.
//! Trust: programs in the Body may change every file and link at any time, also between two steps here.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
};

use proto::file_call::FileError;
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

/// The longest path, as the kernel limits it.
const PATH_LEN_MAX: usize = 4095;
/// `PROC_SUPER_MAGIC`.
const PROC_MAGIC: u64 = 0x9fa0;

/// An absolute path without `.`, `..` and doubled slashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedPath(String);

impl CheckedPath {
    pub fn parse(path: &str) -> Result<Self, FileError> {
        let is_plain = path.starts_with('/') && path.len() <= PATH_LEN_MAX && !path.contains('\0');
        if !is_plain || path.split('/').any(|part| part == "..") {
            return Err(FileError::InvalidPath);
        }
        let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
        let joined: String = parts.flat_map(|part| ["/", part]).collect();
        Ok(Self(if joined.is_empty() { "/".to_owned() } else { joined }))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The directory and the last part; `None` for the root.
    pub fn split(&self) -> Option<(&str, &str)> {
        let (dir, name) = self.0.rsplit_once('/')?;
        (!name.is_empty()).then_some((if dir.is_empty() { "/" } else { dir }, name))
    }

    /// The path of something below it.
    pub fn join(&self, below: &str) -> String {
        format!("{}/{below}", self.0.trim_end_matches('/'))
    }
}

/// Opens a path, following symbolic links.
pub fn open(path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    open_at(CWD, path, flags)
}

/// Opens a path from a directory.
pub fn open_at(dir: impl AsFd, path: impl rustix::path::Arg, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    // The kernel refuses most other flags beside `PATH`.
    let flags =
        if flags.contains(OFlags::PATH) { flags & !(OFlags::NOCTTY | OFlags::NONBLOCK) } else { flags };
    let opened = rustix::fs::openat2(dir, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?;
    if is_own_entry(&opened) { Err(Errno::ACCESS.into()) } else { Ok(opened) }
}

/// Whether a file is an entry of `/proc` about the guest, which a program of the user could not open.
pub fn is_own_entry(file: &OwnedFd) -> bool {
    let in_proc = rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == PROC_MAGIC);
    in_proc
        && real_path(file).is_none_or(|path| {
            let number = path.trim_start_matches("/proc/").split('/').next().unwrap_or_default();
            // Each thread of the guest has such entries too.
            number
                .parse::<u32>()
                .is_ok_and(|id| std::fs::exists(format!("/proc/self/task/{id}")).unwrap_or(true))
        })
}

/// Where the kernel says that an open file is.
pub fn real_path(file: impl AsFd) -> Option<String> {
    let link = sys::fd::path_of(file.as_fd());
    rustix::fs::readlink(link, Vec::new()).ok()?.into_string().ok()
}

/// Opens a directory to list it.
pub fn open_dir(path: &str) -> io::Result<OwnedFd> {
    open(path, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// Opens a regular file to read it.
pub fn open_regular(path: &str) -> Result<(File, Stat), FileError> {
    // A look before the file is opened: opening a device may have an effect.
    regular(&open(path, OFlags::PATH).map_err(|error| file_error(&error))?)?;
    let file = open(path, OFlags::RDONLY).map_err(|error| file_error(&error))?;
    let stat = regular(&file)?;
    Ok((file.into(), stat))
}

fn regular(file: &OwnedFd) -> Result<Stat, FileError> {
    let stat = rustix::fs::fstat(file).map_err(|error| file_error(&error.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(stat),
        FileType::Directory => Err(FileError::IsDirectory),
        _ => Err(not_regular()),
    }
}

pub fn not_regular() -> FileError {
    FileError::Other { why: "it is not a regular file".to_owned() }
}

/// Translates an error of the kernel.
pub fn file_error(error: &io::Error) -> FileError {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::NotFound => FileError::NotFound,
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => FileError::PermissionDenied,
        Kind::IsADirectory => FileError::IsDirectory,
        Kind::NotADirectory => FileError::NotDirectory,
        Kind::InvalidFilename => FileError::InvalidPath,
        _ => FileError::Other { why: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_and_go_down() {
        let parse = |path: &str| CheckedPath::parse(path).map(|path| path.0);
        assert_eq!(parse("/a//b/./c/"), Ok("/a/b/c".into()));
        assert_eq!((parse("/"), parse("//.")), (Ok("/".into()), Ok("/".into())));
        for bad in ["", "a", "~/a", "/a/../b", "/..", "/a\0b", &format!("/{}", "x".repeat(4095))] {
            assert_eq!(parse(bad), Err(FileError::InvalidPath), "{bad}");
        }
        let path = |text| CheckedPath::parse(text).unwrap();
        assert_eq!((path("/a/b").split(), path("/a").split()), (Some(("/a", "b")), Some(("/", "a"))));
        assert_eq!(
            (path("/").split(), path("/").join("x"), path("/a").join("x")),
            (None, "/x".into(), "/a/x".into())
        );
    }

    #[test]
    fn the_guests_own_descriptors_and_memory_are_out_of_reach() {
        let dir = std::env::temp_dir().join(format!("own-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let held = File::open("/").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&held);
        let link = dir.join("link");
        std::os::unix::fs::symlink(format!("/proc/self/fd/{fd}"), &link).unwrap();
        let own = format!("/proc/{}/maps", std::process::id());
        for path in [
            format!("/proc/self/fd/{fd}"),
            format!("/proc/self/fd/{fd}/etc"),
            link.to_str().unwrap().to_owned(),
            format!("{}/etc", link.display()),
            "/proc/self/root/etc".into(),
            "/proc/thread-self/cwd".into(),
            own,
            "/proc/self/environ".into(),
            "/proc/thread-self/maps".into(),
            format!("/proc/{}/maps", rustix::thread::gettid()),
            "/proc/self".into(),
        ] {
            assert!(open(&path, OFlags::RDONLY).is_err(), "{path}");
            assert!(open(&path, OFlags::PATH).is_err(), "{path}");
        }
        assert!(
            open("/proc/1/status", OFlags::PATH).is_ok() && open("/proc/version", OFlags::RDONLY).is_ok()
        );
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn only_regular_files_are_opened_and_nothing_blocks() {
        let dir = std::env::temp_dir().join(format!("regular-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let fifo = dir.join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let error = |path: &str| open_regular(path).map(drop).unwrap_err();
        assert_eq!(error(fifo.to_str().unwrap()), not_regular());
        assert_eq!(
            (error("/dev/null"), error("/"), error("/none")),
            (not_regular(), FileError::IsDirectory, FileError::NotFound)
        );
        assert_eq!(error("/etc/passwd/x"), FileError::NotDirectory);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
