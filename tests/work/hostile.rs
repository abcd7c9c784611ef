//! Hostile repositories in Bodies: none runs a program on the host, writes where it must not, or hides work.
//!
//! A control first shows that each trap works: plain git, in a copy of the Body's files on the host, triggers
//! it.

use std::path::{Path, PathBuf};

use fleet::{Discard, Force, LandSelection, LandTarget};
use proto::{BodyId, Kind};
use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, person, save, sh_in};

/// A trap: the Body's preparation, and an ordinary command that triggers it.
struct Trap {
    name: &'static str,
    /// In the Body; `$RUN` is a command that leaves a mark on the host that runs it.
    set: &'static str,
    /// In a copy on the host.
    step: &'static str,
}

const TRAPS: &[Trap] = &[
    Trap { name: "fsmonitor", set: "git config core.fsmonitor \"$RUN;false\"", step: "git status" },
    Trap {
        name: "hooksPath",
        set: "mkdir h; printf '#!/bin/sh\n%s\n' \"$RUN\" > h/pre-commit; chmod +x h/pre-commit; git config core.hooksPath h",
        step: "git commit --allow-empty -m x",
    },
    Trap {
        name: "hook on commit",
        set: "mkdir -p .git/hooks; printf '#!/bin/sh\n%s\n' \"$RUN\" > .git/hooks/post-commit; chmod +x .git/hooks/post-commit",
        step: "git commit --allow-empty -m x",
    },
    Trap {
        name: "hook on checkout",
        set: "mkdir -p .git/hooks; printf '#!/bin/sh\n%s\n' \"$RUN\" > .git/hooks/post-checkout; chmod +x .git/hooks/post-checkout",
        step: "git checkout -b other",
    },
    Trap {
        name: "hook on the index",
        set: "mkdir -p .git/hooks; printf '#!/bin/sh\n%s\n' \"$RUN\" > .git/hooks/post-index-change; chmod +x .git/hooks/post-index-change; echo x >> numbers",
        step: "git add -A",
    },
    Trap {
        name: "hook on refs",
        set: "mkdir -p .git/hooks; printf '#!/bin/sh\n%s\n' \"$RUN\" > .git/hooks/reference-transaction; chmod +x .git/hooks/reference-transaction",
        step: "git branch other",
    },
    Trap {
        name: "hook on merge",
        set: "mkdir -p .git/hooks; printf '#!/bin/sh\n%s\n' \"$RUN\" > .git/hooks/post-merge; chmod +x .git/hooks/post-merge; git checkout -qb m; git commit -q --allow-empty -m m; git checkout -q main",
        step: "git merge m",
    },
    Trap {
        name: "included settings",
        set: "printf '[core]\n\tfsmonitor = \"%s;false\"\n' \"$RUN\" > settings; git config include.path ../settings",
        step: "git status",
    },
    Trap {
        name: "conditional settings",
        set: "printf '[core]\n\tfsmonitor = \"%s;false\"\n' \"$RUN\" > settings; git config includeIf.onbranch:main.path ../settings",
        step: "git status",
    },
    Trap {
        name: "settings of a worktree",
        set: "git config extensions.worktreeConfig true; printf '[core]\n\tfsmonitor = \"%s;false\"\n' \"$RUN\" > .git/config.worktree",
        step: "git status",
    },
    Trap {
        name: "clean filter",
        set: "echo '* filter=x' > .gitattributes; git config filter.x.clean \"$RUN;cat\"; echo y >> numbers",
        step: "git add -A",
    },
    Trap {
        name: "smudge filter",
        set: "echo '* filter=x' > .gitattributes; git config filter.x.smudge \"$RUN;cat\"; git add .gitattributes; git commit -qm a",
        step: "rm numbers; git checkout numbers",
    },
    Trap {
        name: "process filter",
        set: "echo '* filter=x' > .gitattributes; git config filter.x.process \"$RUN\"; echo y >> numbers",
        step: "git add -A",
    },
    Trap {
        name: "external diff",
        set: "git config diff.external \"$RUN;true\"; echo y >> numbers",
        step: "git diff",
    },
    Trap {
        name: "diff driver",
        set: "echo '* diff=x' > .gitattributes; git config diff.x.command \"$RUN;true\"; echo y >> numbers",
        step: "git diff",
    },
    Trap {
        name: "textconv",
        set: "echo '* diff=x' > .gitattributes; git config diff.x.textconv \"$RUN;cat\"; echo y >> numbers",
        step: "git diff",
    },
    Trap {
        name: "merge driver",
        set: "echo 'numbers merge=x' > .gitattributes; git config merge.x.driver \"$RUN;true\"; git add -A; git commit -qm a; git checkout -qb m; echo m >> numbers; git commit -qam m; git checkout -q main; echo n >> numbers; git commit -qam n",
        step: "git merge m",
    },
    Trap {
        name: "another git directory",
        set: "cp -r .git other; rm -rf .git; git --git-dir=other config core.fsmonitor \"$RUN;false\"; git --git-dir=other config core.bare false; echo 'gitdir: other' > .git",
        step: "git status",
    },
    Trap {
        name: "a bare repository inside",
        set: "git init -q --bare sub; git --git-dir=sub config core.bare false; git --git-dir=sub config core.worktree .; git --git-dir=sub config core.fsmonitor \"$RUN;false\"",
        step: "cd sub && git status",
    },
    Trap {
        name: "a submodule that is a command",
        set: "git config protocol.ext.allow always; git config submodule.s.url \"ext::$RUN\"; git config submodule.s.active true; printf '[submodule \"s\"]\n\tpath = s\n\turl = x\n' > .gitmodules; git update-index --add --cacheinfo 160000,$(git rev-parse HEAD),s; git add .gitmodules; git commit -qm s",
        step: "GIT_ALLOW_PROTOCOL=ext git submodule update",
    },
    Trap {
        name: "objects from a command",
        set: "git config protocol.ext.allow always; git config remote.p.url \"ext::$RUN\"; git config remote.p.promisor true; git config extensions.partialClone p",
        step: "git cat-file -e 1234567890123456789012345678901234567890",
    },
    Trap { name: "an editor", set: "git config core.editor \"$RUN;true\"", step: "git commit --allow-empty" },
    Trap {
        name: "a pager",
        set: "git config core.pager \"$RUN;cat\"",
        step: "script -qec 'git log' /dev/null",
    },
    Trap { name: "an alias", set: "git config alias.st \"!$RUN\"", step: "git st" },
    Trap {
        name: "a signer",
        set: "git config gpg.program \"$PWD/signer\"; git config commit.gpgSign true; printf '#!/bin/sh\n%s\n' \"$RUN\" > signer; chmod +x signer; git config gpg.program ./signer",
        step: "git commit --allow-empty -m x",
    },
    Trap {
        name: "a way to ssh",
        set: "git config core.sshCommand \"$RUN;false\"; git config remote.origin.url ssh://nowhere.invalid/x; git config remote.origin.fetch +refs/heads/*:refs/remotes/origin/*",
        step: "git fetch origin",
    },
    Trap {
        name: "a way to receive",
        set: "git config remote.origin.url .; git config remote.origin.uploadpack \"$RUN;false\"; git config remote.origin.fetch +refs/heads/*:refs/remotes/origin/*",
        step: "git fetch origin",
    },
    Trap {
        name: "refs of alternates",
        set: "mkdir -p alt/objects; git init -q --bare alt; git config core.alternateRefsCommand \"$RUN;true\"; echo $PWD/alt/objects > .git/objects/info/alternates",
        step: "rm .git/objects/info/alternates; echo $PWD/alt/objects > .git/objects/info/alternates; git -c protocol.file.allow=always fetch . main",
    },
];

