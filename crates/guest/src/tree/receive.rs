//! `PUT /v1/tree`: extracts a tree below a path.
//!
//! Invariant: the root path may contain symbolic links, as every path of a caller may; below it none is followed.
//! Each component is opened from its parent with `O_NOFOLLOW`; a link at the place of a file is replaced, never
//! written through.
//! Invariant: a tree that does not arrive whole leaves no partial file, and nothing at all if its root is new.
//! Trust: the tree is hostile. `proto::tree` lets no path escape from it; disk and inode limits bound its size and
//! count.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::BodyExt;
use hyper::{StatusCode, body::Incoming};
use proto::tree::{TreeItem, TreeReader};
use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use serde::Serialize;
use sys::sparse::SparseWriter;

use crate::{
    connect::ConnectError,
    drain,
    files::{self, make_dirs},
    query::UrlQuery,
    reply::{self, HttpReply, PlainRefusal},
    server::GuestServer,
    users::GuestUser,
};

/// How long a sender may be silent.
const WAIT: Duration = Duration::from_secs(300);
/// Most directories without write permission, whose modes are set at the end. No honest tree has more.
const CLOSED_DIRS_MAX: usize = 100_000;

/// Counts of extracted entries and bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
struct ReceiveTotals {
    entries: u64,
    bytes: u64,
}

/// Extracts the tree of a request and answers with the counts.
pub async fn receive(guest: &GuestServer, query: &UrlQuery, mut body: Incoming) -> HttpReply {
    let path = query.bytes("path").unwrap_or_default().to_vec();
    let user =
        query.text("username").filter(|name| !name.is_empty()).unwrap_or(&guest.config().user).to_owned();
    let workdir = guest.config().workdir.clone();
    let work = move || {
        let (user, path) = files::user_and_path(&path, &user, workdir.as_deref())?;
        Ok(TreeExtraction::new(path, user))
    };
    let received = match run_on_helper(work).await {
        Ok(extract) => take(extract, &mut body).await,
        Err(refusal) => Err(refusal),
    };
    match received {
        Ok(received) => reply::json(&received),
        Err(refusal) => {
            drain::read_on(body);
            refusal.reply()
        }
    }
}

async fn take(mut extract: TreeExtraction, body: &mut Incoming) -> Result<ReceiveTotals, PlainRefusal> {
    loop {
        let cut = match tokio::time::timeout(WAIT, body.frame()).await {
            Ok(None) => break,
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                extract = run_on_helper(move || extract.push(&data)).await?;
                continue;
            }
            Ok(Some(Err(error))) => PlainRefusal::bad(format!("the request was cut: {error}")),
            Err(_) => PlainRefusal::new(StatusCode::REQUEST_TIMEOUT, "the tree stalled"),
        };
        return run_on_helper(move || {
            extract.discard();
            Err(cut)
        })
        .await;
    }
    run_on_helper(move || extract.finish()).await
}

async fn run_on_helper<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PlainRefusal> + Send + 'static,
) -> Result<T, PlainRefusal> {
    let done = files::on_helper(move || Ok(work())).await;
    done.unwrap_or_else(|ConnectError { message, .. }| Err(PlainRefusal::internal(message)))
}

/// A running extraction; each step runs on some helper thread.
struct TreeExtraction {
    reader: TreeReader,
    path: PathBuf,
    user: GuestUser,
    root: Option<OwnedFd>,
    /// Whether the root is new, so that nothing of it is left if the tree does not arrive whole.
    root_is_new: bool,
    /// The directory that was used last; trees come directory by directory.
    near: Option<(Vec<u8>, OwnedFd)>,
    file: Option<OpenFile>,
    /// Directories that lose write permission at the end, when everything is in them.
    closed: Vec<(Vec<u8>, u32)>,
    received: ReceiveTotals,
}

/// The file that is being written.
struct OpenFile {
    contents: SparseWriter,
    mode: u32,
    /// Its place, to remove it if the rest does not arrive.
    dir: OwnedFd,
    name: OsString,
}

impl Drop for TreeExtraction {
    /// The connection broke while no helper held the tree. Removing may take long, so a helper does it.
    fn drop(&mut self) {
        let Some(cleanup) = self.take_cleanup() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(cleanup)),
            Err(_) => cleanup(),
        }
    }
}

