//! Operations on files, with honest and with hostile files, paths and texts.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use proto::file_call::{FileEntry, LINE_LEN_MAX, MATCHES_MAX, PATHS_MAX, TextMatch, WrittenFile};
use rustix::fs::{CWD, FileType, Mode};

use super::*;

/// A directory that is removed at the end of its test.
struct CallDir(PathBuf);

impl CallDir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pal-calls-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().canonicalize().unwrap().join(name);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn path(&self, below: &str) -> String {
        self.0.join(below).to_str().unwrap().to_owned()
    }

    fn put(&self, below: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        self.path(below)
    }

    fn text(&self, below: &str) -> String {
        fs::read_to_string(self.0.join(below)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for CallDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fifo(path: &str) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
}

fn list(path: &str) -> Result<FileAnswer, FileError> {
    done(FileOperation::List { path: path.into() })
}

fn read(path: &str, offset: u64, limit: u64) -> Result<FileAnswer, FileError> {
    done(FileOperation::Read { path: path.into(), offset, limit })
}

fn write(path: &str, content: &str) -> Result<FileAnswer, FileError> {
    let file = WrittenFile { path: path.into(), content: Some(content.into()) };
    done(FileOperation::Write { files: vec![file] })
}

fn edit(path: &str, old: &str, new: &str, replace_all: bool) -> Result<FileAnswer, FileError> {
    done(FileOperation::Edit { path: path.into(), old: old.into(), new: new.into(), replace_all })
}

fn delete(path: &str) -> Result<FileAnswer, FileError> {
    done(FileOperation::Delete { path: path.into() })
}

fn glob(pattern: &str, path: &str) -> Result<FileAnswer, FileError> {
    done(FileOperation::Glob { pattern: pattern.into(), path: path.into() })
}

fn grep(pattern: &str, path: &str, glob: Option<&str>, limit: u64) -> Result<FileAnswer, FileError> {
    let glob = glob.map(str::to_owned);
    done(FileOperation::Grep { pattern: pattern.into(), path: path.into(), glob, limit })
}

fn done(operation: FileOperation) -> Result<FileAnswer, FileError> {
    operate(&operation).map_err(|fault| fault.reason)
}

fn text(content: &str, total_lines: u64, start_line: u64, end_line: u64) -> Result<FileAnswer, FileError> {
    Ok(FileAnswer::Text { content: content.into(), total_lines, start_line, end_line })
}

fn other(why: &str) -> FileError {
    FileError::Other { why: why.into() }
}

#[test]
fn directories_are_listed_in_order_and_up_to_a_limit() {
    let dir = CallDir::new();
    dir.put("b/inner", "x");
    dir.put("a", "four");
    symlink("/", dir.path("link")).unwrap();
    let Ok(FileAnswer::Entries { entries, truncated }) = list(&dir.path("")) else { panic!("no entries") };
    let shown = |entry: &FileEntry| (entry.path.clone(), entry.is_dir, entry.modified_s > 1_500_000_000);
    let wanted =
        [("a", false), ("b", true), ("link", false)].map(|(name, is_dir)| (dir.path(name), is_dir, true));
    assert_eq!((entries.iter().map(shown).collect::<Vec<_>>(), truncated), (wanted.to_vec(), false));
    assert_eq!(entries[0].len, 4);
    assert_eq!(list(&dir.path("a")), Err(FileError::NotDirectory));
    assert_eq!(list(&dir.path("none")), Err(FileError::NotFound));
    assert_eq!(list("relative"), Err(FileError::InvalidPath));
    for n in 0..=PATHS_MAX {
        fs::write(dir.0.join("b").join(n.to_string()), "").unwrap();
    }
    let Ok(FileAnswer::Entries { entries, truncated }) = list(&dir.path("b")) else { panic!("no entries") };
    assert_eq!((entries.len(), truncated), (PATHS_MAX, true));
}

#[test]
fn files_are_read_by_lines() {
    let dir = CallDir::new();
    let path = dir.put("file", "one\ntwo\r\nthree");
    assert_eq!(read(&path, 0, 100), text("one\ntwo\r\nthree", 3, 1, 3));
    assert_eq!(read(&path, 1, 1), text("two\r\n", 3, 2, 2));
    assert_eq!(read(&path, 2, u64::MAX), text("three", 3, 3, 3));
    assert_eq!(read(&path, 3, 1), text("", 3, 0, 0));
    assert_eq!(read(&path, u64::MAX, u64::MAX), text("", 3, 0, 0));
    assert_eq!(read(&path, 0, 0), text("", 3, 0, 0));
    assert_eq!(read(&dir.put("empty", ""), 0, 10), text("", 0, 0, 0));
    assert_eq!(read(&dir.put("ended", "a\nb\n"), 1, 10), text("b\n", 2, 2, 2));
    // A line, and a character, that lie across the chunks in which a file is read.
    let long = format!("{}\n{}\nend", "ž".repeat(50_000), "x".repeat(200_001));
    let path = dir.put("long", &long);
    assert_eq!(read(&path, 0, 9), text(&long, 3, 1, 3));
    assert_eq!(read(&path, 2, 9), text("end", 3, 3, 3));
}

#[test]
fn files_that_are_no_text_come_as_they_are() {
    let dir = CallDir::new();
    let bytes = [b'a', b'\n', 0xff, 0, 0xc5];
    let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, bytes);
    let binary = |base64: &str, len| Ok(FileAnswer::Binary { base64: base64.into(), len });
    assert_eq!(read(&dir.put("binary", bytes), 0, 1), binary(&base64, 5));
    // The beginning of a character at the end of a file.
    assert_eq!(read(&dir.put("cut", [b'a', 0xc5]), 0, 1), binary("YcU=", 2));
    let large = dir.put("large", vec![0xff; CONTENT_LEN_MAX + 1]);
    assert_eq!(read(&large, 0, 1), Err(FileError::TooLarge { len: CONTENT_LEN_MAX as u64 + 1 }));
}

