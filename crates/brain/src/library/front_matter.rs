//! Front matter: the YAML between two lines `---` at the beginning of a Markdown file.
//!
//! Invariant: only texts, lists of texts and maps of texts are read. Anchors and aliases are refused, so that a short
//! file cannot become a large value.
//! Trust: the file may come from a hostile repository.

use yaml_rust2::{
    Event,
    parser::Parser,
    scanner::{Marker, ScanError},
};

use super::LibraryError;

/// The longest front matter.
const FRONT_LEN_MAX: usize = 16 << 10;
/// The most values, over all fields.
const VALUES_MAX: usize = 512;

/// A Markdown file with front matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontMatter<'a> {
    file: &'a str,
    fields: Vec<MatterField>,
    /// The text after the front matter.
    pub body: &'a str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct MatterField {
    name: String,
    value: FieldValue,
    line: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum FieldValue {
    Text(String),
    List(Vec<String>),
    Map(Vec<(String, String)>),
}

impl<'a> FrontMatter<'a> {
    /// Reads the front matter of a file.
    pub fn parse(file: &'a str, text: &'a str) -> Result<Self, LibraryError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (front, body) = split(text).ok_or_else(|| {
            LibraryError::new(
                file,
                1,
                "the file has no front matter",
                "begin the file with a line ---, the fields, and a line ---",
            )
        })?;
        if front.len() > FRONT_LEN_MAX {
            let fault = format!("the front matter is longer than {FRONT_LEN_MAX} bytes");
            return Err(LibraryError::new(file, 1, fault, "move text below the front matter"));
        }
        Ok(Self { file, fields: FieldReader::new(file, front).read()?, body })
    }

    /// An error about a field, or about the file if the field is absent.
    pub fn fault(&self, field: &str, fault: impl Into<String>, mend: impl Into<String>) -> LibraryError {
        let line = self.find(field).map_or(1, |field| field.line);
        LibraryError::new(self.file, line, fault, mend)
    }

    /// Refuses fields that have no meaning, so that a misspelt one is not ignored.
    pub fn check_names(&self, known: &[&str]) -> Result<(), LibraryError> {
        match self.fields.iter().find(|field| !known.contains(&field.name.as_str())) {
            None => Ok(()),
            Some(field) => Err(LibraryError::new(
                self.file,
                field.line,
                format!("there is no field {:?}", shorten(&field.name)),
                format!("use one of: {}", known.join(", ")),
            )),
        }
    }

    /// A text; `None` if it is absent or empty.
    pub fn text(&self, name: &str, len_max: usize) -> Result<Option<String>, LibraryError> {
        match self.find(name).map(|field| &field.value) {
            None => Ok(None),
            Some(FieldValue::Text(text)) if text.chars().count() > len_max => Err(self.fault(
                name,
                format!("{name} has {} characters; at most {len_max} are allowed", text.chars().count()),
                "make it shorter",
            )),
            Some(FieldValue::Text(text)) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
            Some(_) => {
                Err(self.fault(name, format!("{name} is no text"), format!("write {name}: some text")))
            }
        }
    }

    /// A text that must be there.
    pub fn required(&self, name: &str, len_max: usize) -> Result<String, LibraryError> {
        let text = self.text(name, len_max)?;
        text.ok_or_else(|| self.fault(name, format!("{name} is missing"), format!("add a line {name}: …")))
    }

    /// A list of words: a YAML list, or one text with spaces or commas between the words.
    pub fn words(
        &self,
        name: &str,
        count_max: usize,
        len_max: usize,
    ) -> Result<Option<Vec<String>>, LibraryError> {
        let words: Vec<String> = match self.find(name).map(|field| &field.value) {
            None => return Ok(None),
            Some(FieldValue::List(items)) => items.iter().map(|item| item.trim().to_owned()).collect(),
            Some(FieldValue::Text(text)) => split_words(text),
            Some(FieldValue::Map(_)) => {
                return Err(self.fault(
                    name,
                    format!("{name} is no list"),
                    format!("write {name}: [one, two]"),
                ));
            }
        };
        if words.len() > count_max || words.iter().any(|word| word.len() > len_max) {
            let fault = format!("{name} may have at most {count_max} entries of {len_max} characters");
            return Err(self.fault(name, fault, "make it shorter"));
        }
        Ok(Some(words))
    }

    /// A map of texts; empty if it is absent.
    pub fn map(&self, name: &str) -> Result<Vec<(String, String)>, LibraryError> {
        match self.find(name).map(|field| &field.value) {
            None => Ok(Vec::new()),
            Some(FieldValue::Map(entries)) => Ok(entries.clone()),
            Some(FieldValue::Text(text)) if text.is_empty() => Ok(Vec::new()),
            Some(_) => {
                Err(self.fault(name, format!("{name} is no map"), "write lines of the form key: value"))
            }
        }
    }

    fn find(&self, name: &str) -> Option<&MatterField> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// The front matter and the rest of a text.
