//! A model of a disk: the system calls of a process, and the states that a disk may be in after a loss of
//! power.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::{child, scene::Random};

const SECTOR_LEN: u64 = 512;

/// One relevant system call. Paths are relative to the data directory, which is the empty path; a number
/// identifies a file, because its name may change.
#[derive(Debug)]
pub enum DiskOp {
    /// Creates an empty file.
    Make(PathBuf, usize),
    MakeDir(PathBuf),
    Rename(PathBuf, PathBuf, usize),
    Remove(PathBuf),
    Write {
        file: usize,
        at: u64,
        bytes: Vec<u8>,
    },
    Truncate {
        file: usize,
        len: u64,
    },
    /// Syncs the contents of a file.
    Sync(usize),
    /// Syncs the names in a directory.
    SyncDir(PathBuf),
    /// Writes to standard output.
    Say(Vec<u8>),
}

/// The system calls that `strace` records: all that can change a file or a name, or sync a change.
pub const CALLS: &str = "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,\
    fallocate,lseek,mmap,fsync,fdatasync,sync_file_range,msync,rename,renameat,renameat2,link,linkat,symlink,\
    symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,sendfile,copy_file_range";

impl DiskOp {
    /// Parses the output of `strace -f -y -xx` for a process and this data directory.
    pub fn recorded(dir: &Path, trace: &str) -> Vec<DiskOp> {
        let mut reader = TraceReader { dir, names: BTreeMap::new(), lens: Vec::new() };
        // Before that a single thread does everything; afterwards the test's own threads end in any order.
        let done: String = child::DONE.bytes().map(|byte| format!("\\x{byte:02x}")).collect();
        let (trace, _) = trace.split_once(&done).expect("it came to its end");
        trace.lines().filter_map(|line| reader.read(line)).collect()
    }

    /// The bytes that were written to standard output.
    pub fn said(&self) -> Option<&Vec<u8>> {
        if let DiskOp::Say(bytes) = self { Some(bytes) } else { None }
    }
}

/// The names and lengths that the process sees, while its trace is parsed.
struct TraceReader<'a> {
    dir: &'a Path,
    names: BTreeMap<PathBuf, usize>,
    lens: Vec<u64>,
}

impl TraceReader<'_> {
    fn read(&mut self, line: &str) -> Option<DiskOp> {
        assert!(!line.contains("unfinished ..."), "two threads at once: {line}");
        let (call, result) = line.split_once(' ')?.1.trim_start().rsplit_once(") = ")?;
        let (call, arguments) = call.split_once('(')?;
        let arguments: Vec<&str> = arguments.split(", ").collect();
        let path = |at: usize| self.inside(arguments.get(at)?);
        if result.starts_with('-') {
            return None;
        }
        if matches!(call, "write") && arguments[0].starts_with("1<") {
            return Some(DiskOp::Say(decoded(arguments[1])));
        }
        if matches!(call, "rename") {
            let (from, to) = (path(0)?, path(1)?);
            let file = self.names.remove(&from)?;
            self.names.insert(to.clone(), file);
            return Some(DiskOp::Rename(from, to, file));
        }
        // The file is given by a path or by a descriptor; the directory argument of `openat` is never used:
        // all paths are absolute.
        let at = usize::from(matches!(call, "openat" | "unlinkat" | "mkdirat" | "openat2"));
        let path = if call == "mmap" { path(4)? } else { path(at)? };
        if path.to_string_lossy().ends_with("-shm") {
            return None;
        }
        let file = self.names.get(&path).copied();
        match (call, file) {
            ("openat", None) if arguments[2].contains("O_CREAT") => {
                self.lens.push(0);
                self.names.insert(path.clone(), self.lens.len() - 1);
                Some(DiskOp::Make(path, self.lens.len() - 1))
            }
            ("openat", _) => {
                assert!(!arguments[2].contains("O_TRUNC") && !arguments[2].contains("O_APPEND"), "{line}");
                None
            }
            ("mkdir", None) => Some(DiskOp::MakeDir(path)),
            ("unlink", Some(_)) => {
                self.names.remove(&path);
                Some(DiskOp::Remove(path))
            }
            ("pwrite64", Some(file)) => self.write(file, arguments[3].parse().unwrap(), &arguments),
            // Only artifacts are written this way, from their beginning.
            ("write", Some(file)) => self.write(file, self.lens[file], &arguments),
            ("ftruncate", Some(file)) => {
                self.lens[file] = arguments[1].parse().unwrap();
                Some(DiskOp::Truncate { file, len: self.lens[file] })
            }
            ("fsync" | "fdatasync", Some(file)) => Some(DiskOp::Sync(file)),
            ("fsync" | "fdatasync", None) => Some(DiskOp::SyncDir(path)),
            ("mmap", _) => {
                assert!(
                    !(arguments[2].contains("PROT_WRITE") && arguments[3].contains("MAP_SHARED")),
                    "{line}"
                );
                None
            }
            _ => panic!("a call that the model of a disk does not know: {line}"),
        }
    }

    fn write(&mut self, file: usize, at: u64, arguments: &[&str]) -> Option<DiskOp> {
        let bytes = decoded(arguments[1]);
        assert_eq!(bytes.len(), arguments[2].parse::<usize>().unwrap(), "all of it was traced");
        self.lens[file] = self.lens[file].max(at + bytes.len() as u64);
        Some(DiskOp::Write { file, at, bytes })
    }

    /// The path of an argument, `"…"` or `3<…>`, below the data directory.
    fn inside(&self, argument: &str) -> Option<PathBuf> {
        let path = PathBuf::from(std::ffi::OsString::from_vec(decoded(argument)));
        path.strip_prefix(self.dir).ok().map(Path::to_owned)
    }
}

