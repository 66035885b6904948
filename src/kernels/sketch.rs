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

use super::convert::{f16_at_least, f16_at_most};
use super::level::{Level, Tier};
use crate::model::MAX_HEAD_DIM;
use half::f16;
use std::slice::ChunksMut;

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

/// Of each block and query: the largest score, and the sum of exp(score - largest). Number b of
/// query g stands at `g * stride + b`.
pub struct BlockSums<'a> {
    pub largest: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub stride: usize,
    /// Whether block b keeps its weights.
    pub kept: &'a mut [bool],
}

impl SketchRun<'_> {
    fn n_blocks(&self) -> usize {
        self.channels.len() / (2 * self.shape.channels())
    }

    /// The loop over blocks, given one block's scores and one row's largest and sum.
    #[inline(always)]
    fn score(
        &self,
        weights: &mut [f32],
        sums: &mut BlockSums,
        scores: impl Fn(&ScoredBlock, &[u8], &mut [f32]),
        exponentials: impl Fn(&mut [f32]) -> (f32, f32),
    ) -> usize {
        let (n_group, stride) = (self.n_group, self.stride);
        let blocks = self.codes.chunks_exact(self.shape.code_bytes(self.n_tokens));
        let channels = self.channels.chunks_exact(2 * self.shape.channels());
        let mut n_kept = 0;
        for (b, (codes, channels)) in blocks.zip(channels).enumerate() {
            let (minimum, scale) = channels.split_at(self.shape.channels());
            let block = ScoredBlock {
                shape: self.shape,
                minimum,
                scale,
                n_tokens: self.n_tokens,
                q: self.q,
                n_group,
                offset: &self.offsets[b..],
                offset_stride: self.offset_stride,
                stride,
            };
            let weights = &mut weights[n_kept * n_group * stride..][..n_group * stride];
            scores(&block, codes, weights);
            let mut keep = false;
            for (g, row) in weights.chunks_exact_mut(stride).enumerate() {
                let (largest, sum) = exponentials(&mut row[..self.n_tokens]);
                keep |= largest >= self.floor[g];
                sums.largest[g * sums.stride + b] = largest;
                sums.sum[g * sums.stride + b] = sum;
            }
            sums.kept[b] = keep;
            n_kept += usize::from(keep);
        }
        n_kept
    }
}

/// Scores a run of blocks and sums their exponentials. Writes exp(score - the block's largest) of
/// the blocks that keep them to `weights`, one after the other, `[kept][n_group][stride]`, and
/// returns how many these are; `weights` has room for all blocks. What stands in a line beyond
/// `n_tokens` is unspecified.
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
    assert!(n_group > 0 && n > 0 && run.stride >= padded);
    assert!((n_group - 1) * run.offset_stride + n <= run.offsets.len());
    assert!(n * n_group * run.stride <= weights.len());
    match level.tier() {
        Tier::Scalar => run.score(weights, sums, scores_scalar, |row| {
            let m = super::exp::max_at(level, row);
            (m, super::exp::exp_minus_at(level, row, m))
        }),
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
    n_group: usize,
    offset: &'a [f32],
    /// From one query's offset to the next one's.
    offset_stride: usize,
    stride: usize,
}

fn scores_scalar(block: &ScoredBlock, codes: &[u8], out: &mut [f32]) {
    let channels = block.shape.channels();
    let mut s = vec![0.0; channels];
    for g in 0..block.n_group {
        let q = &block.q[g * channels..][..channels];
        let mut base = block.offset[g * block.offset_stride];
        for c in 0..channels {
            base += q[c] * block.minimum[c].to_f32();
            s[c] = q[c] * block.scale[c].to_f32();
        }
        for (t, out) in out[g * block.stride..][..block.n_tokens].iter_mut().enumerate() {
            let term = |(c, s): (usize, &f32)| s * f32::from(block.shape.code(codes, t, c));
            *out = base + s.iter().enumerate().map(term).sum::<f32>();
        }
    }
}

