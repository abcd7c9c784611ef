//! Patches of a model: the parser and the search never panic and end in time, and lines that a patch does not name
//! keep their bytes.
#![no_main]

use brain::patch::{PatchChange, FilePatch, PatchLine, apply_chunks};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    // A NUL separates the file from its patch.
    let (content, patch) = text.split_once('\0').unwrap_or(("a\nb\nc\n", text));
    let whole = format!("*** Begin Patch\n*** Update File: f\n{patch}\n*** End Patch");
    for patch in [patch, whole.as_str()] {
        let Ok(patch) = FilePatch::parse(patch) else { continue };
        for change in &patch.changes {
            let PatchChange::Update { path, chunks, .. } = change else { continue };
            let Ok(result) = apply_chunks(path, content, chunks) else { continue };
            let changed = |line: &PatchLine| !matches!(line, PatchLine::Context(_));
            let lines = || chunks.iter().flat_map(|chunk| &chunk.lines);
            if !lines().any(changed) {
                assert_eq!(result.trim_end_matches(['\r', '\n']), content.trim_end_matches(['\r', '\n']));
            }
            let added = lines().filter(|line| matches!(line, PatchLine::Added(_))).count();
            let removed = lines().filter(|line| matches!(line, PatchLine::Removed(_))).count();
            let before = content.split_inclusive('\n').count();
            // One removed line may be the empty text behind the last line end, once for each chunk.
            let after = result.split_inclusive('\n').count();
            assert!(after <= before + added && after + removed >= before + added);
        }
    }
});