impl TreeExtraction {
    fn new(path: PathBuf, user: GuestUser) -> Self {
        let reader = TreeReader::default();
        Self {
            reader,
            path,
            user,
            root: None,
            root_is_new: false,
            near: None,
            file: None,
            closed: Vec::new(),
            received: ReceiveTotals::default(),
        }
    }

    fn push(mut self, data: &[u8]) -> Result<Self, PlainRefusal> {
        self.reader.push(data);
        match self.put_arrived() {
            Ok(()) => Ok(self),
            Err(refusal) => {
                self.discard();
                Err(refusal)
            }
        }
    }

    fn put_arrived(&mut self) -> Result<(), PlainRefusal> {
        while let Some(item) = self.reader.next().map_err(|error| PlainRefusal::bad(error.to_string()))? {
            let named = describe(&item);
            self.put(item).map_err(|error| write_error(&named, &error))?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<ReceiveTotals, PlainRefusal> {
        if let Err(error) = self.reader.finish() {
            self.discard();
            return Err(PlainRefusal::bad(error.to_string()));
        }
        self.root_is_new = false;
        while let Some((path, mode)) = self.closed.pop() {
            let dir = self.dir(&path).map_err(|error| write_error("", &error))?;
            let made = rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode));
            made.map_err(|error| write_error("", &error.into()))?;
        }
        Ok(self.received)
    }

    /// Removes what is partial.
    fn discard(mut self) {
        if let Some(cleanup) = self.take_cleanup() {
            cleanup();
        }
    }

