//! Read-only images of this host's programs and settings, in parts.
//!
//! The name of an image is made of what the part holds: names, sizes, modes and times of all its files. To look at
//! all of them takes a second or two, so `PART.seen` remembers what was found, together with signs that are quick to
//! look at. While the signs stay, nothing else is looked at; if they change and the files did not, the image that is
//! there serves on.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use proto::{spec::Ids, vm::ImageSource};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{VmError, VmStepExt, images::make};
use crate::{
    host::{HIDDEN_SETTINGS, HostRoot, RootInside},
    ids,
    programs::Programs,
};

/// Number of images that this host's own programs and settings make.
pub const HOST_IMAGES: usize = PARTS.len();
/// Images of earlier states of each part that are kept.
const OLD_HOSTS_MAX: usize = 1;
const SEEN_LEN_MAX: u64 = 4096;

/// A part of this host. Parts that change at different times have images of their own.
struct HostPart {
    name: &'static str,
    /// Its name in the line that announces its making.
    about: &'static str,
    holds: fn(&str) -> bool,
    /// Paths whose change shows that the part may have changed, besides [`PACKAGES`].
    signs: &'static [&'static str],
}

const PARTS: [HostPart; 4] = [
    HostPart {
        name: "etc",
        about: "settings (/etc)",
        holds: |area| area == "etc",
        signs: &["/etc", "/etc/alternatives", "/etc/ssl/certs", "/etc/profile.d", "/etc/default"],
    },
    HostPart {
        name: "share",
        about: "data (/usr/share)",
        holds: |area| area == "usr/share",
        signs: &["/usr/share"],
    },
    HostPart {
        name: "lib",
        about: "libraries (/usr/lib)",
        holds: |area| area == "usr/lib",
        signs: &["/usr/lib"],
    },
    HostPart {
        name: "programs",
        about: "programs (/usr/bin and others)",
        holds: |area| !["etc", "usr/share", "usr/lib"].contains(&area),
        signs: &[
            "/",
            "/usr",
            "/usr/bin",
            "/usr/sbin",
            "/usr/lib64",
            "/usr/local/bin",
            "/usr/local/lib",
            "/opt",
        ],
    },
];

/// Files that package managers change with every package.
const PACKAGES: &[&str] =
    &["/var/lib/dpkg/status", "/var/lib/rpm", "/var/lib/pacman/local", "/lib/apk/db/installed"];

/// The state of a part when `pal` last looked at it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SeenPart {
    signs: String,
    contents: String,
}

/// The images of this host's current state, nearest first. `tell` hears of each one that is made.
pub fn of_host(programs: &Programs, images: &Path, tell: &dyn Fn(&str)) -> Result<Vec<PathBuf>, VmError> {
    PARTS.iter().map(|part| of_part(programs, images, part, tell)).collect()
}

fn of_part(
    programs: &Programs,
    images: &Path,
    part: &HostPart,
    tell: &dyn Fn(&str),
) -> Result<PathBuf, VmError> {
    let signs = signs(part);
    let known =
        || part.seen(images).filter(|seen| seen.signs == signs).map(|seen| part.file(images, &seen.contents));
    if let Some(path) = known().filter(|path| path.exists()) {
        return Ok(path);
    }
    let _turn = turn(images)?;
    if let Some(path) = known().filter(|path| path.exists()) {
        return Ok(path);
    }
    let (areas, links) = part.areas_and_links();
    let contents = fingerprint(areas.iter().map(|area| Path::new("/").join(area)), &links);
    let path = part.file(images, &contents);
    if !path.exists() {
        tell(&format!("making the image of this host's {}, which microVMs share", part.about));
        let began = std::time::Instant::now();
        let hidden = HIDDEN_SETTINGS.iter().map(|name| format!("etc/{name}")).collect();
        let ids = ids::of_layers().or_else(|_| Ok::<Ids, VmError>(ids::own()))?;
        make(programs, &path, ids, ImageSource::Host { areas, links, hidden })?;
        tell(&format!("made it in {} s", began.elapsed().as_secs()));
        drop_old(images, part, &path);
    }
    part.remember(images, &SeenPart { signs, contents }).step("record an image")?;
    Ok(path)
}

/// Whether the image of that name is of the state in which this host was last seen.
pub fn is_current(images: &Path, name: &str) -> bool {
    PARTS.iter().any(|part| {
        part.seen(images).is_some_and(|seen| part.file(images, &seen.contents) == images.join(name))
    })
}

impl HostPart {
    fn file(&self, images: &Path, contents: &str) -> PathBuf {
        images.join(format!("host-{}-{contents}.erofs", self.name))
    }

    fn record(&self, images: &Path) -> PathBuf {
        images.join(format!("host-{}.seen", self.name))
    }

