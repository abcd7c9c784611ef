//! Copying in and out: what arrives is what was sent, and nothing is written outside of the target.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::Path,
};

use proto::Kind;
use testkit::{Bodies, body_test};

/// A tree of the host with everything that `cp` should copy.
fn furnish(top: &Path) {
    fs::create_dir_all(top.join("dir/empty")).unwrap();
    fs::write(top.join("dir/plain"), "plain\n").unwrap();
    fs::write(top.join("dir/tool"), "#!/bin/sh\necho tool\n").unwrap();
    fs::set_permissions(top.join("dir/tool"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("plain", top.join("dir/link")).unwrap();
    symlink("/etc/passwd", top.join("dir/away")).unwrap();
    fs::write(top.join("dir").join(OsStr::from_bytes(b"odd\xff name")), "odd\n").unwrap();
    fs::write(top.join("dir/large"), vec![7u8; 3 << 20]).unwrap();
}

/// Names, kinds, executable bits, targets and contents of a tree.
fn describe(top: &Path) -> Vec<(Vec<u8>, String)> {
    let mut seen = Vec::new();
    let mut waiting = vec![top.to_owned()];
    while let Some(path) = waiting.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        let told = if found.is_symlink() {
            format!("link to {}", fs::read_link(&path).unwrap().display())
        } else if found.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            "directory".to_owned()
        } else {
            let sum: u64 = fs::read(&path).unwrap().iter().map(|byte| u64::from(*byte)).sum();
            format!(
                "file of {} bytes, sum {sum}, executable {}",
                found.len(),
                found.permissions().mode() & 0o100 != 0
            )
        };
        seen.push((path.strip_prefix(top).unwrap().as_os_str().as_bytes().to_vec(), told));
    }
    seen.sort();
    seen
}

#[body_test]
async fn a_tree_goes_in_and_comes_back(t: Bodies) {
    let body = t.create().await;
    let here = t.dir().join("here");
    furnish(&here);
    let copied = t.fleet().files().copy_in(&body, &here.join("dir"), "/home/user/there").await.unwrap();
    assert_eq!(copied.entries, 8);
    let seen = t.sh(&body, "cd ~/there; ./tool; cat link; readlink away; ls -d empty; wc -c < large; stat -c %U plain; cat odd*").await.ok();
    assert_eq!(seen, "tool\nplain\n/etc/passwd\nempty\n3145728\nuser\nodd");
    let back = t.dir().join("back");
    assert_eq!(t.fleet().files().copy_out(&body, "/home/user/there", &back).await.unwrap(), copied);
    assert_eq!(describe(&back), describe(&here.join("dir")));
    assert_eq!(
        t.kinds(&body).iter().filter(|kind| kind.starts_with("file.")).collect::<Vec<_>>(),
        ["file.written", "file.read"]
    );
}

#[body_test]
async fn a_directory_that_is_there_receives_under_the_old_name(t: Bodies) {
    let body = t.create().await;
    let file = t.dir().join("file");
    fs::write(&file, "first").unwrap();
    t.sh(&body, "mkdir ~/dir").await.ok();
    t.fleet().files().copy_in(&body, &file, "/home/user/dir").await.unwrap();
    t.fleet().files().copy_in(&body, &file, "/home/user/dir/named").await.unwrap();
    t.fleet().files().copy_in(&body, &file, "/home/user/dir/").await.unwrap();
    assert_eq!(t.sh(&body, "cd ~/dir; ls; cat file named").await.ok(), "file\nnamed\nfirstfirst");
    fs::write(&file, "changed").unwrap();
    let out = t.dir().join("out");
    fs::create_dir(&out).unwrap();
    t.fleet().files().copy_out(&body, "/home/user/dir/named", &out).await.unwrap();
    t.fleet().files().copy_out(&body, "/home/user/dir", &out).await.unwrap();
    assert_eq!(fs::read_to_string(out.join("named")).unwrap(), "first");
    assert_eq!(fs::read_to_string(out.join("dir/file")).unwrap(), "first");
}

