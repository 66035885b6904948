//! Value sketches: a token's value as 2-bit coefficients of a low-rank basis.
//!
//! Token-major: r coefficients, r a multiple of 4 (the caller pads), in r / 4 bytes; bits
//! 2k..2k+2 of byte b are coefficient 4b + k. `coefficient[c] ~= minimum[c] + scale[c] * code[c]`.

use super::level::{Level, Tier};
use super::sketch::Grids;
use half::f16;

/// Packs `rows`, `[n_tokens][r]`; minimum and scale of each coefficient as in a sketch.
pub fn coefficients_pack(
    rows: &[f32],
    n_tokens: usize,
    r: usize,
    codes: &mut [u8],
    minimum: &mut [f16],
    scale: &mut [f16],
) {
    assert!(r.is_multiple_of(4), "r = {r}");
    assert_eq!((rows.len(), codes.len()), (n_tokens * r, n_tokens * r / 4));
    assert_eq!((minimum.len(), scale.len()), (r, r));
    for b in 0..r / 4 {
        let columns = 4 * b..4 * b + 4;
        let grids = Grids::<4>::over(rows.chunks_exact(r).map(|row| &row[columns.clone()]), 2);
        minimum[columns.clone()].copy_from_slice(&grids.minimum);
        scale[columns.clone()].copy_from_slice(&grids.scale);
        for (bytes, row) in codes.chunks_exact_mut(r / 4).zip(rows.chunks_exact(r)) {
            let [first, second, third, fourth] = grids.codes(&row[columns.clone()]);
            bytes[b] = first | second << 2 | third << 4 | fourth << 6;
        }
    }
}

/// A block's coefficients of one head.
#[derive(Clone, Copy)]
pub struct Coefficients<'a> {
    /// `[n_tokens][r / 4]`
    pub codes: &'a [u8],
    /// `[r]`
    pub minimum: &'a [f16],
    /// `[r]`
    pub scale: &'a [f16],
}

/// The weights of some tokens: token i has place `numbers[i]` of each query's line of `lines`,
/// `[n_group][n]`.
#[derive(Clone, Copy)]
pub struct TokenWeights<'a> {
    pub lines: &'a [f32],
    pub n: usize,
    pub numbers: &'a [u32],
}

impl TokenWeights<'_> {
    /// # Safety
    /// Token i has a place, and query g a line.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn get(&self, i: usize, g: usize) -> f32 {
        // SAFETY: by the contract.
        unsafe {
            let number = *self.numbers.get_unchecked(i) as usize;
            *self.lines.get_unchecked(g * self.n + number)
        }
    }
}

/// `acc[g][c] += sum over i of weight[i][g] * coefficient[tokens[i]][c]`, acc: `[n_group][r]`.
pub fn coefficients_accumulate(
    block: &Coefficients,
    tokens: &[u32],
    weights: &TokenWeights,
    n_group: usize,
    acc: &mut [f32],
) {
    coefficients_accumulate_at(Level::best(), block, tokens, weights, n_group, acc);
}

/// [`coefficients_accumulate`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn coefficients_accumulate_at(
    level: Level,
    block: &Coefficients,
    tokens: &[u32],
    weights: &TokenWeights,
    n_group: usize,
    acc: &mut [f32],
) {
    let r = block.minimum.len();
    assert!(r > 0 && r.is_multiple_of(4) && block.scale.len() == r, "r = {r}");
    assert_eq!(acc.len(), n_group * r);
    let TokenWeights { lines, n, numbers } = *weights;
    assert!(lines.len() >= n_group * n && numbers.len() == tokens.len());
    let n_tokens = block.codes.len() / (r / 4);
    let largest = |list: &[u32]| list.iter().fold(0, |largest, &i| largest.max(i)) as usize;
    assert!(tokens.is_empty() || largest(tokens) < n_tokens, "a token has no codes");
    assert!(numbers.is_empty() || largest(numbers) < n, "a token has no weights");
    match level.tier() {
        Tier::Scalar => accumulate_scalar(block, tokens, weights, n_group, acc),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::accumulate_avx2(block, tokens, weights, n_group, acc) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::accumulate_avx512(block, tokens, weights, n_group, acc) },
    }
}

