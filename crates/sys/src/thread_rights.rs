//! Rights of one thread over files.
//!
//! The kernel keeps credentials for each thread. A thread that gives up its rights here leaves those of the other
//! threads of its process as they are; its user and its effective user stay too, so that programs of the new user can
//! neither signal nor trace it.

use std::io;

use rustix::{
    fs::Gid,
    thread::{CapabilitySet, CapabilitySets},
};

/// Gives the calling thread the rights of these ids over files, and no capability. It cannot undo that.
///
/// # Errors
/// If the thread has some of its former rights left; it must then end without touching a file.
pub fn limit_to_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    set_and_check(libc::SYS_setfsgid, gid)?;
    set_and_check(libc::SYS_setfsuid, uid)?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// The id of the user whose rights the calling thread has over files, and who owns those that it creates.
pub fn file_user() -> u32 {
    // SAFETY: setfsuid takes a number and touches no memory; the id -1 is not valid, so the call only returns the id.
    let now = unsafe { libc::syscall(libc::SYS_setfsuid, -1 as libc::c_long) };
    u32::try_from(now).unwrap_or(u32::MAX)
}

/// Sets an id with a call that reports no errors, and checks it with another one that changes nothing.
fn set_and_check(number: libc::c_long, id: u32) -> io::Result<()> {
    // SAFETY: setfsuid and setfsgid take a number and touch no memory. The raw call concerns this thread only.
    unsafe { libc::syscall(number, libc::c_long::from(id)) };
    // SAFETY: as above; the id -1 is valid for neither call, so it only returns the present id.
    let now = unsafe { libc::syscall(number, -1 as libc::c_long) };
    if now == libc::c_long::from(id) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_loses_its_rights_and_the_others_keep_theirs() {
        let file = std::env::temp_dir().join(format!("thread-rights-{}", std::process::id()));
        std::fs::write(&file, "secret").unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let path = file.clone();
        let own = file_user();
        let limited = std::thread::spawn(move || {
            limit_to_user(12_345, 12_345, &[12_345]).map(|()| {
                assert_eq!(file_user(), 12_345);
                std::fs::read(path).map_err(|error| error.kind())
            })
        });
        match limited.join().unwrap() {
            Ok(read) => assert_eq!(read, Err(io::ErrorKind::PermissionDenied)),
            // Only root can take other ids.
            Err(error) => {
                assert!(!rustix::process::geteuid().is_root(), "{error}");
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            }
        }
        assert_eq!((file_user(), std::fs::read(&file).unwrap()), (own, b"secret".to_vec()));
        std::fs::remove_file(file).unwrap();
    }
}
