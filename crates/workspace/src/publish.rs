//! Transfers a Body's work into the user's repository, under refs of its own.
//!
//! Invariant: a ref is set only after all objects that it needs are there and synced to disk; git verifies it
//! afterwards.
//! Invariant: git's fsck checks every object that comes in, except for rules about the contents of
//! `.gitmodules` and `.gitattributes`: a save keeps such files as they are. A landing checks these rules,
//! too.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    error::WorkspaceError,
    git::{Git, GitError, GitReason},
    quarantine::QuarantineView,
};

/// fsck rules about the contents of `.gitmodules` and `.gitattributes`; a save must not fail on them.
const CONTENT_RULES: &[&str] = &[
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
/// Largest pack of one save.
const PACK_LEN_MAX: u64 = 16 << 30;

/// The refs that the user's repository has for a Body.
#[derive(Debug, Default)]
pub struct PublishedRefs(BTreeMap<String, RefTarget>);

/// The commit and tree of one ref.
#[derive(Debug)]
struct RefTarget {
    id: String,
    tree: String,
    parents: String,
}

impl PublishedRefs {
    /// Reads all refs below the namespace `to`.
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

    /// The commit of a ref.
    pub fn id(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|named| named.id.as_str())
    }

    /// The tree of a ref's commit.
    pub fn tree(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|named| named.tree.as_str())
    }

    /// The commit of a ref, if it has this tree and this parent.
    pub fn commit(&self, name: &str, tree: &str, parent: &str) -> Option<String> {
        self.0
            .get(name)
            .filter(|named| named.tree == tree && named.parents == parent)
            .map(|named| named.id.clone())
    }

    /// The commits of the refs `KIND/1`, `KIND/2` and so on, newest first.
    pub fn numbered(&self, kind: &str) -> Vec<String> {
        let mut found: Vec<(u64, &str)> = self
            .0
            .iter()
            .filter_map(|(name, named)| {
                let number = name.strip_prefix(kind)?.strip_prefix('/')?.parse().ok()?;
                Some((number, named.id.as_str()))
            })
            .collect();
        found.sort_unstable();
        found.into_iter().rev().map(|(_, id)| id.to_owned()).collect()
    }

    /// The number that the next ref `KIND/N` gets.
    pub fn next_number(&self, kind: &str) -> u64 {
        let numbers =
            self.0.keys().filter_map(|name| name.strip_prefix(kind)?.strip_prefix('/')?.parse().ok());
        numbers.max().map_or(1, |last: u64| last + 1)
    }

    /// The commits of all refs; the repository has everything that they need.
    pub fn ids(&self) -> BTreeSet<&str> {
        self.0.values().map(|named| named.id.as_str()).collect()
    }
}

/// Transfers the wanted commits into the user's repository and sets the refs. `there` lists commits that it
/// has already.
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
        transfer_objects(view, user, lines)?;
    }
    set_refs(user, to, wanted, known)
}

/// Packs all new objects and lets the user's git index them. Packing fails if an object is missing.
fn transfer_objects(view: &QuarantineView, user: &Git, lines: String) -> Result<(), WorkspaceError> {
    let give = ["pack-objects", "--revs", "--stdout", "--thin", "--delta-base-offset", "-q"];
    let taker = user.clone().rlimited().durable();
    let lenient = CONTENT_RULES.iter().map(|check| format!("{check}=ignore")).collect::<Vec<_>>().join(",");
    let bound = format!("--max-input-size={PACK_LEN_MAX}");
    let take = ["index-pack", "--stdin", "--fix-thin", &bound, &format!("--strict={lenient}")];
    match view.git().pipe_pack(&give, lines.clone().into_bytes(), &taker, &take) {
        // A partial clone lacks objects on purpose, so check only the new ones.
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

/// Sets all refs in one transaction and verifies each of them.
fn set_refs(
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
    // git cannot have refs `a` and `a/b` at once, so an old one that clashes is deleted first.
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

/// Runs git's fsck with all rules on the objects of `new` that `old` lacks.
pub fn check(view: &QuarantineView, new: &[&str], old: &[&str]) -> Result<(), WorkspaceError> {
    let give = ["pack-objects", "--revs", "--stdout", "--delta-base-offset", "-q"];
    let taker = view.writing().scratch();
    let lines: String =
        new.iter().map(|id| format!("{id}\n")).chain(old.iter().map(|id| format!("^{id}\n"))).collect();
    view.git().pipe_pack(&give, lines.into_bytes(), &taker, &["index-pack", "--stdin", "--fsck-objects"])?;
    Ok(())
}
