//! What a Body is made from besides the host's programs: its upper on disk, snapshots, and what its spec names.
//!
//! Each is a detached mount. Root takes them in the host's own namespaces, because a Body's ids may not search the
//! way to them; an ordinary user takes them in the Body's, where alone it may.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use proto::{
    launch::{Plan, Upper},
    spec::Access,
};
use sys::mount::{Attrs, Below};

use crate::{
    idmap,
    report::{Step, StepError},
};

/// The detached mounts of one Body.
pub struct Trees {
    /// Holds `upper` and `work`, for an upper on disk.
    pub disk: Option<OwnedFd>,
    /// Snapshots.
    pub lowers: Vec<Lower>,
    /// The plan's mounts, in order.
    pub mounts: Vec<OwnedFd>,
}

/// A snapshot under this Body's ids.
pub struct Lower {
    /// Which.
    pub path: PathBuf,
    /// Its view.
    pub tree: OwnedFd,
}

/// Takes them all.
pub fn gather(plan: &Plan) -> Result<Trees, StepError> {
    let disk = match plan.upper {
        Upper::Disk => Some(disk(&plan.dir.join("disk")).step("open the upper")?),
        Upper::Memory { .. } => None,
    };
    let mut mounts = Vec::new();
    for mount in &plan.mounts {
        let step = format!("open {}", mount.source.display());
        let tree = sys::mount::clone_tree(&mount.source, Below::Too).step(step.clone())?;
        // The processor's own door, for a hypervisor that uses it, and randomness, for one in a jail; no other device of
        // the host is ever named.
        let doors = [proto::vm::KVM, proto::vm::URANDOM].map(Path::new);
        let devices = plan.vm.is_some() && doors.contains(&mount.target.as_path());
        let attrs = Attrs { read_only: mount.access == Access::ReadOnly, devices, ..Attrs::default() };
        sys::mount::restrict(tree.as_fd(), attrs).step(step)?;
        mounts.push(tree);
    }
    Ok(Trees { disk, lowers: lowers(plan)?, mounts })
}

/// Restricted: a root with nothing below it is a directory of this very mount.
fn disk(dir: &Path) -> io::Result<OwnedFd> {
    let tree = sys::mount::clone_tree(dir, Below::No)?;
    sys::mount::restrict(tree.as_fd(), Attrs::default())?;
    Ok(tree)
}

fn lowers(plan: &Plan) -> Result<Vec<Lower>, StepError> {
    let mut taken = Vec::new();
    let mut views = idmap::Views::new(&plan.ids);
    for lower in plan.areas.iter().flat_map(|area| &area.lowers) {
        let Some(written_as) = &lower.written_as else { continue };
        let tree = sys::mount::clone_tree(&lower.path, Below::No).step("open a layer below the Body")?;
        if *written_as != plan.ids {
            views.show(tree.as_fd(), written_as)?;
        }
        taken.push(Lower { path: lower.path.clone(), tree });
    }
    Ok(taken)
}
