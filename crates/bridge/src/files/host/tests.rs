//! Tests of directories of the host: what is inside is reached, and nothing else.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use proto::file_call::{FileAnswer, FileError, FileOperation, WrittenFile};

use super::{super::tree::refuse, HostAccess, HostDirectory};

/// A directory that is removed at the end of its test.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("palisade-host-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("in/sub")).unwrap();
        fs::write(path.join("secret"), "outside\n").unwrap();
        fs::write(path.join("in/a.md"), "one\ntwo\n").unwrap();
        fs::write(path.join("in/sub/b.md"), "two\n").unwrap();
        fs::write(path.join("in/raw.bin"), [0xff, 0xfe]).unwrap();
        symlink("../secret", path.join("in/out")).unwrap();
        symlink("..", path.join("in/up")).unwrap();
        symlink("a.md", path.join("in/inner")).unwrap();
        Self(path)
    }

    fn open(&self, access: HostAccess) -> HostDirectory {
        HostDirectory::open(&self.0.join("in"), access).unwrap()
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn read(directory: &HostDirectory, path: &str) -> FileAnswer {
    directory.answer(&FileOperation::Read { path: path.into(), offset: 0, limit: 100 })
}

fn content(answer: FileAnswer) -> String {
    match answer {
        FileAnswer::Text { content, .. } => content,
        other => panic!("{other:?}"),
    }
}

fn write(directory: &HostDirectory, path: &str, text: Option<&str>) -> FileAnswer {
    let file = WrittenFile { path: path.into(), content: text.map(str::to_owned) };
    directory.answer(&FileOperation::Write { files: vec![file] })
}

#[test]
fn files_inside_are_read_and_found() {
    let test = TestDirectory::new("read");
    let directory = test.open(HostAccess::ReadOnly);
    assert_eq!(content(read(&directory, "/a.md")), "one\ntwo\n");
    assert_eq!(content(read(&directory, "/inner")), "one\ntwo\n");
    assert!(matches!(read(&directory, "/raw.bin"), FileAnswer::Binary { len: 2, .. }));
    assert_eq!(read(&directory, "/sub"), refuse("/sub", FileError::IsDirectory));
    assert_eq!(read(&directory, "/none"), refuse("/none", FileError::NotFound));
    let FileAnswer::Entries { entries, .. } = directory.answer(&FileOperation::List { path: "/".into() })
    else {
        panic!("a listing")
    };
    let names: Vec<&str> = entries.iter().map(|entry| entry.path.as_str()).collect();
    assert_eq!(names, ["/a.md", "/inner", "/out", "/raw.bin", "/sub", "/up"]);
    let glob = directory.answer(&FileOperation::Glob { pattern: "*.md".into(), path: "/".into() });
    let paths = vec!["/a.md".to_owned(), "/sub/b.md".to_owned()];
    assert_eq!(glob, FileAnswer::Paths { paths, truncated: false, unreadable: false });
    let grep = |path: &str| {
        let operation = FileOperation::Grep {
            pattern: "two".into(),
            path: path.into(),
            glob: Some("*.md".into()),
            limit: 10,
        };
        match directory.answer(&operation) {
            FileAnswer::Matches { matches, .. } => {
                matches.into_iter().map(|one| (one.path, one.line)).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(grep("/"), [("/a.md".into(), 2), ("/sub/b.md".into(), 1)]);
    assert_eq!(grep("/sub/b.md"), [("/sub/b.md".to_owned(), 1)]);
}

#[test]
fn nothing_outside_is_reached() {
    let test = TestDirectory::new("jail");
    // The control: without the jail these links lead there.
    assert_eq!(fs::read_to_string(test.0.join("in/out")).unwrap(), "outside\n");
    assert_eq!(fs::read_to_string(test.0.join("in/up/secret")).unwrap(), "outside\n");
    let directory = test.open(HostAccess::ReadWrite);
    for path in ["/out", "/up/secret", "/../secret", "/sub/../../secret"] {
        assert_eq!(read(&directory, path), refuse(path, FileError::PermissionDenied), "{path}");
    }
    for path in ["/up/new", "/../new"] {
        assert_eq!(write(&directory, path, Some("x")), refuse(path, FileError::PermissionDenied), "{path}");
    }
    let edit = |path: &str| {
        let (old, new) = ("outside".into(), "changed".into());
        directory.answer(&FileOperation::Edit { path: path.into(), old, new, replace_all: false })
    };
    assert_eq!(edit("/out"), refuse("/out", FileError::PermissionDenied));
    let FileAnswer::Matches { matches, .. } = directory.answer(&FileOperation::Grep {
        pattern: "outside".into(),
        path: "/".into(),
        glob: None,
        limit: 10,
    }) else {
        panic!("matches")
    };
    assert_eq!(matches, []);
    // A write to the link replaces the link.
    assert_eq!(write(&directory, "/out", Some("mine")), FileAnswer::Written);
    assert_eq!(directory.answer(&FileOperation::Delete { path: "/up".into() }), FileAnswer::Deleted);
    assert_eq!(fs::read_to_string(test.0.join("secret")).unwrap(), "outside\n");
}

#[test]
fn a_directory_is_changed_only_if_the_user_says_so() {
    let test = TestDirectory::new("write");
    let closed = test.open(HostAccess::ReadOnly);
    assert_eq!(write(&closed, "/new", Some("x")), refuse("/new", FileError::PermissionDenied));
    assert_eq!(write(&closed, "/a.md", None), refuse("/a.md", FileError::PermissionDenied));
    let opened = test.open(HostAccess::ReadWrite);
    assert_eq!(write(&opened, "/x/y/z.txt", Some("deep\n")), FileAnswer::Written);
    assert_eq!(content(read(&opened, "/x/y/z.txt")), "deep\n");
    assert_eq!(write(&opened, "/sub", Some("x")), refuse("/sub", FileError::IsDirectory));
    assert_eq!(write(&opened, "/a.md/x", Some("x")), refuse("/a.md/x", FileError::NotDirectory));
    assert_eq!(opened.answer(&FileOperation::Delete { path: "/x".into() }), FileAnswer::Deleted);
    assert_eq!(
        opened.answer(&FileOperation::Delete { path: "/x".into() }),
        refuse("/x", FileError::NotFound)
    );
    assert_eq!(
        opened.answer(&FileOperation::Delete { path: "/".into() }),
        refuse("/", FileError::IsDirectory)
    );
    let names: Vec<_> =
        fs::read_dir(test.0.join("in")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().ends_with(".tmp")), "{names:?}");
}
