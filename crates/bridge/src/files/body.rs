//! Files of the Body: the guest carries out the calls.

use std::sync::Arc;

use brain::agent::BoxFuture;
use proto::{Failure, event_data::CallVenue, file_call::FileCall};

use super::{BodyLife, FileBackend, FileReply};
use crate::Workplace;

/// The files of an agent's Body.
pub struct BodyBackend {
    workplace: Arc<Workplace>,
}

impl BodyBackend {
    /// The files of the Body of this workplace.
    pub fn new(workplace: Arc<Workplace>) -> Self {
        Self { workplace }
    }
}

impl FileBackend for BodyBackend {
    fn call(&self, call: FileCall) -> BoxFuture<'_, Result<FileReply, Failure>> {
        Box::pin(async move { self.workplace.file_call(&call).await.map(FileReply::from) })
    }

    fn venue(&self) -> CallVenue {
        CallVenue::Body
    }

    /// The guest answers a key that it knows from its ledger, and carries out a call that never reached it.
    fn recover(&self, call: FileCall, life: BodyLife) -> BoxFuture<'_, Result<Option<FileReply>, Failure>> {
        Box::pin(async move {
            match life {
                BodyLife::Same => self.call(call).await.map(Some),
                BodyLife::Another => Ok(None),
            }
        })
    }
}
