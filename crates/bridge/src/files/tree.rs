//! Files in memory, as a map from paths to texts: the calls that only read, for places that have no file system.

use std::collections::{BTreeMap, BTreeSet};

use base64::{Engine, engine::general_purpose::STANDARD};
use proto::{
    file_call::{FileAnswer, FileEntry, FileError, FileOperation, MATCHES_MAX, PATHS_MAX, TextMatch},
    file_pattern::FilePattern,
    file_text,
};

/// The text of a file and when it was changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextFile {
    /// The text.
    pub text: String,
    /// When it was changed, in seconds since 1970.
    pub modified_s: i64,
}

/// Files by their normalised paths.
pub type FileTree = BTreeMap<String, TextFile>;

/// Answers an operation that only reads; `None` for one that changes files.
pub fn answer_read(files: &FileTree, operation: &FileOperation) -> Option<FileAnswer> {
    let answer = match operation {
        FileOperation::List { path } => list(files, path),
        FileOperation::Read { path, offset, limit } => read(files, path, *offset, *limit),
        FileOperation::Glob { pattern, path } => glob(files, pattern, path),
        FileOperation::Grep { pattern, path, glob, limit } => {
            grep(files, pattern, path, glob.as_deref(), *limit)
        }
        FileOperation::Recall { .. } => FileAnswer::Unknown,
        FileOperation::Write { .. } | FileOperation::Edit { .. } | FileOperation::Delete { .. } => {
            return None;
        }
    };
    Some(answer)
}

/// An answer that says why an operation was not carried out.
pub fn refuse(path: &str, reason: FileError) -> FileAnswer {
    FileAnswer::Error { reason, path: path.to_owned() }
}

/// The paths of a file, or of all files below a directory.
pub fn paths_below<'a>(
    files: &'a FileTree,
    path: &'a str,
) -> impl Iterator<Item = (&'a String, &'a TextFile)> {
    files.iter().filter(move |(name, _)| *name == path || relative(name, path).is_some())
}

/// The part of a path below a directory.
fn relative<'a>(path: &'a str, directory: &str) -> Option<&'a str> {
    if directory == "/" {
        return path.strip_prefix('/');
    }
    path.strip_prefix(directory)?.strip_prefix('/')
}

/// The entries of a directory. Directories end with `/`, as in Deep Agents' state and store.
fn list(files: &FileTree, path: &str) -> FileAnswer {
    let mut directories = BTreeSet::new();
    let mut entries: Vec<FileEntry> = Vec::new();
    for (name, file) in files {
        let Some(rest) = relative(name, path) else { continue };
        match rest.split_once('/') {
            Some((directory, _)) => {
                directories.insert(format!("{}/{directory}/", path.trim_end_matches('/')));
            }
            None => entries.push(FileEntry {
                path: name.clone(),
                is_dir: false,
                len: file.text.len() as u64,
                modified_s: file.modified_s,
            }),
        }
    }
    entries.extend(directories.into_iter().map(|path| FileEntry {
        path,
        is_dir: true,
        len: 0,
        modified_s: 0,
    }));
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    let truncated = entries.len() > PATHS_MAX;
    entries.truncate(PATHS_MAX);
    FileAnswer::Entries { entries, truncated }
}

fn read(files: &FileTree, path: &str, offset: u64, limit: u64) -> FileAnswer {
    match files.get(path) {
        Some(file) => file_text::read_lines(&file.text, offset, limit),
        None if paths_below(files, path).next().is_some() => refuse(path, FileError::IsDirectory),
        None => refuse(path, FileError::NotFound),
    }
}

fn glob(files: &FileTree, pattern: &str, path: &str) -> FileAnswer {
    let pattern = match FilePattern::new(pattern) {
        Ok(pattern) => pattern,
        Err(error) => return refuse(path, FileError::InvalidPattern { why: error.to_string() }),
    };
    let found = files.keys().filter(|name| relative(name, path).is_some_and(|rest| pattern.matches(rest)));
    let mut paths: Vec<String> = found.take(PATHS_MAX + 1).cloned().collect();
    let truncated = paths.len() > PATHS_MAX;
    paths.truncate(PATHS_MAX);
    FileAnswer::Paths { paths, truncated, unreadable: false }
}

