//! Claims of id ranges for the whole host, across data directories.
//!
//! Invariant: one range belongs to one Body: a claim is a link in one directory of the host that names the
//! Body's directory.
//! Invariant: a claim is valid as long as its Body exists. When the directory that it names is gone and no
//! process has an id of the range, any Body may take it, so a killed `pal` blocks no range forever.
//! Invariant: a process replaces or removes a claim under the lock of the directory of claims, after it has
//! read the claim.
//! Invariant: no process removes a claim of another data directory that may still be valid
//! ([`HostClaims::abandoned`]).
//! Absent on purpose: claims that survive a restart of the host. A data directory remembers the ranges of its
//! own Bodies, and a Body claims its range again when it starts.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, symlink},
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::FlockOperation;

/// A restart of the host clears it, and ends every process that used a range.
const DIR: &str = "/run/palisade/ids";

/// The owner of an id range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RangeOwner {
    /// The Body that asked.
    Own,
    /// Another Body.
    Others,
}

/// The directory of claims.
#[derive(Debug)]
pub(super) struct HostClaims(PathBuf);

impl HostClaims {
    /// The directory of claims of this host.
    pub(super) fn new() -> Self {
        Self(DIR.into())
    }

    /// The link that names the owner of a range.
    pub(super) fn link(&self, run: u32) -> PathBuf {
        self.0.join(run.to_string())
    }

    /// Claims a range for the Body in that directory, unless another Body has it.
    pub(super) fn claim(&self, run: u32, body: &Path) -> io::Result<RangeOwner> {
        let link = self.link(run);
        let made = match symlink(body, &link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
                symlink(body, &link)
            }
            made => made,
        };
        match made {
            Ok(()) => Ok(RangeOwner::Own),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                take_over(&link, body, |owner| is_gone(run, owner))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether that Body has the range.
    pub(super) fn has(&self, run: u32, body: &Path) -> bool {
        std::fs::read_link(self.link(run)).is_ok_and(|owner| owner == body)
    }

    /// The ranges that are claimed for Bodies below a directory, and the Bodies.
    pub(super) fn below(&self, dir: &Path) -> Vec<(u32, PathBuf)> {
        self.all().filter(|(_, owner)| owner.parent() == Some(dir)).collect()
    }

    /// The ranges, of any data directory, whose claims are certainly obsolete, and their Bodies: the whole
    /// data directory was removed, so its own `gc` will never run, and no process has an id of the range.
    pub(super) fn abandoned(&self) -> Vec<(u32, PathBuf)> {
        let left = |(run, owner): &(u32, PathBuf)| {
            let data = owner.parent().and_then(Path::parent);
            data.is_some_and(|data| {
                let claimed = self.link(*run).symlink_metadata().and_then(|link| link.modified());
                claimed.is_ok_and(|claimed| was_removed_since(data, claimed))
            })
        };
        let mut found: Vec<(u32, PathBuf)> = self.all().filter(left).collect();
        if !found.is_empty() {
            // In a pid namespace of its own, the caller does not see all processes of the host.
            let used = if sys::proc::sees_every_process() { sys::proc::user_ids_in_use().ok() } else { None };
            found.retain(|(run, _)| {
                used.as_ref().is_some_and(|used| used.range(super::ids_of(*run)).next().is_none())
            });
        }
        found
    }

    fn all(&self) -> impl Iterator<Item = (u32, PathBuf)> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries.filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse().ok()?, std::fs::read_link(entry.path()).ok()?))
        })
    }
}

/// Whether nothing is left of the Body in that directory: neither the directory, under either of its names,
/// nor a process. Processes may outlive a directory that was removed from outside.
pub(super) fn is_gone(run: u32, body: &Path) -> bool {
    is_absent(body)
        && is_absent(&proto::launch::set_aside(body))
        && !sys::proc::has_process(super::ids_of(run))
}

/// Whether the path does not exist; an I/O error is no proof of that.
fn is_absent(path: &Path) -> bool {
    let nothing = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    path.symlink_metadata().is_err_and(|error| nothing.contains(&error.kind()))
}

/// Whether that directory existed at a time and was removed after it, judged by its parent directory.
///
/// A removal changes the modification time of the parent. The empty mount point of a disk that is not mounted
/// has not changed, so Bodies on such a disk keep their claims.
fn was_removed_since(dir: &Path, time: SystemTime) -> bool {
    if !is_absent(dir) {
        return false;
    }
    let above = dir.ancestors().skip(1).find(|above| !is_absent(above));
    let changed = above.and_then(|above| above.metadata().ok()?.modified().ok());
    changed.is_some_and(|changed| changed >= time)
}

