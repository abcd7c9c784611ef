//! Words of a command: their text after quotes are removed, as far as it is known.

use rable::{Node, NodeKind};

/// A word, as far as it is known before the command runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// The whole word if it is known; otherwise the text before the first computed part.
    pub head: String,
    /// The text after the last computed part; empty for a known word.
    pub tail: String,
    /// How much of the word is known.
    pub extent: WordExtent,
}

/// How much of a word is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordExtent {
    /// All of it.
    Exact,
    /// It is one word that begins with the head.
    One,
    /// It is any number of words; if there are some, the first one begins with the head.
    Several,
}

impl Word {
    /// A word that is known.
    pub fn exact(text: impl Into<String>) -> Self {
        Self { head: text.into(), tail: String::new(), extent: WordExtent::Exact }
    }

    /// Any number of words of which nothing is known.
    pub fn unknown() -> Self {
        Self { head: String::new(), tail: String::new(), extent: WordExtent::Several }
    }

    /// The text of a word that is known.
    pub fn as_exact(&self) -> Option<&str> {
        (self.extent == WordExtent::Exact).then_some(self.head.as_str())
    }

    /// The name of the program that this word starts: without its directory, which may be computed.
    pub fn to_program(&self) -> Self {
        let text = if self.extent == WordExtent::Exact { &self.head } else { &self.tail };
        match text.rsplit_once('/') {
            Some((_, name)) if !name.is_empty() => Self::exact(name),
            _ => self.clone(),
        }
    }

    /// The word with every occurrence of a placeholder computed, as `xargs -I` and `find -exec` replace it.
    pub(super) fn with_placeholder(&self, placeholder: &str) -> Self {
        match self.head.split_once(placeholder) {
            Some((head, _)) if !placeholder.is_empty() => {
                Self { head: head.to_owned(), tail: String::new(), extent: WordExtent::One }
            }
            _ => self.clone(),
        }
    }
}

/// The quotes around a position in a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quote {
    None,
    Single,
    Double,
}

/// Collects the text of a word over its parts. Quotes may begin in one part and end in another.
struct WordBuilder {
    word: Word,
    quote: Quote,
}

/// The word of a node of the grammar.
pub(super) fn read_word(node: &Node) -> Word {
    let NodeKind::Word { parts, .. } = &node.kind else { return Word::unknown() };
    let mut builder = WordBuilder { word: Word::exact(""), quote: Quote::None };
    for (index, part) in parts.iter().enumerate() {
        builder.add_part(&part.kind, index == 0);
    }
    builder.word
}

impl WordBuilder {
    fn add_part(&mut self, part: &NodeKind, is_first: bool) {
        match part {
            NodeKind::WordLiteral { value } => self.add_literal(value, is_first),
            NodeKind::AnsiCQuote { decoded, .. } => self.push(decoded),
            NodeKind::LocaleString { inner, .. } => self.push(&inner.replace('\\', "")),
            // The name of a pipe, or a number.
            NodeKind::ProcessSubstitution { .. } => self.compute(WordExtent::One),
            NodeKind::ArithmeticExpansion { expression: Some(_) } => self.compute(WordExtent::One),
            NodeKind::ArithmeticExpansion { .. } if self.quote == Quote::Double => {
                self.compute(WordExtent::One)
            }
            NodeKind::ParamExpansion { param, .. } if self.quote == Quote::Double && !is_list(param) => {
                self.compute(WordExtent::One)
            }
            NodeKind::CommandSubstitution { .. } | NodeKind::ParamLength { .. }
                if self.quote == Quote::Double =>
            {
                self.compute(WordExtent::One)
            }
            _ => self.compute(WordExtent::Several),
        }
    }

    fn add_literal(&mut self, text: &str, is_first: bool) {
        let mut letters = text.char_indices().peekable();
        while let Some((at, letter)) = letters.next() {
            match (self.quote, letter) {
                (Quote::Single, '\'') | (Quote::Double, '"') => self.quote = Quote::None,
                (Quote::Single, letter) => self.push_letter(letter),
                (Quote::None, '\'') => self.quote = Quote::Single,
                (Quote::None, '"') => self.quote = Quote::Double,
                (quote, '\\') => {
                    let escaped = letters.peek().map(|(_, next)| *next);
                    let removes =
                        quote == Quote::None || matches!(escaped, Some('$' | '`' | '"' | '\\' | '\n'));
                    match escaped {
                        Some(next) if removes => {
                            letters.next();
                            if next != '\n' {
                                self.push_letter(next);
                            }
                        }
                        _ => self.push_letter('\\'),
                    }
                }
                // A substitution that the grammar left as text.
                (quote, '$' | '`' | '<' | '>') if is_substitution(&text[at..]) => {
                    let extent = if quote == Quote::Double { WordExtent::One } else { WordExtent::Several };
                    return self.compute(extent);
                }
                // The shell replaces a pattern by the names of files.
                (Quote::None, '*' | '?' | '[') => self.compute(WordExtent::Several),
                (Quote::None, '~') if is_first && at == 0 => self.compute(WordExtent::One),
                (_, letter) => self.push_letter(letter),
            }
        }
    }

    fn push(&mut self, text: &str) {
        text.chars().for_each(|letter| self.push_letter(letter));
    }

    fn push_letter(&mut self, letter: char) {
        match self.word.extent {
            WordExtent::Exact => self.word.head.push(letter),
            WordExtent::One | WordExtent::Several => self.word.tail.push(letter),
        }
    }

    fn compute(&mut self, extent: WordExtent) {
        self.word.tail.clear();
        if self.word.extent != WordExtent::Several {
            self.word.extent = extent;
        }
    }
}

/// Whether a substitution begins here.
fn is_substitution(text: &str) -> bool {
    ["$(", "`", "<(", ">("].iter().any(|begin| text.starts_with(begin))
}

/// Whether a parameter gives several words even between double quotes.
fn is_list(parameter: &str) -> bool {
    parameter == "@" || parameter.contains("[@]")
}