#[test]
fn a_page_of_a_huge_text_is_read_and_a_huge_page_is_not() {
    let dir = CallDir::new();
    let line = format!("{}\n", "x".repeat(1023));
    let path = dir.put("huge", line.repeat(20_000));
    assert_eq!(read(&path, 19_999, 5), text(&line, 20_000, 20_000, 20_000));
    let refused = read(&path, 0, 20_000);
    assert_eq!(refused, Err(FileError::TooLarge { len: 1024 * 20_000 }));
    let sparse = dir.path("sparse");
    fs::File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(read(&sparse, 0, 1), Err(FileError::TooLarge { len: 1 << 40 }));
    assert_eq!(edit(&sparse, "a", "b", false), Err(FileError::TooLarge { len: 1 << 40 }));
}

#[test]
fn what_is_no_file_is_not_read_written_or_waited_for() {
    let dir = CallDir::new();
    let pipe = dir.path("pipe");
    fifo(&pipe);
    symlink(&pipe, dir.path("to-pipe")).unwrap();
    symlink("loop", dir.path("loop")).unwrap();
    for path in [pipe.as_str(), &dir.path("to-pipe"), "/dev/zero", "/dev/tty"] {
        if path == "/dev/tty" && !Path::new(path).exists() {
            continue;
        }
        assert_eq!(read(path, 0, 1), Err(open::not_regular()), "{path}");
        assert_eq!(write(path, "x"), Err(open::not_regular()), "{path}");
        assert_eq!(edit(path, "a", "b", false), Err(open::not_regular()), "{path}");
        assert_eq!(grep("x", path, None, 1), Err(open::not_regular()), "{path}");
    }
    assert_eq!(read(&dir.path(""), 0, 1), Err(FileError::IsDirectory));
    assert_eq!(write(&dir.path(""), "x"), Err(FileError::IsDirectory));
    assert_eq!(write("/", "x"), Err(FileError::IsDirectory));
    assert_eq!(delete("/"), Err(FileError::InvalidPath));
    assert!(matches!(read(&dir.path("loop"), 0, 1), Err(FileError::Other { .. })));
    assert!(matches!(write(&dir.path("loop"), "x"), Err(FileError::Other { .. })));
    // Searches pass by.
    dir.put("plain", "x");
    let found = FileAnswer::Paths { paths: vec![dir.path("plain")], truncated: false, unreadable: false };
    assert_eq!(glob("*", &dir.path("")), Ok(found));
    let line = TextMatch { path: dir.path("plain"), line: 1, text: "x".into() };
    assert_eq!(
        grep("x", &dir.path(""), None, 9),
        Ok(FileAnswer::Matches { matches: vec![line], truncated: false })
    );
}

