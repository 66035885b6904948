//! The least time a decode step can take on this machine: the bytes that it must read over the
//! rate at which the same threads read as many, and its arithmetic over its rates.

use std::hint::black_box;

use sekv::cache::{Histogram, Statistics};
use sekv::kernels::{SketchShape, exp_minus};
use sekv::pool::Pool;

use crate::generator::{DIM, N_HEADS, N_KV_HEADS};
use crate::memory::Buffer;
use crate::rounds::{quantile, seconds};

/// Of one decode step, means over its queries.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub n_tokens: usize,
    pub n_sealed: usize,
    /// Tokens a KV head.
    pub fetched: f64,
    pub middle: f64,
    /// Sketches, means and residents, all of which every step reads.
    pub fast_bytes: f64,
}

/// int8 rows with a scale for each 16 elements, keys and values.
const ROW_BYTES: f64 = 2.0 * (DIM + DIM / 16 * 2) as f64;
/// 2 bits a coefficient, d/4 coefficients.
const COEFFICIENT_BYTES: f64 = DIM as f64 / 16.0;

impl Step {
    /// From what a context counted between two moments.
    pub fn new(before: &Statistics, statistics: &Statistics) -> Self {
        let memory = &statistics.memory;
        let mean = |before: &Histogram, after: &Histogram| {
            let sum = |h: &Histogram| h.mean() * h.count() as f64;
            (sum(after) - sum(before)) / (after.count() - before.count()) as f64
        };
        let (was, is) = (&before.counters, &statistics.counters);
        Self {
            n_tokens: statistics.n_tokens as usize + 1,
            n_sealed: statistics.n_sealed as usize,
            fetched: mean(&was.fetched, &is.fetched),
            middle: mean(&was.middle, &is.middle),
            fast_bytes: (memory.fast_sketch + memory.fast_mean) as f64
                + statistics.n_resident as f64 * ROW_BYTES * N_KV_HEADS as f64,
        }
    }

    /// Bytes that must be read (docs/architecture.md): all sketches, means and residents, the
    /// rows of the tokens that are fetched, the coefficients of those in the middle.
    pub fn bytes(&self) -> f64 {
        let chosen = self.fetched * ROW_BYTES + self.middle * COEFFICIENT_BYTES;
        self.fast_bytes + chosen * N_KV_HEADS as f64
    }

    /// Seconds of arithmetic on `rates`: dot products of bytes and an exponential for every
    /// sealed token and head, multiply-adds for every row read exactly and every coarse row.
    pub fn arithmetic(&self, shape: SketchShape, rates: &Rates) -> f64 {
        let scores = self.n_sealed as f64 * N_HEADS as f64;
        // Four channels of 16 tokens an instruction.
        let dots = scores / 16.0 * (shape.channels() as f64 / 4.0);
        let exact = self.fetched * N_KV_HEADS as f64 + (self.n_tokens - self.n_sealed) as f64 * 8.0;
        let coarse = self.n_sealed as f64 / 64.0 * N_KV_HEADS as f64;
        let group = (N_HEADS / N_KV_HEADS) as f64;
        let multiplies = (exact + coarse) * group * (2 * DIM) as f64 / 16.0;
        dots / rates.dots + scores / rates.exponentials + multiplies / rates.multiplies
    }
}

/// What all threads together do in a second.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Dot products of 64 bytes, in registers: one VNNI instruction, or with AVX2 two products and
    /// two sums.
    pub dots: f64,
    /// 16 f32 multiply-adds, in registers: one instruction of AVX-512, two of AVX2.
    pub multiplies: f64,
    /// The library's exponentials, values in the first-level cache.
    pub exponentials: f64,
}

impl Rates {
    /// None where the library's kernels use neither AVX-512 with VNNI nor AVX2.
    pub fn measure(pool: &mut Pool) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if let Some((dots, multiplies)) = registers::best() {
            const LOOPS: usize = 100_000;
            let n = pool.n_threads() as f64;
            let mut rate = |a_loop: f64, loops: usize, run: fn(usize)| {
                let mut times = Vec::new();
                for _ in 0..5 {
                    let n_threads = pool.n_threads();
                    times.push(seconds(|| pool.team(|t| t.for_each(n_threads, |_| run(loops)))));
                }
                n * loops as f64 * a_loop / quantile(&times, 0.5)
            };
            return Some(Self {
                dots: rate(registers::A_LOOP, LOOPS, dots),
                multiplies: rate(registers::A_LOOP, LOOPS, multiplies),
                exponentials: rate(4096.0, 50, exponentials),
            });
        }
        let _ = pool;
        None
    }
}