    fn seen(&self, images: &Path) -> Option<SeenPart> {
        let text = sys::fd::read_small(&self.record(images), SEEN_LEN_MAX).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn remember(&self, images: &Path, seen: &SeenPart) -> io::Result<()> {
        sys::fd::write_whole(&self.record(images), &serde_json::to_vec(seen)?)
    }

    /// The directories of this part, and its links.
    fn areas_and_links(&self) -> (Vec<String>, Vec<(String, String)>) {
        let (areas, links) = HostRoot::inspect(RootInside::Possible, &[]).names_and_links();
        // A directory inside another area comes with that area; those of `/usr` are areas of their own here.
        let tops =
            areas.iter().filter(|area| !area.contains('/') && **area != "usr").map(|area| (*area).to_owned());
        let areas = tops.chain(dirs_in("usr")).filter(|area| (self.holds)(area)).collect();
        let links = links.into_iter().chain(links_in("usr")).filter(|(name, _)| (self.holds)(name)).collect();
        (areas, links)
    }
}

fn dirs_in(area: &str) -> Vec<String> {
    entries_in(area, |kind| kind.is_dir())
}

/// Links in a directory, such as `/usr/tmp`.
fn links_in(area: &str) -> Vec<(String, String)> {
    let target = |name: &String| fs::read_link(Path::new("/").join(name)).ok()?.to_str().map(str::to_owned);
    let links = entries_in(area, |kind| kind.is_symlink());
    links.into_iter().filter_map(|name| target(&name).map(|target| (name, target))).collect()
}

fn entries_in(area: &str, wanted: fn(fs::FileType) -> bool) -> Vec<String> {
    let entries = fs::read_dir(Path::new("/").join(area)).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_type().is_ok_and(wanted));
    let mut names: Vec<String> =
        named.filter_map(|entry| Some(format!("{area}/{}", entry.file_name().to_str()?))).collect();
    names.sort();
    names
}

/// A hash of the quick signs.
fn signs(part: &HostPart) -> String {
    let mut hash = Sha256::new();
    for place in PACKAGES.iter().chain(part.signs) {
        hash.update(place.as_bytes());
        if let Ok(found) = fs::metadata(place) {
            for number in [found.mtime(), found.mtime_nsec(), found.ino() as i64] {
                hash.update(number.to_le_bytes());
            }
        }
    }
    proto::event::hex(&hash.finalize())[..16].to_owned()
}

/// A hash of the names, kinds, modes, sizes and times of everything below these directories, in an order of its own.
fn fingerprint(tops: impl Iterator<Item = PathBuf>, links: &[(String, String)]) -> String {
    let mut hash = Sha256::new();
    links.iter().for_each(|(name, target)| hash.update(format!("{name}\0{target}\0")));
    let mut waiting: Vec<PathBuf> = tops.collect();
    while let Some(dir) = waiting.pop() {
        let entries: BTreeMap<_, _> = fs::read_dir(&dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.file_name(), entry.metadata().ok()?)))
            .collect();
        hash.update(dir.as_os_str().as_bytes());
        for (name, found) in entries {
            hash.update([0]);
            hash.update(name.as_bytes());
            // The size of a directory depends on its history.
            let len = if found.is_dir() { 0 } else { found.len() };
            for number in [u64::from(found.mode()), len, found.mtime() as u64, found.mtime_nsec() as u64] {
                hash.update(number.to_le_bytes());
            }
            if found.is_dir() {
                waiting.push(dir.join(name));
            }
        }
    }
    proto::event::hex(&hash.finalize())[..16].to_owned()
}

/// Takes a lock: the images of a whole host take a minute, and a second process waits for the first.
fn turn(images: &Path) -> Result<File, VmError> {
    fs::create_dir_all(images).step("create a directory for images")?;
    let lock = File::create(images.join("lock")).step("lock the images")?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).step("lock the images")?;
    Ok(lock)
}

fn drop_old(images: &Path, part: &HostPart, newest: &Path) {
    let begins = format!("host-{}-", part.name);
    let mut old: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(images)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&begins) && entry.path() != newest)
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    old.sort();
    // Running microVMs keep a deleted image open.
    for (_, path) in old.iter().rev().skip(OLD_HOSTS_MAX) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_of_the_host_is_in_exactly_one_part() {
        let mut all: Vec<String> = PARTS.iter().flat_map(|part| part.areas_and_links().0).collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        for area in ["etc", "usr/bin", "usr/lib", "usr/share"] {
            assert!(all.contains(&area.to_owned()), "{area}: {all:?}");
        }
    }

    #[test]
    fn an_image_is_named_by_the_files_and_not_by_the_time_of_looking() {
        let dir = std::env::temp_dir().join(format!("pal-host-images-{}", std::process::id()));
        fs::create_dir_all(dir.join("a/b")).unwrap();
        fs::write(dir.join("a/b/file"), "one").unwrap();
        let now = || fingerprint([dir.join("a")].into_iter(), &[]);
        let first = now();
        let file = File::options().append(true).open(dir.join("a/b/file")).unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        assert_eq!(now(), first);
        io::Write::write_all(&mut &file, b"two").unwrap();
        file.set_modified(written).unwrap();
        assert_ne!(now(), first, "another size");
        file.set_len(3).unwrap();
        file.set_modified(written).unwrap();
        assert_eq!(now(), first, "as it was");
        fs::rename(dir.join("a/b/file"), dir.join("a/b/other")).unwrap();
        assert_ne!(now(), first, "another name");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_image_serves_until_the_part_differs() {
        let images = std::env::temp_dir().join(format!("pal-host-seen-{}", std::process::id()));
        fs::create_dir_all(&images).unwrap();
        let part = &PARTS[0];
        assert_eq!(part.seen(&images), None);
        part.remember(&images, &SeenPart { signs: "s".into(), contents: "c".into() }).unwrap();
        assert!(is_current(&images, "host-etc-c.erofs"));
        assert!(!is_current(&images, "host-etc-d.erofs") && !is_current(&images, "host-lib-c.erofs"));
        fs::remove_dir_all(images).unwrap();
    }
}
