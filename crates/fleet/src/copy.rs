//! Copies files between the host and a Body.
//!
//! Trust: the files that come out of a Body are hostile. `pal` writes them by descriptor below the target that the
//! user named, never through a symbolic link from the Body, and keeps only their permission bits.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
};

use bytes::{Bytes, BytesMut};
use proto::{
    BodyId, Failure, Kind,
    event_data::{CopiedBy, FileRead, FileWritten},
    tree::{self, TreeItem},
    wire::filesystem::{FileType, StatRequest, StatResponse},
};
use rustix::fs::{AtFlags, Mode, OFlags};
use tokio::sync::mpsc;

use crate::{CopyTotals, Fleet, blocking::run_blocking, failures};

const CHUNK: usize = 128 << 10;

/// Copies files into Bodies and out of them.
#[derive(Debug, Clone, Copy)]
pub struct BodyFiles<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl BodyFiles<'_> {
    /// Copies into a Body. As with `cp`, an existing directory receives the source under its own name.
    pub async fn copy_in(&self, id: &BodyId, host: &Path, inside: &str) -> Result<CopyTotals, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let found = run_blocking(|| fs::symlink_metadata(host).and_then(|_| fs::metadata(host)));
        found.map_err(|error| {
            Failure::new(Kind::NotFound, format!("cannot copy {}", host.display()))
                .because(error)
                .hint("name a file or directory that exists")
        })?;
        let target = self.target_inside(id, host, inside).await?;
        run_blocking(|| self.fleet.write(id, FileWritten { path: target.clone(), by: CopiedBy::Cp }))?;
        let (sender, receiver) = mpsc::channel(8);
        let source = host.to_owned();
        let walked = tokio::task::spawn_blocking(move || send_tree(&source, sender));
        let sent = self.fleet.guest(id).write_tree(&target, None, receiver).await;
        let copied = walked
            .await
            .map_err(|error| Failure::new(Kind::Internal, "the copy was interrupted").because(error))?;
        // If both fail, the guest's refusal is the cause: the walk failed only because the guest stopped reading.
        sent.map_err(failures::guest)?;
        copied.map_err(|error| {
            Failure::new(Kind::Host, format!("cannot copy {}", host.display())).because(error)
        })
    }

    async fn target_inside(&self, id: &BodyId, host: &Path, inside: &str) -> Result<String, Failure> {
        let asked: Result<StatResponse, _> = self
            .fleet
            .guest(id)
            .ask("/filesystem.Filesystem/Stat", &StatRequest { path: inside.to_owned() })
            .await;
        let is_dir = match asked {
            Ok(answer) => answer.entry.is_some_and(|entry| entry.r#type() == FileType::Directory),
            Err(body::guest::GuestError::Refused { code, .. }) if code == "not_found" => false,
            Err(error) => return Err(failures::guest(error)),
        };
        let name = host.canonicalize().ok().and_then(|path| path.file_name().map(OsStr::to_owned));
        match name.as_ref().and_then(|name| name.to_str()) {
            Some(name) if is_dir || inside.ends_with('/') => {
                Ok(format!("{}/{name}", inside.trim_end_matches('/')))
            }
            _ => Ok(inside.to_owned()),
        }
    }

    /// Copies out of a Body.
    pub async fn copy_out(&self, id: &BodyId, inside: &str, host: &Path) -> Result<CopyTotals, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let target = match inside.trim_end_matches('/').rsplit('/').next() {
            Some(name) if host.is_dir() && !name.is_empty() && name != ".." && name != "." => host.join(name),
            _ => host.to_owned(),
        };
        let mut stream = self.fleet.guest(id).read_tree(inside, None).await.map_err(failures::guest)?;
        run_blocking(|| self.fleet.write(id, FileRead { path: inside.to_owned(), by: CopiedBy::Cp }))?;
        let mut writer = TreeReceiver::new(target);
        let mut reader = tree::TreeReader::default();
        let hostile = |error: tree::TreeError| {
            Failure::new(Kind::Host, "the Body sent something that cannot be copied").because(error)
        };
        while let Some(piece) = body::guest::next_chunk(&mut stream).await.map_err(failures::guest)? {
            reader.push(&piece);
            while let Some(item) = reader.next().map_err(hostile)? {
                run_blocking(|| writer.take(item)).map_err(|error| {
                    Failure::new(Kind::Host, format!("cannot write {}", writer.top.display())).because(error)
                })?;
            }
        }
        reader.finish().map_err(hostile)?;
        Ok(writer.copied)
    }
}

type ChunkSender = mpsc::Sender<Result<Bytes, io::Error>>;

