//! Checks which host directories a Body may mount, and how.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use proto::{
    Failure, Kind,
    spec::{Access, Mount},
    tree,
};

/// Most entries that the search for sockets looks at.
const LOOKED_AT_MAX: usize = 10_000;
/// How many directories deep it looks.
const DEPTH_MAX: usize = 4;
/// How many sockets a warning names.
const SOCKETS_NAMED_MAX: usize = 3;

/// The outermost directory above a path, or the path itself, that git takes for a git directory.
pub(crate) fn git_dir_above(path: &Path) -> Option<PathBuf> {
    let is_git = |dir: &Path| {
        let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
        dir.file_name().is_some_and(|name| tree::is_git_name(name.as_encoded_bytes()))
            || tree::is_git_dir(has)
    };
    path.ancestors().filter(|dir| is_git(dir)).last().map(Path::to_owned)
}

/// Refuses a mount that would give a Body more than the user meant, or less.
pub(crate) fn check(source: &Path, access: Access, data: &Path) -> Result<(), Failure> {
    check_git(source, access)?;
    check_data(source, access, data)?;
    check_owner(source, access)
}

/// Refuses a writable mount of a git directory, or of a path inside one, unless the user asked for `unprotected`: the
/// launcher would mount it read-only.
fn check_git(source: &Path, access: Access) -> Result<(), Failure> {
    if access != Access::ReadWrite {
        return Ok(());
    }
    match git_dir_above(source) {
        None => Ok(()),
        Some(dir) => Err(Failure::new(
            Kind::Usage,
            format!(
                "{} is a git directory: git on this host would run what a Body writes there",
                dir.display()
            ),
        )
        .hint("mount it read-only, or allow the writes: SRC:DST:rw,unprotected")),
    }
}

/// Refuses the data directory, with everything in it and above it: its files decide what Bodies are. Root's data
/// directory may be read, because no id of a Body can open its secrets; another user's Bodies have that user's id.
fn check_data(source: &Path, access: Access, data: &Path) -> Result<(), Failure> {
    let data = data.canonicalize().unwrap_or_else(|_| data.to_owned());
    let touches = source.starts_with(&data) || data.starts_with(source);
    if !touches || (!access.is_writable() && sys::caps::is_host_root()) {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Denied,
        format!(
            "{} cannot be mounted: the data directory of Palisade is {}",
            source.display(),
            data.display()
        ),
    )
    .because("a Body that reaches it could take over other Bodies")
    .hint("mount only the directories that the Body needs"))
}

/// Refuses a writable mount that no process of the Body could write. The Bodies of root have ids of their own, so
/// to them the files of root belong to a stranger.
fn check_owner(source: &Path, access: Access) -> Result<(), Failure> {
    if !access.is_writable() || !sys::caps::is_host_root() {
        return Ok(());
    }
    let Ok(found) = fs::metadata(source) else { return Ok(()) };
    let is_open = found.mode() & 0o002 != 0;
    if is_open || has_acl(source) {
        return Ok(());
    }
    let name = source.display();
    let failure =
        Failure::new(Kind::Usage, format!("{name} cannot be mounted writable: a Body could not write there"));
    // No hint opens what is there already: it may be a home or a directory of the system.
    let failure = match found.is_dir() {
        true => failure.hint(format!(
            "make a directory for what the Body writes, and mount that: mkdir -m 777 {}",
            source.join("shared").display()
        )),
        false => failure,
    };
    Err(failure
        .because(format!(
            "it belongs to user {} and only that user or its group may write; Bodies that root creates have ids of \
             their own",
            found.uid()
        ))
        .hint("mount it read-only, and copy results out: pal cp BODY:FILE .")
        .hint("let a Body work on a repository: pal up, then pal land"))
}

/// Whether access is decided by more than the mode.
fn has_acl(path: &Path) -> bool {
    rustix::fs::getxattr(path, "system.posix_acl_access", &mut [0u8; 0][..]).is_ok_and(|len| len > 0)
}

/// Warnings about mounts that are allowed, but give a Body more than a user may expect.
pub fn mount_warnings(mounts: &[Mount], home: Option<&Path>) -> Vec<Failure> {
    let writable = mounts.iter().filter(|mount| mount.access.is_writable());
    writable.flat_map(|mount| warnings_of(&mount.source, home)).collect()
}

