//! Finds files by their names, and lines by their text.
//!
//! Invariant: an answer has at most [`PATHS_MAX`] paths or [`MATCHES_MAX`] matches, each match at most
//! [`LINE_LEN_MAX`] bytes of text; a search ends at its deadline and then says so.

use std::{fs::File, io::Read, os::fd::OwnedFd, time::Instant};

use memchr::memmem::Finder;
use proto::{
    file_call::{FileAnswer, FileError, LINE_LEN_MAX, MATCHES_MAX, PATHS_MAX, TextMatch},
    file_pattern::{FilePattern, PatternPosition},
};
use rustix::fs::{FileType, OFlags};

use super::{
    open::{self, CheckedPath, file_error},
    walk::{TreeVisitor, Visit, WalkedFile, walk},
};

const CHUNK_LEN: usize = 256 << 10;
/// A file with a NUL byte among its first bytes is no text.
const BINARY_LOOK: usize = 8 << 10;
/// The longest line that is searched as a whole.
const SEARCHED_LINE_MAX: usize = 1 << 20;
/// The longest file that is searched.
const FILE_LEN_MAX: u64 = 256 << 20;
/// The most texts that a pattern with several lines may have.
const TEXTS_MAX: usize = 64;

fn parse_pattern(pattern: &str) -> Result<FilePattern, FileError> {
    FilePattern::new(pattern).map_err(|error| FileError::InvalidPattern { why: error.to_string() })
}

/// Finds regular files by a pattern.
pub fn glob(pattern: &str, path: &CheckedPath, until: Instant) -> Result<FileAnswer, FileError> {
    let pattern = parse_pattern(pattern)?;
    let root = open::open_dir(path.as_str()).map_err(|error| file_error(&error))?;
    let start = pattern.start();
    let mut search = NameSearch { pattern, root_path: real_prefix(&root), found: Vec::new(), base: path };
    let end = walk(&root, start, &mut search, until);
    let mut paths = search.found;
    paths.sort_unstable();
    Ok(FileAnswer::Paths { paths, truncated: end.truncated, unreadable: end.unreadable })
}

/// The beginning of the real paths of all files below a directory.
fn real_prefix(root: &OwnedFd) -> Option<String> {
    let path = open::real_path(root)?;
    Some(format!("{}/", path.trim_end_matches('/')))
}

struct NameSearch<'a> {
    pattern: FilePattern,
    root_path: Option<String>,
    base: &'a CheckedPath,
    found: Vec<String>,
}

impl NameSearch<'_> {
    /// Whether a link leads to a regular file below the root.
    fn stays_inside(&self, file: &WalkedFile<'_>) -> bool {
        let Ok(target) = open::open_at(file.dir, file.name, OFlags::PATH) else { return false };
        let is_regular = rustix::fs::fstat(&target)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        let prefix = self.root_path.as_deref();
        is_regular
            && open::real_path(&target).zip(prefix).is_some_and(|(path, prefix)| path.starts_with(prefix))
    }
}

impl TreeVisitor for NameSearch<'_> {
    type State = PatternPosition;

    fn enter(&mut self, above: &PatternPosition, name: &str) -> Option<PatternPosition> {
        self.pattern.enter(above, name)
    }

    fn visit(&mut self, file: &WalkedFile<'_>, at: &PatternPosition) -> Visit {
        let wanted = matches!(file.kind, FileType::RegularFile | FileType::Symlink)
            && self.pattern.matches_in(at, file.name)
            && (file.kind == FileType::RegularFile || self.stays_inside(file));
        if wanted && self.found.len() == PATHS_MAX {
            return Visit::Stop;
        }
        if wanted {
            self.found.push(self.base.join(file.path));
        }
        Visit::Continue
    }
}

/// Finds lines that contain a text. A text with several lines stands for each of its lines, as in `grep -F`.
pub fn grep(
    text: &str,
    path: &CheckedPath,
    glob: Option<&str>,
    limit: u64,
    until: Instant,
) -> Result<FileAnswer, FileError> {
    let filter = glob.map(parse_pattern).transpose()?;
    let mut texts: Vec<&str> = text.split('\n').map(|line| line.trim_end_matches('\r')).collect();
    if texts.iter().any(|text| !text.is_empty()) {
        texts.retain(|text| !text.is_empty());
    }
    if texts.len() > TEXTS_MAX {
        let why = format!("the text has more than {TEXTS_MAX} lines");
        return Err(FileError::InvalidPattern { why });
    }
    let limit = usize::try_from(limit.min(MATCHES_MAX)).unwrap_or(0);
    let finders = texts.iter().map(|text| Finder::new(text.as_bytes())).collect();
    let matches = LineMatches { finders, limit, found: Vec::new(), truncated: false };
    let mut search = TextSearch { filter, base: path, matches, until };
    let truncated = match open::open_dir(path.as_str()) {
        Ok(root) => {
            let start = search.filter.as_ref().map(FilePattern::start);
            walk(&root, start, &mut search, until).truncated
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
            let (mut file, _) = open::open_regular(path.as_str())?;
            search.matches.look_in(&mut file, path.as_str(), until);
            false
        }
        Err(error) => return Err(file_error(&error)),
    };
    let LineMatches { mut found, truncated: cut, .. } = search.matches;
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(FileAnswer::Matches { matches: found, truncated: truncated || cut })
}