/// Walks a tree on the host and sends it. Blocks, so it runs on a thread of its own.
fn send_tree(top: &Path, pieces: ChunkSender) -> io::Result<CopyTotals> {
    let mut sender =
        TreeSender { pieces, held: BytesMut::from(&tree::MAGIC[..]), copied: CopyTotals::default() };
    let mut waiting = vec![(top.to_owned(), Vec::new())];
    let mut first = true;
    while let Some((path, name)) = waiting.pop() {
        let found = if first { fs::metadata(&path)? } else { fs::symlink_metadata(&path)? };
        first = false;
        tree::check_path(&name).map_err(io::Error::other)?;
        let mode = found.mode() & 0o7777;
        if found.is_dir() {
            sender.item(&TreeItem::Dir { path: name.clone(), mode })?;
            let mut below = fs::read_dir(&path)?
                .map(|entry| entry.map(|entry| entry.file_name()))
                .collect::<io::Result<Vec<_>>>()?;
            below.sort();
            waiting.extend(
                below.into_iter().rev().map(|child| (path.join(&child), join(&name, child.as_bytes()))),
            );
        } else if found.is_symlink() {
            sender.item(&TreeItem::Link {
                path: name,
                target: fs::read_link(&path)?.as_os_str().as_bytes().to_vec(),
            })?;
        } else if found.is_file() {
            sender.file(&path, name, mode)?;
        }
    }
    sender.item(&TreeItem::End)?;
    sender.flush()?;
    Ok(sender.copied)
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

struct TreeSender {
    pieces: ChunkSender,
    held: BytesMut,
    copied: CopyTotals,
}

impl TreeSender {
    fn item(&mut self, item: &TreeItem) -> io::Result<()> {
        match item {
            TreeItem::Data(bytes) => self.copied.bytes += bytes.len() as u64,
            TreeItem::FileEnd | TreeItem::End => {}
            _ => self.copied.entries += 1,
        }
        tree::write(item, &mut self.held);
        if self.held.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    fn file(&mut self, path: &Path, name: Vec<u8>, mode: u32) -> io::Result<()> {
        let mut file = File::from(rustix::fs::open(
            path,
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
            Mode::empty(),
        )?);
        self.item(&TreeItem::File { path: name, mode })?;
        let mut buffer = vec![0; CHUNK];
        loop {
            let len = file.read(&mut buffer)?;
            if len == 0 {
                return self.item(&TreeItem::FileEnd);
            }
            self.item(&TreeItem::Data(Bytes::copy_from_slice(&buffer[..len])))?;
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = self.held.split().freeze();
        self.pieces.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Writes a received tree below `top`.
struct TreeReceiver {
    top: PathBuf,
    root: Option<OwnedFd>,
    file: Option<(File, u32)>,
    copied: CopyTotals,
}

impl TreeReceiver {
    fn new(top: PathBuf) -> Self {
        Self { top, root: None, file: None, copied: CopyTotals::default() }
    }

    fn take(&mut self, item: TreeItem) -> io::Result<()> {
        match item {
            TreeItem::Dir { path, .. } => self.dir(&path)?,
            TreeItem::File { path, mode } => self.file = Some((self.create(&path)?, mode)),
            TreeItem::Link { path, target } => self.link(&path, &target)?,
            TreeItem::Data(bytes) => {
                self.copied.bytes += bytes.len() as u64;
                return self.file.as_mut().map_or(Ok(()), |(file, _)| file.write_all(&bytes));
            }
            TreeItem::FileEnd => {
                // Setuid, setgid and sticky bits of a Body's file are dropped.
                let done = self.file.take();
                return done.map_or(Ok(()), |(file, mode)| {
                    file.set_permissions(fs::Permissions::from_mode(mode & 0o777))
                });
            }
            TreeItem::End => return Ok(()),
        }
        self.copied.entries += 1;
        Ok(())
    }

    fn dir(&mut self, path: &[u8]) -> io::Result<()> {
        if path.is_empty() {
            fs::create_dir_all(&self.top)?;
            self.root = Some(rustix::fs::open(
                &self.top,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?);
            return Ok(());
        }
        let (parent, name) = self.parent(path)?;
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Err(rustix::io::Errno::EXIST) | Ok(()) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn create(&self, path: &[u8]) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NONBLOCK;
        if path.is_empty() {
            return Ok(File::from(rustix::fs::open(&self.top, flags, Mode::from_raw_mode(0o644))?));
        }
        let (parent, name) = self.parent(path)?;
        Ok(File::from(rustix::fs::openat(
            &parent,
            name,
            flags | OFlags::NOFOLLOW,
            Mode::from_raw_mode(0o644),
        )?))
    }

    fn link(&self, path: &[u8], target: &[u8]) -> io::Result<()> {
        if path.is_empty() {
            return rustix::fs::symlink(OsStr::from_bytes(target), &self.top).map_err(Into::into);
        }
        let (parent, name) = self.parent(path)?;
        match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
            Err(errno) if errno != rustix::io::Errno::NOENT => return Err(errno.into()),
            _ => {}
        }
        Ok(rustix::fs::symlinkat(OsStr::from_bytes(target), &parent, name)?)
    }

    /// Opens the parent directory of a path below the root without following any symbolic link.
    fn parent<'a>(&self, path: &'a [u8]) -> io::Result<(OwnedFd, &'a OsStr)> {
        let root = self.root.as_ref().ok_or_else(|| io::Error::other("a tree without its root"))?;
        let cut = path.iter().rposition(|byte| *byte == b'/');
        let (dirs, name) = cut.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
        let mut at = root.as_fd().try_clone_to_owned()?;
        for part in dirs.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            at = rustix::fs::openat(&at, OsStr::from_bytes(part), flags, Mode::empty())?;
        }
        Ok((at, OsStr::from_bytes(name)))
    }
}
