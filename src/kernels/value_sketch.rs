//! Value sketches: a token's value as 2-bit coefficients of a low-rank basis.
//!
//! Token-major: r coefficients, r a multiple of 4 (the caller pads), in r / 4 bytes; bits
//! 2k..2k+2 of byte b are coefficient 4b + k. `coefficient[c] ~= minimum[c] + scale[c] * code[c]`.

use super::sketch::Grid;
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
    codes.fill(0);
    for c in 0..r {
        let column = || rows.iter().skip(c).step_by(r).copied();
        let grid = Grid::over(column(), 3);
        (minimum[c], scale[c]) = (grid.minimum, grid.scale);
        for (t, value) in column().enumerate() {
            codes[t * r / 4 + c / 4] |= grid.code(value) << (c % 4 * 2);
        }
    }
}

/// `acc[g][c] += sum over i of w[g * stride + i] * code[tokens[i]][c]`, the codes as whole numbers
/// (scale and minimum are the caller's), acc: `[n_group][r]`.
pub fn coefficients_accumulate(
    codes: &[u8],
    r: usize,
    tokens: &[u32],
    w: &[f32],
    stride: usize,
    n_group: usize,
    acc: &mut [f32],
) {
    assert!(r > 0 && r.is_multiple_of(4), "r = {r}");
    assert_eq!(acc.len(), n_group * r);
    assert!(n_group == 0 || (n_group - 1) * stride + tokens.len() <= w.len());
    let n_tokens = codes.len() / (r / 4);
    assert!(tokens.iter().all(|token| (*token as usize) < n_tokens), "a token has no codes");
    for (i, token) in tokens.iter().enumerate() {
        let row = &codes[*token as usize * (r / 4)..][..r / 4];
        for g in 0..n_group {
            let weight = w[g * stride + i];
            for (c, acc) in acc[g * r..][..r].iter_mut().enumerate() {
                *acc += weight * f32::from(row[c / 4] >> (c % 4 * 2) & 3);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    #[test]
    fn weighted_codes_give_the_weighted_coefficients() {
        let mut random = Random::new(4);
        for (r, n_tokens, n_group) in [(16, 64, 3), (32, 64, 4), (20, 50, 7), (4, 1, 1)] {
            let rows = random.values(n_tokens * r);
            let mut codes = vec![0xFF; n_tokens * r / 4];
            let (mut minimum, mut scale) = (vec![f16::ZERO; r], vec![f16::ZERO; r]);
            coefficients_pack(&rows, n_tokens, r, &mut codes, &mut minimum, &mut scale);
            let tokens: Vec<u32> = (0..n_tokens as u32).filter(|token| token % 3 != 1).collect();
            let stride = tokens.len() + 1;
            let w: Vec<f32> = random.values(n_group * stride).iter().map(|w| w.abs()).collect();
            let mut acc = vec![0.0; n_group * r];
            coefficients_accumulate(&codes, r, &tokens, &w, stride, n_group, &mut acc);
            for g in 0..n_group {
                let w = &w[g * stride..][..tokens.len()];
                let total: f32 = w.iter().sum();
                for c in 0..r {
                    let right: f32 =
                        tokens.iter().zip(w).map(|(t, w)| w * rows[*t as usize * r + c]).sum();
                    let found = minimum[c].to_f32() * total + scale[c].to_f32() * acc[g * r + c];
                    // A constant coefficient (one token) is rounded to f16.
                    let constant = 5e-4 * minimum[c].to_f32().abs();
                    let bound = (0.5 * scale[c].to_f32() + constant) * total + 1e-4;
                    assert!((found - right).abs() <= bound, "{found} {right} {bound}");
                }
            }
        }
    }
}
