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

/// `acc[g][c] += sum over i of w[g * stride + i] * coefficient[tokens[i]][c]`, acc: `[n_group][r]`.
pub fn coefficients_accumulate(
    block: &Coefficients,
    tokens: &[u32],
    w: &[f32],
    stride: usize,
    n_group: usize,
    acc: &mut [f32],
) {
    coefficients_accumulate_at(Level::best(), block, tokens, w, stride, n_group, acc);
}

/// [`coefficients_accumulate`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn coefficients_accumulate_at(
    level: Level,
    block: &Coefficients,
    tokens: &[u32],
    w: &[f32],
    stride: usize,
    n_group: usize,
    acc: &mut [f32],
) {
    let r = block.minimum.len();
    assert!(r > 0 && r.is_multiple_of(4) && block.scale.len() == r, "r = {r}");
    assert_eq!(acc.len(), n_group * r);
    assert!(n_group == 0 || (n_group - 1) * stride + tokens.len() <= w.len());
    let n_tokens = block.codes.len() / (r / 4);
    assert!(tokens.iter().all(|token| (*token as usize) < n_tokens), "a token has no codes");
    match level.tier() {
        Tier::Scalar => accumulate_scalar(block, tokens, w, stride, n_group, acc),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::accumulate_avx2(block, tokens, w, stride, n_group, acc) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::accumulate_avx512(block, tokens, w, stride, n_group, acc) },
    }
}

fn accumulate_scalar(
    block: &Coefficients,
    tokens: &[u32],
    w: &[f32],
    stride: usize,
    n_group: usize,
    acc: &mut [f32],
) {
    let r = block.minimum.len();
    for (i, token) in tokens.iter().enumerate() {
        let row = &block.codes[*token as usize * (r / 4)..][..r / 4];
        for g in 0..n_group {
            let weight = w[g * stride + i];
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
    use super::Coefficients;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn accumulate_avx2(
        block: &Coefficients,
        tokens: &[u32],
        w: &[f32],
        stride: usize,
        n_group: usize,
        acc: &mut [f32],
    ) {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { accumulate::<F32x8>(block, tokens, w, stride, n_group, acc) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub fn accumulate_avx512(
        block: &Coefficients,
        tokens: &[u32],
        w: &[f32],
        stride: usize,
        n_group: usize,
        acc: &mut [f32],
    ) {
        // SAFETY: this function has the features of the vector; the door checked the lengths.
        unsafe { accumulate::<F32x16>(block, tokens, w, stride, n_group, acc) }
    }

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn accumulate<V: Vector>(
        block: &Coefficients,
        tokens: &[u32],
        w: &[f32],
        stride: usize,
        n_group: usize,
        acc: &mut [f32],
    ) {
        let r = block.minimum.len();
        for g in (0..n_group).step_by(4) {
            for c in (0..r).step_by(V::LANES) {
                // SAFETY: lines g..g + G of both tables exist, and each token's codes.
                unsafe {
                    let (w, acc) = (w.as_ptr().add(g * stride), acc.as_mut_ptr().add(g * r));
                    match n_group - g {
                        1 => some_columns::<V, 1>(block, tokens, w, stride, acc, c),
                        2 => some_columns::<V, 2>(block, tokens, w, stride, acc, c),
                        3 => some_columns::<V, 3>(block, tokens, w, stride, acc, c),
                        _ => some_columns::<V, 4>(block, tokens, w, stride, acc, c),
                    }
                }
            }
        }
    }

    /// Up to LANES coefficients from `c` on, for G lines of weights and sums.
    ///
    /// # Safety
    /// The features of `V` are there, as are the lines and each token's codes.
    #[inline(always)]
    unsafe fn some_columns<V: Vector, const G: usize>(
        block: &Coefficients,
        tokens: &[u32],
        w: *const f32,
        stride: usize,
        acc: *mut f32,
        c: usize,
    ) {
        let r = block.minimum.len();
        let n = (r - c).min(V::LANES);
        // SAFETY: coefficients c..c + n are in each token's codes and each line of `acc`, weights
        // in each line of `w` for each token.
        unsafe {
            let at = block.codes.as_ptr().add(c / 4);
            let minimum = V::load_f16_part(block.minimum.as_ptr().add(c).cast(), n);
            let scale = V::load_f16_part(block.scale.as_ptr().add(c).cast(), n);
            // Even and odd tokens apart, so that the latency of one sum doesn't set the pace.
            let mut sums = [[V::splat(0.0); 2]; G];
            for (i, token) in tokens.iter().enumerate() {
                let from = at.add(*token as usize * (r / 4));
                let code = if n == V::LANES { V::load_u2(from) } else { V::load_u2_part(from, n) };
                let value = code.fma(scale, minimum);
                for (g, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*w.add(g * stride + i));
                    sums[0] = value.fma(weight, sums[0]);
                    sums.swap(0, 1);
                }
            }
            for (g, [even, odd]) in sums.into_iter().enumerate() {
                let at = acc.add(g * r + c);
                V::load_part(at, n).add(even.add(odd)).store_part(at, n);
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
                let stride = tokens.len() + 1;
                let w: Vec<f32> = random.values(n_group * stride).iter().map(|w| w.abs()).collect();
                for level in Level::available() {
                    let mut acc = vec![0.5; n_group * r];
                    let block = Coefficients { codes: &codes, minimum: &minimum, scale: &scale };
                    coefficients_accumulate_at(
                        level, &block, &tokens, &w, stride, n_group, &mut acc,
                    );
                    for g in 0..n_group {
                        let w = &w[g * stride..][..tokens.len()];
                        let total: f32 = w.iter().sum();
                        for c in 0..r {
                            let right: f32 = tokens
                                .iter()
                                .zip(w)
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
        let w = random.values(5 * 100);
        let mut right = vec![0.0; 5 * 28];
        let minimum: Vec<f16> = random.values(28).into_iter().map(f16::from_f32).collect();
        let scale: Vec<f16> = random.values(28).into_iter().map(f16::from_f32).collect();
        let block = Coefficients { codes, minimum: &minimum, scale: &scale };
        coefficients_accumulate_at(Level::SCALAR, &block, &tokens, &w, 100, 5, &mut right);
        for level in Level::available() {
            let mut acc = vec![0.0; 5 * 28];
            coefficients_accumulate_at(level, &block, &tokens, &w, 100, 5, &mut acc);
            for (found, right) in acc.iter().zip(&right) {
                assert!((found - right).abs() < 1e-4, "{level:?}: {found} {right}");
            }
        }
    }
}