#[body_test]
async fn what_cannot_be_copied_is_said(t: Bodies) {
    let body = t.create().await;
    let file = t.dir().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(
        t.fleet().files().copy_in(&body, &t.dir().join("missing"), "/home/user/x").await.unwrap_err().kind,
        Kind::NotFound
    );
    assert_eq!(
        t.fleet().files().copy_out(&body, "/no/such", &t.dir().join("x")).await.unwrap_err().kind,
        Kind::NotFound
    );
    assert!(!t.dir().join("x").exists());
    // A file that opens and cannot be read: the reason is the host's, not the guest's that a stream was cut.
    let unreadable = t.dir().join("unreadable");
    std::os::unix::fs::symlink("/proc/self/mem", &unreadable).unwrap();
    let failure = t.fleet().files().copy_in(&body, &unreadable, "/home/user/x").await.unwrap_err();
    assert!(failure.to_string().contains("cannot copy") && failure.kind == Kind::Host, "{failure}");
    let long = format!("/home/user/{}", "x".repeat(4096));
    for place in ["/home/user/a\0b", long.as_str()] {
        let failure = t
            .fleet()
            .files()
            .copy_in(&body, &file, place)
            .await
            .err()
            .unwrap_or_else(|| panic!("{place:?} was written"));
        assert!(
            [Kind::Usage, Kind::Denied, Kind::NotFound, Kind::Limit].contains(&failure.kind),
            "{:?}: {}",
            failure.kind,
            testkit::explain(&failure)
        );
    }
    assert_eq!(t.run(&body, ["true"]).await.code, 0);
}

#[body_test]
async fn what_comes_out_gains_no_rights(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "mkdir ~/d; cp /bin/true ~/d/suid; chmod 6755 ~/d/suid; mkfifo ~/d/fifo; chmod 1777 ~/d; touch ~/d/none; chmod 000 ~/d/none; chmod 600 ~/d/none").await.ok();
    let out = t.dir().join("out");
    t.fleet().files().copy_out(&body, "/home/user/d", &out).await.unwrap();
    assert_eq!(fs::metadata(out.join("suid")).unwrap().permissions().mode() & 0o7777, 0o755);
    assert!(!out.join("fifo").exists(), "no pipe that could block whoever reads it");
    assert_eq!(fs::metadata(&out).unwrap().permissions().mode() & 0o7000, 0);
}

#[body_test]
async fn a_link_inside_never_leads_a_copy_out_of_the_body(t: Bodies) {
    let body = t.create().await;
    let outside = t.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "untouched").unwrap();
    fs::write(t.dir().join("evil"), "evil").unwrap();
    let place = outside.display();
    // In: a directory in the Body that is a symbolic link to a host path means that path in the Body, or
    // nothing.
    t.sh(&body, &format!("ln -s {place} ~/door; ln -s {place}/victim ~/file; ln -s / ~/root")).await.ok();
    for target in [
        "/home/user/door/victim".to_owned(),
        "/home/user/file".to_owned(),
        format!("/home/user/root{place}/victim"),
        format!("/proc/1/root{place}/victim"),
        format!("/proc/self/root{place}/victim"),
    ] {
        let _ = t.fleet().files().copy_in(&body, &t.dir().join("evil"), &target).await;
    }
    assert_eq!(fs::read_to_string(outside.join("victim")).unwrap(), "untouched");
    // Out: links of the Body to host paths are not followed either.
    fs::write(outside.join("secret"), "secret of the host").unwrap();
    t.sh(&body, &format!("ln -s {place}/secret ~/peek")).await.ok();
    let out = t.dir().join("peeked");
    let _ = t.fleet().files().copy_out(&body, "/home/user/peek", &out).await;
    assert!(
        fs::read(&out).map_or(true, |seen| seen != b"secret of the host"),
        "the host's secret was read for the Body"
    );
}

