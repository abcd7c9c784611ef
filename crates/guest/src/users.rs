//! Users and groups of the Body: `/etc/passwd` and `/etc/group`, as they are at each request.
//!
//! Trust: both files belong to the Body. They are read with a limit and only if they are regular files.

use std::{cell::RefCell, collections::HashMap, fs::File, io::Read, path::PathBuf, rc::Rc};

use rustix::fs::{FileType, Mode, OFlags, Stat};

use crate::connect::{Code, ConnectError};

const FILE_LEN_MAX: u64 = 1 << 20;
const GROUPS_MAX: usize = 1024;
/// Capacity for the files of most systems, so that one read is enough.
const USUAL_LEN: usize = 8 << 10;

/// One user of the Body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestUser {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
    pub groups: Vec<u32>,
}

/// Finds a user by name or by number (`1000` or `1000:1000`, as image configurations spell it).
pub fn find(name: &str) -> Option<GuestUser> {
    find_in(name, &read("/etc/passwd"), &read("/etc/group"))
}

/// Finds the user that a caller named; an unknown name is an authentication error.
pub fn known(name: &str) -> Result<GuestUser, ConnectError> {
    find(name).ok_or_else(|| ConnectError::new(Code::Unauthenticated, format!("invalid username: '{name}'")))
}

/// Refuses users whose ids the guest cannot switch to.
pub fn check_reachable(user: &GuestUser) -> Result<(), ConnectError> {
    let own = rustix::process::geteuid();
    if own.is_root() || own.as_raw() == user.uid {
        return Ok(());
    }
    Err(ConnectError::new(
        Code::PermissionDenied,
        format!(
            "user {} (id {}) is not available in this Body: only one id could be mapped; \
             install `uidmap` on the host or run pal as root",
            user.name, user.uid
        ),
    ))
}

/// Names of user and group ids, for listings.
#[derive(Debug)]
pub struct IdNames {
    users: Vec<(u32, String)>,
    groups: Vec<(u32, String)>,
}

impl IdNames {
    pub fn read() -> Self {
        Self { users: ids(&read("/etc/passwd")), groups: ids(&read("/etc/group")) }
    }

    pub fn user(&self, id: u32) -> String {
        name_of(&self.users, id)
    }

    pub fn group(&self, id: u32) -> String {
        name_of(&self.groups, id)
    }
}

fn name_of(names: &[(u32, String)], id: u32) -> String {
    names.iter().find(|(known, _)| *known == id).map_or_else(|| id.to_string(), |(_, name)| name.clone())
}

fn find_in(name: &str, passwd: &str, group: &str) -> Option<GuestUser> {
    let by_name = passwd.lines().find_map(|line| user_line(line).filter(|user| user.name == name));
    let mut user = by_name.or_else(|| by_number(name, passwd))?;
    user.groups = groups_of(&user, group);
    Some(user)
}

fn by_number(name: &str, passwd: &str) -> Option<GuestUser> {
    let (uid, gid) = name.split_once(':').map_or((name, None), |(uid, gid)| (uid, Some(gid)));
    let uid: u32 = uid.parse().ok()?;
    let gid: Option<u32> = gid.and_then(|gid| gid.parse().ok());
    let found = passwd.lines().find_map(|line| user_line(line).filter(|user| user.uid == uid));
    let numeric_user =
        || GuestUser { name: uid.to_string(), uid, gid: 0, home: PathBuf::from("/"), groups: Vec::new() };
    let mut user = found.unwrap_or_else(numeric_user);
    user.gid = gid.unwrap_or(user.gid);
    Some(user)
}

fn user_line(line: &str) -> Option<GuestUser> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/");
    (!name.is_empty()).then(|| GuestUser { name, uid, gid, home: PathBuf::from(home), groups: Vec::new() })
}

fn groups_of(user: &GuestUser, group: &str) -> Vec<u32> {
    let member = |line: &str| {
        let mut fields = line.split(':');
        let gid: u32 = fields.nth(2)?.parse().ok()?;
        fields.next()?.split(',').any(|name| name == user.name).then_some(gid)
    };
    let mut groups: Vec<u32> =
        std::iter::once(user.gid).chain(group.lines().filter_map(member)).take(GROUPS_MAX).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn ids(text: &str) -> Vec<(u32, String)> {
    let id = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        Some((fields.nth(1)?.parse().ok()?, name.to_owned()))
    };
    text.lines().filter_map(id).collect()
}

