//! Layers of templates: immutable trees that are lowers of Bodies.
//!
//! Invariant: a layer is complete once its record is on disk; the record is written last.
//! Invariant: files of a layer belong to ids that no process has ([`ids::of_layers`]), to the ids of the Body
//! that wrote them, or to the user's subordinate ids; never to the host's root.

use std::{
    fs,
    io::{self, BufWriter, Read, Write},
    os::{fd::AsFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use proto::{
    LayerId,
    pack::{HEADER_LEN_MAX, LayerEntry, LayerEntryKind},
    spec::{Ids, Spec},
    template::{LayerRecord, VERSION},
};

use crate::{
    archive::{self, ArchiveError, ArchiveLimits, ArchiveTotals, Dialect, Sink},
    programs::Programs,
    root::LowerLayer,
    snapshot,
};

const RECORD_LEN_MAX: u64 = 1 << 20;

/// Why a layer could not be created or read.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// A step failed.
    #[error("cannot {0}")]
    Io(&'static str, #[source] io::Error),
    /// The record cannot be parsed.
    #[error("the record of a layer is damaged")]
    Damaged(#[source] serde_json::Error),
    /// A Body's files could not be copied.
    #[error(transparent)]
    Copy(#[from] snapshot::SnapshotError),
    /// The archive is not allowed in a layer, or could not be unpacked.
    #[error("{0}")]
    Unpack(String),
}

/// A layer that is being created; dropping it before it is complete removes it.
#[derive(Debug)]
pub struct LayerDraft<'a> {
    programs: &'a Programs,
    dir: PathBuf,
    ids: Ids,
    whole: bool,
}

impl Drop for LayerDraft<'_> {
    fn drop(&mut self) {
        if !self.whole {
            let _ = snapshot::remove(self.programs, &self.ids, &self.dir);
        }
    }
}

impl<'a> LayerDraft<'a> {
    /// Begins a layer in a directory of its own below `layers`, whose files will belong to `ids`.
    pub fn begin(programs: &'a Programs, layers: &Path, name: &str, ids: Ids) -> Result<Self, LayerError> {
        let dir = layers.join(name);
        let step = |error| LayerError::Io("make a layer's directory", error);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(layers).map_err(step)?;
        // Removes what an earlier process left that was killed.
        snapshot::remove(programs, &ids, &dir).or_else(|error| match error {
            snapshot::SnapshotError::Io(_, error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            error => Err(error),
        })?;
        fs::DirBuilder::new().mode(0o700).create(&dir).map_err(step)?;
        let draft = Self { programs, dir, ids, whole: false };
        fs::DirBuilder::new().mode(0o755).create(draft.root()).map_err(step)?;
        if let (true, Some((user, group))) =
            (sys::caps::is_host_root(), draft.ids.user_outside(0).zip(draft.ids.group_outside(0)))
        {
            std::os::unix::fs::lchown(draft.root(), Some(user), Some(group)).map_err(step)?;
        }
        Ok(draft)
    }

    /// The directory for its files.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// The ids that own its files.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Copies the changes of a Body that does not run.
    pub fn take(&self, body_dir: &Path, spec: &Spec) -> Result<(), LayerError> {
        self.take_area(&body_dir.join("disk/upper"), spec, "root")
    }

    /// Copies the changes of a Body in one of its mounts, named by its directory in the upper.
    pub fn take_area(&self, upper: &Path, spec: &Spec, area: &str) -> Result<(), LayerError> {
        let step = |error| LayerError::Io("make a layer's directory", error);
        let root = self.root();
        // The copy takes over the owner and mode of the upper.
        fs::remove_dir(&root).map_err(step)?;
        fs::DirBuilder::new().mode(0o755).create(&root).map_err(step)?;
        Ok(snapshot::copy_tree(self.programs, &spec.ids, &upper.join(area), &root)?)
    }

    /// Publishes the complete layer under its id: `layers/ID`. If that layer exists already, it is used
    /// instead.
    pub fn finish(self, id: LayerId, about: &str, now: String) -> Result<LayerRecord, LayerError> {
        self.finish_over(id, about, now, Vec::new())
    }

    /// Publishes a layer that was made on top of other layers.
    pub fn finish_over(
        mut self,
        id: LayerId,
        about: &str,
        now: String,
        over: Vec<LayerId>,
    ) -> Result<LayerRecord, LayerError> {
        let root = open(&self.root()).map_err(|error| LayerError::Io("open the layer", error))?;
        let bytes =
            sys::tree::usage(root.as_fd()).map_err(|error| LayerError::Io("measure the layer", error))?.bytes;
        let record = LayerRecord {
            v: VERSION,
            id,
            ids: self.ids.clone(),
            bytes,
            created_at: now,
            about: about.to_owned(),
            over,
        };
        let text = serde_json::to_vec(&record).map_err(LayerError::Damaged)?;
        sys::fd::write_whole(&self.dir.join("layer.json"), &text)
            .map_err(|error| LayerError::Io("write the layer's record", error))?;
        let place = self.dir.with_file_name(record.id.as_str());
        match fs::rename(&self.dir, &place) {
            Ok(()) => {
                self.whole = true;
                Ok(record)
            }
            Err(_) if place.join("layer.json").exists() => read(&place),
            Err(error) => Err(LayerError::Io("put the layer in place", error)),
        }
    }
}

fn open(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Reads the record of the layer in `dir`.
pub fn read(dir: &Path) -> Result<LayerRecord, LayerError> {
    let text = sys::fd::read_small(&dir.join("layer.json"), RECORD_LEN_MAX);
    let text = text.map_err(|error| LayerError::Io("read the record of a layer", error))?;
    serde_json::from_str(&text).map_err(LayerError::Damaged)
}

/// The layer as a lower.
pub fn below(dir: &Path) -> Result<LowerLayer, LayerError> {
    Ok(LowerLayer { root: dir.join("root"), ids: read(dir)?.ids })
}

/// The limits of one unpacked layer.
pub const UNPACKED_MAX: ArchiveLimits = ArchiveLimits { bytes: 32 << 30, entries: 4_000_000 };

impl LayerDraft<'_> {
    /// Unpacks an archive into the layer, under the layer's ids and with no other rights.
    pub fn unpack(
        &self,
        archive: impl Read,
        dialect: Dialect,
        bounds: ArchiveLimits,
    ) -> Result<ArchiveTotals, LayerError> {
        self.fill(|sink| archive::read(archive, dialect, bounds, sink))
    }

    /// Adds entries from a source to the layer, under the layer's ids and with no other rights.
    pub fn fill<T>(
        &self,
        bring: impl FnOnce(&mut dyn Sink) -> Result<T, ArchiveError>,
    ) -> Result<T, LayerError> {
        let failed = |error| LayerError::Io("run the helper", error);
        let mut child = Command::new(&self.programs.launch)
            .args(["tree", "unpack"])
            .arg(self.root())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let stdin = child.stdin.take().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let sent = self.send(bring, stdin);
        let output = child.wait_with_output().map_err(failed)?;
        match sent {
            // The helper's own message says more than a broken pipe.
            Err(ArchiveError::Sink(_)) | Ok(_) if !output.status.success() => Err(LayerError::Unpack(
                proto::text::visible_bytes(&output.stderr[..output.stderr.len().min(4096)]),
            )),
            sent => sent.map_err(|error| LayerError::Unpack(failure_text(&error))),
        }
    }

    fn send<T>(
        &self,
        bring: impl FnOnce(&mut dyn Sink) -> Result<T, ArchiveError>,
        stdin: std::process::ChildStdin,
    ) -> Result<T, ArchiveError> {
        let mut packer = Packer(BufWriter::with_capacity(256 << 10, stdin));
        let ids = serde_json::to_string(&self.ids).map_err(|error| ArchiveError::Sink(error.into()))? + "\n";
        packer.0.write_all(ids.as_bytes()).map_err(ArchiveError::Sink)?;
        let brought = bring(&mut packer)?;
        packer
            .take(LayerEntry::end(), &mut io::empty())
            .and_then(|()| packer.0.flush())
            .map_err(ArchiveError::Sink)?;
        Ok(brought)
    }
}

fn failure_text(error: &ArchiveError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Sends entries to the helper.
struct Packer<W: Write>(W);

impl<W: Write> Sink for Packer<W> {
    fn take(&mut self, entry: LayerEntry, contents: &mut dyn Read) -> io::Result<()> {
        let header = serde_json::to_vec(&entry)?;
        if header.len() > HEADER_LEN_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.write_all(&(header.len() as u32).to_le_bytes())?;
        self.0.write_all(&header)?;
        if let LayerEntryKind::File(size) = entry.what {
            let copied = io::copy(&mut contents.take(size), &mut self.0)?;
            if copied != size {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}
