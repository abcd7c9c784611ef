//! Limits of a whole Body: cgroups of either version, or process limits where cgroups cannot be used.
//!
//! Invariant: each limit of the spec is in the enforcement record, whether or not it is enforced.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use proto::{
    BodyId, Limits, Mechanism,
    launch::{Cgroup, CgroupVersion, Rlimits},
    spec::Ids,
};
use sys::{cgroup::CgroupMounts, fd::write_kernel};

use crate::driver::{ChangedLimits, DeferredLimit};

/// The prefix of our cgroups. They are at the top of their hierarchy, so that the last Body leaves nothing
/// behind.
const OURS: &str = "palisade-";
const CPU_PERIOD_US: u64 = 100_000;

/// The cgroups and process limits of a Body.
#[derive(Debug)]
pub struct BodyCgroups {
    /// Cgroups that its first process enters.
    pub cgroups: Vec<Cgroup>,
    /// Limits of each process.
    pub rlimits: Rlimits,
    /// The number of CPUs to start on, where no cgroup limits CPU time.
    pub cpus: Option<u32>,
    /// The entries of the enforcement record.
    pub mechanisms: Vec<Mechanism>,
    /// Whether root of the Body may create cgroups below the one that counts its processes.
    pub may_be_divided: bool,
}

/// Creates the cgroups of a Body and sets its limits.
pub fn apply_limits(
    mounts: &CgroupMounts,
    body: &BodyId,
    limits: &Limits,
    cpus: u32,
    ids_have_root: bool,
) -> BodyCgroups {
    let groups = CgroupMaker { body, limits, cpus };
    let mut made = CgroupSetup::default();
    if uses_v2(mounts) {
        groups.make_v2(mounts, &mut made);
    } else {
        groups.make_v1(mounts, &mut made);
    }
    groups.fall_back(made, ids_have_root)
}

/// Changes the limits of a running Body in its cgroups. A limit that no cgroup enforces counts from the next start on.
pub fn change_limits(
    cgroups: &[Cgroup],
    body: &BodyId,
    old: &Limits,
    new: &Limits,
    cpus: u32,
) -> io::Result<ChangedLimits> {
    let maker = CgroupMaker { body, limits: new, cpus };
    let mut changed = ChangedLimits::default();
    let mut note = |limit: &'static str, record: io::Result<Option<Mechanism>>| -> io::Result<()> {
        match record? {
            Some(mechanism) => changed.mechanisms.push(mechanism),
            None => {
                let why = "no cgroup of the running Body limits it".to_owned();
                changed.deferred.push(DeferredLimit { limit, why });
            }
        }
        Ok(())
    };
    if new.memory != old.memory {
        note("memory", maker.change_memory(cgroups, old))?;
    }
    if new.pids != old.pids {
        note("pids", maker.change_pids(cgroups))?;
    }
    if new.cpu_milli != old.cpu_milli {
        note("cpus", maker.change_cpus(cgroups))?;
    }
    Ok(changed)
}

/// Whether Bodies of this host are limited by cgroup v2.
pub fn uses_v2(mounts: &CgroupMounts) -> bool {
    mounts.v2_controllers().iter().any(|name| name == "memory")
}

/// Lets root of a Body divide the cgroup that counts its processes, where that group has a hierarchy of its
/// own. The limits of the Body's own cgroup apply to all groups below it.
pub fn hand_over(mounts: &CgroupMounts, bounds: &mut BodyCgroups, ids: &Ids) -> io::Result<()> {
    let root = mounts.v1_of("pids").filter(|root| root.ends_with("pids"));
    let group = root.and_then(|root| bounds.cgroups.iter().find(|group| group.path.parent() == Some(root)));
    match (group, ids.user_outside(0), ids.group_outside(0)) {
        (Some(group), Some(user), Some(owners)) => {
            std::os::unix::fs::chown(&group.path, Some(user), Some(owners))?;
            bounds.may_be_divided = true;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Removes cgroups that have no processes.
pub fn remove_cgroups(cgroups: &[Cgroup]) {
    for group in cgroups {
        let _ = sys::cgroup::remove(&group.path, std::time::Duration::from_secs(5));
    }
}

/// Removes the cgroups of a Body whose record does not name them.
pub fn remove_cgroups_by_name(body: &BodyId) {
    for (_, path) in existing().into_iter().filter(|(name, _)| name == body.as_str()) {
        let _ = sys::cgroup::remove(&path, std::time::Duration::from_secs(5));
    }
}

/// Our cgroups on this host, with the ids of their Bodies.
pub fn existing() -> Vec<(String, PathBuf)> {
    let mounts = CgroupMounts::find().unwrap_or_default();
    let mut roots: Vec<&PathBuf> = mounts.v1.iter().map(|(_, root)| root).chain(&mounts.v2).collect();
    roots.sort();
    roots.dedup();
    let entries = roots.iter().filter_map(|root| fs::read_dir(root).ok()).flatten().flatten();
    let ours = entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.strip_prefix(OURS)?.to_owned(), entry.path())));
    ours.collect()
}

