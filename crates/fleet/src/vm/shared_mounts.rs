//! Directories of the host that a machine sees live: what can be asked for, and what cannot be done with it.
//!
//! Invariant: a machine with one boots; its memory is never frozen, for what shares the directory cannot be frozen with it.

use body::vm::virtiofsd::SHARES_MAX;
use proto::{Failure, Kind, Spec, vm::Engine};

/// Refuses mounts that cannot be shared with a microVM.
pub(super) fn check(spec: &Spec) -> Result<(), Failure> {
    let usage = |what: String, hint: &str| Err(Failure::new(Kind::Usage, what).hint(hint));
    let mounts = &spec.mounts;
    match spec.share {
        None => Ok(()),
        Some(share) if mounts.is_empty() => usage(
            format!("the Body is to share its mounts by {}, and has no mount", share.name()),
            "name a directory: --mount SRC:DST,type=virtiofs, or SRC:DST:rw,type=virtiofs",
        ),
        Some(_) if mounts.len() > SHARES_MAX => usage(
            format!("a microVM can share {SHARES_MAX} directories, not {}", mounts.len()),
            "share the directory above them",
        ),
        Some(_) => match mounts.iter().find(|mount| mount.source.is_file()) {
            Some(file) => usage(
                format!("{} is a file, and a microVM shares directories", file.source.display()),
                "share the directory it is in, or copy it: pal cp FILE BODY:PATH",
            ),
            None => Ok(()),
        },
    }
}

/// Whether a hypervisor has the device for it.
pub(super) fn check_engine(spec: &Spec, hypervisor: Engine) -> Result<(), Failure> {
    if spec.share.is_some() && hypervisor == Engine::Firecracker {
        return Err(Failure::new(Kind::Usage, "Firecracker has no device that shares a directory")
            .hint("take another: --engine qemu, or --engine cloud-hypervisor"));
    }
    Ok(())
}

/// What shares a directory is beside the machine, and has a state that nobody can write down.
pub(super) fn check_freeze(spec: &Spec) -> Result<(), Failure> {
    if spec.share.is_none() {
        return Ok(());
    }
    let id = &spec.id;
    Err(Failure::new(
        Kind::Usage,
        format!("Body {id} shares a directory of the host, so the memory of its machine cannot be frozen"),
    )
    .hint(format!("stop it first, then its files can be: pal stop {id}"))
    .hint("or make it without --mount, and copy what it needs: pal cp"))
}

/// Where to get what shares directories.
pub(super) fn virtiofsd_missing() -> Failure {
    Failure::new(Kind::Host, "sharing a directory with a microVM needs virtiofsd, which is not installed")
        .hint(SHARE_TOOL)
}

/// Debian 12 has it with QEMU, later ones by itself.
pub(super) const SHARE_TOOL: &str =
    "install it: apt-get install qemu-system-common, or virtiofsd where that is a package of its own";
