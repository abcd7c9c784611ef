//! Errors of this crate in the form for users and clients.

use proto::{BodyId, Failure, Kind, launch::FailedKind};

use crate::{dir::DirError, process::ProcessError, snapshot::SnapshotError};

/// A record of a Body that cannot be used.
pub fn dir(id: &BodyId, error: DirError) -> Failure {
    match &error {
        // A directory without a spec is half created or half removed, and not a Body.
        DirError::Read { name: "spec.json", source } if source.kind() == std::io::ErrorKind::NotFound => {
            return Failure::new(Kind::NotFound, format!("there is no Body {id}")).hint("list them: pal ls");
        }
        _ => {}
    }
    Failure::new(Kind::Host, format!("the record of Body {id} cannot be used"))
        .because(error)
        .hint("remove what is left of it: pal gc")
}

/// A Body that could not be started, paused, resumed or ended.
pub fn process(doing: &str, error: ProcessError) -> Failure {
    let (hint, kind) = match &error {
        ProcessError::Refused(failed) if failed.kind == FailedKind::RestoreIncomplete => {
            (Some("its files are intact; boot it with them: --boot".to_owned()), Kind::RestoreIncomplete)
        }
        ProcessError::Refused(failed) => (failed.hint.clone(), Kind::Host),
        _ => (None, Kind::Host),
    };
    let failure = Failure::new(kind, doing.to_owned()).because(error);
    let failure = match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    };
    failure.hint("see what this host lacks: pal doctor")
}

/// A snapshot that could not be taken.
pub fn snapshot(error: SnapshotError) -> Failure {
    match error {
        SnapshotError::InMemory(_) => Failure::new(Kind::Conflict, error.to_string())
            .hint("make a Body that is kept: pal create, or pal run --keep"),
        error => Failure::new(Kind::Host, "cannot take the snapshot").because(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_restore_is_known_by_its_kind_and_not_by_words() {
        let failed = |kind| proto::launch::LaunchFailure {
            step: "restore the microVM".into(),
            cause: format!("{}: x", proto::failure::RESTORE_INCOMPLETE),
            hint: None,
            kind,
        };
        let told = |kind| process("cannot start", ProcessError::Refused(failed(kind))).kind;
        assert_eq!(told(FailedKind::RestoreIncomplete), Kind::RestoreIncomplete);
        assert_eq!(told(FailedKind::Host), Kind::Host);
    }
}
