//! Scores of a block of tokens from their sketch: a partial key, some channels at 4 bits and some
//! at 2, `key[c] ~= minimum[c] + scale[c] * code[c]`.
//!
//! Channels are in the sketch's own order: the 4-bit ones (padded to a multiple of 8), then the
//! 2-bit ones (padded to 16). Tokens are packed in groups of 16; a group holds its 4-bit units,
//! then its 2-bit units, 64 bytes each, byte `t * 4 + c` for token t of 16:
//!
//! - 4-bit unit u, channels 8u..8u+8, c in 0..4: low nibble channel 8u + c, high 8u + 4 + c;
//! - 2-bit unit u, channels 16u..16u+16 of the 2-bit ones: bits 2k..2k+2 are channel 16u + 4k + c.
//!
//! One 64-byte load is then 16 tokens of 8 or 16 channels, and after a shift and a mask each dword
//! holds four neighbouring channels of one token, which is what a dot product of bytes wants.

use super::convert::{f16_at_least, f16_at_most, half_bytes};
use super::exp::LEAST_POWER as LEAST;
use super::level::{Level, Tier};
use super::prefetch::prefetch;
use crate::model::MAX_HEAD_DIM;
use half::f16;
use std::f32::consts::{LN_2, LOG2_E};
use std::slice::ChunksMut;

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Tokens that share a unit.
pub const GROUP_TOKENS: usize = 16;
/// Bytes of a unit.
pub const UNIT_BYTES: usize = 64;
/// Channels that a sketch may have: the largest head dimension and its padding.
pub const MAX_CHANNELS: usize = MAX_HEAD_DIM + 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct SketchShape {
    /// Channels of 4 bits, a multiple of 8.
    pub n4: usize,
    /// Channels of 2 bits, a multiple of 16.
    pub n2: usize,
}

impl SketchShape {
    pub fn channels(&self) -> usize {
        self.n4 + self.n2
    }

    /// Bytes of the codes of `n_tokens` tokens; the last group is whole.
    pub fn code_bytes(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(GROUP_TOKENS) * self.group_bytes()
    }

    fn group_bytes(&self) -> usize {
        (self.n4 / 8 + self.n2 / 16) * UNIT_BYTES
    }

    /// Token `t`'s code of channel `c`.
    #[inline(always)]
    fn code(&self, codes: &[u8], t: usize, c: usize) -> u8 {
        let group = t / GROUP_TOKENS * self.group_bytes();
        let lane = t % GROUP_TOKENS * 4 + c % 4;
        if c < self.n4 {
            codes[group + c / 8 * UNIT_BYTES + lane] >> (c % 8 / 4 * 4) & 15
        } else {
            let c = c - self.n4;
            let unit = self.n4 / 8 + c / 16;
            codes[group + unit * UNIT_BYTES + lane] >> (c % 16 / 4 * 2) & 3
        }
    }

    fn check(&self) {
        assert!(self.n4.is_multiple_of(8) && self.n2.is_multiple_of(16), "{self:?}");
        assert!(self.channels() <= MAX_CHANNELS, "{self:?}");
    }
}

/// Packs `rows`, `[n_tokens][channels]` in the sketch's order of channels.
///
/// Codes are made against the minimum and scale as rounded to f16. The minimum is rounded down
/// and the scale up, so that the codes span the channel and none is clipped; a constant channel
/// has scale 0 and its value, to the nearest, as minimum.
pub fn sketch_pack(
    shape: &SketchShape,
    rows: &[f32],
    n_tokens: usize,
    codes: &mut [u8],
    minimum: &mut [f16],
    scale: &mut [f16],
) {
    shape.check();
    let channels = shape.channels();
    assert_eq!(rows.len(), n_tokens * channels);
    assert_eq!(codes.len(), shape.code_bytes(n_tokens));
    assert_eq!((minimum.len(), scale.len()), (channels, channels));
    codes.fill(0);
    let (units4, units2) = (shape.n4 / 8, shape.n2 / 16);
    for unit in 0..units4 + units2 {
        // Unit by unit, since these are the channels that share bytes.
        let pack = if unit < units4 { pack_unit::<8> } else { pack_unit::<16> };
        let c = if unit < units4 { 8 * unit } else { shape.n4 + 16 * (unit - units4) };
        let units = codes[unit * UNIT_BYTES..].chunks_mut(shape.group_bytes());
        pack(c, rows, channels, units, &mut minimum[c..], &mut scale[c..]);
    }
}

