//! The content of messages in events: inline while it is short, as an artifact while it is long.

use proto::{
    Event, EventData,
    event_data::{DecodedEvent, StoredMessage},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::journal::{AgentJournal, JournalError};

/// The longest content that an event holds itself, as JSON.
const INLINE_LEN_MAX: usize = 128 << 10;

/// An event whose stored message, if it has one, was read.
#[derive(Debug, Clone)]
pub struct ResolvedEvent {
    /// The event.
    pub event: Event,
    /// The content of its message.
    pub content: Value,
}

/// Prepares content for an event.
pub async fn store_content(
    journal: &dyn AgentJournal,
    content: &impl Serialize,
) -> Result<StoredMessage, JournalError> {
    let value = serde_json::to_value(content).map_err(|error| JournalError::Store(error.to_string()))?;
    let text = value.to_string();
    if text.len() <= INLINE_LEN_MAX {
        return Ok(StoredMessage { blocks: Some(value), artifact: None, artifact_bytes: 0 });
    }
    let artifact_bytes = text.len() as u64;
    let sha256 = journal.put_artifact(text.into_bytes()).await?;
    Ok(StoredMessage { blocks: None, artifact: Some(sha256), artifact_bytes })
}

/// Reads the content of an event's message.
pub async fn resolve(journal: &dyn AgentJournal, event: Event) -> Result<ResolvedEvent, JournalError> {
    let stored = match event.decode() {
        DecodedEvent::Known(EventData::ModelAnswered(data)) => Some(data.message),
        DecodedEvent::Known(EventData::CallEnded(data)) => Some(data.result),
        DecodedEvent::Known(EventData::AgentInstructed(data)) => Some(data.system),
        _ => None,
    };
    let content = match stored {
        Some(StoredMessage { blocks: Some(blocks), .. }) => blocks,
        Some(StoredMessage { artifact: Some(sha256), artifact_bytes, .. }) => {
            let bytes = journal.get_artifact(&sha256, artifact_bytes).await?;
            serde_json::from_slice(&bytes).map_err(|error| JournalError::Store(error.to_string()))?
        }
        _ => Value::Null,
    };
    Ok(ResolvedEvent { event, content })
}

impl ResolvedEvent {
    /// The content as a type; an empty list if it does not match.
    pub fn content_as<T: DeserializeOwned + Default>(&self) -> T {
        serde_json::from_value(self.content.clone()).unwrap_or_default()
    }
}
