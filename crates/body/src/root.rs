//! What a Body's root is made of: the host's own areas, or a template's layers; snapshots above either.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use proto::{
    BodyId, Spec,
    launch::{FollowedMount, Lower, OverlayAccess, OverlayMount, SeedEntry, area_dir},
    spec::{HOME, Ids, Life, Mount, USER_ID},
    workspace::{CHANGES, CHANGES_SETTINGS, PLACE},
};

use crate::host::{HostRoot, RootInside, SnapshotLower as Snapshot};

/// What stands below a Body's upper.
#[derive(Debug, Clone, Default)]
pub struct RootfsStack {
    /// Snapshots, nearest first.
    pub snapshots: Vec<Snapshot>,
    /// A template's layers, nearest first; none where the host's own root is below.
    pub layers: Option<Vec<LowerLayer>>,
    /// Repositories.
    pub workspaces: Vec<WorkspaceLayers>,
    /// A home that is an area of its own, nearest first; none where it is a directory like others.
    pub home: Option<Vec<LowerLayer>>,
}

impl RootfsStack {
    /// The ids that what is below is written under.
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
    /// Where it is in the Body, without a leading `/`.
    pub at: String,
    /// Its files and its `.git`, nearest first.
    pub layers: Vec<LowerLayer>,
    /// What git calls the state they are in.
    pub token: String,
}

/// A layer below a Body.
#[derive(Debug, Clone)]
pub struct LowerLayer {
    /// Its files.
    pub root: PathBuf,
    /// The ids they are written under.
    pub ids: Ids,
}

/// The root of a Body that is about to be made.
#[derive(Debug)]
pub struct RootPlan<'a> {
    system: RootSystem<'a>,
    snapshots: &'a [Snapshot],
    workspaces: &'a [WorkspaceLayers],
    home: Option<&'a [LowerLayer]>,
}

/// Where its programs come from.
#[derive(Debug)]
enum RootSystem<'a> {
    /// The host, area by area.
    Host(HostRoot),
    /// A template, in one piece.
    Layers(&'a [LowerLayer]),
}

/// Directories that are always there and always directories, whatever a template or a Body made of them: things are
/// mounted on the first three.
const PLACES: &[&str] = &["proc", "sys", "dev", "etc"];
/// Directories that a fresh Body finds in order, also where a template left them out: path, mode.
const SCRATCH: &[(&str, u32)] = &[("tmp", 0o1777), ("run", 0o755), ("var", 0o755), ("var/tmp", 0o1777)];

impl<'a> RootPlan<'a> {
    /// The root of a Body with this under it.
    pub fn of(rootfs: &'a RootfsStack, spec: &Spec) -> Self {
        // A run is one command of one user; what a snapshot has changed stays changed.
        let plain = spec.life == Life::Run && spec.user != "root" && rootfs.snapshots.is_empty();
        let system = match &rootfs.layers {
            Some(layers) => RootSystem::Layers(layers),
            None => RootSystem::Host(HostRoot::inspect(if plain {
                RootInside::Never
            } else {
                RootInside::Possible
            })),
        };
        Self {
            system,
            snapshots: &rootfs.snapshots,
            workspaces: &rootfs.workspaces,
            home: rootfs.home.as_deref(),
        }
    }

    /// Its areas; the root itself first.
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

    /// A home stands on what templates and snapshots have where it is: what a repository needs is installed there.
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
                // It hides what is further below, or leads elsewhere.
                LowerEntry::Other => break,
            }
        }
        area
    }

    /// An area of layers under what snapshots changed in it.
    fn private(&self, at: String, layers: &[LowerLayer], owner: u32) -> OverlayMount {
        let above = self.above(&at);
        let own = layers
            .iter()
            .map(|layer| Lower { path: layer.root.clone(), written_as: Some(layer.ids.clone()) });
        let lowers = above.into_iter().chain(own).collect();
        OverlayMount { at, kind: OverlayAccess::Private, lowers, owner }
    }

    /// What snapshots changed in an area.
    fn above(&self, at: &str) -> Vec<Lower> {
        let above = self
            .snapshots
            .iter()
            .map(|below| Lower { path: below.dir.join(area_dir(at)), written_as: Some(below.ids.clone()) });
        above.filter(|lower| at.is_empty() || lower.path.is_dir()).collect()
    }

    /// The repositories whose changes the guest can tell: those that nothing is mounted in.
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

    /// The directories an upper needs.
    pub fn area_dirs(&self) -> Vec<String> {
        let mut dirs = match &self.system {
            RootSystem::Host(host) => host.area_dirs().collect(),
            RootSystem::Layers(_) => vec![area_dir("")],
        };
        dirs.extend(self.workspaces.iter().map(|workspace| area_dir(&workspace.at)));
        dirs.extend(self.home.map(|_| area_dir(HOME)));
        dirs
    }

    /// What a fresh Body finds in its upper. Over a snapshot only what makes it somebody else.
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
        // Over a snapshot it is there, and may have been changed; below a home of its own nobody sees it.
        if (!self.workspaces.is_empty() && self.snapshots.is_empty()) || self.home.is_some() {
            seeds.push(SeedEntry::Dir { path: "root/home".into(), mode: 0o755, owner: 0 });
            seeds.push(SeedEntry::Dir { path: format!("root/{HOME}"), mode: 0o755, owner: USER_ID });
        }
        seeds
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
            seeds.push(file("resolv.conf", "# This Body has no network but its own loopback.\n".to_owned()));
        }
        seeds
    }
}

/// What has git ask the guest.
pub fn followed_seed(followed: &[FollowedMount]) -> Option<SeedEntry> {
    let first = followed.first()?;
    let contents = format!(
        "[core]\n\tfsmonitor = /{}/{CHANGES}\n\tfsmonitorHookVersion = 2\n\tuntrackedCache = false\n",
        first.at
    );
    Some(SeedEntry::File { path: format!("root/{CHANGES_SETTINGS}"), contents })
}

/// What a directory that never changes has at a path.
enum LowerEntry {
    Dir(PathBuf),
    Nothing,
    Other,
}

/// Trust: a Body made that directory, and its root may have put links anywhere. None is followed.
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
