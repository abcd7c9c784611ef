//! What a Body's root is made of: the host's own areas, or a template's layers; snapshots above either.

use std::path::PathBuf;

use proto::{
    BodyId, Spec,
    launch::{Area, AreaKind, Lower, Seed, area_dir},
    spec::{Ids, Life},
};

use crate::host::{Below, HostRoot, Masters};

/// What stands below a Body's upper.
#[derive(Debug, Clone, Default)]
pub struct Under {
    /// Snapshots, nearest first.
    pub snapshots: Vec<Below>,
    /// A template's layers, nearest first; none where the host's own root is below.
    pub layers: Option<Vec<LayerBelow>>,
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
pub enum Root<'a> {
    /// The host's own, area by area.
    Host(HostRoot, &'a [Below]),
    /// A template's, in one piece.
    Layers(&'a [LayerBelow], &'a [Below]),
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
        match &under.layers {
            Some(layers) => Self::Layers(layers, &under.snapshots),
            None => Self::Host(HostRoot::look(if plain { Masters::None } else { Masters::Some }), &under.snapshots),
        }
    }

    /// Its areas; the root itself first.
    pub fn areas(&self) -> Vec<Area> {
        match self {
            Self::Host(host, snapshots) => host.areas(snapshots),
            Self::Layers(layers, snapshots) => {
                let above = snapshots.iter().map(|below| Lower { path: below.dir.join(area_dir("")), written_as: Some(below.ids.clone()) });
                let own = layers.iter().map(|layer| Lower { path: layer.root.clone(), written_as: Some(layer.ids.clone()) });
                vec![Area { at: String::new(), kind: AreaKind::Private, lowers: above.chain(own).collect() }]
            }
        }
    }

    /// The directories an upper needs.
    pub fn area_dirs(&self) -> Vec<String> {
        match self {
            Self::Host(host, _) => host.area_dirs().collect(),
            Self::Layers(..) => vec![area_dir("")],
        }
    }

    /// What a fresh Body finds in its upper. Over a snapshot only what makes it somebody else.
    pub fn seeds(&self, body: &BodyId, machine_id: &str) -> Vec<Seed> {
        let snapshots = match self {
            Self::Host(host, snapshots) => return host.seeds(body, machine_id, snapshots),
            Self::Layers(_, snapshots) => snapshots,
        };
        let dir = |path: &str, mode| Seed::Dir { path: format!("root/{path}"), mode, owner: 0 };
        let file = |name: &str, contents: String| Seed::File { path: format!("root/etc/{name}"), contents };
        let mut seeds: Vec<Seed> = PLACES.iter().map(|path| dir(path, 0o755)).collect();
        seeds.push(file("hostname", format!("{body}\n")));
        seeds.push(file("machine-id", format!("{machine_id}\n")));
        seeds.push(file("hosts", format!("127.0.0.1 localhost {body}\n::1 localhost\n")));
        if snapshots.is_empty() {
            seeds.extend(SCRATCH.iter().map(|(path, mode)| dir(path, *mode)));
            seeds.push(file("resolv.conf", "# This Body has no network but its own loopback.\n".to_owned()));
        }
        seeds
    }
}
