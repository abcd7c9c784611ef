//! Read-only images: one for each layer of a template, one for each state of this host. Made once, shared by all machines.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use proto::{
    spec::Ids,
    vm::{ImageOrder, ImageSource},
};
use sha2::{Digest, Sha256};

use super::{Step, VmError, find_tool};
use crate::{
    host::{HIDDEN_SETTINGS, HostRoot, Masters},
    ids,
    programs::Programs,
    root::LayerBelow,
};

/// Most images of one machine: it has so many devices beside its disk and its line.
pub const IMAGES_MAX: usize = 20;
/// Images of states that this host was in, beyond the newest.
const OLD_HOSTS_MAX: usize = 1;

/// A part of this host: its settings change often and are small, its programs seldom and are large.
struct Part {
    name: &'static str,
    holds: fn(&str) -> bool,
    /// Places whose change shows that the part changed.
    signs: &'static [&'static str],
}

const PARTS: [Part; 2] = [
    Part {
        name: "etc",
        holds: |area| area == "etc",
        signs: &["/etc", "/etc/alternatives", "/etc/ssl/certs", "/etc/profile.d", "/etc/default"],
    },
    Part {
        name: "programs",
        holds: |area| area != "etc",
        signs: &[
            "/var/lib/dpkg/status",
            "/var/lib/rpm",
            "/usr/bin",
            "/usr/sbin",
            "/usr/lib",
            "/usr/lib64",
            "/usr/local/bin",
            "/usr/local/lib",
            "/opt",
        ],
    },
];

/// The image of a layer.
pub fn of_layer(
    programs: &Programs,
    images: &Path,
    name: &str,
    layer: &LayerBelow,
) -> Result<PathBuf, VmError> {
    let path = images.join(format!("layer-{name}.erofs"));
    if path.exists() {
        return Ok(path);
    }
    make(programs, &path, layer.ids.clone(), ImageSource::Layer(layer.root.clone()))?;
    Ok(path)
}

/// The images of this host as it is now, nearest first.
pub fn of_host(programs: &Programs, images: &Path) -> Result<Vec<PathBuf>, VmError> {
    PARTS.iter().map(|part| of_part(programs, images, part)).collect()
}

fn of_part(programs: &Programs, images: &Path, part: &Part) -> Result<PathBuf, VmError> {
    let path = images.join(part.file());
    if path.exists() {
        return Ok(path);
    }
    let _turn = turn(images)?;
    if path.exists() {
        return Ok(path);
    }
    let (areas, links) = HostRoot::look(Masters::Some).told();
    // What stands in another area comes with it.
    let areas: Vec<String> = areas
        .iter()
        .filter(|area| !area.contains('/') && (part.holds)(area))
        .map(|area| (*area).to_owned())
        .collect();
    let links = links.into_iter().filter(|(name, _)| (part.holds)(name)).collect();
    let hidden = HIDDEN_SETTINGS.iter().map(|name| format!("etc/{name}")).collect();
    let ids = ids::of_layers().or_else(|_| Ok::<Ids, VmError>(ids::own()))?;
    make(programs, &path, ids, ImageSource::Host { areas, links, hidden })?;
    drop_old(images, part, &path);
    Ok(path)
}

/// Whether the images of this host as it is now are there.
pub fn host_is_made(images: &Path) -> bool {
    PARTS.iter().all(|part| images.join(part.file()).exists())
}

/// Whether an image of that name is of this host as it is now.
pub fn is_current(name: &str) -> bool {
    PARTS.iter().any(|part| part.file() == name)
}

impl Part {
    /// A name that tells one state of the part from another, without reading its files.
    fn file(&self) -> String {
        let mut hash = Sha256::new();
        for place in self.signs {
            hash.update(place.as_bytes());
            if let Ok(found) = fs::metadata(place) {
                for number in [found.mtime(), found.mtime_nsec(), found.ino() as i64] {
                    hash.update(number.to_le_bytes());
                }
            }
        }
        format!("host-{}-{}.erofs", self.name, &proto::event::hex(&hash.finalize())[..16])
    }
}

/// One at a time: an image of a whole host takes a minute, and the second waits for the first.
fn turn(images: &Path) -> Result<File, VmError> {
    fs::create_dir_all(images).step("make a directory for images")?;
    let lock = File::create(images.join("lock")).step("lock the images")?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).step("lock the images")?;
    Ok(lock)
}

fn drop_old(images: &Path, part: &Part, newest: &Path) {
    let begins = format!("host-{}-", part.name);
    let mut old: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(images)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&begins) && entry.path() != newest)
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    old.sort();
    // Machines that run from one keep it, though not its name.
    for (_, path) in old.iter().rev().skip(OLD_HOSTS_MAX) {
        let _ = fs::remove_file(path);
    }
}

fn make(programs: &Programs, path: &Path, ids: Ids, source: ImageSource) -> Result<(), VmError> {
    let program = find_tool("mkfs.erofs")?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir).step("make a directory for images")?;
    let part = path.with_extension(format!("part{}", std::process::id()));
    let made = (|| {
        let file = File::create(&part).step("make an image")?;
        let owner = ids.user_outside(0).zip(ids.group_outside(0));
        if let (true, Some((user, group))) = (sys::caps::is_host_root(), owner) {
            std::os::unix::fs::fchown(&file, Some(user), Some(group)).step("make an image")?;
        }
        let order = ImageOrder { ids, source, out: part.clone(), program };
        helper(programs, &order)?;
        if sys::caps::is_host_root() {
            std::os::unix::fs::fchown(&file, Some(0), Some(0)).step("close an image")?;
        }
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o444)).step("close an image")?;
        fs::rename(&part, path).step("put an image in place")
    })();
    if made.is_err() {
        let _ = fs::remove_file(&part);
    }
    made
}

fn helper(programs: &Programs, order: &ImageOrder) -> Result<(), VmError> {
    let mut child = Command::new(&programs.launch)
        .arg("image")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .step("run the maker of images")?;
    if let Some(mut stdin) = child.stdin.take() {
        let line = serde_json::to_string(order).map_err(std::io::Error::from).step("write the order")? + "\n";
        stdin.write_all(line.as_bytes()).step("write the order")?;
    }
    let output = child.wait_with_output().step("run the maker of images")?;
    if output.status.success() {
        return Ok(());
    }
    let tail = output.stderr.len().saturating_sub(600);
    Err(VmError::Tool {
        tool: "mkfs.erofs".into(),
        said: proto::text::visible_bytes(output.stderr[tail..].trim_ascii()),
    })
}
