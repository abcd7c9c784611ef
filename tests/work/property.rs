//! Random trees and random changes: the saved tree is the one that plain git makes of the same files.

use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, save};

/// How many repositories are tested.
const ROUNDS: u64 = 12;
/// How many changes are made to each.
const CHANGES: usize = 40;

/// A seeded random generator.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % limit
    }

    pub fn of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len())]
    }
}

pub const DIRS: [&str; 8] = ["a", "b", "a/c", "a/c/d", "sp ace", "b/x.d", "node_modules/m", "e"];
const NAMES: [&str; 12] = [
    "f",
    "g.txt",
    "h.bin",
    "x.log",
    "-n",
    "q\"",
    "$(printf 'n\\nl')",
    "$(printf '\\303\\251\\377')",
    "keep.log",
    "Makefile",
    "é",
    ":p",
];

pub fn path(chance: &mut Chance) -> String {
    let name = chance.of(&NAMES).to_owned();
    let name = if chance.below(3) == 0 { name } else { format!("{}/{name}", chance.of(&DIRS)) };
    if name.contains("$(") { format!("\"./{name}\"") } else { format!("'./{name}'") }
}

/// One change, as a shell line that cannot fail.
pub fn change(chance: &mut Chance) -> String {
    let (one, two, dir) = (path(chance), path(chance), chance.of(&DIRS));
    let number = chance.below(1000);
    match chance.below(14) {
        0..=3 => format!("put {one} {number}"),
        4 => format!("rm -rf {one}"),
        5 => format!("rm -rf './{dir}'"),
        6 => format!("mv_ {one} {two}"),
        7 => format!("[ -f {one} ] && chmod +x {one}"),
        8 => format!("rm -rf {one}; mk {one}; ln -s 'target-{number}' {one}"),
        9 => format!("rm -rf {one}; mk {one}; head -c {} /dev/zero > {one}", number * 7),
        10 => format!("rm -rf './{dir}'; mkdir -p './{dir}'; echo {number} > './{dir}/fresh'"),
        11 => format!("[ -f {one} ] && printf 'crlf {number}\\r\\n' >> {one}"),
        12 => format!("rm -rf './{dir}'; mk './{dir}'; echo file > './{dir}'"),
        _ => "git add -A -f . 2>/dev/null; git commit -qm step 2>/dev/null".to_owned(),
    }
}

/// Removes files that are in the way of a directory.
pub const HELPERS: &str = r#"
    mk() { d=$(dirname "$1"); p=.; IFS=/; for part in $d; do p="$p/$part"; [ -d "$p" ] && [ ! -L "$p" ] || { rm -f "$p"; mkdir "$p"; }; done; unset IFS; }
    put() { [ -d "$1" ] && rm -rf "$1"; mk "$1"; [ -L "$1" ] && rm -f "$1"; echo "$2" >> "$1"; }
    mv_() { [ -e "$1" ] || [ -L "$1" ] || return 0; case "$2" in "$1"/*) return 0;; esac; case "$1" in "$2"/*) return 0;; esac; mk "$2"; rm -rf "$2"; mv "$1" "$2" 2>/dev/null; }
"#;

#[body_test]
async fn up_and_save_give_the_tree_that_plain_git_gives(t: Bodies) {
    let seed: u64 = std::env::var("PAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for round in 0..ROUNDS {
        let mut chance = Chance((seed + round).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let lines =
            |chance: &mut Chance| (0..CHANGES).map(|_| change(chance)).collect::<Vec<_>>().join("; true\n");
        let begin = format!(
            "{HELPERS}\nprintf '*.log\\n!keep.log\\nnode_modules/\\n' > .gitignore; printf '*.txt text\\n*.bin binary\\n' > .gitattributes\n{}; true",
            lines(&mut chance)
        );
        let host = HostRepo::make(&t, &format!("r{round}"), &begin);
        // A Body has no ignored files of the host, so the host must not have them either.
        host.git(&["clean", "-fdxq"]);
        let body = host.body(&t).await;
        assert_eq!(t.sh(&body, "git status --porcelain").await.ok(), "", "seed {seed} round {round}");
        let work = format!("{HELPERS}\n{}; true", lines(&mut chance));
        t.sh(&body, &work).await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.is_whole(), "seed {seed} round {round}: {saved:?}");
        host.sh(&work);
        host.git(&["add", "--all"]);
        let (native, ours) = (host.git(&["write-tree"]), host.wip_tree(&body));
        assert_eq!(
            ours,
            native,
            "seed {seed} round {round}:\n{}\n{work}",
            host.git(&["diff-tree", "-r", &native, &ours])
        );
        t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    }
}