    /// The work of removing what is partial, if anything is.
    fn take_cleanup(&mut self) -> Option<impl FnOnce() + Send + 'static + use<>> {
        let file = self.file.take();
        let root = std::mem::take(&mut self.root_is_new).then(|| self.path.clone());
        (file.is_some() || root.is_some()).then_some({
            move || {
                if let Some(OpenFile { dir, name, .. }) = file {
                    let _ = rustix::fs::unlinkat(&dir, name, AtFlags::empty());
                }
                if let Some(root) = root {
                    let _ = remove_new(&root);
                }
            }
        })
    }

    fn put(&mut self, item: TreeItem) -> io::Result<()> {
        match item {
            TreeItem::Dir { path, mode } => self.put_dir(path, mode),
            TreeItem::File { path, mode } => self.put_file(&path, mode),
            TreeItem::Link { path, target } => self.put_link(&path, &target),
            TreeItem::Same { path, first } => self.put_same(&path, &first),
            TreeItem::Size(bytes) => self.check_room(bytes),
            TreeItem::Data(bytes) => {
                self.received.bytes += bytes.len() as u64;
                self.file.as_mut().map_or(Ok(()), |file| file.contents.write(&bytes))
            }
            TreeItem::Hole(len) => self.file.as_mut().map_or(Ok(()), |file| file.contents.skip(len)),
            TreeItem::FileEnd => self.end_file(),
            TreeItem::Omitted { .. } | TreeItem::End => Ok(()),
        }
    }

    fn end_file(&mut self) -> io::Result<()> {
        let Some(OpenFile { contents, mode, dir, name }) = self.file.take() else { return Ok(()) };
        // The mode last, because writing and chown both clear the set-id bits.
        let ended = contents
            .finish()
            .and_then(|file| rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(io::Error::from));
        if ended.is_err() {
            let _ = rustix::fs::unlinkat(&dir, name, AtFlags::empty());
        }
        ended
    }

    /// Refuses a tree for which the file system has no room.
    fn check_room(&self, bytes: u64) -> io::Result<()> {
        let Some(there) = self.path.ancestors().find(|path| path.exists()) else { return Ok(()) };
        let room = rustix::fs::statvfs(there)?;
        if bytes > room.f_bavail.saturating_mul(room.f_frsize) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn put_dir(&mut self, path: Vec<u8>, mode: u32) -> io::Result<()> {
        self.received.entries += 1;
        let dir = self.dir(&path)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode | 0o700))?;
        if mode & 0o700 != 0o700 {
            if self.closed.len() >= CLOSED_DIRS_MAX {
                return Err(io::Error::other("too many directories without write permission"));
            }
            self.closed.push((path, mode));
        }
        Ok(())
    }

    fn put_file(&mut self, path: &[u8], mode: u32) -> io::Result<()> {
        self.received.entries += 1;
        let (dir, name, more) = if path.is_empty() {
            // The whole tree is one file, so its path is the root that the caller named.
            let parent = self.path.parent().unwrap_or(Path::new("/"));
            make_dirs(parent, &self.user)?;
            let name = self.path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
            (open_dir(CWD, parent, OFlags::empty())?, name, OFlags::empty())
        } else {
            let (parent, name) = split(path);
            (self.dir(parent)?, name.to_owned(), OFlags::NOFOLLOW)
        };
        let file = create(&dir, &name, more)?;
        files::give(&file, &self.user)?;
        self.file = Some(OpenFile { contents: SparseWriter::new(file), mode, dir, name });
        Ok(())
    }

    /// Makes another name of a file that came before.
    fn put_same(&mut self, path: &[u8], first: &[u8]) -> io::Result<()> {
        self.received.entries += 1;
        let (first_parent, first_name) = split(first);
        let from = self.dir(first_parent)?;
        let (parent, name) = split(path);
        let dir = self.dir(parent)?;
        let found = rustix::fs::statat(&from, first_name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut made = rustix::fs::linkat(&from, first_name, &dir, name, AtFlags::empty());
        if made == Err(Errno::EXIST) {
            rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
            made = rustix::fs::linkat(&from, first_name, &dir, name, AtFlags::empty());
        }
        Ok(made?)
    }

    fn put_link(&mut self, path: &[u8], target: &[u8]) -> io::Result<()> {
        self.received.entries += 1;
        let (parent, name) = split(path);
        let dir = self.dir(parent)?;
        let target = OsStr::from_bytes(target);
        let mut made = rustix::fs::symlinkat(target, &dir, name);
        if made == Err(Errno::EXIST) {
            rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
            made = rustix::fs::symlinkat(target, &dir, name);
        }
        made?;
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let (uid, gid) = (Uid::from_raw(self.user.uid), Gid::from_raw(self.user.gid));
        Ok(rustix::fs::chownat(&dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Opens the directory at `path` below the root; creates missing ones.
    fn dir(&mut self, path: &[u8]) -> io::Result<OwnedFd> {
        let (from, rest) = match &self.near {
            Some((near, fd)) => match below(path, near) {
                Some(rest) => (fd.try_clone()?, rest),
                None => (self.root()?, path),
            },
            None => (self.root()?, path),
        };
        let mut here = from;
        for part in rest.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            here = self.step(&here, OsStr::from_bytes(part))?;
        }
        self.near = Some((path.to_vec(), here.try_clone()?));
        Ok(here)
    }

    fn root(&mut self) -> io::Result<OwnedFd> {
        if self.root.is_none() {
            self.root_is_new =
                matches!(self.path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
            make_dirs(&self.path, &self.user)?;
            self.root = Some(open_dir(CWD, &self.path, OFlags::empty())?);
        }
        self.root.as_ref().map_or_else(|| Err(io::Error::other("no root")), OwnedFd::try_clone)
    }

    fn step(&self, here: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
        match open_dir(here, name, OFlags::NOFOLLOW) {
            Err(Errno::NOENT) => {}
            opened => return Ok(opened?),
        }
        match rustix::fs::mkdirat(here, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let made = open_dir(here, name, OFlags::NOFOLLOW)?;
        files::give(&made, &self.user)?;
        Ok(made)
    }
}

/// Opens a new or truncated regular file; anything else with that name is removed first.
fn create(dir: impl AsFd, name: &OsStr, more: OFlags) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY | more;
    let mode = Mode::from_raw_mode(0o600);
    match rustix::fs::openat(&dir, name, flags | OFlags::TRUNC, mode) {
        Ok(fd) => {
            let file = File::from(fd);
            if file.metadata()?.is_file() {
                return Ok(file);
            }
        }
        // A symbolic link, a running program, or a FIFO without a reader.
        Err(Errno::LOOP | Errno::TXTBSY | Errno::NXIO) => {}
        Err(error) => return Err(error.into()),
    }
    rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
    Ok(File::from(rustix::fs::openat(&dir, name, flags | OFlags::EXCL, mode)?))
}

/// Removes a directory that this extraction made.
fn remove_new(root: &Path) -> io::Result<()> {
    let name = CString::new(root.file_name().unwrap_or_default().as_bytes())?;
    let parent = open_dir(CWD, root.parent().unwrap_or(Path::new("/")), OFlags::empty())?;
    sys::tree::remove(parent.as_fd(), &name)
}

fn open_dir(dir: impl AsFd, name: impl rustix::path::Arg, more: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

fn split(path: &[u8]) -> (&[u8], &OsStr) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], OsStr::from_bytes(&path[at + 1..])),
        None => (&[], OsStr::from_bytes(path)),
    }
}

