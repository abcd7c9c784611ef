//! Patterns of file names, as Deep Agents' `glob` and the file filter of its `grep` understand them.
//!
//! A pattern without `/` matches the name of a file at any depth. A pattern with `/` matches the path below the directory
//! that is searched; a `/` at its beginning only says that. `*` and `?` stay within a name, `**` stands for directories,
//! `[a-z]`, `[!a]` and `[^a]` for one letter, `{a,b}` for alternatives, also nested. A name that begins with a dot
//! matches only a pattern that has the dot, and `**` does not go into such a directory.
//!
//! Invariant: the time of a match is at most the product of the lengths of pattern and path, for each alternative.
//! Trust: patterns come from models. Their length and the number and length of their alternatives have limits.

/// The longest pattern in bytes.
pub const PATTERN_LEN_MAX: usize = 4096;
/// The most patterns that alternatives may stand for.
const ALTERNATIVES_MAX: usize = 1000;
/// The most bytes of all of these patterns.
const EXPANDED_LEN_MAX: usize = 256 << 10;

/// Why a text is no pattern. The words are Deep Agents'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// It has `..` in it, or is too long.
    #[error("invalid_pattern")]
    Invalid,
    /// It has too many alternatives, or too long ones.
    #[error("pattern_too_broad")]
    TooBroad,
}

/// A pattern of file names.
#[derive(Debug, Clone)]
pub struct FilePattern {
    forms: Vec<PatternForm>,
    kind: PatternKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PatternKind {
    /// It concerns the last part of a path.
    Name,
    /// It concerns the whole path.
    Path,
}

/// One of the alternatives: its parts.
#[derive(Debug, Clone)]
struct PatternForm {
    parts: Vec<PatternPart>,
}

#[derive(Debug, Clone)]
enum PatternPart {
    /// `**`.
    AnyDepth,
    Name(NamePattern),
}

/// Which parts of the alternatives the next part of a path may match: pairs of a form and a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatternPosition(Vec<(u16, u16)>);

impl FilePattern {
    /// Reads a pattern.
    pub fn new(pattern: &str) -> Result<Self, PatternError> {
        if pattern.len() > PATTERN_LEN_MAX || pattern.split(['/', '\\']).any(|part| part == "..") {
            return Err(PatternError::Invalid);
        }
        let kind = if pattern.contains('/') { PatternKind::Path } else { PatternKind::Name };
        let expanded = expand(pattern)?;
        let forms = expanded.iter().filter_map(|form| PatternForm::parse(form, kind)).collect();
        Ok(Self { forms, kind })
    }

