//! The state of the user's files that a Body's work is compared with: where the Body began, the newest commit
//! that `pal sync` brought in and the Body took over, or the Body's own state when it last landed.
//!
//! The records are refs of the user's repository: `refs/palisade/BODY/synced/N` is a commit that was brought in;
//! `refs/palisade/BODY/landed/N` is a commit whose tree is the state that landed, with two parents: the commit
//! that the branch moved to, and the Body's own commit.
//!
//! Trust: a Body chooses its history, so the base moves only to a commit that one of these refs names, and
//! `pal diff` and `pal land` use the same one.

use proto::BodyId;

use crate::{
    error::WorkspaceError,
    git::{Git, GitError},
    publish::PublishedRefs,
    refs::namespace,
};

/// The prefixes of the records below a Body's namespace.
pub(crate) const SYNCED: &str = "synced";
const LANDED: &str = "landed";

/// The commits that a Body's work is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkBase {
    /// The user's commit that the Body's history builds on.
    pub(crate) origin: String,
    /// The commit with the files: `origin`, or one on top of it that holds uncommitted work of the user.
    pub(crate) base: String,
}

impl WorkBase {
    /// Finds the newest commit that was brought into the Body and that `head` contains; `start` if there is none.
    pub(crate) fn find(git: &Git, known: &PublishedRefs, head: &str, start: WorkBase) -> Self {
        known
            .numbered(SYNCED)
            .into_iter()
            .find(|id| is_ancestor(git, id, head))
            .map_or(start, |id| Self { origin: id.clone(), base: id })
    }
}

/// Whether one commit is another or among its ancestors; false if one of them is missing.
pub(crate) fn is_ancestor(git: &Git, old: &str, new: &str) -> bool {
    old == new || git.run(["merge-base", "--is-ancestor", old, new]).is_ok()
}

/// Records that a commit of the user goes into a Body.
pub fn record_sync(git: &Git, body: &BodyId, commit: &str) -> Result<(), WorkspaceError> {
    let known = PublishedRefs::ask(git, &namespace(body))?;
    if known.numbered(SYNCED).first().is_some_and(|last| last == commit) {
        return Ok(());
    }
    let to = next_name(&known, body, SYNCED);
    git.clone().durable().run(["update-ref", &to, commit])?;
    Ok(())
}

/// A landing of a Body's work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Landing {
    /// The record itself, whose tree is the state that landed.
    pub(crate) state: String,
    /// The Body's own commit at that time.
    pub(crate) head: String,
}

impl Landing {
    /// Finds the newest landing that the branch at `start` contains, unless `origin` contains it, too.
    pub(crate) fn find(
        git: &Git,
        body: &str,
        start: &str,
        origin: &str,
    ) -> Result<Option<Self>, WorkspaceError> {
        let said = git.line([
            "for-each-ref",
            "--sort=-version:refname",
            "--format=%(objectname) %(parent)",
            &format!("refs/palisade/{body}/{LANDED}/"),
        ])?;
        for line in said.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [state, to, ref rest @ ..] = fields[..] else {
                return Err(GitError::Answer("for-each-ref").into());
            };
            // git drops a second parent that equals the first.
            let head = rest.first().copied().unwrap_or(to);
            if is_ancestor(git, to, start) {
                let found = Self { state: state.to_owned(), head: head.to_owned() };
                return Ok(Some(found).filter(|_| !is_ancestor(git, to, origin)));
            }
        }
        Ok(None)
    }
}

/// Makes the record of a landing; returns its ref and its commit. The caller sets the ref together with the branch.
pub(crate) fn make_landing(
    git: &Git,
    body: &str,
    tree: &str,
    to: &str,
    head: &str,
) -> Result<(String, String), WorkspaceError> {
    let palisade = crate::refs::as_palisade(git.clone()).durable();
    let record = palisade.line(["commit-tree", tree, "-p", to, "-p", head, "-m", "landed"])?;
    let space = format!("refs/palisade/{body}");
    let number = PublishedRefs::ask(git, &space)?.next_number(LANDED);
    Ok((format!("{space}/{LANDED}/{number}"), record))
}

/// Copies the records of a Body to a fork of it, which has the same state.
pub(crate) fn copy_records(git: &Git, from: &BodyId, to: &BodyId) -> Result<(), WorkspaceError> {
    let lines: String = records(git, from)?
        .iter()
        .map(|(name, id)| format!("update {}/{name} {id}\n", namespace(to)))
        .collect();
    if !lines.is_empty() {
        git.feed(["update-ref", "--stdin"], lines.into_bytes())?;
    }
    Ok(())
}

/// Removes the records of a Body.
pub(crate) fn remove_records(git: &Git, body: &BodyId) -> Result<(), WorkspaceError> {
    let lines: String =
        records(git, body)?.iter().map(|(name, _)| format!("delete {}/{name}\n", namespace(body))).collect();
    if !lines.is_empty() {
        git.feed(["update-ref", "--stdin"], lines.into_bytes())?;
    }
    Ok(())
}

/// The records of a Body: the end of each ref's name, and its commit.
fn records(git: &Git, body: &BodyId) -> Result<Vec<(String, String)>, WorkspaceError> {
    let space = namespace(body);
    let said = git.line([
        "for-each-ref".to_owned(),
        "--format=%(objectname) %(refname)".to_owned(),
        format!("{space}/{SYNCED}/"),
        format!("{space}/{LANDED}/"),
    ])?;
    let record = |line: &str| {
        let (id, name) = line.split_once(' ')?;
        Some((name.strip_prefix(&space)?.strip_prefix('/')?.to_owned(), id.to_owned()))
    };
    Ok(said.lines().filter_map(record).collect())
}

fn next_name(known: &PublishedRefs, body: &BodyId, kind: &str) -> String {
    format!("{}/{kind}/{}", namespace(body), known.next_number(kind))
}