#[test]
fn files_of_the_kernel_end_or_are_refused() {
    // Some never end, some block, some are about the guest: each has an answer.
    for path in ["/proc/kmsg", "/proc/self/mem", "/proc/self/pagemap", "/proc/self/clear_refs", "/proc/kcore"]
    {
        let answer = read(path, 0, 10);
        assert!(answer.is_err(), "{path}: {answer:?}");
    }
    assert!(matches!(read("/proc/version", 0, 10), Ok(FileAnswer::Text { total_lines: 1, .. })));
    assert_eq!(list("/proc/self/fd"), Err(FileError::PermissionDenied));
    assert!(write("/proc/version", "x").is_err());
}

#[test]
fn paths_that_go_up_are_refused_everywhere() {
    let dir = CallDir::new();
    let up = format!("{}/../x", dir.path(""));
    let invalid = Err(FileError::InvalidPath);
    for path in [up.as_str(), "x", "", "/a\0b", "~"] {
        assert_eq!(
            (list(path), read(path, 0, 1), write(path, "x")),
            (invalid.clone(), invalid.clone(), invalid.clone())
        );
        assert_eq!((edit(path, "a", "b", true), delete(path)), (invalid.clone(), invalid.clone()));
        assert_eq!((glob("*", path), grep("a", path, None, 1)), (invalid.clone(), invalid.clone()));
    }
    assert!(matches!(glob("../*", &dir.path("")), Err(FileError::InvalidPattern { .. })));
    assert!(matches!(grep("a", &dir.path(""), Some("../*"), 1), Err(FileError::InvalidPattern { .. })));
    assert!(matches!(glob(&"{a,b}".repeat(1000), &dir.path("")), Err(FileError::InvalidPattern { .. })));
}

#[test]
fn files_are_created_with_their_directories_and_replaced_with_their_modes() {
    let dir = CallDir::new();
    let path = dir.path("a/b/c.txt");
    assert_eq!(write(&path, "new"), Ok(FileAnswer::Written));
    assert_eq!(dir.text("a/b/c.txt"), "new");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o751)).unwrap();
    let before = fs::metadata(&path).unwrap().ino();
    let mut reader = fs::File::open(&path).unwrap();
    assert_eq!(write(&path, "newer"), Ok(FileAnswer::Written));
    let after = fs::metadata(&path).unwrap();
    assert_eq!((dir.text("a/b/c.txt").as_str(), after.permissions().mode() & 0o7777), ("newer", 0o751));
    let mut old = String::new();
    std::io::Read::read_to_string(&mut reader, &mut old).unwrap();
    assert!(after.ino() != before && old == "new", "a reader sees the old file as a whole");
    assert_eq!(fs::read_dir(dir.path("a/b")).unwrap().count(), 1, "nothing else is left");
    assert_eq!(write(&dir.path("a/b/c.txt/d"), "x"), Err(FileError::NotDirectory));
}

