//! `GET /v1/tree`: sends a file, or a directory with everything below it.
//!
//! Invariant: only the root path is resolved through symbolic links; below it none is followed. Entries other than
//! files, directories and links are left out, and so are entries that vanish during the walk.
//! An error during the walk ends the stream with a failure item, so an incomplete copy never looks complete.

use std::{
    ffi::CString,
    fs::File,
    future::Future,
    io::{self, Read},
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
use proto::tree::{self, DEPTH_MAX, MAGIC, PATH_LEN_MAX, TreeItem};
use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags},
    io::Errno,
};
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

/// Answers with a tree.
pub async fn send(guest: &GuestServer, query: &UrlQuery) -> HttpReply {
    let path = query.bytes("path").unwrap_or_default().to_vec();
    let user =
        query.text("username").filter(|name| !name.is_empty()).unwrap_or(&guest.config().user).to_owned();
    let workdir = guest.config().workdir.clone();
    let opened = files::on_helper(move || Ok(open(&path, &user, workdir.as_deref()))).await;
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

fn open(path: &[u8], user: &str, workdir: Option<&str>) -> Result<TreeWalk, PlainRefusal> {
    let path: PathBuf = files::path_for(path, user, workdir)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => PlainRefusal::new(
            hyper::StatusCode::NOT_FOUND,
            format!("path '{}' does not exist", path.display()),
        ),
        _ => PlainRefusal::bad(format!("path '{}' cannot be read: {error}", path.display())),
    };
    let root = open_at(CWD, &path, OFlags::empty()).map_err(|error| failed(error.into()))?;
    TreeWalk::new(root).map_err(failed)
}

/// A running walk; each step runs on some helper thread.
struct TreeWalk {
    out: BytesMut,
    /// The open directories from the root down, each with the length of the path before it.
    open: Vec<(Dir, usize)>,
    path: Vec<u8>,
    file: Option<File>,
    over: bool,
}

impl TreeWalk {
    fn new(root: OwnedFd) -> io::Result<Self> {
        let mut walk =
            Self { out: BytesMut::new(), open: Vec::new(), path: Vec::new(), file: None, over: false };
        walk.out.put_slice(MAGIC);
        let stat = rustix::fs::fstat(&root)?;
        let mode = stat.st_mode & 0o7777;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => walk.enter(root, mode)?,
            FileType::RegularFile => walk.begin(root, mode),
            _ => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file or directory"));
            }
        }
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
            _ => Ok(()),
        }
    }

    /// Uses the type of the opened descriptor: the entry may have been replaced since it was listed.
    fn opened(&mut self, fd: OwnedFd) -> io::Result<()> {
        let stat = rustix::fs::fstat(&fd)?;
        let mode = stat.st_mode & 0o7777;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.enter(fd, mode)?,
            FileType::RegularFile => self.begin(fd, mode),
            _ => {}
        }
        Ok(())
    }

    fn enter(&mut self, fd: OwnedFd, mode: u32) -> io::Result<()> {
        tree::write(&TreeItem::Dir { path: self.path.clone(), mode }, &mut self.out);
        self.open.push((Dir::new(fd)?, self.path.len()));
        Ok(())
    }

    fn begin(&mut self, fd: OwnedFd, mode: u32) {
        tree::write(&TreeItem::File { path: self.path.clone(), mode }, &mut self.out);
        self.file = Some(File::from(fd));
    }

    fn copy(&mut self) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        // Reads straight into the output; the length before the data is filled in afterwards.
        let head = self.out.len();
        self.out.put_u32(0);
        let from = self.out.len();
        self.out.resize(from + READ_LEN, 0);
        let read = file.read(&mut self.out[from..]);
        self.out.truncate(from + read.as_ref().copied().unwrap_or(0));
        let len = u32::try_from(read?).unwrap_or(0);
        self.out[head..from].copy_from_slice(&len.to_be_bytes());
        if len == 0 {
            self.file = None;
        }
        Ok(())
    }
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
pub fn whole(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let mut walk = TreeWalk::new(open_at(CWD, path, OFlags::empty())?)?;
    let mut all = Vec::new();
    loop {
        let piece = walk.next();
        if piece.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&piece);
    }
}
