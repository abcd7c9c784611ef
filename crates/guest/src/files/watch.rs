//! One watched directory: translates inotify's events into envd's.
//!
//! A recursive watch adds directories that appear under it, and reports the files in them as created. So no file is
//! missed, but an event may be reported twice.

use std::{
    collections::HashMap,
    ffi::OsStr,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use proto::wire::filesystem::{EventType, FilesystemEvent};
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};

use super::{
    entry::entry,
    operations::{FileCaller, fault},
};
use crate::{
    connect::{Code, ConnectError},
    users::IdNames,
};

const DIRS_MAX: usize = 32_768;
const BATCH_MAX: usize = 256;
const BUFFER_LEN: usize = 8 * 1024;
const NETWORK_FILE_SYSTEMS: [u64; 5] = [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546];

/// The options of a watch.
#[derive(Debug)]
pub struct WatchRequest {
    pub path: String,
    pub recursive: bool,
    pub include_entry: bool,
    pub allow_network_mounts: bool,
}

/// A running watch.
#[derive(Debug)]
pub struct DirWatch {
    inotify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    include_entry: bool,
    /// Path of each watched directory, relative to the root.
    dirs: HashMap<i32, PathBuf>,
}

/// Events, and whether the queue is empty now.
#[derive(Debug, Default)]
pub struct EventBatch {
    pub events: Vec<FilesystemEvent>,
    pub drained: bool,
}

struct RawEvent {
    wd: i32,
    flags: ReadFlags,
    name: Option<PathBuf>,
}

impl DirWatch {
    pub fn new(caller: &FileCaller, asked: &WatchRequest) -> Result<Self, ConnectError> {
        let root = caller.path(&asked.path)?;
        let found = std::fs::metadata(&root)
            .map_err(|error| fault(&format!("path {} not found", root.display()), &error))?;
        if !found.is_dir() {
            return Err(ConnectError::invalid(format!("path {} not a directory", root.display())));
        }
        if !asked.allow_network_mounts && on_network(&root) {
            let message = format!("cannot watch path on network filesystem: {}", root.display());
            return Err(ConnectError::invalid(message));
        }
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|error| {
            ConnectError::new(Code::ResourceExhausted, format!("error creating watcher: {error}"))
        })?;
        let (recursive, include_entry) = (asked.recursive, asked.include_entry);
        let mut watch = Self { inotify, root, recursive, include_entry, dirs: HashMap::new() };
        watch.add(Path::new(""), None)?;
        Ok(watch)
    }

    /// Duplicates the inotify descriptor, so that the caller can wait on it.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.inotify.try_clone()
    }

    /// Whether reporting events reads the file system, which may block and so needs a helper thread.
    pub fn needs_helper(&self) -> bool {
        self.recursive || self.include_entry
    }

    /// Reads the next events. An error ends the watch.
    pub fn next(&mut self) -> Result<EventBatch, ConnectError> {
        let (raw, drained) = self.read()?;
        let names = self.include_entry.then(IdNames::read);
        let mut events = Vec::new();
        for event in raw {
            self.translate(&event, &mut events)?;
        }
        if let Some(names) = names {
            events.iter_mut().for_each(|event| self.describe(event, &names));
        }
        Ok(EventBatch { events, drained })
    }

    fn read(&self) -> Result<(Vec<RawEvent>, bool), ConnectError> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_LEN];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut raw = Vec::new();
        // Events in the reader's buffer must be taken before stopping, because dropping the buffer loses them.
        while raw.len() < BATCH_MAX || !reader.is_buffer_empty() {
            match reader.next() {
                Ok(event) => raw.push(RawEvent {
                    wd: event.wd(),
                    flags: event.events(),
                    name: event.file_name().map(|name| PathBuf::from(OsStr::from_bytes(name.to_bytes()))),
                }),
                Err(Errno::AGAIN) => return Ok((raw, true)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(ConnectError::internal(format!("watcher error: {error}"))),
            }
        }
        Ok((raw, false))
    }

    fn translate(&mut self, event: &RawEvent, events: &mut Vec<FilesystemEvent>) -> Result<(), ConnectError> {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(ConnectError::new(
                Code::ResourceExhausted,
                "the inotify queue overflowed: events were lost",
            ));
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&event.wd);
            return Ok(());
        }
        let Some(dir) = self.dirs.get(&event.wd) else { return Ok(()) };
        let path = match &event.name {
            Some(name) => dir.join(name),
            // The watch on the parent reports events about a directory below the root itself.
            None if !dir.as_os_str().is_empty() => return Ok(()),
            None => PathBuf::from("."),
        };
        let name = path.to_string_lossy().into_owned();
        let translated = types(event.flags).map(|kind| FilesystemEvent {
            name: name.clone(),
            r#type: kind.into(),
            entry: None,
        });
        events.extend(translated);
        if self.recursive && event.flags.contains(ReadFlags::ISDIR) {
            self.follow_dir(event.flags, &path, events)?;
        }
        Ok(())
    }

    fn follow_dir(
        &mut self,
        flags: ReadFlags,
        path: &Path,
        events: &mut Vec<FilesystemEvent>,
    ) -> Result<(), ConnectError> {
        if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            return self.add(path, Some(events));
        }
        if flags.contains(ReadFlags::MOVED_FROM) {
            let below: Vec<i32> =
                self.dirs.iter().filter(|(_, dir)| dir.starts_with(path)).map(|(wd, _)| *wd).collect();
            for wd in below {
                self.dirs.remove(&wd);
                let _ = inotify::remove_watch(&self.inotify, wd);
            }
        }
        Ok(())
    }

    /// Watches a directory and, if the watch is recursive, all below it; with `news`, adds an event for each entry.
    fn add(&mut self, dir: &Path, mut news: Option<&mut Vec<FilesystemEvent>>) -> Result<(), ConnectError> {
        let mut waiting = vec![dir.to_path_buf()];
        while let Some(dir) = waiting.pop() {
            if !self.add_one(&dir)? || !self.recursive {
                continue;
            }
            let Ok(children) = std::fs::read_dir(self.root.join(&dir)) else { continue };
            for child in children.flatten() {
                let path = dir.join(child.file_name());
                if let Some(news) = news.as_deref_mut() {
                    let name = path.to_string_lossy().into_owned();
                    news.push(FilesystemEvent { name, r#type: EventType::Create.into(), entry: None });
                }
                if child.file_type().is_ok_and(|kind| kind.is_dir()) {
                    waiting.push(path);
                }
            }
        }
        Ok(())
    }

    /// Watches one directory; false if it no longer exists.
    fn add_one(&mut self, dir: &Path) -> Result<bool, ConnectError> {
        let lack = |message: &str| ConnectError::new(Code::ResourceExhausted, message);
        if self.dirs.len() >= DIRS_MAX {
            return Err(lack("too many directories to watch"));
        }
        let is_root = dir.as_os_str().is_empty();
        let follow = if is_root { WatchFlags::empty() } else { WatchFlags::DONT_FOLLOW };
        match inotify::add_watch(&self.inotify, self.root.join(dir), watched() | follow) {
            Ok(wd) => {
                self.dirs.insert(wd, dir.to_path_buf());
                Ok(true)
            }
            Err(Errno::NOSPC) => Err(lack("the Body's limit of inotify watches is reached")),
            Err(error) if is_root => {
                Err(ConnectError::internal(format!("error adding path to watcher: {error}")))
            }
            Err(_) => Ok(false),
        }
    }

    /// Adds the file's `EntryInfo` to an event, unless the file no longer exists or was replaced.
    fn describe(&self, event: &mut FilesystemEvent, names: &IdNames) {
        let carries = [EventType::Create, EventType::Write, EventType::Chmod];
        if carries.contains(&event.r#type()) {
            event.entry = entry(&self.root.join(&event.name), names).ok();
        }
    }
}

fn watched() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR
}

