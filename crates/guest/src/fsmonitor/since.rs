//! What was changed since a moment that git has a name for.
//!
//! Whatever differs from the layers of a repository is in the upper, and is told every time. So git's first question,
//! whose index knows those layers only, is answered by the upper alone. An index that git wrote later may know of files
//! that were new then, and such a file leaves nothing behind when it goes. So of later moments are told as well:
//! every path that was ever told, and every directory in which names came or went since.
//!
//! Invariant: a name that was not given by this guest, or given for something else, means that all may have changed.
//! Two things must fail together for a file to be missed: it came, was added and went between two questions, *and*
//! somebody put its directory's time back to what it was.

use std::collections::{BTreeSet, HashMap};

use super::walk::{ANY, DirStamp, PATHS_LEN_MAX, PATHS_MAX, UpperListing};

/// The kernel's clock for times of files may stand still for that long; a directory that changed a moment ago may change
/// again and show the same time.
const SETTLED_NS: i128 = 20_000_000;

/// What the guest remembers of one area.
#[derive(Debug)]
pub struct OverlayHistory {
    /// What the state of its layers is called.
    layers: String,
    /// Different for every life of a guest.
    life: String,
    /// How often it was asked.
    asked: u64,
    /// When it began, in nanoseconds.
    begun: i128,
    told: BTreeSet<Vec<u8>>,
    told_len: usize,
    dirs: HashMap<Vec<u8>, DirHistory>,
}

#[derive(Debug, Clone, Copy)]
struct DirHistory {
    seen: DirStamp,
    settled: bool,
    /// The first question that came after its last change.
    changed: u64,
}

/// What git is told.
#[derive(Debug, PartialEq, Eq)]
pub enum FsmonitorAnswer {
    /// These, and nothing else.
    Paths(BTreeSet<Vec<u8>>),
    /// Anything.
    All,
}

/// What a name stands for.
enum TokenMoment {
    Layers,
    Question(u64),
    Unknown,
}

impl OverlayHistory {
    /// Of an area whose layers have this name.
    pub fn new(layers: String, life: String, now: i128) -> Self {
        Self { layers, life, asked: 0, begun: now, told: BTreeSet::new(), told_len: 0, dirs: HashMap::new() }
    }

    /// What this moment is called.
    pub fn token(&self) -> String {
        format!("palisade:{}:{}", self.life, self.asked)
    }

    /// Nothing is remembered any more.
    pub fn forget(&mut self, life: String) {
        *self = Self::new(std::mem::take(&mut self.layers), life, self.begun);
    }

    /// What was changed since the moment of that name, with what lies in the upper and in layers above the repository's
    /// own.
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

    /// Whether more is remembered than is worth it.
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

    /// Whether a directory came here only because of something further down: the kernel gives it the time it had below,
    /// which is a whole second from before this guest.
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
    /// Of a layer.
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

        /// Asks long after everything happened.
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
        // What is gone again was never in an index of that name.
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
        // An older index is asked for once more.
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
