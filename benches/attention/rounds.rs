//! Rivals take turns: one sample of each, round after round, so that a noisy machine is noisy for
//! all of them. What is compared is each round's ratio.

use std::time::{Duration, Instant};

/// Seconds of one rival, a sample a round.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub wall: Vec<f64>,
    /// Processor time of all threads; empty where it wasn't taken.
    pub processor: Vec<f64>,
}

impl Samples {
    pub fn median(&self) -> f64 {
        quantile(&self.wall, 0.5)
    }

    /// Distance between the quartiles, relative to the median.
    pub fn spread(&self) -> f64 {
        (quantile(&self.wall, 0.75) - quantile(&self.wall, 0.25)) / self.median()
    }

    /// Median of `other / self`, round by round: how many times faster than `other` this is.
    pub fn ratio(&self, other: &Samples) -> f64 {
        let ratios: Vec<f64> = other.wall.iter().zip(&self.wall).map(|(o, s)| o / s).collect();
        quantile(&ratios, 0.5)
    }
}

pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * at.fract()
}

/// Does its work once and returns the seconds that count.
pub type Work<'a> = Box<dyn FnMut() -> f64 + 'a>;

/// A sample takes at least this long, in calls, so that a timer's grain and a stolen slice of time
/// don't decide it.
const SAMPLE: Duration = Duration::from_millis(40);
const MOST_CALLS: usize = 200;

/// Runs every rival `n_rounds` times in turn; a sample is the median of its calls, after one that
/// isn't counted.
pub fn alternate(rivals: &mut [Work], n_rounds: usize) -> Vec<Samples> {
    let mut samples = vec![Samples::default(); rivals.len()];
    for _ in 0..n_rounds {
        for (work, samples) in rivals.iter_mut().zip(&mut samples) {
            work();
            let (started, processor) = (Instant::now(), cpu_seconds());
            let mut calls = Vec::new();
            while calls.is_empty() || (started.elapsed() < SAMPLE && calls.len() < MOST_CALLS) {
                calls.push(work());
            }
            samples.wall.push(quantile(&calls, 0.5));
            samples.processor.push((cpu_seconds() - processor) / calls.len() as f64);
        }
    }
    samples
}

/// Seconds that `work` takes.
pub fn seconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

/// Seconds of processor time that this process has used, all threads: what a busy machine leaves
/// as it is.
pub fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that every process has, and room for its time.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
