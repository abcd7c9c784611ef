//! Examines this host's support for microVMs, by trying it.

use std::fs;

use body::{
    driver::{DoctorFinding, Examination},
    vm::{LastBoot, MicrovmInstall, SetupRecord},
};
use proto::{
    MechanismStatus,
    vm::{Accelerator, Engine},
};

use super::{SHARE_TOOL, hypervisors};
use crate::Settings;

/// Examines the current setup and the last successful boot.
pub(super) fn examine(install: &MicrovmInstall, settings: &Settings) -> Examination {
    let (setup, booted) = (install.setup().ok(), install.last_boot());
    let mut findings = vec![microvm(setup.as_ref(), booted.as_ref()), kvm(setup.as_ref())];
    findings.extend(hypervisors(setup.as_ref(), settings));
    findings.push(sharing());
    findings.push(device("vsock", "/dev/vhost-vsock", "modprobe vhost_vsock"));
    Examination { findings, lacks: unproven(setup.as_ref(), booted.as_ref()).map(str::to_owned) }
}

/// Reports whether KVM works: the result of `pal setup microvm`, which boots a microVM with it, else only whether the
/// device opens. An open device proves nothing: on some hosts KVM creates a VM that never runs.
fn kvm(setup: Option<&SetupRecord>) -> DoctorFinding {
    let name = "kvm".to_owned();
    if let Some(verdict) = setup.and_then(|setup| setup.verdict.as_ref()) {
        let (state, fix) = match verdict.accelerator {
            Accelerator::Kvm => (MechanismStatus::Enforced, None),
            Accelerator::Emulated => (
                MechanismStatus::Absent,
                Some(
                    "use a host with (nested) virtualisation; without KVM, microVMs are emulated".to_owned(),
                ),
            ),
        };
        return DoctorFinding { name, state, detail: verdict.why.clone(), fix };
    }
    let opened = fs::File::options().read(true).write(true).open(proto::vm::KVM);
    let detail = match opened {
        Ok(_) => "/dev/kvm opens; `pal setup microvm` tests whether a microVM boots with it".to_owned(),
        Err(error) => format!("/dev/kvm: {error}; microVMs are emulated"),
    };
    DoctorFinding { name, state: MechanismStatus::Absent, detail, fix: Some("pal setup microvm".to_owned()) }
}

/// The reason why microVMs are not usable, if they are not: no boot with the current setup has succeeded.
pub(super) fn unproven(setup: Option<&SetupRecord>, booted: Option<&LastBoot>) -> Option<&'static str> {
    match (setup, booted) {
        (None, _) => Some("it is not set up: pal setup microvm"),
        (Some(setup), Some(booted)) if booted.proves(setup) => None,
        _ => Some("the current setup was not seen to boot: pal setup microvm"),
    }
}

/// Reports the last successful boot, because installed files alone prove nothing.
fn microvm(setup: Option<&SetupRecord>, booted: Option<&LastBoot>) -> DoctorFinding {
    let seen = booted.map(|boot| {
        format!(
            "the kernel {} booted at {} under {} ({}, {} ms)",
            boot.release,
            boot.at,
            boot.engine,
            boot.accelerator.name(),
            boot.took_ms
        )
    });
    let (state, detail) = match (setup, unproven(setup, booted)) {
        (None, _) => (MechanismStatus::Absent, "not set up".to_owned()),
        (Some(_), None) => (MechanismStatus::Enforced, seen.unwrap_or_default()),
        (Some(setup), Some(_)) => {
            let last =
                seen.map_or_else(|| "no boot was seen".to_owned(), |seen| format!("last seen: {seen}"));
            let detail = format!(
                "the kernel {} is set up and was not seen to boot with the QEMU that is installed; {last}",
                setup.kernel_source
            );
            (MechanismStatus::Absent, detail)
        }
    };
    let fix = (state != MechanismStatus::Enforced).then(|| "pal setup microvm".to_owned());
    DoctorFinding { name: "microvm".to_owned(), state, detail, fix }
}

/// Reports the optional hypervisors besides QEMU.
fn hypervisors(setup: Option<&SetupRecord>, settings: &Settings) -> Vec<DoctorFinding> {
    let finding = |(which, found, fix): (Engine, Result<String, String>, Option<String>)| {
        let (state, detail) = match found {
            Ok(version) => (MechanismStatus::Enforced, format!("microVMs boot under it: {version}")),
            Err(lack) => (MechanismStatus::Absent, lack),
        };
        DoctorFinding { name: which.name().to_owned(), state, detail, fix }
    };
    hypervisors::report(setup, settings).into_iter().map(finding).collect()
}

/// Reports virtiofsd, which shares directories with microVMs.
fn sharing() -> DoctorFinding {
    let found = body::vm::virtiofsd::find();
    DoctorFinding {
        name: body::vm::virtiofsd::VIRTIOFSD.into(),
        state: if found.is_ok() { MechanismStatus::Enforced } else { MechanismStatus::Absent },
        detail: match found {
            Ok(path) => path.display().to_string(),
            Err(_) => "not installed; microVMs share no directory without it".to_owned(),
        },
        fix: body::vm::virtiofsd::find().is_err().then(|| SHARE_TOOL.to_owned()),
    }
}

fn device(name: &str, path: &str, fix: &str) -> DoctorFinding {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => DoctorFinding {
            name: name.into(),
            state: MechanismStatus::Enforced,
            detail: format!("{path} opens"),
            fix: None,
        },
        Err(error) => DoctorFinding {
            name: name.into(),
            state: MechanismStatus::Absent,
            detail: format!("{path}: {error}"),
            fix: Some(fix.into()),
        },
    }
}
