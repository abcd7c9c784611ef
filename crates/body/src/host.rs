//! Template `host`: programs of the host, and nothing else of it.
//!
//! This is an allow-list: a path that is not listed here is not in the Body. `/home`, `/root`, `/run`,
//! `/srv`, `/mnt`, `/var` of the host, sockets of daemons, other Bodies and our own data do not exist there.
//!
//! Invariant: the list is compared with the host at each start, so a root that was made earlier starts whatever
//! the host has gained or lost since.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use proto::{
    BodyId, Mechanism, SnapshotId,
    launch::{Lower, OverlayAccess, OverlayMount, SeedEntry, area_dir},
    spec::{Ids, Mount, USER_ID},
};

/// Directories of the host that hold programs and their settings. Programs are read-only binds; directories
/// that root of a Body may change get a private overlay.
const SHOWN: &[(&str, OverlayAccess)] = &[
    ("usr", OverlayAccess::ReadOnly),
    ("usr/local", OverlayAccess::Private),
    ("etc", OverlayAccess::Private),
    ("opt", OverlayAccess::Private),
    ("bin", OverlayAccess::ReadOnly),
    ("sbin", OverlayAccess::ReadOnly),
    ("lib", OverlayAccess::ReadOnly),
    ("lib32", OverlayAccess::ReadOnly),
    ("lib64", OverlayAccess::ReadOnly),
    ("libx32", OverlayAccess::ReadOnly),
    ("nix", OverlayAccess::ReadOnly),
    ("gnu", OverlayAccess::ReadOnly),
];

/// Settings of the host that hold secrets or describe other hosts, in case they are readable.
pub(crate) const HIDDEN_SETTINGS: &[&str] = &[
    "boto.cfg",
    "containerd",
    "docker",
    "kubernetes",
    "letsencrypt",
    "NetworkManager",
    "openvpn",
    "rancher",
    "ssh",
    "sudoers.d",
    "wireguard",
];

/// Further directories that a system expects: path, mode, owner inside.
const DIRS: &[(&str, u32, u32)] = &[
    ("root/home", 0o755, 0),
    ("root/home/user", 0o755, USER_ID),
    ("root/root", 0o700, 0),
    ("root/tmp", 0o1777, 0),
    ("root/run", 0o755, 0),
    ("root/run/lock", 0o1777, 0),
    ("root/var", 0o755, 0),
    ("root/var/tmp", 0o1777, 0),
    ("root/var/lib", 0o755, 0),
    ("root/var/log", 0o755, 0),
    ("root/var/cache", 0o755, 0),
    ("root/mnt", 0o755, 0),
    ("root/srv", 0o755, 0),
    ("root/proc", 0o555, 0),
    ("root/sys", 0o555, 0),
    ("root/dev", 0o755, 0),
];
/// Directories of `/usr/local` where root of a Body may add programs, although the lower ones belong to the
/// host.
const LOCAL_DIRS: &[&str] = &["bin", "sbin", "lib", "share", "include", "etc", "src"];

/// A snapshot below a Body.
#[derive(Debug, Clone)]
pub struct SnapshotLower {
    /// Its id.
    pub id: SnapshotId,
    /// Its directory.
    pub dir: PathBuf,
    /// The ids that own its files.
    pub ids: Ids,
    /// Whether it holds the disk of a microVM instead of files.
    pub machine: bool,
    /// Whether it is a dependency layer.
    pub dependency: bool,
}

/// The parts of the host's root that Bodies see.
#[derive(Debug)]
pub struct HostRoot {
    shown: Vec<(&'static str, OverlayAccess)>,
    links: Vec<(&'static str, String)>,
    /// Directories of the list that the host does not have.
    missing: Vec<&'static str>,
    /// Mount points of the spec below `shown`: whether it is a directory, and its path.
    places: Vec<(bool, PathBuf)>,
}

/// Whether a process in a Body can be root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootInside {
    /// A process may become root.
    Possible,
    /// No process can be root. Directories that only root could change are bound as they are, which costs the
    /// kernel less time.
    Never,
}

/// Directories that only root has reason to change.
const OF_ROOT: &[&str] = &["usr/local", "opt"];

impl HostRoot {
    /// Inspects the host's root, for a Body with these mounts.
    pub fn inspect(masters: RootInside, mounts: &[Mount]) -> Self {
        let mut found =
            Self { shown: Vec::new(), links: Vec::new(), missing: Vec::new(), places: Vec::new() };
        for (name, kind) in SHOWN {
            let path = Path::new("/").join(name);
            let has_mount = mounts.iter().any(|mount| mount.target.starts_with(&path));
            let unchanged = masters == RootInside::Never && OF_ROOT.contains(name) && !has_mount;
            let kind = if unchanged { OverlayAccess::ReadOnly } else { *kind };
            match std::fs::symlink_metadata(&path) {
                // It is visible as a part of its parent directory.
                Ok(what) if what.is_dir() && unchanged && name.contains('/') => {}
                Ok(what) if what.is_dir() => found.shown.push((name, kind)),
                Ok(what) if what.is_symlink() => {
                    let target = std::fs::read_link(&path).unwrap_or_default();
                    found.links.push((name, target.to_string_lossy().into_owned()));
                }
                // A snapshot or an upper may have files of the Body there.
                _ if kind == OverlayAccess::Private && !name.contains('/') => found.shown.push((name, kind)),
                _ => found.missing.push(name),
            }
        }
        mounts.iter().for_each(|mount| found.make_place(mount));
        found
    }

