//! Writes a tree that comes out of a Body.
//!
//! Trust: the guest is hostile. It may send entries in any order, several times, and below directories that it never
//! sent; each entry is judged by what is on the host's disk at that moment.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::PermissionsExt},
    },
    path::{Path, PathBuf},
};

use proto::tree::{self, OmittedKind, TreeForm, TreeItem};
use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use sys::sparse::SparseWriter;

use super::GitDirs;
use crate::CopyTotals;

/// Writes a received tree below `top`.
pub struct TreeReceiver {
    top: PathBuf,
    git: GitDirs,
    root: Option<OwnedFd>,
    /// Whether this copy made the directory `top`, which goes if the copy fails.
    is_new: bool,
    /// The directory that was used last; trees come directory by directory.
    near: Option<(Vec<u8>, OwnedFd)>,
    file: Option<ReceivedFile>,
    /// Whether the root itself was left out.
    root_omitted: bool,
    /// Names of partial files begin with this.
    part_name: String,
    copied: CopyTotals,
}

/// The file whose contents arrive.
enum ReceivedFile {
    /// A regular file, which gets its name when it is complete.
    Regular { contents: SparseWriter, mode: u32, dir: OwnedFd, name: OsString },
    /// A device or FIFO of the host that the user named.
    Special(File),
    /// A file that is left out.
    Omitted,
}

/// The place of an entry.
enum EntryPlace<'a> {
    At(OwnedFd, &'a OsStr),
    /// Git would take the entry, or something above it, for a part of a repository.
    InGitDir,
}

impl Drop for TreeReceiver {
    /// Removes what is partial.
    fn drop(&mut self) {
        self.drop_part();
        if self.is_new {
            let _ = fs::remove_dir_all(&self.top);
        }
    }
}

impl TreeReceiver {
    pub fn new(top: PathBuf, git: GitDirs) -> Self {
        let drawn: [u8; 8] = sys::random::bytes().unwrap_or_default();
        Self {
            top,
            git,
            root: None,
            is_new: false,
            near: None,
            file: None,
            root_omitted: false,
            part_name: format!(".pal-cp-{}", proto::event::hex(&drawn)),
            copied: CopyTotals::default(),
        }
    }

    /// The target.
    pub fn top(&self) -> &Path {
        &self.top
    }

    /// Whether nothing is copied, because the source itself is a git directory.
    pub fn is_omitted(&self) -> bool {
        self.root_omitted
    }

    /// The totals of a tree that arrived whole.
    pub fn finish(mut self) -> CopyTotals {
        self.is_new = false;
        std::mem::take(&mut self.copied)
    }

    /// Writes one item of a stream of this form.
    pub fn take(&mut self, item: TreeItem, form: TreeForm) -> io::Result<()> {
        match item {
            TreeItem::Dir { path, .. } => self.dir(&path),
            TreeItem::File { path, mode } => self.begin_file(&path, mode),
            TreeItem::Link { path, target } => self.link(&path, &target),
            TreeItem::Same { path, first } => self.same(&path, &first),
            TreeItem::Omitted { path, kind } => {
                self.omit(&path, kind);
                Ok(())
            }
            TreeItem::Size(bytes) => self.check_room(bytes),
            // The first form has no holes, so zeros may be one.
            TreeItem::Data(bytes) if form == TreeForm::First && bytes.iter().all(|byte| *byte == 0) => {
                self.skip(bytes.len() as u64)
            }
            TreeItem::Data(bytes) => self.write(&bytes),
            TreeItem::Hole(len) => self.skip(len),
            TreeItem::FileEnd => self.end_file(),
            TreeItem::End => Ok(()),
        }
    }

    fn omit(&mut self, path: &[u8], kind: OmittedKind) {
        self.root_omitted |= path.is_empty();
        self.copied.omitted.add(path, kind);
    }

    fn check_room(&self, bytes: u64) -> io::Result<()> {
        let Some(there) = self.top.ancestors().find(|path| path.exists()) else { return Ok(()) };
        let room = rustix::fs::statvfs(there)?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if bytes <= free {
            return Ok(());
        }
        let message = format!("it has {} of data, and {} are free", proto::Size(bytes), proto::Size(free));
        Err(io::Error::new(io::ErrorKind::StorageFull, message))
    }

