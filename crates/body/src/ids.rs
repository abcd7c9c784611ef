//! The host ids that a Body's ids map to.
//!
//! Invariant: no id of a Body maps to host id 0. Root gives each Body an id range of its own, claimed by two
//! links: one in the data directory, which lasts as long as the Body, and one for the whole host
//! ([`host_wide`]); an ordinary user gives the range from /etc/subuid, or only the user's own id.
//! Invariant: if the second link cannot be created, the first one is enough, and the enforcement record says
//! so.

mod host_wide;

use std::{
    io,
    ops::Range,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use host_wide::{HostClaims, RangeOwner, is_gone, take_over};
use proto::{
    BodyId, Mechanism,
    launch::OwnerLink,
    spec::{IdRange, Ids, USER_ID},
};

/// The first range: above every id that distributions, systemd or containers use.
const FIRST: u32 = 0x7000_0000;
const RUN: u32 = 65_536;
const RUNS: u32 = 4095;
/// The range after those: files of templates belong to it, and no process ever does.
const LAYERS_RUN: u32 = RUNS;

/// Why a Body gets no ids.
#[derive(Debug, thiserror::Error)]
pub enum IdsError {
    /// Each range belongs to a Body that still exists.
    #[error("all {RUNS} id ranges belong to existing Bodies")]
    Exhausted,
    /// The root of a template needs every id from 0 to 65535 mapped.
    #[error("only your own id can be mapped, and a template's root needs all from 0 to 65535")]
    TooFew,
    /// The caller is root of a user namespace that maps only the host's root, and has no other id to give.
    #[error("this root has only the host's own root id, which is never mapped into a Body")]
    OnlyRoot,
    /// While the Body did not run, or under another data directory, its range was given to another Body.
    #[error("host ids {first} and the {} after it now belong to another Body of this host", RUN - 1)]
    Taken {
        /// The first of them.
        first: u32,
    },
    /// The claim could not be written.
    #[error("cannot claim ids for a Body")]
    Claim(#[source] io::Error),
}

/// Whether a Body must have a root inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapRoot {
    /// Map a root id, if possible.
    Yes,
    /// Map no root id: for an ordinary user it costs three milliseconds, and the caller does not need it.
    No,
}

/// Claims ids for a Body.
pub fn claim(data: &Path, body: &BodyId, root: MapRoot) -> Result<Ids, IdsError> {
    if sys::caps::is_host_root() {
        return Ok(run_of(claim_run(data, body)?));
    }
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    if is_roots("/proc/self/uid_map", uid) || is_roots("/proc/self/gid_map", gid) {
        return Err(IdsError::OnlyRoot);
    }
    Ok(match root {
        MapRoot::Yes => subordinate(uid, gid).unwrap_or_else(|| single(uid, gid)),
        MapRoot::No => single(uid, gid),
    })
}

/// Whether an id of this user namespace is id 0 of its parent namespace. An unreadable map counts as yes.
fn is_roots(map: &str, id: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(map) else { return true };
    text.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().unwrap_or(0));
        let (Some(inside), Some(outside), Some(count)) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return true;
        };
        id.checked_sub(inside).is_some_and(|into| into < count && outside.checked_add(into) == Some(0))
    })
}

