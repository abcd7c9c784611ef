//! The schema types of work in repositories: changes, commits, saves, landings and comparisons.
//!
//! The answers are the JSON that `pal` prints with `--json`. These types describe them, and pass on fields that they do
//! not know.

use std::collections::BTreeMap;

use proto::{Failure, Kind};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::models::Body;

/// Converts a result of the fleet, which knows no schema, into its described form.
pub fn describe<T: DeserializeOwned>(result: &impl Serialize) -> Result<T, Failure> {
    let described = serde_json::to_value(result).and_then(serde_json::from_value);
    described.map_err(|error| {
        Failure::new(Kind::Internal, "the result does not match the API's description").because(error)
    })
}

/// Bodies that were created together.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedBodies {
    /// The new Bodies.
    pub items: Vec<Body>,
}

/// A file that a Body changed.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    /// Its path in the repository; bytes that are not UTF-8 are escaped.
    path: String,
    /// Number of added lines; null for a binary file.
    added: Option<u64>,
    /// Number of removed lines; null for a binary file.
    removed: Option<u64>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// A path that cannot be stored in a repository.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LeftOutPath {
    /// The path, escaped for a terminal.
    path: String,
    /// The reason.
    why: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The changes in one repository of a Body since the commit that it began with.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    /// The name of the repository in the Body.
    workspace: String,
    /// The commit that the Body began with.
    base: String,
    /// The git tree of the current files.
    tree: String,
    /// The changed files.
    files: Vec<FileChange>,
    /// Paths that git cannot store.
    skipped: Vec<LeftOutPath>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The saved work of one repository of a Body.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SavedRepository {
    /// The name of the repository in the Body.
    workspace: String,
    /// The commit that the Body began with.
    base: String,
    /// The Body's own last commit.
    head: String,
    /// The commit that holds every file.
    wip: String,
    /// Whether `wip` has more than the last commit.
    uncommitted: bool,
    /// The Body's branches and their commits.
    branches: BTreeMap<String, String>,
    /// Paths that were not saved.
    skipped: Vec<LeftOutPath>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The saved work of a Body.
#[derive(Debug, Serialize, ToSchema)]
pub struct SavedRepositories {
    /// One item for each repository.
    pub items: Vec<SavedRepository>,
}

/// A commit of a Body.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct CommitInfo {
    /// The commit id.
    id: String,
    /// The author's name, as the commit states it.
    author: String,
    /// The author's e-mail address.
    email: String,
    /// The author's time, in seconds since 1970.
    at: i64,
    /// The first line of its message.
    subject: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The commits of a Body.
#[derive(Debug, Serialize, ToSchema)]
pub struct CommitList {
    /// The saved state that holds the commits.
    pub saved: SavedRepository,
    /// The commits, newest first.
    pub commits: Vec<CommitInfo>,
}

/// The result of a landing.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LandedBranch {
    /// The branch.
    branch: String,
    /// The commit of the branch before; absent if the branch is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    from: Option<String>,
    /// The commit of the branch now.
    to: String,
    /// How many commits the branch gained.
    commits: u64,
    /// Changed files that a tool of the user may execute by itself.
    auto_executed: Vec<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The result of one Body of a queue.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct QueuedLanding {
    /// The Body.
    body: String,
    /// The landing, if its work landed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    landed: Option<LandedBranch>,
    /// The reason why its work did not land.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    why: Option<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The results of a queue.
#[derive(Debug, Serialize, ToSchema)]
pub struct QueuedLandings {
    /// One item for each Body, in their order.
    pub items: Vec<QueuedLanding>,
}

/// The commits that a Body got from a branch.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SyncedBranch {
    /// The name of the repository in the Body.
    workspace: String,
    /// The branch.
    branch: String,
    /// Its commit.
    commit: String,
    /// How many commits the Body did not get before.
    commits: u64,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The work of one Body in a comparison.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ComparedBody {
    /// The Body.
    body: String,
    /// The files that it changed.
    files: Vec<FileChange>,
    /// The exit code of its test, if one ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    test: Option<i32>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// Two Bodies that changed the same files.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FileOverlap {
    /// The first Body.
    one: String,
    /// The second Body.
    other: String,
    /// The files that both changed.
    files: Vec<String>,
    /// The files that conflict, whichever of the two lands first.
    conflicts: Vec<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The work of several Bodies, compared.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ComparedBodies {
    /// The work of each Body.
    bodies: Vec<ComparedBody>,
    /// Each pair of Bodies that changed the same file.
    overlaps: Vec<FileOverlap>,
    #[serde(flatten)]
    more: Map<String, Value>,
}