#[test]
fn links_are_written_through_and_other_names_are_kept() {
    let dir = CallDir::new();
    dir.put("real/file", "old");
    symlink("real/file", dir.path("link")).unwrap();
    symlink(dir.path("link"), dir.path("second")).unwrap();
    symlink("real/new", dir.path("dangling")).unwrap();
    assert_eq!(write(&dir.path("second"), "through"), Ok(FileAnswer::Written));
    assert_eq!(write(&dir.path("dangling"), "made"), Ok(FileAnswer::Written));
    assert_eq!((dir.text("real/file").as_str(), dir.text("real/new").as_str()), ("through", "made"));
    assert!(fs::symlink_metadata(dir.path("second")).unwrap().is_symlink());
    fs::hard_link(dir.path("real/file"), dir.path("twin")).unwrap();
    assert_eq!(edit(&dir.path("twin"), "through", "both", false), Ok(FileAnswer::Edited { occurrences: 1 }));
    assert_eq!((dir.text("real/file").as_str(), dir.text("twin").as_str()), ("both", "both"));
    assert_eq!(delete(&dir.path("second")), Ok(FileAnswer::Deleted));
    assert_eq!(dir.text("link"), "both", "only the link is gone");
}

#[test]
fn several_files_are_written_up_to_the_first_that_cannot_be() {
    let dir = CallDir::new();
    dir.put("gone", "x");
    let file = |name: &str, content: Option<&str>| WrittenFile {
        path: dir.path(name),
        content: content.map(str::to_owned),
    };
    let files = vec![file("one", Some("1")), file("gone", None), file("none", None), file("two", Some("2"))];
    let fault = operate(&FileOperation::Write { files }).unwrap_err();
    assert_eq!(fault, FileFault { reason: FileError::NotFound, path: dir.path("none") });
    assert_eq!(dir.names(), ["one"]);
    let folder = vec![WrittenFile { path: dir.path(""), content: None }];
    assert_eq!(done(FileOperation::Write { files: folder }), Err(FileError::IsDirectory));
    let half = "x".repeat(CONTENT_LEN_MAX / 2 + 1);
    let much = vec![file("a", Some(&half)), file("b", Some(&half))];
    assert!(matches!(done(FileOperation::Write { files: much }), Err(FileError::TooLarge { .. })));
    assert_eq!(dir.names(), ["one"]);
}

#[test]
fn text_is_replaced_once_or_everywhere_and_keeps_its_line_ends() {
    let dir = CallDir::new();
    let path = dir.put("file", "a b a\n");
    let edited = |occurrences| Ok(FileAnswer::Edited { occurrences });
    assert_eq!(edit(&path, "", "x", false), Err(FileError::EmptyPattern));
    assert_eq!(edit(&path, "z", "x", false), Err(FileError::NoOccurrence));
    assert_eq!(edit(&path, "a", "x", false), Err(FileError::Ambiguous { occurrences: 2 }));
    assert_eq!(edit(&path, "b", "$1", false), edited(1));
    assert_eq!(edit(&path, "a", "aa", true), edited(2));
    assert_eq!(dir.text("file"), "aa $1 aa\n");
    // The caller saw the text with other line ends than the file has.
    let windows = dir.put("windows", "one\r\ntwo\r\nthree\r\n");
    assert_eq!(edit(&windows, "one\ntwo", "1\n2", false), edited(1));
    assert_eq!(dir.text("windows"), "1\r\n2\r\nthree\r\n");
    let unix = dir.put("unix", "one\ntwo\n");
    assert_eq!(edit(&unix, "one\r\ntwo", "1\r\n2", false), edited(1));
    assert_eq!(dir.text("unix"), "1\n2\n");
    assert_eq!(edit(&dir.put("binary", [0xff, b'a']), "a", "b", false), Err(FileError::NotText));
    assert_eq!(edit(&dir.path("none"), "a", "b", false), Err(FileError::NotFound));
    let many = dir.put("many", "ab".repeat(1 << 20));
    let len = (1_u64 << 20) * 1001;
    assert_eq!(edit(&many, "a", &"x".repeat(1000), true), Err(FileError::TooLarge { len }));
}

#[test]
fn a_tree_is_removed_and_nothing_beside_it() {
    let dir = CallDir::new();
    dir.put("tree/a/b", "x");
    dir.put("kept/file", "x");
    symlink(dir.path("kept"), dir.path("tree/link")).unwrap();
    assert_eq!(delete(&dir.path("tree")), Ok(FileAnswer::Deleted));
    assert_eq!(delete(&dir.path("tree")), Err(FileError::NotFound));
    assert_eq!(delete(&dir.path("kept/file/x")), Err(FileError::NotDirectory));
    assert_eq!((dir.names(), dir.text("kept/file")), (vec!["kept".to_owned()], "x".into()));
}

