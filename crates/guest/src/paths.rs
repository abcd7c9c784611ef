//! Paths as callers write them: `~`, relative to the home, or absolute.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use crate::{connect::ConnectError, users::GuestUser};

/// Longest path, NUL included, as the kernel limits it.
const PATH_LEN_MAX: usize = 4096;

/// Resolves `path` for `user` to an absolute path; an empty one is the default directory.
pub fn resolve(path: &[u8], user: &GuestUser, workdir: Option<&str>) -> Result<PathBuf, ConnectError> {
    let path = if path.is_empty() { workdir.unwrap_or_default().as_bytes() } else { path };
    if path.contains(&0) {
        return Err(ConnectError::invalid("a path may not hold a NUL byte"));
    }
    let resolved = match path {
        [b'~'] => user.home.clone(),
        [b'~', b'/', rest @ ..] => clean(&user.home.join(OsStr::from_bytes(trim(rest)))),
        [b'~', ..] => return Err(ConnectError::invalid("cannot expand user-specific home dir")),
        [b'/', ..] => PathBuf::from(OsStr::from_bytes(path)),
        _ => clean(&user.home.join(OsStr::from_bytes(path))),
    };
    if resolved.as_os_str().len() >= PATH_LEN_MAX {
        return Err(ConnectError::invalid(format!("a path may hold {} bytes", PATH_LEN_MAX - 1)));
    }
    Ok(resolved)
}

/// The last part of a path, `/` for the root.
pub fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Resolves `.` and `..` in the text, without looking at the file system.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::ParentDir => {
                out.pop();
            }
            _ => {}
        }
    }
    out
}

fn trim(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|byte| *byte != b'/').unwrap_or(path.len());
    &path[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_as_envd_does() {
        let user = GuestUser { name: "u".into(), uid: 1, gid: 1, home: "/home/u".into(), groups: vec![] };
        for (path, workdir, wanted) in [
            ("a/b", None, "/home/u/a/b"),
            ("../x/./y", None, "/home/x/y"),
            ("~", None, "/home/u"),
            ("~/a", Some("/w"), "/home/u/a"),
            ("~//etc", None, "/home/u/etc"),
            ("/a/../b", None, "/a/../b"),
            ("", None, "/home/u"),
            ("", Some("/w"), "/w"),
        ] {
            assert_eq!(resolve(path.as_bytes(), &user, workdir), Ok(PathBuf::from(wanted)), "{path}");
        }
        for bad in [&b"~root/x"[..], b"a\0b", &[b'x'; 4096]] {
            assert!(resolve(bad, &user, None).is_err());
        }
    }
}