/// One block's scores at a given level: the scalar one is exact to f32.
#[cfg(test)]
#[allow(clippy::too_many_arguments)]
fn sketch_scores_at(
    level: Level,
    shape: &SketchShape,
    codes: &[u8],
    minimum: &[f16],
    scale: &[f16],
    n_tokens: usize,
    q: &[f32],
    n_group: usize,
    offset: &[f32],
    out: &mut [f32],
    stride: usize,
) {
    shape.check();
    let channels = shape.channels();
    let padded = n_tokens.next_multiple_of(GROUP_TOKENS);
    assert_eq!(codes.len(), shape.code_bytes(n_tokens));
    assert_eq!((minimum.len(), scale.len()), (channels, channels));
    assert_eq!((q.len(), offset.len()), (n_group * channels, n_group));
    assert!(n_group == 0 || (n_group - 1) * stride + padded <= out.len());
    assert!(n_group <= 1 || stride >= padded);
    let block = ScoredBlock {
        shape: *shape,
        minimum,
        scale,
        n_tokens,
        q,
        n_group,
        offset,
        offset_stride: 1,
        stride,
    };
    match level.tier() {
        Tier::Scalar => scores_scalar(&block, codes, out),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::scores_avx2(&block, codes, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::scores_avx512(&block, codes, out) },
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    /// A packed block of random tokens, channels of different sizes.
    struct Packed {
        shape: SketchShape,
        rows: Vec<f32>,
        codes: Vec<u8>,
        minimum: Vec<f16>,
        scale: Vec<f16>,
    }

    impl Packed {
        fn new(random: &mut Random, shape: SketchShape, n_tokens: usize) -> Packed {
            let channels = shape.channels();
            let sizes: Vec<f32> = (0..channels).map(|_| random.uniform().exp2() * 3.0).collect();
            let mut rows = random.values(n_tokens * channels);
            for row in rows.chunks_mut(channels) {
                row.iter_mut().zip(&sizes).for_each(|(value, size)| *value *= size);
            }
            let mut codes = vec![0xFF; shape.code_bytes(n_tokens)];
            let mut minimum = vec![f16::ZERO; channels];
            let mut scale = vec![f16::ZERO; channels];
            sketch_pack(&shape, &rows, n_tokens, &mut codes, &mut minimum, &mut scale);
            Packed { shape, rows, codes, minimum, scale }
        }

        /// Scores of `q`'s lines, `stride` apart.
        fn scores(&self, level: Level, q: &[f32], offset: &[f32], stride: usize) -> Vec<f32> {
            let n_tokens = self.rows.len() / self.shape.channels();
            let n_group = offset.len();
            let (codes, minimum, scale) = (&self.codes, &self.minimum, &self.scale);
            let mut out = vec![7.0; n_group * stride];
            sketch_scores_at(
                level,
                &self.shape,
                codes,
                minimum,
                scale,
                n_tokens,
                q,
                n_group,
                offset,
                &mut out,
                stride,
            );
            out
        }
    }

    const SHAPES: [(usize, usize); 9] =
        [(16, 16), (8, 0), (0, 16), (40, 32), (64, 0), (16, 32), (24, 48), (1024, 32), (128, 64)];

    #[test]
    fn exact_scores_are_those_of_keys_within_half_a_step() {
        let mut random = Random::new(3);
        for (n4, n2) in SHAPES {
            for (n_tokens, n_group) in [(64, 3), (1, 1), (17, 7), (130, 2)] {
                let packed = Packed::new(&mut random, SketchShape { n4, n2 }, n_tokens);
                let channels = n4 + n2;
                let (q, offset) = (random.values(n_group * channels), random.values(n_group));
                let stride = n_tokens.next_multiple_of(GROUP_TOKENS) + 5;
                let out = packed.scores(Level::SCALAR, &q, &offset, stride);
                for g in 0..n_group {
                    for t in 0..n_tokens {
                        let (mut exact, mut bound) = (f64::from(offset[g]), 1e-3);
                        for c in 0..channels {
                            let q = f64::from(q[g * channels + c]);
                            exact += q * f64::from(packed.rows[t * channels + c]);
                            // A constant channel (one token) is rounded to f16.
                            let constant = 5e-4 * packed.minimum[c].to_f64().abs();
                            bound += q.abs() * (0.5 * packed.scale[c].to_f64() + constant);
                        }
                        let error = (exact - f64::from(out[g * stride + t])).abs();
                        assert!(error <= bound, "{n4} {n2} {t}: {error} > {bound}");
                    }
                }
            }
        }
    }

    #[test]
    fn fast_scores_are_within_the_stated_bound_of_the_exact_ones() {
        let mut random = Random::new(6);
        for (n4, n2) in SHAPES {
            for n_group in [1, 2, 3, 5, 6, 7, 8, 16] {
                let n_tokens = 1 + random.bits() as usize % 80;
                let packed = Packed::new(&mut random, SketchShape { n4, n2 }, n_tokens);
                let channels = n4 + n2;
                let mut q = random.values(n_group * channels);
                // One query of zeros, one with a channel that dwarfs the others.
                q[..channels].fill(0.0);
                q[n_group * channels - 1] *= 100.0;
                let offset = random.values(n_group);
                let stride = n_tokens.next_multiple_of(GROUP_TOKENS) + 5;
                let exact = packed.scores(Level::SCALAR, &q, &offset, stride);
                for level in Level::available() {
                    let found = packed.scores(level, &q, &offset, stride);
                    for g in 0..n_group {
                        let products = (0..channels)
                            .map(|c| q[g * channels + c].abs() * packed.scale[c].to_f32());
                        let step = products.fold(0.0, f32::max) / 127.0;
                        for t in 0..n_tokens {
                            let away: f32 = (0..channels)
                                .map(|c| {
                                    let middle = if c < n4 { 7.5 } else { 1.5 };
                                    (f32::from(packed.shape.code(&packed.codes, t, c)) - middle)
                                        .abs()
                                })
                                .sum();
                            let at = g * stride + t;
                            // The last term is the rounding of sums of f32.
                            let bound = step / 2.0 * away + 1e-5 * (step * 127.0 * away + 10.0);
                            let error = (exact[at] - found[at]).abs();
                            assert!(error <= bound, "{level:?} {n4} {n2} {at}: {error} > {bound}");
                        }
                        let beyond = n_tokens.next_multiple_of(GROUP_TOKENS)..stride;
                        assert_eq!(found[g * stride..][beyond], [7.0; 5]);
                    }
                }
            }
        }
    }

    #[test]
    fn a_run_has_each_blocks_scores_sums_and_the_weights_of_those_above_the_floor() {
        let mut random = Random::new(11);
        for (n4, n2) in SHAPES {
            for (n_tokens, n_group) in [(64, 4), (16, 3), (5, 1), (72, 6)] {
                let shape = SketchShape { n4, n2 };
                let blocks: Vec<Packed> =
                    (0..5).map(|_| Packed::new(&mut random, shape, n_tokens)).collect();
                let codes: Vec<u8> = blocks.iter().flat_map(|b| b.codes.clone()).collect();
                let both = |b: &Packed| [b.minimum.clone(), b.scale.clone()].concat();
                let channels: Vec<f16> = blocks.iter().flat_map(both).collect();
                let q = random.values(n_group * shape.channels());
                let (offsets, stride) = (random.values(n_group * 7), n_tokens.next_multiple_of(16));
                let floor = vec![2.0; n_group];
                for level in Level::available() {
                    let run = SketchRun {
                        shape,
                        n_tokens,
                        codes: &codes,
                        channels: &channels,
                        q: &q,
                        n_group,
                        offsets: &offsets,
                        offset_stride: 7,
                        stride,
                        floor: &floor,
                    };
                    let mut weights = vec![0.0; 5 * n_group * stride];
                    let (mut largest, mut sum) = (vec![0.0; n_group * 9], vec![0.0; n_group * 9]);
                    let mut kept = [false; 5];
                    let mut sums = BlockSums {
                        largest: &mut largest,
                        sum: &mut sum,
                        stride: 9,
                        kept: &mut kept,
                    };
                    let n_kept = sketch_run_at(level, &run, &mut weights, &mut sums);
                    let mut found = weights.chunks_exact(n_group * stride);
                    for (b, block) in blocks.iter().enumerate() {
                        let offset: Vec<f32> = (0..n_group).map(|g| offsets[g * 7 + b]).collect();
                        let scores = block.scores(level, &q, &offset, stride);
                        let rows: Vec<&[f32]> =
                            scores.chunks(stride).map(|row| &row[..n_tokens]).collect();
                        let highest = |row: &&[f32]| row.iter().copied().fold(f32::MIN, f32::max);
                        assert_eq!(kept[b], rows.iter().map(highest).any(|m| m >= 2.0));
                        for (g, row) in rows.iter().enumerate() {
                            let m = highest(row);
                            let right: f64 = row.iter().map(|s| f64::from(s - m).exp()).sum();
                            assert_eq!(largest[g * 9 + b], m, "{level:?} {n4} {n2}");
                            let error = (f64::from(sum[g * 9 + b]) / right - 1.0).abs();
                            assert!(error < 1e-5 + 4e-7 * f64::from(m.abs()), "{error:e} at {m}");
                        }
                        if kept[b] {
                            let weights = found.next().unwrap();
                            for (row, weights) in rows.iter().zip(weights.chunks(stride)) {
                                let m = highest(row);
                                for (s, w) in row.iter().zip(weights) {
                                    let bound = 1e-5 + 4e-7 * m.abs();
                                    assert!(((s - m).exp() - w).abs() < bound);
                                }
                            }
                        }
                    }
                    assert_eq!(n_kept, kept.iter().filter(|kept| **kept).count());
                }
            }
        }
    }

    #[test]
    fn int8_adds_about_a_hundredth_to_the_variance_of_a_sketch() {
        let mut random = Random::new(7);
        for (n4, n2) in [(16, 16), (16, 32), (32, 32), (64, 0)] {
            for level in Level::available() {
                let (mut sketch, mut int8) = (0.0f64, 0.0f64);
                for _ in 0..50 {
                    let packed = Packed::new(&mut random, SketchShape { n4, n2 }, 64);
                    let q = random.values(n4 + n2);
                    let exact = packed.scores(Level::SCALAR, &q, &[0.0], 64);
                    let found = packed.scores(level, &q, &[0.0], 64);
                    for (t, row) in packed.rows.chunks(n4 + n2).enumerate() {
                        let right: f32 = row.iter().zip(&q).map(|(k, q)| k * q).sum();
                        sketch += f64::from(exact[t] - right).powi(2);
                        int8 += f64::from(found[t] - exact[t]).powi(2);
                    }
                }
                assert!(int8 < 0.02 * sketch, "{level:?} {n4} {n2}: {}", int8 / sketch);
                println!("{level:?} {n4} {n2}: {:.4}", int8 / sketch);
            }
        }
    }

    #[test]
    fn a_constant_channel_has_scale_0() {
        let shape = SketchShape { n4: 8, n2: 0 };
        let rows = [300.0, 0.0, -2.5, 1e-9, 65_504.0, 0.25, 7.0, -0.0].repeat(20);
        let mut codes = vec![0xFF; shape.code_bytes(20)];
        let (mut minimum, mut scale) = ([f16::ONE; 8], [f16::ONE; 8]);
        sketch_pack(&shape, &rows, 20, &mut codes, &mut minimum, &mut scale);
        assert_eq!(scale, [f16::ZERO; 8]);
        let values = minimum.map(f16::to_f32);
        assert_eq!(values, [300.0, 0.0, -2.5, 0.0, 65_504.0, 0.25, 7.0, 0.0]);
        assert!(codes.iter().all(|code| *code == 0));
    }
}