#[test]
fn names_are_found_by_their_patterns() {
    let dir = CallDir::new();
    for name in ["a.py", "src/b.py", "src/x/c.py", ".github/d.py", ".hidden.py", "src/e.rs"] {
        dir.put(name, "");
    }
    fs::create_dir_all(dir.path("dir.py")).unwrap();
    symlink("src/e.rs", dir.path("inside.py")).unwrap();
    symlink("/etc/passwd", dir.path("outside.py")).unwrap();
    symlink("none", dir.path("broken.py")).unwrap();
    symlink("src", dir.path("dirlink")).unwrap();
    let found = |pattern: &str| match glob(pattern, &dir.path("")) {
        Ok(FileAnswer::Paths { paths, truncated: false, unreadable: false }) => {
            paths.iter().map(|path| path.strip_prefix(&dir.path("")).unwrap().to_owned()).collect::<Vec<_>>()
        }
        answer => panic!("{answer:?}"),
    };
    assert_eq!(found("*.py"), [".github/d.py", "a.py", "inside.py", "src/b.py", "src/x/c.py"]);
    assert_eq!(found("**/*.py"), ["a.py", "inside.py", "src/b.py", "src/x/c.py"]);
    assert_eq!(found("src/*.{py,rs}"), ["src/b.py", "src/e.rs"]);
    assert_eq!(found(".*"), [".hidden.py"]);
    assert_eq!(found("dirlink/*"), [""; 0]);
    assert_eq!(glob("*", &dir.path("a.py")), Err(FileError::NotDirectory));
    assert_eq!(glob("*", &dir.path("none")), Err(FileError::NotFound));
    // The root of the search may be a link.
    let Ok(FileAnswer::Paths { paths, .. }) = glob("*.rs", &dir.path("dirlink")) else { panic!("no paths") };
    assert_eq!(paths, [dir.path("dirlink/e.rs")]);
    // A search of everything leaves out what is endless.
    let Ok(FileAnswer::Paths { paths, .. }) = glob("/*/version", "/") else { panic!("no paths") };
    assert!(!paths.contains(&"/proc/version".to_owned()));
}

#[test]
fn a_search_finds_no_more_names_than_its_limit() {
    let dir = CallDir::new();
    for n in 0..=PATHS_MAX {
        fs::write(dir.path(&n.to_string()), "").unwrap();
    }
    let Ok(FileAnswer::Paths { paths, truncated, .. }) = glob("*", &dir.path("")) else { panic!("no paths") };
    assert_eq!((paths.len(), truncated), (PATHS_MAX, true));
}

#[test]
fn lines_are_found_by_their_text() {
    let dir = CallDir::new();
    dir.put("b.txt", "first\nneedle here\r\nlast needle");
    dir.put("a/x.py", "no\n\n\nneedle\n");
    dir.put(".hidden/y", "needle\n");
    dir.put(".git/config", "needle\n");
    dir.put("binary", b"needle\0\n");
    dir.put("latin", b"needle \xe9\n");
    symlink("b.txt", dir.path("link")).unwrap();
    let found = |text: &str, path: &str, glob: Option<&str>| match grep(text, &dir.path(path), glob, 1000) {
        Ok(FileAnswer::Matches { matches, truncated: false }) => matches
            .into_iter()
            .map(|found| {
                format!("{}:{}:{}", found.path.strip_prefix(&dir.path("")).unwrap(), found.line, found.text)
            })
            .collect::<Vec<_>>(),
        answer => panic!("{answer:?}"),
    };
    assert_eq!(
        found("needle", "", None),
        [
            ".hidden/y:1:needle",
            "a/x.py:4:needle",
            "b.txt:2:needle here",
            "b.txt:3:last needle",
            "latin:1:needle \u{fffd}"
        ]
    );
    assert_eq!(found("needle", "", Some("*.py")), ["a/x.py:4:needle"]);
    assert_eq!(found("needle", "", Some("/*.txt")), ["b.txt:2:needle here", "b.txt:3:last needle"]);
    assert_eq!(found("needle", "b.txt", None).len(), 2);
    assert_eq!(found("n.edle", "", None), [""; 0], "the text is literal");
    assert_eq!(found("first\nlast", "b.txt", None), ["b.txt:1:first", "b.txt:3:last needle"]);
    assert_eq!(found("", "a/x.py", None), ["a/x.py:1:no", "a/x.py:2:", "a/x.py:3:", "a/x.py:4:needle"]);
    assert_eq!(found("needle", ".git", None), [".git/config:1:needle"], "unless it is asked for");
    assert_eq!(grep("x", &dir.path("none"), None, 1), Err(FileError::NotFound));
}