fn grep(files: &FileTree, text: &str, path: &str, glob: Option<&str>, limit: u64) -> FileAnswer {
    let pattern = match glob.map(FilePattern::new).transpose() {
        Ok(pattern) => pattern,
        Err(error) => return refuse(path, FileError::InvalidPattern { why: error.to_string() }),
    };
    let limit = usize::try_from(limit.min(MATCHES_MAX)).unwrap_or(usize::MAX);
    let wanted = |name: &str| match &pattern {
        Some(pattern) => pattern.matches(relative(name, path).unwrap_or(name)),
        None => true,
    };
    let mut matches = Vec::new();
    for (name, file) in paths_below(files, path).filter(|(name, _)| wanted(name)) {
        for (line, found) in file_text::find_lines(&file.text, text) {
            if matches.len() >= limit {
                return FileAnswer::Matches { matches, truncated: true };
            }
            matches.push(TextMatch { path: name.clone(), line, text: found.to_owned() });
        }
    }
    FileAnswer::Matches { matches, truncated: false }
}

/// The answer for the bytes of a file: lines if they are text, else the whole file.
pub fn answer_bytes(bytes: Vec<u8>, offset: u64, limit: u64) -> FileAnswer {
    match String::from_utf8(bytes) {
        Ok(text) => file_text::read_lines(&text, offset, limit),
        Err(error) => {
            let bytes = error.into_bytes();
            FileAnswer::Binary { len: bytes.len() as u64, base64: STANDARD.encode(bytes) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(paths: &[(&str, &str)]) -> FileTree {
        let file = |text: &str| TextFile { text: text.to_owned(), modified_s: 1 };
        paths.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect()
    }

    fn files() -> FileTree {
        tree(&[
            ("/a.md", "one\ntwo\n"),
            ("/notes/b.md", "two\n"),
            ("/notes/deep/c.txt", "x"),
            ("/notes2", "y"),
        ])
    }

    #[test]
    fn a_listing_has_files_and_directories_once() {
        let names = |path: &str| match list(&files(), path) {
            FileAnswer::Entries { entries, .. } => {
                entries.into_iter().map(|entry| entry.path).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(names("/"), ["/a.md", "/notes/", "/notes2"]);
        assert_eq!(names("/notes"), ["/notes/b.md", "/notes/deep/"]);
        assert_eq!(names("/none"), Vec::<String>::new());
    }

    #[test]
    fn names_and_texts_are_found_below_a_directory() {
        let found = |pattern: &str, path: &str| match glob(&files(), pattern, path) {
            FileAnswer::Paths { paths, .. } => paths,
            other => panic!("{other:?}"),
        };
        assert_eq!(found("*.md", "/"), ["/a.md", "/notes/b.md"]);
        assert_eq!(found("deep/*", "/notes"), ["/notes/deep/c.txt"]);
        let lines = |path: &str, glob: Option<&str>, limit| match grep(&files(), "two", path, glob, limit) {
            FileAnswer::Matches { matches, truncated } => {
                (matches.into_iter().map(|one| (one.path, one.line)).collect::<Vec<_>>(), truncated)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(lines("/", None, 9), (vec![("/a.md".into(), 2), ("/notes/b.md".into(), 1)], false));
        assert_eq!(lines("/", Some("b*"), 9), (vec![("/notes/b.md".into(), 1)], false));
        assert_eq!(lines("/", None, 1), (vec![("/a.md".into(), 2)], true));
        assert_eq!(lines("/a.md", None, 1), (vec![("/a.md".into(), 2)], false));
    }

    #[test]
    fn a_directory_is_no_file() {
        assert_eq!(read(&files(), "/notes", 0, 9), refuse("/notes", FileError::IsDirectory));
        assert_eq!(read(&files(), "/no", 0, 9), refuse("/no", FileError::NotFound));
    }
}