fn exponentials(loops: usize) {
    let start: Vec<f32> = (0..4096).map(|i| -(i as f32) / 512.0).collect();
    let mut values = start.clone();
    for _ in 0..loops {
        values.copy_from_slice(&start);
        black_box(exp_minus(black_box(&mut values), 0.5));
    }
}

#[cfg(target_arch = "x86_64")]
mod registers {
    use sekv::kernels::Level;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    const CHAINS: usize = 12;
    pub const A_LOOP: f64 = CHAINS as f64;

    /// Does something a number of times.
    pub type Loop = fn(usize);

    /// What measures dot products and multiply-adds, each so many times A_LOOP.
    pub fn best() -> Option<(Loop, Loop)> {
        match Level::best().name() {
            "avx512" => Some((dots, multiplies)),
            "avx2" => Some((dots_avx2, multiplies_avx2)),
            _ => None,
        }
    }

    fn dots_avx2(loops: usize) {
        #[target_feature(enable = "avx2")]
        fn run(loops: usize) {
            let (mut a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(5)));
            let mut sums = [[_mm256_setzero_si256(); 2]; CHAINS / 2];
            for _ in 0..2 * loops {
                // Else the products would be taken out of the loop.
                a = black_box(a);
                for halves in &mut sums {
                    for sum in halves {
                        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(a, b));
                    }
                }
            }
            black_box(sums);
        }
        // SAFETY: only handed out where the instructions are there.
        unsafe { run(loops) }
    }

    fn multiplies_avx2(loops: usize) {
        #[target_feature(enable = "avx2,fma")]
        fn run(loops: usize) {
            let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(0.25)));
            let mut sums = [_mm256_setzero_ps(); CHAINS];
            for _ in 0..2 * loops {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(*sum, a, b);
                }
            }
            black_box(sums);
        }
        // SAFETY: only handed out where the instructions are there.
        unsafe { run(loops) }
    }

    fn dots(loops: usize) {
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn run(loops: usize) {
            let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(5)));
            let mut sums = [_mm512_setzero_si512(); CHAINS];
            for _ in 0..loops {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, a, b);
                }
            }
            black_box(sums);
        }
        // SAFETY: only handed out where the instructions are there.
        unsafe { run(loops) }
    }

    fn multiplies(loops: usize) {
        #[target_feature(enable = "avx512f")]
        fn run(loops: usize) {
            let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
            let mut sums = [_mm512_setzero_ps(); CHAINS];
            for _ in 0..loops {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, a, b);
                }
            }
            black_box(sums);
        }
        // SAFETY: only handed out where the instructions are there.
        unsafe { run(loops) }
    }
}

/// Memory to read, as much as a step reads.
pub struct Reading {
    data: Buffer<u64>,
}

impl Reading {
    pub fn new(bytes: f64) -> Self {
        let mut data = Buffer::new(bytes as usize / 8);
        data.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = i as u64);
        Self { data }
    }

    /// Seconds that the pool's threads take to read all of it.
    pub fn read(&self, pool: &mut Pool) -> f64 {
        let data = self.data.as_slice();
        let pieces = 4 * pool.n_threads();
        let piece = data.len().div_ceil(pieces);
        seconds(|| {
            pool.team(|team| {
                team.for_each(pieces, |i| {
                    let piece =
                        &data[(i * piece).min(data.len())..((i + 1) * piece).min(data.len())];
                    black_box(sum(piece));
                });
            });
        })
    }
}

fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn wide(data: &[u64]) -> u64 {
            lanes(data)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the instructions are there.
            return unsafe { wide(data) };
        }
    }
    lanes(data)
}

#[inline(always)]
fn lanes(data: &[u64]) -> u64 {
    let mut sums = [0u64; 64];
    for chunk in data.chunks_exact(64) {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*x);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Seconds that the pool's threads take to copy f16 rows.
pub fn copy(pool: &mut Pool, from: &[half::f16], to: &mut [half::f16]) -> f64 {
    let piece = from.len().div_ceil(4 * pool.n_threads());
    let mut pieces: Vec<_> = from.chunks(piece).zip(to.chunks_mut(piece)).collect();
    seconds(|| {
        pool.team(|team| team.for_each_mut(&mut pieces, |_, (from, to)| to.copy_from_slice(from)));
    })
}
