//! One terminal: reads what its command writes, keeps its screen, and passes it on.
//!
//! One task owns all of it. While it owes somebody a piece it reads no further, and so the command waits: as in any
//! terminal that is not read. It waits for one who types alone for as long as that connection lives; one who only
//! watches, or watches with others, is given up after a moment and gets the screen later.

use std::{sync::Arc, time::Instant};

use fleet::{Exec, Output, TtySize};
use proto::Failure;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{
    screen::Screen,
    viewer::{ControlBox, Frame, Right, Seat, Viewer},
};

const ORDERS_MAX: usize = 64;
const VIEWERS_MAX: usize = 64;

/// What the task is asked to do.
pub enum Order {
    /// Let somebody watch; answered with its seat, or not at all if there is none left.
    Join(Right, Option<TtySize>, oneshot::Sender<Option<Seat>>),
    /// The command's terminal has a new size.
    Resized(TtySize),
}

/// Reaches the task of a terminal.
pub type Orders = mpsc::Sender<Order>;

/// The task's own end.
pub struct Actor {
    orders: mpsc::Receiver<Order>,
    room: Arc<Notify>,
    screen: Screen,
    viewers: Vec<Viewer>,
}

impl Actor {
    pub fn new(size: TtySize) -> (Self, Orders) {
        let (sender, orders) = mpsc::channel(ORDERS_MAX);
        (Self { orders, room: Arc::default(), screen: Screen::new(size), viewers: Vec::new() }, sender)
    }

    /// Until the command has ended.
    pub async fn run(mut self, mut exec: Exec<'_>) {
        let (control, pid) = (ControlBox(exec.control()), exec.pid());
        let heard = loop {
            self.viewers.retain(|viewer| !viewer.is_gone());
            let owed = self.viewers.iter().any(Viewer::is_owed);
            let uneven = self.viewers.iter().any(|viewer| !viewer.is_even());
            let deadline = self.deadline();
            tokio::select! {
                order = self.orders.recv() => match order {
                    Some(order) => self.obey(order, &control, pid),
                    // Nobody can ask for it any more: the server stops. The command runs on.
                    None => return,
                },
                output = exec.next(), if !owed => match output {
                    Ok(Some(output)) => self.pass_on(output),
                    Ok(None) => break Ok(()),
                    Err(failure) => break Err(failure),
                },
                () = self.room.notified(), if uneven => self.settle(),
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into()), if deadline.is_some() => self.give_up(),
            }
        };
        let ended = match heard {
            Ok(()) => exec.finish().await,
            Err(failure) => Err(failure),
        };
        self.dismiss(ended);
    }

    fn obey(&mut self, order: Order, control: &ControlBox, pid: u32) {
        match order {
            Order::Join(right, size, answer) => {
                let seat = (self.viewers.len() < VIEWERS_MAX).then(|| {
                    if let Some(size) = size {
                        self.resized(size);
                    }
                    let (mut viewer, frames) = Viewer::new(right);
                    viewer.tell(self.shown());
                    self.viewers.push(viewer);
                    Seat { frames, room: self.room.clone(), control: control.clone(), pid }
                });
                // One who left in the meantime is found to be gone.
                let _ = answer.send(seat);
            }
            Order::Resized(size) => self.resized(size),
        }
    }

    fn resized(&mut self, size: TtySize) {
        if size == self.screen.size() {
            return;
        }
        self.screen.resize(size);
        self.viewers.iter_mut().for_each(|viewer| viewer.tell(Frame::Size(size)));
    }

    fn pass_on(&mut self, output: Output) {
        let (Output::Tty(bytes) | Output::Stdout(bytes) | Output::Stderr(bytes)) = output;
        self.screen.feed(&bytes);
        self.viewers.iter_mut().for_each(|viewer| viewer.give(&bytes));
    }

    fn shown(&self) -> Frame {
        Frame::Screen(self.screen.size(), self.screen.restore())
    }

    fn settle(&mut self) {
        let Self { viewers, screen, .. } = self;
        // One who is behind gets the screen with all that was passed on, and so with what others are still owed.
        for viewer in viewers.iter_mut().filter(|viewer| !viewer.is_even()) {
            viewer.settle(|| Frame::Screen(screen.size(), screen.restore()));
        }
    }

    /// When to give somebody up; never for one who types alone.
    fn deadline(&self) -> Option<Instant> {
        match &self.viewers[..] {
            [alone] if alone.right == Right::Type => None,
            viewers => viewers.iter().filter_map(Viewer::deadline).min(),
        }
    }

    fn give_up(&mut self) {
        let now = Instant::now();
        self.viewers
            .iter_mut()
            .filter(|viewer| viewer.deadline().is_some_and(|at| at <= now))
            .for_each(Viewer::give_up);
    }

    fn dismiss(self, ended: Result<fleet::Ended, Failure>) {
        let last = match ended {
            Ok(ended) => Frame::Ended(ended),
            Err(failure) => Frame::Lost(failure.to_string()),
        };
        let (size, shown) = (self.screen.size(), self.screen.restore());
        for viewer in self.viewers {
            viewer.dismiss(|| Frame::Screen(size, shown.clone()), last.clone());
        }
    }
}
