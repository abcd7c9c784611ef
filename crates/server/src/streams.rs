//! Streams into Bodies that are open now: how many, and a way to cut them.
//!
//! Invariant: a Body without an open stream takes no room here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use proto::BodyId;
use tokio::sync::watch;

/// All streams that are open.
#[derive(Debug, Clone, Default)]
pub struct OpenStreams(Arc<Mutex<HashMap<BodyId, StreamEntry>>>);

#[derive(Debug)]
struct StreamEntry {
    open: usize,
    cut: watch::Sender<()>,
}

/// One stream that is open, until it is dropped.
#[derive(Debug)]
pub struct OpenStream {
    streams: OpenStreams,
    body: BodyId,
    cut: watch::Receiver<()>,
}

impl OpenStreams {
    /// Counts a stream.
    pub fn open(&self, body: &BodyId) -> OpenStream {
        let mut entries = self.entries();
        let entry = entries
            .entry(body.clone())
            .or_insert_with(|| StreamEntry { open: 0, cut: watch::Sender::new(()) });
        entry.open += 1;
        OpenStream { streams: self.clone(), body: body.clone(), cut: entry.cut.subscribe() }
    }

    /// How many are open.
    pub fn count(&self, body: &BodyId) -> usize {
        self.entries().get(body).map_or(0, |entry| entry.open)
    }

    /// Ends them all, in the middle of what they were saying: their Body is about to stand still.
    pub fn cut(&self, body: &BodyId) {
        if let Some(entry) = self.entries().get(body) {
            entry.cut.send_replace(());
        }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<BodyId, StreamEntry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenStream {
    /// Done when the stream is to be cut.
    pub fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cut = self.cut.clone();
        async move {
            // The sender is gone only with the last stream.
            let _ = cut.changed().await;
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut entries = self.streams.entries();
        if let Some(entry) = entries.get_mut(&self.body) {
            entry.open -= 1;
            if entry.open == 0 {
                entries.remove(&self.body);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn streams_are_counted_and_cut() {
        let (streams, body) = (OpenStreams::default(), "abc".parse().unwrap());
        let (one, two) = (streams.open(&body), streams.open(&body));
        assert_eq!(streams.count(&body), 2);
        let cut = one.cut();
        streams.cut(&body);
        cut.await;
        drop((one, two));
        assert_eq!((streams.count(&body), streams.0.lock().unwrap().len()), (0, 0));
    }
}
