//! Firecracker's jailer, and what it executes: a root with both programs, and what a machine is told of it.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use proto::vm::{JAILED, JailerPlan};
use sha2::{Digest, Sha256};

use super::{MicrovmInstall, VmError, VmStepExt, find_tool, hypervisor_root};
use crate::programs::Programs;

/// What it is called.
pub const JAILER: &str = "jailer";
/// How the names of its roots begin.
pub const PREFIX: &str = "jail-";
/// What it says of its version, in its root.
const VERSION_FILE: &str = "version";
const VERSION_LEN_MAX: u64 = 200;
/// What a jail holds besides the programs that are copied into it.
const SLACK_BYTES: u64 = 4 << 20;
/// Grows when the root is laid out anew.
const LAYOUT: u32 = 1;

/// The jailer of a machine.
#[derive(Debug, Clone)]
pub enum JailSetup {
    /// It is used.
    Used {
        /// Its root.
        root: PathBuf,
        /// What it says of its version.
        version: String,
        /// Memory that a jail takes.
        bytes: u64,
    },
    /// It is not, because of this.
    Absent {
        /// Why.
        why: String,
    },
}

impl JailSetup {
    /// As a launcher is told; `threads` bounds the group that the jailer makes, where it may make one.
    pub fn plan(&self, threads: Option<u32>) -> JailerPlan {
        match self {
            Self::Used { version, bytes, .. } => {
                JailerPlan::Used { version: version.clone(), bytes: *bytes, threads }
            }
            Self::Absent { why } => JailerPlan::Absent { why: why.clone() },
        }
    }

    /// Its root, where it is used.
    pub fn root(&self) -> Option<&Path> {
        match self {
            Self::Used { root, .. } => Some(root),
            Self::Absent { .. } => None,
        }
    }
}

/// Where it is on this host: beside Firecracker, under the name that releases give it there, or where programs are.
pub fn find(firecracker: &Path) -> Option<PathBuf> {
    let name = firecracker.file_name().and_then(|name| name.to_str());
    let alike = name.and_then(|name| name.strip_prefix(JAILED)).map(|rest| format!("{JAILER}{rest}"));
    let beside = alike.into_iter().chain([JAILER.to_owned()]).map(|name| firecracker.with_file_name(name));
    let mut beside = beside.filter(|path| path.is_file());
    beside.next().or_else(|| find_tool(JAILER).ok())
}

/// Whether it was linked whole. It leaves the root in which libraries would be found before it has done its work.
pub fn is_whole(jailer: &Path) -> bool {
    hypervisor_root::libraries(jailer).unwrap_or_default().is_empty()
}

impl MicrovmInstall {
    /// Where its root is or will be: named by the states of both programs.
    pub fn jail(&self, jailer: &Path, programs: &Programs) -> Result<PathBuf, VmError> {
        let found = fs::metadata(jailer).step("look at the jailer")?;
        let launch = programs.launch.file_name().unwrap_or_default().to_string_lossy();
        let mark = format!("{LAYOUT}-{}-{}-{}-{launch}", found.len(), found.mtime(), found.ino());
        Ok(self.dir().join(format!("{PREFIX}{}", &proto::event::hex(&Sha256::digest(&mark))[..16])))
    }

    /// Puts its root together.
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

/// The jailer whose root was put together there, for this Firecracker.
pub fn of(place: PathBuf, firecracker: &Path) -> Result<JailSetup, VmError> {
    let version =
        sys::fd::read_small(&place.join(VERSION_FILE), VERSION_LEN_MAX).step("look at the jailer")?;
    let len = |path: &Path| fs::metadata(path).map(|found| found.len()).step("look at the jailer");
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