fn accumulate_scalar(
    block: &Coefficients,
    tokens: &[u32],
    weights: &TokenWeights,
    n_group: usize,
    acc: &mut [f32],
) {
    let r = block.minimum.len();
    for (token, number) in tokens.iter().zip(weights.numbers) {
        let row = &block.codes[*token as usize * (r / 4)..][..r / 4];
        let of_query = weights.lines.chunks_exact(weights.n).map(|line| line[*number as usize]);
        for (g, weight) in of_query.enumerate().take(n_group) {
            for (c, acc) in acc[g * r..][..r].iter_mut().enumerate() {
                let code = f32::from(row[c / 4] >> (c % 4 * 2) & 3);
                *acc += weight * (block.minimum[c].to_f32() + block.scale[c].to_f32() * code);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, Vector};
    use super::{Coefficients, TokenWeights};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn accumulate_avx2(
        block: &Coefficients,
        tokens: &[u32],
        weights: &TokenWeights,
        n_group: usize,
        acc: &mut [f32],
    ) {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { accumulate::<F32x8>(block, tokens, weights, n_group, acc) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub fn accumulate_avx512(
        block: &Coefficients,
        tokens: &[u32],
        weights: &TokenWeights,
        n_group: usize,
        acc: &mut [f32],
    ) {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { accumulate::<F32x16>(block, tokens, weights, n_group, acc) }
    }

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn accumulate<V: Vector>(
        block: &Coefficients,
        tokens: &[u32],
        weights: &TokenWeights,
        n_group: usize,
        acc: &mut [f32],
    ) {
        for g in (0..n_group).step_by(4) {
            // SAFETY: lines g..g + G of the sums exist, as do weights g..g + G of each token.
            unsafe {
                match n_group - g {
                    1 => for_queries::<V, 1>(block, tokens, weights, g, acc),
                    2 => for_queries::<V, 2>(block, tokens, weights, g, acc),
                    3 => for_queries::<V, 3>(block, tokens, weights, g, acc),
                    _ => for_queries::<V, 4>(block, tokens, weights, g, acc),
                }
            }
        }
    }

    /// Queries g..g + G.
    ///
    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn for_queries<V: Vector, const G: usize>(
        block: &Coefficients,
        tokens: &[u32],
        weights: &TokenWeights,
        g: usize,
        acc: &mut [f32],
    ) {
        let r = block.minimum.len();
        // SAFETY: each call's coefficients exist, and these lines of sums.
        unsafe {
            let mut totals = [0.0; G];
            for i in 0..tokens.len() {
                for (lane, total) in totals.iter_mut().enumerate() {
                    *total += weights.get(i, g + lane);
                }
            }
            let run = Run { block, tokens, weights, first: g, totals };
            let acc = acc.as_mut_ptr().add(g * r);
            let mut c = 0;
            while c + 2 * V::LANES <= r {
                run.columns::<V, 2>(acc, c, V::LANES);
                c += 2 * V::LANES;
            }
            while c < r {
                run.columns::<V, 1>(acc, c, (r - c).min(V::LANES));
                c += V::LANES;
            }
        }
    }

    /// Tokens of one block, and queries first..first + G with the sums of their weights.
    struct Run<'a, const G: usize> {
        block: &'a Coefficients<'a>,
        tokens: &'a [u32],
        weights: &'a TokenWeights<'a>,
        first: usize,
        totals: [f32; G],
    }

    impl<const G: usize> Run<'_, G> {
        /// CHUNKS vectors of coefficients from `c` on, each of which has n. Codes are summed first:
        /// minimum and scale are the same for all tokens.
        ///
        /// # Safety
        /// The features of `V` are there, as are the coefficients and G lines of sums.
        #[inline(always)]
        unsafe fn columns<V: Vector, const CHUNKS: usize>(
            &self,
            acc: *mut f32,
            c: usize,
            n: usize,
        ) {
            let r = self.block.minimum.len();
            // SAFETY: by the contract; the door checked tokens and weights.
            unsafe {
                let at = self.block.codes.as_ptr().add(c / 4);
                let mut sums = [[V::splat(0.0); CHUNKS]; G];
                for (i, token) in self.tokens.iter().enumerate() {
                    let from = at.add(*token as usize * (r / 4));
                    let mut codes = [V::splat(0.0); CHUNKS];
                    for (chunk, codes) in codes.iter_mut().enumerate() {
                        let from = from.add(chunk * V::LANES / 4);
                        *codes =
                            if n == V::LANES { V::load_u2(from) } else { V::load_u2_part(from, n) };
                    }
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let weight = V::splat(self.weights.get(i, self.first + g));
                        for (sum, codes) in sums.iter_mut().zip(codes) {
                            *sum = codes.fma(weight, *sum);
                        }
                    }
                }
                for chunk in 0..CHUNKS {
                    let c = c + chunk * V::LANES;
                    let minimum = self.block.minimum.as_ptr().add(c).cast();
                    let scale = self.block.scale.as_ptr().add(c).cast();
                    let minimum = V::load_f16_part(minimum, n);
                    let scale = V::load_f16_part(scale, n);
                    for (g, sums) in sums.iter().enumerate() {
                        let at = acc.add(g * r + c);
                        let sum = minimum.fma(V::splat(self.totals[g]), V::load_part(at, n));
                        sums[chunk].fma(scale, sum).store_part(at, n);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Guarded, Random};
    use super::*;

    #[test]
    fn weighted_codes_give_the_weighted_coefficients_at_every_level() {
        let mut random = Random::new(4);
        for r in [4, 8, 12, 16, 20, 24, 28, 32, 48, 64] {
            for n_group in [1, 2, 3, 5, 6, 7, 8, 16] {
                let n_tokens = 1 + random.bits() as usize % 80;
                let rows = random.values(n_tokens * r);
                let mut codes = vec![0xFF; n_tokens * r / 4];
                let (mut minimum, mut scale) = (vec![f16::ZERO; r], vec![f16::ZERO; r]);
                coefficients_pack(&rows, n_tokens, r, &mut codes, &mut minimum, &mut scale);
                let tokens: Vec<u32> =
                    (0..n_tokens as u32).filter(|token| token % 3 != 1).collect();
                let n = tokens.len() + 1;
                let numbers: Vec<u32> = (1..n as u32).rev().collect();
                let lines: Vec<f32> = random.values(n * n_group).iter().map(|w| w.abs()).collect();
                let weights = TokenWeights { lines: &lines, n, numbers: &numbers };
                for level in Level::available() {
                    let mut acc = vec![0.5; n_group * r];
                    let block = Coefficients { codes: &codes, minimum: &minimum, scale: &scale };
                    coefficients_accumulate_at(level, &block, &tokens, &weights, n_group, &mut acc);
                    for g in 0..n_group {
                        let of_token = numbers.iter().map(|&place| lines[g * n + place as usize]);
                        let w: Vec<f32> = of_token.collect();
                        let total: f32 = w.iter().sum();
                        for c in 0..r {
                            let right: f32 = tokens
                                .iter()
                                .zip(&w)
                                .map(|(t, w)| w * rows[*t as usize * r + c])
                                .sum();
                            let found = acc[g * r + c] - 0.5;
                            // A constant coefficient (one token) is rounded to f16.
                            let constant = 5e-4 * minimum[c].to_f32().abs();
                            let bound = (0.5 * scale[c].to_f32() + constant) * total + 1e-4;
                            assert!((found - right).abs() <= bound, "{level:?} {r} {n_group}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn levels_agree_on_the_sums() {
        let mut random = Random::new(8);
        let mut guarded = Guarded::new(100 * 7);
        guarded.bytes_mut().fill_with(|| random.bits() as u8);
        let codes = guarded.bytes();
        let tokens: Vec<u32> = (0..100).rev().collect();
        let (lines, numbers) = (random.values(5 * 100), (0..100).collect::<Vec<u32>>());
        let weights = TokenWeights { lines: &lines, n: 100, numbers: &numbers };
        let mut right = vec![0.0; 5 * 28];
        let minimum: Vec<f16> = random.values(28).into_iter().map(f16::from_f32).collect();
        let scale: Vec<f16> = random.values(28).into_iter().map(f16::from_f32).collect();
        let block = Coefficients { codes, minimum: &minimum, scale: &scale };
        coefficients_accumulate_at(Level::SCALAR, &block, &tokens, &weights, 5, &mut right);
        for level in Level::available() {
            let mut acc = vec![0.0; 5 * 28];
            coefficients_accumulate_at(level, &block, &tokens, &weights, 5, &mut acc);
            for (found, right) in acc.iter().zip(&right) {
                assert!((found - right).abs() < 1e-4, "{level:?}: {found} {right}");
            }
        }
    }
}
