//! A command that nobody asked for, before the first one that somebody does.
//!
//! An emulated machine that was thawed learns every path through its kernel, the loader and the C library when it goes
//! it for the first time. Where it has a second processor, `true` is run there while the first still proves what was
//! thawed: whoever then asks for a command finds most of its way known.
//!
//! Invariant: what is run is the template's own: where the Body has changed it, what it is loaded with or how, nothing
//! is run.
//! Absent on purpose: waiting for it, and its outcome. It is buried as every orphan is.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::mpsc::{Receiver, Sender, channel},
};

use rustix::fs::AtFlags;
use sys::spawn::{Caller, Command, Credentials, Terminal};

const PROGRAM: &std::ffi::CStr = c"/usr/bin/true";
/// Links of most roots that lead to the same names in `usr`, which every Body of the host's programs begins with.
const LINKS: [&str; 3] = ["bin", "lib", "lib64"];
/// What else decides what that does, from the root.
const OWN: [&str; 6] =
    ["usr/bin/true", "usr/lib", "usr/lib64", "etc/ld.so.cache", "etc/ld.so.preload", "etc/ld.so.conf"];
const NOBODY: u32 = 65534;
const STACK_LEN: usize = 64 << 10;

/// Somebody who stands by to do it.
#[derive(Debug)]
pub struct Rehearsal(Option<Sender<()>>);

impl Rehearsal {
    /// Stands by, from before the machine is frozen: a thread that is there need not be made.
    pub fn stand_by(upper: BorrowedFd<'_>) -> Self {
        let (begin, called) = channel();
        let stand_by = |upper| {
            std::thread::Builder::new().stack_size(STACK_LEN).spawn(move || wait(&called, upper)).ok()
        };
        Self(upper.try_clone_to_owned().ok().and_then(stand_by).map(|_| begin))
    }

    /// Has it begin, unless the Body has something of its own in the way.
    pub fn begin(&self) {
        if let Some(begin) = &self.0 {
            let _ = begin.send(());
        }
    }
}

fn wait(called: &Receiver<()>, upper: OwnedFd) {
    while called.recv().is_ok() {
        if !has_own(upper.as_fd()) {
            // Nobody misses it.
            let _ = run();
        }
    }
}

/// Whether the Body has changed what would be run, or what decides what that does.
fn has_own(upper: BorrowedFd<'_>) -> bool {
    let there = |place: &str| rustix::fs::statat(upper, place, AtFlags::SYMLINK_NOFOLLOW).is_ok();
    let usual = |name: &str| {
        rustix::fs::readlinkat(upper, name, Vec::new())
            .is_ok_and(|target| target.to_bytes().strip_prefix(b"usr/") == Some(name.as_bytes()))
    };
    OWN.iter().any(|place| there(place)) || LINKS.iter().any(|name| there(name) && !usual(name))
}

fn run() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let nobody = Credentials { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
    let started = sys::spawn::spawn(&Command {
        program: PROGRAM,
        args: &[PROGRAM.to_owned()],
        envs: &[],
        cwd: c"/",
        credentials: Some(&nobody),
        stdin: null.as_fd(),
        stdout: null.as_fd(),
        stderr: null.as_fd(),
        terminal: Terminal::None,
        caller: Caller::Anywhere,
    });
    started.map(drop).map_err(|error| error.source)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nothing_of_the_bodys_own_is_run() {
        let upper = std::env::temp_dir().join(format!("rehearse-{}", std::process::id()));
        fs::create_dir_all(upper.join("etc")).unwrap();
        fs::create_dir_all(upper.join("usr/local/bin")).unwrap();
        let begins = || !has_own(File::open(&upper).unwrap().as_fd());
        assert!(begins(), "what is elsewhere is not in the way");
        for name in LINKS {
            std::os::unix::fs::symlink(format!("usr/{name}"), upper.join(name)).unwrap();
            assert!(begins(), "{name} is as it was");
            fs::remove_file(upper.join(name)).unwrap();
        }
        for place in OWN.into_iter().chain(LINKS) {
            let place = upper.join(place);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink("nowhere", &place).unwrap();
            assert!(!begins(), "{} was changed", place.display());
            fs::remove_file(&place).unwrap();
        }
        assert!(begins());
        fs::remove_dir_all(upper).unwrap();
    }
}
