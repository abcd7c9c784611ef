//! `GET /v1/tree`: sends a file, or a directory with everything below it.
//!
//! Invariant: only the root path is resolved through symbolic links; below it none is followed. Entries other than
//! files, directories and links are left out by name, and so are git directories if the caller asks for that;
//! entries that vanish during the walk are left out without a word.
//! Invariant: holes are not read, unless the caller knows only the first form.
//! An error during the walk ends the stream with a failure item, so an incomplete copy never looks complete.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::File,
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes, BytesMut};
use hyper::{
    Response,
    header::{self, HeaderValue},
};
use proto::tree::{self, DEPTH_MAX, OmittedKind, PATH_LEN_MAX, TreeForm, TreeItem};
use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use sys::sparse::{Holes, SparsePiece, SparseReader};
use tokio::task::JoinHandle;

use crate::{
    connect::ConnectError,
    files,
    query::UrlQuery,
    reply::{BodySource, HttpReply, PlainRefusal, ReplyBody},
    server::GuestServer,
};

/// Bytes that are gathered before they are sent.
const PIECE_LEN: usize = 256 * 1024;
const READ_LEN: usize = 128 * 1024;
/// Most files with several names whose first name is remembered; further ones are sent as files of their own.
const LINKED_MAX: usize = 100_000;
/// Trees with more entries are not measured before they are sent.
const MEASURED_MAX: u64 = 200_000;

/// The options of the caller of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeOptions {
    /// The form that it knows.
    pub form: TreeForm,
    /// Whether git directories are left out.
    pub git: OmitGit,
}

/// Whether git directories are left out of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OmitGit {
    /// They are.
    Yes,
    /// They are sent.
    No,
}

impl TreeOptions {
    fn of(query: &UrlQuery) -> Self {
        let form = if query.text("form") == Some("2") { TreeForm::Second } else { TreeForm::First };
        let git = if query.text("git") == Some("omit") { OmitGit::Yes } else { OmitGit::No };
        Self { form, git }
    }
}

/// Answers with a tree.
pub async fn send(guest: &GuestServer, query: &UrlQuery) -> HttpReply {
    let path = query.bytes("path").unwrap_or_default().to_vec();
    let user =
        query.text("username").filter(|name| !name.is_empty()).unwrap_or(&guest.config().user).to_owned();
    let workdir = guest.config().workdir.clone();
    let options = TreeOptions::of(query);
    let opened = files::on_helper(move || Ok(open(&path, &user, workdir.as_deref(), options))).await;
    match opened.unwrap_or_else(|ConnectError { message, .. }| Err(PlainRefusal::internal(message))) {
        Err(refusal) => refusal.reply(),
        Ok(walk) => {
            let mut reply =
                Response::new(ReplyBody::pieces(TreeBody { state: TreeBodyState::Idle(Box::new(walk)) }));
            reply
                .headers_mut()
                .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-palisade-tree"));
            reply
        }
    }
}

fn open(
    path: &[u8],
    user: &str,
    workdir: Option<&str>,
    options: TreeOptions,
) -> Result<TreeWalk, PlainRefusal> {
    let path: PathBuf = files::path_for(path, user, workdir)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => PlainRefusal::new(
            hyper::StatusCode::NOT_FOUND,
            format!("path '{}' does not exist", path.display()),
        ),
        _ => PlainRefusal::bad(format!("path '{}' cannot be read: {error}", path.display())),
    };
    let root = open_at(CWD, &path, OFlags::empty()).map_err(|error| failed(error.into()))?;
    TreeWalk::measured(root, options).map_err(failed)
}

/// A running walk; each step runs on some helper thread.
struct TreeWalk {
    options: TreeOptions,
    out: BytesMut,
    /// The open directories from the root down, each with the length of the path before it.
    open: Vec<(Dir, usize)>,
    path: Vec<u8>,
    file: Option<SparseReader>,
    /// The first names of files that have several.
    linked: HashMap<(u64, u64), Vec<u8>>,
    /// In a walk that only measures: bytes of data so far.
    measured: Option<u64>,
    over: bool,
}

