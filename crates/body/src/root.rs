//! The root file system of a Body: directories of the host or a template's layers, with snapshots above them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use proto::{
    BodyId, Mechanism, Spec,
    egress::CERTIFICATES,
    guest::EGRESS_DIR,
    launch::{FollowedMount, Lower, OverlayAccess, OverlayMount, SeedEntry, area_dir},
    spec::{HOME, Ids, Life, Mount, USER_ID},
    workspace::{CHANGES, CHANGES_SETTINGS, PLACE},
};

use crate::host::{HostRoot, RootInside, SnapshotLower as Snapshot};

/// The layers below a Body's upper.
#[derive(Debug, Clone, Default)]
pub struct RootfsStack {
    /// Snapshots, nearest first.
    pub snapshots: Vec<Snapshot>,
    /// A template's layers, nearest first; none if the root is the host's.
    pub layers: Option<Vec<LowerLayer>>,
    /// Repositories.
    pub workspaces: Vec<WorkspaceLayers>,
    /// The layers of a home that is a mount of its own, nearest first; none if it is an ordinary directory.
    pub home: Option<Vec<LowerLayer>>,
}

impl RootfsStack {
    /// The ids that own files of these layers.
    pub fn ids(&self) -> impl Iterator<Item = &Ids> {
        let layers = self
            .layers
            .iter()
            .chain(self.workspaces.iter().map(|workspace| &workspace.layers))
            .chain(&self.home);
        self.snapshots.iter().map(|snapshot| &snapshot.ids).chain(layers.flatten().map(|layer| &layer.ids))
    }
}

/// A repository below a Body.
#[derive(Debug, Clone)]
pub struct WorkspaceLayers {
    /// Its path in the Body, without a leading `/`.
    pub at: String,
    /// Its files and its `.git`, nearest first.
    pub layers: Vec<LowerLayer>,
    /// The token of git's fsmonitor for the state that they are in.
    pub token: String,
}

/// A layer below a Body's upper.
#[derive(Debug, Clone)]
pub struct LowerLayer {
    /// Its files.
    pub root: PathBuf,
    /// The ids that own its files.
    pub ids: Ids,
}

/// The root of a Body that is about to be created.
#[derive(Debug)]
pub struct RootPlan<'a> {
    system: RootSystem<'a>,
    snapshots: &'a [Snapshot],
    workspaces: &'a [WorkspaceLayers],
    home: Option<&'a [LowerLayer]>,
}

/// The origin of its programs.
#[derive(Debug)]
enum RootSystem<'a> {
    /// The host, one mount for each directory.
    Host(HostRoot),
    /// A template, in one mount.
    Layers(&'a [LowerLayer]),
}

/// Directories that always exist as directories, whatever a template or a Body made of them: the first three
/// are mount points.
const PLACES: &[&str] = &["proc", "sys", "dev", "etc"];
/// Directories that every fresh Body has, also if its template has none: path, mode.
const SCRATCH: &[(&str, u32)] = &[("tmp", 0o1777), ("run", 0o755), ("var", 0o755), ("var/tmp", 0o1777)];

impl<'a> RootPlan<'a> {
    /// The root of a Body with these layers.
    pub fn of(rootfs: &'a RootfsStack, spec: &Spec) -> Self {
        // A run is one command of one user; changes of a snapshot stay visible.
        let plain = spec.life == Life::Run && spec.user != "root" && rootfs.snapshots.is_empty();
        let system = match &rootfs.layers {
            Some(layers) => RootSystem::Layers(layers),
            None => {
                let masters = if plain { RootInside::Never } else { RootInside::Possible };
                RootSystem::Host(HostRoot::inspect(masters, &spec.mounts))
            }
        };
        Self {
            system,
            snapshots: &rootfs.snapshots,
            workspaces: &rootfs.workspaces,
            home: rootfs.home.as_deref(),
        }
    }

    /// Its mounts; the root itself first.
    pub fn areas(&self) -> Vec<OverlayMount> {
        let mut areas = match &self.system {
            RootSystem::Host(host) => host.areas(self.snapshots),
            RootSystem::Layers(layers) => vec![self.private(String::new(), layers, 0)],
        };
        areas.extend(
            self.workspaces
                .iter()
                .map(|workspace| self.private(workspace.at.clone(), &workspace.layers, USER_ID)),
        );
        areas.extend(self.home.map(|layers| self.home_area(layers)));
        areas
    }

