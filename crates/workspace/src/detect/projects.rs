//! Decides which directories of a repository count, and how much.
//!
//! The root counts, and each directory that palisade.toml names. The members that a project declares are installed
//! with it. Another directory with a lockfile is prepared if that succeeds, unless its name says that it holds tests,
//! examples, benchmarks, documents, or the code of others.

use std::collections::BTreeMap;

use super::{
    ecosystems::{ECOSYSTEMS, Ecosystem},
    members::MemberPatterns,
    needs::StepWeight,
    settings::PrepareSettings,
    tree::RepoTree,
};
use crate::error::WorkspaceError;

/// Most directories outside of the root that are prepared without being named.
const UNNAMED_MAX: usize = 16;
/// Most directories that one note lists.
const LISTED_MAX: usize = 3;

/// Words in the name of a directory whose dependencies do not count unless palisade.toml names it.
const UNCOUNTED_WORDS: &[&str] = &[
    "test",
    "tests",
    "testing",
    "testdata",
    "spec",
    "specs",
    "e2e",
    "fixture",
    "fixtures",
    "mock",
    "mocks",
    "snapshots",
    "corpus",
    "example",
    "examples",
    "sample",
    "samples",
    "demo",
    "demos",
    "tutorial",
    "tutorials",
    "playground",
    "playgrounds",
    "template",
    "templates",
    "bench",
    "benches",
    "benchmark",
    "benchmarks",
    "perf",
    "fuzz",
    "fuzzing",
    "fuzzer",
    "fuzzers",
    "doc",
    "docs",
    "documentation",
    "vendor",
    "vendored",
    "third",
    "thirdparty",
    "external",
    "extern",
    "contrib",
    "submodules",
    "generated",
    "gen",
    "dist",
    "out",
    "target",
    "node_modules",
    "__pycache__",
];

/// A directory whose packages a step installs.
#[derive(Debug, Clone)]
pub struct Project {
    /// The directory; empty for the root.
    pub dir: String,
    /// The kind of its manifest.
    pub ecosystem: &'static Ecosystem,
    /// How much it counts.
    pub weight: StepWeight,
    /// The manifests of the members that it declares.
    pub members: Vec<String>,
    /// Whether palisade.toml skips it: its tool comes, and no step runs.
    pub is_skipped: bool,
}

/// The projects of a repository, and one line for each thing that is left out.
#[derive(Debug, Default)]
pub struct ProjectList {
    pub projects: Vec<Project>,
    pub notes: Vec<String>,
}

/// Whether the name of a directory, or of one above it, says that its dependencies do not count.
fn is_uncounted(dir: &str) -> bool {
    let says = |word: &str| UNCOUNTED_WORDS.contains(&word);
    dir.split('/').any(|part| {
        part.starts_with('.') || says(part) || part.to_ascii_lowercase().split(['-', '_', '.']).any(says)
    })
}

