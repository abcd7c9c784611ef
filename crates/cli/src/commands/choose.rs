//! Finds the Body that a command is about: the one that is named, or the only one of the current repository.

use std::path::{Path, PathBuf};

use fleet::{BodyView, Fleet};
use proto::{Failure, Kind, spec::BodyRole};

use crate::{args::ONLY_BODY, settings::absolute};

/// Most Bodies that an error lists.
const CHOICES_MAX: usize = 10;

/// Finds a Body by its key; without a key, the only Body of the current repository.
pub fn body(fleet: &Fleet, key: Option<&str>) -> Result<BodyView, Failure> {
    match key.filter(|key| *key != ONLY_BODY) {
        Some(key) => fleet.find(key),
        None => only_body(fleet),
    }
}

/// The common git directory of the repository of the current directory; none outside of repositories.
pub fn repository_here(fleet: &Fleet) -> Option<PathBuf> {
    let here = absolute(Path::new(".")).ok()?;
    fleet.workspaces().repository_at(&here, &super::work::git_identity())
}

/// Whether a Body holds this repository. The Body of a preparation does not count.
pub fn is_of(view: &BodyView, repository: &Path) -> bool {
    view.spec.role == BodyRole::Work
        && view.spec.workspaces.iter().any(|workspace| workspace.repository == repository)
}

fn only_body(fleet: &Fleet) -> Result<BodyView, Failure> {
    let repository = repository_here(fleet).ok_or_else(|| {
        Failure::new(Kind::Usage, "no Body is named, and the current directory is in no repository")
            .hint("name a Body: pal ls")
    })?;
    let mut own = fleet.list()?;
    own.retain(|view| is_of(view, &repository));
    match own.len() {
        1 => Ok(own.remove(0)),
        0 => Err(Failure::new(Kind::NotFound, "no Body is named, and this repository has none")
            .hint("create one: pal up")
            .hint("or name another: pal ls")),
        count => {
            let failure =
                Failure::new(Kind::Usage, format!("no Body is named, and this repository has {count}"));
            let failure =
                own.iter().take(CHOICES_MAX).fold(failure, |failure, view| failure.hint(choice(view)));
            Err(if count > CHOICES_MAX { failure.hint("see all of them: pal ls") } else { failure })
        }
    }
}

fn choice(view: &BodyView) -> String {
    let name = view.spec.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
    format!("name one: {}{name} ({})", view.id(), view.status.name())
}