fn types(flags: ReadFlags) -> impl Iterator<Item = EventType> {
    let table = [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, EventType::Create),
        (ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF, EventType::Rename),
        (ReadFlags::ATTRIB, EventType::Chmod),
        (ReadFlags::MODIFY, EventType::Write),
        (ReadFlags::DELETE | ReadFlags::DELETE_SELF, EventType::Remove),
    ];
    table.into_iter().filter(move |(mask, _)| flags.intersects(*mask)).map(|(_, kind)| kind)
}

fn on_network(path: &Path) -> bool {
    let magic = rustix::fs::statfs(path).map_or(0, |stat| u64::try_from(stat.f_type).unwrap_or(0));
    NETWORK_FILE_SYSTEMS.contains(&magic)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::users::GuestUser;

    fn read_events(watch: &mut DirWatch) -> Vec<(String, EventType)> {
        let batch = watch.next().unwrap();
        assert!(batch.drained);
        batch.events.into_iter().map(|event| (event.name.clone(), event.r#type())).collect()
    }

    #[test]
    fn a_recursive_watch_follows_new_directories_and_moves() {
        let dir = std::env::temp_dir().join(format!("pal-watch-{}", std::process::id()));
        fs::create_dir_all(dir.join("old")).unwrap();
        let user = GuestUser { name: "u".into(), uid: 0, gid: 0, home: dir.clone(), groups: vec![] };
        let path = dir.to_str().unwrap().to_owned();
        let asked = WatchRequest { path, recursive: true, include_entry: false, allow_network_mounts: true };
        let mut watch = DirWatch::new(&FileCaller { user, workdir: None }, &asked).unwrap();
        fs::create_dir_all(dir.join("new/deep")).unwrap();
        assert_eq!(
            read_events(&mut watch),
            [("new".into(), EventType::Create), ("new/deep".into(), EventType::Create)]
        );
        fs::write(dir.join("new/deep/f"), "x").unwrap();
        fs::write(dir.join("old/g"), "").unwrap();
        let write = ("new/deep/f".into(), EventType::Write);
        let wanted = [("new/deep/f".into(), EventType::Create), write, ("old/g".into(), EventType::Create)];
        assert_eq!(read_events(&mut watch), wanted);
        fs::rename(dir.join("new"), dir.join("moved")).unwrap();
        let events = read_events(&mut watch);
        assert_eq!(events[..2], [("new".into(), EventType::Rename), ("moved".into(), EventType::Create)]);
        fs::write(dir.join("moved/deep/f"), "xy").unwrap();
        assert!(read_events(&mut watch).contains(&("moved/deep/f".into(), EventType::Write)));
        fs::remove_dir_all(dir).unwrap();
    }
}
