//! The program that shares directories of the host with machines, live: virtiofsd in a root of its own.
//!
//! Invariant: its root holds the program, its libraries and places for what it shares, and nothing else of this host.

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

/// What it is called.
pub const VIRTIOFSD: &str = "virtiofsd";
/// Where distributions put it: it is not for people to start.
const PLACES: &[&str] =
    &["/usr/local/libexec", "/usr/libexec", "/usr/lib/qemu", "/usr/lib", "/usr/local/bin", "/usr/bin"];
/// Where it is in its own root.
const INSIDE: &str = "/usr/bin/virtiofsd";
/// Where what it shares is, in its own root.
const DIRS: &str = "/shares";
/// Most directories of one machine.
pub const SHARES_MAX: usize = 4;
/// How the names of its roots begin.
pub const PREFIX: &str = "share-";
/// Grows when the root is laid out anew.
const LAYOUT: u32 = 1;

/// Where it is on this host.
pub fn find() -> Result<PathBuf, VmError> {
    let found = PLACES.iter().map(|dir| Path::new(dir).join(VIRTIOFSD)).find(|path| path.is_file());
    found.ok_or(VmError::Missing(VIRTIOFSD))
}

/// What its root is called: by the state of the program, without reading it.
pub fn name(program: &Path) -> Result<String, VmError> {
    let found = fs::metadata(program).step("look at virtiofsd")?;
    let mark = format!("{LAYOUT}-{}-{}-{}", found.len(), found.mtime(), found.ino());
    Ok(format!("{PREFIX}{}", &proto::event::hex(&Sha256::digest(&mark))[..16]))
}

impl MicrovmInstall {
    /// The root of the program that shares directories, made where that was not done.
    pub fn sharer(&self) -> Result<PathBuf, VmError> {
        let program = find()?;
        let name = name(&program)?;
        self.whole_dir(&name, |root| {
            hypervisor_root::put_with_libraries(&program, Path::new(INSIDE), root)?;
            let shares = (0..SHARES_MAX).map(|index| format!("{}/{index}", &DIRS[1..]));
            for dir in ["proc".to_owned()].into_iter().chain(shares) {
                fs::create_dir_all(root.join(dir)).step("make the root of virtiofsd")?;
            }
            Ok(())
        })?;
        Ok(self.dir().join(name))
    }
}

/// The shares of a machine, in the words of everybody who takes part.
#[derive(Debug, Default)]
pub struct ShareSetup {
    /// What is mounted in the hypervisor's root.
    pub mounts: Vec<Mount>,
    /// For whoever starts the program.
    pub plans: Vec<SharePlan>,
    /// For the guest.
    pub shown: Vec<SharedDir>,
    /// The program, in its root.
    pub program: Option<PathBuf>,
}

/// Those of a Body; none where it has no program that shares.
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
