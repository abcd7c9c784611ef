//! `EntryInfo` of one file, as envd reports it.

use std::{
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use pbjson_types::Timestamp;
use proto::wire::filesystem::{EntryInfo, FileType};

use super::metadata;
use crate::{paths, users::IdNames};

/// Describes the file at `path`; of a symbolic link, the link itself and not its target.
pub fn entry(path: &Path, names: &IdNames) -> io::Result<EntryInfo> {
    let found = std::fs::symlink_metadata(path)?;
    let is_symlink = found.is_symlink();
    let target = is_symlink.then(|| std::fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path)));
    let (kind, mode) = match &target {
        None => (kind_of(&found), found.mode() & 0o777),
        Some(target) => std::fs::metadata(target)
            .map_or((FileType::Unspecified, 0), |target| (kind_of(&target), target.mode() & 0o777)),
    };
    Ok(EntryInfo {
        name: paths::name_of(path),
        r#type: kind.into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(found.len()).unwrap_or(i64::MAX),
        mode,
        permissions: permissions(found.mode()),
        owner: names.user(found.uid()),
        group: names.group(found.gid()),
        modified_time: modified(&found),
        symlink_target: target.map(|target| target.to_string_lossy().into_owned()),
        metadata: metadata::read(path).into_iter().collect(),
        is_symlink,
    })
}

fn kind_of(found: &Metadata) -> FileType {
    match found.file_type() {
        kind if kind.is_file() => FileType::File,
        kind if kind.is_dir() => FileType::Directory,
        kind if kind.is_symlink() => FileType::Symlink,
        _ => FileType::Unspecified,
    }
}

fn modified(found: &Metadata) -> Option<Timestamp> {
    let nanos = i32::try_from(found.mtime_nsec()).unwrap_or(0);
    (found.mtime() != 0 || nanos != 0).then(|| Timestamp { seconds: found.mtime(), nanos })
}

/// Formats a mode as Go does: letters for the file type, then nine for the permissions.
fn permissions(mode: u32) -> String {
    let kind = match mode & 0o170_000 {
        0o040_000 => "d",
        0o120_000 => "L",
        0o060_000 => "D",
        0o020_000 => "D",
        0o010_000 => "p",
        0o140_000 => "S",
        _ => "",
    };
    let marks =
        [(0o4000, 'u'), (0o2000, 'g')].into_iter().filter(|(bit, _)| mode & bit != 0).map(|(_, mark)| mark);
    let mut text: String = kind.chars().chain(marks).collect();
    if mode & 0o170_000 == 0o020_000 {
        text.push('c');
    }
    if mode & 0o1000 != 0 {
        text.push('t');
    }
    if text.is_empty() {
        text.push('-');
    }
    let letter = |(place, letter)| if mode & (0o400_u32 >> place) != 0 { letter } else { '-' };
    text.extend("rwxrwxrwx".chars().enumerate().map(letter));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_written_as_go_does() {
        for (mode, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o041_777, "dtrwxrwxrwx"),
            (0o104_755, "urwxr-xr-x"),
            (0o020_666, "Dcrw-rw-rw-"),
            (0o010_600, "prw-------"),
        ] {
            assert_eq!(permissions(mode), text);
        }
    }
}
