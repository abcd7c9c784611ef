//! Work on its way into the user's repository, under names of its own.
//!
//! Invariant: a name is set only when everything it needs is there and on the disk; it is looked at again afterwards.
//! Invariant: what comes in was fully checked by git's fsck, but for what plain files of a Body say to git itself: those
//! are saved as they are. Nothing lands without a check that has no such exception.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    error::WorkspaceError,
    git::{Git, GitError, GitReason},
    quarantine::QuarantineView,
};

/// Checks of what `.gitmodules` and `.gitattributes` say: a save must not fail for it.
const OF_CONTENTS: &[&str] = &[
    "gitmodulesBlob",
    "gitmodulesLarge",
    "gitmodulesMissing",
    "gitmodulesName",
    "gitmodulesParse",
    "gitmodulesPath",
    "gitmodulesSymlink",
    "gitmodulesUpdate",
    "gitmodulesUrl",
    "gitattributesBlob",
    "gitattributesLarge",
    "gitattributesLineLength",
    "gitattributesMissing",
];
/// Most that one save brings, packed.
const TAKEN_MAX: u64 = 16 << 30;

/// What the user's repository has of a Body.
#[derive(Debug, Default)]
pub struct PublishedRefs(BTreeMap<String, RefTarget>);

/// What one name stands for.
#[derive(Debug)]
struct RefTarget {
    id: String,
    tree: String,
    parents: String,
}

impl PublishedRefs {
    /// Asks for everything below `to`.
    pub fn ask(user: &Git, to: &str) -> Result<Self, WorkspaceError> {
        let said = user.line([
            "for-each-ref",
            "--format=%(objectname)%00%(tree)%00%(parent)%00%(refname)",
            &format!("{to}/"),
        ])?;
        let mut all = BTreeMap::new();
        for line in said.lines() {
            let fields: Vec<&str> = line.split('\0').collect();
            let [id, tree, parents, name] = fields[..] else {
                return Err(GitError::Answer("for-each-ref").into());
            };
            let name = name.strip_prefix(to).and_then(|name| name.strip_prefix('/')).unwrap_or(name);
            all.insert(
                name.to_owned(),
                RefTarget { id: id.to_owned(), tree: tree.to_owned(), parents: parents.to_owned() },
            );
        }
        Ok(Self(all))
    }

    /// What a name stands for.
    pub fn id(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|named| named.id.as_str())
    }

    /// The files of what a name stands for.
    pub fn tree(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|named| named.tree.as_str())
    }

    /// The commit of that name, where it has that tree and that parent.
    pub fn commit(&self, name: &str, tree: &str, parent: &str) -> Option<String> {
        self.0
            .get(name)
            .filter(|named| named.tree == tree && named.parents == parent)
            .map(|named| named.id.clone())
    }

    /// Everything that has a name, and so all that it needs.
    pub fn ids(&self) -> BTreeSet<&str> {
        self.0.values().map(|named| named.id.as_str()).collect()
    }
}

/// Has the user's repository take what is wanted, and looks that it did. `there` is known to be in it.
pub fn publish(
    view: &QuarantineView,
    user: &Git,
    to: &str,
    wanted: &BTreeMap<String, String>,
    known: &PublishedRefs,
    there: &[&str],
) -> Result<(), WorkspaceError> {
    if wanted.iter().all(|(name, id)| known.id(name) == Some(id)) {
        return Ok(());
    }
    let had: BTreeSet<&str> = known.ids().into_iter().chain(there.iter().copied()).collect();
    let new: BTreeSet<&str> = wanted.values().map(String::as_str).filter(|id| !had.contains(id)).collect();
    if !new.is_empty() {
        let lines: String =
            new.iter().map(|id| format!("{id}\n")).chain(had.iter().map(|id| format!("^{id}\n"))).collect();
        hand_over(view, user, lines)?;
    }
    set_names(user, to, wanted, known)
}

/// Packing walks everything that is new, and fails where something is missing.
fn hand_over(view: &QuarantineView, user: &Git, lines: String) -> Result<(), WorkspaceError> {
    let give = ["pack-objects", "--revs", "--stdout", "--thin", "--delta-base-offset", "-q"];
    let taker = user.clone().rlimited().durable();
    let lenient = OF_CONTENTS.iter().map(|check| format!("{check}=ignore")).collect::<Vec<_>>().join(",");
    let bound = format!("--max-input-size={TAKEN_MAX}");
    let take = ["index-pack", "--stdin", "--fix-thin", &bound, &format!("--strict={lenient}")];
    match view.git().pipe_pack(&give, lines.clone().into_bytes(), &taker, &take) {
        // In a partial clone.
        Err(error) if error.reason() == Some(GitReason::MissingObject) => {
            view.git().pipe_pack(
                &give,
                lines.into_bytes(),
                &taker,
                &["index-pack", "--stdin", "--fix-thin", &bound, "--fsck-objects"],
            )?;
        }
        done => done?,
    }
    Ok(())
}

/// Sets all names at once, and has git look at each of them again.
fn set_names(
    user: &Git,
    to: &str,
    wanted: &BTreeMap<String, String>,
    known: &PublishedRefs,
) -> Result<(), WorkspaceError> {
    let mut lines = String::new();
    let mut at_once = |verb: &str, names: &mut dyn Iterator<Item = (String, String)>| {
        lines.push_str("start\n");
        names.for_each(|(name, id)| lines.push_str(&format!("{verb} {to}/{name} {id}\n")));
        lines.push_str("prepare\ncommit\n");
    };
    // A branch `a` that became `a/b`, or the other way round, stands in its own way.
    let below = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.starts_with('/'));
    let mut in_the_way = known
        .0
        .iter()
        .filter(|(old, _)| wanted.keys().any(|new| below(new, old) || below(old, new)))
        .peekable();
    if in_the_way.peek().is_some() {
        at_once("delete", &mut in_the_way.map(|(name, named)| (name.clone(), named.id.clone())));
    }
    at_once("update", &mut wanted.iter().map(|(name, id)| (name.clone(), id.clone())));
    at_once("verify", &mut wanted.iter().map(|(name, id)| (name.clone(), id.clone())));
    user.clone().durable().feed(["update-ref", "--stdin"], lines.into_bytes())?;
    Ok(())
}

/// Has git's fsck look at everything of `new` that `old` lacks, as strictly as it can.
pub fn check(view: &QuarantineView, new: &[&str], old: &[&str]) -> Result<(), WorkspaceError> {
    let give = ["pack-objects", "--revs", "--stdout", "--delta-base-offset", "-q"];
    let taker = view.writing().scratch();
    let lines: String =
        new.iter().map(|id| format!("{id}\n")).chain(old.iter().map(|id| format!("^{id}\n"))).collect();
    view.git().pipe_pack(&give, lines.into_bytes(), &taker, &["index-pack", "--stdin", "--fsck-objects"])?;
    Ok(())
}