/// Copies the Body's files to the host, as a careless user would.
async fn copy_out(t: &Bodies, body: &BodyId, name: &str) -> PathBuf {
    let to = t.dir().join(format!("copy of {name}"));
    t.fleet()
        .files()
        .copy_out_with(body, "/workspace/app", &to, fleet::GitDirs::Copy)
        .await
        .unwrap_or_else(|failure| panic!("{name}: {}", testkit::explain(&failure)));
    to
}

fn mark(t: &Bodies) -> PathBuf {
    t.dir().join("MARK")
}

/// Runs every `pal` operation on a Body's work.
async fn handle(t: &Bodies, body: &BodyId, name: &str) {
    let look = t
        .fleet()
        .workspaces()
        .review_files(body, None)
        .unwrap_or_else(|failure| panic!("{name}: {}", testkit::explain(&failure)));
    look.text(fleet::DiffFormat::Patch, &[]).unwrap();
    look.text(fleet::DiffFormat::Stat, &[]).unwrap();
    let _ = t.fleet().workspaces().log(body, None).await;
    let what = LandSelection::Squash { message: Some("x".into()) };
    let branch = format!("land-{}", body.as_str());
    t.fleet()
        .workspaces()
        .land(body, None, LandTarget::Branch(branch), what, &person())
        .await
        .unwrap_or_else(|failure| panic!("{name}: {}", testkit::explain(&failure)));
    let _ = t
        .fleet()
        .workspaces()
        .land(body, None, LandTarget::Onto("main".into()), LandSelection::All, &person())
        .await;
    t.fleet().stop(body, std::time::Duration::ZERO).await.unwrap();
}

