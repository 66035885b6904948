//! A run of blocks: every token's weight from its sketch, and the tokens that may matter.

use super::super::convert::half_bytes;
use super::super::exp::LEAST_POWER as LEAST;
use super::super::level::{Level, Tier};
use super::super::prefetch::prefetch;
use super::super::shares::{self, TOKENS};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{GROUP_TOKENS, MAX_CHANNELS, SketchShape};
use crate::params::MAX_BLOCK_TOKENS;
use half::f16;
use std::f32::consts::{LN_2, LOG2_E};

/// Queries that are scored together.
pub const GROUP: usize = 4;

/// Weights beyond 2 to this power are made anew, relative to a higher score. Sums of as many of
/// them as there can be tokens are still far from the largest f32.
pub(super) const HIGHEST: f32 = 60.0;

/// Blocks between the one whose query is made ready and the one whose sketch is asked for.
const BLOCKS_AHEAD: usize = 2;

/// Consecutive blocks of one head, side by side, and the queries that look at them.
pub struct SketchRun<'a> {
    pub shape: SketchShape,
    /// Tokens of a block.
    pub n_tokens: usize,
    /// `[n_blocks][code_bytes]`
    pub codes: &'a [u8],
    /// Minimum and scale of each channel, `[n_blocks][2][channels]`.
    pub channels: &'a [f16],
    /// `[n_group][channels]`
    pub q: &'a [f32],
    pub n_group: usize,
    /// What each block adds to the scores of each query: number b of query g at
    /// `g * offset_stride + b`.
    pub offsets: &'a [f32],
    pub offset_stride: usize,
    /// A token is a candidate if its share, the mean over the queries of its part of Z, would exceed
    /// this with what is known of Z when its block is scored; below 0 every token is.
    pub limit: f32,
}

/// Of each block and query: the score that its weights are relative to, and their sum. Number b of
/// query g stands at `g * stride + b`.
pub struct BlockSums<'a> {
    /// What weights are to be relative to, a few queries' at a time (zeros beyond n_group): a score
    /// that is no larger than log Z, or not finite where nothing is known of Z. Raised where a score
    /// lies far above it.
    pub running: &'a mut [[f32; GROUP]],
    pub reference: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub stride: usize,
    /// Room for what is known of Z meanwhile, and for what makes shares of weights.
    pub known: &'a mut [[f32; GROUP]],
    pub factors: &'a mut [[f32; GROUP]],
    /// Room for a block's weights, `[n_group][n_tokens rounded up to 16]`.
    pub weights: &'a mut [f32],
}

/// The candidates of a run, block by block. Lists have room for all tokens of the run and
/// [`TOKENS`] numbers more, where anything may be written.
pub struct Candidates<'a> {
    /// Their places in their blocks, rising.
    pub tokens: &'a mut [u32],
    /// Their weights, of each block `[n_group][count]`.
    pub lines: &'a mut [f32],
    /// How many of them each block has.
    pub counts: &'a mut [u32],
}

/// Scores a run of blocks, sums their weights, exp(score - reference), and finds the candidates;
/// returns how many these are. A weight has a relative error of 4e-6 and that of its score; none
/// is less than 2^-127.
///
/// The score of token t is `offset + sum over c of q[c] * (minimum[c] + scale[c] * code[t][c])`.
/// Fast paths round q * scale to int8, `step` = max |q * scale| / 127 over the block's channels,
/// and correct it, so that a score is off by no more than step / 2 * sum |code - middle|, the
/// middle being 7.5 and 1.5; that is about a hundredth of the variance that sketching itself has.
pub fn sketch_run(run: &SketchRun, sums: &mut BlockSums, found: &mut Candidates) -> usize {
    sketch_run_at(Level::best(), run, sums, found)
}

/// [`sketch_run`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn sketch_run_at(
    level: Level,
    run: &SketchRun,
    sums: &mut BlockSums,
    found: &mut Candidates,
) -> usize {
    run.shape.check();
    let (channels, n_group, n) = (run.shape.channels(), run.n_group, run.n_blocks());
    assert!(n_group > 0 && n > 0 && run.n_tokens > 0);
    assert_eq!(run.channels.len(), n * 2 * channels);
    assert_eq!(run.codes.len(), n * run.shape.code_bytes(run.n_tokens));
    assert_eq!(run.q.len(), n_group * channels);
    assert!((n_group - 1) * run.offset_stride + n <= run.offsets.len());
    let of_group = [sums.running.len(), sums.known.len(), sums.factors.len()];
    assert_eq!(of_group, [n_group.div_ceil(GROUP); 3]);
    assert!(sums.weights.len() >= n_group * run.stride());
    assert!(run.n_tokens <= MAX_BLOCK_TOKENS && found.counts.len() >= n);
    assert!(found.tokens.len() >= n * run.n_tokens + TOKENS);
    assert!(found.lines.len() >= n * run.n_tokens * n_group + TOKENS);
    match level.tier() {
        // SAFETY: the scalar kernel asks for nothing.
        Tier::Scalar => unsafe { run.weigh::<Scalar>(sums, found) },
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::run_avx2(run, sums, found) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::run_avx512(run, sums, found) },
    }
}