impl TreeWalk {
    fn new(root: OwnedFd, options: TreeOptions, measured: Option<u64>) -> io::Result<Self> {
        let mut walk = Self {
            options,
            out: BytesMut::new(),
            open: Vec::new(),
            path: Vec::new(),
            file: None,
            linked: HashMap::new(),
            measured,
            over: false,
        };
        let stat = rustix::fs::fstat(&root)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => walk.enter(root, stat.st_mode & 0o7777)?,
            FileType::RegularFile => walk.begin(root, &stat)?,
            _ => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file or directory"));
            }
        }
        Ok(walk)
    }

    /// A walk whose stream begins with the size of its data, if the caller knows that and the tree is not too large.
    fn measured(root: OwnedFd, options: TreeOptions) -> io::Result<Self> {
        let size = match options.form {
            TreeForm::Second => measure(&root, options),
            TreeForm::First => None,
        };
        let mut walk = Self::new(root, options, None)?;
        let body = std::mem::take(&mut walk.out);
        walk.out.put_slice(options.form.magic());
        size.iter().for_each(|bytes| tree::write(&TreeItem::Size(*bytes), &mut walk.out));
        walk.out.put_slice(&body);
        Ok(walk)
    }

    /// Returns the next piece; empty at the end.
    fn next(&mut self) -> Bytes {
        while !self.over && self.out.len() < PIECE_LEN {
            if let Err(error) = self.step() {
                let at = String::from_utf8_lossy(&self.path).into_owned();
                tree::write_failure(&format!("{at}: {error}"), &mut self.out);
                self.over = true;
            }
        }
        self.out.split().freeze()
    }

    fn step(&mut self) -> io::Result<()> {
        if self.file.is_some() {
            return self.copy();
        }
        let Some((dir, len)) = self.open.last_mut() else {
            tree::write(&TreeItem::End, &mut self.out);
            self.over = true;
            return Ok(());
        };
        self.path.truncate(*len);
        match dir.read() {
            None => {
                self.open.pop();
                Ok(())
            }
            Some(entry) => {
                let name = entry?.file_name().to_owned();
                if matches!(name.to_bytes(), b"." | b"..") { Ok(()) } else { self.visit(&name) }
            }
        }
    }

    fn visit(&mut self, name: &CString) -> io::Result<()> {
        let Some((dir, _)) = self.open.last() else { return Ok(()) };
        let dir = dir.fd()?.try_clone_to_owned()?;
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name.to_bytes());
        if self.path.len() > PATH_LEN_MAX || self.open.len() > DEPTH_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidFilename, "the tree is too deep"));
        }
        match self.say(&dir, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            said => said,
        }
    }

    fn say(&mut self, dir: &OwnedFd, name: &CString) -> io::Result<()> {
        if self.options.git == OmitGit::Yes && tree::is_git_name(name.to_bytes()) {
            return self.omit(OmittedKind::Git);
        }
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new())?.into_bytes();
                tree::write(&TreeItem::Link { path: self.path.clone(), target }, &mut self.out);
                Ok(())
            }
            FileType::Directory | FileType::RegularFile => match open_at(dir, name, OFlags::NOFOLLOW) {
                // It was replaced by a symbolic link meanwhile, and is left out.
                Err(Errno::LOOP) => Ok(()),
                opened => self.opened(opened?),
            },
            FileType::Fifo => self.omit(OmittedKind::Fifo),
            FileType::Socket => self.omit(OmittedKind::Socket),
            _ => self.omit(OmittedKind::Device),
        }
    }

    fn omit(&mut self, kind: OmittedKind) -> io::Result<()> {
        if self.options.form == TreeForm::Second {
            tree::write(&TreeItem::Omitted { path: self.path.clone(), kind }, &mut self.out);
        }
        Ok(())
    }

    /// Uses the type of the opened descriptor: the entry may have been replaced since it was listed.
    fn opened(&mut self, fd: OwnedFd) -> io::Result<()> {
        let stat = rustix::fs::fstat(&fd)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.enter(fd, stat.st_mode & 0o7777),
            FileType::RegularFile => self.begin(fd, &stat),
            _ => Ok(()),
        }
    }

    fn enter(&mut self, fd: OwnedFd, mode: u32) -> io::Result<()> {
        let has = |name: &str| rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if self.options.git == OmitGit::Yes && tree::is_git_dir(has) {
            return self.omit(OmittedKind::Git);
        }
        tree::write(&TreeItem::Dir { path: self.path.clone(), mode }, &mut self.out);
        self.open.push((Dir::new(fd)?, self.path.len()));
        Ok(())
    }

    fn begin(&mut self, fd: OwnedFd, stat: &Stat) -> io::Result<()> {
        if self.options.form == TreeForm::Second && stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key) {
                let same = TreeItem::Same { path: self.path.clone(), first: first.clone() };
                tree::write(&same, &mut self.out);
                return Ok(());
            }
            if self.linked.len() < LINKED_MAX {
                self.linked.insert(key, self.path.clone());
            }
        }
        if let Some(measured) = &mut self.measured {
            let allocated = (stat.st_blocks as u64).saturating_mul(512);
            *measured = measured.saturating_add(allocated.min(stat.st_size as u64));
            return Ok(());
        }
        let mode = stat.st_mode & 0o7777;
        tree::write(&TreeItem::File { path: self.path.clone(), mode }, &mut self.out);
        let holes = if self.options.form == TreeForm::Second { Holes::Report } else { Holes::Read };
        self.file = Some(SparseReader::new(File::from(fd), holes)?);
        Ok(())
    }

    fn copy(&mut self) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        // Reads straight into the output; the length before the data is filled in afterwards.
        let head = self.out.len();
        self.out.put_u32(0);
        let from = self.out.len();
        self.out.resize(from + READ_LEN, 0);
        let read = file.next(&mut self.out[from..]);
        if let Ok(SparsePiece::Data(len)) = read {
            self.out.truncate(from + len);
            self.out[head..from].copy_from_slice(&u32::try_from(len).unwrap_or(0).to_be_bytes());
            return Ok(());
        }
        self.out.truncate(head);
        match read? {
            SparsePiece::Hole(len) => tree::write(&TreeItem::Hole(len), &mut self.out),
            SparsePiece::Data(_) | SparsePiece::End => {
                self.file = None;
                tree::write(&TreeItem::FileEnd, &mut self.out);
            }
        }
        Ok(())
    }
}

