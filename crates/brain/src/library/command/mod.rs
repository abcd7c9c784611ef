//! Shell commands as rules see them: every program that a text would start, with its words.
//!
//! The text is read with a full grammar of bash. The walk goes through pipelines, lists, subshells, loops, functions and
//! substitutions, and through programs that start programs: `sh -c`, `env`, `sudo`, `xargs`, `find -exec`, `eval`.
//!
//! Invariant: a part that cannot be known before the command runs is never guessed: a word keeps the text that is certain
//! and says that the rest is computed, and a text that cannot be read is `unknown` as a whole.
//! Invariant: reading ends, and never overflows the stack: length, nesting and number of programs have limits, and the
//! grammar, which recurses, runs on a stack of its own.
//! Absent on purpose: files. A script that a command runs by its name is not read, and neither is code of another
//! language (`python -c`). Rules are a convenience; the Body is the boundary.

mod calls;
mod parse;
mod pattern;
mod substitution;
#[cfg(test)]
mod tests;
mod word;
mod wrapper;

pub use parse::read_command;
pub use pattern::{CommandPattern, Fit, WordPattern};
pub use word::{Word, WordExtent};

/// A text for the shell, as far as it is known before it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShellLine {
    /// The programs, in the order of the text.
    pub calls: Vec<ProgramCall>,
    /// Reasons for which further programs may start that are not in the list.
    pub unknown: Vec<String>,
}

/// One start of a program.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramCall {
    /// The words, the program's name first.
    pub words: Vec<Word>,
    /// The words without the options between a program and its subcommand, where there are some: `git push` for
    /// `git -C app push`.
    pub plain: Option<Vec<Word>>,
    /// The calls, by their index, that read the output of this one.
    pub into: Vec<usize>,
}
