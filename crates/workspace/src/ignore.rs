//! Which untracked files are ignored: git's own `check-ignore`, asked about names in a tree of ours.
//!
//! Trust: patterns are a Body's. Some take long to match; see [`crate::git_batch`].

use std::{
    io::{self, BufRead},
    time::Duration,
};

use crate::{
    error::{ErrorContext, WorkspaceError},
    git::Git,
    git_batch::GitBatch,
};

/// How long all answers together may take.
const TIME_MAX: Duration = Duration::from_secs(120);

/// Somebody who knows.
#[derive(Debug)]
pub struct IgnoreChecker {
    git: Git,
    talk: Option<GitBatch>,
    rules: bool,
}

impl IgnoreChecker {
    /// For the tree that `git` has its files in. Where there are no rules, nobody has to be asked.
    pub fn new(git: &Git, rules: bool) -> Result<Self, WorkspaceError> {
        let mut ignore = Self { git: git.clone(), talk: None, rules: false };
        if rules {
            ignore.has_rules()?;
        }
        Ok(ignore)
    }

    /// There are rules: it gets ready while others work.
    pub fn has_rules(&mut self) -> Result<(), WorkspaceError> {
        if !self.rules {
            let args = ["check-ignore", "-z", "--stdin", "--verbose", "--non-matching", "--no-index"];
            self.talk = Some(GitBatch::start(&self.git, &args, TIME_MAX)?);
            self.rules = true;
        }
        Ok(())
    }

    /// For each path, whether it is ignored.
    pub fn ask(&mut self, paths: &[Vec<u8>]) -> Result<Vec<bool>, WorkspaceError> {
        let Some(talk) = self.talk.as_mut() else { return Ok(vec![false; paths.len()]) };
        // Behind `./` a name is a name, whatever it begins with.
        let question: Vec<u8> =
            paths.iter().flat_map(|path| b"./".iter().chain(path).copied().chain([0])).collect();
        talk.ask(&question, |answers| read(answers, paths.len())).during("hear what is ignored")
    }
}

/// Each answer is a source, a line, a pattern and the path; the first three are empty where nothing fits.
fn read(answers: &mut impl BufRead, count: usize) -> io::Result<Vec<bool>> {
    let mut field = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        answers.read_until(0, &mut bytes)?;
        bytes.pop().map(|_| bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    };
    (0..count)
        .map(|_| {
            let (source, _line, pattern, _path) = (field()?, field()?, field()?, field()?);
            Ok(!source.is_empty() && !pattern.starts_with(b"!"))
        })
        .collect()
}
