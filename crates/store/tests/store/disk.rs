//! What a process asked of the kernel, and what a disk may hold of it when the power goes.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::{child, scene::Random};

const SECTOR_LEN: u64 = 512;

/// One call that matters. Paths are relative to the data directory, which is the empty path; a file is known by a
/// number, because its name may change.
#[derive(Debug)]
pub enum DiskOp {
    /// A file was made, empty.
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
    /// The contents of a file.
    Sync(usize),
    /// The names in a directory.
    SyncDir(PathBuf),
    /// Standard output.
    Say(Vec<u8>),
}

/// The calls that `strace` is told to write down: all that can change a file or a name, or make a change last.
pub const CALLS: &str = "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,\
    fallocate,lseek,mmap,fsync,fdatasync,sync_file_range,msync,rename,renameat,renameat2,link,linkat,symlink,\
    symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,sendfile,copy_file_range";

impl DiskOp {
    /// Reads what `strace -f -y -xx` wrote about a process and this data directory.
    pub fn recorded(dir: &Path, trace: &str) -> Vec<DiskOp> {
        let mut reader = TraceReader { dir, names: BTreeMap::new(), lens: Vec::new() };
        // Before that a single thread does everything; after it the test's own threads end as they like.
        let done: String = child::DONE.bytes().map(|byte| format!("\\x{byte:02x}")).collect();
        let (trace, _) = trace.split_once(&done).expect("it came to its end");
        trace.lines().filter_map(|line| reader.read(line)).collect()
    }

    /// What was written to standard output.
    pub fn said(&self) -> Option<&Vec<u8>> {
        if let DiskOp::Say(bytes) = self { Some(bytes) } else { None }
    }
}

/// The names and lengths that the process sees while it is read.
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
        // By a path, or by a descriptor; the directory that `openat` starts from is never used: all paths are whole.
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
            // Only artifacts are written so, from their beginning on.
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

/// The bytes between quotes or angles, each of them written as `\x2f`.
fn decoded(argument: &str) -> Vec<u8> {
    let text = argument.split(['"', '<', '>']).nth(1).unwrap_or_default();
    let bytes = text.split("\\x").skip(1);
    bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap_or_else(|_| panic!("{argument}"))).collect()
}

/// A change of a file that nobody has synced yet: these bytes there, or this length.
type UnsyncedChange<'a> = Result<(u64, &'a [u8]), u64>;

/// What a disk holds for certain, and what was asked of it besides.
#[derive(Default)]
pub struct SimulatedDisk<'a> {
    files: Vec<Vec<u8>>,
    /// `None` is a directory.
    names: BTreeMap<&'a Path, Option<usize>>,
    changes: Vec<Vec<UnsyncedChange<'a>>>,
    renames: Vec<&'a DiskOp>,
}

impl<'a> SimulatedDisk<'a> {
    /// After these calls.
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

    /// What is left when the power goes now. Nothing, all or any part of what was not synced.
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
        // Names change in their order on any disk with a journal.
        let last = self.renames.iter().take_while(|_| kept()).count();
        let renames = std::mem::take(&mut self.renames);
        self.rename(renames.into_iter().take(last).collect());
        self
    }

    /// Makes these files.
    pub fn write_to(&self, dir: &Path) {
        // In their order a directory comes before what is in it; what is in one that was lost is lost.
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
                    // Its new name is there, so its old one is not, and never will be.
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

/// The parts of a change that a disk writes one by one.
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
