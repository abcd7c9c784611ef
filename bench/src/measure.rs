//! Interleaved measurement: each round measures every contender once.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{report::Row, stats::Samples};

/// Rounds that are not counted.
const WARM_UP: usize = 3;
/// A contender slower than this is measured in every fifth round only.
const SLOW: Duration = Duration::from_millis(40);
const SLOW_EVERY: usize = 5;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes an interrupt end the measurement, but not the cleanup.
pub fn listen_to_interrupts() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("interrupts".into()).spawn(move || {
        runtime.block_on(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                INTERRUPTED.store(true, Ordering::Relaxed);
                eprintln!("interrupted: tidying up");
            }
        });
    })?;
    Ok(())
}

/// Whether an interrupt arrived.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// A measured program.
pub struct Contender<'a> {
    /// Its name in tables.
    pub name: String,
    /// A note for the table.
    pub note: String,
    /// Runs it once and returns the time.
    pub once: Box<dyn FnMut() -> io::Result<Duration> + 'a>,
}

impl<'a> Contender<'a> {
    /// A contender without a note.
    pub fn new(name: impl Into<String>, once: impl FnMut() -> io::Result<Duration> + 'a) -> Self {
        Self { name: name.into(), note: String::new(), once: Box::new(once) }
    }
}

/// Times one action.
pub fn timed(act: impl FnOnce() -> io::Result<()>) -> io::Result<Duration> {
    let began = Instant::now();
    act()?;
    Ok(began.elapsed())
}

/// Measures every contender once in each round, in random order: no contender always follows the same one,
/// whose data may still be in the caches, or whose cleanup may still be running. The order is the same in
/// every run of the bench.
pub fn interleave(contenders: Vec<Contender<'_>>, rounds: usize) -> Vec<Row> {
    let mut runners: Vec<MeasureRunner<'_>> = contenders.into_iter().map(MeasureRunner::new).collect();
    let mut order: Vec<usize> = (0..runners.len()).collect();
    let mut draws = SplitMix(1);
    for round in 0..WARM_UP + rounds {
        draws.shuffle(&mut order);
        for turn in &order {
            if interrupted() {
                break;
            }
            if let Some(runner) = runners.get_mut(*turn) {
                runner.turn(round);
            }
        }
    }
    runners.into_iter().map(MeasureRunner::row).collect()
}

/// A sequence of pseudo-random numbers (splitmix64).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn shuffle(&mut self, order: &mut [usize]) {
        for last in (1..order.len()).rev() {
            let other = (self.next() % (last as u64 + 1)) as usize;
            order.swap(last, other);
        }
    }
}

struct MeasureRunner<'a> {
    contender: Contender<'a>,
    samples: Samples,
    fastest: Duration,
    failures: usize,
    why: Option<String>,
}

impl<'a> MeasureRunner<'a> {
    fn new(contender: Contender<'a>) -> Self {
        Self { contender, samples: Samples::default(), fastest: Duration::MAX, failures: 0, why: None }
    }

    fn turn(&mut self, round: usize) {
        let slow = self.fastest != Duration::MAX && self.fastest > SLOW;
        if slow && round >= WARM_UP && !round.is_multiple_of(SLOW_EVERY) {
            return;
        }
        match (self.contender.once)() {
            Ok(time) => {
                self.fastest = self.fastest.min(time);
                if round >= WARM_UP {
                    self.samples.push_time(time);
                }
            }
            Err(error) => {
                self.failures += 1;
                self.why.get_or_insert(error.to_string());
            }
        }
    }

    fn row(self) -> Row {
        let mut note = self.contender.note;
        if let Some(why) = self.why {
            note =
                format!("{note}{}{} failed: {why}", if note.is_empty() { "" } else { "; " }, self.failures);
        }
        Row { name: self.contender.name, samples: self.samples, note }
    }
}
