//! Which tokens of a block matter to a group of queries.

use super::level::{Level, Tier};
use crate::params::MAX_BLOCK_TOKENS;

/// Tokens that a kernel looks at together at the most.
pub const TOKENS: usize = 16;

/// Weights of a block's tokens by a group of queries, and what turns them into shares.
pub struct Weighed<'a> {
    /// A line for each query, `[n_group][stride]`; what stands there beyond `n_tokens` is ignored.
    pub weights: &'a [f32],
    /// At least `n_tokens` rounded up to 16.
    pub stride: usize,
    /// At most [`MAX_BLOCK_TOKENS`].
    pub n_tokens: usize,
    /// A token's share is the sum over g of `factors[g] * weights[g][t]`, `[n_group]`.
    pub factors: &'a [f32],
}

/// Finds the tokens whose share exceeds `limit`. Writes their numbers, rising, to the front of
/// `tokens`, and their weights, `[n_group][found]`, to that of `lines`; both have room for all tokens
/// and [`TOKENS`] more, where anything may be written. Returns how many they are.
pub fn tokens_above(block: &Weighed, limit: f32, tokens: &mut [u32], lines: &mut [f32]) -> usize {
    tokens_above_at(Level::best(), block, limit, tokens, lines)
}

/// [`tokens_above`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn tokens_above_at(
    level: Level,
    block: &Weighed,
    limit: f32,
    tokens: &mut [u32],
    lines: &mut [f32],
) -> usize {
    let (n_tokens, n_group) = (block.n_tokens, block.factors.len());
    assert!(n_tokens <= MAX_BLOCK_TOKENS && block.stride >= n_tokens.next_multiple_of(TOKENS));
    assert!(block.weights.len() >= n_group * block.stride);
    assert!(tokens.len() >= n_tokens + TOKENS && lines.len() >= n_tokens * n_group + TOKENS);
    match level.tier() {
        Tier::Scalar => {
            let mut found = 0;
            for t in 0..n_tokens {
                let of_token = block.weights.chunks_exact(block.stride).map(|line| line[t]);
                let products = block.factors.iter().zip(of_token);
                if products.map(|(factor, weight)| factor * weight).sum::<f32>() > limit {
                    tokens[found] = t as u32;
                    found += 1;
                }
            }
            for g in 0..n_group {
                for (i, &token) in tokens[..found].iter().enumerate() {
                    lines[g * found + i] = block.weights[g * block.stride + token as usize];
                }
            }
            found
        }
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::tokens_above_avx2(block, limit, tokens, lines) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::tokens_above_avx512(block, limit, tokens, lines) },
    }
}

/// Multiplies each query's weights of some tokens, `[n_group][n]`, by its factor, and writes the
/// tokens' sums over the queries to `shares`, `[n]`. Query g's factor is `factors[g * stride]`.
pub fn weigh_lines(factors: &[f32], stride: usize, lines: &mut [f32], shares: &mut [f32]) {
    weigh_lines_at(Level::best(), factors, stride, lines, shares);
}

