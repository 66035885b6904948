use super::super::testing::Random;
use super::*;

/// One block's scores at a given level: the scalar one is exact to f32.
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
    let block = ScoredBlock {
        shape: *shape,
        minimum,
        scale,
        n_tokens,
        q,
        offset,
        offset_stride: 1,
        stride,
    };
    let padded = n_tokens.next_multiple_of(GROUP_TOKENS);
    for (chunk, lines) in out.chunks_mut(GROUP * stride).enumerate() {
        let first = chunk * GROUP;
        let few = Few { first, n: GROUP.min(n_group - first), reference: [0.0; GROUP] };
        match level.tier() {
            Tier::Scalar => scores_scalar(&block, codes, &few, lines),
            // SAFETY: the level proves that the machine has the instructions; lengths are right.
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => unsafe { x86::scores_avx2(&block, codes, &few, lines) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => unsafe { x86::scores_avx512(&block, codes, &few, lines) },
        }
        for line in lines.chunks_mut(stride) {
            line[..padded].iter_mut().for_each(|power| *power *= LN_2);
        }
    }
}

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
                    let products =
                        (0..channels).map(|c| q[g * channels + c].abs() * packed.scale[c].to_f32());
                    let step = products.fold(0.0, f32::max) / 127.0;
                    for t in 0..n_tokens {
                        let away: f32 = (0..channels)
                            .map(|c| {
                                let middle = if c < n4 { 7.5 } else { 1.5 };
                                (f32::from(packed.shape.code(&packed.codes, t, c)) - middle).abs()
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
                // Nothing is known, something near the scores, something far too low.
                for known in [f32::NEG_INFINITY, 1.5, -1000.0] {
                    let mut weights = vec![0.0; 5 * n_group * stride];
                    let mut sum = vec![0.0; n_group * 9];
                    let (mut running, mut reference) = (vec![known; n_group], sum.clone());
                    let mut kept = [false; 5];
                    let mut sums = BlockSums {
                        running: &mut running,
                        reference: &mut reference,
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
                        let weights = kept[b].then(|| found.next().unwrap());
                        for (g, row) in rows.iter().enumerate() {
                            let (m, reference) = (highest(row), reference[g * 9 + b]);
                            // Sums of f32, of terms that may cancel.
                            let size = m.abs() + reference.abs() + 10.0 * shape.channels() as f32;
                            let is_known = reference == known;
                            assert!(is_known || reference <= m.max(running[g]) + 1e-3);
                            assert!(m - reference < (HIGHEST + 0.1) * LN_2, "{m} {reference}");
                            let bound = 1e-5 + 1e-6 * f64::from(size);
                            let weight = |s: &f32| (f64::from(*s) - f64::from(reference)).exp();
                            let right: f64 = row.iter().map(weight).sum();
                            let error = (f64::from(sum[g * 9 + b]) - right).abs();
                            assert!(error < bound * right + 1e-35, "{level:?} {n4} {n2} at {m}");
                            let Some(weights) = weights else { continue };
                            for (s, w) in row.iter().zip(&weights[g * stride..]) {
                                let right = weight(s);
                                let error = (f64::from(*w) - right).abs();
                                assert!(error < bound * right + 1e-37, "{right} {w}");
                            }
                        }
                    }
                    assert_eq!(n_kept, kept.iter().filter(|kept| **kept).count());
                }
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
