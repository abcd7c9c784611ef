//! The grammar of patches.

use super::{PATCH_FILES_MAX, PATCH_LEN_MAX, PatchChange, PatchChunk, PatchError, PatchLine, quote};

const BEGIN: &str = "*** Begin Patch";
const END: &str = "*** End Patch";
const ADD: &str = "*** Add File: ";
const DELETE: &str = "*** Delete File: ";
const UPDATE: &str = "*** Update File: ";
const MOVE: &str = "*** Move to: ";
const END_OF_FILE: &str = "*** End of File";
const CONTEXT: &str = "@@";

/// Reads the changes of a patch.
pub fn parse(text: &str) -> Result<Vec<PatchChange>, PatchError> {
    if text.len() > PATCH_LEN_MAX {
        return Err(PatchError::Text(format!("it is longer than {} MiB", PATCH_LEN_MAX >> 20)));
    }
    let mut changes = Vec::new();
    let mut reader = LineReader::between_markers(text)?;
    while let Some((number, line)) = reader.next() {
        if changes.len() >= PATCH_FILES_MAX {
            return Err(PatchError::Text(format!("it changes more than {PATCH_FILES_MAX} files")));
        }
        changes.push(reader.read_change(number, line)?);
    }
    if changes.is_empty() {
        return Err(PatchError::Text("No files were modified.".into()));
    }
    Ok(changes)
}

/// The lines between the markers of a patch, with their numbers.
struct LineReader<'a> {
    lines: std::iter::Peekable<std::vec::IntoIter<(usize, &'a str)>>,
}

impl<'a> LineReader<'a> {
    /// The lines of a patch. Models put a here-document around it at times; its two lines are left out.
    fn between_markers(text: &'a str) -> Result<Self, PatchError> {
        let trimmed = text.trim();
        let skipped = text[..text.len() - text.trim_start().len()].matches('\n').count();
        let mut lines: Vec<(usize, &str)> =
            trimmed.lines().enumerate().map(|(index, line)| (skipped + index + 1, line)).collect();
        if let [(_, first), .., (_, last)] = lines.as_slice()
            && ["<<EOF", "<<'EOF'", "<<\"EOF\""].contains(first)
            && last.trim() == "EOF"
        {
            lines = lines[1..lines.len() - 1].to_vec();
        }
        match lines.as_slice() {
            [(_, first), .., (_, last)] if first.trim() == BEGIN && last.trim() == END => {
                let inner = lines[1..lines.len() - 1].to_vec();
                Ok(Self { lines: inner.into_iter().peekable() })
            }
            [(_, first), ..] if first.trim() == BEGIN => {
                Err(PatchError::Text(format!("The last line of the patch must be '{END}'")))
            }
            _ => Err(PatchError::Text(format!("The first line of the patch must be '{BEGIN}'"))),
        }
    }

    fn next(&mut self) -> Option<(usize, &'a str)> {
        self.lines.next()
    }

    /// The next line, if it begins no change of another file.
    fn next_of_change(&mut self) -> Option<(usize, &'a str)> {
        self.lines.next_if(|(_, line)| !is_header(line.trim_end()))
    }

    fn read_change(&mut self, number: usize, line: &str) -> Result<PatchChange, PatchError> {
        let header = line.trim();
        if let Some(path) = header.strip_prefix(ADD) {
            return self.read_added(number, path.trim());
        }
        if let Some(path) = header.strip_prefix(DELETE) {
            return Ok(PatchChange::Delete { path: checked_path(number, path)? });
        }
        if let Some(path) = header.strip_prefix(UPDATE) {
            return self.read_update(number, path.trim());
        }
        Err(wrong_header(number, header))
    }

    fn read_added(&mut self, number: usize, path: &str) -> Result<PatchChange, PatchError> {
        let path = checked_path(number, path)?;
        let mut content = String::new();
        while let Some((number, line)) = self.next_of_change() {
            let Some(added) = line.strip_prefix('+') else { return Err(wrong_header(number, line.trim())) };
            content.push_str(added);
            content.push('\n');
        }
        Ok(PatchChange::Add { path, content })
    }