#[test]
fn matches_and_lines_have_limits() {
    let dir = CallDir::new();
    let path = dir.put("many", "x\n".repeat(3000));
    let count = |limit| match grep("x", &path, None, limit) {
        Ok(FileAnswer::Matches { matches, truncated }) => (matches.len(), truncated),
        answer => panic!("{answer:?}"),
    };
    assert_eq!((count(5), count(0)), ((5, true), (0, true)));
    assert_eq!((count(u64::MAX), count(3000)), ((MATCHES_MAX as usize, true), (MATCHES_MAX as usize, true)));
    let exact = dir.put("exact", "x\n".repeat(5));
    assert!(matches!(grep("x", &exact, None, 5), Ok(FileAnswer::Matches { truncated: false, .. })));
    // A line of many megabytes is one match, and the lines behind it are counted.
    let long = dir.put("long", format!("x{}x\nx", "ž".repeat(2 << 20)));
    let Ok(FileAnswer::Matches { matches, .. }) = grep("x", &long, None, 9) else { panic!("no matches") };
    assert_eq!(matches.iter().map(|found| found.line).collect::<Vec<_>>(), [1, 2]);
    assert!(matches[0].text.len() <= LINE_LEN_MAX && matches[0].text.starts_with('x'));
    assert!(matches!(grep(&"a\n".repeat(100), &path, None, 1), Err(FileError::InvalidPattern { .. })));
}

#[test]
fn a_link_that_is_swapped_leads_no_write_and_no_removal_astray() {
    let dir = CallDir::new();
    dir.put("victim/file", "safe");
    fs::create_dir_all(dir.path("work")).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // `work/d` is a directory with a tree, and in the next moment a link to the victim.
            while !stop.load(Ordering::Relaxed) {
                let _ = fs::create_dir_all(dir.path("work/d/sub"));
                let _ = fs::write(dir.path("work/d/file"), "mine");
                let _ = fs::rename(dir.path("work/d"), dir.path("work/old"));
                let _ = symlink(dir.path("victim"), dir.path("work/d"));
                let _ = fs::remove_dir_all(dir.path("work/old"));
                let _ = fs::remove_file(dir.path("work/d"));
            }
        });
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            let _ = delete(&dir.path("work/d"));
            let _ = glob("**/*", &dir.path("work"));
            let _ = grep("safe", &dir.path("work"), None, 10).map(|answer| {
                assert!(matches!(answer, FileAnswer::Matches { matches, .. } if matches.is_empty()));
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(dir.text("victim/file"), "safe");
}

#[test]
fn an_edit_does_not_undo_what_another_program_wrote_meanwhile() {
    let dir = CallDir::new();
    let path = dir.put("counter", "0\n");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                fs::write(dir.path("next"), format!("{n}\n")).unwrap();
                fs::rename(dir.path("next"), dir.path("counter")).unwrap();
            }
        });
        for _ in 0..200 {
            match edit(&path, "\n", " edited\n", false) {
                Ok(_) | Err(FileError::NoOccurrence | FileError::Ambiguous { .. } | FileError::NotFound) => {}
                Err(error) => assert!(
                    error == other("the file was changed at the same time")
                        || error == other("the file was replaced at the same time"),
                    "{error:?}"
                ),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(dir.names(), ["counter"]);
}
