//! What a repository holds: one `git cat-file` that is asked about many objects.
//!
//! Trust: names that are asked for may be a Body's; whoever asks makes them of hexadecimal digits.

use std::{
    io::{self, BufRead, Read},
    time::Duration,
};

use crate::{
    error::{ErrorContext, WorkspaceError},
    git::{Git, GitError},
    git_batch::GitBatch,
};

/// How long all answers together may take.
const TIME_MAX: Duration = Duration::from_secs(600);

/// Somebody who knows.
#[derive(Debug)]
pub struct Objects(GitBatch);

/// What an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its name.
    pub id: String,
    /// `commit`, `tree`, `blob` or `tag`.
    pub kind: String,
    /// How long it is.
    pub len: u64,
}

impl Objects {
    /// Starts it.
    pub fn start(git: &Git) -> Result<Self, WorkspaceError> {
        Ok(Self(GitBatch::start(git, &["cat-file", "--batch-command"], TIME_MAX)?))
    }

    /// What each of these is; none for what is not there.
    pub fn about(&mut self, names: &[String]) -> Result<Vec<Option<ObjectInfo>>, WorkspaceError> {
        let question: String = names.iter().map(|name| format!("info {name}\n")).collect();
        let hear = |answers: &mut _| names.iter().map(|_| header(answers)).collect();
        self.0.ask(question.as_bytes(), hear).during("ask what is there")
    }

    /// What is in one of them, unless that is longer than `len_max`.
    pub fn contents(&mut self, name: &str, kind: &str, len_max: u64) -> Result<Vec<u8>, WorkspaceError> {
        let hear = |answers: &mut std::io::BufReader<std::process::ChildStdout>| {
            let Some(about) = header(answers)? else { return Err(io::ErrorKind::NotFound.into()) };
            if about.kind != kind || about.len > len_max {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut bytes = Vec::new();
            answers.take(about.len + 1).read_to_end(&mut bytes)?;
            // A line ends behind it.
            if bytes.len() as u64 != about.len + 1 {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else {
                Ok(bytes)
            }
        };
        let mut bytes =
            self.0.ask(format!("contents {name}\n").as_bytes(), hear).during("read what is there")?;
        bytes.pop().map(|_| bytes).ok_or_else(|| GitError::Answer("cat-file").into())
    }
}

/// `ID KIND LENGTH`, or something else for what is not there.
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