#[body_test]
async fn a_tree_swapped_while_it_is_copied_writes_nothing_outside(t: Bodies) {
    let body = t.create().await;
    let outside = t.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("f"), "untouched").unwrap();
    // A directory that alternates with a symbolic link to the host's directory.
    let swap = format!(
        "mkdir -p ~/t/a; for i in 1 2 3 4 5 6 7 8; do echo evil > ~/t/a/f; echo evil > ~/t/a/$i; done; ln -s {} ~/t/link
         perl -e 'chdir \"/home/user/t\"; while (1) {{ syscall(316, -100, $_[0]=\"a\", -100, $_[1]=\"link\", 2) }}' >/dev/null 2>&1 & echo $!",
        outside.display()
    );
    let swapper = t.sh(&body, &swap).await.ok();
    let (mut links, mut trees) = (0, 0);
    for round in 0..60 {
        let out = t.dir().join(format!("out-{round}"));
        let copied = t.fleet().files().copy_out(&body, "/home/user/t", &out).await;
        if copied.is_ok() {
            match fs::symlink_metadata(out.join("a")) {
                Ok(found) if found.is_symlink() => links += 1,
                _ => trees += 1,
            }
        }
        let again = t.fleet().files().copy_out(&body, "/home/user/t", &out).await;
        let _ = (again, t.fleet().files().copy_in(&body, &outside, "/home/user/t/a").await);
        assert_eq!(fs::read_to_string(outside.join("f")).unwrap(), "untouched", "round {round}");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "round {round}");
    }
    t.sh(&body, &format!("kill {swapper}")).await.ok();
    eprintln!("{links} links and {trees} directories were seen");
}

