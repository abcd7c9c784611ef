//! One who watches a terminal, from both of its ends: what waits for it, and how it takes that.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use fleet::{Control, Ended, TtySize};
use tokio::sync::{Notify, mpsc};

/// Frames that wait for one viewer; each holds at most what one read of a terminal gives, 16 KiB, or a screen.
const QUEUE_LEN: usize = 32;
/// How long one who watches with others is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a viewer may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Right {
    /// Look.
    Watch,
    /// Look, type and resize.
    Type,
}

/// What a viewer is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// What the terminal wrote, next.
    Output(Bytes),
    /// The whole screen: whatever was shown before is replaced by this.
    Screen(TtySize, Bytes),
    /// Somebody changed the size.
    Size(TtySize),
    /// The command has ended; the last frame.
    Ended(Ended),
    /// The terminal was lost; the last frame.
    Lost(String),
}

/// A viewer's own end.
#[derive(Debug)]
pub struct Seat {
    pub(super) frames: mpsc::Receiver<Frame>,
    pub(super) room: Arc<Notify>,
    /// Reaches the command.
    pub control: ControlBox,
    /// Its pid inside the Body.
    pub pid: u32,
}

/// [`Control`] has nothing to show.
#[derive(Clone)]
pub struct ControlBox(pub Control);

impl std::fmt::Debug for ControlBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Control")
    }
}

impl Seat {
    /// The next frame; none after the last.
    pub async fn next(&mut self) -> Option<Frame> {
        let frame = self.frames.recv().await;
        self.room.notify_one();
        frame
    }
}

/// The terminal's end of a viewer.
#[derive(Debug)]
pub struct Viewer {
    frames: mpsc::Sender<Frame>,
    pub right: Right,
    state: State,
}

#[derive(Debug)]
enum State {
    /// It has all there is.
    Even,
    /// One piece waits for room.
    Owed(Bytes, Instant),
    /// It was given up waiting for: the next it gets is the screen.
    Behind,
}

impl Viewer {
    pub fn new(right: Right) -> (Self, mpsc::Receiver<Frame>) {
        let (frames, receiver) = mpsc::channel(QUEUE_LEN);
        (Self { frames, right, state: State::Even }, receiver)
    }

    pub fn is_gone(&self) -> bool {
        self.frames.is_closed()
    }

    pub fn is_owed(&self) -> bool {
        matches!(self.state, State::Owed(..))
    }

    pub fn is_even(&self) -> bool {
        matches!(self.state, State::Even)
    }

    /// When it is no longer waited for, if others watch too.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Owed(_, since) => Some(*since + PATIENCE),
            _ => None,
        }
    }

    /// Gives it the next piece, or keeps that for it. The caller brings no other piece while one is owed.
    pub fn give(&mut self, piece: &Bytes) {
        if let State::Even = self.state
            && let Err(mpsc::error::TrySendError::Full(_)) =
                self.frames.try_send(Frame::Output(piece.clone()))
        {
            self.state = State::Owed(piece.clone(), Instant::now());
        }
    }

    /// Tells it something that is no output. One that is full or behind learns it with the next screen.
    pub fn tell(&mut self, frame: Frame) {
        let told = self.is_even() && self.frames.try_send(frame).is_ok();
        if !told {
            self.state = State::Behind;
        }
    }

    /// Gives what is owed, if there is room by now.
    pub fn settle(&mut self, screen: impl FnOnce() -> Frame) {
        let Ok(permit) = self.frames.try_reserve() else { return };
        match std::mem::replace(&mut self.state, State::Even) {
            State::Even => {}
            State::Owed(piece, _) => permit.send(Frame::Output(piece)),
            State::Behind => permit.send(screen()),
        }
    }

    /// Waits for it no longer.
    pub fn give_up(&mut self) {
        self.state = State::Behind;
    }

    /// Its last frames, taken in its own time.
    pub fn dismiss(self, screen: impl FnOnce() -> Frame, last: Frame) {
        let mut frames = match self.state {
            State::Even => Vec::new(),
            State::Owed(piece, _) => vec![Frame::Output(piece)],
            State::Behind => vec![screen()],
        };
        frames.push(last);
        tokio::spawn(async move {
            for frame in frames {
                // One that has stopped reading is cut off by its connection; this does not outlast it.
                if self.frames.send(frame).await.is_err() {
                    return;
                }
            }
        });
    }
}