struct TextSearch<'a> {
    filter: Option<FilePattern>,
    base: &'a CheckedPath,
    matches: LineMatches<'a>,
    until: Instant,
}

impl TreeVisitor for TextSearch<'_> {
    type State = Option<PatternPosition>;

    fn enter(&mut self, above: &Self::State, name: &str) -> Option<Self::State> {
        if name == ".git" {
            return None;
        }
        match (&self.filter, above) {
            (Some(filter), Some(above)) => filter.enter(above, name).map(Some),
            _ => Some(None),
        }
    }

    fn visit(&mut self, file: &WalkedFile<'_>, at: &Self::State) -> Visit {
        let wanted = match (&self.filter, at) {
            (Some(filter), Some(at)) => filter.matches_in(at, file.name),
            _ => true,
        };
        if !wanted || file.kind != FileType::RegularFile {
            return Visit::Continue;
        }
        let Ok(opened) = open::open_at(file.dir, file.name, OFlags::RDONLY | OFlags::NOFOLLOW) else {
            return Visit::Continue;
        };
        let is_regular = rustix::fs::fstat(&opened)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        if is_regular {
            self.matches.look_in(&mut File::from(opened), &self.base.join(file.path), self.until);
        }
        if self.matches.truncated { Visit::Stop } else { Visit::Continue }
    }
}

/// The matches of a search, and the texts that it searches.
struct LineMatches<'a> {
    finders: Vec<Finder<'a>>,
    limit: usize,
    found: Vec<TextMatch>,
    truncated: bool,
}

impl LineMatches<'_> {
    /// Searches a file. One that is no text, or that cannot be read to its end, has the matches that were found.
    fn look_in(&mut self, file: &mut File, path: &str, until: Instant) {
        let mut buffer = Vec::new();
        let (mut line, mut read) = (1, 0);
        loop {
            let chunk = file.by_ref().take(CHUNK_LEN as u64).read_to_end(&mut buffer);
            // An error may come after some bytes, which are then in the buffer.
            let ended = !matches!(chunk, Ok(len) if len == CHUNK_LEN);
            if read == 0 && memchr::memchr(0, &buffer[..buffer.len().min(BINARY_LOOK)]).is_some() {
                return;
            }
            read += chunk.unwrap_or(0) as u64;
            // A line whose end has not been read waits for it, unless it is too long.
            let whole = if ended || buffer.len() > SEARCHED_LINE_MAX {
                buffer.len()
            } else {
                memchr::memrchr(b'\n', &buffer).map_or(0, |at| at + 1)
            };
            self.look_at(&buffer[..whole], path, &mut line);
            buffer.drain(..whole);
            if ended || self.truncated {
                return;
            }
            if read > FILE_LEN_MAX || Instant::now() > until {
                self.truncated |= Instant::now() > until;
                return;
            }
        }
    }

    /// Searches whole lines, the first of which has the number `line`.
    fn look_at(&mut self, bytes: &[u8], path: &str, line: &mut u64) {
        let mut at = 0;
        // Where each text comes next; a text is looked for again only behind its last place.
        let mut next: Vec<Option<usize>> = self.finders.iter().map(|finder| finder.find(bytes)).collect();
        while let Some(found) = next.iter().flatten().min().copied().filter(|found| *found < bytes.len()) {
            let begin = memchr::memrchr(b'\n', &bytes[at..found]).map_or(at, |end| at + end + 1);
            let end = memchr::memchr(b'\n', &bytes[found..]).map_or(bytes.len(), |end| found + end);
            *line += count_ends(&bytes[at..begin]);
            // A line that is too long comes in several pieces.
            let is_known = self.found.last().is_some_and(|last| last.line == *line && last.path == path);
            if !is_known && self.found.len() == self.limit {
                self.truncated = true;
                return;
            }
            if !is_known {
                let text = shown(&bytes[begin..end]);
                self.found.push(TextMatch { path: path.to_owned(), line: *line, text });
            }
            *line += u64::from(end < bytes.len());
            at = (end + 1).min(bytes.len());
            for (place, finder) in next.iter_mut().zip(&self.finders) {
                if place.is_some_and(|place| place < at) {
                    *place = finder.find(&bytes[at..]).map(|found| at + found);
                }
            }
        }
        *line += count_ends(&bytes[at..]);
    }
}

fn count_ends(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}

/// A line as text, at most [`LINE_LEN_MAX`] bytes of it.
fn shown(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut text = String::from_utf8_lossy(&line[..line.len().min(LINE_LEN_MAX)]).into_owned();
    text.truncate(text.floor_char_boundary(LINE_LEN_MAX));
    text
}
