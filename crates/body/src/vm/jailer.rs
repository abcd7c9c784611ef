//! Firecracker's jailer: a root with the jailer and the program that it executes, and its configuration for a
//! microVM.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use proto::vm::{JAILED, JailerPlan};
use sha2::{Digest, Sha256};

use super::{MicrovmInstall, VmError, VmStepExt, find_tool, hypervisor_root};
use crate::programs::Programs;

/// The name of the program.
pub const JAILER: &str = "jailer";
/// Prefix of the names of its roots.
pub const PREFIX: &str = "jail-";
/// The file in its root with the jailer's version.
const VERSION_FILE: &str = "version";
const VERSION_LEN_MAX: u64 = 200;
/// Space in a jail besides the programs that are copied into it.
const SLACK_BYTES: u64 = 4 << 20;
/// Increased when the layout of the root changes.
const LAYOUT: u32 = 1;

/// The jailer of a microVM.
#[derive(Debug, Clone)]
pub enum JailSetup {
    /// The jailer is used.
    Used {
        /// Its root.
        root: PathBuf,
        /// The version that it reports.
        version: String,
        /// Memory that a jail takes.
        bytes: u64,
    },
    /// The jailer is not used.
    Absent {
        /// The reason.
        why: String,
    },
}

impl JailSetup {
    /// The jailer's part of the launch plan; `threads` limits the cgroup that the jailer creates, where it
    /// may create one.
    pub fn plan(&self, threads: Option<u32>) -> JailerPlan {
        match self {
            Self::Used { version, bytes, .. } => {
                JailerPlan::Used { version: version.clone(), bytes: *bytes, threads }
            }
            Self::Absent { why } => JailerPlan::Absent { why: why.clone() },
        }
    }

    /// Its root, if it is used.
    pub fn root(&self) -> Option<&Path> {
        match self {
            Self::Used { root, .. } => Some(root),
            Self::Absent { .. } => None,
        }
    }
}

/// The path of the jailer on this host: next to Firecracker, under the name that releases give it there, or
/// in PATH.
pub fn find(firecracker: &Path) -> Option<PathBuf> {
    let name = firecracker.file_name().and_then(|name| name.to_str());
    let alike = name.and_then(|name| name.strip_prefix(JAILED)).map(|rest| format!("{JAILER}{rest}"));
    let beside = alike.into_iter().chain([JAILER.to_owned()]).map(|name| firecracker.with_file_name(name));
    let mut beside = beside.filter(|path| path.is_file());
    beside.next().or_else(|| find_tool(JAILER).ok())
}

/// Whether the jailer is statically linked. It leaves the root with its libraries before it has done its
/// work.
pub fn is_whole(jailer: &Path) -> bool {
    hypervisor_root::libraries(jailer).unwrap_or_default().is_empty()
}

impl MicrovmInstall {
    /// The path of its root, named by the states of both programs.
    pub fn jail(&self, jailer: &Path, programs: &Programs) -> Result<PathBuf, VmError> {
        let found = fs::metadata(jailer).step("read the jailer's metadata")?;
        let launch = programs.launch.file_name().unwrap_or_default().to_string_lossy();
        let mark = format!("{LAYOUT}-{}-{}-{}-{launch}", found.len(), found.mtime(), found.ino());
        Ok(self.dir().join(format!("{PREFIX}{}", &proto::event::hex(&Sha256::digest(&mark))[..16])))
    }

    /// Builds its root.
    pub fn make_jail(
        &self,
        place: &Path,
        jailer: &Path,
        programs: &Programs,
        version: &str,
    ) -> Result<(), VmError> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        self.whole_dir(&name, |root| {
            for (from, to) in [(jailer, JAILER), (&programs.launch, JAILED)] {
                let to = root.join(to);
                let everybodys = || fs::set_permissions(&to, fs::Permissions::from_mode(0o755));
                fs::copy(from, &to).and_then(|_| everybodys()).step("copy the jailer")?;
            }
            fs::write(root.join(VERSION_FILE), version).step("copy the jailer")
        })
    }
}

/// The jailer in a root that was built for this Firecracker.
pub fn of(place: PathBuf, firecracker: &Path) -> Result<JailSetup, VmError> {
    let version =
        sys::fd::read_small(&place.join(VERSION_FILE), VERSION_LEN_MAX).step("read the jailer's version")?;
    let len = |path: &Path| fs::metadata(path).map(|found| found.len()).step("read the jailer's metadata");
    let bytes = len(firecracker)? + len(&place.join(JAILED))? + SLACK_BYTES;
    Ok(JailSetup::Used { root: place, version, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_beside_firecracker_as_releases_name_it() {
        let dir = std::env::temp_dir().join(format!("pal-jailer-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let check = |firecracker: &str, there: &[&str], found: &str| {
            there.iter().for_each(|name| fs::write(dir.join(name), "").unwrap());
            assert_eq!(find(&dir.join(firecracker)), Some(dir.join(found)));
            there.iter().for_each(|name| fs::remove_file(dir.join(name)).unwrap());
        };
        check("firecracker", &["jailer", "jailer-v2"], "jailer");
        check("firecracker-v1.15.1-x86_64", &["jailer", "jailer-v1.15.1-x86_64"], "jailer-v1.15.1-x86_64");
        check("firecracker-v1.15.1-x86_64", &["jailer"], "jailer");
        check("fc", &["jailer"], "jailer");
        fs::remove_dir_all(dir).unwrap();
    }
}
