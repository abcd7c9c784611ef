//! Patterns over the words of a command, and how certainly a command matches one.

use super::{ProgramCall, ShellLine, Word, WordExtent};

/// The most alternatives that braces may make of one word of a pattern.
const ALTERNATIVES_MAX: usize = 64;

/// How certainly something matches a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// It does not match.
    Never,
    /// It may match: a part is known only when the command runs.
    Possible,
    /// It matches.
    Certain,
}

/// A pattern for one word: `*` stands for any text, `{a,b}` for one of several texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WordPattern {
    alternatives: Vec<Vec<Piece>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Letter(char),
    Any,
}

impl WordPattern {
    /// Reads a pattern; an error is a text. A backslash makes the next letter an ordinary one.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut done: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut open: Option<Vec<Vec<Piece>>> = None;
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            let piece = match (letter, &mut open) {
                ('{', None) => {
                    open = Some(vec![Vec::new()]);
                    continue;
                }
                (',', Some(choices)) => {
                    choices.push(Vec::new());
                    continue;
                }
                ('}', Some(choices)) => {
                    done = combine(&done, choices);
                    open = None;
                    if done.len() > ALTERNATIVES_MAX {
                        return Err(format!(
                            "the braces in {text:?} make more than {ALTERNATIVES_MAX} words"
                        ));
                    }
                    continue;
                }
                ('*', _) => Piece::Any,
                ('\\', _) => Piece::Letter(letters.next().unwrap_or('\\')),
                (letter, _) => Piece::Letter(letter),
            };
            match &mut open {
                Some(choices) => choices.iter_mut().rev().take(1).for_each(|choice| choice.push(piece)),
                None => done.iter_mut().for_each(|done| done.push(piece)),
            }
        }
        match open {
            Some(_) => Err(format!("the brace in {text:?} is not closed")),
            None => Ok(Self { alternatives: done }),
        }
    }

    /// A pattern that only this text matches, as it is written in a file.
    pub fn escape(text: &str) -> String {
        let special = |letter: char| matches!(letter, '*' | '{' | '}' | ',' | '\\');
        let escaped = |letter: char| special(letter).then_some('\\').into_iter().chain([letter]);
        text.chars().flat_map(escaped).collect()
    }

    /// Whether a text matches.
    pub fn matches(&self, text: &str) -> bool {
        self.alternatives.iter().any(|pieces| walk(pieces, text).last() == Some(&true))
    }

    /// Whether a word that begins with this text matches.
    fn fit_beginning(&self, head: &str) -> Fit {
        let fit = |pieces: &Vec<Piece>| {
            let states = walk(pieces, head);
            let ends_open = pieces.last() == Some(&Piece::Any) && states.last() == Some(&true);
            match (ends_open, states.contains(&true)) {
                (true, _) => Fit::Certain,
                (false, true) => Fit::Possible,
                (false, false) => Fit::Never,
            }
        };
        self.alternatives.iter().map(fit).max().unwrap_or(Fit::Never)
    }

    /// The texts without a star, for a search in text that cannot be parsed.
    fn literals(&self) -> impl Iterator<Item = String> {
        self.alternatives.iter().filter_map(|pieces| {
            let letters = pieces.iter().map(|piece| match piece {
                Piece::Letter(letter) => Some(*letter),
                Piece::Any => None,
            });
            letters.collect()
        })
    }
}

/// The states that a pattern can be in after a text. The last state is the end of the pattern.
fn walk(pieces: &[Piece], text: &str) -> Vec<bool> {
    let mut states = vec![false; pieces.len() + 1];
    states[0] = true;
    close(pieces, &mut states);
    let mut next = states.clone();
    for letter in text.chars() {
        next.fill(false);
        for (index, piece) in pieces.iter().enumerate().filter(|(index, _)| states[*index]) {
            match piece {
                Piece::Any => next[index] = true,
                Piece::Letter(wanted) if *wanted == letter => next[index + 1] = true,
                Piece::Letter(_) => {}
            }
        }
        std::mem::swap(&mut states, &mut next);
        close(pieces, &mut states);
        if !states.contains(&true) {
            break;
        }
    }
    states
}

