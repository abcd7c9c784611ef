//! One viewer of a terminal: the queue between the terminal's task and the viewer's connection.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use fleet::{ExecControl, ExecEnd, TtySize};
use tokio::sync::{Notify, mpsc};

/// Frames that wait for one viewer; each holds at most one read from the terminal, 16 KiB, or a screen.
const QUEUE_LEN: usize = 32;
/// How long the task waits for a viewer if there are others.
const PATIENCE: Duration = Duration::from_secs(1);

/// The rights of a viewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewerRight {
    /// Watch.
    Watch,
    /// Watch, type and resize.
    Type,
}

/// A frame for a viewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ViewerFrame {
    /// The next output of the terminal.
    Output(Bytes),
    /// The whole screen, which replaces everything shown before.
    Screen(TtySize, Bytes),
    /// The terminal has a new size.
    Size(TtySize),
    /// The command has ended; the last frame.
    Ended(ExecEnd),
    /// The terminal was lost; the last frame.
    Lost(String),
}

/// The viewer's half.
#[derive(Debug)]
pub struct ViewerSeat {
    pub(super) frames: mpsc::Receiver<ViewerFrame>,
    pub(super) room: Arc<Notify>,
    /// Controls the command.
    pub control: ControlBox,
    /// Its pid inside the Body.
    pub pid: u32,
}

/// Wraps [`ExecControl`], which has no `Debug`.
#[derive(Clone)]
pub struct ControlBox(pub ExecControl);

impl std::fmt::Debug for ControlBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Control")
    }
}

impl ViewerSeat {
    /// Waits for the next frame; none after the last.
    pub async fn next(&mut self) -> Option<ViewerFrame> {
        let frame = self.frames.recv().await;
        self.room.notify_one();
        frame
    }
}

/// The task's half of a viewer.
#[derive(Debug)]
pub struct Viewer {
    frames: mpsc::Sender<ViewerFrame>,
    pub right: ViewerRight,
    state: ViewerState,
}

#[derive(Debug)]
enum ViewerState {
    /// The viewer has received all output.
    Even,
    /// One chunk waits for space in the queue.
    Owed(Bytes, Instant),
    /// The task stopped waiting: the next frame is the screen.
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

    /// When the task stops waiting for this viewer, if there are others.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            ViewerState::Owed(_, since) => Some(*since + PATIENCE),
            _ => None,
        }
    }

    /// Sends the next chunk, or keeps it until there is space. The caller sends no other chunk while one
    /// waits.
    pub fn give(&mut self, piece: &Bytes) {
        if let ViewerState::Even = self.state
            && let Err(mpsc::error::TrySendError::Full(_)) =
                self.frames.try_send(ViewerFrame::Output(piece.clone()))
        {
            self.state = ViewerState::Owed(piece.clone(), Instant::now());
        }
    }

    /// Sends a frame that is no output. A viewer that is full or behind gets the information with the next
    /// screen.
    pub fn tell(&mut self, frame: ViewerFrame) {
        let told = self.is_even() && self.frames.try_send(frame).is_ok();
        if !told {
            self.state = ViewerState::Behind;
        }
    }

    /// Sends the waiting chunk, if there is space now.
    pub fn settle(&mut self, screen: impl FnOnce() -> ViewerFrame) {
        let Ok(permit) = self.frames.try_reserve() else { return };
        match std::mem::replace(&mut self.state, ViewerState::Even) {
            ViewerState::Even => {}
            ViewerState::Owed(piece, _) => permit.send(ViewerFrame::Output(piece)),
            ViewerState::Behind => permit.send(screen()),
        }
    }

    /// Stops waiting for this viewer.
    pub fn give_up(&mut self) {
        self.state = ViewerState::Behind;
    }

    /// Sends the last frames from a task of their own, at the viewer's pace.
    pub fn dismiss(self, screen: impl FnOnce() -> ViewerFrame, last: ViewerFrame) {
        let mut frames = match self.state {
            ViewerState::Even => Vec::new(),
            ViewerState::Owed(piece, _) => vec![ViewerFrame::Output(piece)],
            ViewerState::Behind => vec![screen()],
        };
        frames.push(last);
        tokio::spawn(async move {
            for frame in frames {
                // The connection of a viewer that has stopped reading is closed after a time limit, which
                // also ends this task.
                if self.frames.send(frame).await.is_err() {
                    return;
                }
            }
        });
    }
}
