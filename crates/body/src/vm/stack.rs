//! The read-only layers of a microVM's file system, and which of them are below which directory.
//!
//! This is the stack that the process layer mounts: the template's layers, dependency layers, repositories and a
//! home. Each layer reaches the microVM in an image, and the guest mounts the overlays.

use std::path::Path;

use proto::{
    Spec,
    launch::Lower,
    spec::HOME,
    vm::{GuestArea, GuestLower},
    workspace::PLACE,
};

use crate::{
    ids, layers,
    root::{LowerLayer, RootPlan, RootfsStack},
    vm::{host_images, images},
};

/// Assigns the layers in a microVM's images to its root and to other mounts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmLayout {
    /// Layers of the root, nearest first; empty means all layers.
    pub root_layers: Vec<usize>,
    /// Directories that are mounts of their own.
    pub areas: Vec<GuestArea>,
}

/// The layers of a microVM.
#[derive(Debug)]
pub struct VmLayers {
    /// Whether the images of this host come first.
    pub host: bool,
    /// Layers after those, each with the name of its image.
    pub layers: Vec<(String, LowerLayer)>,
    /// The meaning of the layers.
    pub layout: VmLayout,
}

impl VmLayers {
    /// The layers of a microVM with that stack. Snapshots of whole disks are not part of it: a Body starts
    /// with a copy of them.
    pub fn of(rootfs: &RootfsStack, spec: &Spec) -> Self {
        let mut rootfs = rootfs.clone();
        rootfs.snapshots.retain(|snapshot| !snapshot.machine);
        let areas = RootPlan::of(&rootfs, spec).areas();
        let mut all = Self { host: rootfs.layers.is_none(), layers: Vec::new(), layout: VmLayout::default() };
        // The template's own layers come first, so that other layers do not change how they are grouped into
        // images.
        for layer in rootfs.layers.iter().flatten() {
            all.layers.push((image_name(&layer.root), layer.clone()));
        }
        let before = if all.host { host_images::HOST_IMAGES } else { 0 };
        for area in &areas {
            let place = Path::new(&area.at);
            if area.at.is_empty() {
                let own = area.lowers.iter().map(|lower| all.index_of(lower, before).layer).collect();
                all.layout.root_layers = own;
                if all.host {
                    all.layout.root_layers.extend(0..host_images::HOST_IMAGES);
                }
            } else if area.at == HOME || place.starts_with(PLACE) {
                let lowers = area.lowers.iter().map(|lower| all.index_of(lower, before)).collect();
                all.layout.areas.push(GuestArea { at: area.at.clone(), owner: area.owner, lowers });
            }
        }
        all
    }

    /// Finds the layer that contains a directory, or adds it.
    fn index_of(&mut self, lower: &Lower, before: usize) -> GuestLower {
        let found = self.layers.iter().enumerate().find_map(|(index, (_, layer))| {
            Some((index, lower.path.strip_prefix(&layer.root).ok()?.to_string_lossy().into_owned()))
        });
        let (index, dir) = found.unwrap_or_else(|| {
            let ids = lower.written_as.clone().unwrap_or_else(ids::own);
            self.layers.push((image_name(&lower.path), LowerLayer { root: lower.path.clone(), ids }));
            (self.layers.len() - 1, String::new())
        });
        GuestLower { layer: before + index, dir }
    }
}

/// The name of the image of a layer in `layers/ID/root`, or of a part of a snapshot in `snapshots/ID/AREA`. A
/// tree layer has the id of its tree, but its contents also depend on the layer that it was made for.
fn image_name(root: &Path) -> String {
    let name = |path: Option<&Path>| {
        path.and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned()
    };
    let above = root.parent();
    match name(above.and_then(Path::parent)).as_str() {
        "snapshots" => format!("{}{}-{}", images::SNAPSHOTS, name(above), name(Some(root))),
        _ => {
            let over =
                above.and_then(|dir| layers::read(dir).ok()).map(|record| record.over).unwrap_or_default();
            let over: String = over.iter().map(|id| format!("-{id}")).collect();
            format!("{}{}{over}", images::LAYERS, name(above))
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::{
        LayerId,
        template::{LayerRecord, VERSION},
    };

    use super::*;

    #[test]
    fn an_image_is_named_by_what_it_holds() {
        let dir = std::env::temp_dir().join(format!("pal-stack-{}/layers/abc", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let ids = ids::own();
        let record = |over: Vec<LayerId>| LayerRecord {
            v: VERSION,
            id: "abc".parse().unwrap(),
            ids: ids.clone(),
            bytes: 0,
            created_at: String::new(),
            about: String::new(),
            over,
        };
        let named = |record: LayerRecord| {
            std::fs::write(dir.join("layer.json"), serde_json::to_vec(&record).unwrap()).unwrap();
            image_name(&dir.join("root"))
        };
        assert_eq!(named(record(Vec::new())), "layer-abc");
        assert_eq!(named(record(vec!["def".parse().unwrap()])), "layer-abc-def");
        std::fs::remove_dir_all(dir.ancestors().nth(2).unwrap()).unwrap();
        assert_eq!(image_name(Path::new("/data/snapshots/s1/workspace-app")), "snapshot-s1-workspace-app");
    }
}
