//! The progress of long work, as lines for a person.

use std::fmt;

/// A callback that receives lines about the progress.
pub type Progress<'a> = &'a mut dyn FnMut(ProgressLine<'_>);

/// One line about the progress. Its text is escaped for a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressLine<'a> {
    /// The activity that begins now, such as `installing: npm ci in web`.
    Activity(&'a str),
    /// A line of the current activity's output.
    Output(&'a str),
    /// A fact that the user should know, also after the work.
    Note(&'a str),
}

impl fmt::Display for ProgressLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Activity(text) | Self::Note(text) => f.write_str(text),
            Self::Output(text) => write!(f, "  {text}"),
        }
    }
}