fn warnings_of(source: &Path, home: Option<&Path>) -> Vec<Failure> {
    let Ok(source) = source.canonicalize() else { return Vec::new() };
    let mut warnings = Vec::new();
    let home = home.and_then(|home| home.canonicalize().ok()).filter(|home| home != Path::new("/"));
    if home.is_some_and(|home| home.starts_with(&source)) {
        let what = format!("the Body can write your home directory, which {} contains", source.display());
        warnings.push(
            Failure::new(Kind::Usage, what)
                .because("programs on this host run what is written there: .bashrc, .ssh, .config and others")
                .hint("mount the directory of one project instead"),
        );
    }
    let sockets = sockets_in(&source);
    if !sockets.is_empty() {
        let names: Vec<String> = sockets.iter().map(|path| path.display().to_string()).collect();
        warnings.push(
            Failure::new(Kind::Usage, format!("{} has sockets in it", source.display()))
                .because(format!("the Body can talk to the programs behind them: {}", names.join(", ")))
                .hint("mount a directory without sockets"),
        );
    }
    warnings
}

/// The first sockets in a directory. Looks at a bounded number of entries, nearest first.
fn sockets_in(top: &Path) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), 0);
    let mut waiting = std::collections::VecDeque::from([(top.to_owned(), 0)]);
    while let Some((dir, depth)) = waiting.pop_front() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            seen += 1;
            if seen > LOOKED_AT_MAX || found.len() >= SOCKETS_NAMED_MAX {
                return found;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_socket() => found.push(entry.path()),
                Ok(kind) if kind.is_dir() && depth < DEPTH_MAX => {
                    waiting.push_back((entry.path(), depth + 1))
                }
                _ => {}
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-mounts-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_git_directory_is_writable_only_when_that_is_said() {
        let dir = scratch("git");
        for made in ["repo/.git/hooks", "bare/objects", "bare/refs", "plain/objects"] {
            fs::create_dir_all(dir.join(made)).unwrap();
        }
        fs::write(dir.join("bare/HEAD"), "").unwrap();
        for (name, refused) in [
            ("repo", false),
            ("plain", false),
            ("repo/.git", true),
            ("repo/.git/hooks", true),
            ("bare/refs", true),
        ] {
            let checked = |access| check_git(&dir.join(name), access).is_err();
            assert_eq!(checked(Access::ReadWrite), refused, "{name}");
            assert!(!checked(Access::Unprotected) && !checked(Access::ReadOnly), "{name}");
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_data_directory_is_never_writable_inside() {
        let dir = scratch("data");
        for made in ["above/data/bodies", "above/other"] {
            fs::create_dir_all(dir.join(made)).unwrap();
        }
        let data = dir.join("above/data");
        for (name, refused) in
            [("above/other", false), ("above/data/bodies", true), ("above/data", true), ("above", true)]
        {
            for access in [Access::ReadWrite, Access::Unprotected] {
                assert_eq!(check_data(&dir.join(name), access, &data).is_err(), refused, "{name}");
            }
            let read = check_data(&dir.join(name), Access::ReadOnly, &data).is_err();
            assert_eq!(read, refused && !sys::caps::is_host_root(), "{name}");
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn homes_and_sockets_are_warned_of() {
        let dir = scratch("warn");
        fs::create_dir_all(dir.join("home/me/project")).unwrap();
        fs::create_dir_all(dir.join("run/deep/er")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.join("run/deep/er/s.sock")).unwrap();
        let home = dir.join("home/me");
        let warned = |name: &str, access| {
            let mount = Mount { source: dir.join(name), target: "/x".into(), access };
            mount_warnings(&[mount], Some(&home)).len()
        };
        for (name, count) in
            [("home/me/project", 0), ("home/me", 1), ("home", 1), ("run", 1), ("run/deep/er", 1)]
        {
            assert_eq!(warned(name, Access::ReadWrite), count, "{name}");
            assert_eq!(warned(name, Access::ReadOnly), 0, "{name}");
        }
        assert_eq!(warned("", Access::Unprotected), 2);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn root_mounts_nothing_writable_that_a_body_cannot_write() {
        let dir = scratch("owner");
        for (mode, writable) in [(0o755, false), (0o775, false), (0o777, true)] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            let refused = check_owner(&dir, Access::ReadWrite).is_err();
            assert_eq!(refused, !writable && sys::caps::is_host_root(), "{mode:o}");
            if let Err(failure) = check_owner(&dir, Access::ReadWrite) {
                assert!(failure.hints.iter().all(|hint| !hint.contains("chmod")), "{:?}", failure.hints);
            }
            check_owner(&dir, Access::ReadOnly).unwrap();
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
