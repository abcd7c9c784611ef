//! Lines of the terminal view: pieces of text, each with a tone.
//!
//! Invariant: text enters a line only through [`TextLine::add`], which escapes it. So no text of a model, a tool or a
//! repository controls the terminal, and the only escape sequences are the colours of this module.
//! Invariant: tones only repeat what the words and signs say; without colours nothing is lost.

use proto::text::visible;
use unicode_width::UnicodeWidthChar as _;

/// The longest line, in characters: a longer one is cut.
pub const LINE_LEN_MAX: usize = 2000;

/// The meaning of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Ordinary text.
    Normal,
    /// Less important text.
    Faint,
    /// A heading.
    Strong,
    /// A success, or an added line.
    Good,
    /// A failure, or a removed line.
    Bad,
    /// Something that a person should look at.
    Notice,
}

impl Tone {
    fn code(self) -> Option<&'static str> {
        match self {
            Self::Normal => None,
            Self::Faint => Some("\x1b[2m"),
            Self::Strong => Some("\x1b[1m"),
            Self::Good => Some("\x1b[32m"),
            Self::Bad => Some("\x1b[31m"),
            Self::Notice => Some("\x1b[33m"),
        }
    }
}

/// Whether lines are printed with colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    /// With colours.
    Colours,
    /// As text alone.
    Monochrome,
}

/// The form of a line that is longer than the terminal is wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LineFit {
    /// The terminal breaks it: a person may want to copy it.
    #[default]
    Whole,
    /// It is cut.
    Cut,
    /// It is broken at blanks.
    Words,
}

/// One line of text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextLine {
    pieces: Vec<(Tone, String)>,
    fit: LineFit,
}

impl TextLine {
    /// A line that begins with a piece.
    pub fn new(tone: Tone, text: &str) -> Self {
        Self::default().add(tone, text)
    }

    /// Adds a piece. Tabs become blanks, and everything that a terminal would act on is escaped.
    #[must_use]
    pub fn add(mut self, tone: Tone, text: &str) -> Self {
        let have: usize = self.pieces.iter().map(|(_, piece)| piece.chars().count()).sum();
        let shown = visible(&text.replace('\t', "    "));
        let cut: String = shown.chars().take(LINE_LEN_MAX.saturating_sub(have)).collect();
        if !cut.is_empty() {
            self.pieces.push((tone, cut));
        }
        self
    }

    /// Says how the line fits into a narrow terminal.
    #[must_use]
    pub fn fit(self, fit: LineFit) -> Self {
        Self { fit, ..self }
    }

    /// The line as the lines of a terminal of this width.
    pub fn fold(&self, columns: usize) -> Vec<Self> {
        match (self.fit, self.pieces.as_slice()) {
            (LineFit::Cut, _) => vec![self.cut(columns)],
            (LineFit::Words, [(tone, text)]) => {
                wrap(text, columns).iter().map(|part| Self::new(*tone, part)).collect()
            }
            _ => vec![self.clone()],
        }
    }

    /// The text alone.
    pub fn to_text(&self) -> String {
        self.pieces.iter().map(|(_, text)| text.as_str()).collect()
    }

    /// The line as it is printed.
    pub fn print(&self, paint: Paint) -> String {
        if paint == Paint::Monochrome {
            return self.to_text();
        }
        let piece = |(tone, text): &(Tone, String)| match tone.code() {
            Some(code) => format!("{code}{text}\x1b[m"),
            None => text.clone(),
        };
        self.pieces.iter().map(piece).collect()
    }

    /// The number of columns that the line takes.
    pub fn columns(&self) -> usize {
        self.pieces.iter().map(|(_, text)| columns_of(text)).sum()
    }

