//! Walks a tree of the host and sends it to a guest.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, Metadata},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::Path,
};

use bytes::{Bytes, BytesMut};
use proto::{
    text::visible,
    tree::{self, OmittedKind, TreeForm, TreeItem},
};
use rustix::fs::{Mode, OFlags};
use sys::sparse::{Holes, SparsePiece, SparseReader};
use tokio::sync::mpsc;

use crate::CopyTotals;

const CHUNK: usize = 128 << 10;
/// Trees with more entries are not measured before they are sent.
const MEASURED_MAX: usize = 200_000;

type ChunkSender = mpsc::Sender<Result<Bytes, io::Error>>;

/// The bytes of data in a tree, as a guest that knows this form writes them; none if the tree is very large or cannot
/// be read.
pub fn measure(top: &Path, form: TreeForm) -> Option<u64> {
    let (mut total, mut entries, mut linked) = (0u64, 0, HashSet::new());
    let walked = walk(top, |_, _, found| {
        entries += 1;
        let may_repeat = found.nlink() > 1 && form == TreeForm::Second;
        if found.is_file() && (!may_repeat || linked.insert((found.dev(), found.ino()))) {
            let allocated = found.blocks().saturating_mul(512);
            let data = if form == TreeForm::Second { allocated.min(found.len()) } else { found.len() };
            total = total.saturating_add(data);
        }
        if entries > MEASURED_MAX { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
    });
    walked.is_ok().then_some(total)
}

/// Sends a tree. Blocks, so it runs on a thread of its own.
pub fn send_tree(
    top: &Path,
    form: TreeForm,
    size: Option<u64>,
    pieces: ChunkSender,
) -> io::Result<CopyTotals> {
    let held = BytesMut::from(&form.magic()[..]);
    let mut sender = TreeSender { form, pieces, held, linked: HashMap::new(), copied: CopyTotals::default() };
    if let (TreeForm::Second, Some(size)) = (form, size) {
        sender.item(&TreeItem::Size(size))?;
    }
    walk(top, |path, name, found| sender.entry(path, name, found))?;
    sender.item(&TreeItem::End)?;
    sender.flush()?;
    Ok(sender.copied)
}

/// Visits a tree: directories before their entries, each with its path below the top. Follows a link only at the top.
fn walk(top: &Path, mut visit: impl FnMut(&Path, Vec<u8>, &Metadata) -> io::Result<()>) -> io::Result<()> {
    let mut waiting = vec![(top.to_owned(), Vec::new())];
    while let Some((path, name)) = waiting.pop() {
        let found = if name.is_empty() { fs::metadata(&path)? } else { fs::symlink_metadata(&path)? };
        tree::check_path(&name).map_err(io::Error::other)?;
        let entries = visit(&path, name.clone(), &found).and_then(|()| match found.is_dir() {
            true => fs::read_dir(&path)?.map(|entry| entry.map(|entry| entry.file_name())).collect(),
            false => Ok(Vec::new()),
        });
        let mut below: Vec<_> = entries.map_err(|error| named(&name, error))?;
        below.sort();
        waiting
            .extend(below.into_iter().rev().map(|child| (path.join(&child), join(&name, child.as_bytes()))));
    }
    Ok(())
}

/// The error with the name of the entry below the top, unless the guest stopped reading.
fn named(name: &[u8], error: io::Error) -> io::Error {
    match name {
        [] => error,
        _ if error.kind() == io::ErrorKind::BrokenPipe => error,
        name => io::Error::new(error.kind(), format!("{}: {error}", visible(&String::from_utf8_lossy(name)))),
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

struct TreeSender {
    form: TreeForm,
    pieces: ChunkSender,
    held: BytesMut,
    /// The first names of files that have several.
    linked: HashMap<(u64, u64), Vec<u8>>,
    copied: CopyTotals,
}

impl TreeSender {
    fn entry(&mut self, path: &Path, name: Vec<u8>, found: &Metadata) -> io::Result<()> {
        let (kind, mode) = (found.file_type(), found.mode() & 0o7777);
        if kind.is_dir() {
            self.item(&TreeItem::Dir { path: name, mode })
        } else if kind.is_symlink() {
            let target = fs::read_link(path)?.as_os_str().as_bytes().to_vec();
            self.item(&TreeItem::Link { path: name, target })
        } else if kind.is_file() {
            self.file(path, name, found)
        } else {
            let kind = match kind {
                kind if kind.is_fifo() => OmittedKind::Fifo,
                kind if kind.is_socket() => OmittedKind::Socket,
                _ => OmittedKind::Device,
            };
            self.copied.omitted.add(&name, kind);
            Ok(())
        }
    }

    fn item(&mut self, item: &TreeItem) -> io::Result<()> {
        match item {
            TreeItem::Data(bytes) => self.copied.bytes += bytes.len() as u64,
            TreeItem::Dir { .. } | TreeItem::File { .. } | TreeItem::Link { .. } | TreeItem::Same { .. } => {
                self.copied.entries += 1;
            }
            _ => {}
        }
        tree::write(item, &mut self.held);
        if self.held.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    fn file(&mut self, path: &Path, name: Vec<u8>, found: &Metadata) -> io::Result<()> {
        if found.nlink() > 1 && self.form == TreeForm::Second && !name.is_empty() {
            let key = (found.dev(), found.ino());
            if let Some(first) = self.linked.get(&key) {
                let first = first.clone();
                return self.item(&TreeItem::Same { path: name, first });
            }
            self.linked.insert(key, name.clone());
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let holes = if self.form == TreeForm::Second { Holes::Report } else { Holes::Read };
        let mut contents = SparseReader::new(file, holes)?;
        self.item(&TreeItem::File { path: name, mode: found.mode() & 0o7777 })?;
        let mut buffer = vec![0; CHUNK];
        loop {
            match contents.next(&mut buffer)? {
                SparsePiece::Data(len) => {
                    self.item(&TreeItem::Data(Bytes::copy_from_slice(&buffer[..len])))?;
                }
                SparsePiece::Hole(len) => self.item(&TreeItem::Hole(len))?,
                SparsePiece::End => return self.item(&TreeItem::FileEnd),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = self.held.split().freeze();
        self.pieces.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
