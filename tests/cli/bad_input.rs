//! Bad input: each case has its exit code and a message that names the fault, and leaves nothing.

use std::os::unix::ffi::OsStrExt;

use crate::{cli_test, pal::Pal};

/// Exit code, a part of the message, and the command line.
const TABLE: &[(i32, &str, &[&str])] = &[
    (2, "memory", &["run", "--memory", "0", "--", "true"]),
    (2, "memory", &["run", "--memory", "-1", "--", "true"]),
    (2, "memory", &["run", "--memory", "1PiB", "--", "true"]),
    (2, "memory", &["run", "--memory", "64TiB", "--", "true"]),
    (2, "memory", &["run", "--memory", "99999999999999999999", "--", "true"]),
    (2, "cpus", &["run", "--cpus", "0", "--", "true"]),
    (2, "cpus", &["run", "--cpus", "-1", "--", "true"]),
    (2, "cpus", &["run", "--cpus", "100000", "--", "true"]),
    (2, "cpus", &["run", "--cpus", "NaN", "--", "true"]),
    (2, "pids", &["run", "--pids", "0", "--", "true"]),
    (2, "pids", &["run", "--pids", "-5", "--", "true"]),
    (2, "pids", &["run", "--pids", "4294967295", "--", "true"]),
    (2, "disk", &["run", "--disk", "0", "--", "true"]),
    (2, "disk", &["run", "--disk", "16777215TiB", "--", "true"]),
    (2, "files", &["run", "--files", "0", "--", "true"]),
    (2, "timeout", &["run", "--timeout", "0", "--", "true"]),
    (2, "timeout", &["run", "--timeout", "-3s", "--", "true"]),
    (2, "timeout", &["run", "--timeout", "soon", "--", "true"]),
    (2, "layer", &["run", "--layer", "balloon", "--", "true"]),
    (125, "microvm", &["run", "--layer", "microvm", "--", "true"]),
    (121, "template", &["run", "--template", "no-such", "--", "true"]),
    (121, "template", &["run", "--template", "../../etc", "--", "true"]),
    (2, "env", &["run", "--env", "=x", "--", "true"]),
    (2, "mount", &["run", "--mount", "nonsense", "--", "true"]),
    (121, "/no/such", &["run", "--mount", "/no/such:/mnt/x", "--", "true"]),
    (2, "/proc", &["run", "--mount", "/usr:/proc", "--", "true"]),
    (2, "..", &["run", "--workdir", "/a/../b", "--", "true"]),
    (121, "nosuchbody", &["exec", "nosuchbody", "--", "true"]),
    (121, "Body", &["exec", "../../etc", "--", "true"]),
    (121, "Body", &["rm", "--force", "nosuchbody"]),
    (121, "Body", &["stop", "nosuchbody"]),
    (121, "Body", &["fork", "nosuchbody"]),
    (121, "Body", &["logs", "nosuchbody"]),
    (121, "snapshot", &["snapshot", "rm", "no-such"]),
    (2, "", &["cp", "/etc/passwd", "/tmp/x"]),
    (2, "", &["cp", "a:/x", "b:/y"]),
    (2, "", &["run"]),
    (2, "", &["run", "--"]),
    (2, "", &["fly"]),
];

cli_test! {
    fn every_mistake_has_its_code_and_its_words(pal) {
        for (code, word, args) in TABLE {
            let said = pal.run(*args);
            assert_eq!((said.code, said.out.as_str()), (*code, ""), "{args:?}: {said:?}");
            assert!(said.talk.starts_with("error: ") && said.talk.to_lowercase().contains(&word.to_lowercase()), "{args:?}: {}", said.talk);
            assert!(said.talk.contains("hint: ") && said.talk.len() < 2000, "{args:?}: {}", said.talk);
            assert!(pal.bodies().is_empty(), "{args:?} left a Body");
        }
        let events = pal.line("events");
        assert_eq!(events.out, "", "what is refused did not happen");
    }
}

