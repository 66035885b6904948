use super::super::level::Level;
use super::super::shares::TOKENS;
use super::super::testing::Random;
use super::run::HIGHEST;
use super::*;
use std::f32::consts::LN_2;

/// A score this far below what weights are relative to has the least weight.
const LEAST: f32 = -126.0 * LN_2;

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

    fn n_tokens(&self) -> usize {
        self.rows.len() / self.shape.channels()
    }

    /// Scores at a level, `[n_group][n_tokens]`, as the logarithms of weights; and the least that a
    /// query's can be.
    fn scores(&self, level: Level, q: &[f32], offset: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let blocks = Blocks::of(std::slice::from_ref(self));
        let found = blocks.weigh(level, q, offset, 1, f32::NEG_INFINITY, -1.0);
        let scores = found.lines.chunks(self.n_tokens()).zip(&found.reference);
        let scores =
            scores.flat_map(|(line, reference)| line.iter().map(move |w| w.ln() + reference));
        (scores.collect(), found.reference.iter().map(|reference| reference + LEAST).collect())
    }
}

/// Blocks side by side.
struct Blocks {
    shape: SketchShape,
    n_tokens: usize,
    n: usize,
    codes: Vec<u8>,
    channels: Vec<f16>,
}

/// What comes out of a run: of blocks `[n_group][n_blocks]`, of candidates what there are.
struct Found {
    reference: Vec<f32>,
    sum: Vec<f32>,
    running: Vec<f32>,
    counts: Vec<u32>,
    tokens: Vec<u32>,
    lines: Vec<f32>,
}

impl Blocks {
    fn of(blocks: &[Packed]) -> Blocks {
        let both = |b: &Packed| [b.minimum.clone(), b.scale.clone()].concat();
        Blocks {
            shape: blocks[0].shape,
            n_tokens: blocks[0].n_tokens(),
            n: blocks.len(),
            codes: blocks.iter().flat_map(|b| b.codes.clone()).collect(),
            channels: blocks.iter().flat_map(both).collect(),
        }
    }

    /// Offsets of a query are `stride` from those of the next.
    fn weigh(
        &self,
        level: Level,
        q: &[f32],
        offsets: &[f32],
        stride: usize,
        known: f32,
        limit: f32,
    ) -> Found {
        let (n, n_tokens, n_group) = (self.n, self.n_tokens, q.len() / self.shape.channels());
        let run = SketchRun {
            shape: self.shape,
            n_tokens,
            codes: &self.codes,
            channels: &self.channels,
            q,
            n_group,
            offsets,
            offset_stride: stride,
            limit,
        };
        let few = n_group.div_ceil(GROUP);
        let mut running = vec![[0.0; GROUP]; few];
        running.as_flattened_mut()[..n_group].fill(known);
        let mut found = Found {
            reference: vec![0.0; n_group * n],
            sum: vec![0.0; n_group * n],
            running: Vec::new(),
            counts: vec![7; n],
            tokens: vec![7; n * n_tokens + TOKENS],
            lines: vec![7.0; n * n_tokens * n_group + TOKENS],
        };
        let mut sums = BlockSums {
            running: &mut running,
            reference: &mut found.reference,
            sum: &mut found.sum,
            stride: n,
            known: &mut vec![[7.0; GROUP]; few],
            factors: &mut vec![[7.0; GROUP]; few],
            weights: &mut vec![7.0; n_group * n_tokens.next_multiple_of(GROUP_TOKENS)],
        };
        let mut candidates = Candidates {
            tokens: &mut found.tokens,
            lines: &mut found.lines,
            counts: &mut found.counts,
        };
        let n_found = sketch_run_at(level, &run, &mut sums, &mut candidates);
        found.running = running.as_flattened()[..n_group].to_vec();
        found.tokens.truncate(n_found);
        found.lines.truncate(n_found * n_group);
        found
    }
}

