//! The files of a commit: their paths at once, their texts on demand, and which of some files changed last.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use crate::{error::WorkspaceError, git::Git, objects::Objects};

/// Longest file that is read.
const TEXT_LEN_MAX: u64 = 64 << 20;
/// How many commits back a change of a lockfile is searched.
const COMMITS_MAX: &str = "2000";
/// How long the search may take.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(5);

/// The files of a commit.
#[derive(Debug)]
pub struct RepoTree {
    git: Git,
    commit: String,
    objects: RefCell<Objects>,
    /// Paths and their blob ids.
    pub ids: BTreeMap<String, String>,
}

impl RepoTree {
    pub fn open(objects: &Path, commit: &str) -> Result<Self, WorkspaceError> {
        let git = Git::at(objects);
        let said = git.run(["ls-tree", "-r", "-z", "--full-tree", commit])?;
        let objects = RefCell::new(Objects::start(&git)?);
        Ok(Self { git, commit: commit.to_owned(), objects, ids: parse_listing(&said) })
    }

    pub fn has(&self, path: &str) -> bool {
        self.ids.contains_key(path)
    }

    /// The text of a file; none if there is no such file.
    pub fn text(&self, path: &str) -> Result<Option<String>, WorkspaceError> {
        let Some(id) = self.ids.get(path) else { return Ok(None) };
        let bytes = self.objects.borrow_mut().contents(id, "blob", TEXT_LEN_MAX).map_err(|error| {
            WorkspaceError::Repository(format!(
                "cannot read {}, which is at most {} MiB long: {error}",
                proto::text::visible(path),
                TEXT_LEN_MAX >> 20
            ))
        })?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The one of these paths that changed last, alone among them, and the day of that change. None if the recent
    /// history does not tell, or is not there.
    pub fn last_changed(&self, paths: &[String]) -> Option<(String, String)> {
        let git = self.git.clone().deadline(Instant::now() + SEARCH_TIME_MAX);
        let skip = format!("--skip={COMMITS_MAX}");
        let oldest = git.line(["rev-list", "-n1", &skip, &self.commit]).ok()?;
        let mut args =
            vec!["log", "-n20", "--name-only", "--format=%x01%cs", "--no-renames", "-z", &self.commit];
        let until = format!("^{oldest}");
        args.extend((!oldest.is_empty()).then_some(until.as_str()));
        args.push("--");
        args.extend(paths.iter().map(String::as_str));
        let said = String::from_utf8(git.run(args).ok()?).ok()?;
        said.split('\u{1}').find_map(|commit| {
            let mut fields = commit.split('\0').map(str::trim).filter(|field| !field.is_empty());
            let day = fields.next()?.to_owned();
            let changed: Vec<&str> = fields.collect();
            let [path] = changed[..] else { return None };
            Some((path.to_owned(), day))
        })
    }
}

/// Parses the output of `git ls-tree -z` into paths and blob ids.
fn parse_listing(said: &[u8]) -> BTreeMap<String, String> {
    let record = |record: &[u8]| {
        let text = std::str::from_utf8(record).ok()?;
        let (about, path) = text.split_once('\t')?;
        Some((path.to_owned(), about.split(' ').nth(2)?.to_owned()))
    };
    said.split(|byte| *byte == 0).filter_map(record).collect()
}
