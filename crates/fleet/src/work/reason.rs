//! Finds the line of a failed step's output that says why it failed.
//!
//! The last line is often none: package managers end with the place of a log, an address or an advice.
//!
//! Trust: a repository's steps wrote the text. The result is one line of it, and is escaped by the caller.

/// Words of lines that say what went wrong.
const TELLING: &[&str] = &[
    "error",
    "err_",
    "fatal",
    "cannot",
    "can't",
    "could not",
    "couldn't",
    "failed",
    "not found",
    "no such",
    "denied",
];
/// Beginnings of lines that say nothing about the cause, in lower case.
const NOISE: &[&str] = &[
    "make: ***",
    "make[",
    "info ",
    "note:",
    "hint:",
    "help:",
    "npm notice",
    "error: command failed",
    "elifecycle",
];
/// Beginnings of npm's lines that say nothing about the cause.
const NPM_NOISE: &[&str] = &[
    "code ",
    "path ",
    "errno ",
    "syscall ",
    "command ",
    "a complete log of this run",
    "lifecycle script",
    "for a full report",
];

/// The line of an output that says best why it failed; empty if the output is.
pub(super) fn telling_line(output: &str) -> &str {
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let of_npm = || lines.iter().filter(|line| npm_part(line).is_some_and(is_telling_npm));
    if let Some(line) = of_npm().find(|line| npm_part(line).is_some_and(tells)).or(of_npm().next()) {
        return line;
    }
    let is_noise = |line: &str| {
        let lower = line.to_ascii_lowercase();
        npm_part(line).is_some() || NOISE.iter().any(|noise| lower.starts_with(noise))
    };
    let rest: Vec<&str> = lines.iter().copied().filter(|line| !is_noise(line)).collect();
    let found = rest.iter().rev().find(|line| tells(line)).or(rest.last()).or(lines.last());
    found.copied().unwrap_or_default()
}

/// Whether a line has a word that says what went wrong.
fn tells(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    TELLING.iter().any(|word| lower.contains(word))
}

/// The text of a line of npm's error report.
fn npm_part(line: &str) -> Option<&str> {
    line.strip_prefix("npm error").or_else(|| line.strip_prefix("npm ERR!")).map(str::trim)
}

fn is_telling_npm(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    text.contains(' ') && !NPM_NOISE.iter().any(|noise| lower.starts_with(noise))
}

/// A line without the sequences that colour it on a terminal: ESC, `[`, parameters, and a byte that ends them.
pub(super) fn without_colours(line: &[u8]) -> Vec<u8> {
    let mut kept = Vec::with_capacity(line.len());
    let mut rest = line;
    while let Some((byte, after)) = rest.split_first() {
        let end = match (byte, after.first()) {
            (0x1b, Some(b'[')) => after[1..].iter().position(|byte| (0x40..=0x7e).contains(byte)),
            _ => None,
        };
        match end {
            Some(end) => rest = &after[end + 2..],
            None => {
                kept.push(*byte);
                rest = after;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_says_why_is_found_in_the_output_of_each_manager() {
        for (output, line) in [
            (
                "npm error code E404\nnpm error 404 Not Found - GET https://registry.npmjs.org/x\nnpm error 404\nnpm error A complete log of this run can be found in: /home/user/x.log",
                "npm error 404 Not Found - GET https://registry.npmjs.org/x",
            ),
            (
                "npm error code 1\nnpm error path /workspace/x\nnpm error **INFO** Skipping Firefox download as instructed.\nnpm error Error: Failed to set up chrome!\nnpm error     at x",
                "npm error Error: Failed to set up chrome!",
            ),
            (
                "error TS5058: The specified path does not exist: 'tsconfig.dist.json'.\nnpm error code 1\nnpm error path /workspace/ky\nnpm error command failed\nnpm error command sh -c npm run build\nnpm error A complete log of this run can be found in: x",
                "error TS5058: The specified path does not exist: 'tsconfig.dist.json'.",
            ),
            (
                "[1/4] Resolving packages...\nerror Couldn't find package \"x\" on the \"npm\" registry.\ninfo Visit https://yarnpkg.com/en/docs/cli/install for documentation about this command.",
                "error Couldn't find package \"x\" on the \"npm\" registry.",
            ),
            (
                "Error: ERR_PNPM_IGNORED_BUILDS\n  help: Run \"pnpm approve-builds\" to pick which\n        to run scripts.",
                "Error: ERR_PNPM_IGNORED_BUILDS",
            ),
            (
                "ERROR: Could not find a version that satisfies x\nERROR: No matching distribution found for x\n",
                "ERROR: No matching distribution found for x",
            ),
            (
                "a.c:1:1: error: unknown type name 'x'\nmake: *** [Makefile:2: a] Error 1",
                "a.c:1:1: error: unknown type name 'x'",
            ),
            ("one\ntwo\nmake: *** [Makefile:2: a] Error 3", "two"),
            ("one\ntwo\n\n", "two"),
            ("npm error code 7", "npm error code 7"),
            (" \n", ""),
        ] {
            assert_eq!(telling_line(output), line);
        }
    }

    #[test]
    fn colours_are_removed_and_other_bytes_stay() {
        assert_eq!(without_colours(b"\x1b[0m\x1b[1;31mERROR\x1b[m: x"), b"ERROR: x");
        for plain in [&b""[..], b"a [0m b", b"\x1b", b"\x1b[", b"\x1b[12", b"\x1bM"] {
            assert_eq!(without_colours(plain), plain);
        }
    }
}