/// Queries whose scores differ by some ten.
fn queries(random: &mut Random, shape: SketchShape, n_group: usize) -> Vec<f32> {
    let size = (shape.channels() as f32).sqrt().recip();
    random.values(n_group * shape.channels()).iter().map(|q| q * size).collect()
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
            let (q, offset) = (queries(&mut random, packed.shape, n_group), random.values(n_group));
            let (scores, least) = packed.scores(Level::SCALAR, &q, &offset);
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
                    let right = exact.max(f64::from(least[g]));
                    let error = (right - f64::from(scores[g * n_tokens + t])).abs();
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
            let mut q = queries(&mut random, packed.shape, n_group);
            // One query of zeros, one with a channel that dwarfs the others.
            q[..channels].fill(0.0);
            q[n_group * channels - 1] *= 100.0;
            let offset = random.values(n_group);
            let (exact, exact_least) = packed.scores(Level::SCALAR, &q, &offset);
            for level in Level::available() {
                let (found, found_least) = packed.scores(level, &q, &offset);
                for g in 0..n_group {
                    let products =
                        (0..channels).map(|c| q[g * channels + c].abs() * packed.scale[c].to_f32());
                    let step = products.fold(0.0, f32::max) / 127.0;
                    let least = exact_least[g].max(found_least[g]);
                    for t in 0..n_tokens {
                        let away: f32 = (0..channels)
                            .map(|c| {
                                let middle = if c < n4 { 7.5 } else { 1.5 };
                                (f32::from(packed.shape.code(&packed.codes, t, c)) - middle).abs()
                            })
                            .sum();
                        let at = g * n_tokens + t;
                        // The last term is the rounding of sums of f32.
                        let bound = step / 2.0 * away + 1e-5 * (step * 127.0 * away + 10.0);
                        let error = (exact[at].max(least) - found[at].max(least)).abs();
                        assert!(error <= bound, "{level:?} {n4} {n2} {at}: {error} > {bound}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_run_has_each_blocks_sums_and_the_weights_of_those_that_may_matter() {
    let mut random = Random::new(11);
    // Offsets of a query, one for each block and some that are another's.
    const STRIDE: usize = 7;
    for (n4, n2) in SHAPES {
        for (n_tokens, n_group) in [(64, 4), (16, 3), (5, 1), (72, 6)] {
            let shape = SketchShape { n4, n2 };
            let blocks: Vec<Packed> =
                (0..5).map(|_| Packed::new(&mut random, shape, n_tokens)).collect();
            let run = Blocks::of(&blocks);
            let q = queries(&mut random, shape, n_group);
            let offsets = random.values(n_group * STRIDE);
            for level in Level::available() {
                // Nothing is known, something near the scores, something far too low.
                for known in [f32::NEG_INFINITY, 6.0, -1000.0] {
                    let all = run.weigh(level, &q, &offsets, STRIDE, known, -1.0);
                    assert_eq!(all.counts, [n_tokens as u32; 5]);
                    let numbers = 0..n_tokens as u32;
                    assert!((0..5).flat_map(|_| numbers.clone()).eq(all.tokens.iter().copied()));
                    let limit = 0.01;
                    let some = run.weigh(level, &q, &offsets, STRIDE, known, limit);
                    assert_eq!((&some.reference, &some.sum), (&all.reference, &all.sum));
                    let (mut lines, mut candidates) = (&some.lines[..], &some.tokens[..]);
                    for (b, block) in blocks.iter().enumerate() {
                        let of_block = (0..n_group).map(|g| offsets[g * STRIDE + b]);
                        let of_block: Vec<f32> = of_block.collect();
                        let scores = block.scores(level, &q, &of_block).0;
                        let all_lines = &all.lines[b * n_group * n_tokens..][..n_group * n_tokens];
                        for (g, row) in scores.chunks(n_tokens).enumerate() {
                            let m = row.iter().copied().fold(f32::MIN, f32::max);
                            let reference = all.reference[g * 5 + b];
                            let is_known = reference == known;
                            assert!(is_known || reference <= m.max(all.running[g]) + 1e-3);
                            assert!(m - reference < (HIGHEST + 0.1) * LN_2, "{m} {reference}");
                            // Sums of f32, of terms that may cancel.
                            let bound = 1e-5 + 1e-6 * (m.abs() + reference.abs() + 100.0);
                            let weights = &all_lines[g * n_tokens..][..n_tokens];
                            for (s, w) in row.iter().zip(weights) {
                                let right = (s - reference).max(LEAST).exp();
                                assert!((w - right).abs() < bound * right, "{right} {w}");
                            }
                            let sum: f64 = weights.iter().map(|w| f64::from(*w)).sum();
                            let error = (f64::from(all.sum[g * 5 + b]) - sum).abs();
                            assert!(error < 1e-5 * sum, "{level:?} {n4} {n2} at {m}");
                        }

                        // What is known of Z, relative to the reference: this much at least, and
                        // if the reference has stayed, exactly.
                        let stayed =
                            |g: usize| all.reference[g * 5..][..=b].iter().all(|r| *r == known);
                        let z = |g: usize| 1.0 + all.sum[g * 5..][..b].iter().sum::<f32>();
                        let share = |t: usize, z: &dyn Fn(usize) -> f32| {
                            let of_query = (0..n_group).map(|g| all_lines[g * n_tokens + t] / z(g));
                            of_query.sum::<f32>() / n_group as f32
                        };
                        let n = some.counts[b] as usize;
                        let (own, rest) = candidates.split_at(n);
                        candidates = rest;
                        assert!(own.is_sorted());
                        for t in 0..n_tokens {
                            let is_candidate = own.contains(&(t as u32));
                            let at_most = share(t, &|_| 1.0);
                            assert!(!is_candidate || at_most > 0.999 * limit, "{at_most}");
                            if (0..n_group).all(stayed) {
                                let share = share(t, &z);
                                assert!(is_candidate || share < 1.001 * limit, "{share}");
                                assert!(!is_candidate || share > 0.999 * limit, "{share}");
                            }
                        }
                        for g in 0..n_group {
                            let (line, rest) = lines.split_at(n);
                            lines = rest;
                            let right = own.iter().map(|&t| all_lines[g * n_tokens + t as usize]);
                            assert!(right.eq(line.iter().copied()));
                        }
                    }
                    assert!(candidates.is_empty() && lines.is_empty());
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
                let q = queries(&mut random, packed.shape, 1);
                let exact = packed.scores(Level::SCALAR, &q, &[0.0]).0;
                let found = packed.scores(level, &q, &[0.0]).0;
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
