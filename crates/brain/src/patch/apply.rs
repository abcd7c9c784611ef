//! Applies the chunks of an update to the content of a file.

use super::{
    PatchChunk, PatchError, PatchLine, quote,
    seek::{LineSeeker, SeekError},
};

/// The content of a file after its chunks were applied. `path` is for errors.
///
/// A chunk that only adds lines goes behind its context line, or to the end of the file if it has none. The result
/// ends with a line end, as codex's does.
pub fn apply_chunks(path: &str, content: &str, chunks: &[PatchChunk]) -> Result<String, PatchError> {
    let file = SplitFile::new(content);
    let mut edits = find_edits(path, &file, chunks)?;
    edits.sort_by_key(|edit| edit.place);
    let mut result = String::with_capacity(content.len());
    let mut next = 0;
    for edit in &edits {
        for index in next..edit.place.max(next) {
            file.push_line(&mut result, index);
        }
        next = next.max(edit.place);
        for line in &edit.lines {
            match line {
                PatchLine::Context(_) if next < file.lines.len() => {
                    file.push_line(&mut result, next);
                    next += 1;
                }
                PatchLine::Context(_) => {}
                PatchLine::Removed(_) => next += 1,
                PatchLine::Added(text) => {
                    result.push_str(text);
                    result.push_str(file.line_end);
                }
            }
        }
    }
    for index in next..file.lines.len() {
        file.push_line(&mut result, index);
    }
    Ok(result)
}

/// The lines of a chunk and the place in the file from which on they apply.
struct ChunkEdit<'a> {
    place: usize,
    lines: Vec<&'a PatchLine>,
}

fn find_edits<'a>(
    path: &str,
    file: &SplitFile<'_>,
    chunks: &'a [PatchChunk],
) -> Result<Vec<ChunkEdit<'a>>, PatchError> {
    let mut seeker = LineSeeker::new(&file.lines);
    let mut edits = Vec::with_capacity(chunks.len());
    let mut from = 0;
    for chunk in chunks {
        if let Some(context) = &chunk.context {
            let missing = || format!("Failed to find context '{}' in {path}", quote(context));
            from = 1 + found(path, seeker.find(&[context.as_str()], from, false), missing)?;
        }
        let old = old_lines(&chunk.lines);
        if old.is_empty() {
            let place = if chunk.context.is_some() && !chunk.at_end { from } else { file.lines.len() };
            edits.push(ChunkEdit { place, lines: chunk.lines.iter().collect() });
            continue;
        }
        let missing = || {
            format!(
                "Failed to find expected lines in {path}:\n{}",
                quote(&old_lines(&chunk.lines).join("\n"))
            )
        };
        let (place, lines) = match seeker.find(&old, from, chunk.at_end) {
            // Models write the empty text behind the last line end as an empty line.
            Err(SeekError::Missing) if old.last() == Some(&"") && old.len() > 1 => {
                let shorter = without_last_empty(&chunk.lines);
                let shortened = &old[..old.len() - 1];
                (found(path, seeker.find(shortened, from, chunk.at_end), missing)?, shorter)
            }
            result => (found(path, result, missing)?, chunk.lines.iter().collect()),
        };
        from = place + lines.iter().filter(|line| !matches!(line, PatchLine::Added(_))).count();
        edits.push(ChunkEdit { place, lines });
    }
    Ok(edits)
}

fn found(
    path: &str,
    result: Result<usize, SeekError>,
    missing: impl Fn() -> String,
) -> Result<usize, PatchError> {
    result.map_err(|error| match error {
        SeekError::Missing => PatchError::Mismatch(missing()),
        SeekError::Cost => PatchError::Mismatch(format!(
            "The lines of the patch match too many places in {path}. Use smaller hunks with more specific context."
        )),
    })
}

fn old_lines(lines: &[PatchLine]) -> Vec<&str> {
    let old = |line: &'_ PatchLine| !matches!(line, PatchLine::Added(_));
    lines.iter().filter(|line| old(line)).map(text_of).collect()
}

fn text_of(line: &PatchLine) -> &str {
    match line {
        PatchLine::Context(text) | PatchLine::Added(text) | PatchLine::Removed(text) => text,
    }
}

/// The lines of a chunk without its last line of the old file, which is empty.
fn without_last_empty(lines: &[PatchLine]) -> Vec<&PatchLine> {
    let last = lines.iter().rposition(|line| !matches!(line, PatchLine::Added(_)));
    lines.iter().enumerate().filter(|(index, _)| Some(*index) != last).map(|(_, line)| line).collect()
}

/// A file as lines without their ends, and the ends.
struct SplitFile<'a> {
    lines: Vec<&'a str>,
    ends: Vec<&'a str>,
    /// The end of a new line: that of the first line.
    line_end: &'static str,
}

impl<'a> SplitFile<'a> {
    fn new(content: &'a str) -> Self {
        let (mut lines, mut ends) = (Vec::new(), Vec::new());
        for line in content.split_inclusive('\n') {
            let text = line.strip_suffix("\r\n").or_else(|| line.strip_suffix('\n')).unwrap_or(line);
            lines.push(text);
            ends.push(&line[text.len()..]);
        }
        let line_end = if ends.first() == Some(&"\r\n") { "\r\n" } else { "\n" };
        Self { lines, ends, line_end }
    }

    /// Adds a line of the file as it is. A last line without an end gets one.
    fn push_line(&self, result: &mut String, index: usize) {
        result.push_str(self.lines[index]);
        let end = self.ends[index];
        result.push_str(if end.is_empty() { self.line_end } else { end });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::FilePatch, *};
    use crate::patch::PatchChange;

