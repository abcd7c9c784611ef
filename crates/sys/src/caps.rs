//! Capabilities and `no_new_privs`.

use std::{io, sync::OnceLock};

use rustix::thread::CapabilitySet;

/// Drops all capabilities but `bound` from the bounding set: no program that the caller executes ever has more.
pub fn bound_to(bound: CapabilitySet) -> io::Result<()> {
    for number in 0..64 {
        let Some(one) = CapabilitySet::from_bits(1 << number) else { break };
        if !bound.contains(one) && !bounding_drop(number)? {
            break;
        }
    }
    Ok(())
}

/// Drops all capabilities but `keep` from the caller's own sets.
pub fn limit_to(keep: CapabilitySet) -> io::Result<()> {
    // SAFETY: PR_CAP_AMBIENT_CLEAR_ALL takes no pointers.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let have = rustix::thread::capabilities(None)?;
    let sets = rustix::thread::CapabilitySets {
        effective: have.effective & keep,
        permitted: have.permitted & keep,
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Drops one capability; false if the kernel does not know it, and so none after it.
fn bounding_drop(number: u32) -> io::Result<bool> {
    // SAFETY: PR_CAPBSET_DROP takes a number.
    if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) }
}

/// Sets `no_new_privs`: no exec of this process or its children ever gains privileges.
pub fn no_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Whether this process has the rights of root in the initial user namespace. Root of an unprivileged container has
/// not: it has only the ids that were mapped for it.
pub fn is_host_root() -> bool {
    static ALL_IDS: OnceLock<bool> = OnceLock::new();
    let all_ids = || {
        std::fs::read_to_string("/proc/self/uid_map")
            .is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
    };
    rustix::process::geteuid().is_root() && *ALL_IDS.get_or_init(all_ids)
}
