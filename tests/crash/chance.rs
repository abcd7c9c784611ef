//! A seeded random generator, so that a failure can be repeated.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// SplitMix64: small, and good enough for choices.
pub struct Chance(u64);

impl Chance {
    /// Seeds from `PALISADE_SEED`, or from the clock; prints the seed.
    pub fn new() -> Self {
        let drawn = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
        let seed = std::env::var("PALISADE_SEED")
            .ok()
            .map_or_else(drawn, |seed| seed.parse().expect("PALISADE_SEED is a number"));
        eprintln!("PALISADE_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// One of the choices.
    pub fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    /// A duration below `end`.
    pub fn before(&mut self, end: Duration) -> Duration {
        Duration::from_micros(self.next() % (end.as_micros() as u64).max(1))
    }
}