async fn spring(t: &Bodies, traps: &[Trap]) {
    let host = HostRepo::plain(t);
    let first = host.git(&["rev-parse", "HEAD"]);
    for Trap { name, set, step } in traps {
        // Undoes the landing of the case before.
        host.git(&["reset", "--quiet", "--hard", &first]);
        let body = host.body(t).await;
        let mark = mark(t);
        t.sh(&body, &format!("RUN='touch {}'\n{set}", mark.display())).await.ok();
        // The control: triggering the trap leaves the mark.
        let copy = copy_out(t, &body, name).await;
        let stepped = sh_in(&copy, step);
        assert!(
            mark.exists(),
            "{name}: a trap that catches nobody proves nothing: {}",
            String::from_utf8_lossy(&stepped.stderr)
        );
        std::fs::remove_file(&mark).unwrap();
        handle(t, &body, name).await;
        assert!(!mark.exists(), "{name}: it ran on the host");
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
        assert!(!mark.exists(), "{name}: it ran on the host");
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn hooks_and_settings_of_a_body_run_nothing_on_the_host(t: Bodies) {
    spring(&t, &TRAPS[..14]).await;
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn filters_drivers_and_remotes_of_a_body_run_nothing_on_the_host(t: Bodies) {
    spring(&t, &TRAPS[14..]).await;
}

/// Refs and objects that try to reach another place, or exceed a limit. Each case: the Body's action, and the
/// error; without the action the same Body's commit is accepted.
const REFUSED: &[(&str, &str)] = &[
    (
        "a ref above its place",
        "id=$(git rev-parse HEAD); echo \"$id refs/heads/../../../../escape\" >> .git/packed-refs",
    ),
    ("a ref that is an option", "id=$(git rev-parse HEAD); echo $id > .git/refs/heads/--upload-pack=x"),
    (
        "a ref with an escape",
        "id=$(git rev-parse HEAD); printf '%s refs/heads/a\\033]0;x\\007\\n' $id >> .git/packed-refs",
    ),
    (
        "a ref that reads backwards",
        "id=$(git rev-parse HEAD); printf '%s refs/heads/a\\342\\200\\256b\\n' $id >> .git/packed-refs",
    ),
    ("a ref that is a lock", "id=$(git rev-parse HEAD); echo \"$id refs/heads/x.lock\" >> .git/packed-refs"),
    (
        "refs without number",
        "id=$(git rev-parse HEAD); seq 100000 | sed \"s,.*,$id refs/heads/b&,\" >> .git/packed-refs",
    ),
    ("a ref to nothing", "echo 1234567890123456789012345678901234567890 > .git/refs/heads/nothing"),
    ("a ref that is a tree", "git rev-parse 'HEAD^{tree}' > .git/refs/heads/tree"),
    (
        "objects that lie elsewhere",
        "echo z > z; git add z; git commit -qm z; mkdir /tmp/o; mv .git/objects/?? /tmp/o; ln -s /tmp/o .git/objects/info/there; echo /tmp/o > .git/objects/info/alternates",
    ),
    (
        "a tree with .git in it",
        "b=$(echo x | git hash-object -w --stdin); t=$(printf '100644 blob %s\\t.git\\n' $b | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a tree with .GIT in it",
        "b=$(echo x | git hash-object -w --stdin); t=$(printf '100644 blob %s\\tconfig\\n' $b | git mktree); t=$(printf '040000 tree %s\\t.GIT\\n' $t | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a tree with git~1 in it",
        "b=$(echo x | git hash-object -w --stdin); t=$(printf '100644 blob %s\\tgit~1\\n' $b | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a tree with .. in it",
        "b=$(echo x | git hash-object -w --stdin); t=$(printf '100644 blob %s\\t..\\n' $b | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a module that is an option",
        "printf '[submodule \"x\"]\\n\\tpath = x\\n\\turl = -u./run\\n' > m; b=$(git hash-object -w m); rm m; t=$(printf '100644 blob %s\\t.gitmodules\\n' $b | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a module above its place",
        "printf '[submodule \"../../x\"]\\n\\tpath = x\\n\\turl = y\\n' > m; b=$(git hash-object -w m); rm m; t=$(printf '100644 blob %s\\t.gitmodules\\n' $b | git mktree); c=$(git commit-tree $t -p HEAD -m evil); git update-ref refs/heads/evil $c",
    ),
    (
        "a commit without an author",
        "t=$(git rev-parse 'HEAD^{tree}'); c=$(printf 'tree %s\\ncommitter a <b> 1 +0000\\n\\nx\\n' $t | git hash-object -t commit -w --stdin --literally); git update-ref refs/heads/evil $c || echo $c > .git/refs/heads/evil",
    ),
    ("a ref with a line in it", "id=$(git rev-parse HEAD); echo $id > \".git/refs/heads/$(printf 'a\\nb')\""),
    (
        "a tree that is ten thousand deep",
        "python3 - <<'END'\nimport hashlib, os, subprocess, zlib\ndef write(kind, data):\n    data = b'%s %d\\0' % (kind, len(data)) + data\n    id = hashlib.sha1(data).hexdigest()\n    os.makedirs('.git/objects/' + id[:2], exist_ok=True)\n    open('.git/objects/%s/%s' % (id[:2], id[2:]), 'wb').write(zlib.compress(data, 1))\n    return id\nid = write(b'tree', b'100644 x\\0' + bytes.fromhex(write(b'blob', b'x')))\nfor _ in range(10000): id = write(b'tree', b'40000 d\\0' + bytes.fromhex(id))\nhead = subprocess.check_output(['git', 'rev-parse', 'HEAD']).strip()\nwho = b' a <b> 1 +0000\\n'\nopen('.git/refs/heads/evil', 'w').write(write(b'commit', b'tree ' + id.encode() + b'\\nparent ' + head + b'\\nauthor' + who + b'committer' + who + b'\\nx\\n'))\nEND",
    ),
    (
        "a pack of noise",
        "mkdir -p .git/objects/pack; head -c 100000 /dev/urandom > .git/objects/pack/pack-1234567890123456789012345678901234567890.pack; echo z > z; git add z; git commit -qm z",
    ),
    (
        "a pack that claims four thousand million objects",
        "printf 'PACK\\000\\000\\000\\002\\377\\377\\377\\377' > .git/objects/pack/pack-1234567890123456789012345678901234567890.pack; echo z > z; git add z; git commit -qm z",
    ),
];

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn refs_and_objects_that_git_refuses_do_not_come_in_and_cost_no_file(t: Bodies) {
    let host = HostRepo::plain(&t);
    for (name, script) in REFUSED {
        let body = host.body(&t).await;
        t.sh(
            &body,
            "echo good > good; git add good; git commit -qm good; echo file > file; chmod -R u+w .git",
        )
        .await
        .ok();
        // Without it everything is saved.
        let before = save(&t, &body).await;
        assert!(before.is_whole() && before.head != before.base, "{name}: {before:?}");
        let outside = || {
            host.git(&["for-each-ref", "--format=%(refname) %(objectname)"])
                .lines()
                .filter(|line| !line.starts_with(&format!("refs/palisade/{body}/")))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let others = outside();
        t.sh(&body, script).await.ok();
        t.sh(&body, "echo later > later").await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.commit_error.is_some(), "{name}: {saved:?}");
        assert_eq!(host.wip_file(&body, "later").as_deref(), Some("later"), "{name}");
        assert_eq!(host.wip_file(&body, "good").as_deref(), Some("good"), "{name}");
        assert_eq!(outside(), others, "{name}: a ref outside of its place");
        assert!(
            host.try_git(&["rev-parse", "--verify", &format!("refs/palisade/{body}/heads/evil")]).is_none(),
            "{name}"
        );
        assert_eq!(
            host.git(&["fsck", "--strict", "--no-dangling", "--no-progress"]),
            "",
            "{name}: the repository is sound"
        );
        assert_eq!(t.fleet().remove(&body, Force::Yes).await.unwrap_err().kind, Kind::Conflict, "{name}");
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
        host.sh(&format!(
            "git for-each-ref --format='delete %(refname)' refs/palisade/{body}/ | git update-ref --stdin"
        ));
    }
}

/// Files that try to be read as something else. Each case: the Body's action, a path, and its expected
/// content.
const FILES: &[(&str, &str, &str, Option<&str>)] = &[
    ("a link out", "ln -s /etc/passwd out", "out", Some("/etc/passwd")),
    ("a directory that became a link", "rm -r src; ln -s /etc src", "src", Some("/etc")),
    (
        "a rule that is a link",
        "rm .gitignore; ln -s /etc/passwd .gitignore; echo x > x.log",
        "x.log",
        Some("x"),
    ),
    ("attributes that are a pipe", "mkfifo .gitattributes; echo x > after", "after", Some("x")),
    ("a pipe", "mkfifo pipe; echo x > after", "pipe", None),
    (
        "a socket",
        "perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => \"sock\", Listen => 1)'; echo x > after",
        "sock",
        None,
    ),
    (
        "excluded by its own git",
        "mkdir -p .git/info; echo secret > .git/info/exclude; echo x > secret; echo y > after",
        "secret",
        None,
    ),
    (
        "a pattern that takes long",
        "printf '%s\\n' '*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b' > .gitignore; echo x > aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        Some("x"),
    ),
    ("a name with an escape", "echo x > \"$(printf 'e\\033]0;t\\007')\"; echo y > after", "after", Some("y")),
    (
        "an index that is a link",
        "rm .git/index; ln -s /etc/passwd .git/index; echo x > after",
        "after",
        Some("x"),
    ),
    (
        "a head that is a link",
        "echo x > after; rm .git/HEAD; ln -s /etc/passwd .git/HEAD",
        "after",
        Some("x"),
    ),
    (
        "objects that are a link",
        "echo x > after; rm -rf .git/objects; ln -s /tmp .git/objects",
        "after",
        Some("x"),
    ),
    (
        "a module file that is an option",
        "printf '[submodule \"x\"]\\n\\tpath = x\\n\\turl = -u./run\\n' > .gitmodules; echo x > after",
        "after",
        Some("x"),
    ),
    ("a module file that is a link", "ln -s /etc/passwd .gitmodules; echo x > after", "after", Some("x")),
    (
        "replaced objects",
        "git replace $(git rev-parse HEAD) $(git commit-tree $(git mktree </dev/null) -m empty); echo x > after",
        "after",
        Some("x"),
    ),
    (
        "a graft",
        "mkdir -p .git/info; git rev-parse HEAD > .git/info/grafts; echo x > after",
        "after",
        Some("x"),
    ),
    (
        "a shallow history that is none",
        "git rev-parse HEAD > .git/shallow; echo x > after; git add after; git commit -qm s",
        "after",
        Some("x"),
    ),
    (
        "a commit with a hundred thousand parents",
        "echo x > after; head=$(git rev-parse HEAD); c=$( (printf 'tree %s\\n' $(git rev-parse 'HEAD^{tree}'); yes \"parent $head\" | head -100000; printf 'author a <b> 1 +0000\\ncommitter a <b> 1 +0000\\n\\nx\\n') | git hash-object -t commit -w --stdin --literally); echo $c > .git/refs/heads/many",
        "after",
        Some("x"),
    ),
    (
        "a million packed refs",
        "echo x > after; id=$(git rev-parse HEAD); seq 1000000 | sed \"s,.*,$id refs/heads/b&,\" >> .git/packed-refs",
        "after",
        Some("x"),
    ),
    (
        "an index that claims more than there is",
        "printf 'DIRC\\000\\000\\000\\004\\377\\377\\377\\377' > .git/index; truncate -s 400M .git/index; echo x > after",
        "after",
        Some("x"),
    ),
    (
        "ten thousand files",
        "mkdir many; cd many; seq 10000 | xargs touch; echo x > last",
        "many/last",
        Some("x"),
    ),
    ("nobody may read it", "echo x > hidden; chmod 000 hidden; echo y > after", "after", Some("y")),
];

#[body_test(except(user = "root can read files that its Bodies hide; an ordinary user gets a message"))]
async fn files_of_any_kind_are_saved_as_what_they_are_and_nothing_of_the_host_comes_along(t: Bodies) {
    let host = HostRepo::plain(&t);
    for (name, script, path, expected) in FILES {
        let body = host.body(&t).await;
        t.sh(&body, script).await.ok();
        save(&t, &body).await;
        assert_eq!(host.wip_file(&body, path).as_deref(), *expected, "{name}");
        let passwd = std::fs::read("/etc/passwd").unwrap();
        let hash = host.git(&["hash-object", "/etc/passwd"]);
        assert!(
            host.try_git(&["cat-file", "-e", &hash]).is_none(),
            "{name}: {} bytes of the host are in the repository",
            passwd.len()
        );
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
    }
    // The control: the same search finds an existing object.
    host.sh("cp /etc/passwd p; git hash-object -w p; rm p");
    assert!(host.try_git(&["cat-file", "-e", &host.git(&["hash-object", "/etc/passwd"])]).is_some());
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "the bomb takes minutes to make under emulation, and the host refuses it in the same way"
))]
async fn a_bomb_is_refused_within_its_limits(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo file > file; echo good > good; git add good; git commit -qm good; chmod -R u+w .git")
        .await
        .ok();
    assert!(save(&t, &body).await.is_whole());
    // A loose object of two gibibytes, compressed to two megabytes, named by a ref.
    let bomb = r#"python3 - <<'END'
import zlib, os
c = zlib.compressobj(9); out = c.compress(b"blob 2147483648\0")
zero = bytes(1 << 20)
for _ in range(2048): out += c.compress(zero)
out += c.flush()
os.makedirs(".git/objects/12", exist_ok=True)
open(".git/objects/12/34567890123456789012345678901234567890", "wb").write(out)
END
echo 1234567890123456789012345678901234567890 > .git/refs/heads/bomb; du -k .git/objects/12 | cut -f1"#;
    let kib: u64 = t.sh(&body, bomb).await.ok().parse().unwrap();
    assert!(kib < 16 << 10, "{kib}");
    let used = |path: &Path| testkit_usage(path);
    let before = used(&t.body_dir(&body).join("git"));
    let saved = save(&t, &body).await;
    assert!(saved.commit_error.is_some() && host.wip_file(&body, "file").is_some(), "{saved:?}");
    assert!(used(&t.body_dir(&body).join("git")) < before + (64 << 20), "the disk is not filled");
    t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
}

fn testkit_usage(path: &Path) -> u64 {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => testkit_usage(&entry.path()),
            Ok(found) => found.len(),
            Err(_) => 0,
        })
        .sum()
}