/// One block and the queries that look at it.
pub(super) struct Block<'a> {
    pub shape: SketchShape,
    pub codes: &'a [u8],
    pub minimum: &'a [f16],
    pub scale: &'a [f16],
    pub n_tokens: usize,
    pub q: &'a [f32],
    pub offset: &'a [f32],
    /// From one query's offset to the next one's.
    pub offset_stride: usize,
    /// From one query's weights to the next one's: whole groups of tokens.
    pub stride: usize,
}

/// Queries first..first + n, n at most GROUP.
#[derive(Clone, Copy)]
pub(super) struct Few {
    pub first: usize,
    pub n: usize,
}

/// Of a few queries: the largest weight's logarithm to base 2, and the sum of all weights.
pub(super) struct Weighed {
    pub top: [f32; GROUP],
    pub sum: [f32; GROUP],
}

/// How a level does it.
///
/// # Safety
/// Methods may be called only where the level's instructions exist, with lengths as
/// [`sketch_run_at`] checks them.
pub(super) trait Kernel {
    /// A few queries made ready for a block.
    type Ready;
    fn room() -> Self::Ready;
    unsafe fn prepare(block: &Block, few: Few, ready: &mut Self::Ready);
    /// Writes the weights of a block's tokens by a few queries, relative to `reference`, to
    /// `lines`; what stands there beyond `n_tokens` is unspecified.
    unsafe fn weigh(
        block: &Block,
        few: Few,
        reference: &[f32; GROUP],
        ready: &Self::Ready,
        lines: &mut [f32],
    ) -> Weighed;
    unsafe fn tokens_above(
        weights: &shares::Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize;
}

impl SketchRun<'_> {
    fn n_blocks(&self) -> usize {
        self.channels.len() / (2 * self.shape.channels())
    }

    fn stride(&self) -> usize {
        self.n_tokens.next_multiple_of(GROUP_TOKENS)
    }

    #[inline(always)]
    fn block(&self, b: usize) -> Block<'_> {
        let (code_bytes, channels) = (self.shape.code_bytes(self.n_tokens), self.shape.channels());
        let (minimum, scale) = self.channels[b * 2 * channels..][..2 * channels].split_at(channels);
        Block {
            shape: self.shape,
            codes: &self.codes[b * code_bytes..][..code_bytes],
            minimum,
            scale,
            n_tokens: self.n_tokens,
            q: self.q,
            offset: &self.offsets[b..],
            offset_stride: self.offset_stride,
            stride: self.stride(),
        }
    }

    fn few(&self, chunk: usize) -> Few {
        let first = chunk * GROUP;
        Few { first, n: GROUP.min(self.n_group - first) }
    }

    /// The processor's own prefetching ends with a page, which few blocks fill.
    #[inline(always)]
    fn ask_for(&self, b: usize) {
        let (code_bytes, channels) = (self.shape.code_bytes(self.n_tokens), self.shape.channels());
        prefetch(self.codes.get(b * code_bytes..(b + 1) * code_bytes).unwrap_or_default());
        let channels = self.channels.get(b * 2 * channels..(b + 1) * 2 * channels);
        prefetch(half_bytes(channels.unwrap_or_default()));
    }

    /// The loop over blocks. The next queries are made ready before a block is weighed: theirs is
    /// a chain of dependent steps, which the weighing's many independent ones hide.
    ///
    /// # Safety
    /// As the kernel's.
    #[inline(always)]
    pub(super) unsafe fn weigh<K: Kernel>(
        &self,
        sums: &mut BlockSums,
        found: &mut Candidates,
    ) -> usize {
        let (n_group, n_blocks, stride) = (self.n_group, self.n_blocks(), self.stride());
        let n_chunks = n_group.div_ceil(GROUP);
        let part = (n_group as f32).recip();
        sums.known.fill([1.0; GROUP]);
        let (mut ready, mut next) = (K::room(), K::room());
        let (mut ready, mut next) = (&mut ready, &mut next);
        let mut n_found = 0;
        // SAFETY: by the contract.
        unsafe { K::prepare(&self.block(0), self.few(0), ready) };
        for b in 0..n_blocks {
            self.ask_for(b + 1 + BLOCKS_AHEAD);
            let block = self.block(b);
            for chunk in 0..n_chunks {
                let few = self.few(chunk);
                // SAFETY: by the contract.
                unsafe {
                    if chunk + 1 < n_chunks {
                        K::prepare(&block, self.few(chunk + 1), next);
                    } else if b + 1 < n_blocks {
                        K::prepare(&self.block(b + 1), self.few(0), next);
                    }
                    let mut reference = finite(&sums.running[chunk]);
                    let range = few.first * stride..(few.first + few.n) * stride;
                    let lines = &mut sums.weights[range.clone()];
                    let mut weighed = K::weigh(&block, few, &reference, ready, lines);
                    if sums.raise(chunk, &weighed) {
                        reference = sums.running[chunk];
                        weighed =
                            K::weigh(&block, few, &reference, ready, &mut sums.weights[range]);
                    }
                    sums.keep(b, few, &reference, &weighed, part);
                }
                std::mem::swap(&mut ready, &mut next);
            }
            let weights = shares::Weighed {
                weights: sums.weights,
                stride,
                n_tokens: self.n_tokens,
                factors: &sums.factors.as_flattened()[..n_group],
            };
            let tokens = &mut found.tokens[n_found..];
            let lines = &mut found.lines[n_found * n_group..];
            // SAFETY: by the contract.
            let n = unsafe { K::tokens_above(&weights, self.limit, tokens, lines) };
            found.counts[b] = n as u32;
            n_found += n;
        }
        n_found
    }
}

