//! Open streams into Bodies: counts them and can cut them.
//!
//! Invariant: a Body without an open stream has no entry here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use proto::BodyId;
use tokio::sync::watch;

/// All open streams.
#[derive(Debug, Clone, Default)]
pub struct OpenStreams(Arc<Mutex<HashMap<BodyId, StreamEntry>>>);

#[derive(Debug)]
struct StreamEntry {
    open: usize,
    cut: watch::Sender<()>,
}

/// An open stream, until it is dropped.
#[derive(Debug)]
pub struct OpenStream {
    streams: OpenStreams,
    body: BodyId,
    cut: watch::Receiver<()>,
}

impl OpenStreams {
    /// Counts a new stream.
    pub fn open(&self, body: &BodyId) -> OpenStream {
        let mut entries = self.entries();
        let entry = entries
            .entry(body.clone())
            .or_insert_with(|| StreamEntry { open: 0, cut: watch::Sender::new(()) });
        entry.open += 1;
        OpenStream { streams: self.clone(), body: body.clone(), cut: entry.cut.subscribe() }
    }

    /// The number of open streams of a Body.
    pub fn count(&self, body: &BodyId) -> usize {
        self.entries().get(body).map_or(0, |entry| entry.open)
    }

    /// Cuts all streams of a Body at once, because the Body is about to be paused.
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
    /// Completes when the stream is to be cut.
    pub fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cut = self.cut.clone();
        async move {
            // The sender is dropped only with the last stream.
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
