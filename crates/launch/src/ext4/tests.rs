//! The reader against disks that mke2fs makes, journals that debugfs writes, and damaged bytes.

use std::{
    fs,
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::fs::{CWD, FileType, Mode, OFlags, XattrFlags};

use super::*;

/// A directory of one test, gone when it is dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pal-ext4-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("in/upper")).unwrap();
        Self(dir)
    }

    fn upper(&self) -> PathBuf {
        self.0.join("in/upper")
    }

    fn image(&self) -> PathBuf {
        self.0.join("disk.img")
    }

    /// Makes a disk of what is in `in`, as a Body's is made.
    fn disk(&self, bytes: u64) -> Disk {
        File::create(self.image()).unwrap().set_len(bytes).unwrap();
        let made = Command::new("mke2fs")
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-N", "8192", "-O", "^resize_inode", "-d"])
            .arg(self.0.join("in"))
            .arg(self.image())
            .status()
            .unwrap();
        assert!(made.success());
        self.reopen().unwrap()
    }

    fn reopen(&self) -> io::Result<Disk> {
        Disk::open(File::open(self.image()).unwrap())
    }

    fn debugfs(&self, commands: &str) -> String {
        let script = self.0.join("commands");
        fs::write(&script, commands).unwrap();
        let said = Command::new("debugfs")
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .args(["-w", "-f"])
            .arg(script)
            .arg(self.image())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr))
    }

    fn extract(&self, disk: &Disk) -> io::Result<PathBuf> {
        let out = self.0.join("out");
        let _ = fs::remove_dir_all(&out);
        fs::create_dir(&out).unwrap();
        let dir = rustix::fs::open(&out, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert!(extract(disk, "upper", dir.as_fd())?, "it is there");
        assert!(!extract(disk, "nothing/here", dir.as_fd())?, "and this is not");
        Ok(out)
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn everything_an_upper_holds_comes_out() {
    let scratch = Scratch::new("whole");
    let upper = scratch.upper();
    fs::create_dir_all(upper.join("many")).unwrap();
    for index in 0..1500 {
        fs::write(upper.join(format!("many/a rather long name, so that there are many blocks {index}")), "x")
            .unwrap();
    }
    fs::write(upper.join("run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(upper.join("run.sh"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(upper.join("run.sh"), upper.join("same")).unwrap();
    symlink("short", upper.join("short")).unwrap();
    symlink("long/".repeat(40), upper.join("long")).unwrap();
    fs::write(upper.join("odd \n\t\u{1b} name"), "odd").unwrap();
    let sparse = File::create(upper.join("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    sparse.write_all_at(b"end", (64 << 20) - 3).unwrap();
    fs::create_dir(upper.join("opaque")).unwrap();
    rustix::fs::setxattr(upper.join("opaque"), "user.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
    rustix::fs::mknodat(CWD, upper.join("gone"), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    rustix::fs::mknodat(CWD, upper.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    for bytes in [64 << 20, 1 << 30] {
        let out = scratch.extract(&scratch.disk(bytes)).unwrap();
        let names = |dir: &Path| {
            let mut names: Vec<_> =
                fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&out), names(&upper));
        assert_eq!(names(&out.join("many")), names(&upper.join("many")));
        let (script, same) =
            (fs::metadata(out.join("run.sh")).unwrap(), fs::metadata(out.join("same")).unwrap());
        assert_eq!((script.mode() & 0o7777, script.ino()), (0o751, same.ino()));
        assert_eq!(script.mtime(), fs::metadata(upper.join("run.sh")).unwrap().mtime());
        assert_eq!(fs::read_link(out.join("short")).unwrap(), Path::new("short"));
        assert_eq!(fs::read_link(out.join("long")).unwrap(), PathBuf::from("long/".repeat(40)));
        assert_eq!(read(&out.join("odd \n\t\u{1b} name")), "odd");
        let sparse = fs::read(out.join("sparse")).unwrap();
        assert!(sparse.len() == 64 << 20 && sparse.ends_with(b"\0end"));
        assert!(fs::metadata(out.join("sparse")).unwrap().blocks() < 1024, "holes stay holes");
        let opaque = |name: &str| {
            let mut value = [0; 4];
            rustix::fs::getxattr(out.join(name), "user.overlay.opaque", &mut value).is_ok()
        };
        assert!(opaque("opaque") && !opaque("many"));
        let gone = fs::symlink_metadata(out.join("gone")).unwrap();
        assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
        assert!(fs::symlink_metadata(out.join("pipe")).unwrap().file_type().is_fifo());
    }
}

#[test]
fn what_the_journal_holds_is_newer() {
    let scratch = Scratch::new("journal");
    symlink("old/".repeat(40), scratch.upper().join("link")).unwrap();
    drop(scratch.disk(64 << 20));
    let block = scratch.debugfs("blocks /upper/link\n");
    let block: u64 = block.split_whitespace().rev().find_map(|word| word.parse().ok()).unwrap();
    let mut newer = "new/".repeat(40).into_bytes();
    newer.resize(scratch.reopen().unwrap().block_len, 0);
    let contents = scratch.0.join("contents");
    fs::write(&contents, newer).unwrap();
    scratch.debugfs(&format!("jo\njw -b {block} {}\njc\n", contents.display()));
    let target = || fs::read_link(scratch.extract(&scratch.reopen().unwrap()).unwrap().join("link")).unwrap();
    assert_eq!(target(), PathBuf::from("new/".repeat(40)), "committed, and not written back");
    scratch.debugfs(&format!("jo\njw -r {block}\njc\n"));
    assert_eq!(target(), PathBuf::from("old/".repeat(40)), "revoked by a later transaction");
}

#[test]
fn no_byte_of_a_disk_leads_anywhere() {
    let scratch = Scratch::new("hostile");
    fs::write(scratch.upper().join("file"), "contents").unwrap();
    symlink("long/".repeat(40), scratch.upper().join("link")).unwrap();
    drop(scratch.disk(16 << 20));
    let whole = fs::read(scratch.image()).unwrap();
    // Of metadata as a small disk has it: superblock, descriptors, inodes, directories.
    let mut seed: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for round in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..=draw(8) {
            let at = match round % 3 {
                0 => 1024 + draw(1024),
                1 => draw(1 << 20),
                _ => draw(bytes.len() as u64),
            };
            bytes[at as usize] = draw(256) as u8;
        }
        fs::write(scratch.image(), &bytes).unwrap();
        let out = scratch.0.join("out");
        let _ = fs::remove_dir_all(&out);
        fs::create_dir(&out).unwrap();
        let dir = rustix::fs::open(&out, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        // It answers, whatever it says.
        let _ = scratch.reopen().and_then(|disk| extract(&disk, "upper", dir.as_fd()));
    }
}
