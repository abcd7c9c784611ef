//! Refs: the names of a Body's work in the user's repository, and the names of the Body's own git that are
//! taken.

use std::collections::BTreeMap;

use proto::BodyId;

use crate::{
    error::WorkspaceError,
    git::Git,
    overlay_reader::{OverlayDir, OverlayEntry},
};

/// Most branches taken from one Body.
pub const BRANCHES_MAX: usize = 256;
/// Longest branch name.
const NAME_LEN_MAX: usize = 200;
/// Longest `packed-refs` file or reflog.
const PACKED_LEN_MAX: u64 = 16 << 20;
/// Prefixes of the Body's stashes and tags among its branches.
pub(crate) const STASH: &str = "palisade-stash";
pub(crate) const TAGS: &str = "palisade-tags";
/// Most slashes in a name.
const DEPTH_MAX: usize = 8;

/// The namespace of a Body's work in the user's repository.
pub fn namespace(body: &BodyId) -> String {
    format!("refs/palisade/{body}")
}

/// The author of commits that Palisade makes itself.
pub const PALISADE: &str = "Palisade <wip@palisade.invalid>";

/// Sets that author for a git command.
pub fn as_palisade(git: Git) -> Git {
    let who = [("NAME", "Palisade"), ("EMAIL", "wip@palisade.invalid")];
    who.into_iter().fold(git, |git, (field, value)| {
        git.env(&format!("GIT_AUTHOR_{field}"), value).env(&format!("GIT_COMMITTER_{field}"), value)
    })
}

/// The refs of a Body's git.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BodyRefs {
    /// The commit of HEAD; none if HEAD is missing or malformed.
    pub head: Option<String>,
    /// The current branch, if its name is accepted.
    pub branch: Option<String>,
    /// All branches, tags and stashes by name, each with its commit.
    pub branches: BTreeMap<String, String>,
    /// How many refs were refused, by their name or because there are too many.
    pub refused: usize,
}

/// Reads the refs from a Body's `.git`.
pub fn read(git: &OverlayDir) -> BodyRefs {
    let mut all = BodyRefs::default();
    let head = git.small("HEAD", 4096).unwrap_or_default();
    let head = String::from_utf8_lossy(&head).trim_end().to_owned();
    // The current branch counts whatever its name is, because the user may have named it before the Body
    // began.
    let current = head.strip_prefix("ref: refs/heads/");
    let packed = git.small("packed-refs", PACKED_LEN_MAX).unwrap_or_else(|| {
        all.refused += usize::from(!matches!(git.get("packed-refs"), None | Some(OverlayEntry::Gone)));
        Vec::new()
    });
    for line in packed.split(|byte| *byte == b'\n') {
        let text = String::from_utf8_lossy(line);
        if let Some((id, name)) = text.split_once(' ')
            && let Some(branch) = name.strip_prefix("refs/heads/")
        {
            all.follow(current, branch, id);
        }
    }
    let refs = git.dir("refs");
    if let Some(heads) = refs.as_ref().and_then(|refs| refs.dir("heads")) {
        loose(&heads, "", current, &mut all, 0);
    }
    if let Some(tags) = refs.as_ref().and_then(|refs| refs.dir("tags")) {
        loose(&tags, TAGS, current, &mut all, 0);
    }
    stashed(git, &mut all);
    match current {
        Some(branch) => {
            all.branch = Some(branch.to_owned()).filter(|branch| is_plain(branch));
        }
        None => all.head = Some(head).filter(|id| is_id(id)),
    }
    all
}

/// Adds every entry of the stash's reflog: it is the only reference to its commits.
fn stashed(git: &OverlayDir, all: &mut BodyRefs) {
    let Some(log) = git
        .dir("logs")
        .and_then(|logs| logs.dir("refs"))
        .and_then(|refs| refs.small("stash", PACKED_LEN_MAX))
    else {
        return;
    };
    for (number, line) in String::from_utf8_lossy(&log).lines().enumerate() {
        all.add(&format!("{STASH}/{number}"), line.split(' ').nth(1).unwrap_or_default());
    }
}

fn loose(dirs: &OverlayDir, above: &str, current: Option<&str>, all: &mut BodyRefs, depth: usize) {
    let Ok(entries) = dirs.entries() else {
        all.refused += 1;
        return;
    };
    for (name, found) in entries {
        let Ok(name) = String::from_utf8(name) else {
            all.refused += 1;
            continue;
        };
        let full = if above.is_empty() { name.clone() } else { format!("{above}/{name}") };
        match found {
            OverlayEntry::Dir(inner) if depth < DEPTH_MAX => match dirs.enter(&inner) {
                Ok(inside) => loose(&inside, &full, current, all, depth + 1),
                Err(_) => all.refused += 1,
            },
            OverlayEntry::File(_) if !name.ends_with(".lock") => {
                let text = dirs.small(&name, 4096).unwrap_or_default();
                let id = String::from_utf8_lossy(&text).trim_end().to_owned();
                all.branches.remove(&full);
                all.follow(current, &full, &id);
            }
            OverlayEntry::Dir(_) | OverlayEntry::Unreadable => all.refused += 1,
            // A ref that was deleted here may still be in `packed-refs`; then it is kept.
            OverlayEntry::File(_) | OverlayEntry::Gone | OverlayEntry::Link(_) | OverlayEntry::Other => {}
        }
    }
}

