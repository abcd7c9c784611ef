//! Decides which untracked files are ignored: runs git's own `check-ignore` on names in a copy of the tree.
//!
//! Trust: a Body may write the patterns. Some take long to match; [`crate::git_batch`] limits the time.

use std::{
    io::{self, BufRead},
    time::Duration,
};

use crate::{
    error::{ErrorContext, WorkspaceError},
    git::Git,
    git_batch::GitBatch,
};

/// Time limit of all answers together.
const TIME_MAX: Duration = Duration::from_secs(120);

/// A `git check-ignore` that is started when it is first needed.
#[derive(Debug)]
pub struct IgnoreChecker {
    git: Git,
    talk: Option<GitBatch>,
    rules: bool,
}

impl IgnoreChecker {
    /// Checks paths in the work tree of `git`. Without ignore rules, no git is started.
    pub fn new(git: &Git, rules: bool) -> Result<Self, WorkspaceError> {
        let mut ignore = Self { git: git.clone(), talk: None, rules: false };
        if rules {
            ignore.has_rules()?;
        }
        Ok(ignore)
    }

    /// Notes that ignore rules exist, and starts git early so that it is ready for the first request.
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
        // The prefix `./` keeps git from reading a path as a pathspec with special meaning.
        let question: Vec<u8> =
            paths.iter().flat_map(|path| b"./".iter().chain(path).copied().chain([0])).collect();
        talk.ask(&question, |answers| read(answers, paths.len()))
            .during("read git's answer about ignored files")
    }
}

/// Each answer consists of source, line, pattern and path; the first three are empty if no pattern matches.
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