cli_test! {
    fn names_that_are_too_long_or_no_text_are_refused(pal) {
        let long = "x".repeat(4096);
        for args in [["exec", &long, "--", "true"], ["run", "--template", &long, "--"]] {
            let said = pal.run(args);
            assert!([2, 121].contains(&said.code), "{said:?}");
        }
        assert_eq!(pal.run(["run", "--", &long]).code, 127);
        let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
        let said = pal.run([std::ffi::OsStr::new("run"), "--".as_ref(), "printf".as_ref(), "%s".as_ref(), odd]);
        assert!(said.code == 2 && said.talk.contains("UTF-8"), "{said:?}");
        let escape = pal.run(["exec", "\u{1b}]0;evil\u{7}", "--", "true"]);
        assert!(escape.code == 121 && !escape.talk.contains('\u{1b}'), "{escape:?}");
    }
}

cli_test! {
    fn a_working_directory_that_was_removed_does_not_matter(pal) {
        let gone = pal.dir().join("gone");
        std::fs::create_dir(&gone).unwrap();
        let script = "cd \"$1\" && rmdir \"$1\" && exec \"$2\" run -- pwd";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh"]).arg(&gone).arg(crate::pal::program());
        let output = command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", pal.dir()).env("PAL_DATA", pal.data()).output().unwrap();
        let said = crate::pal::said(output);
        assert_eq!((said.code, said.out.as_str(), said.talk.as_str()), (0, "/home/user\n", ""));
    }
}

cli_test! {
    fn a_data_directory_that_cannot_be_used_is_refused(pal) {
        let at = |dir: &std::path::Path| pal.run([std::ffi::OsStr::new("--data"), dir.as_os_str(), "run".as_ref(), "--".as_ref(), "true".as_ref()]);
        let file = pal.dir().join("file");
        std::fs::write(&file, "x").unwrap();
        refused(&at(&file), 2, "not a directory");
        let newer = pal.dir().join("newer");
        std::fs::create_dir(&newer).unwrap();
        std::fs::write(newer.join("version"), "77\n").unwrap();
        refused(&at(&newer), 125, "newer pal");
        let others = if testkit::is_root() {
            let others = pal.dir().join("others");
            std::fs::create_dir(&others).unwrap();
            std::os::unix::fs::chown(&others, Some(12_345), Some(12_345)).unwrap();
            others
        } else {
            "/usr".into()
        };
        refused(&at(&others), 123, "another user");
        refused(&at("/proc/nowhere".as_ref()), 125, "cannot use the data directory");
        refused(&at(&pal.dir().join(std::ffi::OsStr::from_bytes(b"odd\xff"))), 2, "UTF-8");
    }
}

fn refused(said: &crate::pal::PalOutput, code: i32, word: &str) {
    assert!(
        said.code == code && said.talk.contains(word) && said.talk.contains("hint: "),
        "wanted {code} and {word:?}: {said:?}"
    );
}

cli_test! {
    fn limits_that_are_reached_say_so(pal) {
        let said = pal.run(["run", "--timeout", "400ms", "--", "sleep", "1000"]);
        assert!(said.code == 124 && said.talk.contains("time"), "{said:?}");
        if testkit::is_root() {
            let said = pal.run(["run", "--memory", "32MiB", "--", "sh", "-c", "head -c 200M /dev/zero | tail -c 200M | wc -c"]);
            assert!(said.talk.contains("memory"), "{said:?}");
        }
        let said = pal.run(["run", "--disk", "8MiB", "--", "sh", "-c", "head -c 6M /dev/zero > ~/a; head -c 6M /dev/zero > ~/b"]);
        assert!(said.code != 0 && said.talk.contains("No space left"), "{said:?}");
        nothing(pal);
    }
}

fn nothing(pal: &Pal) {
    pal.nothing_left(&[]);
}
