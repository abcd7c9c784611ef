//! `git status` in a Body: the same answer as after a check of every file, without checking them.

use std::time::Duration;

use fleet::{ExecRequest, UncommittedFiles};
use proto::BodyId;
use testkit::{Bodies, body_test};

use crate::{
    property::{Chance, DIRS, HELPERS, change, path},
    repo::{HostRepo, up},
};

/// How many repositories are tested.
const ROUNDS: u64 = 2;
/// How many steps run in each, in a fork of it, and after a restart.
const STEPS: [usize; 3] = [50, 15, 15];

/// Prints how many files a git command checked.
const LOOKS: &str = r#"looks() { rm -f /tmp/t; GIT_TRACE2_EVENT=/tmp/t "$@" > /tmp/said; n=0
    for v in $(grep -o 'sum_lstat","value":"[0-9]*' /tmp/t | grep -o '[0-9]*$'); do n=$((n + v)); done; echo $n; }
"#;

/// `same STEP` prints the differences between a status with fsmonitor and one without, with the step. Each
/// work tree has an index of its own for either.
const SAME: &str = r#"same() { for d in . /tmp/w /tmp/copy; do [ -e $d/.git ] || continue
      i=$(cd $d && git rev-parse --path-format=absolute --git-path index); cp -p "$i" /tmp/i || rm -f /tmp/i; rm -f /tmp/t
      GIT_TRACE2_EVENT=/tmp/t git -C $d status --porcelain=v2 --ignored > /tmp/asked 2>&1
      GIT_INDEX_FILE=/tmp/i GIT_OPTIONAL_LOCKS=0 git -C $d -c core.fsmonitor=false -c core.untrackedCache=false status --porcelain=v2 --ignored > /tmp/looked 2>&1
      grep -q apply_count /tmp/t && quick=$((quick + 1))
      cmp -s /tmp/asked /tmp/looked || { echo "differs in $d after $1"; diff /tmp/asked /tmp/looked; }
    done; }
    quick=0; export GIT_EDITOR=true
"#;

/// Changes the contents of a file and keeps its size and time.
const SLY: &str = r#"sly() { [ -f "$1" ] && [ ! -L "$1" ] && [ -s "$1" ] || return 0; touch -r "$1" /tmp/time; n=$(wc -c < "$1"); head -c "$n" /dev/zero | tr '\0' "$2" > "$1"; touch -r /tmp/time "$1"; }
"#;

fn git_step(chance: &mut Chance) -> String {
    let (one, two, dir, number) = (path(chance), path(chance), chance.of(&DIRS), chance.below(1000));
    match chance.below(27) {
        0 | 1 => "git add -A".into(),
        2 => format!("git add -f -- {one}"),
        3 | 4 => "git commit -qam step".into(),
        5 => "git stash -q -u".into(),
        6 => "git stash pop -q".into(),
        7 => format!("git checkout -q -b b{number}"),
        8 => "git checkout -q -f main".into(),
        9 => "git checkout -q -f -B other HEAD~1".into(),
        10 => "git reset -q --hard".into(),
        11 => "git reset -q".into(),
        12 => format!("git mv -f -- {one} {two}"),
        13 => format!("git rm -q -r --cached -- {one}"),
        14 => "git clean -fdq".into(),
        15 => {
            "rm -rf /tmp/w; git worktree prune; git worktree add -q -f --detach /tmp/w; echo x > /tmp/w/g.txt"
                .into()
        }
        16 => "rm -rf /tmp/copy; cp -a . /tmp/copy; echo y >> /tmp/copy/f; rm -rf /tmp/copy/a".into(),
        17 => "cp .git/index /tmp/saved".into(),
        18 => "[ -e /tmp/saved ] && cp /tmp/saved .git/index".into(),
        19 => format!("mk './{dir}/n/x'; git init -q './{dir}/n'; echo n > './{dir}/n/x'"),
        20 => format!("sly {one} {}", number % 10),
        21 => "git merge -q -m merged main".into(),
        22 => format!("git config core.untrackedCache {}", ["true", "false", "keep"][number % 3]),
        23 => "git -c core.fsmonitor=false status > /dev/null".into(),
        // A file that is created, added and deleted leaves no trace.
        24 => {
            format!("put './v{number}' 1; git add -f './v{number}'; git status > /dev/null; rm './v{number}'")
        }
        25 => format!(
            "mk './{dir}/v'; echo 1 > './{dir}/v{number}'; git add -f './{dir}/v{number}'; rm './{dir}/v{number}'"
        ),
        _ => format!("[ -d './{dir}' ] && touch -d @{} './{dir}'", 1_500_000_000 + number),
    }
}