/// Channels c..c + WIDTH, as codes of 32 / WIDTH bits, in the units that begin each of `units`.
fn pack_unit<const WIDTH: usize>(
    c: usize,
    rows: &[f32],
    channels: usize,
    units: ChunksMut<u8>,
    minimum: &mut [f16],
    scale: &mut [f16],
) {
    let bits = 32 / WIDTH;
    let grids = Grids::<WIDTH>::over(rows.chunks_exact(channels).map(|row| &row[c..]), bits);
    minimum[..WIDTH].copy_from_slice(&grids.minimum);
    scale[..WIDTH].copy_from_slice(&grids.scale);
    for (unit, rows) in units.zip(rows.chunks(GROUP_TOKENS * channels)) {
        for (bytes, row) in unit.chunks_exact_mut(4).zip(rows.chunks_exact(channels)) {
            for (i, code) in grids.codes(&row[c..]).into_iter().enumerate() {
                bytes[i % 4] |= code << (i / 4 * bits);
            }
        }
    }
}

/// The evenly spaced values that the codes of WIDTH neighbouring channels stand for. Written so
/// that the compiler makes vectors of it.
pub(super) struct Grids<const WIDTH: usize> {
    pub minimum: [f16; WIDTH],
    pub scale: [f16; WIDTH],
    origin: [f32; WIDTH],
    inverse: [f32; WIDTH],
    top: f32,
}

impl<const WIDTH: usize> Grids<WIDTH> {
    /// The grids that span the first WIDTH values of each row, all finite.
    pub fn over<'a>(rows: impl Iterator<Item = &'a [f32]>, bits: usize) -> Self {
        let mut low = [f32::INFINITY; WIDTH];
        let mut high = [f32::NEG_INFINITY; WIDTH];
        for row in rows {
            for i in 0..WIDTH {
                low[i] = if row[i] < low[i] { row[i] } else { low[i] };
                high[i] = if row[i] > high[i] { row[i] } else { high[i] };
            }
        }
        let mut grids = Grids {
            minimum: [f16::ZERO; WIDTH],
            scale: [f16::ZERO; WIDTH],
            origin: [0.0; WIDTH],
            inverse: [0.0; WIDTH],
            top: ((1 << bits) - 1) as f32,
        };
        for i in 0..WIDTH {
            // No rows at all leave the grid of zeros.
            if low[i] < high[i] {
                let minimum = f16_at_most(low[i]).max(f16::MIN);
                let span = high[i] - minimum.to_f32();
                let scale = f16_at_least(span / grids.top).min(f16::MAX);
                (grids.minimum[i], grids.scale[i]) = (minimum, scale);
                grids.origin[i] = minimum.to_f32();
                grids.inverse[i] = 1.0 / scale.to_f32();
            } else if low[i] == high[i] {
                grids.minimum[i] = f16::from_f32(low[i]).clamp(f16::MIN, f16::MAX);
            }
        }
        grids
    }

    /// The codes nearest to the first WIDTH values of `row`.
    #[inline(always)]
    pub fn codes(&self, row: &[f32]) -> [u8; WIDTH] {
        let row = &row[..WIDTH];
        let mut codes = [0; WIDTH];
        for i in 0..WIDTH {
            let steps = (row[i] - self.origin[i]) * self.inverse[i];
            let steps = if steps > 0.0 { steps } else { 0.0 };
            let steps = if steps < self.top { steps } else { self.top };
            // 2^23 leaves the whole number, rounded to even, in the lowest bits.
            codes[i] = (steps + 8_388_608.0).to_bits() as u8;
        }
        codes
    }
}

/// Queries that are scored together.
const GROUP: usize = 4;

/// Weights beyond 2 to this power are made anew, relative to a higher score. Sums of as many of
/// them as there can be tokens are still far from the largest f32.
const HIGHEST: f32 = 60.0;

/// Blocks between the one in hand and the one whose codes are asked for.
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
    /// From one query's weights to the next one's within a block: whole groups of 16 tokens.
    pub stride: usize,
    /// A block all of whose scores are below every query's floor keeps no weights, `[n_group]`.
    pub floor: &'a [f32],
}

