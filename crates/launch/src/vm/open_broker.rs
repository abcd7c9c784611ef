//! Files that a hypervisor opens are handed to it by who minds it, where it would open too much or the wrong ones.

use std::{
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
};

/// In the hypervisor's process, before it is executed: from here on it asks before it opens files for writing.
pub fn ask(way: &OwnedFd) -> io::Result<()> {
    let listener = sys::seccomp_notify::open::notify_opens()?;
    sys::fd::send(way.as_fd(), listener.as_fd())
}

/// Gives it that file, whenever it asks to open the path for writing and reading.
pub async fn serve_opens(listener: OwnedFd, file: File, path: CString) {
    let Ok(listener) = guest::channel::readable(listener) else { return };
    loop {
        let Ok(mut ready) = listener.readable().await else { return };
        // A hypervisor that is gone has no more questions.
        if sys::seccomp_notify::open::answer(listener.get_ref().as_fd(), &path, file.as_fd()).is_err() {
            return;
        }
        ready.clear_ready();
    }
}
