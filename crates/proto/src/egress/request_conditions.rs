//! Conditions of a rule on the parameters of a query and on headers: each must be there exactly once, with a value that
//! fits a pattern.
//!
//! Trust: servers split and decode queries, and fold the names of headers, in ways of their own. A request that they
//! could read differently is ambiguous: it fulfils no condition of a rule that allows, and every one of a rule that denies.

use std::collections::BTreeMap;

/// Most conditions of a kind in a rule, and the longest name or pattern of one, in bytes.
const CONDITIONS_MAX: usize = 32;
const TEXT_LEN_MAX: usize = 1024;
/// Longest value that is compared.
const VALUE_LEN_MAX: usize = 8 << 10;

/// Whether a request fulfils a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionFit {
    /// It does not.
    No,
    /// Some servers read a request that does, and some one that does not.
    Ambiguous,
    /// It does.
    Yes,
}

/// The values that a name must have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ValueConditions(Vec<(String, TextGlob)>);

/// A pattern of texts: `*` is any text, `?` any one character, `[a-z0-9]` one of these, and all else itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TextGlob(Vec<GlobPart>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum GlobPart {
    AnyText,
    /// One character from these ranges.
    OneOf(Vec<(u8, u8)>),
}

impl ValueConditions {
    /// Reads conditions on the parameters of a query.
    pub fn of_query(conditions: &BTreeMap<String, String>) -> Option<Self> {
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"&=;%+#[]".contains(&byte))
        };
        Self::read(conditions, is_name, str::to_owned)
    }

    /// Reads conditions on headers.
    pub fn of_headers(conditions: &BTreeMap<String, String>, is_name: impl Fn(&str) -> bool) -> Option<Self> {
        Self::read(conditions, is_name, str::to_ascii_lowercase)
    }

    fn read(
        conditions: &BTreeMap<String, String>,
        is_name: impl Fn(&str) -> bool,
        canonical: fn(&str) -> String,
    ) -> Option<Self> {
        let read = |(name, pattern): (&String, &String)| {
            let fits = name.len() <= TEXT_LEN_MAX && pattern.len() <= TEXT_LEN_MAX && is_name(name);
            Some((canonical(name), TextGlob::parse(pattern).filter(|_| fits)?))
        };
        let read: Vec<_> = conditions.iter().map(read).collect::<Option<_>>()?;
        let is_twice = |at: usize| read[at + 1..].iter().any(|(name, _)| *name == read[at].0);
        let sound = read.len() <= CONDITIONS_MAX && !(0..read.len()).any(is_twice);
        sound.then_some(Self(read))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a query fulfils all conditions.
    pub fn fit_query(&self, query: Option<&str>) -> ConditionFit {
        if self.is_empty() {
            return ConditionFit::Yes;
        }
        let query = query.unwrap_or_default();
        // Some servers end a parameter at a semicolon, too.
        if query.contains(';') {
            return ConditionFit::Ambiguous;
        }
        let mut parameters = Vec::new();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (Some(decoded), Some(value)) = (percent_decoded(name), percent_decoded(value)) else {
                return ConditionFit::Ambiguous;
            };
            // Escaped twice, it has two readings.
            if decoded.contains(&b'%') {
                return ConditionFit::Ambiguous;
            }
            parameters.push((name, folded(&decoded), value));
        }
        let fit = |(name, pattern): &(String, TextGlob)| {
            let key = folded(name.as_bytes());
            let mut named = parameters.iter().filter(|(_, folded, _)| *folded == key);
            match (named.next(), named.next()) {
                (None, _) => ConditionFit::No,
                (Some((own, _, value)), None) if own == name => pattern.fit_decoded(value),
                // Twice, or in a spelling that only some servers take for the name.
                _ => ConditionFit::Ambiguous,
            }
        };
        self.0.iter().map(fit).min().unwrap_or(ConditionFit::Yes)
    }

    /// Whether headers fulfil all conditions.
    pub fn fit_headers(&self, headers: &[(&str, &[u8])]) -> ConditionFit {
        // Some servers take an underscore for a hyphen.
        let folded = |name: &str| name.to_ascii_lowercase().replace('_', "-");
        let fit = |(name, pattern): &(String, TextGlob)| {
            let mut named = headers.iter().filter(|(own, _)| folded(own) == folded(name));
            match (named.next(), named.next()) {
                (None, _) => ConditionFit::No,
                (Some((own, value)), None) if own.eq_ignore_ascii_case(name) => {
                    pattern.fit(value.trim_ascii())
                }
                _ => ConditionFit::Ambiguous,
            }
        };
        self.0.iter().map(fit).min().unwrap_or(ConditionFit::Yes)
    }
}