    /// Whether a file matches. `path` is its path below the directory that is searched.
    pub fn matches(&self, path: &str) -> bool {
        let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
        let mut at = self.start();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return self.matches_in(&at, part);
            }
            match self.enter(&at, part) {
                Some(below) => at = below,
                None => return false,
            }
        }
        false
    }

    /// The position at the root of a search.
    pub fn start(&self) -> PatternPosition {
        let mut position = PatternPosition(Vec::new());
        for (form, parts) in numbered(&self.forms) {
            self.reach(&mut position, form, 0, parts);
        }
        position
    }

    /// The position inside a directory; `None` if nothing below it can match.
    pub fn enter(&self, at: &PatternPosition, directory: &str) -> Option<PatternPosition> {
        if self.kind == PatternKind::Name {
            return Some(at.clone());
        }
        let mut below = PatternPosition(Vec::new());
        self.step(at, directory, &mut below);
        // A form that has matched all of its parts matches the directory itself, and nothing in it.
        below.0.retain(|(form, part)| usize::from(*part) < self.forms[usize::from(*form)].parts.len());
        (!below.0.is_empty()).then_some(below)
    }

    /// Whether a file in the directory of this position matches.
    pub fn matches_in(&self, at: &PatternPosition, file: &str) -> bool {
        if self.kind == PatternKind::Name {
            let only = |form: &PatternForm| match form.parts.as_slice() {
                [PatternPart::Name(name)] => name.matches(file),
                _ => false,
            };
            return self.forms.iter().any(only);
        }
        let mut behind = PatternPosition(Vec::new());
        self.step(at, file, &mut behind);
        behind.0.iter().any(|(form, part)| usize::from(*part) == self.forms[usize::from(*form)].parts.len())
    }

    fn step(&self, at: &PatternPosition, name: &str, to: &mut PatternPosition) {
        for (form, part) in &at.0 {
            let parts = &self.forms[usize::from(*form)].parts;
            match parts.get(usize::from(*part)) {
                Some(PatternPart::AnyDepth) if !name.starts_with('.') => {
                    self.reach(to, *form, *part, parts);
                    if usize::from(*part) + 1 == parts.len() {
                        to.add(*form, part + 1);
                    }
                }
                Some(PatternPart::Name(pattern)) if pattern.matches(name) => {
                    self.reach(to, *form, part + 1, parts);
                }
                _ => {}
            }
        }
    }

    /// Adds a part, and the part behind it if it may match nothing. A last `**` matches at least one part.
    fn reach(&self, position: &mut PatternPosition, form: u16, part: u16, parts: &[PatternPart]) {
        position.add(form, part);
        let is_any_depth = matches!(parts.get(usize::from(part)), Some(PatternPart::AnyDepth));
        if is_any_depth && usize::from(part) + 1 < parts.len() {
            position.add(form, part + 1);
        }
    }
}

impl PatternPosition {
    fn add(&mut self, form: u16, part: u16) {
        // The parts of a form come in order, so that one which is there already is among the last.
        if !self.0.iter().rev().take(4).any(|known| *known == (form, part)) {
            self.0.push((form, part));
        }
    }
}

fn numbered(forms: &[PatternForm]) -> impl Iterator<Item = (u16, &[PatternPart])> {
    (0_u16..).zip(forms.iter().map(|form| form.parts.as_slice()))
}

impl PatternForm {
    /// `None` for a form that can match no file.
    fn parse(form: &str, kind: PatternKind) -> Option<Self> {
        if kind == PatternKind::Name {
            return Some(Self { parts: vec![PatternPart::Name(NamePattern::parse(form))] });
        }
        let mut parts: Vec<PatternPart> = Vec::new();
        for part in form.split('/').filter(|part| !matches!(*part, "" | ".")) {
            match part {
                "**" if matches!(parts.last(), Some(PatternPart::AnyDepth)) => {}
                "**" => parts.push(PatternPart::AnyDepth),
                name => parts.push(PatternPart::Name(NamePattern::parse(name))),
            }
        }
        // A slash at the end names a directory.
        let names_directory = form.ends_with('/') && !matches!(parts.last(), Some(PatternPart::AnyDepth));
        (!parts.is_empty() && !names_directory).then_some(Self { parts })
    }
}

/// A pattern of one part of a path.
#[derive(Debug, Clone)]
struct NamePattern {
    items: Vec<PatternItem>,
    starts_with_dot: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternItem {
    /// `*`.
    AnyText,
    /// `?`.
    AnyChar,
    Char(char),
    /// `[a-z_]`, or `[!a-z_]` if it is negated.
    Set {
        ranges: Vec<(char, char)>,
        negated: bool,
    },
}

impl NamePattern {
    fn parse(pattern: &str) -> Self {
        let chars: Vec<char> = pattern.chars().collect();
        let mut items = Vec::new();
        let mut at = 0;
        while let Some(first) = chars.get(at) {
            at += 1;
            match first {
                '*' if items.last() == Some(&PatternItem::AnyText) => {}
                '*' => items.push(PatternItem::AnyText),
                '?' => items.push(PatternItem::AnyChar),
                '[' => match parse_set(&chars[at..]) {
                    Some((set, len)) => {
                        items.push(set);
                        at += len;
                    }
                    None => items.push(PatternItem::Char('[')),
                },
                plain => items.push(PatternItem::Char(*plain)),
            }
        }
        Self { items, starts_with_dot: pattern.starts_with('.') }
    }