/// The ids that own the files of a template's layers.
pub fn of_layers() -> Result<Ids, IdsError> {
    if sys::caps::is_host_root() {
        return Ok(run_of(LAYERS_RUN));
    }
    let own = subordinate(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    own.filter(is_whole).ok_or(IdsError::TooFew)
}

/// The ids that own the files of a repository; these need only one.
pub fn of_trees() -> Ids {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    of_layers().ok().or_else(|| subordinate(uid, gid)).unwrap_or_else(|| single(uid, gid))
}

/// The caller's own id alone.
pub fn own() -> Ids {
    single(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

/// Whether every id from 0 to 65535 is mapped, as the root of a template needs.
pub fn is_whole(ids: &Ids) -> bool {
    let whole = |ranges: &[IdRange]| ranges.iter().map(|range| range.count).sum::<u32>() >= RUN;
    whole(&ids.users) && whole(&ids.groups)
}

/// Claims the ids of an existing Body before it starts: a restart of the host removes claims.
pub fn claim_again(data: &Path, body: &BodyId, ids: &Ids) -> Result<(), IdsError> {
    let Some(run) = run_in(ids) else { return Ok(()) };
    match claim_host_wide(data, run, body) {
        RangeOwner::Own => Ok(()),
        RangeOwner::Others => Err(IdsError::Taken { first: ids_of(run).start }),
    }
}

/// Releases the ids, unless the supervisor did and another Body has them by now.
pub fn release(data: &Path, ids: &Ids, body: &BodyId) {
    for claim in claims_of(data, ids, body) {
        let _ = sys::fd::remove_link(&claim.link, &claim.target);
    }
}

/// The links that claim the Body's id range, the one for the whole host last.
pub fn claims_of(data: &Path, ids: &Ids, body: &BodyId) -> Vec<OwnerLink> {
    let Some(run) = run_in(ids) else { return Vec::new() };
    let own = OwnerLink { link: data.join("ids").join(run.to_string()), target: body.as_str().into() };
    vec![own, OwnerLink { link: HostClaims::new().link(run), target: directory(data, body) }]
}

/// Claims of a data directory whose Bodies are gone, with the names of the Bodies.
pub fn orphans(data: &Path) -> Vec<(String, OwnerLink)> {
    let entries = std::fs::read_dir(data.join("ids")).into_iter().flatten().flatten();
    let own = entries.filter_map(|entry| {
        Some(OwnerLink { target: std::fs::read_link(entry.path()).ok()?, link: entry.path() })
    });
    let bodies = data.join("bodies");
    let hosts = HostClaims::new()
        .below(&bodies)
        .into_iter()
        .map(|(run, target)| OwnerLink { link: HostClaims::new().link(run), target });
    // Links in the data directory name an entry of `bodies`; links for the whole host hold the full path.
    let gone = |claim: &OwnerLink| {
        let run = claim.link.file_name().and_then(|name| name.to_str()?.parse().ok());
        run.is_some_and(|run| is_gone(run, &bodies.join(&claim.target)))
    };
    own.chain(hosts).filter(gone).map(named).collect()
}

/// Claims of Bodies whose whole data directory was removed, on this host, with the names of the Bodies.
pub fn abandoned() -> Vec<(String, OwnerLink)> {
    if !sys::caps::is_host_root() {
        return Vec::new();
    }
    let claims = HostClaims::new();
    let claim = |(run, target): (u32, PathBuf)| named(OwnerLink { link: claims.link(run), target });
    claims.abandoned().into_iter().map(claim).collect()
}

/// A claim, with the name of its Body.
fn named(claim: OwnerLink) -> (String, OwnerLink) {
    (claim.target.file_name().unwrap_or_default().to_string_lossy().into_owned(), claim)
}

/// The enforcement record of the id mapping.
pub fn record(data: &Path, body: &BodyId, ids: &Ids) -> Mechanism {
    let name = "own ids";
    match ids.users.as_slice() {
        [only]
            if only.count > 1
                && !run_in(ids).is_some_and(|run| HostClaims::new().has(run, &directory(data, body))) =>
        {
            Mechanism::degraded(
                name,
                format!(
                    "no other Body of this data directory has host ids {} and {} more, but Bodies of another data directory may: no claim can be written below /run",
                    only.outside,
                    only.count - 1
                ),
            )
        }
        [only] if only.count > 1 => Mechanism::enforced(
            name,
            format!("host ids {} and {} more belong to this Body alone", only.outside, only.count - 1),
        ),
        [_] => Mechanism::degraded(
            name,
            "the Body's `user` is your own id and there is no root inside: subordinate ids need the package uidmap and a line in /etc/subuid, and are taken by `create` or `--user root`",
        ),
        _ => Mechanism::degraded(
            name,
            "ids from /etc/subuid, shared by all Bodies of this user; root inside is your own id",
        ),
    }
}

/// The enforcement record of the caller's supplementary groups.
pub fn groups_record(ids: &Ids) -> Mechanism {
    let name = "groups";
    if ids.has_root() {
        return Mechanism::enforced(name, "no process inside has a group of the host");
    }
    let own = rustix::process::getgid();
    match rustix::process::getgroups().unwrap_or_default().iter().filter(|group| **group != own).count() {
        0 => Mechanism::enforced(name, "the Body's `user` has your own group and no other"),
        // The kernel does not let an unprivileged process drop groups, because groups can also deny access.
        held => Mechanism::degraded(
            name,
            format!(
                "processes inside keep {held} more of your groups, without names: dropping them needs subordinate ids"
            ),
        ),
    }
}

fn run_of(run: u32) -> Ids {
    let range = vec![IdRange { inside: 0, outside: ids_of(run).start, count: RUN }];
    Ids { users: range.clone(), groups: range }
}

fn single(uid: u32, gid: u32) -> Ids {
    let one = |outside| vec![IdRange { inside: USER_ID, outside, count: 1 }];
    Ids { users: one(uid), groups: one(gid) }
}

fn first_choice(body: &BodyId) -> u32 {
    body.as_str().bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) % RUNS
}

/// The host ids of a range.
fn ids_of(run: u32) -> Range<u32> {
    let first = FIRST + run * RUN;
    first..first + RUN
}

/// The number of the range that these ids are.
fn run_in(ids: &Ids) -> Option<u32> {
    let into = ids.users.first()?.outside.checked_sub(FIRST)?;
    (into % RUN == 0 && into / RUN < RUNS).then_some(into / RUN)
}

fn directory(data: &Path, body: &BodyId) -> PathBuf {
    data.join("bodies").join(body.as_str())
}

fn claim_run(data: &Path, body: &BodyId) -> Result<u32, IdsError> {
    let start = first_choice(body);
    for step in 0..RUNS {
        let run = (start + step) % RUNS;
        let link = data.join("ids").join(run.to_string());
        if claim_in(data, run, &link, body).map_err(IdsError::Claim)? == RangeOwner::Others {
            continue;
        }
        match claim_host_wide(data, run, body) {
            RangeOwner::Own => return Ok(run),
            RangeOwner::Others => {
                sys::fd::remove_link(&link, Path::new(body.as_str())).map_err(IdsError::Claim)?
            }
        }
    }
    Err(IdsError::Exhausted)
}

/// Claims a range among the Bodies of a data directory.
fn claim_in(data: &Path, run: u32, link: &Path, body: &BodyId) -> io::Result<RangeOwner> {
    let made = match symlink(body.as_str(), link) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(data.join("ids"))?;
            symlink(body.as_str(), link)
        }
        made => made,
    };
    match made {
        Ok(()) => Ok(RangeOwner::Own),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            take_over(link, Path::new(body.as_str()), |owner| is_gone(run, &data.join("bodies").join(owner)))
        }
        Err(error) => Err(error),
    }
}