    /// The path in the root at which a mount is attached.
    pub fn place_of(&self, target: &Path) -> PathBuf {
        match &self.system {
            RootSystem::Host(host) => host.place_of(target),
            RootSystem::Layers(_) => target.to_owned(),
        }
    }

    /// The directories that the host has lost since the root was made, for the record. `upper` is the Body's own.
    pub fn lost(&self, upper: &Path) -> Vec<Mechanism> {
        let RootSystem::Host(host) = &self.system else { return Vec::new() };
        let snapshots = self.snapshots.iter().filter(|below| !below.machine).map(|below| &*below.dir);
        let roots: Vec<PathBuf> =
            std::iter::once(upper).chain(snapshots).map(|dir| dir.join(area_dir(""))).collect();
        host.lost(&roots)
    }

    /// A home has the directories of templates and snapshots at its path as lowers, because dependencies of a
    /// repository are installed there.
    fn home_area(&self, layers: &[LowerLayer]) -> OverlayMount {
        let mut area = self.private(HOME.to_owned(), layers, USER_ID);
        let root = area_dir("");
        let snapshots = self.snapshots.iter().map(|below| (below.dir.join(&root), &below.ids));
        let template = match &self.system {
            RootSystem::Host(_) => &[][..],
            RootSystem::Layers(layers) => layers,
        };
        let template = template.iter().map(|layer| (layer.root.clone(), &layer.ids));
        for (root, ids) in snapshots.chain(template) {
            match dir_below(&root, HOME) {
                LowerEntry::Dir(path) => area.lowers.push(Lower { path, written_as: Some(ids.clone()) }),
                LowerEntry::Nothing => {}
                // It hides the layers below, or is a link to elsewhere.
                LowerEntry::Other => break,
            }
        }
        area
    }

    /// A mount of layers below the changes of snapshots.
    fn private(&self, at: String, layers: &[LowerLayer], owner: u32) -> OverlayMount {
        let above = self.above(&at);
        let own = layers
            .iter()
            .map(|layer| Lower { path: layer.root.clone(), written_as: Some(layer.ids.clone()) });
        let lowers = above.into_iter().chain(own).collect();
        OverlayMount { at, kind: OverlayAccess::Private, lowers, owner }
    }

    /// The changes of snapshots in a mount.
    fn above(&self, at: &str) -> Vec<Lower> {
        let above = self
            .snapshots
            .iter()
            .map(|below| Lower { path: below.dir.join(area_dir(at)), written_as: Some(below.ids.clone()) });
        above.filter(|lower| at.is_empty() || lower.path.is_dir()).collect()
    }

    /// The repositories whose changes the guest can report: those without another mount inside.
    pub fn followed(&self, mounts: &[Mount]) -> Vec<FollowedMount> {
        let whole = |at: &str| !mounts.iter().any(|mount| mount.target.starts_with(Path::new("/").join(at)));
        let followed = self.workspaces.iter().filter(|workspace| whole(&workspace.at));
        followed
            .map(|workspace| FollowedMount {
                at: workspace.at.clone(),
                token: workspace.token.clone(),
                above: self.above(&workspace.at).len(),
            })
            .collect()
    }

    /// The directories that an upper needs.
    pub fn area_dirs(&self) -> Vec<String> {
        let mut dirs = match &self.system {
            RootSystem::Host(host) => host.area_dirs().collect(),
            RootSystem::Layers(_) => vec![area_dir("")],
        };
        dirs.extend(self.workspaces.iter().map(|workspace| area_dir(&workspace.at)));
        dirs.extend(self.home.map(|_| area_dir(HOME)));
        dirs
    }

    /// The files of a fresh Body's upper. Above a snapshot, only the files that give the Body its identity.
    pub fn seeds(&self, body: &BodyId, machine_id: &str) -> Vec<SeedEntry> {
        let mut seeds = match &self.system {
            RootSystem::Host(host) => host.seeds(body, machine_id, self.snapshots),
            RootSystem::Layers(_) => self.template_seeds(body, machine_id),
        };
        if !self.workspaces.is_empty() {
            seeds.push(SeedEntry::Dir { path: format!("root/{PLACE}"), mode: 0o755, owner: USER_ID });
        }
        seeds.extend(self.workspaces.iter().map(|workspace| SeedEntry::Dir {
            path: format!("root/{}", workspace.at),
            mode: 0o755,
            owner: USER_ID,
        }));
        // A snapshot already has this directory, perhaps changed; a home of its own hides it.
        if (!self.workspaces.is_empty() && self.snapshots.is_empty()) || self.home.is_some() {
            seeds.push(SeedEntry::Dir { path: "root/home".into(), mode: 0o755, owner: 0 });
            seeds.push(SeedEntry::Dir { path: format!("root/{HOME}"), mode: 0o755, owner: USER_ID });
        }
        seeds
    }