/// A star may stand for nothing.
fn close(pieces: &[Piece], states: &mut [bool]) {
    for (index, piece) in pieces.iter().enumerate() {
        if states[index] && *piece == Piece::Any {
            states[index + 1] = true;
        }
    }
}

/// Each beginning with each choice behind it.
fn combine(done: &[Vec<Piece>], choices: &[Vec<Piece>]) -> Vec<Vec<Piece>> {
    done.iter()
        .flat_map(|done| choices.iter().map(move |choice| [done.as_slice(), choice].concat()))
        .collect()
}

/// One element of a command pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternToken {
    /// One word.
    Word(WordPattern),
    /// Any number of words.
    Rest,
}

/// A pattern for the words of a command: `["git", "push", "**"]`.
///
/// Each element stands for one word; `*` is any word, `**` any number of words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandPattern {
    tokens: Vec<PatternToken>,
    shown: String,
}

impl CommandPattern {
    /// Reads a pattern; an error is a text.
    pub fn parse(tokens: &[String]) -> Result<Self, String> {
        if tokens.first().is_none_or(|first| first == "**") {
            return Err("a command pattern begins with the name of a program".to_owned());
        }
        let read = |token: &String| match token.as_str() {
            "**" => Ok(PatternToken::Rest),
            token => WordPattern::parse(token).map(PatternToken::Word),
        };
        let shown = tokens.join(" ");
        Ok(Self { tokens: tokens.iter().map(read).collect::<Result<_, _>>()?, shown })
    }

    /// The pattern as text.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// How certainly a call matches in one of its forms: as written, by the name of its program without a directory, or
    /// without options before its subcommand.
    pub fn fit(&self, call: &ProgramCall) -> Fit {
        let by_name = |words: &[Word]| match words.split_first() {
            Some((first, rest)) => self.fit_sequence(std::iter::once(&first.to_program()).chain(rest)),
            None => Fit::Never,
        };
        let plain = call.plain.as_deref().map_or(Fit::Never, by_name);
        plain.max(by_name(&call.words)).max(self.fit_written(call))
    }

    /// How certainly a call matches word by word, as it is written.
    pub fn fit_written(&self, call: &ProgramCall) -> Fit {
        self.fit_sequence(&call.words)
    }

