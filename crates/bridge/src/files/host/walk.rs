//! Searches of a directory of the host.

use std::time::{Duration, Instant};

use proto::{
    file_call::{FileAnswer, FileError, MATCHES_MAX, PATHS_MAX, TextMatch},
    file_pattern::FilePattern,
    file_text,
};
use rustix::fs::{Dir, FileType, OFlags, fstat};

use super::{HostDirectory, file_error};

/// How long a search for names may take.
const GLOB_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a search for text may take.
const GREP_TIME_MAX: Duration = Duration::from_secs(15);
/// How many directories deep a search goes.
const DEPTH_MAX: usize = 64;

/// A search that is under way.
struct HostWalk<'a> {
    directory: &'a HostDirectory,
    deadline: Instant,
    truncated: bool,
    unreadable: bool,
}

impl HostDirectory {
    pub(super) fn glob(&self, pattern: &str, path: &str) -> Result<FileAnswer, FileError> {
        let pattern = read_pattern(pattern)?;
        drop(self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY)?);
        let mut walk = HostWalk::new(self, GLOB_TIME_MAX);
        let mut paths = Vec::new();
        let top = path.trim_end_matches('/').len() + 1;
        walk.visit(path, 0, None, &mut |file| {
            if pattern.matches(&file[top..]) {
                paths.push(file.to_owned());
            }
            paths.len() < PATHS_MAX
        });
        paths.sort();
        Ok(FileAnswer::Paths { paths, truncated: walk.truncated, unreadable: walk.unreadable })
    }

    pub(super) fn grep(
        &self,
        text: &str,
        path: &str,
        glob: Option<&str>,
        limit: u64,
    ) -> Result<FileAnswer, FileError> {
        let pattern = glob.map(read_pattern).transpose()?;
        let limit = usize::try_from(limit.min(MATCHES_MAX)).unwrap_or(usize::MAX);
        let mut walk = HostWalk::new(self, GREP_TIME_MAX);
        let mut matches: Vec<TextMatch> = Vec::new();
        let mut more = false;
        let top = path.trim_end_matches('/').len() + 1;
        let mut search = |file: &str| {
            if pattern.as_ref().is_some_and(|pattern| !pattern.matches(file.get(top..).unwrap_or(file))) {
                return true;
            }
            let Some(content) = self.read(file).ok().and_then(|bytes| String::from_utf8(bytes).ok()) else {
                return true;
            };
            for (line, found) in file_text::find_lines(&content, text) {
                if matches.len() >= limit {
                    more = true;
                    return false;
                }
                matches.push(TextMatch { path: file.to_owned(), line, text: found.to_owned() });
            }
            true
        };
        match self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY) {
            // Git's own files hold no text that a search is for.
            Ok(_) => walk.visit(path, 0, Some(".git"), &mut search),
            Err(FileError::NotDirectory) => search(path),
            Err(error) => return Err(error),
        };
        matches.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
        Ok(FileAnswer::Matches { matches, truncated: more || walk.truncated })
    }
}

fn read_pattern(text: &str) -> Result<FilePattern, FileError> {
    FilePattern::new(text).map_err(|error| FileError::InvalidPattern { why: error.to_string() })
}

impl<'a> HostWalk<'a> {
    fn new(directory: &'a HostDirectory, time: Duration) -> Self {
        Self { directory, deadline: Instant::now() + time, truncated: false, unreadable: false }
    }

    /// Shows each regular file below a directory to `see`, which returns whether the walk goes on. Links to directories
    /// are not followed.
    fn visit(
        &mut self,
        path: &str,
        depth: usize,
        skipped: Option<&str>,
        see: &mut dyn FnMut(&str) -> bool,
    ) -> bool {
        if depth > DEPTH_MAX || Instant::now() > self.deadline {
            self.truncated = true;
            return depth > DEPTH_MAX;
        }
        let opened = self.directory.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY);
        let Ok(listed) = opened.and_then(|fd| Dir::read_from(fd).map_err(file_error)) else {
            self.unreadable = true;
            return true;
        };
        let mut directories = Vec::new();
        for entry in listed.flatten() {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name == "." || name == ".." {
                continue;
            }
            let path = format!("{}/{name}", path.trim_end_matches('/'));
            match entry.file_type() {
                FileType::Directory if skipped == Some(name) => {}
                FileType::Directory => directories.push(path),
                FileType::RegularFile if !see(&path) => {
                    self.truncated = true;
                    return false;
                }
                FileType::Symlink | FileType::Unknown if self.is_file(&path) && !see(&path) => {
                    self.truncated = true;
                    return false;
                }
                _ => {}
            }
        }
        directories.iter().all(|directory| self.visit(directory, depth + 1, skipped, see))
    }

    /// Whether a link leads to a regular file beneath the directory.
    fn is_file(&self, path: &str) -> bool {
        let opened = self.directory.open_beneath(path, OFlags::PATH);
        let found = opened.ok().and_then(|fd| fstat(fd).ok());
        found.is_some_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)
    }
}