/// Of each block and query: the score that its weights are relative to, and their sum. Number b of
/// query g stands at `g * stride + b`.
pub struct BlockSums<'a> {
    /// What weights are to be relative to, `[n_group]`: a score that is no larger than log Z, or not
    /// finite where nothing is known of Z. Raised where a score lies far above it.
    pub running: &'a mut [f32],
    pub reference: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub stride: usize,
    /// Whether block b keeps its weights.
    pub kept: &'a mut [bool],
}

impl BlockSums<'_> {
    /// Takes query g's reference up to its largest score of the last block where that is needed.
    fn raise(&mut self, few: &mut Few, weighed: &Weighed) -> bool {
        let mut any = false;
        for i in 0..few.n {
            let running = &mut self.running[few.first + i];
            if !running.is_finite() || weighed.top[i] > HIGHEST {
                *running = few.reference[i] + weighed.top[i] * LN_2;
                few.reference[i] = *running;
                any = true;
            }
        }
        any
    }
}

impl SketchRun<'_> {
    fn n_blocks(&self) -> usize {
        self.channels.len() / (2 * self.shape.channels())
    }

    /// The loop over blocks, given a few queries' scores of a block and what these weigh.
    #[inline(always)]
    fn score(
        &self,
        weights: &mut [f32],
        sums: &mut BlockSums,
        scores: impl Fn(&ScoredBlock, &[u8], &Few, &mut [f32]),
        weigh: impl Fn(&ScoredBlock, &Few, &mut [f32]) -> Weighed,
    ) -> usize {
        let (n_group, stride) = (self.n_group, self.stride);
        let blocks = self.codes.chunks_exact(self.shape.code_bytes(self.n_tokens));
        let channels = self.channels.chunks_exact(2 * self.shape.channels());
        let code_bytes = self.shape.code_bytes(self.n_tokens);
        let mut n_kept = 0;
        for (b, (codes, channels)) in blocks.zip(channels).enumerate() {
            // The processor's own prefetching ends with a page, which few blocks fill.
            let ahead = (b + BLOCKS_AHEAD) * code_bytes;
            prefetch(self.codes.get(ahead..ahead + code_bytes).unwrap_or_default());
            let ahead = (b + BLOCKS_AHEAD) * channels.len();
            let channels_ahead = self.channels.get(ahead..ahead + channels.len());
            prefetch(half_bytes(channels_ahead.unwrap_or_default()));
            let (minimum, scale) = channels.split_at(self.shape.channels());
            let block = ScoredBlock {
                shape: self.shape,
                minimum,
                scale,
                n_tokens: self.n_tokens,
                q: self.q,
                offset: &self.offsets[b..],
                offset_stride: self.offset_stride,
                stride,
            };
            let weights = &mut weights[n_kept * n_group * stride..][..n_group * stride];
            let mut keep = false;
            for (chunk, lines) in weights.chunks_mut(GROUP * stride).enumerate() {
                let first = chunk * GROUP;
                let mut few = Few { first, n: GROUP.min(n_group - first), reference: [0.0; GROUP] };
                let running = &sums.running[first..];
                for (reference, running) in few.reference.iter_mut().zip(running) {
                    *reference = if running.is_finite() { *running } else { 0.0 };
                }
                scores(&block, codes, &few, lines);
                let mut weighed = weigh(&block, &few, lines);
                if sums.raise(&mut few, &weighed) {
                    scores(&block, codes, &few, lines);
                    weighed = weigh(&block, &few, lines);
                }
                for i in 0..few.n {
                    let at = (first + i) * sums.stride + b;
                    let largest = few.reference[i] + weighed.top[i] * LN_2;
                    keep |= largest >= self.floor[first + i];
                    sums.reference[at] = few.reference[i];
                    sums.sum[at] = weighed.sum[i];
                }
            }
            sums.kept[b] = keep;
            n_kept += usize::from(keep);
        }
        n_kept
    }
}

