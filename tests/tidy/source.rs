//! Splits the sources and pages of the repository into types, comments, sentences and messages.

use std::{fs, path::Path};

/// Directories whose sources are read.
const SOURCES: &[&str] = &["crates", "testkit", "tests", "bench", "fuzz"];
/// Names of directories that are not read: output of tools, and measured results.
const SKIPPED_DIRS: &[&str] = &["target", "results", "locks", "node_modules", ".git"];

/// All sources and pages.
pub struct Texts {
    sources: Vec<Source>,
    pages: Vec<(String, String)>,
}

impl Texts {
    /// Reads the repository that this test belongs to.
    pub fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut texts = Self { sources: Vec::new(), pages: Vec::new() };
        for dir in SOURCES {
            texts.collect(&root, dir);
        }
        for name in entries(&root, "") {
            if name.ends_with(".md") {
                texts.add(&root, name);
            }
        }
        texts.collect(&root, "docs");
        assert!(texts.sources.len() > 100 && texts.pages.len() > 5, "the repository was not found");
        texts
    }

    /// The Rust files.
    pub fn sources(&self) -> impl Iterator<Item = &Source> {
        self.sources.iter()
    }

    /// Paths and texts of the Markdown files.
    pub fn pages(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pages.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    fn collect(&mut self, root: &Path, dir: &str) {
        for name in entries(root, dir) {
            let path = format!("{dir}/{name}");
            if root.join(&path).is_dir() {
                if !SKIPPED_DIRS.contains(&name.as_str()) {
                    self.collect(root, &path);
                }
            } else {
                self.add(root, path);
            }
        }
    }

    fn add(&mut self, root: &Path, path: String) {
        let read =
            |path: &str| fs::read_to_string(root.join(path)).expect("a file of the repository can be read");
        if path.ends_with(".rs") {
            self.sources.push(Source::new(&path, &read(&path)));
        } else if path.ends_with(".md") {
            self.pages.push((path.clone(), read(&path)));
        }
    }
}

fn entries(root: &Path, dir: &str) -> Vec<String> {
    let listed = fs::read_dir(root.join(dir)).expect("a directory of the repository can be listed");
    let mut names: Vec<String> =
        listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// One Rust file.
pub struct Source {
    /// Its path, from the top of the repository.
    pub path: String,
    /// Its text.
    pub text: String,
    comments: Vec<Comment>,
    /// String literals with their lines.
    strings: Vec<(usize, String)>,
    /// The line of the first `#[cfg(test)]`; test code follows.
    tests_from: usize,
}

/// Adjacent comment lines.
pub struct Comment {
    /// Whether it is a doc comment.
    pub is_doc: bool,
    /// Numbers and texts of its lines, without slashes.
    lines: Vec<(usize, String)>,
}

impl Comment {
    /// Its sentences, with the lines on which they begin.
    pub fn sentences(&self) -> Vec<(usize, String)> {
        split_sentences(self.lines.iter().map(|(line, text)| (*line, text.as_str())))
    }
}

impl Source {
    /// Splits a file.
    pub fn new(path: &str, text: &str) -> Self {
        let (comments, strings) = scan(text);
        let tests_from =
            text.lines().position(|line| line.trim() == "#[cfg(test)]").map_or(usize::MAX, |at| at + 1);
        Self { path: path.to_owned(), text: text.to_owned(), comments, strings, tests_from }
    }

    /// The crate that it belongs to, by its directory.
    pub fn package(&self) -> &str {
        let depth = if self.path.starts_with("crates/") || self.path.starts_with("testkit/") { 2 } else { 1 };
        let end = self.path.match_indices('/').nth(depth - 1).map_or(self.path.len(), |(at, _)| at);
        &self.path[..end]
    }

    /// Whether it is part of the program that users run.
    pub fn is_production(&self) -> bool {
        self.path.starts_with("crates/") && self.path.contains("/src/")
    }

    /// Numbers and texts of the lines before its unit tests.
    pub fn production_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate().map(|(at, line)| (at + 1, line));
        numbered.take_while(|(line, _)| *line < self.tests_from)
    }

    /// Lines and names of the types that it defines.
    pub fn types(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().filter_map(|(at, line)| Some((at + 1, defined_type(line)?)))
    }

    /// The type of each method in an `impl` block that is of no trait; a type is named once for each of its methods.
    /// Reads the layout that rustfmt gives.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        let mut of = None;
        self.text.lines().filter_map(move |line| {
            if !line.starts_with(' ') && !line.is_empty() {
                of = implemented_type(line);
            }
            of.filter(|_| is_method(line))
        })
    }

    /// Its comments.
    pub fn comments(&self) -> impl Iterator<Item = &Comment> {
        self.comments.iter()
    }

    /// String literals of several words outside of tests, with their lines.
    pub fn messages(&self) -> Vec<(usize, String)> {
        let message = |(line, text): &&(usize, String)| *line < self.tests_from && text.trim().contains(' ');
        self.strings.iter().filter(message).cloned().collect()
    }
}

/// The type of the `impl` block that a line begins; none for a trait's.
fn implemented_type(line: &str) -> Option<&str> {
    let mut rest = line.strip_prefix("impl")?;
    if rest.starts_with('<') {
        let mut depth = 0;
        let end = rest.find(|letter: char| {
            depth += i32::from(letter == '<') - i32::from(letter == '>');
            depth == 0
        })?;
        rest = &rest[end + 1..];
    }
    let name = rest.trim_start();
    let is_trait = name.contains(" for ");
    (!is_trait).then(|| &name[..name.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(name.len())])
}

