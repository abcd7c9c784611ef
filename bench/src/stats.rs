//! Medians and other statistics.

use std::time::Duration;

/// Samples of one measurement, in nanoseconds.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Adds a sample.
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// Adds a time.
    pub fn push_time(&mut self, time: Duration) {
        self.push(time.as_nanos() as f64);
    }

    /// The number of samples.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The value below which a part of all samples lies; none without samples.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last as f64 * part).round() as usize).copied()
    }

    /// The median.
    pub fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    /// The 95th percentile.
    pub fn p95(&self) -> Option<f64> {
        self.quantile(0.95)
    }

    /// The smallest sample.
    pub fn least(&self) -> Option<f64> {
        self.quantile(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let samples = Samples((1..=101).rev().map(f64::from).collect());
        assert_eq!((samples.least(), samples.median(), samples.p95()), (Some(1.0), Some(51.0), Some(96.0)));
        assert_eq!(Samples::default().median(), None);
    }
}
