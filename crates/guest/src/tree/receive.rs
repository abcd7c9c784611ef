//! `PUT /v1/tree`: extracts a tree below a path.
//!
//! Invariant: the root path may contain symbolic links, as every path of a caller may; below it none is followed.
//! Each component is opened from its parent with `O_NOFOLLOW`; a link at the place of a file is replaced, never
//! written through.
//! Trust: the tree is hostile. `proto::tree` lets no path escape from it; disk and inode limits bound its size and
//! count.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Write},
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
    fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use serde::Serialize;

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
        let frame = tokio::time::timeout(WAIT, body.frame()).await;
        let frame = frame.map_err(|_| PlainRefusal::new(StatusCode::REQUEST_TIMEOUT, "the tree stalled"))?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| PlainRefusal::bad(format!("the request was cut: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        extract = run_on_helper(move || extract.push(&data)).await?;
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
    /// The directory that was used last; trees come directory by directory.
    near: Option<(Vec<u8>, OwnedFd)>,
    file: Option<(File, u32)>,
    /// Directories that lose write permission at the end, when everything is in them.
    closed: Vec<(Vec<u8>, u32)>,
    received: ReceiveTotals,
}

impl TreeExtraction {
    fn new(path: PathBuf, user: GuestUser) -> Self {
        let reader = TreeReader::default();
        Self {
            reader,
            path,
            user,
            root: None,
            near: None,
            file: None,
            closed: Vec::new(),
            received: ReceiveTotals::default(),
        }
    }

    fn push(mut self, data: &[u8]) -> Result<Self, PlainRefusal> {
        self.reader.push(data);
        while let Some(item) = self.reader.next().map_err(|error| PlainRefusal::bad(error.to_string()))? {
            let named = describe(&item);
            self.put(item).map_err(|error| write_error(&named, &error))?;
        }
        Ok(self)
    }

    fn finish(mut self) -> Result<ReceiveTotals, PlainRefusal> {
        self.reader.finish().map_err(|error| PlainRefusal::bad(error.to_string()))?;
        while let Some((path, mode)) = self.closed.pop() {
            let dir = self.dir(&path).map_err(|error| write_error("", &error))?;
            let made = rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode));
            made.map_err(|error| write_error("", &error.into()))?;
        }
        Ok(self.received)
    }

    fn put(&mut self, item: TreeItem) -> io::Result<()> {
        match item {
            TreeItem::Dir { path, mode } => self.put_dir(path, mode),
            TreeItem::File { path, mode } => self.put_file(&path, mode),
            TreeItem::Link { path, target } => self.put_link(&path, &target),
            TreeItem::Data(bytes) => {
                self.received.bytes += bytes.len() as u64;
                self.file.as_mut().map_or(Ok(()), |(file, _)| file.write_all(&bytes))
            }
            TreeItem::FileEnd => match self.file.take() {
                // Last, because writing and chown both clear the set-id bits.
                Some((file, mode)) => Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?),
                None => Ok(()),
            },
            TreeItem::End => Ok(()),
        }
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
        let file = if path.is_empty() {
            // The whole tree is one file, so its path is the root that the caller named.
            if let Some(parent) = self.path.parent() {
                make_dirs(parent, &self.user)?;
            }
            create(CWD, self.path.as_os_str(), OFlags::empty())?
        } else {
            let (parent, name) = split(path);
            let dir = self.dir(parent)?;
            create(&dir, name, OFlags::NOFOLLOW)?
        };
        files::give(&file, &self.user)?;
        self.file = Some((file, mode));
        Ok(())
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
        TreeItem::Dir { path, .. } | TreeItem::File { path, .. } | TreeItem::Link { path, .. } => path,
        _ => return String::new(),
    };
    Path::new(OsStr::from_bytes(path)).display().to_string()
}

fn write_error(named: &str, error: &io::Error) -> PlainRefusal {
    let status = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
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
    use std::{fs, os::unix::fs::symlink};

    use bytes::BytesMut;
    use proto::tree::{MAGIC, write};

    use super::{super::send::whole, *};

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
        let mut stream = BytesMut::from(&MAGIC[..]);
        items.iter().for_each(|item| write(item, &mut stream));
        TreeExtraction::new(to.to_path_buf(), own()).push(&stream)?.finish()
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
        symlink("../../nowhere", from.join("a/link")).unwrap();
        rustix::fs::mkfifoat(CWD, from.join("fifo"), Mode::RWXU).unwrap();
        fs::set_permissions(from.join("a/closed"), std::os::unix::fs::PermissionsExt::from_mode(0o555))
            .unwrap();
        let sent = whole(&from).unwrap();
        let to = dir.join("new/to");
        let received =
            TreeExtraction::new(to.clone(), own()).push(&sent).and_then(TreeExtraction::finish).unwrap();
        assert_eq!(received, ReceiveTotals { entries: 7, bytes: 300_001 });
        assert_eq!(whole(&to).unwrap().len(), sent.len());
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
        fs::remove_dir_all(dir).unwrap();
    }
}
