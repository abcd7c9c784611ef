//! The result of a probe, and how an errno becomes a verdict.

use serde::{Deserialize, Serialize};

use crate::sys::{Errno, SyscallResult};

/// Whether a door is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorState {
    /// The door is open: the probe reached the outside, or could have.
    Reached,
    /// The door is closed.
    Denied,
    /// The probe could not try the door, so the result is unknown.
    Broken,
}

/// A verdict and its evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeOutcome {
    pub verdict: DoorState,
    pub detail: String,
}

pub fn reached(detail: impl Into<String>) -> ProbeOutcome {
    ProbeOutcome { verdict: DoorState::Reached, detail: detail.into() }
}

pub fn denied(detail: impl Into<String>) -> ProbeOutcome {
    ProbeOutcome { verdict: DoorState::Denied, detail: detail.into() }
}

/// Closed because this kernel or this root has no such resource. As a control: cannot be shown here.
pub fn absent(detail: impl std::fmt::Display) -> ProbeOutcome {
    denied(format!("absent: {detail}"))
}

pub fn broken(detail: impl Into<String>) -> ProbeOutcome {
    ProbeOutcome { verdict: DoorState::Broken, detail: detail.into() }
}

/// The errnos of a refusal.
const REFUSALS: &[i32] = &[libc::EPERM, libc::EACCES, libc::EROFS];

/// The errnos of a missing resource.
const ABSENCES: &[i32] = &[
    libc::ENOSYS,
    libc::ENOENT,
    libc::ENOTDIR,
    libc::ENXIO,
    libc::ENODEV,
    libc::EAFNOSUPPORT,
    libc::EPROTONOSUPPORT,
    libc::ESOCKTNOSUPPORT,
    libc::EOPNOTSUPP,
];

/// Judges one call. `past` are the errnos that this call returns only after it was permitted.
pub fn judge(what: &str, tried: SyscallResult, past: &[i32]) -> ProbeOutcome {
    judge_more(what, tried, past, &[])
}

/// Judges one call, with `closed` as further errnos that mean a refusal of this very call.
pub fn judge_more(what: &str, tried: SyscallResult, past: &[i32], closed: &[i32]) -> ProbeOutcome {
    let Err(error) = tried else {
        return reached(format!("{what} succeeded"));
    };
    let Errno(number) = error;
    if past.contains(&number) {
        reached(format!("{what}: {error}, which comes after the permission check"))
    } else if REFUSALS.contains(&number) || closed.contains(&number) {
        denied(format!("{what}: {error}"))
    } else if ABSENCES.contains(&number) {
        absent(format_args!("{what}: {error}"))
    } else {
        broken(format!("{what}: {error} is neither a yes nor a no"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_that_says_nothing_is_broken_not_denied() {
        let verdict = |number, past: &[i32]| judge("x", Err(Errno(number)), past).verdict;
        assert_eq!(verdict(libc::EPERM, &[]), DoorState::Denied);
        assert_eq!(verdict(libc::ENOSYS, &[]), DoorState::Denied);
        assert_eq!(verdict(libc::EINVAL, &[]), DoorState::Broken);
        assert_eq!(verdict(libc::EINVAL, &[libc::EINVAL]), DoorState::Reached);
        assert_eq!(verdict(libc::ENOENT, &[libc::ENOENT]), DoorState::Reached);
        assert_eq!(judge("x", Ok(3), &[]).verdict, DoorState::Reached);
    }

    #[test]
    fn what_is_not_here_says_so() {
        assert_eq!(judge("open", Err(Errno(libc::ENOENT)), &[]), denied("absent: open: ENOENT"));
    }
}
