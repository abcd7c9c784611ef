//! `pal setup base`: without Debian's tools, and after a kill in the middle.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use testkit::{leaks, roots, wait};

use crate::{
    cli_test,
    pal::{self, Pal, said},
};

/// A `pal` that finds only the programs of one directory.
fn with_tools(pal: &Pal, line: &str) -> std::process::Command {
    let tools = pal.dir().join("tools");
    std::fs::create_dir_all(&tools).unwrap();
    let mut command = pal.command(line.split_whitespace());
    command.env("PATH", tools);
    command
}

cli_test! {
    /// Without the tools `base` is the host's own root file system: it says so, runs, and cannot be built
    /// upon.
    fn base_without_debians_tools_is_the_machines_own_root(pal) {
        let made = said(with_tools(pal, "setup base").output().unwrap());
        assert!(made.code == 0 && made.talk.contains("neither mmdebstrap nor debootstrap is installed"), "{made:?}");
        assert!(pal.ok("template inspect base").contains("this host's own root, read-only"));
        let ran = pal.run(["run", "--template", "base", "--", "sh", "-c", "id -un; pwd; echo $LANG; test -x /usr/bin/env"]);
        assert_eq!((ran.code, ran.out.as_str()), (0, "user\n/home/user\nC.UTF-8\n"), "{ran:?}");
        std::fs::write(pal.dir().join("Dockerfile"), "FROM base\nRUN true\n").unwrap();
        let refused = pal.run(["template", "build", "x", &pal.dir().join("Dockerfile").display().to_string()]);
        assert!(refused.code != 0 && refused.talk.contains("cannot be the base of a build") && refused.talk.contains("apt-get install mmdebstrap"), "{refused:?}");
        // The second setup finds it done.
        assert_eq!(said(with_tools(pal, "setup base").output().unwrap()).talk, "");
    }
}

/// A user without subordinate ids cannot make a root file system.
fn as_root(test: impl FnOnce(&Pal)) {
    if testkit::is_root() {
        pal::check(test);
    } else {
        testkit::skip::skip("as root");
    }
}

/// Installs a script under the name of mmdebstrap.
fn plant(pal: &Pal, script: &str) -> std::path::PathBuf {
    let maker = pal.dir().join("tools/mmdebstrap");
    let _ = with_tools(pal, "version");
    std::fs::write(&maker, script).unwrap();
    std::fs::set_permissions(&maker, std::fs::Permissions::from_mode(0o755)).unwrap();
    maker
}

/// mmdebstrap sends SIGHUP to its whole process group when it fails, so it must not share the group of
/// `pal`'s caller.
#[test]
fn a_maker_that_ends_its_group_ends_nobody_else() {
    as_root(|pal| {
        plant(pal, "#!/bin/sh\ntrap '' HUP\nkill -HUP 0\necho no mirror >&2\nexit 1\n");
        let failed = said(with_tools(pal, "setup base").output().unwrap());
        let told = failed.talk.contains("no mirror") && failed.talk.contains("hint:");
        assert!(failed.code == 125 && told, "{failed:?}");
    });
}

/// A silent mmdebstrap gets a signal to end when `pal` is killed.
#[test]
fn a_maker_ends_with_its_pal() {
    as_root(|pal| {
        let maker = plant(
            pal,
            "#!/bin/sh\necho $$ > \"$0.draft\"\n/bin/mv \"$0.draft\" \"$0.pid\"\nexec /bin/sleep 600\n",
        );
        let mut child = with_tools(pal, "setup base").spawn().unwrap();
        let pid = wait::blocking(Duration::from_secs(20), "its maker runs", || {
            std::fs::read_to_string(maker.with_extension("pid")).ok()
        });
        let process = std::path::Path::new("/proc").join(pid.trim());
        assert!(process.exists());
        child.kill().unwrap();
        child.wait().unwrap();
        wait::blocking(Duration::from_secs(10), "its maker is gone", || {
            leaks::reap();
            (!process.exists()).then_some(())
        });
        pal.line("gc");
    });
}

/// A mmdebstrap that stops in the middle the first time.
const MAKER: &str = r#"#!/bin/sh
PATH=/usr/bin:/bin
if [ -e "$0.begun" ]; then cat "$0.tar"; exit; fi
head -c 100000 "$0.tar"
touch "$0.begun"
while sleep 0.05; do printf x || exit 1; done
"#;

/// `gc` finds what a killed setup left, and the next setup completes it.
#[test]
fn a_setup_that_was_killed_is_repeated() {
    as_root(|pal| {
        let maker = plant(pal, MAKER);
        let killed = |line: &str| {
            let mut child = with_tools(pal, line).spawn().unwrap();
            wait::blocking(Duration::from_secs(20), "the root is in the making", || {
                maker.with_extension("begun").exists().then_some(())
            });
            child.kill().unwrap();
            child.wait().unwrap();
        };
        std::fs::write(maker.with_extension("tar"), roots::small()).unwrap();
        killed("setup base");
        assert_ne!(pal.line("template inspect base").code, 0, "a root in the making is no template");
        // The program has noticed that its pipe has no reader, and gc can tell what it left.
        let left = wait::blocking(Duration::from_secs(10), "gc finds what is left", || {
            Some(pal.line("gc --dry-run").out).filter(|said| said.contains("scratch"))
        });
        assert!(left.contains("layer"), "{left}");
        let made = said(with_tools(pal, "setup base").output().unwrap());
        assert_eq!(made.code, 0, "{made:?}");
        let ran = pal.run(["run", "--template", "base", "--", "/bin/sh", "-c", "id -un; ls /bin/up"]);
        assert_eq!((ran.code, ran.out.as_str()), (0, "user\n/bin/up\n"), "{ran:?}");
        pal.line("gc");
        let layers: Vec<_> = std::fs::read_dir(pal.data().join("layers"))
            .unwrap()
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .collect();
        assert_eq!(layers.len(), 1, "nothing is left of the first time: {layers:?}");
        assert!(!pal.line("gc --dry-run").out.contains("scratch"));
        pal.ok("template rm base");
    });
}
