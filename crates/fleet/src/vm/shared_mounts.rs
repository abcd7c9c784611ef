//! Host directories that a microVM shares live through virtiofs: checks what is possible.
//!
//! Invariant: a microVM with a shared directory boots and its memory is never saved, because the state of virtiofsd
//! cannot be saved with it.

use body::vm::virtiofsd::SHARES_MAX;
use proto::{Failure, Kind, Spec, vm::Engine};

/// Refuses mounts that cannot be shared with a microVM.
pub(super) fn check(spec: &Spec) -> Result<(), Failure> {
    let usage = |what: String, hint: &str| Err(Failure::new(Kind::Usage, what).hint(hint));
    let mounts = &spec.mounts;
    match spec.share {
        None => Ok(()),
        Some(share) if mounts.is_empty() => usage(
            format!("the request shares mounts through {}, but has no mount", share.name()),
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

/// Checks that a hypervisor supports virtiofs.
pub(super) fn check_engine(spec: &Spec, hypervisor: Engine) -> Result<(), Failure> {
    if spec.share.is_some() && hypervisor == Engine::Firecracker {
        return Err(Failure::new(Kind::Usage, "Firecracker has no device that shares a directory")
            .hint("use another engine: --engine qemu, or --engine cloud-hypervisor"));
    }
    Ok(())
}

/// Refuses to save the memory of a microVM with shared directories: virtiofsd runs outside of the microVM, and its
/// state cannot be saved.
pub(super) fn check_freeze(spec: &Spec) -> Result<(), Failure> {
    if spec.share.is_none() {
        return Ok(());
    }
    let id = &spec.id;
    Err(Failure::new(
        Kind::Usage,
        format!("Body {id} shares a directory of the host, so the memory of its microVM cannot be saved"),
    )
    .hint(format!("stop it first, then its files can be saved: pal stop {id}"))
    .hint("or create it without --mount, and copy what it needs: pal cp"))
}

/// The failure that says where to get virtiofsd.
pub(super) fn virtiofsd_missing() -> Failure {
    Failure::new(Kind::Host, "sharing a directory with a microVM needs virtiofsd, which is not installed")
        .hint(SHARE_TOOL)
}

/// Debian 12 ships virtiofsd with QEMU, later releases as a package of its own.
pub(super) const SHARE_TOOL: &str =
    "install it: apt-get install qemu-system-common, or virtiofsd if your system has that package";
