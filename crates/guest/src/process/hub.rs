//! Distributes the output of one process: to its listeners, or into a ring buffer while it has none.
//!
//! Invariant: a listener's queue is bounded. The process waits for room, so a slow listener slows the process and
//! does not grow the guest's memory; a listener that left is noticed at once and costs nothing.
//! Output that was handed to a connection counts as received. When the last listener leaves, output that still waits
//! in its queue goes back into the ring.
//! A kept command has a tape instead of the ring: each new listener first receives all of it.
//! The newest output of a terminal is kept besides, whether it was received or not, so that a replay can rebuild the
//! screen.

use std::{collections::VecDeque, rc::Rc};

use bytes::Bytes;
use proto::wire::process::process_event::EndEvent;
use tokio::sync::mpsc::{self, error::TrySendError};

use super::{GuestProcess, Keeping, OutputSource, tape::Tape};
use crate::connect::{Code, ConnectError};

/// Pieces that may wait for one listener; a piece holds at most 32 KiB.
const QUEUE_LEN: usize = 8;
const LISTENERS_MAX: usize = 64;
/// Memory that a piece in the ring costs besides its bytes.
const PIECE_COST: u64 = 64;
/// Small pieces of one stream are joined up to this length.
const JOINED_LEN_MAX: usize = 32 * 1024;
/// Length of a terminal's newest output that is kept for a replay.
const RECENT_LEN_MAX: usize = 64 * 1024;

/// A piece of output.
pub type OutputPiece = (OutputSource, Bytes);

/// The output with which a new listener starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayStart {
    /// Output that no listener has received yet.
    Unheard,
    /// The newest output of a terminal, received or not.
    Recent,
}

/// The listeners of one process, and the output that none has received yet.
#[derive(Debug)]
pub struct Hub {
    listeners: Vec<(u64, mpsc::Sender<OutputPiece>)>,
    next_id: u64,
    ring: Ring,
    /// The output of a kept command.
    tape: Option<Tape>,
    /// The newest output of a terminal.
    recent: VecDeque<u8>,
    end: Option<EndEvent>,
}

impl Hub {
    pub fn new(ring_bytes: u64, keeping: Keeping) -> Self {
        Self {
            listeners: Vec::new(),
            next_id: 0,
            ring: Ring::new(ring_bytes),
            tape: (keeping == Keeping::Kept).then(Tape::default),
            recent: VecDeque::new(),
            end: None,
        }
    }

    /// The hub of a command that has ended, with its output.
    pub fn of_ended(tape: Tape, end: EndEvent) -> Self {
        Self { tape: Some(tape), end: Some(end), ..Self::new(0, Keeping::Kept) }
    }

    /// The end of the process, if it has ended.
    pub fn end(&self) -> Option<EndEvent> {
        self.end.clone()
    }

    /// The output of a kept command.
    pub fn tape(&self) -> Option<&Tape> {
        self.tape.as_ref()
    }

    /// The output of a kept command, to change it.
    pub fn tape_mut(&mut self) -> Option<&mut Tape> {
        self.tape.as_mut()
    }

    fn remember(&mut self, piece: &OutputPiece) {
        if let Some(tape) = &mut self.tape {
            return tape.push(piece);
        }
        let (stream, bytes) = piece;
        if *stream == OutputSource::Pty {
            self.recent.extend(bytes);
            self.recent.drain(..self.recent.len().saturating_sub(RECENT_LEN_MAX));
        }
    }

    /// Takes the output for a replay. Unreceived and recent output both end at the newest byte, so the longer one
    /// contains the other.
    fn missed(&mut self, since: ReplayStart) -> (VecDeque<OutputPiece>, usize) {
        if let Some(tape) = &self.tape {
            return (tape.pieces(), 0);
        }
        let unheard = self.ring.take();
        let len = length(&unheard);
        if since == ReplayStart::Recent && self.recent.len() > len {
            let recent: Vec<u8> = self.recent.iter().copied().collect();
            return (VecDeque::from([(OutputSource::Pty, recent.into())]), len);
        }
        (unheard, len)
    }

    /// Records the end of the process; listeners receive it after all output.
    pub fn close(&mut self, end: EndEvent) {
        self.end = Some(end);
        self.listeners = Vec::new();
    }

    fn drop_listener(&mut self, id: u64) {
        self.listeners.retain(|(known, _)| *known != id);
    }

    /// Gives a piece to every listener that has room; returns the listeners that have none.
    fn offer(&mut self, piece: &OutputPiece) -> Vec<(u64, mpsc::Sender<OutputPiece>)> {
        let mut full = Vec::new();
        self.listeners.retain(|(id, sender)| match sender.try_send(piece.clone()) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                full.push((*id, sender.clone()));
                true
            }
            Err(TrySendError::Closed(_)) => false,
        });
        full
    }
}

impl GuestProcess {
    /// Gives a piece to every listener, waiting for room, or keeps it if there is none.
    pub async fn publish(&self, piece: OutputPiece) {
        let mut full = {
            let mut hub = self.hub.borrow_mut();
            hub.remember(&piece);
            hub.offer(&piece)
        };
        self.news.notify_waiters();
        // A full listener may have left while we waited for it; then the piece must go elsewhere.
        while let Some((id, sender)) = full.pop() {
            if sender.send(piece.clone()).await.is_err() {
                self.hub.borrow_mut().drop_listener(id);
            }
        }
        let mut hub = self.hub.borrow_mut();
        if hub.listeners.is_empty() && hub.end.is_none() && hub.tape.is_none() {
            hub.ring.push(piece);
        }
    }

