//! A small root file system for templates: a shell and a few programs of this host, as an archive.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tar::{Builder, EntryType, Header};

const PROGRAMS: &[&str] = &[
    "bash", "cat", "chmod", "chown", "cp", "dirname", "env", "find", "head", "id", "ln", "ls", "mkdir", "mv",
    "rm", "sleep", "stat", "sync", "touch", "true",
];
/// A setuid shell: `up -p -c 'id -u'` prints 0 if setuid programs work.
pub const SETUID: &str = "/bin/up";

/// The archive of a root with a shell, `user` and `root`.
pub fn small() -> Vec<u8> {
    let mut root = PreparedRoot(Builder::new(Vec::new()));
    for (path, mode, owner) in [
        ("bin", 0o755, 0),
        ("etc", 0o755, 0),
        ("home", 0o755, 0),
        ("home/user", 0o755, 1000),
        ("root", 0o700, 0),
        ("tmp", 0o1777, 0),
    ] {
        root.put(path, EntryType::Directory, mode, owner, b"");
    }
    let mut libraries = BTreeSet::new();
    for program in PROGRAMS {
        let path = ["/usr/bin", "/bin"]
            .iter()
            .map(|dir| Path::new(dir).join(program))
            .find(|path| path.exists())
            .expect("every machine has it");
        libraries.extend(needed(&path));
        root.put(
            &format!("bin/{program}"),
            EntryType::Regular,
            0o755,
            0,
            &fs::read(path).expect("a program can be read"),
        );
    }
    let shell = fs::read("/bin/bash").expect("a shell can be read");
    root.put(&SETUID[1..], EntryType::Regular, 0o4755, 0, &shell);
    root.link("bin/sh", "bash");
    for library in libraries {
        let bytes = fs::read(&library).expect("a library can be read");
        root.put(library.to_string_lossy().trim_start_matches('/'), EntryType::Regular, 0o755, 0, &bytes);
    }
    root.put(
        "etc/passwd",
        EntryType::Regular,
        0o644,
        0,
        b"root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n",
    );
    root.put("etc/group", EntryType::Regular, 0o644, 0, b"root:x:0:\nuser:x:1000:\n");
    root.0.into_inner().expect("an archive in memory can be finished")
}

/// An archive of these files, as a build context or a layer of an image.
pub fn files(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut root = PreparedRoot(Builder::new(Vec::new()));
    entries.iter().for_each(|(path, bytes)| root.put(path, EntryType::Regular, 0o644, 0, bytes));
    root.0.into_inner().expect("an archive in memory can be finished")
}

/// A valid archive with one file that would be written outside of the root.
pub fn climbing() -> Vec<u8> {
    let mut header = Header::new_gnu();
    // Written by hand: the library refuses such a name.
    header.as_old_mut().name[..4].copy_from_slice(b"../x");
    header.set_size(1);
    header.set_mode(0o644);
    header.set_cksum();
    let mut builder = Builder::new(Vec::new());
    builder.append(&header, &b"x"[..]).expect("an archive in memory can be written");
    builder.into_inner().expect("an archive in memory can be finished")
}

struct PreparedRoot(Builder<Vec<u8>>);

impl PreparedRoot {
    fn put(&mut self, path: &str, kind: EntryType, mode: u32, owner: u64, bytes: &[u8]) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_size(bytes.len() as u64);
        self.0.append_data(&mut header, path, bytes).expect("an archive in memory can be written");
    }

    fn link(&mut self, path: &str, target: &str) {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        self.0.append_link(&mut header, path, target).expect("an archive in memory can be written");
    }
}

/// The shared libraries of a program.
fn needed(program: &Path) -> Vec<PathBuf> {
    let told = Command::new("ldd").arg(program).output().expect("ldd can be run");
    let text = String::from_utf8_lossy(&told.stdout).into_owned();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}
