//! Reads a Body's overlay on the host without mounting it: merges the upper and the snapshots below it as
//! plain files.
//!
//! Invariant: descriptors are open only for the directories on the path to the current one.
//! Trust: a Body chooses names, file types, depth and links. Directories are opened relative to a descriptor,
//! symbolic links are never followed, and only regular files are opened.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
};

/// Most entries of one directory.
const ENTRIES_MAX: usize = 1_000_000;
/// Deepest directory.
pub const DEPTH_MAX: usize = 128;
/// The attribute with which overlayfs marks a directory that hides the directories below it.
const OPAQUE: &str = "user.overlay.opaque";

/// One directory of the overlay: its descriptors in the layers that have it, topmost first.
#[derive(Debug)]
pub struct OverlayDir(Vec<LayerDir>);

/// A directory of one layer.
#[derive(Debug)]
struct LayerDir {
    dir: OwnedFd,
    /// Whether a preparation made the layer, so that its files are no work of the Body.
    prepared: bool,
}

/// An entry of a directory.
#[derive(Debug)]
pub enum OverlayEntry {
    /// A directory.
    Dir(OverlaySubdir),
    /// A regular file.
    File(OverlayFile),
    /// A symbolic link.
    Link(OverlayFile),
    /// A whiteout: the Body deleted the name.
    Gone,
    /// A socket, a pipe or a device.
    Other,
    /// The host cannot stat it.
    Unreadable,
}

/// A directory inside another.
#[derive(Debug)]
pub struct OverlaySubdir {
    layers: Vec<usize>,
    name: CString,
    /// Whether only layers of a preparation have it.
    pub prepared: bool,
    /// Whether it hides the directories of that name in lower layers.
    pub hides: bool,
}

/// A file or a symbolic link in one of the layers.
#[derive(Debug)]
pub struct OverlayFile {
    layer: usize,
    name: CString,
    /// Whether the layer is one of a preparation.
    pub prepared: bool,
    /// Its length at the time of the stat call.
    pub len: u64,
    /// Whether its owner may execute it.
    pub executable: bool,
}

impl OverlayDir {
    /// Opens the top directory of an overlay; skips layers that lack it.
    pub fn open(layers: &[PathBuf]) -> io::Result<Self> {
        Self::open_above(layers, &[])
    }

