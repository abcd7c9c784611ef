//! What a Body's root is made of: the host's own areas, or a template's layers; snapshots above either.

use std::path::PathBuf;

use proto::{
    BodyId, Spec,
    launch::{Area, AreaKind, Lower, Seed, area_dir},
    spec::{Ids, Life, USER_ID},
    workspace::PLACE,
};

use crate::host::{Below, HostRoot, Masters};

/// What stands below a Body's upper.
#[derive(Debug, Clone, Default)]
pub struct Under {
    /// Snapshots, nearest first.
    pub snapshots: Vec<Below>,
    /// A template's layers, nearest first; none where the host's own root is below.
    pub layers: Option<Vec<LayerBelow>>,
    /// Repositories.
    pub workspaces: Vec<WorkspaceBelow>,
    /// What a machine is made from, on that layer.
    pub vm: Option<crate::vm::Parts>,
}

/// A repository below a Body.
#[derive(Debug, Clone)]
pub struct WorkspaceBelow {
    /// Where it is in the Body, without a leading `/`.
    pub at: String,
    /// Its files and its `.git`, nearest first.
    pub layers: Vec<LayerBelow>,
}

/// A layer below a Body.
#[derive(Debug, Clone)]
pub struct LayerBelow {
    /// Its files.
    pub root: PathBuf,
    /// The ids they are written under.
    pub ids: Ids,
}

/// The root of a Body that is about to be made.
#[derive(Debug)]
pub struct Root<'a> {
    system: System<'a>,
    snapshots: &'a [Below],
    workspaces: &'a [WorkspaceBelow],
}

/// Where its programs come from.
#[derive(Debug)]
enum System<'a> {
    /// The host, area by area.
    Host(HostRoot),
    /// A template, in one piece.
    Layers(&'a [LayerBelow]),
}

/// Directories that are always there and always directories, whatever a template or a Body made of them: things are
/// mounted on the first three.
const PLACES: &[&str] = &["proc", "sys", "dev", "etc"];
/// Directories that a fresh Body finds in order, also where a template left them out: path, mode.
const SCRATCH: &[(&str, u32)] = &[("tmp", 0o1777), ("run", 0o755), ("var", 0o755), ("var/tmp", 0o1777)];

impl<'a> Root<'a> {
    /// The root of a Body with this under it.
    pub fn of(under: &'a Under, spec: &Spec) -> Self {
        // A run is one command of one user; what a snapshot has changed stays changed.
        let plain = spec.life == Life::Run && spec.user != "root" && under.snapshots.is_empty();
        let system = match &under.layers {
            Some(layers) => System::Layers(layers),
            None => System::Host(HostRoot::look(if plain { Masters::None } else { Masters::Some })),
        };
        Self { system, snapshots: &under.snapshots, workspaces: &under.workspaces }
    }

    /// Its areas; the root itself first.
    pub fn areas(&self) -> Vec<Area> {
        let mut areas = match &self.system {
            System::Host(host) => host.areas(self.snapshots),
            System::Layers(layers) => vec![self.private(String::new(), layers, 0)],
        };
        areas.extend(self.workspaces.iter().map(|workspace| self.private(workspace.at.clone(), &workspace.layers, USER_ID)));
        areas
    }

    /// An area of layers under what snapshots changed in it.
    fn private(&self, at: String, layers: &[LayerBelow], owner: u32) -> Area {
        let above = self.snapshots.iter().map(|below| Lower { path: below.dir.join(area_dir(&at)), written_as: Some(below.ids.clone()) });
        let above = above.filter(|lower| at.is_empty() || lower.path.is_dir());
        let own = layers.iter().map(|layer| Lower { path: layer.root.clone(), written_as: Some(layer.ids.clone()) });
        let lowers = above.chain(own).collect();
        Area { at, kind: AreaKind::Private, lowers, owner }
    }

    /// The directories an upper needs.
    pub fn area_dirs(&self) -> Vec<String> {
        let mut dirs = match &self.system {
            System::Host(host) => host.area_dirs().collect(),
            System::Layers(_) => vec![area_dir("")],
        };
        dirs.extend(self.workspaces.iter().map(|workspace| area_dir(&workspace.at)));
        dirs
    }

    /// What a fresh Body finds in its upper. Over a snapshot only what makes it somebody else.
    pub fn seeds(&self, body: &BodyId, machine_id: &str) -> Vec<Seed> {
        let mut seeds = match &self.system {
            System::Host(host) => host.seeds(body, machine_id, self.snapshots),
            System::Layers(_) => self.template_seeds(body, machine_id),
        };
        if !self.workspaces.is_empty() {
            seeds.push(Seed::Dir { path: format!("root/{PLACE}"), mode: 0o755, owner: USER_ID });
        }
        seeds.extend(self.workspaces.iter().map(|workspace| Seed::Dir { path: format!("root/{}", workspace.at), mode: 0o755, owner: USER_ID }));
        seeds
    }

    fn template_seeds(&self, body: &BodyId, machine_id: &str) -> Vec<Seed> {
        let dir = |path: &str, mode| Seed::Dir { path: format!("root/{path}"), mode, owner: 0 };
        let file = |name: &str, contents: String| Seed::File { path: format!("root/etc/{name}"), contents };
        let mut seeds: Vec<Seed> = PLACES.iter().map(|path| dir(path, 0o755)).collect();
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