    fn read_update(&mut self, number: usize, path: &str) -> Result<PatchChange, PatchError> {
        let path = checked_path(number, path)?;
        let move_to = match self.lines.next_if(|(_, line)| line.trim_end().starts_with(MOVE)) {
            Some((number, line)) => Some(checked_path(number, line.trim_end().trim_start_matches(MOVE))?),
            None => None,
        };
        let mut chunks: Vec<PatchChunk> = Vec::new();
        while let Some((number, line)) = self.next_of_change() {
            read_chunk_line(&mut chunks, number, line)?;
        }
        let empty = |chunk: &PatchChunk| chunk.lines.is_empty();
        if chunks.last().is_some_and(empty) || chunks.is_empty() && move_to.is_none() {
            let message = format!("Update file hunk for path '{}' is empty", quote(&path));
            return Err(PatchError::Line { line: number, message });
        }
        Ok(PatchChange::Update { path, move_to, chunks })
    }
}

/// Adds one line of an update to its chunks.
fn read_chunk_line(chunks: &mut Vec<PatchChunk>, number: usize, line: &str) -> Result<(), PatchError> {
    let bare = line.trim_end();
    let is_context = bare == CONTEXT || bare.starts_with("@@ ");
    let ended = chunks.last().is_some_and(|chunk| chunk.at_end);
    if ended && bare.is_empty() {
        return Ok(());
    }
    if is_context {
        if chunks.last().is_some_and(|chunk| chunk.lines.is_empty()) {
            return Err(unexpected(number, line));
        }
        let context = bare.strip_prefix("@@ ").map(str::to_owned).filter(|text| !text.trim().is_empty());
        chunks.push(PatchChunk { context, ..PatchChunk::default() });
        return Ok(());
    }
    if ended {
        let message =
            format!("Expected update hunk to start with a @@ context marker, got: '{}'", quote(line));
        return Err(PatchError::Line { line: number, message });
    }
    if bare == END_OF_FILE {
        let Some(chunk) = chunks.last_mut().filter(|chunk| !chunk.lines.is_empty()) else {
            let message = "Update hunk does not contain any lines".into();
            return Err(PatchError::Line { line: number, message });
        };
        chunk.at_end = true;
        return Ok(());
    }
    let parsed = match line.chars().next() {
        // Models leave out the space of an empty context line.
        None => PatchLine::Context(String::new()),
        Some(' ') => PatchLine::Context(line[1..].to_owned()),
        Some('+') => PatchLine::Added(line[1..].to_owned()),
        Some('-') => PatchLine::Removed(line[1..].to_owned()),
        Some(_) => return Err(unexpected(number, line)),
    };
    if chunks.is_empty() {
        chunks.push(PatchChunk::default());
    }
    chunks.last_mut().into_iter().for_each(|chunk| chunk.lines.push(parsed.clone()));
    Ok(())
}

/// Whether a line begins the change of a file. Inside of an update such a line has a sign before it.
fn is_header(line: &str) -> bool {
    [ADD, DELETE, UPDATE].iter().any(|header| line.starts_with(header)) || line == END
}

fn checked_path(number: usize, path: &str) -> Result<String, PatchError> {
    let path = path.trim();
    if path.is_empty() || path.contains('\0') {
        return Err(PatchError::Line { line: number, message: "the path is empty or has a NUL".into() });
    }
    Ok(path.to_owned())
}

fn wrong_header(number: usize, line: &str) -> PatchError {
    let message = format!(
        "'{}' is not a valid hunk header. Valid hunk headers: '{ADD}{{path}}', '{DELETE}{{path}}', '{UPDATE}{{path}}'",
        quote(line)
    );
    PatchError::Line { line: number, message }
}

