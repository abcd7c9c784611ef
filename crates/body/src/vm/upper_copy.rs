//! A copy of a microVM's changes as plain files: a helper with the Body's ids and no other rights reads them
//! from the writable disk.
//!
//! The copy has the layout of a process Body's `disk/upper`, a directory for each mount, so later steps are
//! one code path for all layers. Dropping the copy removes it.
//!
//! Invariant: the host mounts no disk of a microVM, and runs no program of a Body.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use proto::{
    Spec,
    launch::area_dir,
    spec::{HOME, Ids},
    vm::{AREAS, ROOT_UPPER},
};

use super::plan::UPPER_FILE;
use crate::{
    programs::Programs,
    snapshot::{self, SnapshotError},
};

const PREFIX: &str = "upper-copy.";
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A copy of a microVM's changes.
#[derive(Debug)]
pub struct UpperCopy {
    path: PathBuf,
    programs: Programs,
    ids: Ids,
}

impl Drop for UpperCopy {
    fn drop(&mut self) {
        let _ = snapshot::remove(&self.programs, &self.ids, &self.path);
    }
}

impl UpperCopy {
    /// Copies the repositories and the home of the Body in `body`, whose disk does not change meanwhile.
    pub fn read(programs: &Programs, body: &Path, spec: &Spec) -> Result<Self, SnapshotError> {
        remove_abandoned(programs, body, &spec.ids);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = body.join(format!("{PREFIX}{}.{number}", std::process::id()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| SnapshotError::Io("create a directory for a copy of the Body's files", error))?;
        let copy = Self { path, programs: programs.clone(), ids: spec.ids.clone() };
        let home = spec.home.iter().map(|_| HOME.to_owned());
        for at in spec.workspaces.iter().map(|workspace| workspace.at()).chain(home) {
            extract(
                programs,
                body,
                spec,
                &format!("{AREAS}/{}", area_dir(&at)),
                &copy.path.join(area_dir(&at)),
            )?;
        }
        Ok(copy)
    }

    /// The directory of the copy.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Copies all changes of the Body in `body` into the directory `to`, in the layout of a snapshot of files.
pub fn read_all(programs: &Programs, body: &Path, spec: &Spec, to: &Path) -> Result<(), SnapshotError> {
    extract(programs, body, spec, ROOT_UPPER, &to.join(area_dir("")))?;
    for workspace in &spec.workspaces {
        let area = workspace.area_dir();
        extract(programs, body, spec, &format!("{AREAS}/{area}"), &to.join(&area))?;
    }
    Ok(())
}

fn extract(
    programs: &Programs,
    body: &Path,
    spec: &Spec,
    from: &str,
    to: &Path,
) -> Result<(), SnapshotError> {
    let step = |error| SnapshotError::Io("create a directory for a copy of the Body's files", error);
    fs::DirBuilder::new().mode(0o755).create(to).map_err(step)?;
    let first = if spec.ids.has_root() { 0 } else { proto::spec::USER_ID };
    if let (true, Some((user, group))) =
        (sys::caps::is_host_root(), spec.ids.user_outside(first).zip(spec.ids.group_outside(first)))
    {
        std::os::unix::fs::lchown(to, Some(user), Some(group)).map_err(step)?;
    }
    let disk = body.join(UPPER_FILE);
    let verb = ["extract".as_ref(), disk.as_os_str(), from.as_ref(), to.as_os_str()];
    snapshot::under_ids(programs, &spec.ids, &verb)
}

/// Removes copies of a `pal` that was killed.
fn remove_abandoned(programs: &Programs, body: &Path, ids: &Ids) {
    let entries = fs::read_dir(body).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_abandoned(&entry.file_name().to_string_lossy()).unwrap_or(false)) {
        let _ = snapshot::remove(programs, ids, &entry.path());
    }
}

fn is_abandoned(name: &str) -> Option<bool> {
    let maker: u32 = name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()?;
    Some(fs::metadata(format!("/proc/{maker}")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
}