    fn matches(&self, name: &str) -> bool {
        if name.starts_with('.') && !self.starts_with_dot {
            return false;
        }
        let name: Vec<char> = name.chars().collect();
        let (mut item, mut at) = (0, 0);
        // Where to go on if the rest does not match: after the last `*`, which then takes one more character.
        let mut retry = None;
        loop {
            match (self.items.get(item), name.get(at)) {
                (Some(PatternItem::AnyText), _) => {
                    retry = Some((item, at));
                    item += 1;
                    continue;
                }
                (Some(wanted), Some(found)) if wanted.matches(*found) => {
                    (item, at) = (item + 1, at + 1);
                    continue;
                }
                (None, None) => return true,
                _ => {}
            }
            match retry {
                Some((star, taken)) if taken < name.len() => {
                    retry = Some((star, taken + 1));
                    (item, at) = (star + 1, taken + 1);
                }
                _ => return false,
            }
        }
    }
}

impl PatternItem {
    fn matches(&self, found: char) -> bool {
        match self {
            Self::AnyText | Self::AnyChar => true,
            Self::Char(wanted) => *wanted == found,
            Self::Set { ranges, negated } => {
                ranges.iter().any(|(low, high)| (low..=high).contains(&&found)) != *negated
            }
        }
    }
}

/// Reads the set that follows a `[`, and its length with the `]`; `None` if it has no end.
fn parse_set(chars: &[char]) -> Option<(PatternItem, usize)> {
    let negated = matches!(chars.first(), Some('!' | '^'));
    let begin = usize::from(negated);
    // A `]` that comes first belongs to the set.
    let len = chars.iter().skip(begin + 1).position(|char| *char == ']')? + begin + 1;
    let mut members = &chars[begin..len];
    let mut ranges = Vec::new();
    while let Some((first, rest)) = members.split_first() {
        match rest {
            ['-', last, rest @ ..] => {
                ranges.push((*first, *last));
                members = rest;
            }
            rest => {
                ranges.push((*first, *first));
                members = rest;
            }
        }
    }
    Some((PatternItem::Set { ranges, negated }, len + 1))
}

/// The patterns that a pattern with alternatives stands for.
fn expand(pattern: &str) -> Result<Vec<String>, PatternError> {
    let mut done: Vec<String> = Vec::new();
    // A pattern, and how many of its bytes have no alternatives.
    let mut waiting = vec![(pattern.to_owned(), 0)];
    while let Some((form, plain)) = waiting.pop() {
        let Some((begin, end)) = find_group(&form, plain) else {
            done.push(form);
            continue;
        };
        let alternatives = split_alternatives(&form[begin + 1..end]);
        if alternatives.len() < 2 {
            waiting.push((form, end + 1));
            continue;
        }
        let count = done.len() + waiting.len() + alternatives.len();
        if count > ALTERNATIVES_MAX || count * form.len() > EXPANDED_LEN_MAX {
            return Err(PatternError::TooBroad);
        }
        for alternative in alternatives.iter().rev() {
            waiting.push((format!("{}{alternative}{}", &form[..begin], &form[end + 1..]), begin));
        }
    }
    Ok(done)
}

/// The first group in braces behind `from`: where it begins and ends. A brace without an end makes the rest plain.
fn find_group(form: &str, from: usize) -> Option<(usize, usize)> {
    let begin = from + form.get(from..)?.find('{')?;
    let mut depth = 0_usize;
    for (at, byte) in form.bytes().enumerate().skip(begin) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((begin, at));
        }
    }
    None
}

/// Splits the inside of a group at its own commas, not at those of groups in it.
fn split_alternatives(group: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut begin) = (0_i32, 0);
    for (at, byte) in group.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b',' if depth == 0 => {
                parts.push(&group[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&group[begin..]);
    parts
}

#[cfg(test)]
mod tests;