fn unexpected(number: usize, line: &str) -> PatchError {
    let message = format!(
        "Unexpected line found in update hunk: '{}'. Every line should start with ' ' (context line), '+' (added line), \
         or '-' (removed line)",
        quote(line)
    );
    PatchError::Line { line: number, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(lines: &str) -> String {
        format!("*** Begin Patch\n{lines}\n*** End Patch")
    }

    #[test]
    fn a_patch_with_every_kind_of_change_is_read() {
        let text = body(
            "*** Add File: path/add.py\n+abc\n+def\n*** Delete File: path/delete.py\n\
             *** Update File: path/update.py\n*** Move to: path/update2.py\n@@ def f():\n-    pass\n+    return 123\n\
             @@\n one\n+two\n*** End of File",
        );
        let change = |context: Option<&str>, lines: Vec<PatchLine>, at_end| PatchChunk {
            context: context.map(str::to_owned),
            lines,
            at_end,
        };
        let expected = vec![
            PatchChange::Add { path: "path/add.py".into(), content: "abc\ndef\n".into() },
            PatchChange::Delete { path: "path/delete.py".into() },
            PatchChange::Update {
                path: "path/update.py".into(),
                move_to: Some("path/update2.py".into()),
                chunks: vec![
                    change(
                        Some("def f():"),
                        vec![
                            PatchLine::Removed("    pass".into()),
                            PatchLine::Added("    return 123".into()),
                        ],
                        false,
                    ),
                    change(
                        None,
                        vec![PatchLine::Context("one".into()), PatchLine::Added("two".into())],
                        true,
                    ),
                ],
            },
        ];
        assert_eq!(parse(&text).unwrap(), expected);
        assert_eq!(parse(&format!("\n  {}\n\n", text.replace('\n', "\r\n"))).unwrap(), expected);
        assert_eq!(parse(&format!("<<'EOF'\n{text}\nEOF\n")).unwrap(), expected);
    }

    #[test]
    fn a_marker_behind_a_sign_is_text() {
        let text = body("*** Update File: a\n *** Update File: b\n-x\n+*** End Patch\n+@@ y");
        let Ok(changes) = parse(&text) else { panic!("it is valid") };
        let PatchChange::Update { chunks, .. } = &changes[0] else { panic!("it is an update") };
        assert_eq!(chunks.len(), 1);
        assert_eq!(chunks[0].lines.len(), 4);
    }

    #[test]
    fn errors_say_where_and_why() {
        let cases = [
            ("", "Invalid patch: The first line of the patch must be '*** Begin Patch'"),
            ("*** Begin Patch", "Invalid patch: The last line of the patch must be '*** End Patch'"),
            (
                "*** Begin Patch\n*** Add File: x\n+y",
                "Invalid patch: The last line of the patch must be '*** End Patch'",
            ),
            ("*** Begin Patch\n*** End Patch", "Invalid patch: No files were modified."),
            (
                "*** Begin Patch\n*** Update File: test.py\n*** End Patch",
                "Invalid patch hunk on line 2: Update file hunk for path 'test.py' is empty",
            ),
            (
                "*** Begin Patch\n*** Frobnicate: x\n*** End Patch",
                "Invalid patch hunk on line 2: '*** Frobnicate: x' is not a valid hunk header. Valid hunk headers: '*** Add File: {path}', '*** Delete File: {path}', '*** Update File: {path}'",
            ),
            (
                "*** Begin Patch\n*** Add File: x\nno sign\n*** End Patch",
                "Invalid patch hunk on line 3: 'no sign' is not a valid hunk header. Valid hunk headers: '*** Add File: {path}', '*** Delete File: {path}', '*** Update File: {path}'",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n@@\nno sign\n*** End Patch",
                "Invalid patch hunk on line 4: Unexpected line found in update hunk: 'no sign'. Every line should start with ' ' (context line), '+' (added line), or '-' (removed line)",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n@@\n+a\n*** End of File\n+b\n*** End Patch",
                "Invalid patch hunk on line 6: Expected update hunk to start with a @@ context marker, got: '+b'",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n@@\n*** End of File\n*** End Patch",
                "Invalid patch hunk on line 4: Update hunk does not contain any lines",
            ),
            (
                "*** Begin Patch\n*** Delete File: \n*** End Patch",
                "Invalid patch hunk on line 2: '*** Delete File:' is not a valid hunk header. Valid hunk headers: '*** Add File: {path}', '*** Delete File: {path}', '*** Update File: {path}'",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).unwrap_err().to_string(), expected, "{text:?}");
        }
        assert!(parse(&" ".repeat(PATCH_LEN_MAX + 1)).is_err());
    }
}