/// What a few queries' weights are relative to.
#[inline(always)]
fn finite(running: &[f32; GROUP]) -> [f32; GROUP] {
    running.map(|running| if running.abs() < f32::INFINITY { running } else { 0.0 })
}

impl BlockSums<'_> {
    /// Takes what a few queries' weights are relative to up to their largest scores, where that is
    /// needed.
    #[inline(always)]
    fn raise(&mut self, chunk: usize, weighed: &Weighed) -> bool {
        let running = &mut self.running[chunk];
        let mut any = false;
        for (running, top) in running.iter().zip(weighed.top) {
            any |= !(running.abs() < f32::INFINITY && top <= HIGHEST);
        }
        if any {
            let reference = finite(running);
            for i in 0..GROUP {
                if !(running[i].is_finite() && weighed.top[i] <= HIGHEST) {
                    running[i] = reference[i] + weighed.top[i] * LN_2;
                    // The block that has this score tells more of Z than all before it.
                    self.known[chunk][i] = 0.0;
                }
            }
        }
        any
    }

    /// Writes down a block's sums by a few queries, and what makes shares of their weights: with what
    /// was known before them, since a sum takes its time.
    #[inline(always)]
    fn keep(&mut self, b: usize, few: Few, reference: &[f32; GROUP], weighed: &Weighed, part: f32) {
        let chunk = few.first / GROUP;
        let known = self.known[chunk].iter_mut().zip(weighed.sum);
        for (factor, (known, sum)) in self.factors[chunk].iter_mut().zip(known) {
            *factor = part / known.max(1.0);
            *known += sum;
        }
        for (i, (reference, sum)) in reference.iter().zip(weighed.sum).take(few.n).enumerate() {
            let at = (few.first + i) * self.stride + b;
            self.reference[at] = *reference;
            self.sum[at] = sum;
        }
    }
}

/// The reference: plain code, exact to f32.
struct Scalar;

impl Kernel for Scalar {
    type Ready = ();

    fn room() {}

    unsafe fn prepare(_: &Block, _: Few, _: &mut ()) {}

    unsafe fn weigh(
        block: &Block,
        few: Few,
        reference: &[f32; GROUP],
        _: &(),
        lines: &mut [f32],
    ) -> Weighed {
        let channels = block.shape.channels();
        let mut s = [0.0; MAX_CHANNELS];
        let mut weighed = Weighed { top: [f32::NEG_INFINITY; GROUP], sum: [0.0; GROUP] };
        for (i, line) in lines.chunks_mut(block.stride).enumerate() {
            let g = few.first + i;
            let q = &block.q[g * channels..][..channels];
            let mut base = block.offset[g * block.offset_stride] - reference[i];
            for c in 0..channels {
                base += q[c] * block.minimum[c].to_f32();
                s[c] = q[c] * block.scale[c].to_f32();
            }
            for (t, weight) in line[..block.n_tokens].iter_mut().enumerate() {
                let term =
                    |(c, s): (usize, &f32)| s * f32::from(block.shape.code(block.codes, t, c));
                let score = base + s[..channels].iter().enumerate().map(term).sum::<f32>();
                let power = LOG2_E * score;
                weighed.top[i] = weighed.top[i].max(power);
                *weight = power.max(LEAST).exp2();
                weighed.sum[i] += *weight;
            }
        }
        weighed
    }

    unsafe fn tokens_above(
        weights: &shares::Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize {
        shares::tokens_above_at(Level::SCALAR, weights, limit, tokens, lines)
    }
}