    /// A link in the place of the system's trusted certificates to those of the Body's egress process.
    pub fn certificate_seeds(&self) -> Vec<SeedEntry> {
        let etc = match &self.system {
            RootSystem::Host(host) if !host.has("etc") => return Vec::new(),
            RootSystem::Host(_) => area_dir("etc"),
            RootSystem::Layers(_) => format!("{}/etc", area_dir("")),
        };
        let dir = |name: &&str| SeedEntry::Dir { path: format!("{etc}/{name}"), mode: 0o755, owner: 0 };
        let target = format!("{EGRESS_DIR}/{CERTIFICATES}");
        let link = SeedEntry::Link { path: format!("{etc}/{TRUST_FILE}"), target };
        TRUST_DIRS.iter().map(dir).chain([link]).collect()
    }

    fn template_seeds(&self, body: &BodyId, machine_id: &str) -> Vec<SeedEntry> {
        let dir = |path: &str, mode| SeedEntry::Dir { path: format!("root/{path}"), mode, owner: 0 };
        let file =
            |name: &str, contents: String| SeedEntry::File { path: format!("root/etc/{name}"), contents };
        let mut seeds: Vec<SeedEntry> = PLACES.iter().map(|path| dir(path, 0o755)).collect();
        seeds.push(file("hostname", format!("{body}\n")));
        seeds.push(file("machine-id", format!("{machine_id}\n")));
        seeds.push(file("hosts", format!("127.0.0.1 localhost {body}\n::1 localhost\n")));
        if self.snapshots.is_empty() {
            seeds.extend(SCRATCH.iter().map(|(path, mode)| dir(path, *mode)));
            seeds.push(file(
                "resolv.conf",
                "# A name server at 127.0.0.1 answers the names of the Body's network policy: pal net show\n"
                    .to_owned(),
            ));
        }
        seeds
    }
}

/// The paths below `/etc` where programs look for the certificates to trust that read no variable.
const TRUST_DIRS: &[&str] = &["ssl", "ssl/certs"];
const TRUST_FILE: &str = "ssl/certs/ca-certificates.crt";

/// The git configuration that makes git ask the guest for changes.
pub fn followed_seed(followed: &[FollowedMount]) -> Option<SeedEntry> {
    let first = followed.first()?;
    let contents = format!(
        "[core]\n\tfsmonitor = /{}/{CHANGES}\n\tfsmonitorHookVersion = 2\n\tuntrackedCache = false\n",
        first.at
    );
    Some(SeedEntry::File { path: format!("root/{CHANGES_SETTINGS}"), contents })
}

/// The kind of entry at a path in an immutable directory.
enum LowerEntry {
    Dir(PathBuf),
    Nothing,
    Other,
}

/// Trust: a Body made that directory, and its root may have put links anywhere. This function follows no
/// link.
fn dir_below(root: &Path, path: &str) -> LowerEntry {
    let mut place = root.to_owned();
    for part in path.split('/') {
        place.push(part);
        match fs::symlink_metadata(&place) {
            Ok(found) if found.is_dir() => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return LowerEntry::Nothing,
            _ => return LowerEntry::Other,
        }
    }
    LowerEntry::Dir(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_link_leads_a_home_elsewhere() {
        let root = std::env::temp_dir().join(format!("palisade-root-{}", std::process::id()));
        let made = |there: &str| {
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(root.join("elsewhere/user")).unwrap();
            match there {
                "link" => std::os::unix::fs::symlink("elsewhere", root.join("home")).unwrap(),
                "file" => drop(fs::write(root.join("home"), "")),
                "dir" => fs::create_dir_all(root.join("home/user")).unwrap(),
                _ => {}
            }
            match dir_below(&root, HOME) {
                LowerEntry::Dir(path) => path.strip_prefix(&root).unwrap().display().to_string(),
                LowerEntry::Nothing => "nothing".into(),
                LowerEntry::Other => "other".into(),
            }
        };
        assert_eq!(["dir", "link", "file", ""].map(made), ["home/user", "other", "other", "nothing"]);
        fs::remove_dir_all(&root).unwrap();
    }
}
