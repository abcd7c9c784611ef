//! Files of the Body: `filesystem.Filesystem` and `/files`.
//!
//! As in envd, the guest acts with its own rights and changes the owner of new files to the user that the caller
//! named.

mod download;
mod encoding;
mod entry;
mod metadata;
mod operations;
mod remove;
mod rpc;
mod upload;
mod watch;
mod watchers;

use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use hyper::StatusCode;
use rustix::fs::{Gid, Uid};

use crate::{
    connect::{ConnectError, status_of},
    paths,
    reply::PlainRefusal,
    users::{self, GuestUser},
};

pub use download::download;
pub use remove::{is_dots, remove_at};
pub use rpc::{call, on_helper};
pub use upload::upload;
pub use watchers::Watchers;

/// Creates a directory and its missing parents with mode 0755, owned by the user.
pub fn make_dirs(path: &Path, user: &GuestUser) -> io::Result<()> {
    let missing = |at: &&Path| !at.as_os_str().is_empty();
    let mut parents: Vec<PathBuf> = path.ancestors().filter(missing).map(Path::to_path_buf).collect();
    parents.reverse();
    for dir in parents {
        match std::fs::metadata(&dir) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::NotADirectory,
                    format!("path is a file: {}", dir.display()),
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => make_dir(&dir, user)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn make_dir(path: &Path, user: &GuestUser) -> io::Result<()> {
    match rustix::fs::mkdir(path, 0o755.into()) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    give_path(path, user)
}

/// Changes a file's owner to the user. Only root can do that; in a Body with a single id the owner is right already.
pub fn give(file: impl AsFd, user: &GuestUser) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Ok(rustix::fs::fchown(file, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))?)
}

fn give_path(path: &Path, user: &GuestUser) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Ok(rustix::fs::chown(path, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))?)
}

/// Resolves the path of a request for the user that the request names.
pub fn path_for(path: &[u8], user: &str, workdir: Option<&str>) -> Result<PathBuf, PlainRefusal> {
    user_and_path(path, user, workdir).map(|(_, path)| path)
}

/// Resolves the user and the path of a request.
pub fn user_and_path(
    path: &[u8],
    name: &str,
    workdir: Option<&str>,
) -> Result<(GuestUser, PathBuf), PlainRefusal> {
    let plain = |fault: ConnectError| PlainRefusal::new(status_of(fault.code), fault.message);
    let unknown = || {
        PlainRefusal::new(
            StatusCode::UNAUTHORIZED,
            format!("error looking up user '{name}': unknown user {name}"),
        )
    };
    let user = users::find(name).ok_or_else(unknown)?;
    users::check_reachable(&user).map_err(plain)?;
    let path = paths::resolve(path, &user, workdir).map_err(plain)?;
    Ok((user, path))
}

/// Whether a path leads through too many symbolic links.
fn is_link_loop(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
}

fn now() -> i64 {
    rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec
}