/// Whether a line begins a function one level deep.
fn is_method(line: &str) -> bool {
    let is_modifier = |word: &&str| word.starts_with("pub") || ["const", "async", "unsafe"].contains(word);
    line.strip_prefix("    ")
        .is_some_and(|code| code.split(' ').find(|word| !is_modifier(word)) == Some("fn"))
}

/// The type that a line defines. An indented alias belongs to a trait, which names it.
fn defined_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let code = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1.trim_start(),
        Some(rest) if rest.starts_with(' ') => rest.trim_start(),
        _ => code,
    };
    let (keyword, rest) = code.split_once(' ')?;
    if !["struct", "enum", "trait", "union", "type"].contains(&keyword)
        || keyword == "type" && line.starts_with(' ')
    {
        return None;
    }
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
    let name = &rest[..end];
    name.starts_with(|letter: char| letter.is_ascii_uppercase()).then_some(name)
}

/// The comments and string literals of a Rust file.
fn scan(text: &str) -> (Vec<Comment>, Vec<(usize, String)>) {
    let mut comments: Vec<Comment> = Vec::new();
    let mut strings = Vec::new();
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        match bytes[at] {
            b'\n' => line += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                let end = text[at..].find('\n').map_or(text.len(), |len| at + len);
                add_comment_line(&mut comments, line, &text[at..end]);
                at = end;
                continue;
            }
            b'\'' => {
                at = after_quote(text, at);
                continue;
            }
            b'"' => {
                let (end, contents) = string_at(text, at);
                strings.push((line, contents.to_owned()));
                line += contents.matches('\n').count();
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    (comments, strings)
}

/// The offset behind a character literal, or behind the quote of a lifetime.
fn after_quote(text: &str, at: usize) -> usize {
    let rest = &text[at + 1..];
    if let Some(escaped) = rest.strip_prefix('\\') {
        return escaped
            .char_indices()
            .skip(1)
            .find(|(_, letter)| *letter == '\'')
            .map_or(at + 1, |(len, _)| at + len + 3);
    }
    let mut letters = rest.char_indices();
    letters.next();
    match letters.next() {
        Some((len, '\'')) => at + len + 2,
        _ => at + 1,
    }
}

/// The end of a string literal, and its contents.
fn string_at(text: &str, at: usize) -> (usize, &str) {
    let hashes = text[..at].bytes().rev().take_while(|byte| *byte == b'#').count();
    let is_raw = text[..at - hashes].ends_with('r');
    let rest = &text[at + 1..];
    if is_raw {
        let close = format!("\"{}", "#".repeat(hashes));
        let len = rest.find(&close).unwrap_or(rest.len());
        return ((at + 1 + len + close.len()).min(text.len()), &rest[..len]);
    }
    let mut escaped = false;
    for (len, letter) in rest.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return (at + 1 + len + 1, &rest[..len]),
            _ => {}
        }
    }
    (text.len(), rest)
}

fn add_comment_line(comments: &mut Vec<Comment>, line: usize, text: &str) {
    let is_doc = (text.starts_with("///") && !text.starts_with("////")) || text.starts_with("//!");
    let text = text.trim_start_matches('/').trim_start_matches('!').trim().to_owned();
    match comments.last_mut() {
        Some(last)
            if last.is_doc == is_doc && last.lines.last().is_some_and(|(before, _)| before + 1 == line) =>
        {
            last.lines.push((line, text));
        }
        _ => comments.push(Comment { is_doc, lines: vec![(line, text)] }),
    }
}

/// Sentences of a Markdown page, without code blocks; each cell of a table counts by itself.
pub fn sentences_of_page(text: &str) -> Vec<(usize, String)> {
    let mut sentences = Vec::new();
    let mut in_code = false;
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            let cells: Vec<&str> = if line.starts_with('|') { line.split('|').collect() } else { vec![line] };
            for cell in cells {
                let cell = cell.trim().trim_start_matches(['#', '-', '*', '>', ' ']);
                sentences.extend(split_sentences([(at + 1, cell)].into_iter()));
            }
        }
    }
    sentences
}

/// Splits adjacent lines into sentences: at a full stop, at a colon at the end of a line, or at an empty
/// line.
fn split_sentences<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<(usize, String)> {
    let mut sentences: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (line, text) in lines {
        if text.is_empty() {
            open = false;
            continue;
        }
        let mut rest = text.trim_start_matches(['-', '*', ' ']);
        while !rest.is_empty() {
            let end = sentence_end(rest);
            let (sentence, after) = rest.split_at(end);
            match sentences.last_mut() {
                Some((_, last)) if open => {
                    last.push(' ');
                    last.push_str(sentence.trim());
                }
                _ => sentences.push((line, sentence.trim().to_owned())),
            }
            open = !sentence.trim_end().ends_with(['.', '?', '!', ':']);
            rest = after.trim_start();
        }
    }
    sentences
}

/// The offset at which the first sentence of a text ends.
fn sentence_end(text: &str) -> usize {
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        let next = letters.peek().map(|(_, next)| *next);
        if matches!(letter, '.' | '?' | '!') && next == Some(' ') {
            return at + letter.len_utf8();
        }
    }
    text.len()
}
