//! Read-only images: one for each layer of a template. Created once, shared by all microVMs.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use proto::{
    spec::Ids,
    vm::{ImageOrder, ImageSource, LAYERS_MAX},
};
use sha2::{Digest, Sha256};

use super::{VmError, VmStepExt, find_tool};
use crate::{
    helper::{self, HelperError},
    ids,
    programs::Programs,
    root::LowerLayer,
};

/// The largest number of images of one microVM: so many devices remain besides its disk and its host channel.
pub const IMAGES_MAX: usize = 20;
/// Prefix of the names of images with several layers.
pub const PACKS: &str = "pack-";
/// Prefix of the names of images with one layer.
pub const LAYERS: &str = "layer-";
/// Prefix of the names of images with a part of a snapshot.
pub const SNAPSHOTS: &str = "snapshot-";
/// The images of layers, nearest first: one for each layer if there are enough devices, otherwise some images
/// hold several.
pub fn of_layers(
    programs: &Programs,
    images: &Path,
    layers: &[(&str, &LowerLayer)],
    room: usize,
) -> Result<Vec<PathBuf>, VmError> {
    let groups = groups(layers, room).ok_or(VmError::Layers(layers.len(), room))?;
    groups.into_iter().map(|group| of_group(programs, images, &layers[group])).collect()
}

fn of_group(programs: &Programs, images: &Path, group: &[(&str, &LowerLayer)]) -> Result<PathBuf, VmError> {
    let (path, source) = match group {
        [(name, layer)] => (images.join(format!("{name}.erofs")), ImageSource::Layer(layer.root.clone())),
        several => {
            let names: Vec<&str> = several.iter().map(|(name, _)| *name).collect();
            let hash = proto::event::hex(&Sha256::digest(names.join(" ")));
            let roots = several.iter().map(|(_, layer)| layer.root.clone()).collect();
            (images.join(format!("{PACKS}{}.erofs", &hash[..32])), ImageSource::Pack(roots))
        }
    };
    if path.exists() {
        // The modification time of an image with several layers shows when it was last used.
        let _ = File::open(&path).and_then(|file| file.set_modified(std::time::SystemTime::now()));
        return Ok(path);
    }
    let ids = group.first().map_or_else(ids::own, |(_, layer)| layer.ids.clone());
    make(programs, &path, ids, source)?;
    Ok(path)
}

/// Groups layers that share an image. Grouping begins at the lowest layer, so that a layer on top changes no
/// group below; all layers of an image have the same ids. None if they do not fit.
fn groups(layers: &[(&str, &LowerLayer)], room: usize) -> Option<Vec<std::ops::Range<usize>>> {
    let of_size = |size: usize| {
        let mut groups = Vec::new();
        let mut end = layers.len();
        while end > 0 {
            let same = |index: &usize| layers[*index].1.ids == layers[end - 1].1.ids;
            let count = (0..end).rev().take(size).take_while(same).count();
            groups.push(end - count..end);
            end -= count;
        }
        groups.reverse();
        groups
    };
    let fits = |size: &usize| of_size(*size).len() <= room;
    (layers.len() <= LAYERS_MAX).then(|| (1..=layers.len().max(1)).find(fits).map(of_size)).flatten()
}

/// Makes an image, under its name only when it is complete.
pub(super) fn make(programs: &Programs, path: &Path, ids: Ids, source: ImageSource) -> Result<(), VmError> {
    let program = find_tool("mkfs.erofs")?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir).step("create a directory for images")?;
    let part = path.with_extension(format!("part{}", std::process::id()));
    let made = (|| {
        let file = File::create(&part).step("create an image")?;
        let owner = ids.user_outside(0).zip(ids.group_outside(0));
        if let (true, Some((user, group))) = (sys::caps::is_host_root(), owner) {
            std::os::unix::fs::fchown(&file, Some(user), Some(group)).step("create an image")?;
        }
        let order = ImageOrder { ids, source, out: part.clone(), program };
        write(programs, &order)?;
        if sys::caps::is_host_root() {
            std::os::unix::fs::fchown(&file, Some(0), Some(0)).step("make an image read-only")?;
        }
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .step("make an image read-only")?;
        fs::rename(&part, path).step("put an image in place")
    })();
    if made.is_err() {
        let _ = fs::remove_file(&part);
    }
    made
}

fn write(programs: &Programs, order: &ImageOrder) -> Result<(), VmError> {
    let line = serde_json::to_string(order)
        .map_err(std::io::Error::from)
        .step("encode the task of the image helper")?
        + "\n";
    match helper::run(Command::new(&programs.launch).arg("image"), line.as_bytes()) {
        Err(HelperError::Failed(said)) => {
            let tail = said.len().saturating_sub(600);
            Err(VmError::Tool {
                tool: "mkfs.erofs".into(),
                said: proto::text::visible_bytes(said[tail..].trim_ascii()),
            })
        }
        Err(HelperError::Io(error)) => Err(error).step("run the image helper"),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grouped(ids_of: &[u32], room: usize) -> Option<Vec<std::ops::Range<usize>>> {
        let below = |base: u32| {
            let range = proto::spec::IdRange { inside: 0, outside: base, count: 1 };
            LowerLayer { root: PathBuf::new(), ids: Ids { users: vec![range], groups: vec![range] } }
        };
        let layers: Vec<LowerLayer> = ids_of.iter().map(|base| below(*base)).collect();
        groups(&layers.iter().map(|layer| ("x", layer)).collect::<Vec<_>>(), room)
    }

    #[test]
    fn layers_share_images_only_where_there_is_no_room() {
        assert_eq!(grouped(&[], 3), Some(vec![]));
        assert_eq!(grouped(&[1; 3], 3), Some(vec![0..1, 1..2, 2..3]));
        assert_eq!(grouped(&[1; 5], 3), Some(vec![0..1, 1..3, 3..5]), "counted from below");
        assert_eq!(grouped(&[1; 6], 3), Some(vec![0..2, 2..4, 4..6]), "and those below stay as they were");
        assert_eq!(grouped(&[2, 1, 1, 1], 2), Some(vec![0..1, 1..4]), "one set of ids each");
        assert_eq!(grouped(&[1, 2, 1, 2], 3), None);
        assert_eq!(grouped(&[1; LAYERS_MAX + 1], 20), None);
    }
}
