//! Converts the errors of lower crates into failures for users and API clients.

use body::{guest::GuestError, ids::IdsError, layers::LayerError, snapshot::SnapshotError};
use proto::{BodyId, Failure, Kind, guest::StartRefusal};
use store::{AppendError, ArtifactError, OpenError, ReadError};

pub use body::failure::{dir, process, snapshot};

/// The event of an action could not be appended.
pub fn append(error: AppendError) -> Failure {
    let failure = Failure::new(Kind::Host, "cannot write the event, so the action was not taken");
    match error {
        AppendError::DiskFull => {
            failure.because(error).hint("make room on the disk that holds the data directory: pal gc")
        }
        error => failure.because(error).hint("look at the log: pal events verify"),
    }
}

pub fn read(error: ReadError) -> Failure {
    Failure::new(Kind::Host, "cannot read the event log")
        .because(error)
        .hint("look at the log: pal events verify")
}

pub fn open(error: OpenError) -> Failure {
    let newer = matches!(error, OpenError::Newer { .. });
    let failure = Failure::new(Kind::Host, "cannot open the event log").because(error);
    if newer {
        failure.hint("use the newer pal that wrote it, or another directory: --data DIR")
    } else {
        failure
    }
}

pub fn artifact(error: ArtifactError) -> Failure {
    Failure::new(Kind::Host, "cannot store the output of the command")
        .because(error)
        .hint("make room: pal gc")
}

pub fn ids(error: IdsError) -> Failure {
    if matches!(error, IdsError::TooFew) {
        return Failure::new(Kind::Host, "this Body cannot have a root file system of its own")
            .because(error)
            .hint("install the helpers: apt-get install uidmap")
            .hint(
                "and give yourself ids: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER",
            );
    }
    if matches!(error, IdsError::OnlyRoot) {
        return Failure::new(Kind::Host, "root inside a user namespace cannot create Bodies")
            .because(error)
            .hint("run pal outside of the namespace, or as an ordinary user");
    }
    Failure::new(Kind::Limit, "no ids are left for another Body")
        .because(error)
        .hint("remove Bodies you no longer need: pal rm BODY")
}

/// The host ids of an existing Body are no longer its own.
pub fn ids_of(body: &BodyId, error: IdsError) -> Failure {
    Failure::new(Kind::Conflict, format!("Body {body} cannot run"))
        .because(error)
        .hint(format!("a copy of it gets ids of its own: pal fork {body}"))
}

/// A layer could not be created.
pub fn layer(error: LayerError) -> Failure {
    Failure::new(Kind::Host, "cannot create a layer of the template").because(error).hint("make room: pal gc")
}

/// A repository could not be imported, or a Body's work could not be saved or landed.
pub fn workspace(doing: &str, error: workspace::WorkspaceError) -> Failure {
    use workspace::{GitError, WorkspaceError};
    let full = error.is_full();
    let failure = match error {
        WorkspaceError::Repository(message) => Failure::new(Kind::Usage, format!("{doing}: {message}")),
        WorkspaceError::Conflict(message) | WorkspaceError::Unsound { why: message, .. } => {
            Failure::new(Kind::Conflict, format!("{doing}: {message}"))
        }
        WorkspaceError::NotFound(message) => Failure::new(Kind::NotFound, format!("{doing}: {message}")),
        WorkspaceError::Hostile(message) => Failure::new(Kind::Limit, format!("{doing}: {message}")),
        error @ WorkspaceError::Git(GitError::Missing(_)) => {
            Failure::new(Kind::Host, doing.to_owned()).because(error).hint("install git: apt-get install git")
        }
        error => Failure::new(Kind::Host, doing.to_owned()).because(error),
    };
    if full { failure.hint("make room on the disk: pal gc, or pal df to see where it went") } else { failure }
}

/// The remains of a Body or a snapshot could not be removed.
pub fn removal(error: SnapshotError) -> Failure {
    Failure::new(Kind::Host, "cannot remove leftover files").because(error).hint("try again: pal gc")
}

/// A Body runs a guest of an earlier version.
pub fn old_guest(id: &BodyId, act: &str) -> Failure {
    Failure::new(Kind::Conflict, format!("the guest of Body {id} is too old to {act}"))
        .hint(format!("start it again with this pal: pal stop {id} && pal start {id}"))
}

/// Converts an error of the guest client, with hints for the command line.
pub fn guest(error: GuestError) -> Failure {
    match error {
        GuestError::Refused { message, reason: Some(StartRefusal::CommandNotFound), .. } => {
            Failure::new(Kind::CommandNotFound, message)
        }
        GuestError::Refused { message, reason: Some(StartRefusal::CommandNotExecutable), .. } => {
            Failure::new(Kind::CommandNotExecutable, message)
        }
        GuestError::Refused { code, message, reason: None } => {
            let kind = match code.as_str() {
                "not_found" | "404" => Kind::NotFound,
                "permission_denied" | "unauthenticated" | "401" | "403" => Kind::Denied,
                "already_exists" | "unavailable" | "failed_precondition" | "aborted" | "409" | "503" => {
                    Kind::Conflict
                }
                "resource_exhausted" | "deadline_exceeded" | "413" | "507" => Kind::Limit,
                "invalid_argument" | "400" => Kind::Usage,
                _ => Kind::Internal,
            };
            Failure::new(kind, message)
        }
        error @ (GuestError::Connect(_) | GuestError::Broken(_)) => {
            Failure::new(Kind::Host, "the Body's guest is gone").because(error).hint("see why: pal ls")
        }
        error => Failure::new(Kind::Host, "the Body's guest cannot be used")
            .because(error)
            .hint("end it: pal stop BODY, or pal rm --force BODY"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_cannot_run_is_known_by_its_reason_and_not_by_words() {
        let refused = |code: &str, message: &str, reason| {
            let code = code.to_owned();
            guest(GuestError::Refused { code, message: message.to_owned(), reason }).kind.exit_code()
        };
        let (missing, inert) = (StartRefusal::CommandNotFound, StartRefusal::CommandNotExecutable);
        assert_eq!(refused("not_found", "anything", Some(missing)), 127);
        assert_eq!(refused("permission_denied", "anything", Some(inert)), 126);
        assert_eq!(refused("not_found", "command not found: x", None), Kind::NotFound.exit_code());
        assert_eq!(refused("permission_denied", "not executable: x", None), Kind::Denied.exit_code());
    }
}