    /// Opens the top directory of layers with work and, below them, of layers that a preparation made.
    pub fn open_above(work: &[PathBuf], prepared: &[PathBuf]) -> io::Result<Self> {
        let layers = work.iter().map(|path| (path, false)).chain(prepared.iter().map(|path| (path, true)));
        let mut dirs = Vec::new();
        for (path, prepared) in layers {
            match open_top(path) {
                Ok(dir) => dirs.push(LayerDir { dir, prepared }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self(dirs))
    }

    /// The merged entries of the directory.
    pub fn entries(&self) -> io::Result<BTreeMap<Vec<u8>, OverlayEntry>> {
        let mut all: BTreeMap<Vec<u8>, OverlayEntry> = BTreeMap::new();
        for (layer, LayerDir { dir, .. }) in self.0.iter().enumerate() {
            for entry in Dir::read_from(dir)? {
                let entry = entry?;
                let name = entry.file_name().to_owned();
                if name.as_bytes() == b"." || name.as_bytes() == b".." {
                    continue;
                }
                if all.len() >= ENTRIES_MAX {
                    return Err(io::Error::new(
                        io::ErrorKind::FileTooLarge,
                        "a directory has too many entries",
                    ));
                }
                self.add(&mut all, layer, name);
            }
        }
        Ok(all)
    }

    fn add(&self, all: &mut BTreeMap<Vec<u8>, OverlayEntry>, layer: usize, name: CString) {
        match all.get_mut(name.as_bytes()) {
            None => {
                let found = self.look(layer, &name);
                all.insert(name.into_bytes(), found);
            }
            Some(OverlayEntry::Dir(inner)) if !inner.hides => match self.look(layer, &name) {
                OverlayEntry::Dir(below) => {
                    inner.layers.extend(below.layers);
                    inner.hides = below.hides;
                }
                _ => inner.hides = true,
            },
            Some(_) => {}
        }
    }

    fn look(&self, layer: usize, name: &CString) -> OverlayEntry {
        let LayerDir { dir, prepared } = &self.0[layer];
        let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return OverlayEntry::Unreadable;
        };
        let node = || OverlayFile {
            layer,
            name: name.clone(),
            prepared: *prepared,
            len: u64::try_from(stat.st_size).unwrap_or(0),
            executable: stat.st_mode & 0o100 != 0,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => match open_dir(dir, name) {
                Ok(child) => OverlayEntry::Dir(OverlaySubdir {
                    layers: vec![layer],
                    name: name.clone(),
                    prepared: *prepared,
                    hides: is_opaque(&child),
                }),
                Err(_) => OverlayEntry::Unreadable,
            },
            FileType::RegularFile => OverlayEntry::File(node()),
            FileType::Symlink => OverlayEntry::Link(node()),
            FileType::CharacterDevice if stat.st_rdev == 0 => OverlayEntry::Gone,
            _ => OverlayEntry::Other,
        }
    }

    /// Opens a subdirectory.
    pub fn enter(&self, inner: &OverlaySubdir) -> io::Result<OverlayDir> {
        inner
            .layers
            .iter()
            .map(|layer| {
                let LayerDir { dir, prepared } = &self.0[*layer];
                Ok(LayerDir { dir: open_dir(dir, &inner.name)?, prepared: *prepared })
            })
            .collect::<io::Result<_>>()
            .map(OverlayDir)
    }

    /// One entry, by name.
    pub fn get(&self, name: &str) -> Option<OverlayEntry> {
        let name = CString::new(name).ok()?;
        let mut all = BTreeMap::new();
        for layer in 0..self.0.len() {
            let missing = matches!(
                rustix::fs::statat(&self.0[layer].dir, &name, AtFlags::SYMLINK_NOFOLLOW),
                Err(Errno::NOENT)
            );
            if !missing {
                self.add(&mut all, layer, name.clone());
            }
        }
        all.remove(name.as_bytes())
    }

    /// Opens a subdirectory, by name.
    pub fn dir(&self, name: &str) -> Option<OverlayDir> {
        match self.get(name)? {
            OverlayEntry::Dir(inner) => self.enter(&inner).ok(),
            _ => None,
        }
    }

    /// Opens a directory by its path, and returns whether it hides that of lower layers; none if it does not
    /// exist.
    pub fn down(self, path: &str) -> io::Result<Option<(OverlayDir, bool)>> {
        let (mut dirs, mut hidden) = (self, false);
        for name in path.split('/').filter(|name| !name.is_empty()) {
            match dirs.get(name) {
                Some(OverlayEntry::Dir(inner)) => {
                    hidden |= inner.hides;
                    dirs = dirs.enter(&inner)?;
                }
                Some(OverlayEntry::Unreadable) => return Err(io::ErrorKind::PermissionDenied.into()),
                _ => return Ok(None),
            }
        }
        Ok(Some((dirs, hidden)))
    }

    /// The contents of a file up to `len_max` bytes, by path.
    pub fn small(&self, path: &str, len_max: u64) -> Option<Vec<u8>> {
        if let Some((first, rest)) = path.split_once('/') {
            return self.dir(first)?.small(rest, len_max);
        }
        match self.get(path)? {
            OverlayEntry::File(node) if node.len <= len_max => {
                let mut bytes = Vec::new();
                self.file(&node).ok()?.take(len_max).read_to_end(&mut bytes).ok()?;
                Some(bytes)
            }
            _ => None,
        }
    }

    /// Opens a file of this directory; fails if another kind of file has replaced it.
    pub fn file(&self, node: &OverlayFile) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.0[node.layer].dir, &node.name, flags, Mode::empty())?);
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The target of a symbolic link of this directory.
    pub fn link(&self, node: &OverlayFile) -> io::Result<CString> {
        Ok(rustix::fs::readlinkat(&self.0[node.layer].dir, &node.name, Vec::new())?)
    }
}

/// Whether the host cannot read something below a directory.
pub fn hides(dir: &Path) -> bool {
    match open_top(dir) {
        Ok(top) => is_hiding(&OverlayDir(vec![LayerDir { dir: top, prepared: false }]), 0),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

fn is_hiding(dirs: &OverlayDir, depth: usize) -> bool {
    let Ok(entries) = dirs.entries() else { return true };
    entries.values().any(|found| match found {
        OverlayEntry::Unreadable => true,
        OverlayEntry::File(node) => {
            rustix::fs::accessat(&dirs.0[node.layer].dir, &node.name, Access::READ_OK, AtFlags::empty())
                .is_err()
        }
        // Deeper paths are skipped anyway.
        OverlayEntry::Dir(inner) => {
            depth < DEPTH_MAX && dirs.enter(inner).map_or(true, |inside| is_hiding(&inside, depth + 1))
        }
        OverlayEntry::Link(_) | OverlayEntry::Gone | OverlayEntry::Other => false,
    })
}

fn open_top(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn open_dir(parent: &OwnedFd, name: &CString) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn is_opaque(dir: &OwnedFd) -> bool {
    let mut value = [0u8; 4];
    matches!(rustix::fs::fgetxattr(dir.as_fd(), OPAQUE, &mut value), Ok(1) if value[0] == b'y')
}