    /// The beginning of the line that fits into this many columns, with `…` if something is missing.
    #[must_use]
    pub fn cut(&self, columns: usize) -> Self {
        if self.columns() <= columns {
            return self.clone();
        }
        let mut left = columns.saturating_sub(1);
        let mut pieces = Vec::new();
        for (tone, text) in &self.pieces {
            let mut kept = String::new();
            for character in text.chars() {
                let wide = columns_of_char(character);
                if wide > left {
                    left = 0;
                    break;
                }
                left -= wide;
                kept.push(character);
            }
            pieces.push((*tone, kept));
            if left == 0 {
                break;
            }
        }
        if let Some((_, last)) = pieces.last_mut()
            && columns > 0
        {
            last.push('…');
        }
        Self { pieces, fit: self.fit }
    }
}

fn columns_of(text: &str) -> usize {
    text.chars().map(columns_of_char).sum()
}

fn columns_of_char(character: char) -> usize {
    character.width().unwrap_or(0)
}

/// Breaks text into lines of at most this many columns, at blanks where possible.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(8);
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let mut rest = visible(&line.replace('\t', "    "));
        while columns_of(&rest) > columns {
            let at = break_at(&rest, columns);
            let after = rest.split_off(at);
            lines.push(rest);
            rest = after.trim_start_matches(' ').to_owned();
        }
        lines.push(rest);
    }
    lines
}

/// The byte behind the last blank that fits, or behind the last character that does.
fn break_at(line: &str, columns: usize) -> usize {
    let (mut used, mut blank, mut end) = (0, None, line.len());
    for (at, character) in line.char_indices() {
        let wide = columns_of_char(character);
        if used + wide > columns {
            end = at;
            break;
        }
        used += wide;
        if character == ' ' {
            blank = Some(at + 1);
        }
    }
    // A first character that is wider than the terminal stands alone.
    let least = line.chars().next().map_or(line.len(), char::len_utf8);
    blank.unwrap_or(end).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_controls_the_terminal() {
        let line = TextLine::new(Tone::Bad, "a\x1b[2Jb\rc").add(Tone::Normal, "\u{202e}d\te\n");
        assert_eq!(line.to_text(), "a\\u{1b}[2Jb\\rc\\u{202e}d    e\\n");
        assert_eq!(line.print(Paint::Monochrome), line.to_text());
        assert_eq!(line.print(Paint::Colours), "\x1b[31ma\\u{1b}[2Jb\\rc\x1b[m\\u{202e}d    e\\n");
    }

    #[test]
    fn a_line_is_cut_at_columns_not_at_characters() {
        let cut = |text: &str, columns| TextLine::new(Tone::Normal, text).cut(columns).to_text();
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("漢字漢字", 5), "漢字…");
        assert_eq!(cut("漢字漢字", 4), "漢…");
        assert_eq!(cut("abc", 0), "");
        assert_eq!(cut(&"x".repeat(LINE_LEN_MAX + 5), usize::MAX).len(), LINE_LEN_MAX);
        let two = TextLine::new(Tone::Good, "ab").add(Tone::Bad, "cdef").cut(4);
        assert_eq!(two.to_text(), "abc…");
    }

    #[test]
    fn each_line_fits_in_its_own_way() {
        let fold = |fit| {
            let line = TextLine::new(Tone::Normal, "one two three").fit(fit);
            line.fold(9).iter().map(TextLine::to_text).collect::<Vec<_>>()
        };
        assert_eq!(fold(LineFit::Whole), ["one two three"]);
        assert_eq!(fold(LineFit::Cut), ["one two …"]);
        assert_eq!(fold(LineFit::Words), ["one two ", "three"]);
    }

    #[test]
    fn text_is_wrapped_at_blanks() {
        assert_eq!(wrap("one two three four", 9), ["one two ", "three ", "four"]);
        assert_eq!(wrap("abcdefghijkl\n\nx", 8), ["abcdefgh", "ijkl", "", "x"]);
        assert_eq!(wrap("漢字漢字漢字", 8), ["漢字漢字", "漢字"]);
        assert_eq!(wrap("a\x1bb", 20), ["a\\u{1b}b"]);
    }
}