/// Scores a run of blocks and sums their weights, exp(score - reference). Writes the weights of the
/// blocks that keep them to `weights`, one after the other, `[kept][n_group][stride]`, and returns
/// how many these are; `weights` has room for all blocks. What stands in a line beyond `n_tokens`
/// is unspecified. A weight has a relative error of 4e-6 and that of its score; none is less than
/// 2^-127.
///
/// The score of token t is `offset + sum over c of q[c] * (minimum[c] + scale[c] * code[t][c])`.
/// Fast paths round q * scale to int8, `step` = max |q * scale| / 127 over the block's channels,
/// and correct it, so that a score is off by no more than step / 2 * sum |code - middle|, the
/// middle being 7.5 and 1.5; that is about a hundredth of the variance that sketching itself has.
pub fn sketch_run(run: &SketchRun, weights: &mut [f32], sums: &mut BlockSums) -> usize {
    sketch_run_at(Level::best(), run, weights, sums)
}

/// [`sketch_run`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn sketch_run_at(
    level: Level,
    run: &SketchRun,
    weights: &mut [f32],
    sums: &mut BlockSums,
) -> usize {
    run.shape.check();
    let (channels, n_group, n) = (run.shape.channels(), run.n_group, run.n_blocks());
    let padded = run.n_tokens.next_multiple_of(GROUP_TOKENS);
    assert_eq!(run.channels.len(), n * 2 * channels);
    assert_eq!(run.codes.len(), n * run.shape.code_bytes(run.n_tokens));
    assert_eq!((run.q.len(), run.floor.len()), (n_group * channels, n_group));
    assert_eq!(sums.running.len(), n_group);
    assert!(n_group > 0 && n > 0 && run.stride >= padded);
    assert!((n_group - 1) * run.offset_stride + n <= run.offsets.len());
    assert!(n * n_group * run.stride <= weights.len());
    match level.tier() {
        Tier::Scalar => run.score(weights, sums, scores_scalar, weigh_scalar),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::run_avx2(run, weights, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::run_avx512(run, weights, sums) },
    }
}

/// What a block's scores are made from, apart from its codes.
struct ScoredBlock<'a> {
    shape: SketchShape,
    minimum: &'a [f16],
    scale: &'a [f16],
    n_tokens: usize,
    q: &'a [f32],
    offset: &'a [f32],
    /// From one query's offset to the next one's.
    offset_stride: usize,
    stride: usize,
}

/// Queries first..first + n, n at most GROUP, and the scores that their weights are relative to.
struct Few {
    first: usize,
    n: usize,
    reference: [f32; GROUP],
}

/// Of a few queries: the largest weight's logarithm to base 2, and the sum of all weights.
struct Weighed {
    top: [f32; GROUP],
    sum: [f32; GROUP],
}

/// Writes (score - reference) / ln 2, the logarithm to base 2 of a weight, for a few queries.
fn scores_scalar(block: &ScoredBlock, codes: &[u8], few: &Few, out: &mut [f32]) {
    let channels = block.shape.channels();
    let mut s = [0.0; MAX_CHANNELS];
    for (i, reference) in few.reference.iter().enumerate().take(few.n) {
        let g = few.first + i;
        let q = &block.q[g * channels..][..channels];
        let mut base = block.offset[g * block.offset_stride] - reference;
        for c in 0..channels {
            base += q[c] * block.minimum[c].to_f32();
            s[c] = q[c] * block.scale[c].to_f32();
        }
        for (t, out) in out[i * block.stride..][..block.n_tokens].iter_mut().enumerate() {
            let term = |(c, s): (usize, &f32)| s * f32::from(block.shape.code(codes, t, c));
            *out = LOG2_E * (base + s[..channels].iter().enumerate().map(term).sum::<f32>());
        }
    }
}

/// Turns what [`scores_scalar`] wrote into weights.
fn weigh_scalar(block: &ScoredBlock, few: &Few, lines: &mut [f32]) -> Weighed {
    let mut weighed = Weighed { top: [f32::NEG_INFINITY; GROUP], sum: [0.0; GROUP] };
    for (i, line) in lines.chunks_mut(block.stride).enumerate().take(few.n) {
        for weight in &mut line[..block.n_tokens] {
            weighed.top[i] = weighed.top[i].max(*weight);
            *weight = weight.max(LEAST).exp2();
            weighed.sum[i] += *weight;
        }
    }
    weighed
}
