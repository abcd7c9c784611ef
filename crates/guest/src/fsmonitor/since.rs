//! Computes which paths changed since the moment that a token of git names.
//!
//! All differences from the repository's layers are in the upper, and every answer contains them. git's first query
//! comes from an index that knows only those layers, so the upper alone answers it. A later index may know files that
//! were new at its time, and such a file leaves no trace in the upper when it is deleted. So answers to later tokens
//! also contain every path that was ever reported, and every directory in which names were added or removed since.
//!
//! Invariant: a token that this guest did not generate, or generated for another overlay, gets the answer
//! "everything".
//! A file is missed only if two things happen together: it was created, added to an index and deleted between two
//! queries, *and* a program reset the time of its directory to the old value.

use std::collections::{BTreeSet, HashMap};

use super::walk::{ANY, DirStamp, PATHS_LEN_MAX, PATHS_MAX, UpperListing};

/// The kernel's clock for file times may stand still for this long, so a directory that has just changed may change
/// again and keep its time.
const SETTLED_NS: i128 = 20_000_000;

/// The guest's memory of one overlay.
#[derive(Debug)]
pub struct OverlayHistory {
    /// The token for the unmodified state of its layers.
    layers: String,
    /// A random value, different for each run of a guest.
    life: String,
    /// The number of queries so far.
    asked: u64,
    /// When the guest began to follow it, in nanoseconds.
    begun: i128,
    told: BTreeSet<Vec<u8>>,
    told_len: usize,
    dirs: HashMap<Vec<u8>, DirHistory>,
}

#[derive(Debug, Clone, Copy)]
struct DirHistory {
    seen: DirStamp,
    settled: bool,
    /// The first query after its last change.
    changed: u64,
}

/// The answer for git.
#[derive(Debug, PartialEq, Eq)]
pub enum FsmonitorAnswer {
    /// Only these paths may have changed.
    Paths(BTreeSet<Vec<u8>>),
    /// Every path may have changed.
    All,
}

/// The moment that a token names.
enum TokenMoment {
    Layers,
    Question(u64),
    Unknown,
}

impl OverlayHistory {
    /// Starts the memory of an overlay; `layers` is the token of its unmodified state.
    pub fn new(layers: String, life: String, now: i128) -> Self {
        Self { layers, life, asked: 0, begun: now, told: BTreeSet::new(), told_len: 0, dirs: HashMap::new() }
    }

    /// The token of this moment.
    pub fn token(&self) -> String {
        format!("palisade:{}:{}", self.life, self.asked)
    }

    /// Forgets everything, so that older tokens become unknown.
    pub fn forget(&mut self, life: String) {
        *self = Self::new(std::mem::take(&mut self.layers), life, self.begun);
    }

    /// Lists the paths that changed since the moment of the token, from the contents of the upper and of the layers
    /// above the repository's own.
    pub fn answer(
        &mut self,
        token: &str,
        now: i128,
        upper: UpperListing,
        above: &[Vec<u8>],
    ) -> FsmonitorAnswer {
        let moment = self.moment(token);
        self.asked += 1;
        self.compare(upper.dirs, now);
        let answer = match moment {
            TokenMoment::Layers => FsmonitorAnswer::Paths(upper.paths.iter().chain(above).cloned().collect()),
            TokenMoment::Question(since) => self.since(since, &upper.paths),
            TokenMoment::Unknown => FsmonitorAnswer::All,
        };
        for path in upper.paths {
            let len = path.len();
            self.told_len += if self.told.insert(path) { len } else { 0 };
        }
        answer
    }

    /// Whether the memory has grown beyond its bound.
    pub fn is_full(&self) -> bool {
        self.told.len() > 2 * PATHS_MAX || self.told_len > PATHS_LEN_MAX
    }

    fn moment(&self, token: &str) -> TokenMoment {
        if token == self.layers {
            return TokenMoment::Layers;
        }
        let question = token.strip_prefix("palisade:").and_then(|rest| rest.strip_prefix(self.life.as_str()));
        match question.and_then(|rest| rest.strip_prefix(':')).and_then(|number| number.parse().ok()) {
            Some(number) if number <= self.asked => TokenMoment::Question(number),
            _ => TokenMoment::Unknown,
        }
    }

    fn compare(&mut self, dirs: Vec<(Vec<u8>, DirStamp)>, now: i128) {
        let before = std::mem::take(&mut self.dirs);
        for (path, seen) in dirs {
            let changed = match before.get(&path) {
                Some(known) if known.seen == seen && known.settled => known.changed,
                None if self.asked > 1 && self.is_as_below(&seen) => 0,
                _ => self.asked,
            };
            let settled = (now - nanoseconds(&seen)).abs() > SETTLED_NS;
            self.dirs.insert(path, DirHistory { seen, settled, changed });
        }
    }

    /// Whether overlayfs created the directory only to hold something further down: then it copied the time from the
    /// lower directory, a whole second from before this guest.
    fn is_as_below(&self, seen: &DirStamp) -> bool {
        seen.time.1 == 0 && nanoseconds(seen) < self.begun
    }

    fn since(&self, question: u64, now_there: &[Vec<u8>]) -> FsmonitorAnswer {
        let changed = |known: &DirHistory| known.changed > question;
        if self.dirs.get(&[][..]).is_none_or(changed) {
            return FsmonitorAnswer::All;
        }
        let dirs = self.dirs.iter().filter(|(_, known)| changed(known));
        let dirs = dirs.flat_map(|(path, _)| [path.clone(), [path, ANY].concat()]);
        FsmonitorAnswer::Paths(self.told.iter().chain(now_there).cloned().chain(dirs).collect())
    }
}