fn script(chance: &mut Chance, steps: usize) -> String {
    let step = |number: usize, line: String| {
        let told = line.replace('\'', "").replace(['$', '"', '\\', '`'], "_");
        format!("{{ {line}; }} > /dev/null 2>&1 < /dev/null; same '{number}: {told}'")
    };
    let lines = (0..steps).map(|number| {
        let line = if chance.below(2) == 0 { git_step(chance) } else { change(chance) };
        step(number, line)
    });
    let lines: Vec<String> = lines.collect();
    format!("{HELPERS}{SAME}{SLY}\n{}\necho $quick", lines.join("\n"))
}

/// Runs steps; returns how many answers of the guest saved git a full check.
async fn walk(t: &Bodies, body: &BodyId, chance: &mut Chance, steps: usize, about: &str) -> usize {
    let script = script(chance, steps);
    let said = t.sh(body, &script).await.ok();
    said.parse().unwrap_or_else(|_| panic!("{about}:\n{said}\n\n{script}"))
}

#[body_test(except(microvm = "git in a microVM looks at every file"))]
async fn git_says_what_it_would_say_had_it_looked_at_every_file(t: Bodies) {
    let seed: u64 = std::env::var("PAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut quick = 0;
    for round in 0..ROUNDS {
        let about = format!("seed {seed} round {round}");
        let mut chance = Chance((seed + round).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let begin: Vec<String> = (0..30).map(|_| change(&mut chance)).collect();
        let begin = format!(
            "{HELPERS}\nprintf '*.log\\n!keep.log\\nnode_modules/\\n' > .gitignore\n{}; true",
            begin.join("; true\n")
        );
        let host = HostRepo::make(&t, &format!("s{round}"), &begin);
        host.commit("seq 100 > second", "second");
        let body = host.body(&t).await;
        quick += walk(&t, &body, &mut chance, STEPS[0], &about).await;
        let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
        quick += walk(&t, &fork, &mut chance, STEPS[1], &format!("{about}, fork")).await;
        t.fleet().stop(&body, Duration::ZERO).await.unwrap();
        t.fleet().start(&body).await.unwrap();
        quick += walk(&t, &body, &mut chance, STEPS[2], &format!("{about}, started again")).await;
        for body in [fork, body] {
            t.fleet().remove_with(&body, fleet::Force::Yes, fleet::Discard::Yes).await.unwrap();
        }
    }
    // Otherwise the test would prove nothing.
    let all = ROUNDS as usize * STEPS.iter().sum::<usize>();
    assert!(quick > all / 3, "{quick} of {all} answers named paths");
}

#[body_test(except(microvm = "git in a microVM has no fsmonitor"))]
async fn a_first_status_looks_at_what_was_changed_and_at_nothing_else(t: Bodies) {
    let host = HostRepo::make(
        &t,
        "wide",
        "for d in $(seq 20); do mkdir d$d; for f in $(seq 100); do echo $d $f > d$d/f$f; done; done",
    );
    let looks = |line: &str| format!("{LOOKS}\nlooks {line}");
    let count = |said: String| said.trim().parse::<usize>().unwrap();
    let body = host.body(&t).await;
    assert!(
        count(t.sh(&body, &looks("git -c core.fsmonitor=false --no-optional-locks status")).await.ok())
            >= 2000,
        "what is counted"
    );
    assert_eq!(count(t.sh(&body, &looks("git status")).await.ok()), 0);
    // A new directory is one change, whatever it contains.
    t.sh(&body, "echo more >> d1/f1; rm d2/f2; rm -r d3; mkdir -p target/deep; cd target/deep; seq 6000 | xargs touch").await.ok();
    let said = t
        .sh(
            &body,
            &format!("{}; grep -c d3/ /tmp/said; git status --porcelain | grep -v d3/", looks("git status")),
        )
        .await
        .ok();
    let lines: Vec<&str> = said.lines().collect();
    assert!((102..=400).contains(&lines[0].parse::<usize>().unwrap()), "{said}");
    assert_eq!(lines[1..], ["100", " M d1/f1", " D d2/f2", "?? target/"]);
    // A fork builds on its changes; a restarted Body still has them.
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    t.fleet().stop(&body, Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    for body in [&fork, &body] {
        let said = t.sh(body, &format!("{}; grep -c deleted: /tmp/said", looks("git status"))).await.ok();
        let lines: Vec<&str> = said.lines().collect();
        assert!((102..=400).contains(&lines[0].parse::<usize>().unwrap()) && lines[1] == "101", "{said}");
    }
    // Uncommitted work of the host is in the files and not in the index.
    host.sh("echo dirty >> d5/f5; echo new > d5/new");
    let body = up(&t, fleet::UpRequest { dirty: UncommittedFiles::With, ..host.up(&t) }).await.spec.id;
    let said = t.sh(&body, &format!("{}; git status --porcelain", looks("git status"))).await.ok();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].parse::<usize>().unwrap() <= 4, "{said}");
    assert_eq!(lines[1..], [" M d5/f5", "?? d5/new"]);
}

#[body_test(except(microvm = "git in a microVM has no fsmonitor"))]
async fn who_cannot_be_answered_is_told_that_all_may_have_changed(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo more >> numbers").await.ok();
    // For git it names the path: the answer is refused for another path or another repository, and for an old
    // git.
    let hook = "/workspace/app/.git/palisade/changes";
    let traced = "GIT_TRACE_FSMONITOR=1 git status 2>&1 | grep -c \"callback 'numbers'\"";
    assert_eq!(t.sh(&body, traced).await.ok(), "1");
    let token = t
        .sh(
            &body,
            "GIT_TRACE_FSMONITOR=1 git status 2>&1 | grep -o \"successful '[0-9]*\" | grep -o '[0-9]*'",
        )
        .await
        .ok();
    let said = async |line: String| {
        t.sh(&body, &format!("{{ {line}; }} | tail -c +1 | tr '\\0' '\\n' | tail -n 1")).await.ok()
    };
    assert_eq!(
        said(format!("{hook} 2 {token}")).await,
        "/",
        "asked by a shell, of which nobody knows what it understands"
    );
    assert_eq!(said(format!("cd src; {hook} 2 {token}")).await, "/", "asked elsewhere");
    assert_eq!(said(format!("{hook} 1 {token}")).await, "/", "asked in another version");
    assert_eq!(said(format!("{hook} 2")).await, "/", "asked without a name");
    assert_eq!(
        t.sh(&body, &format!("git config core.fsmonitor false; {traced}; git config core.fsmonitor"))
            .await
            .text(),
        "0\nfalse",
        "what is set inside wins"
    );
    let long = "9".repeat(5000);
    assert_eq!(said(format!("{hook} 2 {long}")).await, "/", "asked with a name that nobody gave");
}

#[body_test(except(
    user = "its Bodies have one id, so they have no second user",
    microvm = "git in a microVM has no fsmonitor"
))]
async fn somebody_else_in_the_body_learns_no_names(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo x > src/name; chmod 700 src").await.ok();
    let told = async |user: &str| {
        let line = "GIT_TRACE_FSMONITOR=1 git -c safe.directory='*' --no-optional-locks status 2>&1 | grep -c \"callback 'src/name'\"";
        t.exec(&body, ExecRequest { user: Some(user.to_owned()), ..ExecRequest::new(["sh", "-c", line]) })
            .await
            .text()
    };
    assert_eq!(told("user").await, "1");
    assert_eq!(told("nobody").await, "0");
}
