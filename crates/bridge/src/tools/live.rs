//! Output of a running call, for people who watch the agent.

use std::sync::Arc;

use brain::agent::{LiveSink, LiveUpdate};

/// The most output of one call that watchers see while it comes; the result has the rest.
const LIVE_LEN_MAX: usize = 256 << 10;

/// Sends the output of one call to watchers.
pub struct LiveOutput {
    sink: Arc<dyn LiveSink>,
    call: String,
    sent: usize,
}

impl LiveOutput {
    /// Sends the output of this call.
    pub fn new(sink: &Arc<dyn LiveSink>, call: &str) -> Self {
        Self { sink: Arc::clone(sink), call: call.to_owned(), sent: 0 }
    }

    /// Sends bytes, as long as there is room.
    pub fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(LIVE_LEN_MAX - self.sent)];
        if bytes.is_empty() {
            return;
        }
        self.sent += bytes.len();
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.sink.update(LiveUpdate::Output { call: self.call.clone(), text });
    }
}