#[derive(Default)]
struct CgroupSetup {
    cgroups: Vec<Cgroup>,
    mechanisms: Vec<Mechanism>,
    memory: bool,
    pids: bool,
    cpu: bool,
    freezer: bool,
    /// Why there are none.
    refusal: Option<String>,
}

struct CgroupMaker<'a> {
    body: &'a BodyId,
    limits: &'a Limits,
    cpus: u32,
}

impl CgroupMaker<'_> {
    fn whole_host(&self) -> bool {
        self.limits.cpu_milli >= self.cpus * 1000
    }

    fn make_v1(&self, mounts: &CgroupMounts, made: &mut CgroupSetup) {
        if mounts.v1.is_empty() {
            made.refusal = Some("this host has no usable cgroups".into());
            return;
        }
        let memory = self.limits.memory.0.to_string();
        let quota = (u64::from(self.limits.cpu_milli) * CPU_PERIOD_US / 1000).to_string();
        let wanted: [(&str, &[(&str, &str)]); 4] = [
            // The most important controllers come first.
            ("memory", &[("memory.limit_in_bytes", &memory)]),
            ("freezer", &[]),
            ("pids", &[("pids.max", &self.limits.pids.to_string())]),
            ("cpu", &[("cpu.cfs_quota_us", &quota)]),
        ];
        for (controller, settings) in wanted {
            if controller == "cpu" && self.whole_host() {
                continue;
            }
            match self.make_one_v1(mounts, controller, settings) {
                Ok(group) => self.note_v1(controller, group, made),
                Err(error) => {
                    made.refusal
                        .get_or_insert(format!("cgroup v1 controller {controller} cannot be used: {error}"));
                }
            }
        }
    }

    fn make_one_v1(
        &self,
        mounts: &CgroupMounts,
        controller: &str,
        settings: &[(&str, &str)],
    ) -> io::Result<PathBuf> {
        let root = mounts
            .v1_of(controller)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it is not mounted"))?;
        let group = make_below(root, self.body)?;
        let set = settings.iter().try_for_each(|(name, value)| write_kernel(&group.join(name), value));
        set.inspect_err(|_| drop(fs::remove_dir(&group)))?;
        Ok(group)
    }

    fn note_v1(&self, controller: &str, group: PathBuf, made: &mut CgroupSetup) {
        match controller {
            "memory" => {
                made.memory = true;
                let swap = write_kernel(
                    &group.join("memory.memsw.limit_in_bytes"),
                    &self.limits.memory.0.to_string(),
                );
                made.mechanisms.push(self.memory_record("cgroup v1", swap.is_ok()));
            }
            "pids" => {
                made.pids = true;
                made.mechanisms.push(self.pids_record("cgroup v1"));
            }
            "cpu" => {
                made.cpu = true;
                made.mechanisms.push(self.cpu_record("cgroup v1 quota"));
            }
            _ => made.freezer = true,
        }
        made.cgroups.push(Cgroup { path: group, version: CgroupVersion::V1 });
    }

    /// Sets the memory limit; none if no cgroup has one.
    fn change_memory(&self, cgroups: &[Cgroup], old: &Limits) -> io::Result<Option<Mechanism>> {
        let value = self.limits.memory.0.to_string();
        if let Some(file) = find_file(cgroups, "memory.max") {
            write_kernel(&file, &value)?;
            return Ok(Some(
                self.memory_record("cgroup v2", file.with_file_name("memory.swap.max").exists()),
            ));
        }
        let Some(file) = find_file(cgroups, "memory.limit_in_bytes") else { return Ok(None) };
        let swap = Some(file.with_file_name("memory.memsw.limit_in_bytes")).filter(|file| file.exists());
        // The limit with swap is never below the one without.
        let (first, then) = match &swap {
            Some(swap) if self.limits.memory > old.memory => (Some(swap), Some(&file)),
            swap => (Some(&file), swap.as_ref()),
        };
        first.into_iter().chain(then).try_for_each(|file| write_kernel(file, &value))?;
        Ok(Some(self.memory_record("cgroup v1", swap.is_some())))
    }

    /// Sets the process limit; none if no cgroup has one.
    fn change_pids(&self, cgroups: &[Cgroup]) -> io::Result<Option<Mechanism>> {
        let Some(group) = cgroups.iter().find(|group| group.path.join("pids.max").exists()) else {
            return Ok(None);
        };
        write_kernel(&group.path.join("pids.max"), &self.limits.pids.to_string())?;
        Ok(Some(self.pids_record(version(group))))
    }

    /// Sets the CPU quota; none if no cgroup has one.
    fn change_cpus(&self, cgroups: &[Cgroup]) -> io::Result<Option<Mechanism>> {
        let quota = u64::from(self.limits.cpu_milli) * CPU_PERIOD_US / 1000;
        let (file, value) = match find_file(cgroups, "cpu.max") {
            Some(file) if self.whole_host() => (file, format!("max {CPU_PERIOD_US}")),
            Some(file) => (file, format!("{quota} {CPU_PERIOD_US}")),
            None => match find_file(cgroups, "cpu.cfs_quota_us") {
                Some(file) => (file, if self.whole_host() { "-1".to_owned() } else { quota.to_string() }),
                None => return Ok(None),
            },
        };
        write_kernel(&file, &value)?;
        Ok(Some(match self.whole_host() {
            true => self.whole_host_record(),
            false if file.ends_with("cpu.max") => self.cpu_record("cgroup v2 quota"),
            false => self.cpu_record("cgroup v1 quota"),
        }))
    }

    fn whole_host_record(&self) -> Mechanism {
        Mechanism::enforced("cpu limit", format!("all {} CPUs of this host, as requested", self.cpus))
    }

    fn memory_record(&self, by: &str, swap: bool) -> Mechanism {
        let swap = if swap { ", swap included" } else { "; this kernel does not count swap" };
        Mechanism::enforced("memory limit", format!("{} by {by}{swap}", self.limits.memory))
    }

    fn pids_record(&self, by: &str) -> Mechanism {
        Mechanism::enforced("process limit", format!("{} by {by}", self.limits.pids))
    }

    fn cpu_record(&self, by: &str) -> Mechanism {
        let milli = self.limits.cpu_milli;
        Mechanism::enforced("cpu limit", format!("{}.{:03} CPUs by {by}", milli / 1000, milli % 1000))
    }

    /// The parent of our cgroups: for root the top of the hierarchy, for an ordinary user the user's own
    /// cgroup.
    fn v2_parent(&self, root: &Path) -> io::Result<PathBuf> {
        const WANTED: &str = "+memory +pids +cpu";
        if sys::caps::is_host_root() {
            write_kernel(&root.join("cgroup.subtree_control"), WANTED)?;
            return Ok(root.to_owned());
        }
        let own = sys::cgroup::own_v2()
            .ok_or_else(|| io::Error::other("this process is in no cgroup of version 2"))?;
        // A cgroup that holds processes cannot delegate controllers, so all processes in it first move to a
        // child group: this process, its launcher, and other processes in the group that was delegated to
        // this user.
        let mut own = root.join(own);
        if own.file_name().is_some_and(|name| name == "palisade-maker") {
            own.pop();
        } else {
            let aside = own.join("palisade-maker");
            fs::create_dir_all(&aside)?;
            sys::cgroup::processes(&own)?
                .into_iter()
                .try_for_each(|pid| sys::cgroup::move_v2(pid, &aside))?;
        }
        write_kernel(&own.join("cgroup.subtree_control"), WANTED)?;
        Ok(own)
    }

    fn make_v2(&self, mounts: &CgroupMounts, made: &mut CgroupSetup) {
        let Some(root) = &mounts.v2 else { return };
        let group = match self.v2_parent(root).and_then(|parent| make_below(&parent, self.body)) {
            Ok(group) => group,
            Err(error) => {
                made.refusal = Some(format!(
                    "cgroup v2 is not delegated to this user ({error}); \
                     try: systemd-run --user --scope -p Delegate=yes pal …"
                ));
                return;
            }
        };
        let set = |name: &str, value: String| write_kernel(&group.join(name), &value).is_ok();
        let quota = u64::from(self.limits.cpu_milli) * CPU_PERIOD_US / 1000;
        made.memory = set("memory.max", self.limits.memory.0.to_string());
        let swap = set("memory.swap.max", "0".into());
        made.pids = set("pids.max", self.limits.pids.to_string());
        made.cpu = !self.whole_host() && set("cpu.max", format!("{quota} {CPU_PERIOD_US}"));
        made.freezer = group.join("cgroup.freeze").exists();
        if made.memory {
            made.mechanisms.push(self.memory_record("cgroup v2", swap));
        }
        if made.pids {
            made.mechanisms.push(self.pids_record("cgroup v2"));
        }
        if made.cpu {
            made.mechanisms.push(self.cpu_record("cgroup v2 quota"));
        }
        made.cgroups.push(Cgroup { path: group, version: CgroupVersion::V2 });
    }

    /// Sets process limits where cgroups cannot enforce a limit, and notes that in the record.
    fn fall_back(&self, made: CgroupSetup, ids_have_root: bool) -> BodyCgroups {
        let mut rlimits = Rlimits {
            files: self.limits.files.into(),
            file_bytes: self.limits.disk.0,
            processes: None,
            data_bytes: None,
        };
        let why = made.refusal.unwrap_or_else(|| "no cgroup for it".into());
        let mut mechanisms = made.mechanisms;
        let mut cpus = None;
        if !made.memory {
            rlimits.data_bytes = Some(self.limits.memory.0);
            let text =
                format!("{} for each process by rlimit, not for all together: {why}", self.limits.memory);
            mechanisms.push(Mechanism::degraded("memory limit", text));
        }
        if !made.pids {
            rlimits.processes = Some(self.limits.pids.into());
            let text = format!("{} by rlimit, counted in the Body's own user namespace", self.limits.pids);
            mechanisms.push(if ids_have_root {
                Mechanism::degraded("process limit", format!("{text}, for each of its ids: {why}"))
            } else {
                Mechanism::enforced("process limit", text)
            });
        }
        if self.whole_host() {
            mechanisms.push(self.whole_host_record());
        } else if !made.cpu {
            let count = self.limits.cpu_milli.div_ceil(1000);
            cpus = Some(count);
            mechanisms.push(Mechanism::degraded(
                "cpu limit",
                format!("starts on {count} CPUs, but may choose others: {why}"),
            ));
        }
        mechanisms.push(if made.freezer {
            Mechanism::enforced("freezer", "pause stops every process at once")
        } else {
            Mechanism::degraded("freezer", format!("pause stops processes one by one with SIGSTOP: {why}"))
        });
        BodyCgroups { cgroups: made.cgroups, rlimits, cpus, mechanisms, may_be_divided: false }
    }
}

/// A file that one of the cgroups has.
fn find_file(cgroups: &[Cgroup], name: &str) -> Option<PathBuf> {
    cgroups.iter().map(|group| group.path.join(name)).find(|file| file.exists())
}

fn version(group: &Cgroup) -> &'static str {
    match group.version {
        CgroupVersion::V1 => "cgroup v1",
        CgroupVersion::V2 => "cgroup v2",
    }
}

fn make_below(parent: &Path, body: &BodyId) -> io::Result<PathBuf> {
    let group = parent.join(format!("{OURS}{body}"));
    match fs::create_dir(&group) {
        // A guest whose supervisor was killed left this cgroup, perhaps frozen; a process that enters must
        // not freeze.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let _ = write_kernel(&group.join("freezer.state"), "THAWED");
            let _ = write_kernel(&group.join("cgroup.freeze"), "0");
        }
        done => done?,
    }
    Ok(group)
}
