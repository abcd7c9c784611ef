//! One who watches a terminal, from both of its ends: what waits for it, and how it takes that.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use fleet::{ExecControl, ExecEnd, TtySize};
use tokio::sync::{Notify, mpsc};

/// Frames that wait for one viewer; each holds at most what one read of a terminal gives, 16 KiB, or a screen.
const QUEUE_LEN: usize = 32;
/// How long one who watches with others is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a viewer may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewerRight {
    /// Look.
    Watch,
    /// Look, type and resize.
    Type,
}

/// What a viewer is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ViewerFrame {
    /// What the terminal wrote, next.
    Output(Bytes),
    /// The whole screen: whatever was shown before is replaced by this.
    Screen(TtySize, Bytes),
    /// Somebody changed the size.
    Size(TtySize),
    /// The command has ended; the last frame.
    Ended(ExecEnd),
    /// The terminal was lost; the last frame.
    Lost(String),
}

/// A viewer's own end.
#[derive(Debug)]
pub struct ViewerSeat {
    pub(super) frames: mpsc::Receiver<ViewerFrame>,
    pub(super) room: Arc<Notify>,
    /// Reaches the command.
    pub control: ControlBox,
    /// Its pid inside the Body.
    pub pid: u32,
}

/// [`ExecControl`] has nothing to show.
#[derive(Clone)]
pub struct ControlBox(pub ExecControl);

impl std::fmt::Debug for ControlBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Control")
    }
}

impl ViewerSeat {
    /// The next frame; none after the last.
    pub async fn next(&mut self) -> Option<ViewerFrame> {
        let frame = self.frames.recv().await;
        self.room.notify_one();
        frame
    }
}

/// The terminal's end of a viewer.
#[derive(Debug)]
pub struct Viewer {
    frames: mpsc::Sender<ViewerFrame>,
    pub right: ViewerRight,
    state: ViewerState,
}

#[derive(Debug)]
enum ViewerState {
    /// It has all there is.
    Even,
    /// One piece waits for room.
    Owed(Bytes, Instant),
    /// It was given up waiting for: the next it gets is the screen.
    Behind,
}

impl Viewer {
    pub fn new(right: ViewerRight) -> (Self, mpsc::Receiver<ViewerFrame>) {
        let (frames, receiver) = mpsc::channel(QUEUE_LEN);
        (Self { frames, right, state: ViewerState::Even }, receiver)
    }

    pub fn is_gone(&self) -> bool {
        self.frames.is_closed()
    }

    pub fn is_owed(&self) -> bool {
        matches!(self.state, ViewerState::Owed(..))
    }

    pub fn is_even(&self) -> bool {
        matches!(self.state, ViewerState::Even)
    }

    /// When it is no longer waited for, if others watch too.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            ViewerState::Owed(_, since) => Some(*since + PATIENCE),
            _ => None,
        }
    }

    /// Gives it the next piece, or keeps that for it. The caller brings no other piece while one is owed.
    pub fn give(&mut self, piece: &Bytes) {
        if let ViewerState::Even = self.state
            && let Err(mpsc::error::TrySendError::Full(_)) =
                self.frames.try_send(ViewerFrame::Output(piece.clone()))
        {
            self.state = ViewerState::Owed(piece.clone(), Instant::now());
        }
    }

    /// Tells it something that is no output. One that is full or behind learns it with the next screen.
    pub fn tell(&mut self, frame: ViewerFrame) {
        let told = self.is_even() && self.frames.try_send(frame).is_ok();
        if !told {
            self.state = ViewerState::Behind;
        }
    }

    /// Gives what is owed, if there is room by now.
    pub fn settle(&mut self, screen: impl FnOnce() -> ViewerFrame) {
        let Ok(permit) = self.frames.try_reserve() else { return };
        match std::mem::replace(&mut self.state, ViewerState::Even) {
            ViewerState::Even => {}
            ViewerState::Owed(piece, _) => permit.send(ViewerFrame::Output(piece)),
            ViewerState::Behind => permit.send(screen()),
        }
    }

    /// Waits for it no longer.
    pub fn give_up(&mut self) {
        self.state = ViewerState::Behind;
    }

    /// Its last frames, taken in its own time.
    pub fn dismiss(self, screen: impl FnOnce() -> ViewerFrame, last: ViewerFrame) {
        let mut frames = match self.state {
            ViewerState::Even => Vec::new(),
            ViewerState::Owed(piece, _) => vec![ViewerFrame::Output(piece)],
            ViewerState::Behind => vec![screen()],
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