/// [`weigh_lines`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn weigh_lines_at(
    level: Level,
    factors: &[f32],
    stride: usize,
    lines: &mut [f32],
    shares: &mut [f32],
) {
    let n = shares.len();
    if n == 0 {
        return;
    }
    let n_group = lines.len() / n;
    assert!(lines.len() == n_group * n && stride > 0);
    assert!(n_group == 0 || (n_group - 1) * stride < factors.len());
    match level.tier() {
        Tier::Scalar => {
            shares.fill(0.0);
            for (line, factor) in lines.chunks_exact_mut(n).zip(factors.iter().step_by(stride)) {
                for (weight, share) in line.iter_mut().zip(&mut *shares) {
                    *weight *= factor;
                    *share += *weight;
                }
            }
        }
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::weigh_lines_avx2(factors, stride, lines, shares) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::weigh_lines_avx512(factors, stride, lines, shares) },
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::above;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, Vector};
    use super::{MAX_BLOCK_TOKENS, Weighed};
    use std::mem::MaybeUninit;

    /// The entries of one vector width.
    macro_rules! entries {
        ($vector:ty, $features:literal, $above:ident, $weigh:ident) => {
            #[target_feature(enable = $features)]
            pub fn $above(
                block: &Weighed,
                limit: f32,
                tokens: &mut [u32],
                lines: &mut [f32],
            ) -> usize {
                // SAFETY: this function has the features of the vector; the door checked the
                // lengths.
                unsafe { above::<$vector>(block, limit, tokens, lines) }
            }

            #[target_feature(enable = $features)]
            pub fn $weigh(factors: &[f32], stride: usize, lines: &mut [f32], shares: &mut [f32]) {
                // SAFETY: as above.
                unsafe { weigh::<$vector>(factors, stride, lines, shares) }
            }
        };
    }

    entries!(F32x8, "avx2,fma,f16c,popcnt", tokens_above_avx2, weigh_lines_avx2);
    entries!(
        F32x16,
        "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt",
        tokens_above_avx512,
        weigh_lines_avx512
    );

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    pub unsafe fn above<V: Vector>(
        block: &Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize {
        let (n_tokens, stride) = (block.n_tokens, block.stride);
        let (tokens, mut lines) = (tokens.as_mut_ptr(), lines.as_mut_ptr());
        let mut masks = [const { MaybeUninit::<u32>::uninit() }; MAX_BLOCK_TOKENS / 8];
        let mut found = 0;
        // SAFETY: a line has n_tokens rounded up to a vector; `found` stays below n_tokens, and both
        // lists have room for a vector's tokens more. A query's weights may be written beyond their
        // line's end, where the next query's will be.
        unsafe {
            for (mask, t) in masks.iter_mut().zip((0..n_tokens).step_by(V::LANES)) {
                let mut sum = V::splat(0.0);
                for (g, factor) in block.factors.iter().enumerate() {
                    let line = V::load(block.weights.as_ptr().add(g * stride + t));
                    sum = line.fma(V::splat(*factor), sum);
                }
                let mut above = sum.above(V::splat(limit));
                if n_tokens - t < V::LANES {
                    above &= (1 << (n_tokens - t)) - 1;
                }
                mask.write(above);
                V::numbers_of(above, t as u32, tokens.add(found));
                found += above.count_ones() as usize;
            }
            if found == 0 {
                return 0;
            }
            for g in 0..block.factors.len() {
                let mut to = lines;
                for (mask, t) in masks.iter().zip((0..n_tokens).step_by(V::LANES)) {
                    let above = mask.assume_init();
                    V::load(block.weights.as_ptr().add(g * stride + t)).store_some(above, to);
                    to = to.add(above.count_ones() as usize);
                }
                lines = lines.add(found);
            }
        }
        found
    }

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn weigh<V: Vector>(
        factors: &[f32],
        stride: usize,
        lines: &mut [f32],
        shares: &mut [f32],
    ) {
        let n = shares.len();
        let (n_group, lines) = (lines.len() / n, lines.as_mut_ptr());
        let mut i = 0;
        while i < n {
            let part = (n - i).min(V::LANES);
            // SAFETY: each query's line has n weights, and shares n places.
            unsafe {
                let mut sum = V::splat(0.0);
                for g in 0..n_group {
                    let at = lines.add(g * n + i);
                    let weight = V::load_part(at, part).mul(V::splat(factors[g * stride]));
                    weight.store_part(at, part);
                    sum = sum.add(weight);
                }
                sum.store_part(shares.as_mut_ptr().add(i), part);
            }
            i += V::LANES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    #[test]
    fn every_level_finds_the_same_tokens_and_their_weights() {
        let mut random = Random::new(12);
        for n_tokens in [1usize, 7, 16, 33, 64, 130] {
            for n_group in [1usize, 3, 4, 9] {
                let stride = n_tokens.next_multiple_of(16) + 16;
                let mut weights = random.values(n_group * stride);
                for line in weights.chunks_mut(stride) {
                    line[n_tokens..].fill(f32::NAN);
                    line[n_tokens] = 1e30;
                }
                let factors: Vec<f32> = random.values(n_group).iter().map(|f| f.abs()).collect();
                let block = Weighed { weights: &weights, stride, n_tokens, factors: &factors };
                for limit in [-10.0, 0.1, 0.8] {
                    let share = |t: &usize| {
                        let of_query = (0..n_group).map(|g| factors[g] * weights[g * stride + t]);
                        of_query.sum::<f32>()
                    };
                    let right: Vec<usize> = (0..n_tokens).filter(|t| share(t) > limit).collect();
                    for level in Level::available() {
                        let mut tokens = vec![0; n_tokens + TOKENS];
                        let mut lines = vec![7.0; n_tokens * n_group + TOKENS];
                        let n = tokens_above_at(level, &block, limit, &mut tokens, &mut lines);
                        assert_eq!(n, right.len(), "{level:?}");
                        for (i, &token) in right.iter().enumerate() {
                            assert_eq!(tokens[i] as usize, token);
                            for g in 0..n_group {
                                let weight = weights[g * stride + token];
                                assert_eq!(lines[g * n + i], weight, "{level:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_level_weighs_lines_alike() {
        let mut random = Random::new(13);
        for n_group in [1usize, 4, 6] {
            for n in [0usize, 1, 3, 8, 16, 61] {
                let (factors, lines) = (random.values(n_group * 5), random.values(n * n_group));
                for level in Level::available() {
                    let (mut found, mut shares) = (lines.clone(), vec![7.0; n]);
                    weigh_lines_at(level, &factors, 5, &mut found, &mut shares);
                    for (i, share) in shares.iter().enumerate() {
                        let products = (0..n_group).map(|g| lines[g * n + i] * factors[g * 5]);
                        let products: Vec<f32> = products.collect();
                        let of_token = found[i..].iter().step_by(n).copied();
                        assert!(of_token.eq(products.iter().copied()), "{level:?}");
                        let right: f32 = products.iter().sum();
                        assert!((share - right).abs() < 1e-5, "{level:?} {n_group} {n}");
                    }
                }
            }
        }
    }
}
