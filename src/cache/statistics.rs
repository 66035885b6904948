//! What happened: counts and times, all measured.

use std::time::Duration;

/// Counts values: exactly up to a limit, in powers of 2^(1/4) above.
#[derive(Clone, Debug)]
pub struct Histogram {
    exact: Vec<u64>,
    above: Vec<u64>,
    count: u64,
    sum: f64,
    max: u64,
}

const EXACT: usize = 1024;
const ABOVE: usize = 4 * 54;

impl Default for Histogram {
    fn default() -> Self {
        Self { exact: vec![0; EXACT], above: vec![0; ABOVE], count: 0, sum: 0.0, max: 0 }
    }
}

impl Histogram {
    pub fn add(&mut self, value: u64) {
        match self.exact.get_mut(value as usize) {
            Some(bucket) => *bucket += 1,
            None => self.above[Self::bucket(value)] += 1,
        }
        self.count += 1;
        self.sum += value as f64;
        self.max = self.max.max(value);
    }

    fn bucket(value: u64) -> usize {
        let octaves = (value as f64 / EXACT as f64).log2();
        ((octaves * 4.0) as usize).min(ABOVE - 1)
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    pub fn max(&self) -> u64 {
        self.max
    }

    /// The smallest value that a share `q` of all values does not exceed; above 1,024 to 19 %.
    pub fn quantile(&self, q: f64) -> f64 {
        let wanted = (q * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (value, n) in self.exact.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return value as f64;
            }
        }
        for (bucket, n) in self.above.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                let upper = EXACT as f64 * ((bucket + 1) as f64 / 4.0).exp2();
                return upper.min(self.max as f64);
            }
        }
        0.0
    }
}

/// Times of one step, in units of 100 ns.
#[derive(Clone, Debug, Default)]
pub struct Times(Histogram);

impl Times {
    pub fn add(&mut self, time: Duration) {
        self.0.add((time.as_nanos() / 100) as u64);
    }

    /// Seconds: median, 99th percentile, largest.
    pub fn summary(&self) -> [f64; 3] {
        let seconds = |ticks: f64| ticks * 1e-7;
        [
            seconds(self.0.quantile(0.5)),
            seconds(self.0.quantile(0.99)),
            seconds(self.0.max() as f64),
        ]
    }

    pub fn count(&self) -> u64 {
        self.0.count()
    }
}

/// Everything a context counts while it runs.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Tokens read from the slow tier, a step: one query token, one KV head, one layer.
    pub fetched: Histogram,
    /// Tokens seen through their value sketch, a step.
    pub middle: Histogram,
    pub fetched_bytes: u64,
    pub route: Times,
    pub zoom: Times,
    pub attend: Times,
    pub seal: Times,
    pub passes: u64,
    pub plans_used: u64,
    pub plans_ignored: u64,
    pub seal_failures: u64,
    /// Blocks that were made ahead of the commit that sealed them.
    pub sealed_ahead: u64,
    pub scratch_peak: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_for_small_values_and_close_for_large_ones() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|v| histogram.add(v));
        assert_eq!((histogram.quantile(0.5), histogram.quantile(0.99)), (50.0, 99.0));
        assert_eq!((histogram.mean(), histogram.max()), (50.5, 100));
        let mut large = Histogram::default();
        (0..1000).for_each(|i| large.add(10_000 + i));
        let p50 = large.quantile(0.5);
        assert!((10_000.0..=12_000.0).contains(&p50), "{p50}");
        assert_eq!(Histogram::default().quantile(0.99), 0.0);
    }
}