    /// The content after a patch whose update has these lines.
    fn apply(content: &str, lines: &str) -> Result<String, String> {
        let text = format!("*** Begin Patch\n*** Update File: f\n{lines}\n*** End Patch");
        let patch = FilePatch::parse(&text).map_err(|error| error.to_string())?;
        let [PatchChange::Update { path, chunks, .. }] = patch.changes.as_slice() else {
            return Err("no update".into());
        };
        apply_chunks(path, content, chunks).map_err(|error| error.to_string())
    }

    #[test]
    fn chunks_change_their_lines_and_nothing_else() {
        let content = "foo\nbar\nbaz\nqux\n";
        assert_eq!(
            apply(content, "@@\n foo\n-bar\n+BAR\n@@\n baz\n-qux\n+QUX").unwrap(),
            "foo\nBAR\nbaz\nQUX\n"
        );
        assert_eq!(apply(content, "-foo\n-bar\n-baz\n-qux").unwrap(), "");
        assert_eq!(apply(content, "@@ bar\n+new").unwrap(), "foo\nbar\nnew\nbaz\nqux\n");
        assert_eq!(apply(content, "@@\n+new").unwrap(), "foo\nbar\nbaz\nqux\nnew\n");
        assert_eq!(apply("", "@@\n+new").unwrap(), "new\n");
        assert_eq!(apply("no end", "@@\n-no end\n+one").unwrap(), "one\n");
        assert_eq!(apply("a\nb", "@@\n-a\n+x").unwrap(), "x\nb\n");
    }

    #[test]
    fn a_context_line_chooses_among_equal_places() {
        let content = "fn a() {\n    x\n}\nfn b() {\n    x\n}\n";
        assert_eq!(
            apply(content, "@@ fn b() {\n-    x\n+    y").unwrap(),
            "fn a() {\n    x\n}\nfn b() {\n    y\n}\n"
        );
        assert_eq!(
            apply("x\nx\nx\n", "@@\n-x\n+y\n*** End of File").unwrap(),
            "x\nx\ny\n",
            "the end of the file is the last place"
        );
    }

    #[test]
    fn bytes_of_lines_that_stay_are_kept() {
        assert_eq!(apply("a\r\nb\r\nc\r\n", "@@\n a\n-b\n+B").unwrap(), "a\r\nB\r\nc\r\n");
        assert_eq!(apply("a  \nb\tx\n", "@@\n a\n-b\tx\n+c").unwrap(), "a  \nc\n");
        assert_eq!(apply("\u{201c}q\u{201d}\nb\n", "@@\n \"q\"\n-b\n+c").unwrap(), "\u{201c}q\u{201d}\nc\n");
    }

    #[test]
    fn an_empty_line_behind_the_last_one_is_tolerated() {
        assert_eq!(apply("a\nb\n", "@@\n a\n-b\n+c\n \n*** End of File").unwrap(), "a\nc\n");
        assert_eq!(apply("a\nb\n", "@@\n a\n b\n \n+c").unwrap(), "a\nb\nc\n");
    }

    #[test]
    fn lines_that_are_not_there_are_named() {
        assert_eq!(apply("a\n", "@@\n-b\n+c").unwrap_err(), "Failed to find expected lines in f:\nb");
        assert_eq!(apply("a\n", "@@ nope\n-a").unwrap_err(), "Failed to find context 'nope' in f");
        let order = apply("a\nb\n", "@@\n-b\n@@\n-a").unwrap_err();
        assert_eq!(order, "Failed to find expected lines in f:\na", "chunks go from the top to the end");
    }

    /// The update that makes one text of lines into another: one chunk with all lines.
    fn whole_chunk(before: &[String], after: &[String]) -> PatchChunk {
        let removed = before.iter().cloned().map(PatchLine::Removed);
        let lines = removed.chain(after.iter().cloned().map(PatchLine::Added)).collect();
        PatchChunk { context: None, lines, at_end: true }
    }

    fn text(lines: &[String]) -> String {
        lines.iter().map(|line| format!("{line}\n")).collect()
    }

    proptest! {
        #[test]
        fn a_patch_of_the_whole_file_makes_the_other_one(
            before in prop::collection::vec("[ab ]{0,3}", 1..8),
            after in prop::collection::vec("[ab ]{0,3}", 0..8),
        ) {
            let chunk = whole_chunk(&before, &after);
            prop_assert_eq!(apply_chunks("f", &text(&before), &[chunk]).unwrap(), text(&after));
        }

        #[test]
        fn one_changed_line_changes_one_line(
            before in prop::collection::hash_set("[a-z]{4,8}", 3..20),
            pick in any::<prop::sample::Index>(),
        ) {
            let before: Vec<String> = before.into_iter().collect();
            let index = pick.index(before.len());
            let mut lines = Vec::new();
            if index > 0 {
                lines.push(PatchLine::Context(before[index - 1].clone()));
            }
            lines.push(PatchLine::Removed(before[index].clone()));
            lines.push(PatchLine::Added("NEW".into()));
            let chunk = PatchChunk { context: None, lines, at_end: false };
            let mut after = before.clone();
            after[index] = "NEW".into();
            prop_assert_eq!(apply_chunks("f", &text(&before), &[chunk]).unwrap(), text(&after));
        }

        #[test]
        fn no_text_makes_it_panic(content in "(?s).{0,200}", lines in "([ +@-][ab@+ -]{0,3}\n){0,12}") {
            let _ = apply(&content, &lines);
        }
    }
}