#[body_test]
async fn a_copy_onto_a_link_of_the_host_does_not_follow_it_below(t: Bodies) {
    let body = t.create().await;
    let outside = t.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    t.sh(&body, "mkdir -p ~/t/sub; echo evil > ~/t/sub/f").await.ok();
    // An earlier copy left a link where this one has a directory.
    let out = t.dir().join("out");
    fs::create_dir(&out).unwrap();
    symlink(&outside, out.join("sub")).unwrap();
    let _ = t.fleet().files().copy_out(&body, "/home/user/t/.", &out).await;
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

/// Repositories whose settings run a program on the host: as a `.git`, as a `.git` file that leads to one, and bare.
fn hostile_repositories(mark: &Path) -> String {
    let mark = mark.display();
    format!(
        r#"
        set -e; cd ~; mkdir -p app/sub; cd app; echo code > code
        export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
        git init -q .; git config core.fsmonitor 'touch {mark}; false'
        git init -q --bare bare; git -C bare config core.bare false; git -C bare config core.worktree ..
        git -C bare config core.fsmonitor 'touch {mark}; false'
        mkdir linked; echo 'gitdir: ../bare' > linked/.git
        "#
    )
}

/// Runs `git status` in a directory as a user of the host would.
fn git_status(dir: &Path, home: &Path) {
    let mut git = std::process::Command::new("git");
    git.arg("status").current_dir(dir).env("HOME", home).env("GIT_CEILING_DIRECTORIES", home);
    git.env("GIT_CONFIG_NOSYSTEM", "1").output().unwrap();
}

#[body_test]
async fn a_repository_comes_out_only_when_it_is_asked_for(t: Bodies) {
    let body = t.create().await;
    let mark = t.dir().join("ran");
    t.sh(&body, &hostile_repositories(&mark)).await.ok();
    let places = ["", "bare", "linked"];
    // Positive control: asked for, it comes out, and git runs its program.
    let asked = t.dir().join("asked");
    let files = t.fleet().files();
    files.copy_out_with(&body, "/home/user/app", &asked, fleet::GitDirs::Copy).await.unwrap();
    for place in places {
        git_status(&asked.join(place), t.dir());
        assert!(mark.exists(), "{place:?}");
        fs::remove_file(&mark).unwrap();
    }
    let plain = t.dir().join("plain");
    let copied = files.copy_out(&body, "/home/user/app", &plain).await.unwrap();
    assert_eq!(fs::read_to_string(plain.join("code")).unwrap(), "code\n");
    for place in ["", "sub", "linked"] {
        git_status(&plain.join(place), t.dir());
        assert!(!mark.exists(), "{place:?}");
    }
    assert!(!plain.join("bare").exists() && !plain.join("linked/.git").exists());
    let mut names: Vec<&str> = copied.omitted.first.iter().map(|entry| entry.path.as_str()).collect();
    names.sort_unstable();
    assert_eq!((copied.omitted.git_count, names), (3, vec![".git", "bare", "linked/.git"]));
    // A copy whose source or target is a git directory is refused as a whole.
    for (source, target) in
        [("app/.git", "x"), ("app/bare", "y"), ("app/code", ".git"), ("app/linked/.git", ".")]
    {
        let refused = files.copy_out(&body, &format!("/home/user/{source}"), &t.dir().join(target)).await;
        assert_eq!(refused.unwrap_err().kind, Kind::Denied, "{source} {target}");
        assert!(!t.dir().join(target).join("HEAD").exists() && !t.dir().join(".git").exists(), "{source}");
    }
}

#[body_test]
async fn holes_and_hard_links_stay_and_what_is_left_out_is_named(t: Bodies) {
    let body = t.create().await;
    let make = "set -e; cd ~; mkdir -p d/e; cd d; (truncate -s 1T sparse || truncate -s 2G sparse) 2>/dev/null; printf far | dd of=sparse bs=1 seek=1G conv=notrunc status=none
        head -c 3000000 /dev/urandom > one; ln one e/two; mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'";
    t.sh(&body, make).await.ok();
    let out = t.dir().join("out");
    let copied = t.fleet().files().copy_out(&body, "/home/user/d", &out).await.unwrap();
    let sparse = fs::metadata(out.join("sparse")).unwrap();
    // The limits of a Body on layer `process` allow no longer file than its disk.
    let len = t.sh(&body, "stat -c %s ~/d/sparse").await.ok();
    assert_eq!(sparse.len().to_string(), len);
    assert!(sparse.blocks() < 10_000 && copied.bytes < 4_000_000, "{} blocks, {copied:?}", sparse.blocks());
    let (one, two) = (fs::metadata(out.join("one")).unwrap(), fs::metadata(out.join("e/two")).unwrap());
    assert_eq!((one.ino(), one.nlink(), one.len()), (two.ino(), 2, 3_000_000));
    let mut names: Vec<_> =
        copied.omitted.first.iter().map(|entry| format!("{} {}", entry.path, entry.kind)).collect();
    names.sort_unstable();
    assert_eq!((copied.omitted.count, names), (2, vec!["pipe FIFO".to_owned(), "sock socket".to_owned()]));
    // And back: the Body has room for the data, not for the length.
    rustix::fs::mkfifoat(rustix::fs::CWD, out.join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    let back = t.fleet().files().copy_in(&body, &out, "/home/user/back").await.unwrap();
    assert_eq!((back.entries, back.omitted.count), (copied.entries, 1));
    let seen = "cd ~/back; stat -c %s sparse; test $(du -k sparse | cut -f1) -lt 5000; test one -ef e/two; cmp one ../d/one; dd if=sparse bs=1 skip=1G count=3 status=none";
    assert_eq!(t.sh(&body, &format!("set -e; {seen}")).await.ok(), format!("{len}\nfar"));
    // A file that is too long for the Body is refused, and harms nothing.
    let huge = t.dir().join("huge");
    fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    if let Err(refused) = t.fleet().files().copy_in(&body, &huge, "/home/user/huge").await {
        assert_eq!(refused.kind, Kind::Limit, "{}", testkit::explain(&refused));
        assert_eq!(t.sh(&body, "ls ~/huge 2>/dev/null; echo alive").await.ok(), "alive");
    }
}

#[body_test]
async fn a_copy_without_room_is_refused_and_leaves_nothing(t: Bodies) {
    let mut request = t.kept();
    request.limits.disk = Some(proto::Size(256 << 20));
    let body = t.make(request).await.spec.id;
    let large = t.dir().join("large");
    let file = fs::File::create(&large).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 300 << 20).unwrap();
    let refused = t.fleet().files().copy_in(&body, &large, "/home/user/large").await.unwrap_err();
    assert_eq!(refused.kind, Kind::Limit, "{}", testkit::explain(&refused));
    assert_eq!(t.sh(&body, "ls ~; echo alive").await.ok(), "alive");
    // Positive control: a smaller one fits.
    file.set_len(8 << 20).unwrap();
    t.fleet().files().copy_in(&body, &large, "/home/user/large").await.unwrap();
    assert_eq!(t.sh(&body, "stat -c %s ~/large").await.ok(), (8 << 20).to_string());
}
