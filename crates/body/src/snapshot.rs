//! Snapshots: a Body's upper, copied once and never changed, to be a lower of other Bodies.
//!
//! Invariant: a snapshot is immutable once its manifest is on disk; the manifest is written last.
//! Invariant: the cost depends on the changes of the Body, never on the size of its lowers.

use std::{
    fs, io,
    os::{fd::AsFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
    process::Command,
};

use proto::{
    AgentId, BodyId, Layer, SnapshotId,
    event_data::MissingStep,
    guest::EGRESS_DIR,
    launch::area_dir,
    spec::{Home, Ids, Life, Spec},
    template::BodyBase,
    workspace::Workspace,
};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::{
    helper::{self, HelperError},
    host::SnapshotLower,
    programs::Programs,
    vm::{record::VmRecord, upper_copy},
};

const MANIFEST_LEN_MAX: u64 = 1 << 20;

/// Why a snapshot could not be taken or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The Body's files are in memory that only its processes can reach.
    #[error("the Body {0} keeps its files in memory and ends with its `pal run`")]
    InMemory(BodyId),
    /// A step failed.
    #[error("cannot {0}")]
    Io(&'static str, #[source] io::Error),
    /// The helper that works under the Body's ids failed.
    #[error("cannot copy the Body's files: {0}")]
    Helper(String),
    /// The manifest cannot be parsed.
    #[error("the manifest of a snapshot is damaged")]
    Damaged(#[source] serde_json::Error),
}

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotManifest {
    /// The id of the snapshot.
    pub id: SnapshotId,
    /// The name of the snapshot, if it has one.
    pub name: Option<String>,
    /// The Body that the snapshot was taken of.
    pub body: BodyId,
    /// The id of the API key that owns that Body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// When the snapshot was taken.
    pub created_at: String,
    /// The template of that Body.
    pub template: String,
    /// Snapshots below it, nearest first.
    pub below: Vec<SnapshotId>,
    /// The root below those, if it is not the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BodyBase>,
    /// Repositories in that Body.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workspaces: Vec<Workspace>,
    /// The home below the Body's own home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
    /// The commands that run at each start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_start: Vec<String>,
    /// Ports that users will want to reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// The ids that own its files.
    pub ids: Ids,
    /// Its size on disk.
    pub bytes: u64,
    /// Whether it was taken for forks; it is removed with the last of them.
    #[serde(default)]
    pub for_forks: bool,
    /// The agent whose checkpoint it belongs to; it is removed with that agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_of: Option<AgentId>,
    /// For a snapshot of a prepared Body: the inputs of the preparation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dependency: Option<String>,
    /// The template that the Body was requested with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The prepare steps that the Body lacked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_steps: Vec<MissingStep>,
    /// The layer that the snapshot was taken on.
    #[serde(default = "process")]
    pub layer: Layer,
    /// The record of the microVM, on that layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<VmRecord>,
}

/// Before there were other layers, all snapshots were of this one.
fn process() -> Layer {
    Layer::Process
}

/// Reads the manifest of the snapshot in `dir`.
pub fn read(dir: &Path) -> Result<SnapshotManifest, SnapshotError> {
    let text = sys::fd::read_small(&dir.join("manifest.json"), MANIFEST_LEN_MAX);
    let text = text.map_err(|error| SnapshotError::Io("read the manifest of a snapshot", error))?;
    serde_json::from_str(&text).map_err(SnapshotError::Damaged)
}

/// The snapshot as a lower.
pub fn below(dir: PathBuf, manifest: &SnapshotManifest) -> SnapshotLower {
    let machine = manifest.machine.is_some();
    let dependency = manifest.dependency.is_some();
    SnapshotLower { id: manifest.id.clone(), dir, ids: manifest.ids.clone(), machine, dependency }
}

/// Copies the upper of a Body that does not change meanwhile: the caller stopped or froze it.
pub fn take(
    programs: &Programs,
    body_dir: &Path,
    spec: &Spec,
    to: &Path,
    manifest: SnapshotManifest,
) -> Result<SnapshotManifest, SnapshotError> {
    if spec.life == Life::Run {
        return Err(SnapshotError::InMemory(spec.id.clone()));
    }
    let step = |what| move |error| SnapshotError::Io(what, error);
    fs::DirBuilder::new().mode(0o700).create(to).map_err(step("make the snapshot's directory"))?;
    copy_tree(programs, &spec.ids, &body_dir.join("disk/upper"), to)?;
    close(programs, spec, to, manifest)
}

/// Copies the files on the disk of a microVM that does not run, as a lower.
pub fn take_from_disk(
    programs: &Programs,
    body_dir: &Path,
    spec: &Spec,
    to: &Path,
    manifest: SnapshotManifest,
) -> Result<SnapshotManifest, SnapshotError> {
    fs::DirBuilder::new()
        .mode(0o700)
        .create(to)
        .map_err(|error| SnapshotError::Io("make the snapshot's directory", error))?;
    upper_copy::read_all(programs, body_dir, spec, to)?;
    close(programs, spec, to, manifest)
}

/// Removes files that do not belong in a snapshot, and writes its manifest.
fn close(
    programs: &Programs,
    spec: &Spec,
    to: &Path,
    mut manifest: SnapshotManifest,
) -> Result<SnapshotManifest, SnapshotError> {
    let step = |what| move |error| SnapshotError::Io(what, error);
    if manifest.dependency.is_some() {
        // Changes of the preparation steps in a `.git` are not dependencies.
        for workspace in &manifest.workspaces {
            let git = to.join(workspace.area_dir()).join(".git");
            if fs::symlink_metadata(&git).is_ok() {
                remove(programs, &spec.ids, &git)?;
            }
        }
        // Neither are files that the egress proxy of the steps needed.
        let egress = to.join(area_dir("")).join(EGRESS_DIR.trim_start_matches('/'));
        if fs::symlink_metadata(&egress).is_ok_and(|found| found.is_dir()) {
            remove(programs, &spec.ids, &egress)?;
        }
    }
    let dir = open(to).map_err(step("open the snapshot"))?;
    if sys::caps::is_host_root() {
        // The copy took over the upper's mode; a snapshot is accessible only by its owner.
        rustix::fs::fchmod(&dir, Mode::RWXU).map_err(|error| step("close the snapshot")(error.into()))?;
    }
    manifest.bytes = sys::tree::usage(dir.as_fd()).map_err(step("measure the snapshot"))?.bytes;
    write(to, manifest)
}

/// Writes the manifest, which makes the directory a snapshot.
pub fn write(to: &Path, manifest: SnapshotManifest) -> Result<SnapshotManifest, SnapshotError> {
    let step = |what| move |error| SnapshotError::Io(what, error);
    let text = serde_json::to_vec(&manifest).map_err(SnapshotError::Damaged)?;
    sys::fd::write_whole(&to.join("manifest.json"), &text).map_err(step("write the snapshot's manifest"))?;
    Ok(manifest)
}

pub(crate) fn copy_tree(programs: &Programs, ids: &Ids, from: &Path, to: &Path) -> Result<(), SnapshotError> {
    if sys::caps::is_host_root() {
        let step = |error| SnapshotError::Io("copy the Body's files", error);
        let (from, to) = (open(from).map_err(step)?, open(to).map_err(step)?);
        return sys::tree::copy(from.as_fd(), to.as_fd()).map(drop).map_err(step);
    }
    under_ids(programs, ids, &["copy".as_ref(), from.as_os_str(), to.as_os_str()])
}

/// Copies a part of a Body's upper so that its owner can read it, where file modes allow only ids of the
/// Body.
pub fn show(programs: &Programs, ids: &Ids, from: &Path, to: &Path) -> Result<(), SnapshotError> {
    under_ids(programs, ids, &["show".as_ref(), from.as_os_str(), to.as_os_str()])
}

fn open(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Removes a directory with files of a Body.
pub fn remove(programs: &Programs, ids: &Ids, dir: &Path) -> Result<(), SnapshotError> {
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else { return Ok(()) };
    let parent = open(parent).map_err(|error| SnapshotError::Io("open the directory", error))?;
    let name = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(name)).unwrap_or_default();
    match sys::tree::remove(parent.as_fd(), &name) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !sys::caps::is_host_root() => {
            under_ids(programs, ids, &["remove".as_ref(), dir.as_os_str()])
        }
        done => done.map_err(|error| SnapshotError::Io("remove the Body's files", error)),
    }
}

/// Runs `pal-launch tree` in a user namespace with the Body's ids.
pub(crate) fn under_ids(
    programs: &Programs,
    ids: &Ids,
    arguments: &[&std::ffi::OsStr],
) -> Result<(), SnapshotError> {
    let step = |error| SnapshotError::Io("run the helper", error);
    let ids = serde_json::to_vec(ids).map_err(|error| step(error.into()))?;
    helper::run(Command::new(&programs.launch).arg("tree").args(arguments), &ids).map_err(|error| match error
    {
        HelperError::Io(error) => step(error),
        HelperError::Failed(said) => SnapshotError::Helper(proto::text::visible_bytes(&said)),
    })
}