/// The bytes between quotes or angle brackets, each in the form `\x2f`.
fn decoded(argument: &str) -> Vec<u8> {
    let text = argument.split(['"', '<', '>']).nth(1).unwrap_or_default();
    let bytes = text.split("\\x").skip(1);
    bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap_or_else(|_| panic!("{argument}"))).collect()
}

/// A change of a file that is not synced yet: these bytes at an offset, or a new length.
type UnsyncedChange<'a> = Result<(u64, &'a [u8]), u64>;

/// The synced state of a disk, and the changes that are not synced yet.
#[derive(Default)]
pub struct SimulatedDisk<'a> {
    files: Vec<Vec<u8>>,
    /// `None` is a directory.
    names: BTreeMap<&'a Path, Option<usize>>,
    changes: Vec<Vec<UnsyncedChange<'a>>>,
    renames: Vec<&'a DiskOp>,
}

impl<'a> SimulatedDisk<'a> {
    /// The disk after these calls.
    pub fn at(ops: &'a [DiskOp]) -> Self {
        let mut disk = Self::default();
        for op in ops {
            match op {
                DiskOp::Make(..) => {
                    disk.files.push(Vec::new());
                    disk.changes.push(Vec::new());
                    disk.renames.push(op);
                }
                DiskOp::MakeDir(_) | DiskOp::Rename(..) | DiskOp::Remove(_) => disk.renames.push(op),
                DiskOp::Write { file, at, bytes } => disk.changes[*file].push(Ok((*at, bytes))),
                DiskOp::Truncate { file, len } => disk.changes[*file].push(Err(*len)),
                DiskOp::Sync(file) => {
                    for change in std::mem::take(&mut disk.changes[*file]) {
                        change_file(&mut disk.files[*file], change);
                    }
                }
                DiskOp::SyncDir(dir) => {
                    let here = |op: &&&DiskOp| names_of(op).iter().any(|name| name.parent() == Some(dir));
                    let (synced, rest) = disk.renames.iter().partition(here);
                    disk.renames = rest;
                    disk.rename(synced);
                }
                DiskOp::Say(_) => {}
            }
        }
        disk
    }

    /// A possible state after a loss of power: none, all or any part of the changes that were not synced.
    pub fn lose_power(mut self, random: &mut Random) -> Self {
        let luck = random.below(4);
        let mut kept = || match luck {
            0 => false,
            1 => true,
            _ => random.below(2) == 0,
        };
        for (file, changes) in self.files.iter_mut().zip(std::mem::take(&mut self.changes)) {
            for change in changes.into_iter().flat_map(sectors).filter(|_| kept()) {
                change_file(file, change);
            }
        }
        // A disk with a journal applies changes of names in order.
        let last = self.renames.iter().take_while(|_| kept()).count();
        let renames = std::mem::take(&mut self.renames);
        self.rename(renames.into_iter().take(last).collect());
        self
    }

    /// Writes these files to a directory.
    pub fn write_to(&self, dir: &Path) {
        // The sort order puts a directory before its contents; the contents of a lost directory are lost.
        for (name, file) in &self.names {
            let path = dir.join(name);
            match file {
                _ if !path.parent().is_some_and(Path::is_dir) => {}
                None => fs::create_dir(path).unwrap(),
                Some(file) => fs::write(path, &self.files[*file]).unwrap(),
            }
        }
    }

    fn rename(&mut self, ops: Vec<&'a DiskOp>) {
        for op in ops {
            match op {
                DiskOp::Make(name, file) => drop(self.names.insert(name, Some(*file))),
                DiskOp::MakeDir(name) => drop(self.names.insert(name, None)),
                DiskOp::Remove(name) => drop(self.names.remove(name.as_path())),
                DiskOp::Rename(from, to, file) => {
                    // The new name exists, so the old one does not, and never will.
                    self.renames.retain(|op| !matches!(op, DiskOp::Make(name, _) if name == from));
                    self.names.remove(from.as_path());
                    self.names.insert(to, Some(*file));
                }
                _ => {}
            }
        }
    }
}

/// The names that a call changes.
fn names_of(op: &DiskOp) -> Vec<&Path> {
    match op {
        DiskOp::Make(name, _) | DiskOp::MakeDir(name) | DiskOp::Remove(name) => vec![name],
        DiskOp::Rename(from, to, _) => vec![from, to],
        _ => Vec::new(),
    }
}

/// The parts of a change that a disk writes separately.
fn sectors(change: UnsyncedChange<'_>) -> Vec<UnsyncedChange<'_>> {
    let Ok((mut at, mut bytes)) = change else { return vec![change] };
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let (part, rest) = bytes.split_at(bytes.len().min((SECTOR_LEN - at % SECTOR_LEN) as usize));
        parts.push(Ok((at, part)));
        (at, bytes) = (at + part.len() as u64, rest);
    }
    parts
}

fn change_file(file: &mut Vec<u8>, change: UnsyncedChange<'_>) {
    match change {
        Ok((at, bytes)) => {
            let (at, end) = (at as usize, at as usize + bytes.len());
            file.resize(file.len().max(end), 0);
            file[at..end].copy_from_slice(bytes);
        }
        Err(len) => file.resize(len as usize, 0),
    }
}
