//! Which tokens of a block matter to a group of queries.

use super::level::{Level, Tier};

/// Tokens whose lanes a kernel loads together at the most.
const LANES: usize = 16;

/// Finds the tokens whose share, the sum over g of `factors[g] * weights[g * stride + t]`, exceeds
/// `limit`. Writes their numbers, rising, and shares to the front of `tokens` and `shares`, which
/// have `n_tokens` places, and returns how many they are.
///
/// `weights` has `factors.len()` lines of `stride`, which is at least `n_tokens` rounded up to 16;
/// what stands there beyond `n_tokens` is ignored.
pub fn shares_above(
    weights: &[f32],
    stride: usize,
    n_tokens: usize,
    factors: &[f32],
    limit: f32,
    tokens: &mut [u32],
    shares: &mut [f32],
) -> usize {
    shares_above_at(Level::best(), weights, stride, n_tokens, factors, limit, tokens, shares)
}

/// [`shares_above`] at a given level, for tests and benches.
#[doc(hidden)]
#[allow(clippy::too_many_arguments)]
pub fn shares_above_at(
    level: Level,
    weights: &[f32],
    stride: usize,
    n_tokens: usize,
    factors: &[f32],
    limit: f32,
    tokens: &mut [u32],
    shares: &mut [f32],
) -> usize {
    assert!(stride >= n_tokens.next_multiple_of(LANES));
    assert!(weights.len() >= factors.len() * stride);
    assert!(tokens.len() >= n_tokens && shares.len() >= n_tokens);
    match level.tier() {
        Tier::Scalar => {
            let mut found = 0;
            for t in 0..n_tokens {
                let lines = factors.iter().zip(weights.chunks_exact(stride));
                let share: f32 = lines.map(|(factor, line)| factor * line[t]).sum();
                if share > limit {
                    (tokens[found], shares[found]) = (t as u32, share);
                    found += 1;
                }
            }
            found
        }
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe {
            x86::shares_above_avx2(weights, stride, n_tokens, factors, limit, tokens, shares)
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe {
            x86::shares_above_avx512(weights, stride, n_tokens, factors, limit, tokens, shares)
        },
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, Vector};
    use super::LANES;

    /// The entry of one vector width.
    macro_rules! entry {
        ($name:ident, $vector:ty, $features:literal) => {
            #[target_feature(enable = $features)]
            pub fn $name(
                weights: &[f32],
                stride: usize,
                n_tokens: usize,
                factors: &[f32],
                limit: f32,
                tokens: &mut [u32],
                shares: &mut [f32],
            ) -> usize {
                // SAFETY: this function has the features of the vector; the door checked lengths.
                unsafe {
                    above::<$vector>(weights, stride, n_tokens, factors, limit, tokens, shares)
                }
            }
        };
    }

    entry!(shares_above_avx2, F32x8, "avx2,fma,f16c");
    entry!(shares_above_avx512, F32x16, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c");

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn above<V: Vector>(
        weights: &[f32],
        stride: usize,
        n_tokens: usize,
        factors: &[f32],
        limit: f32,
        tokens: &mut [u32],
        shares: &mut [f32],
    ) -> usize {
        let mut found = 0;
        for t in (0..n_tokens).step_by(V::LANES) {
            // SAFETY: a line has n_tokens rounded up to a vector; the buffer holds one.
            unsafe {
                let mut sum = V::splat(0.0);
                for (g, factor) in factors.iter().enumerate() {
                    let line = V::load(weights.as_ptr().add(g * stride + t));
                    sum = line.fma(V::splat(*factor), sum);
                }
                let mut above = sum.above(V::splat(limit));
                if n_tokens - t < V::LANES {
                    above &= (1 << (n_tokens - t)) - 1;
                }
                if above == 0 {
                    continue;
                }
                let mut lanes = [0.0f32; LANES];
                sum.store(lanes.as_mut_ptr());
                while above != 0 {
                    let lane = above.trailing_zeros() as usize;
                    (tokens[found], shares[found]) = ((t + lane) as u32, lanes[lane % LANES]);
                    found += 1;
                    above &= above - 1;
                }
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
    fn every_level_finds_the_same_tokens() {
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
                for limit in [-10.0, 0.1, 0.8] {
                    let right: Vec<(u32, f32)> = (0..n_tokens)
                        .map(|t| {
                            let share = (0..n_group).map(|g| factors[g] * weights[g * stride + t]);
                            (t as u32, share.sum())
                        })
                        .filter(|(_, share): &(u32, f32)| *share > limit)
                        .collect();
                    for level in Level::available() {
                        let (mut tokens, mut shares) = (vec![0; n_tokens], vec![0.0; n_tokens]);
                        let n = shares_above_at(
                            level,
                            &weights,
                            stride,
                            n_tokens,
                            &factors,
                            limit,
                            &mut tokens,
                            &mut shares,
                        );
                        assert_eq!(n, right.len(), "{level:?}");
                        for (i, (token, share)) in right.iter().enumerate() {
                            assert_eq!(tokens[i], *token);
                            assert!((shares[i] - share).abs() < 1e-5);
                        }
                    }
                }
            }
        }
    }
}
