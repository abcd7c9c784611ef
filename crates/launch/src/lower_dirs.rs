//! The directories that a Body is built from besides the host's programs: its upper on disk, snapshots, and the
//! mounts of its spec.
//!
//! Each becomes a detached mount. Root opens them in the host's namespaces, because the Body's ids may not search the
//! path to them; an ordinary user opens them in the Body's namespaces, because it may mount only there.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use proto::{
    launch::{LaunchPlan, Upper},
    spec::{Access, Mount},
};
use rustix::fs::FileType;
use sys::mount::{MountAttrs, Submounts};

use crate::{
    git_dirs::{self, Hold},
    idmap,
    report::{StepError, StepExt},
};

/// The detached mounts of one Body.
pub struct LowerDirs {
    /// The directory with `upper` and `work`, for an upper on disk.
    pub disk: Option<OwnedFd>,
    /// The snapshots.
    pub lowers: Vec<MappedLower>,
    /// The plan's mounts, in order.
    pub mounts: Vec<NamedTree>,
    /// Protection of the git directories in those mounts, if one is writable.
    pub git: Option<git_dirs::Summary>,
}

/// A directory or file of the host that the plan names.
pub struct NamedTree {
    /// Its detached mount.
    pub tree: OwnedFd,
    /// The mounts that protect its git directories, outermost first.
    pub holds: Vec<Hold>,
}

/// A snapshot, mapped to this Body's ids.
pub struct MappedLower {
    /// Its path on the host.
    pub path: PathBuf,
    /// Its detached mount.
    pub tree: OwnedFd,
}

/// Opens all of them.
pub fn open_lower_dirs(plan: &LaunchPlan) -> Result<LowerDirs, StepError> {
    let disk = match plan.upper {
        Upper::Disk => Some(disk(&plan.dir.join("disk")).step("open the upper")?),
        Upper::Memory { .. } => None,
    };
    let (mut mounts, mut git) = (Vec::new(), None);
    for mount in &plan.mounts {
        let step = format!("open {}", mount.source.display());
        let tree = sys::mount::clone_tree(&mount.source, Submounts::Too).step(step.clone())?;
        // A hypervisor may need `/dev/kvm`, and a jailed one `/dev/urandom`; no other device of the host is ever
        // mounted.
        let doors = [proto::vm::KVM, proto::vm::URANDOM].map(Path::new);
        let devices = plan.vm.is_some() && doors.contains(&mount.target.as_path());
        let attrs =
            MountAttrs { read_only: mount.access == Access::ReadOnly, devices, ..MountAttrs::default() };
        sys::mount::restrict(tree.as_fd(), attrs).step(step)?;
        let holds = hold_git(mount, tree.as_fd(), &mut git)
            .step(format!("protect the git directories in {}", mount.source.display()))?;
        mounts.push(NamedTree { tree, holds });
    }
    Ok(LowerDirs { disk, lowers: lowers(plan)?, mounts, git })
}

/// Protects the git directories of a writable directory.
fn hold_git(
    mount: &Mount,
    tree: BorrowedFd<'_>,
    git: &mut Option<git_dirs::Summary>,
) -> io::Result<Vec<Hold>> {
    let is_dir = FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode) == FileType::Directory;
    if !is_dir || !mount.access.is_writable() {
        return Ok(Vec::new());
    }
    let summary = git.get_or_insert_default();
    match mount.access {
        Access::Unprotected => {
            summary.leave_out(&mount.target);
            Ok(Vec::new())
        }
        _ => git_dirs::hold(&mount.source, &mount.target, tree, summary),
    }
}

/// Opens the upper's directory with restricted mount attributes, because a root without lowers is a directory of this
/// very mount.
fn disk(dir: &Path) -> io::Result<OwnedFd> {
    let tree = sys::mount::clone_tree(dir, Submounts::No)?;
    sys::mount::restrict(tree.as_fd(), MountAttrs::default())?;
    Ok(tree)
}

fn lowers(plan: &LaunchPlan) -> Result<Vec<MappedLower>, StepError> {
    let mut taken = Vec::new();
    let mut views = idmap::IdmappedViews::new(&plan.ids);
    for lower in plan.areas.iter().flat_map(|area| &area.lowers) {
        let Some(written_as) = &lower.written_as else { continue };
        let tree = sys::mount::clone_tree(&lower.path, Submounts::No).step("open a layer below the Body")?;
        if *written_as != plan.ids {
            views.show(tree.as_fd(), written_as)?;
        }
        taken.push(MappedLower { path: lower.path.clone(), tree });
    }
    Ok(taken)
}