/// The bytes of data that a walk will send; none if the tree is large or cannot be read.
fn measure(root: &OwnedFd, options: TreeOptions) -> Option<u64> {
    // Opened anew: descriptors of one opening share their position in a directory.
    let again = match open_at(root, c".", OFlags::empty()) {
        Err(Errno::NOTDIR) => root.try_clone().ok()?,
        opened => opened.ok()?,
    };
    let mut walk = TreeWalk::new(again, options, Some(0)).ok()?;
    let mut steps = 0;
    while !walk.over {
        walk.step().ok()?;
        walk.out.clear();
        steps += 1;
        if steps > MEASURED_MAX {
            return None;
        }
    }
    walk.measured
}

fn open_at(dir: impl AsFd, name: impl rustix::path::Arg, more: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::openat(dir, name, flags | more, Mode::empty())
}

/// The tree as a response body: a helper thread makes each piece when the connection has room for it.
struct TreeBody {
    state: TreeBodyState,
}

enum TreeBodyState {
    Idle(Box<TreeWalk>),
    Walking(JoinHandle<(Box<TreeWalk>, Bytes)>),
    Over,
}

impl BodySource for TreeBody {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let TreeBodyState::Idle(_) = &self.state
            && let TreeBodyState::Idle(mut walk) = std::mem::replace(&mut self.state, TreeBodyState::Over)
        {
            self.state = TreeBodyState::Walking(tokio::task::spawn_blocking(move || {
                let piece = walk.next();
                (walk, piece)
            }));
        }
        let TreeBodyState::Walking(walking) = &mut self.state else { return Poll::Ready(None) };
        let walked = std::task::ready!(Pin::new(walking).poll(cx));
        self.state = TreeBodyState::Over;
        match walked {
            Err(error) => Poll::Ready(Some(Err(io::Error::other(error)))),
            Ok((_, piece)) if piece.is_empty() => Poll::Ready(None),
            Ok((walk, piece)) => {
                self.state = TreeBodyState::Idle(walk);
                Poll::Ready(Some(Ok(piece)))
            }
        }
    }
}

/// Walks a whole tree without a server.
#[cfg(test)]
pub fn whole(path: &std::path::Path, options: TreeOptions) -> io::Result<Vec<u8>> {
    let mut walk = TreeWalk::measured(open_at(CWD, path, OFlags::empty())?, options)?;
    let mut all = Vec::new();
    loop {
        let piece = walk.next();
        if piece.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&piece);
    }
}
