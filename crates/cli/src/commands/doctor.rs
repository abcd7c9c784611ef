//! `pal doctor`.

use fleet::{DoctorFinding, DoctorReport, Fleet, LayerCheck};
use proto::{Failure, Kind, Layer, MechanismStatus, text::visible};

use crate::{
    output::{self, Format},
    progress,
};

/// Prints what this host supports; fails if it does not even support layer process.
pub async fn doctor(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let doctor = progress::watch("trying", fleet.doctor()).await?;
    match format {
        Format::Json => output::json(&doctor)?,
        Format::Text => output::data(text(&doctor).as_bytes())?,
    }
    match doctor.layers.iter().find(|report| report.layer == Layer::Process) {
        Some(report) if report.usable => Ok(()),
        report => Err(unusable(report)),
    }
}

fn unusable(report: Option<&LayerCheck>) -> Failure {
    let lacks = report.map(|report| report.lacks.join(", ")).unwrap_or_default();
    Failure::new(Kind::Host, format!("this host cannot run Bodies on layer process: {lacks}"))
        .hint("see the lines with `fix:` above")
}

fn text(doctor: &DoctorReport) -> String {
    let mut text = String::from("layers\n");
    let width = doctor.layers.iter().map(|report| report.layer.name().len()).max().unwrap_or(0);
    for report in &doctor.layers {
        let state =
            if report.usable { "usable".into() } else { format!("not usable: {}", report.lacks.join(", ")) };
        text.push_str(&format!("  {:width$}  {}\n", report.layer.name(), visible(&state)));
    }
    let width = doctor.findings.iter().map(|finding| finding.name.chars().count()).max().unwrap_or(0);
    for state in [MechanismStatus::Enforced, MechanismStatus::Degraded, MechanismStatus::Absent] {
        let mut found = doctor.findings.iter().filter(|finding| finding.state == state).peekable();
        if found.peek().is_some() {
            text.push_str(&format!("\n{}\n", group(state)));
            found.for_each(|finding| text.push_str(&line(finding, width)));
        }
    }
    text
}

fn group(state: MechanismStatus) -> &'static str {
    match state {
        MechanismStatus::Enforced => "works",
        MechanismStatus::Degraded => "works in part",
        MechanismStatus::Absent => "missing",
    }
}

fn line(finding: &DoctorFinding, width: usize) -> String {
    let mut line = format!("  {:width$}  {}\n", visible(&finding.name), visible(&finding.detail));
    if let Some(fix) = &finding.fix {
        line.push_str(&format!("  {:width$}  fix: {}\n", "", visible(fix)));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_stand_in_groups_with_their_fixes() {
        let finding = |name: &str, state, fix: Option<&str>| DoctorFinding {
            name: name.into(),
            state,
            detail: "detail".into(),
            fix: fix.map(Into::into),
        };
        let doctor = DoctorReport {
            findings: vec![
                finding("kvm", MechanismStatus::Absent, Some("modprobe kvm")),
                finding("seccomp", MechanismStatus::Enforced, None),
            ],
            layers: vec![
                LayerCheck { layer: Layer::Process, usable: true, lacks: vec![], capabilities: None },
                LayerCheck {
                    layer: Layer::Microvm,
                    usable: false,
                    lacks: vec!["kvm".into()],
                    capabilities: None,
                },
            ],
        };
        let expected = "layers\n  process  usable\n  microvm  not usable: kvm\n\nworks\n  seccomp  detail\n\nmissing\n  \
                        kvm      detail\n           fix: modprobe kvm\n";
        assert_eq!(text(&doctor), expected);
    }
}
