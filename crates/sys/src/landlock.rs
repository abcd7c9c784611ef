//! Landlock: restrictions on files, signals and abstract sockets.

use std::{
    io,
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};

/// The Landlock ABI of this kernel; 0 if it has none.
pub fn abi() -> i64 {
    // SAFETY: with LANDLOCK_CREATE_RULESET_VERSION and no attributes the call only answers a number.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, 1u32) };
    version.max(0)
}

/// The restrictions that were enabled.
#[derive(Debug, Clone, Copy)]
pub struct LandlockStatus {
    /// The ABI that was used.
    pub abi: i64,
    /// Whether signals and abstract sockets are scoped.
    pub scoped: bool,
}

/// Restricts the caller and its children: they create no device nodes, use device ioctls only below `devices`, reach
/// no signal target and no abstract socket outside this domain, and never change mounts again.
///
/// Only rights that are forbidden somewhere are handled. A right that is handled and allowed everywhere forbids
/// nothing, but makes the kernel walk from each opened file up to the root, which is a sixth of the time of reading
/// small files.
///
/// Returns `None` if the kernel has no Landlock. The caller must have set `no_new_privs`, or have the capability to
/// do without.
pub fn restrict_self(devices: &Path) -> io::Result<Option<LandlockStatus>> {
    let abi = abi();
    if abi < 1 {
        return Ok(None);
    }
    let known = known(abi);
    // Renames between directories are forbidden unless the right is handled and allowed.
    let wanted = AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev | AccessFs::Refer;
    let handled = AccessFs::from_all(known) & wanted;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(handled)
        .map_err(io::Error::other)?;
    let scoped = abi >= 6;
    if scoped {
        ruleset = ruleset.scope(Scope::from_all(known)).map_err(io::Error::other)?;
    }
    let mut created = ruleset.create().map_err(io::Error::other)?;
    for (place, right) in [(Path::new("/"), AccessFs::Refer), (devices, AccessFs::IoctlDev)] {
        if handled.contains(right) {
            created = created.add_rule(rule(place, right.into())?).map_err(io::Error::other)?;
        }
    }
    created.no_new_privs(false).restrict_self().map_err(io::Error::other)?;
    Ok(Some(LandlockStatus { abi, scoped }))
}

/// Restricts the caller and its children to reading files below these directories: they open, create, change, list or
/// execute nothing else, and reach no signal target or abstract socket outside this domain.
///
/// Returns the ABI; 0 if the kernel has no Landlock. The caller must have set `no_new_privs`.
pub fn only_read_below<'a>(dirs: impl IntoIterator<Item = &'a PathBuf>) -> io::Result<i64> {
    let abi = abi();
    if abi < 1 {
        return Ok(0);
    }
    let known = known(abi);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(known))
        .map_err(io::Error::other)?;
    if abi >= 6 {
        ruleset = ruleset.scope(Scope::from_all(known)).map_err(io::Error::other)?;
    }
    let mut created = ruleset.create().map_err(io::Error::other)?;
    for dir in dirs {
        created = created.add_rule(rule(dir, AccessFs::ReadFile.into())?).map_err(io::Error::other)?;
    }
    created.no_new_privs(false).restrict_self().map_err(io::Error::other)?;
    Ok(abi)
}

fn rule(path: &Path, access: landlock::BitFlags<AccessFs>) -> io::Result<PathBeneath<PathFd>> {
    Ok(PathBeneath::new(PathFd::new(path).map_err(io::Error::other)?, access))
}

fn known(abi: i64) -> ABI {
    match abi {
        1 => ABI::V1,
        2 => ABI::V2,
        3 => ABI::V3,
        4 => ABI::V4,
        5 => ABI::V5,
        // ABI 7 only added logging of denials.
        _ => ABI::V6,
    }
}