    fn dir(&mut self, path: &[u8]) -> io::Result<()> {
        if path.is_empty() {
            self.is_new |=
                matches!(self.top.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
            fs::create_dir_all(&self.top)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.root = Some(rustix::fs::open(&self.top, flags, Mode::empty())?);
            self.copied.entries += 1;
            return Ok(());
        }
        let EntryPlace::At(parent, name) = self.place(path)? else {
            self.omit(path, OmittedKind::Git);
            return Ok(());
        };
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Err(Errno::EXIST) | Ok(()) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.copied.entries += 1;
        Ok(())
    }

    fn begin_file(&mut self, path: &[u8], mode: u32) -> io::Result<()> {
        let (dir, name) = if path.is_empty() {
            match self.top_place()? {
                TopPlace::Special(file) => {
                    self.copied.entries += 1;
                    self.file = Some(ReceivedFile::Special(file));
                    return Ok(());
                }
                TopPlace::At(dir, name) => (dir, name),
            }
        } else {
            match self.place(path)? {
                EntryPlace::At(dir, name) => (dir, name.to_owned()),
                EntryPlace::InGitDir => {
                    self.omit(path, OmittedKind::Git);
                    self.file = Some(ReceivedFile::Omitted);
                    return Ok(());
                }
            }
        };
        if path.is_empty() && self.is_git_entry(&dir, name.as_bytes()) {
            self.omit(path, OmittedKind::Git);
            self.file = Some(ReceivedFile::Omitted);
            return Ok(());
        }
        let contents = SparseWriter::new(self.create_part(&dir)?);
        self.file = Some(ReceivedFile::Regular { contents, mode, dir, name });
        self.copied.entries += 1;
        Ok(())
    }

    /// The place of a tree that is one file. The user named it, so a link there is followed.
    fn top_place(&self) -> io::Result<TopPlace> {
        let real = match fs::metadata(&self.top) {
            Ok(found) if found.is_file() => self.top.canonicalize()?,
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(_) => {
                let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
                return Ok(TopPlace::Special(rustix::fs::open(&self.top, flags, Mode::empty())?.into()));
            }
            Err(_) => self.top.clone(),
        };
        let name = real.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
        let parent = real.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(TopPlace::At(rustix::fs::openat(CWD, parent, flags, Mode::empty())?, name))
    }

    fn create_part(&self, dir: &OwnedFd) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(dir, &*self.part_name, flags, Mode::from_raw_mode(0o600))?.into())
    }

    fn drop_part(&mut self) {
        if let Some(ReceivedFile::Regular { dir, .. }) = self.file.take() {
            let _ = rustix::fs::unlinkat(&dir, &*self.part_name, AtFlags::empty());
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.file {
            Some(ReceivedFile::Regular { contents, .. }) => contents.write(bytes)?,
            Some(ReceivedFile::Special(file)) => file.write_all(bytes)?,
            Some(ReceivedFile::Omitted) | None => return Ok(()),
        }
        self.copied.bytes += bytes.len() as u64;
        Ok(())
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        match &mut self.file {
            Some(ReceivedFile::Regular { contents, .. }) => contents.skip(len),
            Some(ReceivedFile::Special(file)) => io::copy(&mut io::repeat(0).take(len), file).map(drop),
            Some(ReceivedFile::Omitted) | None => Ok(()),
        }
    }

    fn end_file(&mut self) -> io::Result<()> {
        let (contents, mode, dir, name) = match self.file.take() {
            Some(ReceivedFile::Regular { contents, mode, dir, name }) => (contents, mode, dir, name),
            _ => return Ok(()),
        };
        let part = &*self.part_name;
        let ended = contents.finish().and_then(|file| {
            if let Ok(old) = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW)
                && FileType::from_raw_mode(old.st_mode) == FileType::RegularFile
            {
                // A file that is replaced keeps its owner, if this user may give it away.
                let (user, group) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
                let _ = rustix::fs::fchown(&file, Some(user), Some(group));
            }
            // Setuid, setgid and sticky bits of a Body's file are dropped.
            file.set_permissions(fs::Permissions::from_mode(mode & 0o777))?;
            Ok(rustix::fs::renameat(&dir, part, &dir, &name)?)
        });
        if ended.is_err() {
            let _ = rustix::fs::unlinkat(&dir, part, AtFlags::empty());
        }
        ended
    }

    fn link(&mut self, path: &[u8], target: &[u8]) -> io::Result<()> {
        if path.is_empty() {
            rustix::fs::symlink(OsStr::from_bytes(target), &self.top)?;
            self.copied.entries += 1;
            return Ok(());
        }
        let EntryPlace::At(parent, name) = self.place(path)? else {
            self.omit(path, OmittedKind::Git);
            return Ok(());
        };
        unlink(&parent, name)?;
        rustix::fs::symlinkat(OsStr::from_bytes(target), &parent, name)?;
        self.copied.entries += 1;
        Ok(())
    }

    /// Makes another name of a file that came before, or a copy where the file system has no hard links.
    fn same(&mut self, path: &[u8], first: &[u8]) -> io::Result<()> {
        let from = self.place(first)?;
        let (EntryPlace::At(from, first), EntryPlace::At(parent, name)) = (from, self.place(path)?) else {
            self.omit(path, OmittedKind::Git);
            return Ok(());
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&from, first, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a name of something that is no file"));
        }
        unlink(&parent, name)?;
        match rustix::fs::linkat(&from, first, &parent, name, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::PERM | Errno::XDEV | Errno::MLINK | Errno::NOTSUP | Errno::NOSYS) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let copy = File::from(rustix::fs::openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)?);
                sys::fd::copy_data(&file, &copy)?;
                copy.set_permissions(fs::Permissions::from_mode(found.permissions().mode() & 0o777))?;
            }
            Err(errno) => return Err(errno.into()),
        }
        self.copied.entries += 1;
        Ok(())
    }

    /// Finds the place of a path below the root, without following any symbolic link.
    fn place<'a>(&mut self, path: &'a [u8]) -> io::Result<EntryPlace<'a>> {
        let cut = path.iter().rposition(|byte| *byte == b'/');
        let (dirs, name) = cut.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
        let parent = match &self.near {
            Some((near, fd)) if near == dirs => fd.try_clone()?,
            _ => {
                let root = self.root.as_ref().ok_or_else(|| io::Error::other("a tree without its root"))?;
                let mut at = root.as_fd().try_clone_to_owned()?;
                for part in dirs.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
                    if self.is_git_entry(&at, part) {
                        return Ok(EntryPlace::InGitDir);
                    }
                    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    at = rustix::fs::openat(&at, OsStr::from_bytes(part), flags, Mode::empty())?;
                }
                self.near = Some((dirs.to_vec(), at.try_clone()?));
                at
            }
        };
        if self.is_git_entry(&parent, name) {
            return Ok(EntryPlace::InGitDir);
        }
        Ok(EntryPlace::At(parent, OsStr::from_bytes(name)))
    }

    /// Whether git would take the entry for a repository, or the directory for one once it has the entry.
    fn is_git_entry(&self, dir: &OwnedFd, name: &[u8]) -> bool {
        let has = |mark: &str| {
            mark.as_bytes().eq_ignore_ascii_case(name)
                || rustix::fs::statat(dir, mark, AtFlags::SYMLINK_NOFOLLOW).is_ok()
        };
        self.git == GitDirs::LeaveOut && (tree::is_git_name(name) || tree::is_git_dir(has))
    }
}

