//! Pieces that the decoders share: bounded text, unique ids of calls, JSON of events.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;

use crate::model::{ContentBlock, ModelDelta, ModelError};

use super::{DeltaFn, sse::SseEvent};

/// The most blocks of one answer.
pub const BLOCKS_MAX: usize = 4096;

/// A tool call whose arguments still arrive.
#[derive(Debug, Default)]
pub struct PartialCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
    started: bool,
}

impl PartialCall {
    pub fn new(id: String, name: String) -> Self {
        Self { id, name, ..Self::default() }
    }

    /// Adds text to the arguments and tells of it; the first piece also tells that the call began.
    pub fn push(&mut self, index: usize, text: &str, deltas: &mut DeltaFn<'_>) {
        if !std::mem::replace(&mut self.started, true) {
            deltas(ModelDelta::CallStarted { index, id: self.id.clone(), name: self.name.clone() });
        }
        if !text.is_empty() {
            self.arguments.push_str(text);
            deltas(ModelDelta::CallArguments { index, text: text.to_owned() });
        }
    }
}

/// Reads the JSON of an event.
pub fn read_json<T: DeserializeOwned>(event: &SseEvent) -> Result<T, ModelError> {
    serde_json::from_str(&event.data).map_err(|error| malformed(format!("an event is invalid: {error}")))
}

pub fn malformed(message: impl Into<String>) -> ModelError {
    ModelError::MalformedStream { message: message.into() }
}

pub fn cut(message: impl Into<String>) -> ModelError {
    ModelError::StreamCut { message: message.into() }
}

/// Refuses one more block of an answer that has too many.
pub fn check_count(count: usize) -> Result<(), ModelError> {
    if count >= BLOCKS_MAX {
        Err(malformed(format!("the answer has more than {BLOCKS_MAX} parts")))
    } else {
        Ok(())
    }
}

/// Gives a new id to each call whose id is empty or already used in the conversation: a result names its call
/// by id alone.
pub fn separate_ids(blocks: &mut [ContentBlock], mut used: BTreeSet<String>) {
    for block in blocks {
        let ContentBlock::ToolCall(call) = block else { continue };
        if call.id.is_empty() || used.contains(&call.id) {
            let stem = if call.id.is_empty() { "call" } else { &call.id };
            let free = (2..).map(|number: u64| format!("{stem}_{number}")).find(|id| !used.contains(id));
            call.id = free.unwrap_or_default();
        }
        used.insert(call.id.clone());
    }
}
