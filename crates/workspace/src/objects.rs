//! Reads objects of a repository through one long-lived `git cat-file`.
//!
//! Trust: the requested names may come from a Body; the caller must check that they are hexadecimal digits.

use std::{
    io::{self, BufRead, Read},
    time::Duration,
};

use crate::{
    error::{ErrorContext, WorkspaceError},
    git::{Git, GitError},
    git_batch::GitBatch,
};

/// Time limit of all answers together.
const TIME_MAX: Duration = Duration::from_secs(600);

/// A running `git cat-file --batch-command`.
#[derive(Debug)]
pub struct Objects(GitBatch);

/// The id, kind and length of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// The object id.
    pub id: String,
    /// `commit`, `tree`, `blob` or `tag`.
    pub kind: String,
    /// Its length in bytes.
    pub len: u64,
}

impl Objects {
    /// Starts git.
    pub fn start(git: &Git) -> Result<Self, WorkspaceError> {
        Ok(Self(GitBatch::start(git, &["cat-file", "--batch-command"], TIME_MAX)?))
    }

    /// Looks up objects by name; none for a missing one.
    pub fn about(&mut self, names: &[String]) -> Result<Vec<Option<ObjectInfo>>, WorkspaceError> {
        let question: String = names.iter().map(|name| format!("info {name}\n")).collect();
        let hear = |answers: &mut _| names.iter().map(|_| header(answers)).collect();
        self.0.ask(question.as_bytes(), hear).during("look up git objects")
    }

    /// The contents of an object; an error if it is missing, of another kind or longer than `len_max`.
    pub fn contents(&mut self, name: &str, kind: &str, len_max: u64) -> Result<Vec<u8>, WorkspaceError> {
        let hear = |answers: &mut std::io::BufReader<std::process::ChildStdout>| {
            let Some(about) = header(answers)? else { return Err(io::ErrorKind::NotFound.into()) };
            if about.kind != kind || about.len > len_max {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut bytes = Vec::new();
            answers.take(about.len + 1).read_to_end(&mut bytes)?;
            // git ends the contents with a line break.
            if bytes.len() as u64 != about.len + 1 {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else {
                Ok(bytes)
            }
        };
        let mut bytes =
            self.0.ask(format!("contents {name}\n").as_bytes(), hear).during("read a git object")?;
        bytes.pop().map(|_| bytes).ok_or_else(|| GitError::Answer("cat-file").into())
    }
}

/// Parses `ID KIND LENGTH`; none for any other line, which git prints for a missing object.
fn header(answers: &mut impl BufRead) -> io::Result<Option<ObjectInfo>> {
    let mut line = Vec::new();
    answers.take(4096).read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let text = String::from_utf8_lossy(&line);
    let fields: Vec<&str> = text.split(' ').collect();
    Ok(match fields[..] {
        [id, kind, len] => {
            len.parse().ok().map(|len| ObjectInfo { id: id.to_owned(), kind: kind.to_owned(), len })
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood() {
        let mut said = &b"1234 blob 12\n5678 missing\nrefs/x ambiguous\ncut"[..];
        let about = ObjectInfo { id: "1234".into(), kind: "blob".into(), len: 12 };
        assert_eq!(header(&mut said).unwrap(), Some(about));
        assert_eq!(header(&mut said).unwrap(), None);
        assert_eq!(header(&mut said).unwrap(), None);
        assert!(header(&mut said).is_err());
    }
}
