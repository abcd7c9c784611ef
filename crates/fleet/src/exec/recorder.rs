//! Records the output of a command for the log: short output inside the event, longer output as an artifact.
//!
//! Invariant: the Body's output limit bounds the recording, which delays the command by no more than a write to disk.

use std::io::Write;

use proto::{
    Failure,
    event_data::{ExecOutput, OutputContent},
};
use store::{ArtifactRef, ArtifactWriter, Artifacts};

use crate::failures;

/// Longest output in bytes that the event itself contains.
const INLINE_MAX: usize = 4096;

/// Records one output stream of one command.
pub struct Recorder {
    inline: Vec<u8>,
    artifact: Option<ArtifactWriter>,
    kept: u64,
    seen: u64,
    max: u64,
}

impl Recorder {
    /// Creates a recorder that keeps at most `max` bytes.
    pub fn new(max: u64) -> Self {
        Self { inline: Vec::new(), artifact: None, kept: 0, seen: 0, max }
    }

    /// Counts output that was lost before it could be recorded.
    pub fn skip(&mut self, len: u64) {
        self.seen = self.seen.saturating_add(len);
    }

    /// Records a chunk of output.
    pub fn push(&mut self, store: &dyn Artifacts, bytes: &[u8]) -> Result<(), Failure> {
        self.seen = self.seen.saturating_add(bytes.len() as u64);
        let room = usize::try_from(self.max - self.kept).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(room)];
        self.kept += bytes.len() as u64;
        if self.artifact.is_none() && self.inline.len() + bytes.len() <= INLINE_MAX {
            self.inline.extend_from_slice(bytes);
            return Ok(());
        }
        if self.artifact.is_none() && !bytes.is_empty() {
            let mut artifact = store.artifact().map_err(failures::artifact)?;
            artifact.write_all(&self.inline).map_err(write_failed)?;
            self.inline.clear();
            self.artifact = Some(artifact);
        }
        self.artifact.as_mut().map_or(Ok(()), |artifact| artifact.write_all(bytes)).map_err(write_failed)
    }

    /// Ends the recording and returns its description for the event.
    pub fn finish(self) -> Result<ExecOutput, Failure> {
        let content = match self.artifact {
            Some(artifact) => OutputContent::Artifact(artifact.finish().map_err(failures::artifact)?.sha256),
            None => match String::from_utf8(self.inline) {
                Ok(text) => OutputContent::Text(text),
                Err(error) => OutputContent::Hex(proto::event::hex(error.as_bytes())),
            },
        };
        let truncated_to = (self.kept < self.seen).then_some(self.kept);
        Ok(ExecOutput { content, bytes: self.seen, truncated_to })
    }
}

fn write_failed(error: std::io::Error) -> Failure {
    Failure::new(proto::Kind::Host, "cannot store the output of the command")
        .because(error)
        .hint("make room: pal gc")
}

/// Reads back the output that an event describes. Also returns whether some of it is missing.
pub fn read_back(store: &dyn Artifacts, output: &ExecOutput) -> (Vec<u8>, bool) {
    let bytes = match &output.content {
        OutputContent::Text(text) => text.clone().into_bytes(),
        OutputContent::Hex(hex) => unhex(hex),
        OutputContent::Artifact(sha256) => {
            artifact(store, sha256, output.truncated_to.unwrap_or(output.bytes))
        }
    };
    (bytes, output.truncated_to.is_some())
}

fn artifact(store: &dyn Artifacts, sha256: &str, bytes: u64) -> Vec<u8> {
    let mut contents = Vec::new();
    if let Ok(mut file) = store.open_artifact(&ArtifactRef { sha256: sha256.to_owned(), bytes }) {
        let _ = std::io::Read::read_to_end(&mut file, &mut contents);
    }
    contents
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).unwrap_or(0) as u8;
    text.as_bytes().chunks_exact(2).map(|two| digit(two[0]) << 4 | digit(two[1])).collect()
}
