//! The VMM process opens certain files for a hypervisor, which would open them with too many rights, or open other
//! ones.

use std::{
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
};

/// Runs in the hypervisor's process before exec: from here on the kernel asks the VMM process about each open for
/// writing.
pub fn ask(way: &OwnedFd) -> io::Result<()> {
    let listener = sys::seccomp_notify::open::notify_opens()?;
    sys::fd::send(way.as_fd(), listener.as_fd())
}

/// Returns the given file whenever the hypervisor opens the path for reading and writing.
pub async fn serve_opens(listener: OwnedFd, file: File, path: CString) {
    let Ok(listener) = guest::channel::readable(listener) else { return };
    loop {
        let Ok(mut ready) = listener.readable().await else { return };
        // The hypervisor has ended, so there are no more requests.
        if sys::seccomp_notify::open::answer(listener.get_ref().as_fd(), &path, file.as_fd()).is_err() {
            return;
        }
        ready.clear_ready();
    }
}