    fn fit_sequence<'a>(&self, words: impl IntoIterator<Item = &'a Word>) -> Fit {
        let width = self.tokens.len() + 1;
        // `row[t]` says how certainly the words so far can match the first `t` tokens.
        let mut row = vec![Fit::Never; width];
        row[0] = Fit::Certain;
        self.skip_rests(&mut row);
        for word in words {
            row = self.step(&row, word);
            if row.iter().all(|fit| *fit == Fit::Never) {
                return Fit::Never;
            }
        }
        row[width - 1]
    }

    /// Whether the name of the program matches for certain.
    pub fn fits_program(&self, call: &ProgramCall) -> bool {
        let Some(PatternToken::Word(pattern)) = self.tokens.first() else { return false };
        let Some(word) = call.words.first() else { return false };
        let names = [word.to_program(), word.clone()];
        names.iter().filter_map(Word::as_exact).any(|name| pattern.matches(name))
    }

    /// Whether the fixed words of the pattern occur in a text, in their order. For a text that cannot be parsed.
    pub fn is_mentioned(&self, words: &[&str]) -> bool {
        let mut words = words.iter();
        let mut has_fixed = false;
        for token in &self.tokens {
            let PatternToken::Word(pattern) = token else { continue };
            let literals: Vec<String> = pattern.literals().collect();
            if literals.is_empty() {
                continue;
            }
            has_fixed = true;
            if !words.any(|word| literals.iter().any(|literal| literal == word)) {
                return false;
            }
        }
        has_fixed
    }

    /// The row after one more word.
    fn step(&self, row: &[Fit], word: &Word) -> Vec<Fit> {
        let mut next = vec![Fit::Never; row.len()];
        for (index, token) in self.tokens.iter().enumerate() {
            let (here, after) = (row[index], index + 1);
            match token {
                _ if here == Fit::Never => {}
                PatternToken::Rest => raise(&mut next[index], here),
                PatternToken::Word(pattern) => raise(&mut next[after], here.min(fit_word(pattern, word))),
            }
        }
        if word.extent == WordExtent::Several {
            self.add_several(row, &mut next, word);
        }
        self.skip_rests(&mut next);
        next
    }

    /// The further ways in which any number of words may match.
    fn add_several(&self, row: &[Fit], next: &mut [Fit], word: &Word) {
        let mut reached = Fit::Never;
        for index in 0..row.len() {
            // A word without a known beginning may stand for no word at all.
            let stays = word.head.is_empty() && row[index] > Fit::Never;
            if stays || reached > Fit::Never {
                raise(&mut next[index], Fit::Possible);
            }
            let Some(PatternToken::Word(pattern)) = self.tokens.get(index) else { continue };
            if row[index] > Fit::Never && fit_word(pattern, word) > Fit::Never {
                reached = Fit::Possible;
            }
        }
        for index in 0..row.len() {
            // Behind a `**` more words may follow, and they may match the tokens after it.
            let is_rest = matches!(self.tokens.get(index), Some(PatternToken::Rest));
            if is_rest && next[index] > Fit::Never {
                next[index..].iter_mut().for_each(|fit| raise(fit, Fit::Possible));
            }
        }
    }

    /// `**` may stand for no word.
    fn skip_rests(&self, row: &mut [Fit]) {
        for (index, token) in self.tokens.iter().enumerate() {
            if *token == PatternToken::Rest {
                let here = row[index];
                raise(&mut row[index + 1], here);
            }
        }
    }
}

fn raise(fit: &mut Fit, other: Fit) {
    *fit = (*fit).max(other);
}

fn fit_word(pattern: &WordPattern, word: &Word) -> Fit {
    match word.extent {
        WordExtent::Exact if pattern.matches(&word.head) => Fit::Certain,
        WordExtent::Exact => Fit::Never,
        WordExtent::One => pattern.fit_beginning(&word.head),
        WordExtent::Several => pattern.fit_beginning(&word.head).min(Fit::Possible),
    }
}

