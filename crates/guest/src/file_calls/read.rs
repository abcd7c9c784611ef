//! Lists directories and reads files.
//!
//! Invariant: an answer holds at most [`PATHS_MAX`] entries or [`CONTENT_LEN_MAX`] bytes of a file; at most
//! [`SCAN_LEN_MAX`] bytes are read to find and count lines.

use std::{
    fs::File,
    io::{self, Read, Seek},
    time::Instant,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use proto::file_call::{CONTENT_LEN_MAX, FileAnswer, FileEntry, FileError, PATHS_MAX};
use rustix::fs::{AtFlags, Dir, FileType, Stat};

use super::open::{self, CheckedPath, file_error};
use crate::files::is_dots;

/// The longest file whose lines are counted.
const SCAN_LEN_MAX: u64 = 256 << 20;
const CHUNK_LEN: usize = 64 << 10;

/// Lists a directory, without its subdirectories.
pub fn list(path: &CheckedPath) -> Result<FileAnswer, FileError> {
    let failed = |error: io::Error| file_error(&error);
    let dir = open::open_dir(path.as_str()).map_err(failed)?;
    let mut entries = Vec::new();
    let mut truncated = false;
    for entry in Dir::read_from(&dir).map_err(|error| failed(error.into()))? {
        let entry = entry.map_err(|error| failed(error.into()))?;
        if is_dots(entry.file_name()) {
            continue;
        }
        if entries.len() == PATHS_MAX {
            truncated = true;
            break;
        }
        // An entry that is gone meanwhile is left out.
        let Ok(stat) = rustix::fs::statat(&dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        entries.push(FileEntry {
            path: path.join(&entry.file_name().to_string_lossy()),
            is_dir: FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
            len: u64::try_from(stat.st_size).unwrap_or(0),
            modified_s: stat.st_mtime,
        });
    }
    entries.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    Ok(FileAnswer::Entries { entries, truncated })
}

/// Reads lines of a text file, or a whole file that is no text.
pub fn read(path: &CheckedPath, offset: u64, limit: u64, until: Instant) -> Result<FileAnswer, FileError> {
    let (mut file, stat) = open::open_regular(path.as_str())?;
    let mut page = LinePage::new(offset, limit);
    match page.read(&mut file, until) {
        Ok(()) => Ok(page.answer()),
        Err(PageError::NotText) => binary(&mut file, &stat),
        Err(PageError::TooLong(len)) => Err(FileError::TooLarge { len: len.max(len_of(&stat)) }),
        Err(PageError::Read(error)) => Err(file_error(&error)),
    }
}

/// Reads a whole file that is at most [`CONTENT_LEN_MAX`] long.
pub fn read_whole(file: &mut File, stat: &Stat) -> Result<Vec<u8>, FileError> {
    if len_of(stat) > CONTENT_LEN_MAX as u64 {
        return Err(FileError::TooLarge { len: len_of(stat) });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(len_of(stat)).unwrap_or(0) + 1);
    let read = file.by_ref().take(CONTENT_LEN_MAX as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| file_error(&error))?;
    if bytes.len() > CONTENT_LEN_MAX {
        return Err(FileError::TooLarge { len: bytes.len() as u64 });
    }
    Ok(bytes)
}

fn binary(file: &mut File, stat: &Stat) -> Result<FileAnswer, FileError> {
    file.rewind().map_err(|error| file_error(&error))?;
    let bytes = read_whole(file, stat)?;
    Ok(FileAnswer::Binary { base64: STANDARD.encode(&bytes), len: bytes.len() as u64 })
}

fn len_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

enum PageError {
    NotText,
    /// The file or the requested lines are too long; so much was read.
    TooLong(u64),
    Read(io::Error),
}

/// Some lines of a text, gathered while the text passes.
struct LinePage {
    offset: u64,
    limit: u64,
    content: Vec<u8>,
    /// Line ends that have passed.
    ends: u64,
    last_byte: Option<u8>,
    /// The beginning of a character whose end has not passed.
    partial: Vec<u8>,
    len: u64,
}

impl LinePage {
    fn new(offset: u64, limit: u64) -> Self {
        Self { offset, limit, content: Vec::new(), ends: 0, last_byte: None, partial: Vec::new(), len: 0 }
    }

    fn read(&mut self, file: &mut File, until: Instant) -> Result<(), PageError> {
        let mut chunk = vec![0; CHUNK_LEN];
        loop {
            let len = match file.read(&mut chunk) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(PageError::Read(error)),
            };
            if len == 0 {
                return if self.partial.is_empty() { Ok(()) } else { Err(PageError::NotText) };
            }
            self.len += len as u64;
            self.check_text(&chunk[..len])?;
            self.take(&chunk[..len]);
            if self.content.len() > CONTENT_LEN_MAX || self.len > SCAN_LEN_MAX || Instant::now() > until {
                return Err(PageError::TooLong(self.len));
            }
        }
    }

    /// Checks that the bytes continue a UTF-8 text.
    fn check_text(&mut self, mut bytes: &[u8]) -> Result<(), PageError> {
        while !self.partial.is_empty() {
            let Some((first, rest)) = bytes.split_first() else { return Ok(()) };
            self.partial.push(*first);
            bytes = rest;
            match std::str::from_utf8(&self.partial) {
                Ok(_) => self.partial.clear(),
                Err(error) if error.error_len().is_none() => {}
                Err(_) => return Err(PageError::NotText),
            }
        }
        match std::str::from_utf8(bytes) {
            Ok(_) => Ok(()),
            Err(error) if error.error_len().is_none() => {
                self.partial = bytes[error.valid_up_to()..].to_vec();
                Ok(())
            }
            Err(_) => Err(PageError::NotText),
        }
    }

    fn take(&mut self, mut bytes: &[u8]) {
        self.last_byte = bytes.last().copied().or(self.last_byte);
        let end = self.offset.saturating_add(self.limit);
        while !bytes.is_empty() && self.ends < end {
            let line_len = memchr::memchr(b'\n', bytes).map_or(bytes.len(), |at| at + 1);
            let (line, rest) = bytes.split_at(line_len);
            if self.ends >= self.offset {
                self.content.extend_from_slice(line);
            }
            self.ends += u64::from(line.ends_with(b"\n"));
            bytes = rest;
        }
        self.ends += memchr::memchr_iter(b'\n', bytes).count() as u64;
    }

    fn answer(self) -> FileAnswer {
        let total_lines = self.ends + u64::from(self.last_byte.is_some_and(|byte| byte != b'\n'));
        let first = self.offset.saturating_add(1);
        let last = self.offset.saturating_add(self.limit).min(total_lines);
        let is_empty = first > last;
        FileAnswer::Text {
            content: String::from_utf8(self.content).unwrap_or_default(),
            total_lines,
            start_line: if is_empty { 0 } else { first },
            end_line: if is_empty { 0 } else { last },
        }
    }
}