/// Claims a range among all Bodies of this host. If the claim cannot be written, the Body's record says so.
fn claim_host_wide(data: &Path, run: u32, body: &BodyId) -> RangeOwner {
    HostClaims::new().claim(run, &directory(data, body)).unwrap_or(RangeOwner::Own)
}

/// The range that /etc/subuid and /etc/subgid give this user, if the helpers that map it are installed.
fn subordinate(uid: u32, gid: u32) -> Option<Ids> {
    let helpers = ["newuidmap", "newgidmap"];
    let installed = |name: &&str| {
        ["/usr/bin", "/bin", "/usr/local/bin"].iter().any(|dir| Path::new(dir).join(name).exists())
    };
    if !helpers.iter().all(installed) {
        return None;
    }
    let name = user_name(uid);
    let ranges = |file: &str, own: u32| -> Option<Vec<IdRange>> {
        let text = std::fs::read_to_string(file).ok()?;
        let (first, count) = text.lines().find_map(|line| entry(line, name.as_deref(), uid))?;
        let count = count.min(RUN - 1);
        Some(vec![
            IdRange { inside: 0, outside: own, count: 1 },
            IdRange { inside: 1, outside: first, count },
        ])
    };
    let (users, groups) = (ranges("/etc/subuid", uid)?, ranges("/etc/subgid", gid)?);
    let enough =
        |ranges: &[IdRange]| ranges.iter().all(|range| range.outside != 0) && ranges[1].count >= USER_ID;
    (enough(&users) && enough(&groups)).then_some(Ids { users, groups })
}

fn entry(line: &str, name: Option<&str>, uid: u32) -> Option<(u32, u32)> {
    let mut fields = line.split(':');
    let owner = fields.next()?;
    if Some(owner) != name && owner != uid.to_string() {
        return None;
    }
    Some((fields.next()?.parse().ok()?, fields.next()?.trim().parse().ok()?))
}

fn user_name(uid: u32) -> Option<String> {
    let text = std::fs::read_to_string("/etc/passwd").ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.to_string()).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_run_reaches_host_root_or_the_last_id() {
        for run in [0, RUNS - 1, LAYERS_RUN] {
            let ids = run_of(run);
            assert!(ids.users[0].outside >= FIRST && is_whole(&ids));
            assert!(ids.users[0].outside.checked_add(RUN).is_some_and(|end| end <= 0x8000_0000));
        }
    }

    #[test]
    fn lines_of_subuid_are_found_by_name_and_by_number() {
        assert_eq!(entry("ann:100000:65536", Some("ann"), 1000), Some((100_000, 65_536)));
        assert_eq!(entry("1000:200000:65536\n", Some("ann"), 1000), Some((200_000, 65_536)));
        assert_eq!(entry("bob:100000:65536", Some("ann"), 1000), None);
        assert_eq!(entry("ann:x:65536", Some("ann"), 1000), None);
    }
}
