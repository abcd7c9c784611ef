//! Restrictions that no process of a Body can lift: limits, capabilities, Landlock, seccomp.

use std::path::Path;

use proto::{Mechanism, launch::LaunchPlan};
use rustix::{process::Resource, thread::CapabilitySet};
use sys::seccomp::SeccompFilter;

use crate::report::{StepError, StepExt};

/// Capabilities that root of a Body keeps, over its own files and processes. All others are dropped for good.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// Most locked memory of one process.
const LOCKED_BYTES: u64 = 8 << 20;
/// Most bytes in POSIX message queues.
const QUEUE_BYTES: u64 = 819_200;
/// Most pending signals.
const PENDING_SIGNALS: u64 = 4096;

/// The restrictions that need no plan: the bounding set, and the system call filter, compiled but not yet installed.
pub fn lock_down_early() -> Result<SeccompFilter, StepError> {
    sys::caps::bound_to(KEPT).step("bound capabilities")?;
    Ok(SeccompFilter::compile())
}

/// Sets the limits of each process.
pub fn limits(plan: &LaunchPlan) -> Result<Vec<Mechanism>, StepError> {
    let wanted = &plan.rlimits;
    let set = |resource, value| sys::process::limit(resource, value).step("set a process limit");
    set(Resource::Core, 0)?;
    set(Resource::Memlock, LOCKED_BYTES)?;
    set(Resource::Msgqueue, QUEUE_BYTES)?;
    set(Resource::Sigpending, PENDING_SIGNALS)?;
    set(Resource::Nice, 0)?;
    set(Resource::Rtprio, 0)?;
    set(Resource::Nofile, wanted.files)?;
    set(Resource::Fsize, wanted.file_bytes)?;
    if let Some(count) = wanted.processes {
        set(Resource::Nproc, count)?;
    }
    if let Some(bytes) = wanted.data_bytes {
        set(Resource::Data, bytes)?;
    }
    if let Some(count) = plan.cpus {
        sys::process::pin_to_first(count).step("set the CPU affinity")?;
    }
    Ok(vec![Mechanism::enforced("open files limit", format!("rlimit of {} for each process", wanted.files))])
}

/// Drops capabilities, sets `no_new_privs` and enables Landlock.
pub fn privileges(plan: &LaunchPlan) -> Result<Vec<Mechanism>, StepError> {
    sys::caps::limit_to(set_own_limits(plan).union(until_filtered(plan))).step("drop capabilities")?;
    if !plan.setuid {
        sys::caps::no_new_privileges().step("forbid new privileges")?;
    }
    let landlock = sys::landlock::restrict_self(Path::new("/dev")).step("set up Landlock")?;
    Ok(vec![
        Mechanism::enforced(
            "capabilities",
            "all but eight over the Body's own files and processes are dropped",
        ),
        no_new_privileges(plan),
        match landlock {
            Some(held) if held.scoped => Mechanism::enforced(
                "landlock",
                format!("ABI {}: no devices, no mounts; signals and abstract sockets scoped", held.abi),
            ),
            Some(held) => Mechanism::degraded(
                "landlock",
                format!(
                    "ABI {} of this kernel cannot scope signals and abstract sockets (6 can); namespaces do",
                    held.abi
                ),
            ),
            None => Mechanism::absent(
                "landlock",
                "this kernel has none, or it is not among its enabled security modules",
            ),
        },
        Mechanism::enforced(
            "seccomp",
            "allow-list of system calls; mounts, namespaces, bpf, io_uring, keyrings and others refused",
        ),
    ])
}

/// The capabilities that the guest keeps. In a Body without root it needs none, because it handles only files of its
/// own id.
fn set_own_limits(plan: &LaunchPlan) -> CapabilitySet {
    if plan.ids.has_root() { KEPT } else { CapabilitySet::empty() }
}

/// Without `no_new_privs`, the kernel accepts Landlock rules and seccomp filters only with this capability.
fn until_filtered(plan: &LaunchPlan) -> CapabilitySet {
    if plan.setuid { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() }
}

fn no_new_privileges(plan: &LaunchPlan) -> Mechanism {
    let name = "no new privileges";
    if plan.setuid {
        return Mechanism::absent(
            name,
            "the template says `sudo`: its setuid programs gain what root of this Body has, and nothing beyond; \
             capabilities, Landlock and seccomp hold them as they hold that root",
        );
    }
    Mechanism::enforced(name, "setuid programs gain nothing")
}

/// Installs the system call filter: the last step before the guest.
pub fn filter(plan: &LaunchPlan, filter: &SeccompFilter) -> Result<(), StepError> {
    filter.install().step("install the system call filter")?;
    if plan.setuid {
        sys::caps::limit_to(set_own_limits(plan)).step("drop the last capability")?;
    }
    Ok(())
}