impl TextGlob {
    fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if !bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
            return None;
        }
        let (mut parts, mut at) = (Vec::new(), 0);
        while let Some(byte) = bytes.get(at) {
            at += 1;
            parts.push(match byte {
                b'*' => GlobPart::AnyText,
                b'?' => GlobPart::OneOf(vec![(0, u8::MAX)]),
                b'[' => {
                    let len = 1 + bytes.get(at + 1..)?.iter().position(|byte| *byte == b']')?;
                    let ranges = parse_ranges(&bytes[at..at + len])?;
                    at += len + 1;
                    GlobPart::OneOf(ranges)
                }
                // Without its beginning it is surely a mistake.
                b']' => return None,
                byte => GlobPart::OneOf(vec![(*byte, *byte)]),
            });
        }
        Some(Self(parts))
    }

    /// Whether a decoded value of a query fits: a plus is a space for most servers, and itself for some.
    fn fit_decoded(&self, value: &[u8]) -> ConditionFit {
        if value.iter().any(u8::is_ascii_control) {
            return ConditionFit::Ambiguous;
        }
        let spaced: Vec<u8> = value.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
        match (self.fit(value), self.fit(&spaced)) {
            (one, other) if one == other => one,
            _ => ConditionFit::Ambiguous,
        }
    }

    /// Whether a text fits. Time is at most the product of both lengths.
    fn fit(&self, text: &[u8]) -> ConditionFit {
        if text.len() > VALUE_LEN_MAX {
            return ConditionFit::Ambiguous;
        }
        let (mut part, mut at) = (0, 0);
        // The last `*`, and the place in the text behind what it stands for.
        let mut star: Option<(usize, usize)> = None;
        while at < text.len() {
            match self.0.get(part) {
                Some(GlobPart::AnyText) => {
                    star = Some((part, at));
                    part += 1;
                }
                Some(GlobPart::OneOf(ranges))
                    if ranges.iter().any(|(first, last)| (*first..=*last).contains(&text[at])) =>
                {
                    part += 1;
                    at += 1;
                }
                _ => match &mut star {
                    Some((begin, end)) => {
                        *end += 1;
                        (part, at) = (*begin + 1, *end);
                    }
                    None => return ConditionFit::No,
                },
            }
        }
        match self.0[part..].iter().all(|part| *part == GlobPart::AnyText) {
            true => ConditionFit::Yes,
            false => ConditionFit::No,
        }
    }
}

/// Reads the inside of a pair of brackets, such as `a-z0-9`.
fn parse_ranges(text: &[u8]) -> Option<Vec<(u8, u8)>> {
    // Other patterns mean all other characters by that.
    if matches!(text, [b'!' | b'^', _, ..]) {
        return None;
    }
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < text.len() {
        let range = match text[at..] {
            [first, b'-', last, ..] => (first, last),
            [one, ..] => (one, one),
            [] => return None,
        };
        if range.0 > range.1 {
            return None;
        }
        at += if text.get(at + 1) == Some(&b'-') && text.len() > at + 2 { 3 } else { 1 };
        ranges.push(range);
    }
    Some(ranges)
}

/// A text without percent escapes; none if one of them is incomplete.
fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
        let (high, low) = (digit()?, digit()?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    Some(decoded)
}

