//! Which tokens of a block matter to a group of queries.

use super::level::{Level, Tier};

/// Heads of a group whose weights a processor takes together.
pub const LANES: usize = 4;

/// Tokens that a kernel looks at together at the most.
pub const TOKENS: usize = 16;

/// Weights of a block's tokens by a group of queries, and what turns them into shares.
pub struct Weighed<'a> {
    /// A line for each query, `[n_group][stride]`; what stands there beyond `n_tokens` is ignored.
    pub weights: &'a [f32],
    /// At least `n_tokens` rounded up to 16.
    pub stride: usize,
    pub n_tokens: usize,
    /// A token's share is the sum over g of `factors[g] * weights[g][t]`, `[n_group]`.
    pub factors: &'a [f32],
}

impl Weighed<'_> {
    /// Places of a token's weights: n_group, and zeros up to whole lanes.
    fn lanes(&self) -> usize {
        self.factors.len().next_multiple_of(LANES)
    }
}

/// Finds the tokens whose share exceeds `limit`. Writes their numbers, rising, to the front of
/// `tokens`, and their weights, `[found][lanes]` (a group's and zeros up to a multiple of
/// [`LANES`]), to that of `lines`; both have room for all tokens and [`TOKENS`] more, where anything
/// may be written. Returns how many they are.
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
    assert!(block.stride >= block.n_tokens.next_multiple_of(TOKENS));
    assert!(block.weights.len() >= block.factors.len() * block.stride);
    let room = block.n_tokens + TOKENS;
    assert!(tokens.len() >= room && lines.len() >= room * block.lanes());
    match level.tier() {
        Tier::Scalar => {
            let mut found = 0;
            for t in 0..block.n_tokens {
                let of_token = block.weights.chunks_exact(block.stride).map(|line| line[t]);
                let products = block.factors.iter().zip(of_token.clone());
                if products.map(|(factor, weight)| factor * weight).sum::<f32>() > limit {
                    tokens[found] = t as u32;
                    let line = &mut lines[found * block.lanes()..][..block.lanes()];
                    line.fill(0.0);
                    let of_group = line.iter_mut().take(block.factors.len());
                    of_group.zip(of_token).for_each(|(to, weight)| *to = weight);
                    found += 1;
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

/// Multiplies each line of weights, `[n][lanes]`, by `factors`, `[lanes]`, and writes the lines'
/// sums to the front of `shares`. Lanes are a multiple of [`LANES`].
pub fn weigh_lines(factors: &[f32], lines: &mut [f32], shares: &mut [f32]) {
    weigh_lines_at(Level::best(), factors, lines, shares);
}

/// [`weigh_lines`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn weigh_lines_at(level: Level, factors: &[f32], lines: &mut [f32], shares: &mut [f32]) {
    let lanes = factors.len();
    assert!(lanes > 0 && lanes.is_multiple_of(LANES) && lines.len().is_multiple_of(lanes));
    assert!(shares.len() >= lines.len() / lanes);
    match level.tier() {
        Tier::Scalar => {
            for (line, share) in lines.chunks_exact_mut(lanes).zip(shares) {
                line.iter_mut().zip(factors).for_each(|(weight, factor)| *weight *= factor);
                *share = line.iter().sum();
            }
        }
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 | Tier::Avx512 => unsafe { x86::weigh_lines_avx2(factors, lines, shares) },
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, Vector};
    use super::{LANES, TOKENS, Weighed};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn weigh_lines_avx2(factors: &[f32], lines: &mut [f32], shares: &mut [f32]) {
        let lanes = factors.len();
        let (n, factors) = (lines.len() / lanes, factors.as_ptr());
        let (lines, shares) = (lines.as_mut_ptr(), shares.as_mut_ptr());
        // SAFETY: a line has whole groups of four weights, as have the factors, and `shares` a
        // place for each line.
        unsafe {
            let mut i = 0;
            while i + 4 <= n {
                let mut sums = [_mm_setzero_ps(); 4];
                for (line, sum) in sums.iter_mut().enumerate() {
                    let line = lines.add((i + line) * lanes);
                    for lane in (0..lanes).step_by(LANES) {
                        *sum = _mm_add_ps(*sum, weigh_four(factors.add(lane), line.add(lane)));
                    }
                }
                let [a, b, c, d] = sums;
                let of_four = _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
                _mm_storeu_ps(shares.add(i), of_four);
                i += 4;
            }
            while i < n {
                let mut sum = _mm_setzero_ps();
                for lane in (0..lanes).step_by(LANES) {
                    let line = lines.add(i * lanes + lane);
                    sum = _mm_add_ps(sum, weigh_four(factors.add(lane), line));
                }
                let pairs = _mm_hadd_ps(sum, sum);
                *shares.add(i) = _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
                i += 1;
            }
        }
    }

    /// Multiplies four weights by four factors, where they stand.
    ///
    /// # Safety
    /// Both pointers are valid for four f32.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn weigh_four(factors: *const f32, weights: *mut f32) -> __m128 {
        // SAFETY: by the contract.
        unsafe {
            let product = _mm_mul_ps(_mm_loadu_ps(weights), _mm_loadu_ps(factors));
            _mm_storeu_ps(weights, product);
            product
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn tokens_above_avx2(
        block: &Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { above::<F32x8>(block, limit, tokens, lines) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub fn tokens_above_avx512(
        block: &Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { above::<F32x16>(block, limit, tokens, lines) }
    }

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn above<V: Vector>(
        block: &Weighed,
        limit: f32,
        tokens: &mut [u32],
        lines: &mut [f32],
    ) -> usize {
        let (n_group, n_tokens, stride) = (block.factors.len(), block.n_tokens, block.stride);
        let (lanes, weights) = (block.lanes(), block.weights.as_ptr());
        let (tokens, lines) = (tokens.as_mut_ptr(), lines.as_mut_ptr());
        let mut found = 0;
        for t in (0..n_tokens).step_by(V::LANES) {
            // SAFETY: a line has n_tokens rounded up to a vector; `found` stays below n_tokens, and
            // both lists have room for a vector's tokens more.
            unsafe {
                let mut sum = V::splat(0.0);
                for (g, factor) in block.factors.iter().enumerate() {
                    let line = V::load(weights.add(g * stride + t));
                    sum = line.fma(V::splat(*factor), sum);
                }
                let mut above = sum.above(V::splat(limit));
                if n_tokens - t < V::LANES {
                    above &= (1 << (n_tokens - t)) - 1;
                }
                let n = above.count_ones() as usize;
                if n == 0 {
                    continue;
                }
                V::numbers_of(above, t as u32, tokens.add(found));
                for first in (0..n_group).step_by(LANES) {
                    let mut of_few = [V::splat(0.0); LANES];
                    for (g, of_query) in (first..n_group).zip(&mut of_few) {
                        *of_query = V::load(weights.add(g * stride + t));
                    }
                    if lanes == LANES {
                        V::transpose_some4(of_few, above, lines.add(found * LANES));
                        continue;
                    }
                    let mut some = [0.0f32; LANES * TOKENS];
                    V::transpose_some4(of_few, above, some.as_mut_ptr());
                    for i in 0..n {
                        let line = _mm_loadu_ps(some.as_ptr().add(i * LANES));
                        _mm_storeu_ps(lines.add((found + i) * lanes + first), line);
                    }
                }
                found += n;
            }
        }
        found
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
                let lanes = block.lanes();
                for limit in [-10.0, 0.1, 0.8] {
                    let share = |t: &usize| {
                        let of_query = (0..n_group).map(|g| factors[g] * weights[g * stride + t]);
                        of_query.sum::<f32>()
                    };
                    let right: Vec<usize> = (0..n_tokens).filter(|t| share(t) > limit).collect();
                    for level in Level::available() {
                        let mut tokens = vec![0; n_tokens + TOKENS];
                        let mut lines = vec![7.0; (n_tokens + TOKENS) * lanes];
                        let n = tokens_above_at(level, &block, limit, &mut tokens, &mut lines);
                        assert_eq!(n, right.len(), "{level:?}");
                        for (i, &token) in right.iter().enumerate() {
                            assert_eq!(tokens[i] as usize, token);
                            let (line, rest) = lines[i * lanes..][..lanes].split_at(n_group);
                            let of_token = (0..n_group).map(|g| weights[g * stride + token]);
                            assert!(line.iter().copied().eq(of_token), "{level:?}");
                            assert!(rest.iter().all(|weight| *weight == 0.0), "{level:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_level_weighs_lines_alike() {
        let mut random = Random::new(13);
        for lanes in [4usize, 8, 12] {
            for n in [0usize, 1, 3, 4, 5, 16, 61] {
                let (factors, lines) = (random.values(lanes), random.values(n * lanes));
                for level in Level::available() {
                    let (mut found, mut shares) = (lines.clone(), vec![7.0; n + 1]);
                    weigh_lines_at(level, &factors, &mut found, &mut shares);
                    for (i, line) in lines.chunks(lanes).enumerate() {
                        let products: Vec<f32> =
                            line.iter().zip(&factors).map(|(weight, f)| weight * f).collect();
                        assert_eq!(found[i * lanes..][..lanes], products, "{level:?}");
                        let share: f32 = products.iter().sum();
                        assert!((shares[i] - share).abs() < 1e-5, "{level:?} {lanes} {n}");
                    }
                    assert_eq!(shares[n], 7.0, "{level:?}: written past the lines");
                }
            }
        }
    }
}