/// Joins a directory and the name of a file in it.
pub fn path_in(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

/// Finds the projects of a repository, the root first and parents before their children.
pub fn find_projects(tree: &RepoTree, settings: &PrepareSettings) -> Result<ProjectList, WorkspaceError> {
    let found = find_manifests(tree, settings);
    let has_root = found.keys().any(|(dir, _)| dir.is_empty());
    let mut list = ProjectList::default();
    let mut patterns: Vec<(usize, MemberPatterns)> = Vec::new();
    let (mut uncounted, mut unlocked, mut too_many) = (Vec::new(), Vec::new(), Vec::new());
    for ((dir, index), manifest) in &found {
        let ecosystem = &ECOSYSTEMS[*index];
        let named = settings.is_named(dir);
        let is_skipped = manifest.is_skipped || settings.is_skipped(dir);
        if is_skipped {
            if dir.is_empty() {
                let (dir, members) = (String::new(), Vec::new());
                let weight = StepWeight::Optional;
                list.projects.push(Project { dir, ecosystem, weight, members, is_skipped });
            }
            continue;
        }
        let parent = patterns.iter().find(|(of, members)| {
            let parent: &Project = &list.projects[*of];
            parent.ecosystem.tool == ecosystem.tool && members.contain(&parent.dir, dir)
        });
        if let Some((of, _)) = parent.filter(|_| !named) {
            list.projects[*of].members.push(manifest.path.clone());
            continue;
        }
        let is_top = !dir.is_empty() && !dir.contains('/');
        let shown = proto::text::visible(&manifest.path);
        let weight = match manifest.lock {
            _ if dir.is_empty() || named => StepWeight::Required,
            Some(_) if is_uncounted(dir) => {
                uncounted.push(shown);
                continue;
            }
            _ if is_uncounted(dir) => continue,
            Some(_) => StepWeight::Optional,
            None if is_top && !has_root => StepWeight::Optional,
            None => {
                unlocked.extend(is_top.then_some(shown));
                continue;
            }
        };
        if weight == StepWeight::Optional && list.unnamed() >= UNNAMED_MAX {
            too_many.push(shown);
            continue;
        }
        let members = (ecosystem.members)(tree, dir)?;
        patterns.push((list.projects.len(), members));
        let dir = dir.clone();
        list.projects.push(Project { dir, ecosystem, weight, members: Vec::new(), is_skipped });
    }
    let uncounted_why =
        "directories of tests, benchmarks, examples, documents and vendored code do not count";
    list.note_left_out(uncounted_why, &uncounted);
    list.note_left_out("a directory outside of the root without a lockfile does not count", &unlocked);
    list.note_left_out("the repository has too many projects", &too_many);
    let gone = |dir: &&String| !found.keys().any(|(of, _)| of == *dir);
    for dir in settings.directories.iter().filter(gone) {
        list.notes.push(format!(
            "palisade.toml names the directory {}, which has no manifest that Palisade knows",
            proto::text::visible(dir)
        ));
    }
    Ok(list)
}

impl ProjectList {
    fn unnamed(&self) -> usize {
        let counts = |project: &&Project| project.weight == StepWeight::Optional && !project.is_skipped;
        self.projects.iter().filter(counts).count()
    }

    /// Adds one line for files that are left out for one reason.
    fn note_left_out(&mut self, why: &str, files: &[String]) {
        let Some(first) = files.first() else { return };
        let listed = files[..files.len().min(LISTED_MAX)].join(", ");
        let more = match files.len().saturating_sub(LISTED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let dir = first.rsplit_once('/').map_or(".", |(dir, _)| dir);
        self.notes.push(format!(
            "not installed: {listed}{more}: {why}; include it in palisade.toml: [prepare] directories = [\"{dir}\"]"
        ));
    }
}

/// A directory's manifest of one ecosystem.
#[derive(Debug)]
struct ManifestFile {
    /// The path of the lockfile, or of the manifest if there is none.
    path: String,
    /// The name of the lockfile.
    lock: Option<&'static str>,
    /// Whether palisade.toml skips all manifests of the ecosystem in the directory.
    is_skipped: bool,
}

/// Finds the manifests of all directories, by directory and ecosystem. Files that palisade.toml skips are no manifests
/// and no lockfiles.
fn find_manifests(tree: &RepoTree, settings: &PrepareSettings) -> BTreeMap<(String, usize), ManifestFile> {
    let mut found: BTreeMap<(String, usize), ManifestFile> = BTreeMap::new();
    for path in tree.ids.keys() {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        for (index, ecosystem) in ECOSYSTEMS.iter().enumerate() {
            let key = (dir.to_owned(), index);
            if !ecosystem.is_manifest(name) || found.get(&key).is_some_and(|known| !known.is_skipped) {
                continue;
            }
            let is_lock = |lock: &&str| {
                let path = path_in(dir, lock);
                tree.has(&path) && !settings.is_skipped_file(&path)
            };
            let lock = ecosystem.locks.iter().copied().find(is_lock);
            let is_skipped = settings.is_skipped_file(path);
            let path = lock.map_or_else(|| path.clone(), |lock| path_in(dir, lock));
            found.insert(key, ManifestFile { path, lock, is_skipped });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_say_what_they_hold() {
        for dir in [
            "fuzz",
            "benchmarks/jsx",
            "tests/syntax-tests/source/Go",
            "web/node_modules/x",
            "integration-tests",
            "docs",
            "third_party/x",
            ".github/actions/x",
            "a/Examples",
            "test_data",
        ] {
            assert!(is_uncounted(dir), "{dir}");
        }
        for dir in ["web", "frontend", "crates/latest", "attest", "api/v1", "documents"] {
            assert!(!is_uncounted(dir), "{dir}");
        }
    }
}
