//! The microVM setup that all tests share: kernel, hypervisor, images, boot snapshots. Made once.

use std::{
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, symlink},
    path::{Path, PathBuf},
};

use crate::bodies::{explain, open};

/// A data directory beside the build, if possible on the same file system as those of the tests.
fn place() -> PathBuf {
    let mut dir = std::env::current_exe()
        .expect("a test is a program")
        .ancestors()
        .find(|dir| dir.ends_with("target"))
        .map(Path::to_owned)
        .unwrap_or_else(std::env::temp_dir);
    dir.push("microvm");
    dir
}

/// Makes a data directory use this setup.
pub fn share(data: &Path) {
    let shared = place();
    fs::create_dir_all(&shared).expect("a directory for microVMs can be made");
    let lock = File::create(shared.join("lock")).expect("it can be locked");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("it can be locked");
    if !shared.join("data/vm/setup.json").exists() {
        let fleet = open(&shared.join("data")).expect("a data directory can be opened");
        fleet
            .microvms()
            .setup(None, &mut |said: &str| eprintln!("{said}"))
            .unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    }
    drop(lock);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(data).expect("a data directory can be made");
    symlink(shared.join("data/vm"), data.join("vm")).expect("a link can be made");
}
