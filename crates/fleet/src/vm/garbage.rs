//! Garbage of microVMs: boot snapshots, images and initramfs images that no Body needs any more, and kernels and
//! hypervisors of earlier setups. All of it can be created again.
//!
//! Invariant: files that a running microVM uses stay; a Body and a snapshot keep their images by hard links of their
//! own.
//! Invariant: files that another data directory shares with this one are left to that directory.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use body::{
    driver::{DriverGarbage, LayerInUse},
    vm::{SetupRecord, host_images, images, jailer, setup, virtiofsd},
};

use super::{Microvms, boot_snapshot::AGE_MAX};

/// How long an image of an earlier state of this host is kept: that state may come back.
const HOST_AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

impl Microvms {
    /// Finds the files of microVMs that no Body needs any more.
    pub(super) fn find_garbage(&self, in_use: LayerInUse) -> Vec<DriverGarbage> {
        let install = self.install();
        let Ok(setup) = install.setup() else { return Vec::new() };
        if install.dir().is_symlink() {
            return Vec::new();
        }
        let item = |kind, path: PathBuf, why| DriverGarbage { kind, bytes: bytes(&path), path, why };
        let snapshots = self.old_warm(&setup).into_iter().map(|(path, why)| item("boot snapshot", path, why));
        let images = self
            .old_images(&install.dir().join("images"))
            .into_iter()
            .map(|path| item("image", path, "its template or host state is gone"));
        let parts = match in_use {
            LayerInUse::Yes => Vec::new(),
            LayerInUse::No => self.old_parts(install.dir(), &setup),
        };
        let parts = parts.into_iter().map(|path| item("microvm parts", path, "a newer version replaced it"));
        snapshots.chain(images).chain(parts).collect()
    }

    fn old_warm(&self, setup: &SetupRecord) -> Vec<(PathBuf, &'static str)> {
        let dir = self.boot_snapshot_dir();
        // A process that creates a boot snapshot holds this lock.
        let Ok(lock) = fs::File::create(dir.join("lock")) else { return Vec::new() };
        if rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return Vec::new();
        }
        let paths = entries(&dir).into_iter().filter(|path| path.is_dir());
        paths.filter_map(|path| self.why_old(&path, setup).map(|why| (path, why))).collect()
    }

    fn why_old(&self, path: &Path, setup: &SetupRecord) -> Option<&'static str> {
        if path.extension().is_some() {
            return Some("it is incomplete");
        }
        match self.boot_snapshot_at(path) {
            None => Some("its record cannot be read"),
            Some(machine) if machine.engine != setup.engine || machine.kernel != setup.kernel => {
                Some("it was taken with another kernel or hypervisor")
            }
            Some(_) => is_older(path, AGE_MAX).then_some("it was not used for a week"),
        }
    }

    fn old_images(&self, dir: &Path) -> Vec<PathBuf> {
        let (layers, snapshots) = (self.context.data.join("layers"), self.context.data.join("snapshots"));
        let needless = |path: &PathBuf| {
            let name = name_of(path);
            match (name.strip_suffix(".erofs"), path.extension().and_then(|end| end.to_str())) {
                (Some(name), _) => {
                    match (name.strip_prefix(images::LAYERS), name.strip_prefix(images::SNAPSHOTS)) {
                        (Some(layer), _) => {
                            !layers.join(layer.split('-').next().unwrap_or_default()).exists()
                        }
                        (None, Some(part)) => {
                            !snapshots.join(part.split('-').next().unwrap_or_default()).exists()
                        }
                        (None, None) => {
                            let may_go = name.starts_with("host-")
                                && !host_images::is_current(dir, &name_of(path))
                                || name.starts_with(images::PACKS);
                            may_go && is_older(path, HOST_AGE_MAX)
                        }
                    }
                }
                (None, Some(end)) => end
                    .strip_prefix("part")
                    .and_then(|maker| maker.parse::<u32>().ok())
                    .is_some_and(|maker| !Path::new("/proc").join(maker.to_string()).exists()),
                (None, None) => false,
            }
        };
        entries(dir).into_iter().filter(needless).collect()
    }

    /// Kernels, hypervisors and initramfs images other than those of the current setup.
    fn old_parts(&self, dir: &Path, setup: &SetupRecord) -> Vec<PathBuf> {
        let sharer = virtiofsd::find().and_then(|program| virtiofsd::name(&program)).unwrap_or_default();
        let today = [
            setup.kernel.as_str(),
            setup.engine.as_str(),
            &setup::share_modules(&setup.kernel),
            &setup::redirect_modules(&setup.kernel),
            &sharer,
        ];
        let old = |path: &PathBuf| {
            let name = name_of(path);
            ["kernel-", "engine-", "sharing-", "redirect-", virtiofsd::PREFIX, jailer::PREFIX]
                .iter()
                .any(|begins| name.starts_with(begins))
                && !today.contains(&name.as_str())
        };
        let version = name_of(&self.context.launch.programs.launch);
        let initrds = entries(&dir.join("initrd")).into_iter().filter(|path| {
            !name_of(path).contains(&format!("-{version}")) || !name_of(path).starts_with(&setup.kernel)
        });
        entries(dir).into_iter().filter(old).chain(initrds).collect()
    }

    /// The disk usage of microVMs: kind and bytes of each item.
    pub(super) fn measure_parts(&self) -> Vec<(&'static str, u64)> {
        let ground = self.install();
        let of = |place: &str, kind: &'static str| {
            entries(&ground.dir().join(place))
                .into_iter()
                .filter(|path| name_of(path) != "lock")
                .map(move |path| (kind, bytes(&path)))
        };
        let warm = entries(&self.boot_snapshot_dir())
            .into_iter()
            .filter(|path| path.is_dir())
            .map(|path| ("boot snapshots", own_bytes(&path)));
        warm.chain(of("images", "microVM images")).collect()
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn is_older(path: &Path, age: Duration) -> bool {
    let at = fs::metadata(path).and_then(|found| found.modified()).unwrap_or(SystemTime::now());
    at.elapsed().is_ok_and(|elapsed| elapsed > age)
}

fn bytes(path: &Path) -> u64 {
    if path.is_dir() { own_bytes(path) } else { body::vm::disks::used(path) }
}

/// The size of a directory without images, which other directories share.
fn own_bytes(dir: &Path) -> u64 {
    entries(dir)
        .iter()
        .filter(|path| !name_of(path).starts_with("image"))
        .map(|path| if path.is_dir() { own_bytes(path) } else { body::vm::disks::used(path) })
        .sum()
}