fn nanoseconds(seen: &DirStamp) -> i128 {
    i128::from(seen.time.0) * 1_000_000_000 + i128::from(seen.time.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGUN: i128 = 1_000 * 1_000_000_000;
    /// The time of a directory in a layer.
    const OLD: (i64, i64) = (900, 0);

    fn looked(paths: &[&str], dirs: &[(&str, (i64, i64))]) -> UpperListing {
        let dir = |(path, time): &(&str, (i64, i64))| {
            (path.as_bytes().to_vec(), DirStamp { inode: 1, time: *time })
        };
        UpperListing {
            paths: paths.iter().map(|path| path.as_bytes().to_vec()).collect(),
            dirs: dirs.iter().map(dir).collect(),
        }
    }

    fn paths(names: &[&str]) -> FsmonitorAnswer {
        FsmonitorAnswer::Paths(names.iter().map(|name| name.as_bytes().to_vec()).collect())
    }

    struct TestHistory(OverlayHistory);

    impl TestHistory {
        fn begin() -> Self {
            Self(OverlayHistory::new("77".into(), "life".into(), BEGUN))
        }

        /// Queries long after the last change.
        fn ask(&mut self, token: &str, upper: UpperListing) -> (FsmonitorAnswer, String) {
            let answer = self.0.answer(token, BEGUN * 3, upper, &[b"dep".to_vec()]);
            (answer, self.0.token())
        }
    }

    #[test]
    fn of_the_layers_all_that_lies_above_them_is_told() {
        let mut asked = TestHistory::begin();
        assert_eq!(asked.ask("77", looked(&[], &[("", OLD)])).0, paths(&["dep"]));
        assert_eq!(asked.ask("77", looked(&["a/b"], &[("", OLD), ("a", OLD)])).0, paths(&["a/b", "dep"]));
        // No index with that token ever contained a file that is gone again.
        assert_eq!(asked.ask("77", looked(&[], &[("", (2000, 1))])).0, paths(&["dep"]));
    }

    #[test]
    fn a_name_of_somebody_else_means_everything() {
        let mut asked = TestHistory::begin();
        for token in [
            "",
            "78",
            "palisade:life:1",
            "palisade:other:0",
            "palisade:life",
            "palisade:life:x",
            "1700000000000000000",
        ] {
            assert_eq!(asked.ask(token, looked(&[], &[("", OLD)])).0, FsmonitorAnswer::All, "{token}");
            asked = TestHistory::begin();
        }
        let (_, token) = asked.ask("77", looked(&[], &[("", OLD)]));
        asked.0.forget("next".into());
        assert_eq!(asked.ask(&token, looked(&[], &[("", OLD)])).0, FsmonitorAnswer::All);
    }

    #[test]
    fn what_was_told_once_is_told_again_when_it_is_gone() {
        let mut asked = TestHistory::begin();
        let (_, first) = asked.ask("77", looked(&["a/new"], &[("", OLD), ("a", OLD)]));
        assert_eq!(asked.ask(&first, looked(&[], &[("", OLD), ("a", OLD)])).0, paths(&["a/new"]));
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let mut asked = TestHistory::begin();
        let long = "x".repeat(1 << 18);
        for number in 0..4 {
            assert!(!asked.0.is_full(), "{number}");
            asked.ask("77", looked(&["same", &format!("{long}{number}")], &[("", OLD)]));
            asked.ask("77", looked(&["same", &format!("{long}{number}")], &[("", OLD)]));
        }
        assert!(asked.0.is_full());
        let token = asked.0.token();
        asked.0.forget("next".into());
        assert!(!asked.0.is_full());
        assert_eq!(asked.ask(&token, looked(&[], &[("", OLD)])).0, FsmonitorAnswer::All);
    }

    #[test]
    fn a_directory_in_which_names_came_or_went_is_told() {
        let mut asked = TestHistory::begin();
        let (_, first) = asked.ask("77", looked(&["a/x"], &[("", OLD), ("a", OLD)]));
        let (answer, second) = asked.ask(&first, looked(&["a/x"], &[("", OLD), ("a", (2000, 5))]));
        assert_eq!(answer, paths(&["a", "a/-", "a/x"]));
        assert_eq!(asked.ask(&second, looked(&["a/x"], &[("", OLD), ("a", (2000, 5))])).0, paths(&["a/x"]));
        // git asks once more with an older index.
        assert_eq!(
            asked.ask(&first, looked(&["a/x"], &[("", OLD), ("a", (2000, 5))])).0,
            paths(&["a", "a/-", "a/x"])
        );
        assert_eq!(
            asked.ask(&second, looked(&["a/x"], &[("", (2001, 7)), ("a", (2000, 5))])).0,
            FsmonitorAnswer::All
        );
    }

    #[test]
    fn a_directory_that_came_for_what_is_below_it_is_not_changed() {
        let mut asked = TestHistory::begin();
        let (_, first) = asked.ask("77", looked(&[], &[("", OLD)]));
        assert_eq!(asked.ask(&first, looked(&["b/x"], &[("", OLD), ("b", OLD)])).0, paths(&["b/x"]));
        let since = [("c", (2000, 0)), ("d", (900, 1))];
        for (name, time) in since {
            let (answer, _) = asked.ask(&first, looked(&[], &[("", OLD), (name, time)]));
            assert_eq!(answer, paths(&["b/x", name, &format!("{name}/-")]));
        }
    }

    #[test]
    fn a_directory_that_changed_a_moment_ago_counts_as_changed_next_time() {
        let mut asked = TestHistory::begin();
        let just = looked(&["a/x"], &[("", OLD), ("a", (3000, 0))]);
        let (_, first) = asked.ask("77", just);
        assert_eq!(
            asked.ask(&first, looked(&[], &[("", OLD), ("a", (3000, 0))])).0,
            paths(&["a", "a/-", "a/x"])
        );
    }
}