/// A name as the least exact server compares it: without case and an index in brackets, with an underscore for what such
/// servers replace by one, up to a NUL.
fn folded(name: &[u8]) -> Vec<u8> {
    let front = name.iter().skip_while(|byte| matches!(byte, b' ' | b'+'));
    let front = front.take_while(|byte| !matches!(byte, b'[' | 0));
    front
        .map(|byte| match byte {
            b' ' | b'+' | b'.' => b'_',
            byte => byte.to_ascii_lowercase(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{
        ConditionFit::{Ambiguous, No, Yes},
        *,
    };

    fn conditions(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_query_has_each_parameter_once_with_a_value_that_fits() {
        let both = conditions(&[("page", "[0-9]*"), ("q", "a b*")]);
        let both = ValueConditions::of_query(&both).unwrap();
        for (query, expected) in [
            ("page=1&q=a%20b", Yes),
            ("page=12&q=a%20bc&more=1", Yes),
            ("q=a%20b&&page=%31", Yes),
            ("page=x&q=a%20b", No),
            ("page=1", No),
            ("", No),
            ("page=&q=a%20b", No),
            ("page=1&q=a+b", Ambiguous),
            ("page=1&page=2&q=a%20b", Ambiguous),
            ("page=1&Page=x&q=a%20b", Ambiguous),
            ("%70age=1&q=a%20b", Ambiguous),
            ("page[]=1&q=a%20b", Ambiguous),
            ("page%5B0%5D=1&q=a%20b", Ambiguous),
            ("+page=1&q=a%20b", Ambiguous),
            ("page%00x=1&q=a%20b", Ambiguous),
            ("%2570age=1&page=1&q=a%20b", Ambiguous),
            ("page=1;q=a%20b", Ambiguous),
            ("page=1&q=a%20b&x=%zz", Ambiguous),
            ("page=1&q=a%20b&x=%4", Ambiguous),
            ("page=1%00&q=a%20b", Ambiguous),
            ("page=1&q=a%20b%0d%0a", Ambiguous),
        ] {
            assert_eq!(both.fit_query(Some(query)), expected, "{query}");
        }
        assert_eq!((both.fit_query(None), ValueConditions::default().fit_query(None)), (No, Yes));
        let long = format!("page=1&q=a%20b{}", "x".repeat(VALUE_LEN_MAX));
        assert_eq!(both.fit_query(Some(&long)), Ambiguous);
    }

    #[test]
    fn headers_are_there_once_with_a_value_that_fits() {
        let read = ValueConditions::of_headers(&conditions(&[("X-Team", "a*"), ("accept", "*")]), |_| true);
        let both = read.unwrap();
        let fit = |headers: &[(&str, &str)]| {
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
            both.fit_headers(&headers)
        };
        assert_eq!(fit(&[("x-team", " ab "), ("Accept", "")]), Yes);
        assert_eq!(fit(&[("x-team", "b"), ("accept", "x")]), No);
        assert_eq!(fit(&[("x-team", "a")]), No);
        assert_eq!(fit(&[("x-team", "a"), ("accept", "x"), ("accept", "x")]), Ambiguous);
        assert_eq!(fit(&[("x-team", "a"), ("x_team", "b"), ("accept", "x")]), Ambiguous);
        assert_eq!(fit(&[("x_team", "a"), ("accept", "x")]), Ambiguous);
    }

    #[test]
    fn patterns_have_any_text_one_character_and_ranges() {
        let fit = |pattern: &str, text: &str| TextGlob::parse(pattern).unwrap().fit(text.as_bytes()) == Yes;
        for (pattern, fitting, other) in [
            ("", "", "a"),
            ("*", "", "\u{0}never"),
            ("a*b*c", "a1b2b3c", "a1b2b3"),
            ("?[a-c0]*", "xb", "xd"),
            ("v[0-9].[-x]", "v1.-", "v1.y"),
            ("[?][*][[]", "?*[", "aaa"),
            ("[]]", "]", "["),
            ("a/b*", "a/b/c", "a%2fb"),
        ] {
            assert!(fit(pattern, fitting), "{pattern} {fitting}");
            assert!(pattern == "*" || !fit(pattern, other), "{pattern} {other}");
        }
        let many = "*a".repeat(TEXT_LEN_MAX / 2);
        assert!(!fit(&many, &format!("{}b", "a".repeat(VALUE_LEN_MAX - 1))));
        for bad in ["[a", "a]", "[]", "[!a]", "[^a]", "[z-a]", "\u{e9}", "a\n"] {
            assert_eq!(TextGlob::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn conditions_with_odd_names_are_refused() {
        for name in ["", "a b", "a&b", "a=b", "a%20", "a[]", "a;b", "\u{e9}"] {
            assert_eq!(ValueConditions::of_query(&conditions(&[(name, "*")])), None, "{name:?}");
        }
        let twice = conditions(&[("X-A", "*"), ("x-a", "*")]);
        assert_eq!(ValueConditions::of_headers(&twice, |_| true), None);
        let many: BTreeMap<_, _> = (0..=CONDITIONS_MAX).map(|nr| (format!("a{nr}"), String::new())).collect();
        assert_eq!(ValueConditions::of_query(&many), None);
        assert_eq!(ValueConditions::of_query(&conditions(&[("a", &"a".repeat(TEXT_LEN_MAX + 1))])), None);
    }
}
