//! The task of one terminal: reads the output of its command, keeps its screen, and sends the output to
//! viewers.
//!
//! One task owns all of this. While a chunk waits for a viewer, the task reads no further output, so the
//! command blocks, as in any terminal that is not read. The task waits for a sole viewer that may type as
//! long as its connection lives. It stops waiting for other viewers after a second, and sends them the screen
//! later.

use std::{sync::Arc, time::Instant};

use fleet::{Exec, OutputChunk, TtySize};
use proto::Failure;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{
    screen::Screen,
    viewer::{ControlBox, Viewer, ViewerFrame, ViewerRight, ViewerSeat},
};

const ORDERS_MAX: usize = 64;
const VIEWERS_MAX: usize = 64;

/// A request to the task.
pub enum TerminalOrder {
    /// Adds a viewer; the answer is its seat, or none if there are too many viewers.
    Join(ViewerRight, Option<TtySize>, oneshot::Sender<Option<ViewerSeat>>),
    /// The terminal has a new size.
    Resized(TtySize),
}

/// The channel to the task of a terminal.
pub type TerminalOrders = mpsc::Sender<TerminalOrder>;

/// The state of the task.
pub struct TerminalActor {
    orders: mpsc::Receiver<TerminalOrder>,
    room: Arc<Notify>,
    screen: Screen,
    viewers: Vec<Viewer>,
}

impl TerminalActor {
    pub fn new(size: TtySize) -> (Self, TerminalOrders) {
        let (sender, orders) = mpsc::channel(ORDERS_MAX);
        (Self { orders, room: Arc::default(), screen: Screen::new(size), viewers: Vec::new() }, sender)
    }

    /// Runs until the command has ended.
    pub async fn run(mut self, mut exec: Exec<'_>) {
        let (control, pid) = (ControlBox(exec.control()), exec.pid());
        let heard = loop {
            self.viewers.retain(|viewer| !viewer.is_gone());
            let owed = self.viewers.iter().any(Viewer::is_owed);
            let uneven = self.viewers.iter().any(|viewer| !viewer.is_even());
            let deadline = self.deadline();
            tokio::select! {
                order = self.orders.recv() => match order {
                    Some(order) => self.handle_order(order, &control, pid),
                    // All senders are dropped because the server stops. The command keeps running.
                    None => return,
                },
                output = exec.next(), if !owed => match output {
                    Ok(Some(output)) => self.send_output(output),
                    Ok(None) => break Ok(()),
                    Err(failure) => break Err(failure),
                },
                () = self.room.notified(), if uneven => self.sync_viewers(),
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into()), if deadline.is_some() => self.drop_slow_viewers(),
            }
        };
        let ended = match heard {
            Ok(()) => exec.finish().await,
            Err(failure) => Err(failure),
        };
        self.send_end(ended);
    }

    fn handle_order(&mut self, order: TerminalOrder, control: &ControlBox, pid: u32) {
        match order {
            TerminalOrder::Join(right, size, answer) => {
                let seat = (self.viewers.len() < VIEWERS_MAX).then(|| {
                    if let Some(size) = size {
                        self.set_size(size);
                    }
                    let (mut viewer, frames) = Viewer::new(right);
                    viewer.tell(self.screen_frame());
                    self.viewers.push(viewer);
                    ViewerSeat { frames, room: self.room.clone(), control: control.clone(), pid }
                });
                // If the viewer has disconnected since, the next send notices it.
                let _ = answer.send(seat);
            }
            TerminalOrder::Resized(size) => self.set_size(size),
        }
    }

    fn set_size(&mut self, size: TtySize) {
        if size == self.screen.size() {
            return;
        }
        self.screen.resize(size);
        self.viewers.iter_mut().for_each(|viewer| viewer.tell(ViewerFrame::Size(size)));
    }

    fn send_output(&mut self, output: OutputChunk) {
        let (OutputChunk::Tty(bytes) | OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes)) = output;
        self.screen.feed(&bytes);
        self.viewers.iter_mut().for_each(|viewer| viewer.give(&bytes));
    }

    fn screen_frame(&self) -> ViewerFrame {
        ViewerFrame::Screen(self.screen.size(), self.screen.restore())
    }

    fn sync_viewers(&mut self) {
        let Self { viewers, screen, .. } = self;
        // A viewer that is behind gets the screen, which includes all output so far, also chunks that still
        // wait for other viewers.
        for viewer in viewers.iter_mut().filter(|viewer| !viewer.is_even()) {
            viewer.settle(|| ViewerFrame::Screen(screen.size(), screen.restore()));
        }
    }

    /// When to stop waiting for a viewer; never for a sole viewer that may type.
    fn deadline(&self) -> Option<Instant> {
        match &self.viewers[..] {
            [alone] if alone.right == ViewerRight::Type => None,
            viewers => viewers.iter().filter_map(Viewer::deadline).min(),
        }
    }

    fn drop_slow_viewers(&mut self) {
        let now = Instant::now();
        self.viewers
            .iter_mut()
            .filter(|viewer| viewer.deadline().is_some_and(|at| at <= now))
            .for_each(Viewer::give_up);
    }

    fn send_end(self, ended: Result<fleet::ExecEnd, Failure>) {
        let last = match ended {
            Ok(ended) => ViewerFrame::Ended(ended),
            Err(failure) => ViewerFrame::Lost(failure.to_string()),
        };
        let (size, shown) = (self.screen.size(), self.screen.restore());
        for viewer in self.viewers {
            viewer.dismiss(|| ViewerFrame::Screen(size, shown.clone()), last.clone());
        }
    }
}