impl BodyRefs {
    fn follow(&mut self, current: Option<&str>, name: &str, id: &str) {
        if current == Some(name) {
            self.head = Some(id.to_owned()).filter(|id| is_id(id));
            // HEAD always counts; the branch itself is added only if its name is safe to print.
            if !is_plain(name) {
                return;
            }
        }
        self.add(name, id);
    }

    fn add(&mut self, name: &str, id: &str) {
        let clashes =
            |other: &String| other.starts_with(&format!("{name}/")) || name.starts_with(&format!("{other}/"));
        let known = self.branches.contains_key(name);
        if is_plain(name)
            && is_id(id)
            && (known || self.branches.len() < BRANCHES_MAX)
            && !self.branches.keys().any(clashes)
        {
            self.branches.insert(name.to_owned(), id.to_owned());
        } else {
            self.refused += 1;
        }
    }
}

/// The error for a branch that a repository does not have; it names those that were used last.
pub fn missing_branch(git: &Git, branch: &str) -> WorkspaceError {
    let newest =
        ["for-each-ref", "--count=5", "--sort=-committerdate", "--format=%(refname:short)", "refs/heads"];
    let found = git.run(newest).unwrap_or_default();
    let found: Vec<String> = String::from_utf8_lossy(&found).lines().map(proto::text::visible).collect();
    let known = match &found[..] {
        [] => "the repository has no branch yet".to_owned(),
        found => format!("the repository has {}", found.join(", ")),
    };
    WorkspaceError::NotFound(format!("there is no branch {branch}; {known}"))
}

/// Whether a text is an object id.
pub fn is_id(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether git accepts a name for a branch.
pub fn is_branch(name: &str) -> bool {
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    let odd = |c: char| c.is_ascii_control() || " ~^:?*[\\".contains(c);
    !name.starts_with('-')
        && !name.ends_with('.')
        && !["@", "HEAD"].contains(&name)
        && !name.contains("..")
        && !name.contains("@{")
        && name.split('/').all(part)
        && !name.contains(odd)
}

/// Whether a branch of a Body may keep its name: git accepts it, and no shell or terminal can misread it.
pub fn is_plain(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty() && !part.starts_with(['.', '-']) && !part.ends_with('.') && !part.ends_with(".lock")
    };
    let odd = |c: char| {
        c.is_control()
            || c.is_whitespace()
            || " ~^:?*[\\\"'`$;|&<>(){}!#%".contains(c)
            || proto::text::visible(&c.to_string()) != c.to_string()
    };
    !name.is_empty()
        && name.len() <= NAME_LEN_MAX
        && name != "@"
        && !name.contains("..")
        && !name.contains("@{")
        && name.split('/').all(part)
        && !name.contains(odd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_come_along() {
        for name in ["main", "fix/login", "a.b-c_d", "\u{e9}t\u{e9}", "x@y"] {
            assert!(is_plain(name), "{name}");
        }
        for name in [
            "",
            "@",
            "../../x",
            "a/../b",
            "-upload-pack=x",
            "a/-b",
            "a b",
            "a\u{1b}[2J",
            "a\u{202e}b",
            "a..b",
            "a.lock",
            "a@{1}",
            ".a",
            "a/.b",
            "a/",
            "/a",
            "a//b",
            "a~1",
            "a^",
            "a:b",
            "a?",
            "a*",
            "a[",
            "a\\b",
            "$(x)",
            "a;b",
            &"x".repeat(201),
        ] {
            assert!(!is_plain(name), "{name:?}");
        }
    }

    #[test]
    fn a_user_may_call_a_branch_what_git_allows() {
        let git = |name: &str| {
            std::process::Command::new("git")
                .args(["check-ref-format", "--branch", name])
                .output()
                .unwrap()
                .status
                .success()
        };
        let names = [
            "main", "fix/#123", "a b", "", "-x", "x-", "a@b", "a@{1}", "HEAD", "a/HEAD", "a..b", "a.", ".a",
            "a/.b", "a.lock", "a.lock/b", "a/", "/a", "a//b", "a~", "a^", "a:b", "a?", "a*", "a[", "a\\b",
            "a\u{7}", "a\u{7f}", "\u{202e}", "é", "--help",
        ];
        names.iter().for_each(|name| assert_eq!(is_branch(name), git(name), "{name:?}"));
    }

    #[test]
    fn a_million_names_are_not_taken() {
        let mut all = BodyRefs::default();
        let id = "0".repeat(40);
        (0..10_000).for_each(|number| all.add(&format!("b{number}"), &id));
        all.add("b1/below", &id);
        assert_eq!((all.branches.len(), all.refused), (BRANCHES_MAX, 10_001 - BRANCHES_MAX));
    }
}
