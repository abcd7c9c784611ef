//! Virtiofsd, which shares directories of the host with microVMs, in a root of its own.
//!
//! Invariant: its root holds the program, its libraries and mount points for the shared directories, and
//! nothing else of this host.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use proto::{
    Spec,
    spec::{Access, Mount},
    vm::{SHARES, SharePlan, SharedDir},
};
use sha2::{Digest, Sha256};

use super::{MicrovmInstall, VmError, VmStepExt, hypervisor_root};

/// The name of the program.
pub const VIRTIOFSD: &str = "virtiofsd";
/// Paths where distributions install it: it is not in PATH.
const PLACES: &[&str] =
    &["/usr/local/libexec", "/usr/libexec", "/usr/lib/qemu", "/usr/lib", "/usr/local/bin", "/usr/bin"];
/// Its path in its own root.
const INSIDE: &str = "/usr/bin/virtiofsd";
/// The directory of the shared directories in its own root.
const DIRS: &str = "/shares";
/// The largest number of shared directories of one microVM.
pub const SHARES_MAX: usize = 4;
/// Prefix of the names of its roots.
pub const PREFIX: &str = "share-";
/// Increased when the layout of the root changes.
const LAYOUT: u32 = 1;

/// The path of the program on this host.
pub fn find() -> Result<PathBuf, VmError> {
    let found = PLACES.iter().map(|dir| Path::new(dir).join(VIRTIOFSD)).find(|path| path.is_file());
    found.ok_or(VmError::Missing(VIRTIOFSD))
}

/// The name of its root, which changes with the program; computed without reading its contents.
pub fn name(program: &Path) -> Result<String, VmError> {
    let found = fs::metadata(program).step("read virtiofsd's metadata")?;
    let mark = format!("{LAYOUT}-{}-{}-{}", found.len(), found.mtime(), found.ino());
    Ok(format!("{PREFIX}{}", &proto::event::hex(&Sha256::digest(&mark))[..16]))
}

impl MicrovmInstall {
    /// The root of virtiofsd, built if it does not exist.
    pub fn sharer(&self) -> Result<PathBuf, VmError> {
        let program = find()?;
        let name = name(&program)?;
        self.whole_dir(&name, |root| {
            hypervisor_root::put_with_libraries(&program, Path::new(INSIDE), root)?;
            let shares = (0..SHARES_MAX).map(|index| format!("{}/{index}", &DIRS[1..]));
            for dir in ["proc".to_owned()].into_iter().chain(shares) {
                fs::create_dir_all(root.join(dir)).step("build the root of virtiofsd")?;
            }
            Ok(())
        })?;
        Ok(self.dir().join(name))
    }
}

/// The shared directories of a microVM, in the forms for the hypervisor, virtiofsd and the guest.
#[derive(Debug, Default)]
pub struct ShareSetup {
    /// Mounts in the hypervisor's root.
    pub mounts: Vec<Mount>,
    /// Plans for the launcher, which starts virtiofsd.
    pub plans: Vec<SharePlan>,
    /// The directories as the guest mounts them.
    pub shown: Vec<SharedDir>,
    /// The path of virtiofsd in its root.
    pub program: Option<PathBuf>,
}

/// The shared directories of a Body; empty if it has no virtiofsd.
pub fn of(spec: &Spec, sharer: Option<&Path>) -> ShareSetup {
    let Some(root) = sharer else { return ShareSetup::default() };
    let mut shares = ShareSetup {
        mounts: vec![Mount { source: root.to_owned(), target: SHARES.into(), access: Access::ReadOnly }],
        program: Some(INSIDE.into()),
        ..ShareSetup::default()
    };
    for (index, mount) in spec.mounts.iter().enumerate() {
        let (tag, dir) = (format!("share{index}"), format!("{DIRS}/{index}"));
        shares.mounts.push(Mount {
            source: mount.source.clone(),
            target: format!("{SHARES}{dir}").into(),
            access: mount.access,
        });
        shares.plans.push(SharePlan {
            tag: tag.clone(),
            dir: dir.into(),
            socket: format!("/dev/shm/{tag}.sock").into(),
        });
        shares.shown.push(SharedDir { tag, target: mount.target.clone(), access: mount.access });
    }
    shares
}