impl ShellLine {
    /// The calls that read the output of a call, directly or through others.
    pub fn readers(&self, index: usize) -> Vec<usize> {
        let mut found = Vec::new();
        let mut open = self.calls.get(index).map(|call| call.into.clone()).unwrap_or_default();
        while let Some(next) = open.pop() {
            if found.contains(&next) {
                continue;
            }
            found.push(next);
            open.extend(self.calls.get(next).map(|call| call.into.as_slice()).unwrap_or_default());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::library::command::read_command;

    fn pattern(text: &str) -> CommandPattern {
        CommandPattern::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    /// The best fit of the calls of a command.
    fn fit(text: &str, command: &str) -> Fit {
        let line = read_command(command);
        line.calls.iter().map(|call| pattern(text).fit(call)).max().unwrap_or(Fit::Never)
    }

    #[test]
    fn words_match_with_stars_and_braces() {
        let check = |pattern: &str, yes: &[&str], no: &[&str]| {
            let pattern = WordPattern::parse(pattern).unwrap();
            assert!(yes.iter().all(|text| pattern.matches(text)), "{pattern:?} {yes:?}");
            assert!(!no.iter().any(|text| pattern.matches(text)), "{pattern:?} {no:?}");
        };
        check("push", &["push"], &["pus", "pushx", ""]);
        check("pu*", &["pu", "push"], &["p", "xpu"]);
        check("*a*b*", &["ab", "xaxbx"], &["ba", "a"]);
        check("{sh,ba*}-{x,y}", &["sh-x", "bash-y"], &["sh", "sh-z"]);
        check("a\\*\\{", &["a*{"], &["ax{"]);
        assert!(WordPattern::parse("{a,b").is_err());
        assert!(WordPattern::parse(&"{a,b}".repeat(7)).is_err());
    }

    #[test]
    fn a_computed_word_may_match() {
        for (command, expected) in [
            ("git push origin", Fit::Certain),
            ("git status", Fit::Never),
            ("git $X", Fit::Possible),
            ("git \"$X\"", Fit::Possible),
            ("git \"pu$X\" o", Fit::Possible),
            ("git \"sta$X\"", Fit::Never),
            ("git sta$X", Fit::Never),
            ("git $X push", Fit::Possible),
            ("git st $X push", Fit::Never),
            ("$X push", Fit::Possible),
            ("\"$HOME\"/bin/git push", Fit::Certain),
            ("git push $X", Fit::Certain),
            ("git p*", Fit::Possible),
            ("git {push,x}", Fit::Possible),
        ] {
            assert_eq!(fit("git push **", command), expected, "{command}");
        }
        assert_eq!(fit("git ** push **", "git st $X push"), Fit::Certain);
        assert_eq!(fit("git ** push", "git st $X"), Fit::Possible);
        assert_eq!(fit("git * x", "git \"$X\" x"), Fit::Certain);
        assert_eq!(fit("git * x", "git $X x"), Fit::Possible);
    }

    proptest! {
        /// A command of known words matches as a plain comparison of words says.
        #[test]
        fn known_words_match_exactly_or_not(
            words in prop::collection::vec("[ab]{1,2}", 1..5),
            tokens in prop::collection::vec(prop_oneof!["[ab]{1,2}", Just("*".to_owned()), Just("**".to_owned())], 1..5),
        ) {
            fn matches(words: &[String], tokens: &[String]) -> bool {
                match (tokens.split_first(), words.split_first()) {
                    (None, None) => true,
                    (None, Some(_)) => false,
                    (Some((token, rest)), _) if token == "**" => {
                        (0..=words.len()).any(|skip| matches(&words[skip..], rest))
                    }
                    (Some((token, rest)), Some((word, words))) => (token == "*" || token == word) && matches(words, rest),
                    (Some(_), None) => false,
                }
            }
            prop_assume!(tokens[0] != "**");
            let pattern = CommandPattern::parse(&tokens).unwrap();
            let exact: Vec<Word> = words.iter().map(Word::exact).collect();
            let expected = if matches(&words, &tokens) { Fit::Certain } else { Fit::Never };
            prop_assert_eq!(pattern.fit_sequence(&exact), expected);
        }

        /// For every value of a computed word: a match is never called impossible, and a certain one always holds.
        #[test]
        fn a_computed_word_is_never_misjudged(
            before in prop::collection::vec("[ab]{1,2}", 1..3),
            values in prop::collection::vec("[ab]{1,2}", 0..3),
            after in prop::collection::vec("[ab]{1,2}", 0..3),
            tokens in prop::collection::vec(prop_oneof!["[ab]{1,2}", Just("*".to_owned()), Just("**".to_owned())], 1..5),
        ) {
            prop_assume!(tokens[0] != "**");
            let pattern = CommandPattern::parse(&tokens).unwrap();
            let exact = |words: &[String]| words.iter().map(Word::exact).collect::<Vec<_>>();
            let computed = [exact(&before), vec![Word::unknown()], exact(&after)].concat();
            let real = [exact(&before), exact(&values), exact(&after)].concat();
            match (pattern.fit_sequence(&computed), pattern.fit_sequence(&real)) {
                (Fit::Certain, found) => prop_assert_eq!(found, Fit::Certain),
                (Fit::Never, found) => prop_assert_eq!(found, Fit::Never),
                (Fit::Possible, _) => {}
            }
        }
    }
}
