//! Shows progress of long work on standard error.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::pin,
    time::Duration,
};

use fleet::ProgressLine;
use rustix::{
    stdio,
    termios::{isatty, tcgetwinsize},
};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use crate::output;

/// Work that is shorter than this shows nothing.
const QUIET: Duration = Duration::from_secs(1);
const TICK_TERMINAL: Duration = Duration::from_millis(100);
const TICK_PLAIN: Duration = Duration::from_secs(10);
const SPINNER: [char; 4] = ['|', '/', '-', '\\'];
/// The width of a terminal that does not say how wide it is.
const COLUMNS: usize = 80;

/// Waits for `work` and shows `what` meanwhile.
pub async fn watch<T>(what: &str, work: impl Future<Output = T>) -> T {
    ProgressDisplay::new(what).watch(work).await
}

/// The activity of long work: one line that changes on a terminal, lines elsewhere.
pub struct ProgressDisplay {
    is_terminal: bool,
    activity: RefCell<String>,
    since: Cell<Instant>,
    /// The last line of the activity's output.
    output: RefCell<String>,
    /// Whether the terminal's last line is ours.
    drawn: Cell<bool>,
}

impl ProgressDisplay {
    /// A display whose first activity is `what`.
    pub fn new(what: &str) -> Self {
        Self {
            is_terminal: isatty(stdio::stderr()),
            activity: RefCell::new(what.to_owned()),
            since: Cell::new(Instant::now()),
            output: RefCell::default(),
            drawn: Cell::new(false),
        }
    }

    /// Shows a line of the work.
    pub fn show(&self, line: ProgressLine<'_>) {
        match line {
            ProgressLine::Activity(text) => {
                self.activity.replace(text.to_owned());
                self.since.set(Instant::now());
                self.output.take();
            }
            ProgressLine::Output(text) if self.is_terminal => drop(self.output.replace(text.to_owned())),
            ProgressLine::Output(_) | ProgressLine::Note(_) => {}
        }
        let passes = matches!(line, ProgressLine::Activity(_) | ProgressLine::Output(_));
        if !(self.is_terminal && passes) {
            self.clear();
            output::talk(&line.to_string());
        }
    }

    /// Removes the display's own line from the terminal.
    pub fn clear(&self) {
        if self.drawn.take() {
            output::draw("\r\x1b[K");
        }
    }

    /// Waits for `work`, and shows its activity meanwhile.
    pub async fn watch<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        if let Ok(done) = timeout(QUIET, work.as_mut()).await {
            self.clear();
            return done;
        }
        let tick = if self.is_terminal { TICK_TERMINAL } else { TICK_PLAIN };
        let mut ticks = interval_at(Instant::now(), tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut turn = 0;
        loop {
            tokio::select! {
                biased;
                done = work.as_mut() => {
                    self.clear();
                    return done;
                }
                _ = ticks.tick() => {
                    self.draw(SPINNER[turn % SPINNER.len()]);
                    turn += 1;
                }
            }
        }
    }

    fn draw(&self, spinner: char) {
        let seconds = self.since.get().elapsed().as_secs();
        let activity = self.activity.borrow();
        if !self.is_terminal {
            // An activity that has just begun is a line already.
            if seconds > 0 {
                output::talk(&format!("{activity} ({seconds} s)"));
            }
            return;
        }
        let columns = tcgetwinsize(stdio::stderr()).map_or(0, |size| usize::from(size.ws_col));
        let columns = if columns == 0 { COLUMNS } else { columns };
        let line = format!("{spinner} {activity} ({seconds} s)  {}", self.output.borrow());
        // A line that wraps could not be overwritten.
        let line: String = line.trim_end().chars().take(columns.saturating_sub(1)).collect();
        output::draw(&format!("\r{line}\x1b[K"));
        self.drawn.set(true);
    }
}