/// The part of `path` below `near`.
fn below<'a>(path: &'a [u8], near: &[u8]) -> Option<&'a [u8]> {
    let rest = path.strip_prefix(near)?;
    (near.is_empty() || rest.is_empty() || rest.starts_with(b"/")).then_some(rest)
}

fn describe(item: &TreeItem) -> String {
    let path = match item {
        TreeItem::Dir { path, .. }
        | TreeItem::File { path, .. }
        | TreeItem::Link { path, .. }
        | TreeItem::Same { path, .. } => path,
        _ => return String::new(),
    };
    Path::new(OsStr::from_bytes(path)).display().to_string()
}

fn write_error(named: &str, error: &io::Error) -> PlainRefusal {
    let status = match error.kind() {
        // A process of the Body may write no longer file than its disk limit.
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => StatusCode::CONFLICT,
        io::ErrorKind::InvalidFilename => StatusCode::BAD_REQUEST,
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let what =
        if named.is_empty() { "error writing the tree".to_owned() } else { format!("error writing {named}") };
    PlainRefusal::new(status, format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use bytes::BytesMut;
    use proto::tree::{MAGIC_2, TreeForm, write};

    use super::{
        super::send::{OmitGit, TreeOptions, whole},
        *,
    };

    const ALL: TreeOptions = TreeOptions { form: TreeForm::Second, git: OmitGit::No };

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-tree-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn own() -> GuestUser {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        GuestUser { name: "me".into(), uid, gid, home: "/".into(), groups: vec![] }
    }

    fn put(to: &Path, items: &[TreeItem]) -> Result<ReceiveTotals, PlainRefusal> {
        let mut stream = BytesMut::from(&MAGIC_2[..]);
        items.iter().for_each(|item| write(item, &mut stream));
        TreeExtraction::new(to.to_path_buf(), own()).push(&stream)?.finish()
    }

    fn items_of(stream: &[u8]) -> Vec<TreeItem> {
        let mut reader = TreeReader::default();
        reader.push(stream);
        std::iter::from_fn(|| reader.next().unwrap()).collect()
    }

    fn file(path: &str, text: &'static str) -> [TreeItem; 3] {
        [TreeItem::File { path: path.into(), mode: 0o640 }, TreeItem::Data(text.into()), TreeItem::FileEnd]
    }

    #[test]
    fn a_tree_arrives_as_it_was_sent() {
        let dir = scratch("round");
        let from = dir.join("from");
        fs::create_dir_all(from.join("a/closed")).unwrap();
        fs::write(from.join(OsStr::from_bytes(b"a/\xff name")), "x".repeat(300_000)).unwrap();
        fs::write(from.join("a/closed/f"), "").unwrap();
        fs::write(from.join("z"), "z").unwrap();
        fs::hard_link(from.join("z"), from.join("a/same")).unwrap();
        let sparse = File::create(from.join("sparse")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"far", 1 << 40).unwrap();
        fs::write(from.join("2"), "2x").unwrap();
        symlink("../../nowhere", from.join("a/link")).unwrap();
        rustix::fs::mkfifoat(CWD, from.join("fifo"), Mode::RWXU).unwrap();
        fs::set_permissions(from.join("a/closed"), std::os::unix::fs::PermissionsExt::from_mode(0o555))
            .unwrap();
        let sent = whole(&from, ALL).unwrap();
        let to = dir.join("new/to");
        let received =
            TreeExtraction::new(to.clone(), own()).push(&sent).and_then(TreeExtraction::finish).unwrap();
        assert_eq!(received, ReceiveTotals { entries: 10, bytes: 300_006 });
        assert_eq!(items_of(&whole(&to, ALL).unwrap()).len(), items_of(&sent).len() - 1);
        let (one, other) = (fs::metadata(to.join("z")).unwrap(), fs::metadata(to.join("a/same")).unwrap());
        assert_eq!((one.ino(), one.nlink()), (other.ino(), 2), "one file with two names");
        let sparse = fs::metadata(to.join("sparse")).unwrap();
        assert_eq!(sparse.len(), (1 << 40) + 3);
        assert!(sparse.blocks() < 1000, "{} blocks", sparse.blocks());
        assert_eq!(fs::read_link(to.join("a/link")).unwrap(), Path::new("../../nowhere"));
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &fs::metadata(to.join("a/closed")).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o555);
        // Only root can remove entries from a directory without write permission.
        for closed in [from, to].map(|root| root.join("a/closed")) {
            fs::set_permissions(closed, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn links_below_the_root_are_never_followed() {
        let dir = scratch("links");
        let (root, outside) = (dir.join("root"), dir.join("outside"));
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("kept"), "kept").unwrap();
        symlink(&outside, root.join("dir")).unwrap();
        symlink(outside.join("kept"), root.join("file")).unwrap();
        // Positive control: a real directory takes the same file.
        fs::create_dir(root.join("real")).unwrap();
        put(&root, &[&file("real/f", "new")[..], &[TreeItem::End]].concat()).unwrap();
        assert_eq!(fs::read_to_string(root.join("real/f")).unwrap(), "new");
        let through = put(&root, &[&file("dir/f", "new")[..], &[TreeItem::End]].concat());
        assert_eq!(through.unwrap_err().status, StatusCode::CONFLICT);
        put(&root, &[&file("file", "new")[..], &[TreeItem::End]].concat()).unwrap();
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "new");
        assert!(!outside.join("f").exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn one_file_is_a_tree_and_a_cut_one_is_none() {
        let dir = scratch("one");
        put(&dir.join("new/f"), &[&file("", "hello")[..], &[TreeItem::End]].concat()).unwrap();
        assert_eq!(fs::read_to_string(dir.join("new/f")).unwrap(), "hello");
        let cut = put(&dir.join("cut"), &file("a", "x"));
        assert_eq!(cut.unwrap_err().message, "the stream was cut");
        assert!(!dir.join("cut").exists(), "its root was new");
        // In a directory that was there before, only the partial file goes.
        fs::create_dir(dir.join("old")).unwrap();
        fs::write(dir.join("old/kept"), "kept").unwrap();
        put(&dir.join("old"), &[&file("whole", "x")[..], &file("part", "x")[..2]].concat()).unwrap_err();
        let mut left: Vec<_> =
            fs::read_dir(dir.join("old")).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["kept", "whole"]);
        put(&dir.join("part"), &file("", "x")[..2]).unwrap_err();
        assert!(!dir.join("part").exists());
        let huge = put(&dir.join("huge"), &[TreeItem::Size(1 << 60)]).unwrap_err();
        assert_eq!(huge.status, StatusCode::INSUFFICIENT_STORAGE);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn git_directories_are_left_out_by_name_when_asked() {
        let dir = scratch("git");
        for made in ["app/.git/hooks", "app/sub", "bare/objects", "bare/refs", "plain/objects", "CASE/.GIT"] {
            fs::create_dir_all(dir.join(made)).unwrap();
        }
        for file in ["app/.git/config", "app/sub/.git", "app/code", "bare/HEAD", "bare/config", "plain/HEAD"]
        {
            fs::write(dir.join(file), "x").unwrap();
        }
        let omitted = |options| {
            let items = items_of(&whole(&dir, options).unwrap());
            let names = items.iter().filter_map(|item| match item {
                TreeItem::Omitted { path, kind } => Some(format!("{} {kind}", String::from_utf8_lossy(path))),
                _ => None,
            });
            let mut names: Vec<_> = names.collect();
            names.sort();
            (names, items.iter().filter(|item| matches!(item, TreeItem::File { .. })).count())
        };
        assert_eq!(omitted(ALL), (vec![], 6));
        let expected =
            ["CASE/.GIT", "app/.git", "app/sub/.git", "bare"].map(|path| format!("{path} git directory"));
        let (names, files) = omitted(TreeOptions { git: OmitGit::Yes, ..ALL });
        assert_eq!((names, files), (expected.to_vec(), 2));
        fs::remove_dir_all(dir).unwrap();
    }
}