    /// Makes room for a mount point below a directory of the host. A directory that is bound read-only becomes an
    /// overlay if the host does not have the mount point.
    fn make_place(&mut self, mount: &Mount) {
        let target = self.place_of(&mount.target);
        let above = |(name, _): &&mut (&str, OverlayAccess)| target.starts_with(Path::new("/").join(name));
        let nearest = self.shown.iter_mut().filter(above).max_by_key(|(name, _)| name.len());
        let Some((_, kind)) = nearest else { return };
        if *kind == OverlayAccess::ReadOnly && !target.exists() {
            *kind = OverlayAccess::Private;
        }
        if *kind == OverlayAccess::Private {
            self.places.push((mount.source.is_dir(), target));
        }
    }

    /// The path of a mount point behind the links of the root, such as `/bin`: no link is followed later.
    pub fn place_of(&self, target: &Path) -> PathBuf {
        let behind = self.links.iter().find_map(|(name, to)| {
            let rest = target.strip_prefix(Path::new("/").join(name)).ok()?;
            let plain = Path::new(to).components().all(|part| matches!(part, Component::Normal(_)));
            plain.then(|| Path::new("/").join(to).join(rest))
        });
        behind.unwrap_or_else(|| target.to_owned())
    }

    /// The directories of the host that a root was made with and that the host has lost. The root keeps an empty mount
    /// point of each; a directory with something in it is the Body's own.
    pub fn lost(&self, roots: &[PathBuf]) -> Vec<Mechanism> {
        let is_mount_point = |path: PathBuf| {
            fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir())
                && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
        };
        let lost =
            self.missing.iter().filter(|name| roots.iter().any(|root| is_mount_point(root.join(name))));
        lost.map(|name| {
            let reason = "the host had it when this root was made, and has lost it: it is empty";
            Mechanism::degraded(format!("host /{name}"), reason)
        })
        .collect()
    }

    /// The mounts of a Body: the root itself, then the visible parts of the host, each above the snapshots
    /// that hold it.
    pub fn areas(&self, snapshots: &[SnapshotLower]) -> Vec<OverlayMount> {
        let areas = std::iter::once(("", OverlayAccess::Private)).chain(self.shown.iter().copied());
        areas
            .map(|(at, kind)| OverlayMount {
                at: at.to_owned(),
                kind,
                lowers: lowers(at, snapshots),
                owner: 0,
            })
            .collect()
    }

    /// The directories that an upper needs.
    pub fn area_dirs(&self) -> impl Iterator<Item = String> {
        let private =
            self.shown.iter().filter(|(_, kind)| *kind == OverlayAccess::Private).map(|(at, _)| *at);
        std::iter::once("").chain(private).map(area_dir)
    }

    /// The visible directories, and links next to them.
    pub(crate) fn names_and_links(&self) -> (Vec<&'static str>, Vec<(String, String)>) {
        (
            self.shown.iter().map(|(at, _)| *at).filter(|at| Path::new("/").join(at).is_dir()).collect(),
            self.links.iter().map(|(name, target)| ((*name).to_owned(), target.clone())).collect(),
        )
    }

    /// Whether the Body sees this directory of the host.
    pub fn has(&self, at: &str) -> bool {
        self.shown.iter().any(|(name, _)| *name == at)
    }

    /// The files of a fresh Body's upper. Above a snapshot, only the files that give the Body its identity.
    pub fn seeds(&self, body: &BodyId, machine_id: &str, snapshots: &[SnapshotLower]) -> Vec<SeedEntry> {
        let file = |path: &str, contents: String| SeedEntry::File { path: format!("etc/{path}"), contents };
        let mut seeds: Vec<SeedEntry> = Vec::new();
        if snapshots.is_empty() {
            seeds.extend(DIRS.iter().map(|(path, mode, owner)| dir(path, *mode, *owner)));
        }
        // A snapshot was made when the host had other directories, perhaps.
        let places = self.shown.iter().filter(|(name, _)| !name.contains('/'));
        seeds.extend(places.map(|(name, _)| dir(&format!("root/{name}"), 0o755, 0)));
        seeds.extend(
            self.links.iter().map(|(name, target)| SeedEntry::Link {
                path: format!("root/{name}"),
                target: target.clone(),
            }),
        );
        if snapshots.is_empty() && self.has("usr/local") {
            seeds.extend(LOCAL_DIRS.iter().map(|name| dir(&format!("usr-local/{name}"), 0o755, 0)));
        }
        seeds.extend(self.places.iter().flat_map(|(is_dir, place)| self.place_seeds(*is_dir, place)));
        if !self.has("etc") {
            return seeds;
        }
        seeds.push(file("hostname", format!("{body}\n")));
        seeds.push(file("machine-id", format!("{machine_id}\n")));
        seeds.push(file("hosts", format!("127.0.0.1 localhost {body}\n::1 localhost\n")));
        if snapshots.is_empty() {
            seeds.push(file("passwd", accounts("/etc/passwd", PASSWD_OURS)));
            seeds.push(file("group", accounts("/etc/group", GROUP_OURS)));
            seeds.push(file(
                "resolv.conf",
                "# A name server at 127.0.0.1 answers the names of the Body's network policy: pal net show\n"
                    .to_owned(),
            ));
            // Also hides files that do not exist yet.
            seeds
                .extend(HIDDEN_SETTINGS.iter().map(|name| SeedEntry::Hidden { path: format!("etc/{name}") }));
        }
        seeds
    }
}