/// Takes over a claim whose Body is gone, under a lock, so that no two processes take the same one.
pub(super) fn take_over(link: &Path, target: &Path, gone: impl Fn(&Path) -> bool) -> io::Result<RangeOwner> {
    let looked = |link: &Path| std::fs::read_link(link).is_ok_and(|owner| owner != target && gone(&owner));
    if std::fs::read_link(link).is_ok_and(|owner| owner == target) {
        return Ok(RangeOwner::Own);
    }
    if !looked(link) {
        return Ok(RangeOwner::Others);
    }
    let dir = File::open(link.parent().unwrap_or(Path::new("/")))?;
    rustix::fs::flock(&dir, FlockOperation::LockExclusive)?;
    if !looked(link) {
        return Ok(RangeOwner::Others);
    }
    std::fs::remove_file(link)?;
    match symlink(target, link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(RangeOwner::Others),
        done => done.map(|()| RangeOwner::Own),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::LAYERS_RUN as RUN, *};

    // Bodies may have processes in the normal ranges while this test runs; this range never has any.

    /// A directory of claims and one of Bodies, removed with the test.
    struct TestHost(PathBuf);

    impl TestHost {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("palisade-claims-{name}-{}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            Self(dir)
        }

        fn claims(&self) -> HostClaims {
            HostClaims(self.0.join("run/ids"))
        }

        fn body(&self, name: &str) -> PathBuf {
            let dir = self.0.join(name);
            std::fs::create_dir_all(&dir).unwrap();
            dir
        }
    }

    impl Drop for TestHost {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_run_is_one_bodys_until_that_is_gone() {
        let host = TestHost::new("gone");
        let (claims, one, two) = (host.claims(), host.body("a/bodies/one"), host.body("b/bodies/two"));
        assert_eq!(claims.claim(RUN, &one).unwrap(), RangeOwner::Own);
        assert_eq!(claims.claim(RUN, &one).unwrap(), RangeOwner::Own, "a second claim succeeds");
        assert_eq!(claims.claim(RUN, &two).unwrap(), RangeOwner::Others);
        assert!(claims.has(RUN, &one) && !claims.has(RUN, &two));
        std::fs::rename(&one, proto::launch::set_aside(&one)).unwrap();
        assert_eq!(claims.claim(RUN, &two).unwrap(), RangeOwner::Others, "its supervisor still runs");
        std::fs::remove_dir(proto::launch::set_aside(&one)).unwrap();
        assert_eq!(
            claims.claim(RUN, &two).unwrap(),
            RangeOwner::Own,
            "a killed process leaves no claim forever"
        );
        assert_eq!(claims.below(two.parent().unwrap()), [(RUN, two.clone())]);
        assert_eq!(claims.below(one.parent().unwrap()), []);
    }

    #[test]
    fn a_claim_is_abandoned_only_when_its_whole_data_directory_was_removed() {
        if !sys::proc::sees_every_process() {
            return assert_eq!(
                abandoned_of("unseen"),
                Vec::<&str>::new(),
                "a caller that does not see all processes decides nothing"
            );
        }
        assert_eq!(abandoned_of("seen"), ["removed", "removed with the directories above it"]);
    }

    /// Creates claims of every kind, and returns those that are abandoned.
    fn abandoned_of(name: &str) -> Vec<&'static str> {
        let host = TestHost::new(name);
        let claims = host.claims();
        // These ranges are after all that are given out, so that no Body of this host has a process in one.
        let runs = RUN..RUN + 10;
        let kinds = [
            ("there", "there/bodies/b"),
            ("its Body alone is gone", "half/bodies/b"),
            ("removed", "data/removed/bodies/b"),
            ("removed with the directories above it", "deep/er/removed/bodies/b"),
            ("on a disk that is not mounted", "disk/data/bodies/b"),
            ("no path of a Body", "b"),
        ];
        for ((_, body), run) in kinds.iter().zip(runs.clone()) {
            claims.claim(run, &host.body(body)).unwrap();
        }
        std::fs::remove_dir(host.0.join("half/bodies/b")).unwrap();
        std::fs::remove_dir_all(host.0.join("data/removed")).unwrap();
        std::fs::remove_dir_all(host.0.join("deep")).unwrap();
        // The directory below a mount existed before the mount, and appears again unchanged.
        std::fs::remove_dir_all(host.0.join("disk/data")).unwrap();
        let before = SystemTime::now() - std::time::Duration::from_secs(3600);
        File::open(host.0.join("disk")).unwrap().set_modified(before).unwrap();
        let mut found: Vec<u32> = claims.abandoned().into_iter().map(|(run, _)| run).collect();
        found.sort_unstable();
        found.iter().map(|run| kinds[(run - runs.start) as usize].0).collect()
    }

    #[test]
    fn a_disk_that_does_not_answer_proves_nothing() {
        let host = TestHost::new("silent");
        let body = host.body("there");
        assert!(is_absent(&host.0.join("none")) && is_absent(&host.0.join("none/below")));
        std::fs::write(host.0.join("file"), "").unwrap();
        assert!(is_absent(&host.0.join("file/below")) && !is_absent(&body));
        // A name that is too long fails with another error than "not found".
        assert!(!is_absent(&host.0.join("n".repeat(5000))));
    }

    #[test]
    fn of_many_who_take_a_run_over_one_has_it() {
        let host = TestHost::new("many");
        let claims = host.claims();
        let bodies: Vec<PathBuf> = (0..8).map(|number| host.body(&format!("{number}/bodies/b"))).collect();
        for round in 0..50 {
            let gone = host.0.join("gone");
            let _ = std::fs::remove_file(claims.link(RUN));
            claims.claim(RUN, &gone).unwrap();
            let won = std::thread::scope(|scope| {
                let takers: Vec<_> =
                    bodies.iter().map(|body| scope.spawn(|| claims.claim(RUN, body).unwrap())).collect();
                takers
                    .into_iter()
                    .map(|taker| taker.join().unwrap())
                    .filter(|whose| *whose == RangeOwner::Own)
                    .count()
            });
            assert_eq!(won, 1, "round {round}");
        }
    }

    #[test]
    fn ids_that_a_process_has_are_not_free() {
        let own = rustix::process::getuid().as_raw();
        assert!(sys::proc::has_process(own..own + 1), "this test is one");
        assert!(sys::proc::user_ids_in_use().unwrap().contains(&own));
        assert!(!sys::proc::has_process(super::super::ids_of(RUN)), "no process has ids of layers");
    }
}