/// The place of a tree that is one file.
enum TopPlace {
    At(OwnedFd, OsString),
    Special(File),
}

/// Removes an entry that is in the way, but no directory.
fn unlink(dir: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Err(errno) if errno != Errno::NOENT => Err(errno.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-copy-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn dir(path: &str) -> Vec<TreeItem> {
        vec![TreeItem::Dir { path: path.into(), mode: 0o755 }]
    }

    fn file(path: &str) -> Vec<TreeItem> {
        let head = TreeItem::File { path: path.into(), mode: 0o644 };
        vec![head, TreeItem::Data(path.to_owned().into()), TreeItem::FileEnd]
    }

    fn take(to: &Path, git: GitDirs, items: Vec<Vec<TreeItem>>) -> io::Result<CopyTotals> {
        let mut receiver = TreeReceiver::new(to.to_owned(), git);
        items.into_iter().flatten().try_for_each(|item| receiver.take(item, TreeForm::Second))?;
        Ok(receiver.finish())
    }

    /// Orders in which a hostile guest may send the parts of a repository.
    fn hostile_trees() -> Vec<Vec<Vec<TreeItem>>> {
        let bare = [file("r/HEAD"), dir("r/objects"), dir("r/refs"), file("r/config")];
        let mut trees: Vec<Vec<Vec<TreeItem>>> = Vec::new();
        for turn in 0..bare.len() {
            let mut parts = vec![dir(""), dir("r")];
            parts.extend((0..bare.len()).map(|at| bare[(at + turn) % bare.len()].clone()));
            parts.push(file("r/refs/below"));
            trees.push(parts.clone());
            parts[2..6].reverse();
            trees.push(parts);
        }
        trees.push(vec![dir(""), dir(".git"), file(".git/config"), dir(".git/hooks"), file(".git/hooks/x")]);
        trees.push(vec![dir(""), dir("a"), file("a/.git")]);
        trees.push(vec![dir(""), dir("a"), dir("a/.GIT"), file("a/.GIT/config")]);
        trees.push(vec![dir(""), dir("w"), file("w/commondir"), file("w/HEAD")]);
        let link = |path: &str| vec![TreeItem::Link { path: path.into(), target: "/x".into() }];
        trees.push(vec![
            dir(""),
            dir("l"),
            link("l/.git"),
            link("l/objects"),
            link("l/refs"),
            link("l/HEAD"),
        ]);
        let same = TreeItem::Same { path: "s/HEAD".into(), first: "f".into() };
        trees.push(vec![dir(""), file("f"), dir("s"), dir("s/objects"), dir("s/refs"), vec![same]]);
        trees
    }

    fn has_repository(top: &Path) -> bool {
        let has = |name: &str| top.join(name).symlink_metadata().is_ok();
        let below = || fs::read_dir(top).unwrap().map(|entry| entry.unwrap().path());
        tree::is_git_dir(has)
            || below().any(|path| {
                tree::is_git_name(path.file_name().unwrap().as_bytes())
                    || path.symlink_metadata().unwrap().is_dir() && has_repository(&path)
            })
    }

    #[test]
    fn no_order_of_entries_makes_a_repository() {
        let top = scratch("orders");
        for (number, tree) in hostile_trees().into_iter().enumerate() {
            let (open, held) = (top.join(format!("open{number}")), top.join(format!("held{number}")));
            // Positive control: asked for, it comes out.
            let _ = take(&open, GitDirs::Copy, tree.clone());
            assert!(has_repository(&open), "tree {number}");
            let copied = take(&held, GitDirs::LeaveOut, tree).unwrap();
            assert!(!has_repository(&held), "tree {number}");
            assert!(copied.omitted.git_count > 0, "tree {number}");
        }
        // A repository of the host below the target stays as it was.
        let mine = top.join("mine/r");
        fs::create_dir_all(mine.join("objects")).unwrap();
        fs::create_dir_all(mine.join("refs")).unwrap();
        fs::write(mine.join("HEAD"), "of the host").unwrap();
        take(&top.join("mine"), GitDirs::LeaveOut, vec![dir(""), dir("r"), file("r/config"), file("r/HEAD")])
            .unwrap();
        assert!(!mine.join("config").exists());
        assert_eq!(fs::read_to_string(mine.join("HEAD")).unwrap(), "of the host");
        fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn a_copy_that_fails_leaves_nothing_partial() {
        let top = scratch("partial");
        let cut = |path: &str| file(path)[..2].to_vec();
        let run = |to: &str, items: Vec<Vec<TreeItem>>| {
            let mut receiver = TreeReceiver::new(top.join(to), GitDirs::LeaveOut);
            items.into_iter().flatten().try_for_each(|item| receiver.take(item, TreeForm::Second))
        };
        run("new", vec![dir(""), dir("d"), file("d/whole"), cut("part")]).unwrap();
        assert!(!top.join("new").exists());
        fs::create_dir(top.join("old")).unwrap();
        fs::write(top.join("old/part"), "as it was").unwrap();
        run("old", vec![dir(""), file("whole"), cut("part")]).unwrap();
        assert_eq!(fs::read_dir(top.join("old")).unwrap().count(), 2);
        assert_eq!(fs::read_to_string(top.join("old/part")).unwrap(), "as it was");
        run("one", vec![cut("")]).unwrap();
        assert!(!top.join("one").exists());
        let full = run("huge", vec![vec![TreeItem::Size(1 << 60)], dir("")]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert!(!top.join("huge").exists());
        fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn zeros_of_an_older_guest_take_no_space() {
        let top = scratch("zeros");
        let mut receiver = TreeReceiver::new(top.join("f"), GitDirs::LeaveOut);
        receiver.take(TreeItem::File { path: vec![], mode: 0o644 }, TreeForm::First).unwrap();
        for _ in 0..64 {
            receiver.take(TreeItem::Data(vec![0; 1 << 18].into()), TreeForm::First).unwrap();
        }
        receiver.take(TreeItem::Data("end".into()), TreeForm::First).unwrap();
        receiver.take(TreeItem::FileEnd, TreeForm::First).unwrap();
        receiver.finish();
        let found = fs::metadata(top.join("f")).unwrap();
        assert_eq!(found.len(), (16 << 20) + 3);
        assert!(found.blocks() < 1000, "{} blocks", found.blocks());
        fs::remove_dir_all(top).unwrap();
    }
}