fn split(text: &str) -> Option<(&str, &str)> {
    let first = text.lines().next()?;
    if first.trim_end() != "---" {
        return None;
    }
    let begin = first.len() + text[first.len()..].find('\n')? + 1;
    let mut offset = begin;
    for line in text[begin..].split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some((&text[begin..offset], text[offset + line.len()..].trim()));
        }
        offset += line.len();
    }
    None
}

/// Splits at spaces and commas, but not inside of brackets: `Bash(git:*), Read`.
fn split_words(text: &str) -> Vec<String> {
    let mut depth = 0_usize;
    let words = text.split(|letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (letter == ',' || letter.is_whitespace())
    });
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Reads fields from the events of the YAML parser, which does not recurse when it is asked for one event after another.
struct FieldReader<'a> {
    file: &'a str,
    front: &'a str,
    parser: Parser<std::str::Chars<'a>>,
    values: usize,
}

impl<'a> FieldReader<'a> {
    fn new(file: &'a str, front: &'a str) -> Self {
        Self { file, front, parser: Parser::new_from_str(front), values: 0 }
    }

    fn read(mut self) -> Result<Vec<MatterField>, LibraryError> {
        let mut fields: Vec<MatterField> = Vec::new();
        loop {
            let (event, mark) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentStart | Event::Nothing => {}
                Event::MappingStart(..) => break,
                // Only comments, or nothing.
                Event::StreamEnd | Event::DocumentEnd => return Ok(fields),
                Event::Scalar(text, ..) if text.is_empty() => {}
                _ => {
                    return Err(self.fault(
                        mark,
                        "the front matter is no list of fields",
                        "write lines of the form name: value",
                    ));
                }
            }
        }
        loop {
            let (event, mark) = self.next()?;
            let name = match event {
                Event::Scalar(name, ..) => name,
                Event::MappingEnd => return Ok(fields),
                _ => return Err(self.fault(mark, "the name of a field is no text", "write name: value")),
            };
            if fields.iter().any(|field| field.name == name) {
                let fault = format!("the field {:?} is there twice", shorten(&name));
                return Err(self.fault(mark, fault, "remove one of them"));
            }
            let line = self.line(&mark);
            fields.push(MatterField { name, value: self.value()?, line });
        }
    }

    fn value(&mut self) -> Result<FieldValue, LibraryError> {
        match self.next()? {
            (Event::Scalar(text, ..), _) => Ok(FieldValue::Text(text)),
            (Event::SequenceStart(..), _) => Ok(FieldValue::List(self.texts()?)),
            (Event::MappingStart(..), _) => {
                let texts = self.texts()?;
                let pairs = texts.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                Ok(FieldValue::Map(pairs.collect()))
            }
            (_, mark) => {
                Err(self.fault(mark, "the value is no text, list or map", "write a text or a list of texts"))
            }
        }
    }

    /// The texts up to the end of a list or map.
    fn texts(&mut self) -> Result<Vec<String>, LibraryError> {
        let mut texts = Vec::new();
        loop {
            match self.next()? {
                (Event::Scalar(text, ..), _) => texts.push(text),
                (Event::SequenceEnd | Event::MappingEnd, _) => return Ok(texts),
                (_, mark) => {
                    return Err(self.fault(
                        mark,
                        "lists and maps may hold only texts",
                        "write one text for each entry",
                    ));
                }
            }
        }
    }

    fn next(&mut self) -> Result<(Event, Marker), LibraryError> {
        let (event, mark) = self.parser.next_token().map_err(|error| self.scan_error(&error))?;
        self.values += 1;
        let (anchor, tag) = match &event {
            Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
            Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => (*anchor, tag.is_some()),
            Event::Alias(_) => (1, false),
            _ => (0, false),
        };
        if anchor > 0 || tag {
            return Err(self.fault(
                mark,
                "anchors, aliases and tags are not allowed",
                "write the value itself",
            ));
        }
        if self.values > VALUES_MAX {
            return Err(self.fault(mark, format!("there are more than {VALUES_MAX} values"), "remove some"));
        }
        Ok((event, mark))
    }

    fn scan_error(&self, error: &ScanError) -> LibraryError {
        let fault = format!("not valid YAML: {}", error.info());
        self.fault(*error.marker(), fault, "put quotes around a text with a colon or other special letters")
    }

    fn fault(&self, mark: Marker, fault: impl Into<String>, mend: impl Into<String>) -> LibraryError {
        LibraryError::new(self.file, self.line(&mark), fault, mend)
    }

    /// The line in the file, in which the front matter begins in the second line. YAML counts more letters as the end of
    /// a line than editors do.
    fn line(&self, mark: &Marker) -> usize {
        self.front.chars().take(mark.index()).filter(|letter| *letter == '\n').count() + 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> (usize, String) {
        let error = FrontMatter::parse("f.md", text).unwrap_err();
        (error.line, error.fault)
    }

    #[test]
    fn fields_and_body_are_read() {
        let text = "---\nname: a-b\n# comment\ntools: [ls, 'read_file']\nmeta:\n  k: v\n  n: 1\nlong: |\n  two\n  lines\n---\n\n# Title\n--- no end\n";
        let front = FrontMatter::parse("f.md", text).unwrap();
        assert_eq!(front.required("name", 9).unwrap(), "a-b");
        assert_eq!(front.words("tools", 9, 9).unwrap().unwrap(), ["ls", "read_file"]);
        assert_eq!(
            front.map("meta").unwrap(),
            [("k".to_owned(), "v".to_owned()), ("n".to_owned(), "1".to_owned())]
        );
        assert_eq!(front.text("long", 20).unwrap().unwrap(), "two\nlines");
        assert_eq!(front.body, "# Title\n--- no end");
        assert_eq!(front.text("none", 1).unwrap(), None);
    }

    #[test]
    fn words_may_be_one_text() {
        let front = FrontMatter::parse("f.md", "---\ntools: a, b Bash(git *:x)  c\n---\n").unwrap();
        assert_eq!(front.words("tools", 9, 20).unwrap().unwrap(), ["a", "b", "Bash(git *:x)", "c"]);
    }

    #[test]
    fn faults_name_their_line() {
        assert_eq!(fault("no front"), (1, "the file has no front matter".into()));
        assert_eq!(fault("---\nname: x\n").1, "the file has no front matter");
        assert_eq!(
            fault("---\na: &x [1]\nb: *x\n---\n"),
            (2, "anchors, aliases and tags are not allowed".into())
        );
        assert_eq!(fault("---\na: 1\nb:\n  - [x]\n---\n"), (4, "lists and maps may hold only texts".into()));
        assert_eq!(fault("---\na: 1\na: 2\n---\n"), (3, "the field \"a\" is there twice".into()));
        assert_eq!(fault("---\na: b: c\n---\n").0, 2);
        assert_eq!(fault("---\na: 1\r\r\u{85}\u{2028}\na: 2\n---\n").0, 3);
        let front = FrontMatter::parse("f.md", "---\nname: 12345\ntool: x\n---\n").unwrap();
        assert_eq!(
            front.required("name", 4).unwrap_err().to_string(),
            "f.md:2: name has 5 characters; at most 4 are allowed"
        );
        let error = front.check_names(&["name", "tools"]).unwrap_err();
        assert_eq!((error.line, error.mend.as_str()), (3, "use one of: name, tools"));
        assert_eq!(front.required("none", 4).unwrap_err().fault, "none is missing");
    }

    #[test]
    fn deep_and_large_values_are_refused() {
        let deep = format!("---\na: {}\n---\n", "[".repeat(8000));
        assert!(FrontMatter::parse("f.md", &deep).is_err());
        let many = format!("---\na: [{}]\n---\n", "x,".repeat(600));
        assert_eq!(fault(&many).1, "there are more than 512 values");
        assert!(fault(&format!("---\na: {}\n---\n", "x".repeat(20_000))).1.contains("longer than"));
    }
}