    /// Adds a listener, which first receives the output that it missed.
    pub fn listen(self: &Rc<Self>, since: ReplayStart) -> Result<Listener, ConnectError> {
        let mut hub = self.hub.borrow_mut();
        if hub.listeners.len() >= LISTENERS_MAX {
            return Err(ConnectError::new(Code::ResourceExhausted, "too many connections to this process"));
        }
        let (sender, receiver) = mpsc::channel(QUEUE_LEN);
        let id = hub.next_id;
        hub.next_id += 1;
        // For a process that has ended, the sender is dropped at once, so the listener receives the end at once.
        if hub.end.is_none() {
            hub.listeners.push((id, sender));
        }
        let (missed, unheard) = hub.missed(since);
        Ok(Listener { process: self.clone(), id, receiver, missed, unheard })
    }

    /// The end of the process, if it has ended.
    pub fn end(&self) -> Option<EndEvent> {
        self.hub.borrow().end()
    }
}

/// A listener. Dropping it removes it.
#[derive(Debug)]
pub struct Listener {
    pub process: Rc<GuestProcess>,
    id: u64,
    pub receiver: mpsc::Receiver<OutputPiece>,
    /// Output from before it was added.
    pub missed: VecDeque<OutputPiece>,
    /// How many bytes at the end of `missed` no other listener has received.
    unheard: usize,
}

impl Listener {
    /// Whether no other listener is left.
    pub fn is_last(&self) -> bool {
        self.process.hub.borrow().listeners.iter().all(|(id, _)| *id == self.id)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut hub = self.process.hub.borrow_mut();
        hub.drop_listener(self.id);
        self.receiver.close();
        if !hub.listeners.is_empty() || hub.tape.is_some() {
            return;
        }
        // Replayed output was received before, so it does not go back into the ring.
        let mut heard = length(&self.missed).saturating_sub(self.unheard);
        while let Some((stream, bytes)) = self.missed.pop_front() {
            let rest = bytes.slice(heard.min(bytes.len())..);
            heard = heard.saturating_sub(bytes.len());
            if !rest.is_empty() {
                hub.ring.push((stream, rest));
            }
        }
        while let Ok(piece) = self.receiver.try_recv() {
            hub.ring.push(piece);
        }
    }
}

fn length(pieces: &VecDeque<OutputPiece>) -> usize {
    pieces.iter().map(|(_, bytes)| bytes.len()).sum()
}

/// Output that no listener has received, up to a limit.
#[derive(Debug)]
struct Ring {
    pieces: VecDeque<(OutputSource, Vec<u8>)>,
    cost: u64,
    cost_max: u64,
}

impl Ring {
    fn new(cost_max: u64) -> Self {
        Self { pieces: VecDeque::new(), cost: 0, cost_max }
    }

    fn push(&mut self, (stream, bytes): OutputPiece) {
        match self.pieces.back_mut() {
            Some((last, joined)) if *last == stream && joined.len() + bytes.len() <= JOINED_LEN_MAX => {
                joined.extend_from_slice(&bytes);
                self.cost += bytes.len() as u64;
            }
            _ => {
                self.cost += bytes.len() as u64 + PIECE_COST;
                self.pieces.push_back((stream, bytes.to_vec()));
            }
        }
        while self.cost > self.cost_max {
            let Some((_, oldest)) = self.pieces.pop_front() else { break };
            self.cost -= oldest.len() as u64 + PIECE_COST;
        }
    }

    fn take(&mut self) -> VecDeque<OutputPiece> {
        self.cost = 0;
        std::mem::take(&mut self.pieces).into_iter().map(|(stream, bytes)| (stream, bytes.into())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_joins_small_pieces_and_forgets_the_oldest() {
        let mut ring = Ring::new(300);
        for text in ["a", "b"] {
            ring.push((OutputSource::Stdout, Bytes::from_static(text.as_bytes())));
        }
        ring.push((OutputSource::Stderr, Bytes::from_static(b"c")));
        let joined = [
            (OutputSource::Stdout, Bytes::from_static(b"ab")),
            (OutputSource::Stderr, Bytes::from_static(b"c")),
        ];
        assert_eq!(ring.take(), joined);
        for n in 0..100_u8 {
            let stream = if n % 2 == 0 { OutputSource::Stdout } else { OutputSource::Stderr };
            ring.push((stream, Bytes::copy_from_slice(&[n])));
        }
        let kept: Vec<u8> = ring.take().iter().map(|(_, bytes)| bytes[0]).collect();
        assert_eq!(kept, [96, 97, 98, 99]);
    }

    #[test]
    fn a_replay_holds_what_was_heard_and_what_was_not() {
        let piece = |text: &'static str| (OutputSource::Pty, Bytes::from_static(text.as_bytes()));
        let mut hub = Hub::new(1000, Keeping::No);
        hub.remember(&piece("heard "));
        hub.remember(&piece("unheard"));
        hub.ring.push(piece("unheard"));
        assert_eq!(hub.missed(ReplayStart::Recent), (VecDeque::from([piece("heard unheard")]), 7));
        hub.ring.push(piece("unheard"));
        assert_eq!(hub.missed(ReplayStart::Unheard), (VecDeque::from([piece("unheard")]), 7));
        hub.remember(&(OutputSource::Pty, Bytes::from(vec![b'x'; RECENT_LEN_MAX])));
        assert_eq!(hub.recent.len(), RECENT_LEN_MAX);
    }

    #[test]
    fn a_ring_of_nothing_keeps_nothing() {
        let mut ring = Ring::new(0);
        ring.push((OutputSource::Pty, Bytes::from_static(b"x")));
        assert_eq!(ring.take(), []);
        assert_eq!(ring.cost, 0);
    }
}