/// The directories of the host that one of these roots was made with and that the host has lost.
pub fn lost_directories(roots: &[PathBuf]) -> Vec<Mechanism> {
    HostRoot::inspect(RootInside::Possible, &[]).lost(roots)
}

impl HostRoot {
    /// The entries of an upper that make a mount point. Directories of the host belong to an id that the Body does not
    /// have, so nothing could be made in them later.
    fn place_seeds(&self, is_dir: bool, place: &Path) -> Vec<SeedEntry> {
        let above = |(name, _): &&(&str, OverlayAccess)| place.starts_with(Path::new("/").join(name));
        let Some((name, _)) = self.shown.iter().filter(above).max_by_key(|(name, _)| name.len()) else {
            return Vec::new();
        };
        let Ok(rest) = place.strip_prefix(Path::new("/").join(name)) else { return Vec::new() };
        let mut path = area_dir(name);
        let parts: Vec<&str> = rest.iter().filter_map(|part| part.to_str()).collect();
        let mut seeds = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            path = format!("{path}/{part}");
            let is_last = index + 1 == parts.len();
            seeds.push(match is_last && !is_dir {
                true => SeedEntry::File { path: path.clone(), contents: String::new() },
                false => dir(&path, 0o755, 0),
            });
        }
        seeds
    }
}

fn dir(path: &str, mode: u32, owner: u32) -> SeedEntry {
    SeedEntry::Dir { path: path.to_owned(), mode, owner }
}

fn lowers(at: &str, snapshots: &[SnapshotLower]) -> Vec<Lower> {
    let held = snapshots.iter().map(|below| (below.dir.join(area_dir(at)), &below.ids));
    let held = held.filter(|(path, _)| path.is_dir());
    let mut lowers: Vec<Lower> =
        held.map(|(path, ids)| Lower { path, written_as: Some(ids.clone()) }).collect();
    let of_host = Path::new("/").join(at);
    if !at.is_empty() && of_host.is_dir() {
        lowers.push(Lower { path: of_host, written_as: None });
    }
    lowers
}

const PASSWD_OURS: &[&str] = &[
    "root:x:0:0:root:/root:/bin/bash",
    "user:x:1000:1000::/home/user:/bin/bash",
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
];
const GROUP_OURS: &[&str] = &["root:x:0:", "user:x:1000:", "nogroup:x:65534:"];
/// Ids up to this are system ids, with the same meaning on every host.
const SYSTEM_ID_MAX: u32 = 999;

/// The system's accounts and ours, but no accounts of people on this host.
fn accounts(file: &str, ours: &[&str]) -> String {
    let host = std::fs::read_to_string(file).unwrap_or_default();
    let mut lines: Vec<String> = ours.iter().map(|line| (*line).to_owned()).collect();
    let taken = |name: &str| ours.iter().any(|line| line.split(':').next() == Some(name));
    for line in host.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let system =
            fields.get(2).and_then(|id| id.parse().ok()).is_some_and(|id: u32| id > 0 && id <= SYSTEM_ID_MAX);
        if !system || taken(fields[0]) {
            continue;
        }
        // Members of a system group are people on this host, so they are removed.
        lines.push(if fields.len() == 4 {
            format!("{}:x:{}:", fields[0], fields[2])
        } else {
            line.to_owned()
        });
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_shows_programs_and_no_people() {
        let root = HostRoot::inspect(RootInside::Possible, &[]);
        assert!(root.has("usr") && root.has("etc"));
        for secret in ["home", "root", "run", "srv", "mnt", "media", "var", "tmp", "boot"] {
            assert!(!root.has(secret));
        }
        let plain = HostRoot::inspect(RootInside::Never, &[]);
        assert_eq!(plain.area_dirs().collect::<Vec<_>>(), ["root", "etc"], "the rest is as the host has it");
        assert!(!plain.has("usr/local") && plain.has("usr"));
        let text = accounts("/etc/passwd", PASSWD_OURS);
        assert_eq!(text.lines().filter(|line| line.contains(":1000:")).count(), 1);
        assert!(text.starts_with("root:x:0:0:"));
    }
}