/// The contents of a file at the last read, and a stamp that tells whether they are still current.
#[derive(Debug, Clone)]
struct CachedFile {
    stamp: FileStamp,
    text: Rc<str>,
}

/// Identity, size and times of a file; they change whenever the file changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    place: (u64, u64),
    len: i64,
    changed: (i64, i64),
}

impl FileStamp {
    fn of(stat: &Stat) -> Self {
        Self {
            place: (stat.st_dev, stat.st_ino),
            len: stat.st_size,
            changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
        }
    }

    /// Whether the last change is old enough to trust the stamp: file times have a coarse clock, so a second change
    /// right after the first may leave no trace.
    fn is_settled(&self) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        now.tv_sec > self.changed.0 + 1
    }
}

thread_local! {
    static KEPT: RefCell<HashMap<&'static str, CachedFile>> = RefCell::default();
}

fn read(path: &'static str) -> Rc<str> {
    let kept = KEPT.with_borrow(|kept| kept.get(path).cloned());
    if let Some(kept) = kept
        && rustix::fs::stat(path).is_ok_and(|stat| FileStamp::of(&stat) == kept.stamp)
    {
        return kept.text;
    }
    let Some((stat, text)) = read_afresh(path) else { return "".into() };
    let (stamp, text) = (FileStamp::of(&stat), Rc::from(text));
    if stamp.is_settled() {
        KEPT.with_borrow_mut(|kept| kept.insert(path, CachedFile { stamp, text: Rc::clone(&text) }));
    }
    text
}

fn read_afresh(path: &str) -> Option<(Stat, String)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let mut bytes = Vec::with_capacity(USUAL_LEN);
    let read = plain && File::from(fd).take(FILE_LEN_MAX).read_to_end(&mut bytes).is_ok();
    read.then(|| (stat, String::from_utf8_lossy(&bytes).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1000:,,,:/home/user:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:\n";

    fn user(name: &str, uid: u32, gid: u32, home: &str, groups: &[u32]) -> Option<GuestUser> {
        Some(GuestUser { name: name.into(), uid, gid, home: home.into(), groups: groups.to_vec() })
    }

    #[test]
    fn a_file_is_what_it_is_now_whatever_it_was() {
        let path = std::env::temp_dir().join(format!("users-{}", std::process::id()));
        let name: &'static str = path.to_str().unwrap().to_owned().leak();
        let put = |text: &str| std::fs::write(&path, text).unwrap();
        put("one");
        assert_eq!(&*read(name), "one");
        assert!(KEPT.with_borrow(|kept| !kept.contains_key(name)), "what was just changed is not kept");
        std::thread::sleep(std::time::Duration::from_millis(2100));
        assert_eq!(&*read(name), "one");
        assert!(KEPT.with_borrow(|kept| kept.contains_key(name)), "what has settled is");
        // Equal length, in place; in another file; and removed.
        put("two");
        assert_eq!(&*read(name), "two");
        let other = path.with_extension("other");
        std::fs::write(&other, "six").unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(&*read(name), "six");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(&*read(name), "");
    }

    #[test]
    fn users_are_found_by_name_or_number() {
        let find = |name| find_in(name, PASSWD, GROUP);
        assert_eq!(find("user"), user("user", 1000, 1000, "/home/user", &[27, 1000]));
        assert_eq!(find("1000"), find("user"));
        assert_eq!(find("1000:5"), user("user", 1000, 5, "/home/user", &[5, 27]));
        assert_eq!(find("77"), user("77", 77, 0, "/", &[0]));
        assert_eq!((find("nobody-here"), find(""), find("broken")), (None, None, None));
    }

    #[test]
    fn ids_without_a_name_are_shown_as_numbers() {
        let names = IdNames { users: ids(PASSWD), groups: ids(GROUP) };
        assert_eq!(
            (names.user(1000), names.user(5), names.group(27)),
            ("user".into(), "5".into(), "sudo".into())
        );
    }
}
